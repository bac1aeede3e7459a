"""Join codes survive being read aloud and typed; mistyped ones are noticed."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshinfer.security.mesh_key import KEY_BYTES, JoinCodeError, derive, join_code, key_of, mesh_fingerprint

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


@given(keys)
def test_a_code_gives_its_key_back_however_it_is_typed(key: bytes) -> None:
    code = join_code(key)
    assert re.fullmatch(r"([0-9a-hjkmnp-tv-z]{4}-){6}[0-9a-hjkmnp-tv-z]{4}", code)
    for typed in (code, code.upper(), code.replace("-", ""), code.replace("-", " "), f"  {code}\n"):
        assert key_of(typed) == key
    assert key_of(code.replace("1", "l").replace("0", "O")) == key


@given(keys, st.integers(0, 33), st.sampled_from("0123456789abcdefghjkmnpqrstvwxyz"))
def test_one_wrong_character_is_almost_always_noticed(key: bytes, place: int, symbol: str) -> None:
    code = join_code(key)
    assume(code[place] not in ("-", symbol))
    try:
        assert key_of(code[:place] + symbol + code[place + 1 :]) != key
    except JoinCodeError as error:
        assert "mistyped" in str(error)


def test_most_mistakes_are_noticed() -> None:
    missed = 0
    for number in range(1000):
        code = join_code(number.to_bytes(KEY_BYTES))
        wrong = code[:-1] + ("0" if code[-1] != "0" else "1")
        swapped = code[:5] + code[6] + code[5] + code[7:]
        for typed in {wrong, swapped} - {code}:
            try:
                key_of(typed)
                missed += 1
            except JoinCodeError:
                pass
    assert missed < 5


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "has 28 characters, this one 0"),
        ("abcd-efgh", "has 28 characters, this one 8"),
        ("u" * 28, "has no 'u'"),
        ("7?" * 14, "has no '?'"),
        ("\u0661" * 28, "has no '\u0661'"),
        ("0" * 27 + "1", "its checksum does not fit"),
        ("0" * 4000, "has 28 characters, this one 4000"),
    ],
)
def test_what_is_wrong_with_a_code_is_said(code: str, said: str) -> None:
    with pytest.raises(JoinCodeError) as caught:
        key_of(code)
    assert said in str(caught.value)


@given(keys, keys)
def test_what_is_derived_differs_by_key_and_by_purpose(one: bytes, other: bytes) -> None:
    assume(one != other)
    assert mesh_fingerprint(one) != mesh_fingerprint(other)
    assert derive(one, "a") != derive(one, "b")
    assert re.fullmatch(r"[0-9a-f]{16}", mesh_fingerprint(one)) and one.hex() not in mesh_fingerprint(one)
