"""nginx with the shipped examples/deploy/nginx.conf: nodes reach the Fleet API through it, and
nobody reaches anything else."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from places import ROOT
from test_deploy_flower import (
    RUN,
    end,
    finish,
    metadata_in,
    node_words,
    ours,
    program,
    simulated,
    wait_for,
)
from test_deploy_flower import superlink as superlink  # a fixture

from fl_lightning.deploy.flower import PART_BYTES
from fl_lightning.deploy.flower.launch import APP, free_port

pytest.importorskip("cryptography")

from fl_lightning.deploy.certificates import make_certificates

SHIPPED = ROOT / "examples" / "deploy" / "nginx.conf"
PLACES = [os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]
NGINX = shutil.which("nginx", path=os.pathsep.join(PLACES))
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
SPELLINGS = [
    "/v1/control/start-run",
    "/v1/control/list-runs",
    "/v1/control/register-node",
    "/v1/runtime/pull-task-input",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol/start-run",
    "/v1/fleet/%2e%2e%2fcontrol/start-run",
    "/v1/fleet/%252e%252e/control/start-run",
    "/v1/fleet/..%252fcontrol/start-run",
    "/v1/fleet//../control/start-run",
    "//v1/control/start-run",
    "/v1//control/start-run",
    "/v1/./control/start-run",
    "/v1/fleet/get-run/../../control/start-run",
    "/v1/fleet/get-run;/../../control/start-run",
    "/v1/fleet/get-run/..;/..;/control/start-run",
    "/v1/fleet/..\\control\\start-run",
    "/v1/fleet/..%5ccontrol%5cstart-run",
    "/V1/CONTROL/START-RUN",
    "/v1/fleet/..%c0%afcontrol/start-run",
    "/v1/fleet/%00/../../control/start-run",
    "/v1/fleet/get-run%0d%0aX:%20y",
    "/v1/fleet/get-run%20HTTP/1.1%0d%0a",
    "/../v1/control/start-run",
    "https://127.0.0.1:8000/v1/control/start-run",
    "/v1/fleet/get-run/",
    "/v1/fleet/get-run%2f..%2f",
    "/v1/fleet/",
    "/v1/fleet",
    "/v1/fleet/start-run",
    "/",
    "/docs",
    "/openapi.json",
    "/health",
    "*",
    "v1/control/start-run",
]
"""Paths that are no call of the Fleet API, however they are read."""
CALLS = [
    "/v1/fleet/get-run?/../../control/start-run",
    "/v1/fleet/get-run#/../x",
    "//v1/./fleet//get%2drun",
    "/v1/FLEET/Get-Run",
]
"""Paths that nginx reads as a call of the Fleet API."""


@contextmanager
def proxy(folder: Path, superlink_port: int) -> Iterator[int]:
    """The port of an nginx with the shipped settings, and the certificates of ``folder/certs``."""
    port, text = free_port(), SHIPPED.read_text()
    for before, after in (
        ("listen 8443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{superlink_port};"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "nginx.conf").write_text(text)
    words = [str(NGINX), "-e", "stderr", "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
    log = folder / "nginx.log"
    with log.open("ab") as file:
        nginx = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        ends = time.monotonic() + 60
        while nginx.poll() is None and time.monotonic() < ends:
            with socket.socket() as door:
                if door.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        assert nginx.poll() is None, log.read_text()
        yield port
    finally:
        end([nginx])


class Recorder(ThreadingHTTPServer):
    """A server in the SuperLink's place that keeps of each request the method and the path, as they
    came, and the number of bytes of its body."""

    def __init__(self, certs: Path) -> None:
        self.seen: list[tuple[str, str, int]] = []
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs / "server.pem", certs / "server.key")
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    def handle_error(self, request, client_address):
        """Say nothing of handshakes that the proxy breaks off."""


class RecordingHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one_request(self):
        super().handle_one_request()
        if self.raw_requestline:
            left = size = int(self.headers["Content-Length"] or 0)
            while left:
                left -= len(self.rfile.read(min(left, 2**20)))
            self.server.seen.append((self.command, self.path, size))
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def do_POST(self):
        pass

    do_GET = do_PUT = do_OPTIONS = do_POST


@contextmanager
def recorded(folder: Path, certs: str = "certs") -> Iterator[tuple[Recorder, int]]:
    """A recorder, and the port of the proxy before it."""
    recorder = Recorder(folder / certs)
    thread = threading.Thread(target=recorder.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        with proxy(folder, recorder.server_address[1]) as port:
            yield recorder, port
    finally:
        recorder.shutdown()
        recorder.server_close()
        thread.join(20)


def status(
    folder: Path, port: int, path: str, method: str = "POST", host: str = "server", body: int = 0
) -> int:
    """The status that a request gets; path and host are sent as they are, and ``body`` zeros."""
    context = ssl.create_default_context(cafile=folder / "certs" / "ca.crt")
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
    ):
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}",
            f"Content-Length: {body}",
            "Connection: close",
        ]
        line.sendall("\r\n".join([*head, "", ""]).encode())
        try:
            for sent in range(0, body, 2**20):
                line.sendall(bytes(min(2**20, body - sent)))
        except OSError:  # the proxy does not want the rest
            pass
        return int(line.recv(4096).split(b" ")[1])


def shipped_calls() -> list[str]:
    return re.findall(r"^\s+(/v1/fleet/\S+) ", SHIPPED.read_text(), re.MULTILINE)


def test_the_superlink_never_sees_what_is_not_a_call_of_the_fleet_api(tmp_path):
    make_certificates(tmp_path / "certs", ["localhost", "127.0.0.1"], 0)
    with recorded(tmp_path) as (recorder, port):
        for path in SPELLINGS:
            assert status(tmp_path, port, path) in (400, 404), path
        for method in ("GET", "PUT", "OPTIONS", "BREW"):
            assert status(tmp_path, port, "/v1/fleet/get-run", method) in (404, 405), method
        for host in ("x/v1/control/start-run?", "127.0.0.1:8000"):
            assert status(tmp_path, port, "/v1/control/start-run", host=host) in (400, 404), host
        assert recorder.seen == []
        for path in CALLS:
            assert status(tmp_path, port, path) == 200, path
        assert recorder.seen == [("POST", "/v1/fleet/get-run", 0)] * len(CALLS)
        recorder.seen.clear()
        for path in shipped_calls():
            assert status(tmp_path, port, path) == 200
        assert recorder.seen == [("POST", path, 0) for path in shipped_calls()]


def test_the_largest_part_of_a_model_passes_and_twice_as_much_does_not(tmp_path):
    make_certificates(tmp_path / "certs", ["localhost", "127.0.0.1"], 0)
    with recorded(tmp_path) as (recorder, port):
        size = PART_BYTES + 2**20  # a part, and more than what is around it
        assert status(tmp_path, port, "/v1/fleet/push-object", body=size) == 200
        assert status(tmp_path, port, "/v1/fleet/push-object", body=2 * PART_BYTES + 1) == 413
        assert recorder.seen == [("POST", "/v1/fleet/push-object", size)]


def test_another_program_in_the_superlinks_place_gets_nothing(tmp_path):
    make_certificates(tmp_path / "certs", ["localhost", "127.0.0.1"], 0)
    make_certificates(tmp_path / "other", ["localhost", "127.0.0.1"], 0)
    with recorded(tmp_path, "other") as (recorder, port):
        assert status(tmp_path, port, "/v1/fleet/get-run") == 502
        assert recorder.seen == []
    assert "certificate verify" in (tmp_path / "nginx.log").read_text()


def test_the_calls_are_those_of_flower():
    pytest.importorskip("flwr")
    from flwr.superlink.routers.fleet.router import router
    from flwr.supernode import fleet_http_client

    asked = re.findall(r'path="(/v1/fleet/\S+)"', Path(fleet_http_client.__file__).read_text())
    assert sorted(shipped_calls()) == sorted(asked)
    assert sorted(shipped_calls()) == sorted(route.path for route in router.routes)
    assert {method for route in router.routes for method in route.methods} == {"POST"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nodes_work_through_the_proxy_and_nobody_controls_the_superlink_through_it(
    superlink, tmp_path
):
    """Flower's own commands submit a run, list runs and register a key: at the SuperLink they do,
    through the proxy they do not, and the SuperLink's log has no word of it."""
    pytest.importorskip("flwr")
    address, programs = superlink
    config, log = tmp_path / "flower" / "config.toml", tmp_path / "superlink.log"
    certs = tmp_path / "certs"
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP.format(job=tmp_path / "nothing"))

    def controlled() -> int:
        return len(re.findall("/v1/control/|/v1/runtime/|ControlServicer", log.read_text()))

    def flwr(*words: object) -> int:
        output = tmp_path / "flwr.log"
        return finish(program("flwr", *words, cwd=tmp_path, log=output), output)

    with proxy(tmp_path, int(address.rpartition(":")[2])) as port:
        outside = f"127.0.0.1:{port}"
        with config.open("a") as file:
            file.write(f'[superlink.outside]\naddress = "{outside}"\n')
            file.write(f'root-certificates = "{certs / "ca.crt"}"\n')
        commands = [["list"], ["supernode", "register", certs / "node2.pub"], ["run", app]]
        before = controlled()
        for words in commands:
            assert flwr(*words, "outside") != 0, words
        for path in SPELLINGS:
            assert status(tmp_path, port, path) in (400, 404), path
        assert controlled() == before
        assert (tmp_path / "flwr.log").read_text().count("404 Not Found") == len(commands)
        for words in commands:
            assert flwr(*words, "test") == 0, words
        assert controlled() > before

        for number in range(2):
            words = node_words(outside, tmp_path, number, 2)
            programs.append(ours(*words, cwd=tmp_path, log=f"n{number}.log"))
        for number in range(2):
            wait_for(tmp_path / f"n{number}.log", "as SuperNode")
        words = [
            "deploy",
            *RUN,
            "--trainer.default_root_dir=deployed",
            f"--deploy.superlink={address}",
        ]
        words += ["--deploy.root_certificates=certs/ca.crt", "--deploy.min_nodes=2"]
        process = ours(*words, cwd=tmp_path, log="deploy.log")
        programs.append(process)
        assert finish(process, tmp_path / "deploy.log") == 0, (tmp_path / "deploy.log").read_text()[
            -5000:
        ]
        end(programs[1:3])  # nodes sign off through it too
    found = metadata_in(tmp_path / "deployed")
    assert found["weights_sha256"] == simulated(tmp_path)["weights_sha256"]
    assert sorted(found["deployment"]["nodes"].values()) == [[0, 2], [1, 3]]
