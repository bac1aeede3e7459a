"""Real TLS between real identities: who gets in, and what the others learn."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from meshinfer.config import Folders
from meshinfer.errors import InputError
from meshinfer.security.certificates import certified_id
from meshinfer.security.identity import Identity, forget_node, load_identity, tls_contexts
from meshinfer.security.mesh_key import JoinCodeError
from meshinfer.types import NodeId


@contextmanager
def listening(context: ssl.SSLContext) -> Iterator[tuple[int, list[NodeId | Exception]]]:
    """A server that greets whoever gets in; gives its port and who came, or why they did not."""
    came: list[NodeId | Exception] = []
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        connection, _ = server.accept()
        connection.settimeout(10)
        try:
            with context.wrap_socket(connection, server_side=True) as link:
                link.sendall(b"welcome")
                came.append(certified_id(link.getpeercert(binary_form=True) or b""))
        except (OSError, ssl.SSLError) as error:
            came.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield server.getsockname()[1], came
    finally:
        thread.join(20)
        server.close()


def call(port: int, context: ssl.SSLContext) -> tuple[bytes, NodeId]:
    """What the server says, and who it is."""
    with (
        socket.create_connection(("127.0.0.1", port), 10) as connection,
        context.wrap_socket(connection) as link,
    ):
        return link.recv(100), certified_id(link.getpeercert(binary_form=True) or b"")


@pytest.fixture
def alice(tmp_path: Path) -> Identity:
    return load_identity(Folders(tmp_path / "alice"))


def test_two_nodes_of_a_mesh_know_each_other(tmp_path: Path, alice: Identity) -> None:
    bob = load_identity(Folders(tmp_path / "bob"), alice.join_code)
    assert bob.id != alice.id and bob.mesh_fingerprint == alice.mesh_fingerprint
    with listening(tls_contexts(alice)[0]) as (port, came):
        assert call(port, tls_contexts(bob)[1]) == (b"welcome", alice.id)
    assert came == [bob.id]


def test_a_node_of_another_mesh_gets_no_word(tmp_path: Path, alice: Identity) -> None:
    mallory = load_identity(Folders(tmp_path / "mallory"))
    with listening(tls_contexts(alice)[0]) as (port, came), pytest.raises(ssl.SSLCertVerificationError):
        call(port, tls_contexts(mallory)[1])
    assert isinstance(came[0], OSError)


def test_trusting_everybody_does_not_help(tmp_path: Path, alice: Identity) -> None:
    mallory = load_identity(Folders(tmp_path / "mallory"))
    gullible = tls_contexts(mallory)[1]
    gullible.verify_mode = ssl.CERT_NONE
    for context in (gullible, _without_certificate()):
        with listening(tls_contexts(alice)[0]) as (port, came), pytest.raises(OSError):
            assert call(port, context)[0] == b"", "a word got out"
            raise ConnectionError
        assert isinstance(came[0], OSError)


def _without_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_older_tls_is_refused(alice: Identity) -> None:
    old = tls_contexts(alice)[1]
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with listening(tls_contexts(alice)[0]) as (port, _), pytest.raises((ssl.SSLError, ConnectionError)):
        call(port, old)


def test_a_home_keeps_its_identity_until_it_joins_another_mesh(tmp_path: Path, alice: Identity) -> None:
    folders = Folders(tmp_path / "alice")
    assert load_identity(folders) == alice
    other = load_identity(Folders(tmp_path / "other"))
    moved = load_identity(folders, other.join_code)
    assert moved.id == alice.id and moved.mesh_key == other.mesh_key
    assert load_identity(folders) == moved
    forget_node(folders)
    assert load_identity(folders).id != alice.id and load_identity(folders).mesh_key == other.mesh_key


@pytest.mark.skipif(os.name == "nt", reason="modes of files are not how Windows keeps secrets")
def test_secrets_are_for_their_owner(alice: Identity) -> None:
    assert stat.S_IMODE(alice.folder.stat().st_mode) == 0o700
    for name in ("node.key", "mesh.code"):
        assert stat.S_IMODE((alice.folder / name).stat().st_mode) == 0o600


def test_a_wrong_code_changes_nothing(tmp_path: Path, alice: Identity) -> None:
    with pytest.raises(JoinCodeError):
        load_identity(Folders(tmp_path / "alice"), "0" * 28)
    assert load_identity(Folders(tmp_path / "alice")) == alice
    with pytest.raises(JoinCodeError):
        load_identity(Folders(tmp_path / "new"), "nonsense")
    assert not (tmp_path / "new").exists()


def test_damaged_secrets_say_what_to_do(tmp_path: Path, alice: Identity) -> None:
    folders = Folders(tmp_path / "alice")
    (alice.folder / "mesh.code").write_text("gone")
    with pytest.raises(InputError, match=r"mesh\.code is damaged: .*--join"):
        load_identity(folders)
    (alice.folder / "node.key").write_text("gone")
    with pytest.raises(InputError, match=r"node\.key is damaged: delete it"):
        load_identity(folders)
    foreign = generate_private_key(SECP256R1())
    pem = foreign.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (alice.folder / "node.key").write_bytes(pem)
    with pytest.raises(InputError, match="a key of another kind"):
        load_identity(folders)
