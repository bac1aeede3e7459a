"""The key that makes a mesh: 128 bits that every node has and nobody else.

People carry it as a join code: seven groups of four characters that can be typed and read aloud (Crockford's
base 32: no letter that looks like a digit), the last twelve bits of which are a checksum.
"""

from __future__ import annotations

import hashlib
import hmac

from meshinfer.errors import InputError

KEY_BYTES = 16
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ALIKE = str.maketrans("ilo", "110")
_SYMBOLS, _GROUP = 28, 4
_CHECK_BITS = 12


class JoinCodeError(InputError):
    """A join code that was mistyped."""


def join_code(key: bytes) -> str:
    """The code of a key of `KEY_BYTES`."""
    number = int.from_bytes(key) << _CHECK_BITS | _checksum(key)
    symbols = "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_SYMBOLS)))
    return "-".join(symbols[start : start + _GROUP] for start in range(0, _SYMBOLS, _GROUP))


def key_of(code: str) -> bytes:
    """The key of a join code, typed in upper or lower case, with or without hyphens. Raises JoinCodeError."""
    symbols = "".join(code.split()).replace("-", "").lower().translate(_ALIKE)
    strange = sorted(set(symbols) - set(_ALPHABET))
    if strange:
        raise JoinCodeError(f"a join code has no '{strange[0]}': copy it again from a node that is in the mesh")
    if len(symbols) != _SYMBOLS:
        raise JoinCodeError(f"a join code has {_SYMBOLS} characters, this one {len(symbols)}: is it all there?")
    number = 0
    for symbol in symbols:
        number = number << 5 | _ALPHABET.index(symbol)
    key = (number >> _CHECK_BITS).to_bytes(KEY_BYTES)
    if number & (1 << _CHECK_BITS) - 1 != _checksum(key):
        raise JoinCodeError("this join code is mistyped: its checksum does not fit; compare it group by group")
    return key


def mesh_fingerprint(key: bytes) -> str:
    """What may be shown of a mesh: tells meshes apart and says nothing of the key; 16 hex digits."""
    return derive(key, "fingerprint")[:8].hex()


def derive(key: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose, from which the key cannot be had back (HMAC-SHA-256 as in RFC 5869, expand)."""
    return hmac.digest(key, f"meshinfer {purpose}\x01".encode(), "sha256")


def _checksum(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"meshinfer join code" + key).digest()[:2]) >> 16 - _CHECK_BITS
