"""A frame: the length of its header, the header in CBOR, and the bytes of its tensors.

The header is one of the message types that are handed in, told apart by their tag. Everything is checked
before it is believed: sizes before anything is allocated, the header against its type.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, get_args

import cbor2
import msgspec
import numpy as np
import numpy.typing as npt

from meshinfer.errors import MeshinferError
from meshinfer.wire.codec import Codec, CodecError, TensorHeader, decode, encode

MAX_HEADER_BYTES = 4 << 20
MAX_FRAME_BYTES = 320 << 20

_LENGTH = struct.Struct("<I")

Rows = npt.NDArray[np.float32]
M = TypeVar("M")


class FrameError(MeshinferError):
    """Bytes that are no frame; the link they came over is closed."""


class WithTensors(Protocol):
    """A message whose tensors follow the header."""

    @property
    def tensors(self) -> Sequence[TensorHeader]: ...


def pack(message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> bytes:
    """The bytes of a frame; `payloads` are those of the tensors that the message describes."""
    header = cbor2.dumps(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return b"".join((_LENGTH.pack(len(header)), header, *payloads))


def unpack(data: bytes, kinds: Any) -> tuple[Any, memoryview]:
    """The message of a frame, which is one of the union `kinds`, and the bytes after it. Raises FrameError."""
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes is longer than {MAX_FRAME_BYTES}")
    if len(data) < _LENGTH.size:
        raise FrameError(f"a frame of {len(data)} bytes is too short")
    (size,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + size
    if size > MAX_HEADER_BYTES or end > len(data):
        raise FrameError(f"a frame of {len(data)} bytes cannot have a header of {size}")
    view = memoryview(data)
    try:
        header = cbor2.loads(view[_LENGTH.size : end].tobytes())
        kind = _by_tag(kinds).get(header.get("type")) if isinstance(header, dict) else None
        message = msgspec.convert(header, kinds if kind is None else kind)
    except (cbor2.CBORDecodeError, msgspec.ValidationError, RecursionError, ValueError, OverflowError) as error:
        raise FrameError(f"a frame's header cannot be read: {error}") from error
    return message, view[end:]


@functools.cache
def _by_tag(kinds: Any) -> dict[Any, type[msgspec.Struct]]:
    """The message types of a union by their tags: converting to one type is several times faster than to a union."""
    return {kind.__struct_config__.tag: kind for kind in get_args(kinds) or (kinds,)}


def encode_all(tensors: Sequence[Rows], codec: Codec) -> tuple[tuple[TensorHeader, ...], tuple[bytes, ...]]:
    """The descriptions and the bytes of several tensors."""
    pairs = [encode(tensor, codec) for tensor in tensors]
    return tuple(header for header, _ in pairs), tuple(data for _, data in pairs)


def decode_all(message: WithTensors, payload: memoryview) -> tuple[Rows, ...]:
    """The tensors that a message describes. Raises FrameError where the bytes are not those."""
    sizes = [header.size_bytes for header in message.tensors]
    if any(size < 0 for size in sizes) or sum(sizes) != len(payload):
        raise FrameError(f"a frame's tensors have {len(payload)} bytes instead of {sum(sizes)}")
    rows, start = [], 0
    try:
        for header in message.tensors:
            rows.append(decode(header, payload[start : start + header.size_bytes]))
            start += header.size_bytes
    except CodecError as error:
        raise FrameError(str(error)) from error
    return tuple(rows)
