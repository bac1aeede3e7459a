"""Certificates by which nodes know each other: whoever has the mesh key can make one, nobody else.

The key of the certificate authority is derived from the mesh key, so it is nowhere but where the mesh
key is. Mutual TLS with that authority as the only trusted one is then, for both sides, the proof
that the other has the mesh key, bound to the very channel. Dates are wide apart: clocks of office PCs go wrong.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from meshinfer.errors import MeshinferError
from meshinfer.security.mesh_key import derive
from meshinfer.types import NodeId

_BEGIN, _END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "meshinfer mesh")])


class CertificateError(MeshinferError):
    """A certificate that is not one of a node."""


def authority_pem(mesh_key: bytes) -> bytes:
    """The certificate of the mesh's authority; all nodes make the same one."""
    key = _authority_key(mesh_key)
    return _certificate(_AUTHORITY, key.public_key(), key, authority=True)


def node_pem(mesh_key: bytes, node_key: Ed25519PrivateKey) -> bytes:
    """The certificate of a node, which says its id and nothing else."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id(node_key.public_key()))])
    return _certificate(name, node_key.public_key(), _authority_key(mesh_key), authority=False)


def private_pem(node_key: Ed25519PrivateKey) -> bytes:
    """A private key as files keep it."""
    return node_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def node_id(public_key: Ed25519PublicKey) -> NodeId:
    """The id of the node that has this key: 32 hex digits of its hash."""
    raw = public_key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    return NodeId(hashlib.sha256(raw).hexdigest()[:32])


def certified_id(certificate_der: bytes) -> NodeId:
    """The id of the node that showed this certificate over TLS. Raises CertificateError."""
    try:
        key = x509.load_der_x509_certificate(certificate_der).public_key()
    except ValueError as error:
        raise CertificateError(f"a peer's certificate cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise CertificateError("a peer's certificate has a key of another kind")
    return node_id(key)


def _authority_key(mesh_key: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derive(mesh_key, "certificate authority"))


def _certificate(name: x509.Name, public_key: Ed25519PublicKey, signer: Ed25519PrivateKey, *, authority: bool) -> bytes:
    serial = int(node_id(public_key), 16) >> 1 | 1  # a function of the key: the same certificate every time
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    usage = x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder(_AUTHORITY, name, public_key, serial, _BEGIN, _END)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(issuer_key, critical=False)
    )
    return builder.sign(signer, algorithm=None).public_bytes(Encoding.PEM)
