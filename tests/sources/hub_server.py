"""A model hub on loopback: the part of the Hugging Face hub's protocol that downloading needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the hub holds, what it shall do wrong, and what it was asked."""

    files: dict[str, bytes]
    repo: str = "org/tiny"
    large: frozenset[str] = frozenset()
    """Files kept in large-file storage, which have a SHA-256."""
    gated: bool = False
    has_ranges: bool = True
    cut: dict[str, list[int]] = field(default_factory=dict)
    """For a file: after how many bytes each next download breaks off; a negative number is an answer of 500."""
    stalled: set[str] = field(default_factory=set)
    """Files whose next download sends nothing after its headers until the hub closes."""
    closing: threading.Event = field(default_factory=threading.Event)
    served: dict[str, bytes] = field(default_factory=dict)
    """Bytes sent in place of those that the listing promises."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    commit: object = COMMIT
    """What the hub calls the commit."""
    said: bytes | None = None
    """What it answers instead of its listing."""
    url: str = ""

    def downloads(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def ranges(self) -> list[str]:
        return [headers["range"] for _, _, headers in self.requests if "range" in headers]

    def listing(self) -> dict[str, object]:
        siblings: list[dict[str, object]] = []
        for name, data in self.files.items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if name in self.large:
                sibling["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        return {"id": self.repo, "modelId": self.repo, "sha": self.commit, "siblings": siblings, "tags": []}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at `hub.url` inside the block."""

    class Handler(_Handler):
        content = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    content: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.content.requests.append((self.command, path, headers))
        if self.content.gated and headers.get("authorization") != "Bearer good-token":
            return self._error(401, "GatedRepo")
        if path in (f"/api/models/{self.content.repo}/revision/{name}" for name in ("main", COMMIT)):
            body = json.dumps(self.content.listing()).encode() if self.content.said is None else self.content.said
            return self._send(200, {"Content-Type": "application/json", "Content-Length": str(len(body))}, body)
        if path.startswith(f"/api/models/{self.content.repo}/revision/"):
            return self._error(404, "RevisionNotFound")
        prefix = f"/{self.content.repo}/resolve/{COMMIT}/"
        if path.startswith(prefix) and path.removeprefix(prefix) in self.content.files:
            return self._file(path.removeprefix(prefix), with_body, headers.get("range"))
        return self._error(404, "RepoNotFound")

    def _file(self, name: str, with_body: bool, span: str | None) -> None:
        promised = self.content.files[name]
        data = self.content.served.get(name, promised)
        etag = sha256(promised) if name in self.content.large else git_sha1(promised)
        span = span if self.content.has_ranges else None
        start = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        if start > len(data):
            return self._error(416, "Range")
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers["Content-Length"] = str(len(data) - start)
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body, cuts = data[start:] if with_body else b"", self.content.cut.get(name, [])
        if with_body and cuts:
            length = cuts.pop(0)
            if length < 0:
                return self._error(500, "Broken")
            body = body[:length]
        if with_body and name in self.content.stalled:
            self.content.stalled.remove(name)
            return self._stall(headers)
        self._send(206 if span else 200, headers, body)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _stall(self, headers: dict[str, str]) -> None:
        self._send(200, headers, b"")
        self.wfile.flush()
        self.content.closing.wait()

    def _error(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"}, b"")
