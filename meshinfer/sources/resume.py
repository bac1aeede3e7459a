"""One file over HTTP that goes on where it broke, within a call and in the next one.

huggingface_hub 1.x throws away what an interrupted download has, so only its session and headers are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import httpx

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0
"""How long a connection may bring nothing."""
_PAUSES_S = (0.5, 2.0, 5.0)
_PARTIAL, _RANGE_NOT_SATISFIABLE = 206, 416


def fetch_resumable(
    client: httpx.Client,
    url: str,
    headers: Mapping[str, str],
    part: Path,
    size_bytes: int,
    check: Callable[[httpx.Response], None],
    report: Callable[[int], None],
) -> None:
    """Complete `part`, which may have the file's beginning already; it is kept when this fails.

    What comes after `size_bytes` is not read. `check` raises for an answer that is no success; `report` is given the
    bytes that are there. Broken connections are tried again, at once where the last try brought anything. Raises
    httpx.TransportError, OSError.
    """
    import httpx

    def stream() -> None:
        start = _size(part)
        asked = {**headers, "Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
        with client.stream("GET", url, headers=asked, follow_redirects=True, timeout=TIMEOUT_S) as response:
            if start and response.status_code == _RANGE_NOT_SATISFIABLE:  # it is whole, or longer than whole
                return
            check(response)
            resumed = response.status_code == _PARTIAL
            with part.open("ab" if resumed else "wb") as file:
                _write(response, file, start if resumed else 0, size_bytes, report)

    pauses = list(_PAUSES_S)
    while True:
        before = _size(part)
        try:
            stream()
            return
        except httpx.TransportError:
            if _size(part) > before:
                pauses = list(_PAUSES_S)
            elif pauses:
                time.sleep(pauses.pop(0))
            else:
                raise


def _write(response: httpx.Response, file: BinaryIO, done: int, size_bytes: int, report: Callable[[int], None]) -> None:
    for chunk in response.iter_raw(CHUNK_BYTES):
        file.write(chunk)
        done += len(chunk)
        report(done)
        if done > size_bytes:  # too long, as its hash will say; a server may go on for ever
            return


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
