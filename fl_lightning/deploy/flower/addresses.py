"""Addresses of SuperLinks: what is refused before Flower tries them again and again, in silence."""

from __future__ import annotations

import logging
import socket
import ssl
from ipaddress import ip_address

from fl_lightning.config.constraints import path_to
from fl_lightning.errors import InputError, as_bad_input

log = logging.getLogger("fl_lightning")
SUPERLINK = "127.0.0.1:8000"
MAX_PORT = 65535
HANDSHAKE_SECONDS = 10.0  # that a SuperLink may take to show its certificate


def require_tls(address: str, certificates: str | None, flag: str) -> None:
    """Refuse to talk to another machine without TLS.

    Raises:
        InputError: it is no address, or one of another machine without certificates.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
        raise InputError(
            f"address {address}",
            f"it has a host and a port, 1 to {MAX_PORT}",
            f"write e.g. {SUPERLINK}",
        )
    if certificates is not None:
        path_to(
            "file", "there is no such file", "name one in PEM form", given=f"{flag} {{value}}"
        ).check(certificates)
        return
    if not is_loopback(host):
        raise InputError(
            f"address {address} without {flag}",
            "another machine is talked to over TLS",
            f"give {flag}",
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, where no other can reach it."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def warn_of_reach(address: str) -> None:
    """Say what it means that a SuperLink listens where other machines may reach it."""
    if not is_loopback(address.rpartition(":")[0]):
        log.warning(
            "--deploy.superlink %s is no loopback address: whoever reaches the SuperLink there can run code "
            "on its machine, with or without keys and TLS; let it listen on 127.0.0.1, behind a proxy",
            address,
        )


def not_found(address: str) -> str:
    """Return why the host of an address is not found; empty where it is."""
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def require_host(address: str, flag: str) -> None:
    """Refuse an address whose host nobody knows."""
    if reason := not_found(address):
        raise InputError(
            f"{flag} {address}", f"its host is not found ({reason})", f"write e.g. {SUPERLINK}"
        )


def check_handshake(address: str, certificates: str | None, flag: str) -> None:
    """Refuse a SuperLink whose certificate does not hold: Flower would try again and again, in
    silence.

    One that does not answer is left to Flower, which waits for it.

    Raises:
        InputError: its certificate has expired, is of another host, or nobody that is trusted
            signed it.
    """
    if certificates is None:
        return
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    given = f"{flag} {certificates}"
    instead = "name the file of the one that signed the SuperLink's"
    with as_bad_input(given, "it cannot be read, or holds no certificate", instead, OSError):
        trusted = ssl.create_default_context(cafile=certificates)
    try:
        trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as lenient as Flower is
        with socket.create_connection((host, int(port)), HANDSHAKE_SECONDS) as plain:
            trusted.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        raise InputError(
            f"the certificate of the SuperLink at {address}",
            error.verify_message,
            f"renew it, or name with {flag} the one that signed it",
        ) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # it went away in the middle of it
        return
    except ssl.SSLError as error:
        raise InputError(
            f"the SuperLink at {address}",
            f"the TLS handshake failed ({error.reason or error})",
            f"start it with its certificates, and check {flag}",
        ) from None
    except OSError:
        return


def require_no_tls(address: str, certificates: str | None, flag: str) -> None:
    """Refuse to talk without TLS where the other side speaks it.

    Raises:
        InputError: it does, and there are no certificates.
    """
    if certificates is not None:
        return
    host, _, port = address.rpartition(":")
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS) as plain:
            anybody.wrap_socket(plain).close()
    except OSError:  # an SSLError is one
        return
    raise InputError(f"address {address} without {flag}", "TLS is spoken there", f"give {flag}")


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def answers(address: str) -> bool:
    """Return whether somebody listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS).close()
    except OSError:
        return False
    return True
