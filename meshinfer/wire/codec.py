"""Hidden states on the wire: f32, f16 or bf16, each compressed with LZ4 or not.

f32 is exact. f16 has more digits and less range: a tensor with a value beyond it goes as f32. bf16 rounds to the
nearest even number that keeps the upper half of an f32.
"""

from __future__ import annotations

from typing import Literal, get_args

import lz4.block  # type: ignore[import-untyped,unused-ignore]
import msgspec
import numpy as np
import numpy.typing as npt

from meshinfer.errors import MeshinferError

Rows = npt.NDArray[np.float32]

Codec = Literal["f32", "f16", "bf16", "f32+lz4", "f16+lz4", "bf16+lz4"]
CODECS: tuple[Codec, ...] = get_args(Codec)

MAX_TENSOR_BYTES = 256 << 20
"""Of one tensor as f32: a prefill chunk of 8192 rows of 8192 values."""

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


class CodecError(MeshinferError):
    """Bytes that are not the tensor their description promises."""


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the bytes of one tensor are: [rows, width] f32 in a codec."""

    codec: Codec
    rows: int
    width: int
    size_bytes: int


def encode(rows: Rows, codec: Codec) -> tuple[TensorHeader, bytes]:
    """The bytes of `rows`, [rows, width] f32, and their description; f16 falls back to f32 where it overflows."""
    kind, _, compression = codec.partition("+")
    if kind == "f16" and not np.abs(rows, dtype=np.float32).max(initial=0.0) <= np.finfo(np.float16).max:
        kind = "f32"
    data = _narrowed(rows, kind)
    if compression:
        data = lz4.block.compress(data, mode="fast", store_size=False)
    name: Codec = next(name for name in CODECS if name == f"{kind}{'+' if compression else ''}{compression}")
    return TensorHeader(name, rows.shape[0], rows.shape[1], len(data)), data


def decode(header: TensorHeader, data: bytes | memoryview) -> Rows:
    """[rows, width] f32, in memory of its own. Raises CodecError, before anything is allocated for sizes that lie."""
    kind, _, compression = header.codec.partition("+")
    count = header.rows * header.width
    if header.rows < 0 or header.width < 1 or count * 4 > MAX_TENSOR_BYTES:
        raise CodecError(f"a tensor of {header.rows} x {header.width} is more than a frame may hold")
    if len(data) != header.size_bytes:
        raise CodecError(f"a tensor has {len(data)} bytes instead of {header.size_bytes}")
    expected = count * _BYTES[kind]
    if compression:
        try:
            data = lz4.block.decompress(data, uncompressed_size=expected)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CodecError(f"a tensor cannot be decompressed: {error}") from error
    if len(data) != expected:
        raise CodecError(f"a tensor of {header.rows} x {header.width} has {len(data)} bytes instead of {expected}")
    return _widened(data, kind).reshape(header.rows, header.width)


def _narrowed(rows: Rows, kind: str) -> bytes:
    if kind == "f32":
        return rows.astype("<f4", copy=False).tobytes()
    if kind == "f16":
        return rows.astype("<f2").tobytes()
    bits = np.ascontiguousarray(rows, "<f4").view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(rows), 0x7FC0, rounded).astype("<u2").tobytes()


def _widened(data: bytes | memoryview, kind: str) -> Rows:
    if kind == "f32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    if kind == "f16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
