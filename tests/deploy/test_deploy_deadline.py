"""Over-selection and deadlines by the time that passes. The nodes' time is told by the test and not
measured, and the reference is a simulation whose stressor loses the uploads that were late."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
from clocked import Loses, column, rows
from deploy_transports import InProcess
from refusals import refused
from test_deploy import command_line, deployed, metadata_of, nodes_in, weights

from fl_lightning.clock import Deadline, FedBuff
from fl_lightning.compatibility import Run, check_run
from fl_lightning.deploy.protocol.messages import Message, refusal
from fl_lightning.deploy.server import wall_clock
from fl_lightning.deploy.server.wall_clock import WallTiming, measure_time
from fl_lightning.methods import FedAvg

SMALL = [
    "--data.dataset=synthetic",
    "--data.synthetic_examples=240",
    "--data.synthetic_test_examples=40",
    "--data.synthetic_size=16",
]
FIRST = "--trainer.rounds={class_path: OverSelection, init_args: {factor: 1.5}}"


def deadline(seconds: float, least: int = 1) -> str:
    settings = f"{{seconds: {seconds}, least: {least}}}"
    return f"--trainer.rounds={{class_path: Deadline, init_args: {settings}}}"


class Paced(InProcess):
    """Four nodes that answer after so many seconds of a clock that stands still otherwise. All of
    them train, in time or not."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, delays: dict[int, tuple[float, ...]]
    ) -> None:
        super().__init__(nodes_in(folder, 4))
        self.delays, self.now, self.waits = delays, 100.0, list[float]()
        self.closed_early = 0
        patch.setattr(wall_clock, "now", lambda: self.now)

    def exchange(self, messages, timeout):
        headers = [Message.from_bytes(message).header for message in messages.values()]
        if headers[0]["kind"] != "train":
            yield from super().exchange(messages, timeout)
            return
        took = dict(
            zip(
                self.by_key, self.delays.get(headers[0]["round"], (1.0, 2.0, 3.0, 4.0)), strict=True
            )
        )
        self.waits.append(timeout)
        began, answers = (
            self.now,
            sorted((took[key], key, answer) for key, answer in super().exchange(messages, timeout)),
        )
        left = len(answers)
        try:
            for after, key, answer in answers:
                if after > timeout:
                    self.now = began + timeout
                    return
                self.now, left = began + after, left - 1
                yield key, answer
        finally:
            self.closed_early += left


def lost(cli) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for row in rows(cli.trainer, "ledger.csv"):
        if row["status"] == "lost":
            found.setdefault(int(row["round"]), set()).add(int(row["client"]))
    return found


def simulated_without(config: str, folder: Path, late: dict[int, set[int]], *more: str) -> str:
    cli = command_line(config, folder / "simulated", *more)
    cli.trainer.callbacks.append(Loses(late))
    cli.start()
    return weights(cli)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("config", ["fedavg", "scaffold"])
def test_the_first_that_answer_are_used_and_nobody_else_is_waited_for(
    tmp_path, monkeypatch, config
):
    """Six are asked where four are wanted. Of an answer with more than are wanted the smaller ids
    are used."""
    paced = Paced(tmp_path, monkeypatch, {2: (4.0, 3.0, 2.0, 1.0)})
    cli = deployed(config, tmp_path, paced, *SMALL, FIRST)
    late = lost(cli)
    assert [len(late[round]) for round in (1, 2, 3)] == [2, 2, 2]
    assert column(cli.trainer, "clients/late") == [2.0] * 3
    assert column(cli.trainer, "clients/trained") == [4.0] * 3
    assert paced.closed_early > 0
    assert weights(cli) == simulated_without(
        config, tmp_path, late, *SMALL, "--trainer.participation=0.75"
    )
    lengths = column(cli.trainer, "clock/round_seconds")
    assert column(cli.trainer, "clock/seconds") == pytest.approx(
        [sum(lengths[: n + 1]) for n in range(3)]
    )
    for row in rows(cli.trainer, "ledger.csv"):
        begun = sum(lengths[: int(row["round"]) - 1])
        node = int(row["client"]) % 4
        after = (4.0, 3.0, 2.0, 1.0)[node] if row["round"] == "2" else node + 1.0
        assert int(row["download"]) > 0
        assert row["wasted"] == (row["upload"] if row["status"] == "lost" else "0")
        if after <= lengths[int(row["round"]) - 1]:
            assert (float(row["started"]), float(row["ended"])) == pytest.approx(
                (begun, begun + after)
            )
            assert int(row["upload"]) > 0
        else:
            assert (row["status"], row["upload"], row["ended"]) == ("lost", "0", "")
    assert column(cli.trainer, "clock/idle")[0] == pytest.approx(
        idle_of(rows(cli.trainer, "ledger.csv"), lengths[0])
    )


def idle_of(ledger: list[dict[str, str]], length: float) -> float:
    first = [row for row in ledger if row["round"] == "1"]
    return sum(length - float(row["ended"]) for row in first if row["ended"]) / len(first) / length


@pytest.mark.slow
@pytest.mark.essential
def test_who_answers_after_the_deadline_is_lost(tmp_path, monkeypatch):
    paced = Paced(tmp_path, monkeypatch, {1: (1.0, 2.0, 3.0, 9.0), 3: (5.0, 1.0, 1.0, 1.0)})
    every = "--trainer.participation=1.0"
    cli = deployed("scaffold", tmp_path, paced, *SMALL, every, deadline(4.5))
    assert lost(cli) == {1: {3, 7}, 3: {0, 4}}
    assert column(cli.trainer, "clients/late") == [2.0, 0.0, 2.0]
    assert column(cli.trainer, "clock/round_seconds") == pytest.approx([4.5, 4.0, 4.5])
    assert paced.waits == [4.5] * 3
    assert weights(cli) == simulated_without("scaffold", tmp_path, lost(cli), *SMALL, every)


def test_orders_that_measure_lines_are_not_beside_training(tmp_path, monkeypatch):
    """They are answered after nine seconds of a clock that stands still otherwise."""
    clock = [100.0]

    class Far(Paced):
        def exchange(self, messages, timeout):
            kinds = {Message.from_bytes(message).header["kind"] for message in messages.values()}
            clock[0] += 9.0 if kinds == {"echo"} else 0.0
            yield from super().exchange(messages, timeout)

    fake = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("fl_lightning.deploy.server.engine.time", fake)
    words = [*SMALL, "--data.num_clients=4", "--trainer.participation=1.0", deadline(9)]
    cli = deployed("fedavg", tmp_path, Far(tmp_path, monkeypatch, {}), *words)
    assert clock[0] == 136.0
    assert metadata_of(cli)["deployment"]["messages"]["beside_training"] == [0.0] * 3


def test_a_node_that_refuses_a_round_with_a_deadline_ends_no_run(tmp_path, monkeypatch):
    class Refuses(Paced):
        def exchange(self, messages, timeout):
            headers = {key: Message.from_bytes(sent).header for key, sent in messages.items()}
            for key, answer in super().exchange(messages, timeout):
                header = headers[key]
                no = key == "node1" and (header["kind"], header.get("round")) == ("train", 2)
                yield key, refusal("not now") if no else answer

    every = "--trainer.participation=1.0", "--trainer.max_rounds=3"
    cli = deployed(
        "fedavg", tmp_path, Refuses(tmp_path, monkeypatch, {}), *SMALL, *every, deadline(9)
    )
    assert column(cli.trainer, "clients/trained") == [8.0, 6.0, 8.0]


@pytest.mark.slow
@pytest.mark.essential
def test_an_answer_that_is_seen_after_the_deadline_is_late_and_wasted(tmp_path, monkeypatch):
    """Messages are looked for now and then: one may be found that came too late."""

    class Slow(Paced):
        def exchange(self, messages, timeout):
            yield from super().exchange(messages, timeout + 1)

    every = "--trainer.participation=1.0", "--trainer.max_rounds=2"
    paced = Slow(tmp_path, monkeypatch, {1: (1.0,) * 4, 2: (1.0, 1.0, 1.0, 3.0)})
    cli = deployed("fedavg", tmp_path, paced, *SMALL, *every, deadline(2.5))
    assert lost(cli) == {2: {3, 7}}
    wasted = [row for row in rows(cli.trainer, "ledger.csv") if row["status"] == "lost"]
    assert all(row["wasted"] == row["upload"] != "0" for row in wasted)


@pytest.mark.slow
@pytest.mark.essential
def test_a_round_with_too_few_is_void_and_a_run_is_continued_in_its_time(tmp_path, monkeypatch):
    paced = Paced(tmp_path, monkeypatch, {2: (1.0, 9.0, 9.0, 9.0)})
    words = [*SMALL, "--trainer.participation=1.0", deadline(4.5, least=3)]
    cli = deployed("fedavg", tmp_path, paced, *words, "--trainer.max_rounds=2")
    assert len(lost(cli)[2]) == 8
    assert column(cli.trainer, "clients/late") == [0.0, 6.0]
    path = f"--ckpt_path={cli.trainer.run_dir}"
    again = deployed("fedavg", tmp_path, paced, *words, path, "--trainer.allow_changed=true")
    assert column(again.trainer, "clock/seconds") == pytest.approx([4.0, 8.5, 12.5])
    assert weights(again) == simulated_without(
        "fedavg", tmp_path, {2: {*range(8)}}, *SMALL, words[-2]
    )


@pytest.mark.slow
@pytest.mark.essential
def test_a_simulation_with_the_devices_of_a_deployment_has_its_seconds(tmp_path, monkeypatch):
    """Where each client has a node. What is measured in the first round says how long the others
    take."""
    paced = Paced(tmp_path, monkeypatch, {2: (1.0, 2.0, 3.0, 40.0)})
    words = [*SMALL, "--data.num_clients=4", "--trainer.participation=1.0"]
    cli = deployed("fedavg", tmp_path, paced, *words, deadline(30.0))
    table = cli.trainer.run_dir / "devices.csv"
    ledger = [row for row in rows(cli.trainer, "ledger.csv") if row["round"] == "1"]
    with table.open() as file:
        for row, sent in zip(csv.DictReader(file), ledger, strict=True):
            examples = len(cli.trainer.data.client(int(row["client"])).train)
            size = int(sent["download"]) + int(sent["upload"])
            took = float(row["seconds_per_example"]) * examples + size / float(row["down"])
            assert (row["client"], row["up"]) == (sent["client"], row["down"])
            assert took == pytest.approx(float(sent["ended"]), rel=1e-4)
    devices = f"--trainer.clock.devices={{class_path: DeviceTable, init_args: {{path: {table}}}}}"
    alike = command_line("fedavg", tmp_path / "simulated", *words, devices, deadline(30.0))
    alike.start()
    assert column(cli.trainer, "clock/round_seconds") == pytest.approx([4.0, 30.0, 4.0])
    assert column(alike.trainer, "clock/round_seconds") == pytest.approx([4.0] * 3, rel=1e-4)


def test_what_has_no_place_in_a_deployment(tmp_path):
    with refused("--trainer.rounds FedBuff in a deployment", "OverSelection"):
        check_run(Run(FedAvg(), rounds=FedBuff(), deployed=True))
    with refused("--trainer.rounds FedBuff in a deployment"):
        check_run(Run(FedAvg()).timed(WallTiming(FedBuff())))
    check_run(Run(FedAvg(), deployed=True).timed(WallTiming(Deadline(1.0))))
    with refused("--trainer.rounds Deadline", "--trainer.clock"):
        check_run(Run(FedAvg(), rounds=Deadline(1.0)))
    plain = command_line("fedavg", tmp_path)
    measure_time(plain.trainer)
    assert plain.trainer.parts.timing is None
