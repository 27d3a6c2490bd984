"""The files of examples/deploy say what the programs understand; nothing here can start a container."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import yaml
from jsonargparse import auto_parser

from fl_lightning.deploy.command import node

FOLDER = Path(__file__).parent.parent / "examples" / "deploy"


def node_settings(command: str) -> dict:
    words = shlex.split(command)
    start = words.index("node") + 1
    return auto_parser(node).parse_args(words[start:]).as_dict()


def test_the_nodes_of_compose_divide_the_clients_and_mount_what_they_name():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services = compose["services"]
    given = [node_settings(services[name]["command"]) for name in ("node0", "node1")]
    assert [each["partition_id"] for each in given] == [0, 1]
    assert {each["num_partitions"] for each in given} == {2}
    assert {each["superlink"] for each in given} == {"superlink:8000"}
    for name, service in services.items():
        mounts = [volume.split(":")[:2] for volume in service["volumes"]]
        for source, _ in mounts:  # a folder beside the file, or a volume; certs is made by the user
            assert source in compose["volumes"] or (FOLDER / source).exists() or source == "./certs", name
        inside = [target for _, target in mounts] + ["/home/federated"]
        for path in re.findall(r"(?<= )/\S+", service["command"]):
            assert any(path.startswith(target) for target in inside), path


def test_the_units_start_programs_with_settings_that_they_have():
    (line,) = re.findall(r"^ExecStart=(.*)$", (FOLDER / "fl-node.service").read_text(), re.MULTILINE)
    assert node_settings(line)["root_certificates"] == "ca.crt"
    (line,) = re.findall(r"^ExecStart=(.*)$", (FOLDER / "fl-superlink.service").read_text(), re.MULTILINE)
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    flags = {word for word in shlex.split(line) if word.startswith("--")}
    assert flags == {w for w in shlex.split(compose["services"]["superlink"]["command"]) if w[:2] == "--"}


def test_the_script_is_one():
    subprocess.run(["sh", "-n", str(FOLDER / "register.sh")], check=True)
