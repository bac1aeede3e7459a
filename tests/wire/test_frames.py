"""Frames and tensors come out as they went in; anything else is refused and nothing crashes."""

from __future__ import annotations

import struct

import cbor2
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshinfer.wire.codec import CODECS, Codec, CodecError, TensorHeader, decode, encode
from meshinfer.wire.frames import MAX_HEADER_BYTES, FrameError, decode_all, encode_all, pack, unpack


class Ping(msgspec.Struct, tag="ping", frozen=True):
    number: int
    note: bytes = b""


class Work(msgspec.Struct, tag="work", frozen=True):
    step: int
    tensors: tuple[TensorHeader, ...] = ()


Kinds = Ping | Work

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
tensors = hnp.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 7)), elements=finite)


@given(tensors, st.sampled_from(["f32", "f32+lz4"]))
def test_f32_is_exact(rows: np.ndarray, codec: Codec) -> None:
    header, data = encode(rows, codec)
    assert header.codec == codec
    np.testing.assert_array_equal(decode(header, data), rows)


@given(hnp.arrays(np.float32, (3, 4), elements=st.floats(-65504, 65504, width=32)), st.sampled_from(["f16", "f16+lz4"]))
def test_f16_is_what_numpy_rounds_to(rows: np.ndarray, codec: Codec) -> None:
    header, data = encode(rows, codec)
    assert header.codec == codec
    np.testing.assert_array_equal(decode(header, data), rows.astype(np.float16).astype(np.float32))


@given(hnp.arrays(np.float32, (2, 3), elements=finite))
def test_bf16_is_off_by_less_than_one_part_in_256(rows: np.ndarray) -> None:
    header, data = encode(rows, "bf16")
    back = decode(header, data)
    np.testing.assert_array_equal(np.sign(back)[np.abs(rows) > 1e-37], np.sign(rows)[np.abs(rows) > 1e-37])
    close = np.abs(back - rows) <= np.abs(rows) / 256 + 1e-40
    assert (close | (np.abs(rows) > 3.38e38)).all()
    assert (encode(back, "bf16")[1]) == data, "what was rounded stays as it is"


def test_bf16_rounds_to_even_and_keeps_what_is_no_number() -> None:
    rows = np.array([[1.0 + 2**-8, 1.0 + 3 * 2**-8, np.inf, -np.inf, np.nan]], np.float32)
    back = decode(*encode(rows, "bf16"))
    assert back[0, :4].tolist() == [1.0, 1.0 + 2**-6, np.inf, -np.inf] and np.isnan(back[0, 4])


@pytest.mark.parametrize("value", [65520.0, -1e30, np.inf, np.nan])
def test_what_f16_cannot_hold_goes_as_f32(value: float) -> None:
    rows = np.array([[1.0, value]], np.float32)
    header, data = encode(rows, "f16+lz4")
    assert header.codec == "f32+lz4"
    np.testing.assert_array_equal(decode(header, data), rows)


@given(st.lists(tensors, max_size=3), st.sampled_from(CODECS), st.integers())
def test_a_frame_comes_out_as_it_went_in(rows: list[np.ndarray], codec: Codec, step: int) -> None:
    headers, payloads = encode_all(rows, codec)
    step %= 1 << 63
    message, rest = unpack(pack(Work(step, headers), payloads), Kinds)
    assert message == Work(step, headers)
    for got, (header, data) in zip(decode_all(message, rest), zip(headers, payloads, strict=True), strict=True):
        np.testing.assert_array_equal(got, decode(header, data))


def test_messages_are_told_apart_and_bytes_stay_bytes() -> None:
    assert unpack(pack(Ping(7, b"\x00\xff")), Kinds)[0] == Ping(7, b"\x00\xff")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for frame in (data, struct.pack("<I", max(0, len(data) - 3)) + data, struct.pack("<I", len(data)) + data):
        try:
            message, rest = unpack(frame, Kinds)
            if isinstance(message, Work):
                decode_all(message, rest)
        except FrameError:
            pass


@settings(max_examples=300)
@given(st.integers(0, 10_000), st.integers(0, 255), st.sampled_from(CODECS))
def test_a_changed_byte_gives_other_numbers_or_is_refused(place: int, value: int, codec: Codec) -> None:
    headers, payloads = encode_all([np.arange(12, dtype=np.float32).reshape(3, 4)], codec)
    frame = bytearray(pack(Work(5, headers), payloads))
    frame[place % len(frame)] = value
    try:
        message, rest = unpack(bytes(frame), Kinds)
        if isinstance(message, Work):
            decode_all(message, rest)
    except FrameError:
        pass


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (TensorHeader("f32", 1 << 40, 1 << 20, 4), b"1234", "more than a frame may hold"),
        (TensorHeader("f32", -1, -4, 4), b"1234", "more than a frame may hold"),
        (TensorHeader("f32", 1, 1, 5), b"1234", "has 4 bytes instead of 5"),
        (TensorHeader("f32", 1, 2, 4), b"1234", "has 4 bytes instead of 8"),
        (TensorHeader("f32+lz4", 1000, 1000, 4), b"\xff" * 4, "cannot be decompressed"),
        (TensorHeader("f16+lz4", 1, 4, 8), b"\x70" + b"1234567", "instead of 8"),
    ],
)
def test_a_description_that_lies_is_refused(header: TensorHeader, data: bytes, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        decode(header, data)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "too short"),
        (struct.pack("<I", 100) + b"x", "cannot have a header of 100"),
        (struct.pack("<I", MAX_HEADER_BYTES + 1) + b"x" * (MAX_HEADER_BYTES + 1), "cannot have a header"),
        (struct.pack("<I", 1) + b"\xff", "cannot be read"),
        (struct.pack("<I", 4000) + b"\x81" * 4000, "cannot be read"),
        (struct.pack("<I", 9) + b"\x9b" + b"\x7f" * 8, "cannot be read"),
        (pack(Ping(1))[:-1], "cannot have a header"),
        (struct.pack("<I", len(cbor2.dumps({"type": "pong"}))) + cbor2.dumps({"type": "pong"}), "Invalid value 'pong'"),
        (struct.pack("<I", len(cbor2.dumps({"type": "ping"}))) + cbor2.dumps({"type": "ping"}), "missing required"),
    ],
)
def test_what_is_no_frame_says_why(frame: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        unpack(frame, Kinds)


def test_bytes_too_many_or_too_few_are_refused() -> None:
    headers, payloads = encode_all([np.ones((2, 2), np.float32)], "f32")
    for wrong in (payloads + (b"x",), ()):
        message, rest = unpack(pack(Work(1, headers), wrong), Kinds)
        with pytest.raises(FrameError, match="instead of 16"):
            decode_all(message, rest)
