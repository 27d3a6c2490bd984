"""The files of examples/deploy say what the programs understand; nothing here can start a
container."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from jsonargparse import auto_parser
from places import ROOT

from fl_lightning.deploy.command import node

FOLDER = ROOT / "examples" / "deploy"
PORT = "8443"  # of nginx, which nodes dial


def node_settings(command: str) -> dict:
    words = shlex.split(command)
    start = words.index("node") + 1
    return auto_parser(node).parse_args(words[start:]).as_dict()


def superlink_settings(command: str) -> dict[str, str | bool]:
    words = [*shlex.split(command), "--"]
    return {word: then[:2] == "--" or then for word, then in pairwise(words) if word[:2] == "--"}


def compose() -> dict:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def unit(name: str) -> dict[str, str]:
    """The settings of a unit that is given each once."""
    lines = (FOLDER / f"fl-{name}.service").read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if re.match(r"\w+=", line)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_the_nodes_of_compose_divide_the_clients_and_mount_what_they_name():
    services, volumes = compose()["services"], compose()["volumes"]
    given = [node_settings(services[name]["command"]) for name in ("node0", "node1")]
    assert [each["partition_id"] for each in given] == [0, 1]
    assert {each["num_partitions"] for each in given} == {2}
    assert {each["superlink"] for each in given} == {f"proxy:{PORT}"}
    for name, service in services.items():
        mounts = [volume.split(":")[:2] for volume in service["volumes"]]
        # a file or folder here, a volume, or one of the user's certificates
        for source, _ in mounts:
            assert (
                source in volumes or source.startswith("./certs/") or (FOLDER / source).exists()
            ), name
        inside = [target for _, target in mounts]
        for path in re.findall(r"(?<= )/\S+", service.get("command", "")):
            assert any(path == target or path.startswith(target + "/") for target in inside), path


def test_each_container_has_the_secrets_that_it_needs_and_no_others():
    mounted = {
        name: {
            volume.split(":")[0] for volume in service["volumes"] if volume.startswith("./certs")
        }
        for name, service in compose()["services"].items()
    }
    server = {"./certs/ca.crt", "./certs/server.pem", "./certs/server.key"}
    assert mounted["proxy"] == server
    assert mounted["superlink"] == {*server, "./certs/node0.pub", "./certs/node1.pub"}
    for name in ("node0", "node1"):
        assert mounted[name] == {"./certs/ca.crt", f"./certs/{name}"}
    assert "certs" not in (FOLDER / "Dockerfile").read_text()


def test_the_superlink_is_reached_through_nginx_alone():
    """It listens on a loopback address, which nginx and register.sh name, with nodes' keys asked
    for."""
    services = compose()["services"]
    by_unit = superlink_settings(unit("superlink")["ExecStart"])
    by_compose = superlink_settings(services["superlink"]["command"])
    assert by_unit.keys() == by_compose.keys()
    for settings in (by_unit, by_compose):
        assert (settings["--host"], settings["--port"]) == ("127.0.0.1", "8000")
        assert settings["--enable-supernode-auth"] is True
    assert services["superlink"]["network_mode"] == "service:proxy"
    assert not any("ports" in service for service in services.values())
    for name in ("nginx.conf", "register.sh"):
        assert re.findall(r"[\d.]+:8000", (FOLDER / name).read_text()) == ["127.0.0.1:8000"]
    conf = (FOLDER / "nginx.conf").read_text()
    assert re.findall(r"listen (.*);", conf) == [f"{PORT} ssl"]
    mounts = [volume.split(":")[1] for volume in services["proxy"]["volumes"]]
    assert mounts[0] == "/etc/nginx/nginx.conf"
    for path in re.findall(r" (certs/\S+);", conf):
        assert f"/etc/nginx/{path}" in mounts


def test_what_the_server_of_compose_writes_is_on_its_volume():
    """``runs``, ``mlflow.db`` and data are written where ``deploy`` starts."""
    superlink = compose()["services"]["superlink"]
    folder = superlink["working_dir"]
    assert f"server:{folder}" in superlink["volumes"]
    assert superlink_settings(superlink["command"])["--database"] == f"{folder}/superlink.db"
    assert f"mkdir {Path(folder).name} node" in (FOLDER / "Dockerfile").read_text()


def test_the_image_is_made_of_the_package_alone():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    files = {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert set(copied) == files | {"fl_lightning", "callbacks", "configs"}


def test_the_units_start_programs_with_settings_that_they_have():
    settings = node_settings(unit("node")["ExecStart"])
    assert settings["root_certificates"] == "ca.crt"
    assert settings["superlink"].endswith(f":{PORT}")
    assert unit("node")["RestartPreventExitStatus"] == "2"
    assert "-c nginx.conf" in unit("proxy")["ExecStart"]
    assert "PrivateTmp" not in unit("superlink")  # ``deploy`` hands over a run in /tmp


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_units_are_understood_by_systemd(tmp_path):
    """A setting that systemd does not know is a line of its output; programs need to be on this
    machine."""
    for path in FOLDER.glob("*.service"):
        text, changed = re.subn(r"(?m)^(Exec\w+)=\S+", r"\1=/bin/true", path.read_text())
        assert changed
        (tmp_path / path.name).write_text(text)
    units = sorted(map(str, tmp_path.iterdir()))
    words = ["systemd-analyze", "verify", *units]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert len(units) == 3
    said = [line for line in done.stderr.splitlines() if "fl-" in line]
    assert said == [], done.stderr


def test_nginx_understands_its_settings(tmp_path):
    pytest.importorskip("cryptography")
    from fl_lightning.deploy.certificates import main

    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    nginx = shutil.which("nginx", path=path)
    if nginx is None:
        pytest.skip("nginx is not installed")
    assert main([str(tmp_path / "certs"), "--hosts", "server.example.org"]) == 0
    shutil.copy(FOLDER / "nginx.conf", tmp_path)
    words = [nginx, "-t", "-e", "stderr", "-p", str(tmp_path), "-c", "nginx.conf"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr


def test_certificates_hold_for_the_names_that_nginx_and_deploy_dial(tmp_path):
    """``proxy_ssl_name`` of nginx.conf is a name, since nginx compares no addresses."""
    x509 = pytest.importorskip("cryptography.x509")
    from fl_lightning.deploy.certificates import main

    (command,) = re.findall(r"certificates (certs .*)", (FOLDER / "compose.yaml").read_text())
    assert main([str(tmp_path / "certs"), *shlex.split(command)[1:]]) == 0
    made = x509.load_pem_x509_certificate((tmp_path / "certs" / "server.pem").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dialled = re.findall(r"proxy_ssl_name (\S+);", (FOLDER / "nginx.conf").read_text())
    assert {"proxy", *dialled} <= set(names.get_values_for_type(x509.DNSName))
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_the_script_is_one():
    subprocess.run(["sh", "-n", str(FOLDER / "register.sh")], check=True)
