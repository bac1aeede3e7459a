"""Who a node is, kept in its home: its own key, and the key of its mesh."""

from __future__ import annotations

import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from meshinfer.config import Folders
from meshinfer.errors import InputError
from meshinfer.files import disk
from meshinfer.security.certificates import authority_pem, node_id, node_pem, private_pem
from meshinfer.security.mesh_key import KEY_BYTES, JoinCodeError, join_code, key_of, mesh_fingerprint
from meshinfer.types import NodeId

_NODE, _MESH, _CERTIFICATE = "node.key", "mesh.code", "node.pem"


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's id and the key of its mesh. `folder` holds them as files that only their owner may read."""

    id: NodeId
    mesh_key: bytes
    folder: Path

    @property
    def join_code(self) -> str:
        return join_code(self.mesh_key)

    @property
    def mesh_fingerprint(self) -> str:
        return mesh_fingerprint(self.mesh_key)


def load_identity(folders: Folders, code: str | None = None) -> Identity:
    """The identity of a home; what is missing is made. `code` joins another mesh than the one it had.

    Raises JoinCodeError, InputError for files that cannot be read, NoSpaceError.
    """
    folder = folders.identity
    wanted = key_of(code) if code is not None else None
    with disk.converted(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        node = _node_key(folder / _NODE)
        mesh_key = _mesh_key(folder / _MESH, wanted)
        disk.write_atomic(folder / _CERTIFICATE, node_pem(mesh_key, node).decode())
    return Identity(node_id(node.public_key()), mesh_key, folder)


def forget_node(folders: Folders) -> None:
    """Delete the node's own key, so that the next start is another node: for a home that was copied."""
    with disk.converted(folders.identity):
        (folders.identity / _NODE).unlink(missing_ok=True)


def tls_contexts(identity: Identity) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For accepting links and for opening them: TLS 1.3, and both sides show a certificate of this mesh."""
    return _context(identity, ssl.PROTOCOL_TLS_SERVER), _context(identity, ssl.PROTOCOL_TLS_CLIENT)


def _context(identity: Identity, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a peer is known by its key, whatever its address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority_pem(identity.mesh_key).decode())
    context.load_cert_chain(identity.folder / _CERTIFICATE, identity.folder / _NODE)
    return context


def _node_key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        _write_secret(path, private_pem(made).decode())
        return made
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged: delete it, and this machine becomes a new node") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} holds a key of another kind: delete it, and this machine becomes a new node")
    return key


def _mesh_key(path: Path, wanted: bytes | None) -> bytes:
    if wanted is None and path.exists():
        try:
            return key_of(path.read_text("utf-8", errors="replace"))
        except JoinCodeError as error:
            raise InputError(f"{path} is damaged: {error}; delete it, or join again with --join") from error
    key = wanted or secrets.token_bytes(KEY_BYTES)
    _write_secret(path, f"{join_code(key)}\n")
    return key


def _write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read; on Windows the user's own folder sees to that."""
    disk.write_atomic(path, text, mode=0o600)
