"""Certificates and keys to try a deployment out with; for a real one, use those of your
organisation.

    python -m fl_lightning.deploy.certificates certs --hosts server.example.org --nodes 2

writes ``ca.crt``, ``server.pem`` and ``server.key`` for nginx and the SuperLink, and for each node
``node<i>`` and ``node<i>.pub``. The certificate also holds for ``localhost`` and ``127.0.0.1``, by
which nginx and ``deploy`` reach the SuperLink. The authority's key is not kept: when the
certificate ends, everything is made anew. It needs the package ``cryptography``, which Flower
brings along.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fl_lightning.errors import InputError, as_bad_input, require

LOOPBACK = ("localhost", "127.0.0.1")  # by which nginx and ``deploy`` reach the SuperLink


def make_certificates(folder: Path, hosts: Sequence[str], nodes: int, days: float = 30.0) -> None:
    """Write an authority, a server certificate that it signed, and keys of nodes.

    Args:
        folder: it must have none of the files yet.
        hosts: names and addresses by which the server is dialled, at least one.
        nodes: number of nodes.
        days: until the certificates expire, counted from now; a negative number makes expired ones,
            for tests.

    Raises:
        InputError: the folder has one of the files or cannot be written, a host or ``days`` can be
            in no certificate, or ``cryptography`` is not installed. Then nothing is written.
    """
    install = "pip install 'fl_lightning[deploy]'"
    with as_bad_input("certificates", "they need the package cryptography", install, ImportError):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    keys = [name for number in range(nodes) for name in (f"node{number}", f"node{number}.pub")]
    for name in ("ca.crt", "server.pem", "server.key", *keys):
        require(
            not os.path.lexists(folder / name),
            f"{folder}",
            f"it has {name} already",
            "name another folder",
        )
    errors = (ValueError, OverflowError)
    with as_bad_input(f"--days {days:g}", "no certificate ends then", "write --days 30", *errors):
        ends = datetime.now(timezone.utc) + timedelta(days=days)
        x509.CertificateBuilder().not_valid_after(ends)
    names = []
    for host in hosts:
        instead = "write the form of DNS, as xn--bcher-kva.example for bücher.example"
        with as_bad_input(f"--hosts {host}", "no certificate has this name", instead, ValueError):
            names.append(_name(host, x509))
            x509.NameAttribute(NameOID.COMMON_NAME, host[:64])

    def certificate(
        name: str, key: Any, issuer: Any, signer: Any, extensions: Sequence[Any]
    ) -> Any:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = x509.CertificateBuilder(issuer or subject, subject, key.public_key())
        made = made.serial_number(x509.random_serial_number()).not_valid_after(ends)
        made = made.not_valid_before(min(ends, datetime.now(timezone.utc)) - timedelta(days=1))
        for extension, critical in extensions:
            made = made.add_extension(extension, critical)
        return made.sign(signer, hashes.SHA256())

    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    its_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    usage = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    authority = certificate(
        "fl_lightning test authority",
        authority_key,
        None,
        authority_key,
        [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), True),
            (its_id, False),
        ],
    )
    server = certificate(
        hosts[0][:64],
        server_key,
        authority.subject,
        authority_key,
        [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.SubjectAlternativeName(names), False),
            (x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(its_id), False),
        ],
    )
    with as_bad_input(f"{folder}", "it cannot be written", "name a folder of yours", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "ca.crt", _pem(authority))
        _write(folder / "server.pem", _pem(server))
        _write(folder / "server.key", _private(server_key, "TraditionalOpenSSL"))
        for number in range(nodes):
            key = ec.generate_private_key(ec.SECP384R1())
            _write(folder / f"node{number}", _private(key, "OpenSSH"))
            _write(folder / f"node{number}.pub", _public(key))


def _name(host: str, x509: Any) -> Any:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private(key: Any, form: str) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, getattr(PrivateFormat, form), NoEncryption())


def _public(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def _write(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can read, whatever it holds."""
    with open(
        path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)
    ) as file:
        file.write(data)


def main(words: Sequence[str] | None = None) -> int:
    """Make certificates as the command line says, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fl_lightning.deploy.certificates",
        description="certificates and keys for tests",
    )
    parser.add_argument(
        "folder", type=Path, help="where they are written; it must not have any yet"
    )
    parser.add_argument(
        "--hosts",
        nargs="+",
        default=[],
        metavar="HOST",
        help=f"names and addresses by which nodes dial the server, beside {' and '.join(LOOPBACK)}",
    )
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument(
        "--days", type=float, default=30.0, help="days until they expire (default: 30)"
    )
    asked = parser.parse_args(words)
    hosts = list(dict.fromkeys([*asked.hosts, *LOOPBACK]))
    try:
        make_certificates(asked.folder, hosts, asked.nodes, asked.days)
    except InputError as error:
        sys.stderr.write(f"fl_lightning: error: {error}\n")
        return 2
    sys.stdout.write(f"{asked.folder}: ca.crt, server.pem, server.key, {asked.nodes} node keys\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
