"""Certificates that do not hold end a node and a run with a line that says why, before Flower tries
them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest

from fl_lightning.deploy.flower.addresses import check_handshake, free_port
from fl_lightning.errors import InputError

pytest.importorskip("cryptography")

from fl_lightning.deploy.certificates import main, make_certificates


def shown(folder: Path, host: str, days: float, trusted: Path | None = None) -> None:
    """Check the handshake with a server on 127.0.0.1 that has a certificate of this host and
    age."""
    make_certificates(folder, [host], 0, days)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            plain, _ = door.accept()
            with plain, contextlib.suppress(OSError):  # the other side has gone away, as it should
                context.wrap_socket(plain, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            address = f"127.0.0.1:{door.getsockname()[1]}"
            check_handshake(address, str(trusted or folder / "ca.crt"), "--root_certificates")
        finally:
            thread.join(20)


def test_a_certificate_that_holds_is_taken(tmp_path):
    shown(tmp_path, "127.0.0.1", 1.0)


def test_an_expired_certificate_is_refused_by_name(tmp_path):
    with pytest.raises(
        InputError, match=r"certificate of the SuperLink at 127.*; certificate has expired"
    ):
        shown(tmp_path, "127.0.0.1", -1.0)


def test_a_certificate_of_another_host_is_refused(tmp_path):
    with pytest.raises(InputError, match="IP address mismatch"):
        shown(tmp_path, "server.example.org", 1.0)


def test_a_certificate_of_another_authority_is_refused(tmp_path):
    make_certificates(tmp_path / "other", ["127.0.0.1"], 0)
    with pytest.raises(
        InputError, match="renew it, or name with --root_certificates the one that signed it"
    ):
        shown(tmp_path / "own", "127.0.0.1", 1.0, tmp_path / "other" / "ca.crt")


def test_a_superlink_without_tls_is_refused_and_one_that_is_not_there_is_waited_for(tmp_path):
    make_certificates(tmp_path, ["127.0.0.1"], 0)
    certificates = str(tmp_path / "ca.crt")
    check_handshake(f"127.0.0.1:{free_port()}", certificates, "--root_certificates")
    (tmp_path / "none.pem").write_text("no certificate")
    for name in ("none.pem", "missing.pem"):
        with pytest.raises(InputError, match=f"{name}; it cannot be read, or holds no certificate"):
            check_handshake("127.0.0.1:1", str(tmp_path / name), "--root_certificates")
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            plain, _ = door.accept()
            with plain:
                plain.recv(64)
                plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InputError, match="the TLS handshake failed"):
            check_handshake(
                f"127.0.0.1:{door.getsockname()[1]}", certificates, "--root_certificates"
            )
        thread.join(20)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--hosts", "b\u00fccher.example"],
            "--hosts b\u00fccher.example; no certificate has this name",
        ),
        (["--hosts", ""], "--hosts ; no certificate has this name"),
        (["--days", "nan"], "--days nan; no certificate ends then"),
        (["--days", "1e9"], "--days 1e+09; no certificate ends then"),
        (["--days=-1e5"], "--days -100000; no certificate ends then"),
        (["--nodes", "1"], "it has node0.pub already"),
    ],
)
def test_what_is_in_no_certificate_is_refused_and_nothing_is_written(words, says, tmp_path, capsys):
    (tmp_path / "node0.pub").touch()
    assert main([str(tmp_path), "--nodes", "0", *words]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["node0.pub"]
    assert main([str(tmp_path / "node0.pub"), "--nodes", "0"]) == 2
    assert "it cannot be written" in capsys.readouterr().err


def test_a_long_name_has_a_certificate(tmp_path):
    assert main([str(tmp_path), "--hosts", f"{'a' * 60}.example.org", "--nodes", "1"]) == 0
