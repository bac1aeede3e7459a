"""The GGUF header reader against files of the gguf package and against damaged ones."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import gguf as reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshinfer.errors import SourceError
from meshinfer.sources import gguf
from tests.sources.makers import TEMPLATE, make_gguf


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def read(data: bytes) -> gguf.GgufHeader:
    return gguf.read_header(io.BytesIO(data), len(data), "m.gguf")


def test_it_reads_what_the_reference_reads(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", weights="Q4_1")
    header, known = gguf.read_file(path), reference.GGUFReader(path)
    ours = {(t.name, t.shape, t.type, t.size_bytes, header.data_start + t.offset) for t in header.tensors}
    theirs = {
        (t.name, tuple(int(n) for n in t.shape), int(t.tensor_type), int(t.n_bytes), int(t.data_offset))
        for t in known.tensors
    }
    assert ours == theirs
    for key in header.metadata:
        assert header.metadata[key] == known.fields[key].contents()
    assert header.arrays[gguf.TOKENS] == known.fields[gguf.TOKENS].contents()


def test_it_says_what_the_model_is(good: bytes) -> None:
    header = read(good)
    assert header.architecture == "llama"
    assert header.precision == "q4_0"
    assert header.context_tokens == 512
    assert header.eos_ids == [0]
    assert header.chat_template == TEMPLATE
    gguf.check_supported(header, "m.gguf")


def test_the_type_table_is_that_of_the_reference() -> None:
    for number, (name, values, block_bytes) in gguf._TYPES.items():
        kind = reference.GGMLQuantizationType(number)
        assert (kind.name, *reference.GGML_QUANT_SIZES[kind]) == (name, values, block_bytes)


def test_every_end_of_turn_token_is_an_end(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 0}
    assert gguf.read_file(make_gguf(tmp_path / "m.gguf", extra=more)).eos_ids == [0, 7]


def test_scaled_rotary_embeddings_shorten_the_context(tmp_path: Path) -> None:
    more = {"llama.context_length": 131072, "llama.rope.scaling.original_context_length": 4096}
    assert gguf.read_file(make_gguf(tmp_path / "m.gguf", extra=more)).context_tokens == 4096


def test_llama_3_without_its_rotary_factors_is_good_for_its_first_training_length() -> None:
    factors = gguf.TensorInfo("rope_freqs.weight", (32,), 0, 0)
    metadata = {"general.architecture": "llama", "llama.context_length": 131072}
    assert gguf.GgufHeader(metadata, {}, (), 0).context_tokens == 131072
    assert gguf.GgufHeader(metadata, {}, (factors,), 0).context_tokens == 8192


def test_a_truncated_file_says_how_much_is_missing(good: bytes) -> None:
    for length in (len(good) - 1, len(good) // 2):
        with pytest.raises(SourceError, match=f"m.gguf is truncated: {len(good)} bytes expected, {length} there"):
            read(good[:length])
    with pytest.raises(SourceError, match="m.gguf is truncated: at least .* bytes expected, 100 there"):
        read(good[:100])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(cut=st.integers(0, 12000), flips=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 255)), max_size=4))
def test_damage_is_a_source_error_and_nothing_else(good: bytes, cut: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(good[:cut] if cut < 6000 else good)
    for place, value in flips:
        if place < len(data):
            data[place] = value
    try:
        header = read(bytes(data))
        gguf.check_supported(header, "m.gguf")
    except SourceError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"PK\3\4" + bytes(60), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "has GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "has GGUF version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0) + bytes(60), "claims 1099511627776 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40) + bytes(60), "claims 1099511627776 keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40) + bytes(60), "claims a string of 1099511627776 bytes"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 99) + bytes(60), "a value has the unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(60), "an array has elements of type 9"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60) + bytes(60), "truncated"),
    ],
)
def test_impossible_headers_are_refused_before_anything_is_allocated(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "its architecture is 'gemma3', the GGUF reader knows llama, qwen2, qwen3"),
        ({"weights": "Q5_0"}, "'token_embd.weight' has type Q5_0, not one of F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K"),
        ({"weights": "IQ4_XS"}, "'token_embd.weight' has type IQ4_XS"),
        ({"weights": "F32"}, "'token_embd.weight' has type F32"),
        ({"extra": {"llama.expert_count": 8}}, "it is a mixture of 8 experts"),
        ({"extra": {"llama.rope.scaling.type": "linear"}}, "scales its rotary embedding linearly"),
        ({"extra": {"split.count": 3}}, "is one of 3 parts: merge them"),
        ({"extra": {"split.count": "many"}}, "is one of many parts: merge them"),
        ({"extra": {"llama.context_length": 0}}, "its metadata lacks context_length"),
        ({"without": "general.file_type"}, "its metadata lacks general.file_type"),
        ({"without": "llama.context_length"}, "its metadata lacks context_length"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, options: dict[str, object], message: str) -> None:
    header = gguf.read_file(make_gguf(tmp_path / "m.gguf", **options))  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=message) as caught:
        gguf.check_supported(header, "m.gguf")
    assert str(caught.value).startswith("m.gguf ")


def test_a_file_that_cannot_be_opened_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot read"):
        gguf.read_file(tmp_path / "absent.gguf")
