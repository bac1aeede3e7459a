"""The header of a GGUF file, read with bounds, and whether openvino-genai can convert what it describes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshinfer.errors import SourceError

_MAX_STRING_BYTES = 16 << 20
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_VOCABULARY = 1 << 22

TOKENS, TOKEN_TYPES, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# ggml type -> (name, values per block, bytes per block)
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# What openvino-genai 2026.4 converts, found by giving it one small file of every kind.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
MATRIX_TYPES = ("F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
VECTOR_TYPES = ("F32", "F16")

# Without the rotary factors that openvino-genai leaves out, Llama 3.x is good for its first training length.
_LLAMA3_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its name, shape (fastest dimension first), ggml type and place after the header."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def type_name(self) -> str:
        return _TYPES[self.type][0] if self.type in _TYPES else f"type {self.type}"

    @property
    def values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        _, values, block_bytes = _TYPES[self.type]
        return -(-self.values // values) * block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of one file; of arrays only the vocabulary's are kept."""

    metadata: dict[str, Any]
    arrays: dict[str, list[Any]]
    tensors: tuple[TensorInfo, ...]
    data_start: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def precision(self) -> str:
        """The type that most weights have, such as "q4_1"."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors:
            if len(tensor.shape) > 1:
                weights[tensor.type_name] += tensor.values
        return weights.most_common(1)[0][0].lower() if weights else "none"

    @property
    def context_tokens(self) -> int:
        """The context that the converted model is good for: scaled rotary embeddings are not converted."""
        arch = self.architecture
        context = int(self.metadata[f"{arch}.context_length"])
        original = self.metadata.get(f"{arch}.rope.scaling.original_context_length")
        if isinstance(original, int) and original > 0:
            context = min(context, original)
        if any(tensor.name == "rope_freqs.weight" for tensor in self.tensors):
            context = min(context, _LLAMA3_CONTEXT_TOKENS)
        return context

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end an answer."""
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = (self.metadata.get(f"tokenizer.ggml.{name}") for name in names)
        return list(dict.fromkeys(value for value in found if isinstance(value, int)))

    @property
    def chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) and template else None

    @property
    def converted_bytes(self) -> int:
        """About the size of the IR that the conversion writes: Q6_K becomes F16 there."""
        return sum(t.values * 2 if t.type_name == "Q6_K" else t.size_bytes for t in self.tensors)


def read_file(path: Path) -> GgufHeader:
    """Read the header of a file and check its length. Raises SourceError."""
    try:
        with path.open("rb") as file:
            return read_header(file, path.stat().st_size, path.name)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error


def read_header(file: BinaryIO, file_bytes: int, name: str) -> GgufHeader:
    """Read a header from a seekable stream of `file_bytes` bytes.

    Raises SourceError where it is no GGUF, is damaged, or has fewer bytes than its tensors need.
    """
    reader = _Reader(file, file_bytes, name)
    if reader.take(4) != b"GGUF":
        raise SourceError(f"{name} is not a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        raise SourceError(f"{name} has GGUF version {version}; versions 2 and 3 are read")
    tensor_count = reader.count("tensors", _MAX_TENSORS)
    key_count = reader.count("keys", _MAX_KEYS)
    metadata: dict[str, Any] = {}
    arrays: dict[str, list[Any]] = {}
    for _ in range(key_count):
        key = reader.string()
        kind = reader.number("I")
        if kind != _ARRAY:
            metadata[key] = reader.value(kind)
        elif key in (TOKENS, TOKEN_TYPES, MERGES):
            arrays[key] = reader.array()
        else:
            reader.skip_array()
    tensors = tuple(reader.tensor() for _ in range(tensor_count))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise SourceError(f"{name} is damaged: its alignment is {alignment}")
    data_start = -(-reader.position // alignment) * alignment
    sized = [tensor for tensor in tensors if tensor.type in _TYPES]
    expected = max((data_start + t.offset + t.size_bytes for t in sized), default=data_start)
    if expected > file_bytes:
        raise SourceError(f"{name} is truncated: {expected} bytes expected, {file_bytes} there")
    return GgufHeader(metadata, arrays, tensors, data_start)


def check_supported(header: GgufHeader, name: str) -> None:
    """Refuse what openvino-genai cannot convert, or would convert wrongly. Raises SourceError naming it."""
    arch, data = header.architecture, header.metadata
    if arch not in ARCHITECTURES:
        raise unsupported(name, f"its architecture is '{arch}', the GGUF reader knows {', '.join(ARCHITECTURES)}")
    if data.get(f"{arch}.expert_count", 0):
        raise unsupported(name, f"it is a mixture of {data[f'{arch}.expert_count']} experts")
    if data.get("split.count", 0) not in (0, 1):
        raise SourceError(f"{name} is one of {data['split.count']} parts: merge them with llama-gguf-split --merge")
    required = ("context_length", "block_count", "embedding_length", "attention.head_count")
    missing = [key for key in required if not _is_positive(data.get(f"{arch}.{key}"))]
    if missing or not isinstance(data.get("general.file_type"), int):
        raise unsupported(name, f"its metadata lacks {missing[0] if missing else 'general.file_type'}")
    if data.get(f"{arch}.rope.scaling.type") == "linear":
        raise unsupported(name, "it scales its rotary embedding linearly")
    for tensor in header.tensors:
        known = MATRIX_TYPES if len(tensor.shape) > 1 else VECTOR_TYPES
        if tensor.type_name not in known:
            raise unsupported(name, f"'{tensor.name}' has type {tensor.type_name}, not one of {', '.join(known)}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def unsupported(name: str, why: str) -> SourceError:
    """The error for a GGUF that is well-formed and cannot be used."""
    return SourceError(f"{name} cannot be converted: {why}; a Hugging Face checkpoint or OpenVINO IR of it may work")


class _Reader:
    """Reads little-endian values; every length is checked against the file before it is believed."""

    def __init__(self, file: BinaryIO, file_bytes: int, name: str) -> None:
        self._file, self._bytes, self._name = file, file_bytes, name
        self.position = 0

    def take(self, size: int) -> bytes:
        self._demand(size)
        data = self._file.read(size)
        if len(data) != size:
            raise self._truncated(size)
        self.position += size
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def count(self, what: str, limit: int) -> int:
        value = int(self.number("Q"))
        if value > limit:
            raise SourceError(f"{self._name} is damaged: it claims {value} {what}")
        return value

    def string(self) -> str:
        size = int(self.number("Q"))
        if size > _MAX_STRING_BYTES:
            raise SourceError(f"{self._name} is damaged: it claims a string of {size} bytes")
        return self.take(size).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise SourceError(f"{self._name} is damaged: a value has the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, length = self.number("I"), self.count("tokens", _MAX_VOCABULARY)
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        if kind not in _SCALARS:
            raise SourceError(f"{self._name} is damaged: an array has elements of type {kind}")
        code = f"<{length}{_SCALARS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))

    def skip_array(self) -> None:
        kind, length = self.number("I"), int(self.number("Q"))
        if kind == _STRING:
            self._demand(length * 8)
            for _ in range(length):
                self._skip(int(self.number("Q")))
        elif kind in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[kind]))
        else:
            raise SourceError(f"{self._name} is damaged: an array has elements of type {kind}")

    def tensor(self) -> TensorInfo:
        name = self.string()
        dimensions = int(self.number("I"))
        if dimensions > _MAX_DIMENSIONS:
            raise SourceError(f"{self._name} is damaged: '{name}' has {dimensions} dimensions")
        shape = tuple(int(self.number("Q")) for _ in range(dimensions))
        return TensorInfo(name, shape, int(self.number("I")), int(self.number("Q")))

    def _skip(self, size: int) -> None:
        self._demand(size)
        self._file.seek(size, 1)
        self.position += size

    def _demand(self, size: int) -> None:
        if self.position + size > self._bytes:
            raise self._truncated(size)

    def _truncated(self, size: int) -> SourceError:
        expected = self.position + size
        return SourceError(f"{self._name} is truncated: at least {expected} bytes expected, {self._bytes} there")
