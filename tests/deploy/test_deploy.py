"""Deployments without Flower: the same messages, answered in this process or by processes of their
own.

The reference is always a simulation: of a round in which a node failed, one whose stressor drops
its clients.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from deploy_transports import InProcess, Sockets
from places import ROOT, SUPPORT

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.deploy.node import sockets
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.node.states import StateFolder
from fl_lightning.deploy.protocol.gate import config_for_nodes
from fl_lightning.deploy.protocol.messages import Message, MessageError, cut_in_parts, refusal
from fl_lightning.deploy.server.roster import Roster, RoundRules
from fl_lightning.deploy.server.server import deploy_over
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.hooks import Stressor

COMMON = [
    "--trainer.logger=false",
    "--trainer.max_rounds=3",
    "--trainer.callbacks=[]",
    "--trainer.participation=0.5",
    "--trainer.local_epochs=1",
    "--trainer.eval_every=3",
    "--trainer.accelerator=cpu",
    "--trainer.engine=sequential",
    "--trainer.workers=1",
    "--data.num_clients=8",
    "--data.partition=Shards",
    "--data.partition.classes_per_client=3",
]
RULES = RoundRules(wait_seconds=5, round_seconds=60)
ALL = [
    "--trainer.participation=1.0",
    "--data.num_clients=4",
    "--data.dataset=synthetic",
    "--data.synthetic_examples=240",
    "--data.synthetic_test_examples=40",
    "--data.public_examples=60",
    "--model.distill_epochs=2",
]


def command_line(config: str, folder: Path, *more: str) -> FederatedCLI:
    words = ["--config", str(ROOT / "configs" / f"{config}.yaml"), *COMMON]
    return FederatedCLI("fit", [*words, f"--trainer.default_root_dir={folder}", *more])


def metadata_of(cli: FederatedCLI) -> dict:
    return json.loads((cli.trainer.run_dir / "metadata.json").read_text())


def weights(cli: FederatedCLI) -> str:
    found = metadata_of(cli)
    assert found["status"] == "finished"
    return found["weights_sha256"]


def test_messages_with_a_part_in_common_have_pieces_in_common_and_are_whole_again():
    broadcast = bytes(range(256)) * 10
    one, other = (Message({"orders": [client]}, (broadcast, b"x")).to_bytes() for client in (1, 2))
    cut = [cut_in_parts(each, 1000) for each in (one, other)]
    assert [b"".join(each) for each in cut] == [one, other]
    assert {len(piece) for piece in cut[0][1:]} == {1000, 560, 1}
    assert cut[0][1:] == cut[1][1:]
    assert cut[0][0] != cut[1][0]


class Drop(Stressor):
    """Drops clients before they train, in one round."""

    def __init__(self, round: int, clients: Collection[int]) -> None:
        self.round, self.clients = round, clients

    def change_cohort(self, cohort, *, round, context):
        dropped = self.clients if round == self.round else ()
        return [replace(each, trains=each.client.id not in dropped) for each in cohort]


def simulated(config: str, folder: Path, *more: str, drop: Drop | None = None) -> str:
    cli = command_line(config, folder / "simulated", *more)
    cli.trainer.callbacks += [drop] if drop else []
    cli.start()
    return weights(cli)


def nodes_in(
    folder: Path, count: int = 2, build: Callable = builder, allow: Collection[str] = (), **more
) -> dict[str, Node]:
    """New nodes on the same folders are nodes that were started again."""
    nodes = {}
    for number in range(count):
        settings = NodeSettings(
            folder / f"node{number}", number, count, name=f"n{number}", allow=allow
        )
        nodes[f"node{number}"] = Node(settings, build(), **more)
    return nodes


def deployed(
    config: str, folder: Path, transport, *more: str, rules: RoundRules = RULES, **further
) -> FederatedCLI:
    cli = command_line(config, folder / "deployed", *more)
    deploy_over(cli.trainer, yaml.safe_load(cli.config_text), transport, rules, **further)
    cli.start()
    return cli


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("config", ["fedavg", "kd_default", "fedkd", "fedmosaic_digits"])
def test_a_deployment_gives_the_weights_of_the_simulation(config, tmp_path):
    cli = deployed(config, tmp_path, InProcess(nodes_in(tmp_path, 3)))
    assert weights(cli) == simulated(config, tmp_path)
    nodes = metadata_of(cli)["deployment"]["nodes"]
    assert nodes == {"n0 (node0)": [0, 3, 6], "n1 (node1)": [1, 4, 7], "n2 (node2)": [2, 5]}


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "config", ["scaffold", "feddyn", "feddc", "fedcm", "moon", "fedlc", "fedper"]
)
def test_a_client_whose_upload_is_lost_goes_on_from_what_it_kept_before(config, tmp_path):
    """A third of the uploads are lost; nodes have trained by then, and learn of it by their next
    order."""
    lost = "--trainer.callbacks=[{class_path: StragglerDropout, init_args: {probability: 0.33, mode: after}}]"
    more = lost, "--trainer.participation=0.8", "--trainer.max_rounds=4"
    cli = deployed(config, tmp_path, InProcess(nodes_in(tmp_path, 3)), *more)
    assert weights(cli) == simulated(config, tmp_path, *more)
    assert (cli.trainer.run_dir / "ledger.csv").read_text().count(",lost,") > 2


PARTIAL = [
    "--trainer.callbacks=[{class_path: StragglerDropout, init_args: {probability: 0.5, mode: partial}}]"
]
ARITHMETIC = [
    "--trainer.precision=bf16-mixed",
    "--trainer.gradient_clip_val=0.02",
    "--trainer.gradient_clip_algorithm=value",
]


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    ("config", "more"), [("fedavg", [*PARTIAL, *ARITHMETIC]), ("scaffold", PARTIAL)]
)
def test_what_changes_local_training_does_so_on_nodes(config, more, tmp_path):
    """Clients that do half of their steps, and the precision and clipping of gradients."""
    short = "--trainer.max_rounds=2"
    cli = deployed(config, tmp_path, InProcess(nodes_in(tmp_path)), *more, short)
    assert weights(cli) == simulated(config, tmp_path, *more, short)
    assert weights(cli) != simulated(config, tmp_path / "plain", short)


class LateInRoundTwo(InProcess):
    """The second node trains in round 2, and its answer comes too late; then it is started
    again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(nodes_in(folder))
        self.folder = folder

    def exchange(self, messages, timeout):
        rounds = {Message.from_bytes(message).header.get("round") for message in messages.values()}
        for key, answer in super().exchange(messages, timeout):
            if rounds != {2} or key != "node1":
                yield key, answer
        if rounds == {2}:
            self.by_key = nodes_in(self.folder)


@pytest.mark.slow
@pytest.mark.essential
def test_a_late_node_that_is_started_again_goes_on_from_the_state_that_counts(tmp_path):
    """Its clients were trained in round 2 and wrote what they keep, and in round 3 start from round
    1."""
    cli = deployed("fedkd", tmp_path, LateInRoundTwo(tmp_path), *ALL)
    assert weights(cli) == simulated("fedkd", tmp_path, *ALL, drop=Drop(2, (1, 3)))
    ledger = (cli.trainer.run_dir / "ledger.csv").read_text()
    assert [line.split(",")[:3] for line in ledger.splitlines() if "dropped" in line] == [
        ["2", "1", "dropped"],
        ["2", "3", "dropped"],
    ]


class KilledInRoundThree(InProcess):
    """The server ends when its nodes have trained round 3 and it has no answer yet."""

    def exchange(self, messages, timeout):
        answers = list(super().exchange(messages, timeout))
        if any(
            Message.from_bytes(message).header.get("round") == 3 for message in messages.values()
        ):
            raise KeyboardInterrupt
        yield from answers


@pytest.mark.slow
@pytest.mark.essential
def test_a_server_that_is_started_again_comes_to_the_same_weights(tmp_path):
    """Its nodes are a round ahead of it, and were started again as well."""
    with pytest.raises(KeyboardInterrupt):
        deployed("fedkd", tmp_path, KilledInRoundThree(nodes_in(tmp_path)), *ALL)
    (run,) = (tmp_path / "deployed" / "fedkd").iterdir()
    before = json.loads((run / "metadata.json").read_text())["deployment"]["run"]
    cli = deployed("fedkd", tmp_path, InProcess(nodes_in(tmp_path)), *ALL, f"--ckpt_path={run}")
    assert weights(cli) == simulated("fedkd", tmp_path, *ALL)
    assert metadata_of(cli)["deployment"]["run"] == before


def start_node(
    folder: Path, number: int, of: int, program: Sequence[str] = ("-m", "fl_lightning")
) -> subprocess.Popen:
    words = [sys.executable, *program, "node", "--superlink", "none", "--folder", str(folder)]
    words += ["--partition_id", str(number), "--num_partitions", str(of)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come about in time"
        time.sleep(0.005)


class Processes(Sockets):
    """Two nodes that are processes, of which the second runs ``program`` until it is restarted."""

    program: Sequence[str] = ("-m", "fl_lightning")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = [
            start_node(folder / "node0", 0, 2),
            start_node(folder / "node1", 1, 2, self.program),
        ]
        super().__init__([folder / f"node{number}" / "node.sock" for number in range(2)])

    def wait(self) -> None:
        wait_until(lambda: len(self.nodes()) == 2)

    def restart(self) -> None:
        """Start the second node again, which was killed."""
        assert self.processes[1].wait(60) == -signal.SIGKILL
        self.processes[1] = start_node(self.folder / "node1", 1, 2)
        self.wait()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60)


class KilledInMidRound(Processes):
    """The second node is killed in round 2, when one of its two clients has trained, and started
    again before round 3."""

    program = (str(SUPPORT / "mortal_node.py"),)

    def exchange(self, messages, timeout):
        yield from super().exchange(messages, timeout)
        if {Message.from_bytes(one).header.get("round") for one in messages.values()} == {2}:
            kept = (self.folder / "node1" / "states").glob("*/client_*/after_000002.safetensors")
            assert len([*kept]) == 1
            self.restart()


@pytest.mark.slow
@pytest.mark.essential
def test_a_node_that_is_killed_in_mid_round_costs_its_clients_that_round(tmp_path):
    with closing(KilledInMidRound(tmp_path)) as transport:
        transport.wait()
        rules = RoundRules(wait_seconds=200, round_seconds=200)
        cli = deployed("fedkd", tmp_path, transport, *ALL, rules=rules)
    assert weights(cli) == simulated("fedkd", tmp_path, *ALL, drop=Drop(2, (1, 3)))


def test_a_node_that_does_not_fit_is_refused_by_name_and_nothing_is_created(tmp_path):
    """Of the two nodes that a round begins with the other one fits; nobody waits for a third."""

    def other(path: Path):
        fed = builder()(path)
        fed.data.num_classes = 11
        fed.method.server["weights"] = fed.method.server["weights"][1:]
        return fed

    nodes = nodes_in(tmp_path)
    nodes["node0"].build = other
    with pytest.raises(
        InputError, match=r"node n0; number of classes: 11 there, 10 here; shape of server.weights"
    ):
        deployed("fedavg", tmp_path, InProcess(nodes), rules=replace(RULES, min_nodes=2))
    assert not (tmp_path / "deployed").exists()


def test_nodes_are_sent_no_callbacks_folders_or_trackers(tmp_path):
    config = yaml.safe_load(command_line("kd_default", tmp_path, *ARITHMETIC).config_text)
    sent = config_for_nodes(config)
    assert set(sent) == {"seed_everything", "trainer", "model", "data"}
    assert not {"callbacks", "default_root_dir", "tags"} & set(sent["trainer"])
    assert sent["trainer"]["logger"] is False
    local = {"precision", "gradient_clip_val", "gradient_clip_algorithm", "local_epochs", "privacy"}
    assert all(sent["trainer"][name] == config["trainer"][name] for name in local)


def test_label_noise_is_refused(tmp_path):
    noise = "--trainer.callbacks+=callbacks.LabelNoise"
    with pytest.raises(InputError, match="it changes labels, and only nodes have them"):
        deployed("fedavg", tmp_path, InProcess({}), noise)
    assert not (tmp_path / "deployed").exists()


def test_a_round_without_nodes_stops_the_run(tmp_path):
    with pytest.raises(RunStopped, match="0 nodes are connected"):
        deployed("fedavg", tmp_path, InProcess({}), rules=RoundRules(wait_seconds=1))


class Refuses(InProcess):
    """A node answers everything from the second round on with a refusal."""

    begun = False

    def exchange(self, messages, timeout):
        headers = [Message.from_bytes(message).header for message in messages.values()]
        self.begun |= any(header.get("round") == 2 for header in headers)
        for key, answer in super().exchange(messages, timeout):
            yield key, refusal("other files") if self.begun else answer


def test_a_run_whose_only_node_is_refused_waits_and_stops(tmp_path):
    """It went through all rounds that were left, without a client, and called itself finished."""
    rules = RoundRules(wait_seconds=1, round_seconds=60)
    with pytest.raises(RunStopped, match=r"0 nodes are connected that fit the run.*other files"):
        deployed("fedavg", tmp_path, Refuses(nodes_in(tmp_path, 1)), rules=rules)
    table = min((tmp_path / "deployed").rglob("metrics.csv"), key=lambda path: len(path.parts))
    assert len(table.read_text().splitlines()) == 3


class Leaves(InProcess):
    """A node is gone when the second round is ordered."""

    def exchange(self, messages, timeout):
        if any(
            b'"round": 2' in message or b'"round":2' in message for message in messages.values()
        ):
            self.by_key.pop("node1", None)
        yield from super().exchange(messages, timeout)


def test_it_is_said_that_a_round_waits_for_a_node_that_has_left(tmp_path, caplog):
    rules = RoundRules(wait_seconds=1, round_seconds=60, min_nodes=2)
    with pytest.raises(RunStopped, match="1 nodes are connected"):
        deployed("fedavg", tmp_path, Leaves(nodes_in(tmp_path)), rules=rules)
    assert "1 of the 2 nodes that a round begins with are here; waiting 1 s" in caplog.text
    assert ", 60 at most: n1" in caplog.text


def test_a_newcomer_that_never_answers_its_check_holds_rounds_up_for_a_tenth_of_the_time(
    monkeypatch,
):
    """It is given a minute at first and twice as long each time, and asked again after ten times
    what it was given."""
    clock, waits, here = [0.0], [], ["dumb"]

    def silent(messages: dict, seconds: float, **_) -> tuple[()]:
        if messages:
            waits.append(seconds)
            clock[0] += seconds
        return ()

    mail = SimpleNamespace(transport=SimpleNamespace(nodes=lambda: here), exchange=silent)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("fl_lightning.deploy.server.roster.describe", lambda fed, clients: {})
    roster = Roster(SimpleNamespace(data=SimpleNamespace(active=[])), b"", RoundRules(), mail)
    roster.names = {"good": "good"}
    here.append("good")
    for _ in range(1000):
        clock[0] += 10.0
        roster.gather()
    assert waits[:4] == [60, 120, 240, 300]
    assert sum(waits[:-1]) <= 0.1 * clock[0]
    here.remove("dumb")
    roster.gather()
    here.append("dumb")
    roster.gather()
    assert waits[-1] == 60  # it came back, and is a newcomer again
    here.remove("good")
    monkeypatch.setattr(roster, "forget", roster.names.pop)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(RunStopped, match="0 nodes are connected"):
        roster.gather()
    assert waits[-1] == 300  # nobody else is here, so it does not rest


def test_a_refused_node_that_comes_back_while_a_round_waits_is_asked_again(monkeypatch):
    """A node that did not answer is asked once in that time."""
    clock, asked, refuses = [0.0], [], Message.from_bytes(refusal("other files"))

    def exchange(messages: dict, seconds: float, **_) -> list[tuple[str, Message]]:
        asked.extend(messages)
        return [(node, refuses) for node in messages if node == "flickers"]

    def here() -> list[str]:
        return ["silent", *(["flickers"] if clock[0] not in (2.0, 3.0) else [])]

    mail = SimpleNamespace(transport=SimpleNamespace(nodes=here), exchange=exchange)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("fl_lightning.deploy.server.roster.describe", lambda fed, clients: {})
    monkeypatch.setattr(time, "sleep", lambda _: clock.__setitem__(0, clock[0] + 1))
    data, rules = SimpleNamespace(active=[]), RoundRules(wait_seconds=9)
    with pytest.raises(RunStopped, match="0 nodes are connected"):
        Roster(SimpleNamespace(data=data), b"", rules, mail).gather()
    assert asked == ["flickers", "silent", "flickers"]


def test_messages_survive_and_damaged_ones_are_refused():
    message = Message({"kind": "train", "round": 3}, (b"", b"abc", bytes(range(256))))
    data = message.to_bytes()
    assert Message.from_bytes(data) == message
    for damaged in (b"", data[:-1], data + b"x", b"XXXX" + data[4:], data[:9], b"FLD1\0\0\0\2[]"):
        with pytest.raises(MessageError):
            Message.from_bytes(damaged)


def test_a_node_answers_nonsense_with_a_reason(tmp_path):
    (node,) = nodes_in(tmp_path, 1).values()
    for nonsense in (
        b"nonsense",
        Message({"kind": "run"}).to_bytes(),
        Message({"kind": "check"}).to_bytes(),
    ):
        answer = Message.from_bytes(node.answer(nonsense))
        assert answer.kind == "refused"
        assert answer.header["reason"]
    order = Message({"kind": "train", "config": "../../etc/passwd", "orders": []}).to_bytes()
    assert "has not checked it" in Message.from_bytes(node.answer(order)).header["reason"]


def test_kept_states_are_those_that_a_server_can_ask_for(tmp_path):
    states, run = StateFolder(tmp_path), "0" * 32
    assert states.load(run, 7, 0) == {}
    for round, before in ((1, 0), (4, 1), (6, 4), (9, 6)):
        states.save(run, 7, round, {"w": torch.full((2,), float(round))}, started_from=before)
    assert states.load(run, 7, 1) is None  # nobody goes back so far
    for round in (4, 6, 9):
        np.testing.assert_array_equal(states.load(run, 7, round)["w"], [round, round])
    # the server went back before round 9
    states.save(run, 7, 8, {"w": torch.zeros(1)}, started_from=6)
    states.save(run, 7, 10, {"w": torch.zeros(1)}, started_from=8)
    assert states.load(run, 7, 9) is None
    # an order that comes late leaves what a newer one has kept
    states.save(run, 7, 9, {"w": torch.ones(1)}, started_from=8)
    assert float(states.load(run, 7, 10)["w"]) == 0.0
    states.save(run, 8, 1, {}, started_from=0)
    assert not (tmp_path / run / "client_000008").exists()
    with pytest.raises(ValueError, match="is no id of a run"):
        states.load("../..", 7, 1)


def test_a_slow_node_is_waited_for_no_longer_than_the_deadline(tmp_path):
    done = threading.Event()

    def slow(message: bytes) -> bytes:
        done.wait(30)
        return message

    paths = [tmp_path / "quick", tmp_path / "slow", tmp_path / "gone"]
    for path, answer in zip(paths, (bytes.upper, slow), strict=False):
        arguments = (path, answer, lambda: not done.is_set())
        threading.Thread(target=sockets.serve, args=arguments, daemon=True).start()
    wait_until(lambda: paths[0].exists() and paths[1].exists())
    transport = Sockets(paths)
    wait_until(lambda: len(transport.nodes()) == 2)
    assert paths[0].stat().st_mode & 0o077 == 0
    messages = dict.fromkeys(map(str, paths), b"x" * 3_000_000)
    try:
        assert list(transport.exchange(messages, 1.0)) == [(str(paths[0]), b"X" * 3_000_000)]
    finally:
        done.set()
