"""Runs that are continued elsewhere: begun on nodes and gone on with here, or the other way round.

Clients that keep nothing have the weights of a run that was never interrupted; others are refused
by name, as they would begin anew in silence. Nodes that have lost what clients keep do not let a
run end as if it had gone well.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from own_leaves import config, leaf, leaf_file, own_nodes
from own_leaves import deployed as deployed_on_own_data
from safetensors.torch import load_file
from test_deploy import (
    ALL,
    InProcess,
    KilledInRoundThree,
    command_line,
    deployed,
    metadata_of,
    nodes_in,
    simulated,
    weights,
)

from fl_lightning.__main__ import main
from fl_lightning.deploy import command
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.hooks import Callback
from fl_lightning.methods import FedAvg

SMALL = [*ALL[:5], "--trainer.max_local_steps=2"]
KD = [*ALL, "--trainer.max_local_steps=2"]


class Stop(Callback):
    """Ends the run before a round, as Ctrl-C does."""

    def __init__(self, round: int = 3) -> None:
        self.round = round

    def on_round_start(self, round, fed):
        if round == self.round:
            raise KeyboardInterrupt


def stopped(name: str, folder: Path, *more: str) -> Path:
    """The directory of a simulated run of which two rounds are done."""
    cli = command_line(name, folder / "fit", *more)
    cli.trainer.callbacks.append(Stop())
    with pytest.raises(KeyboardInterrupt):
        cli.start()
    return cli.trainer.run_dir


def killed(name: str, folder: Path, *more: str) -> Path:
    """The directory of a deployed run of which two rounds are done."""
    with pytest.raises(KeyboardInterrupt):
        deployed(name, folder, KilledInRoundThree(nodes_in(folder)), *more)
    (run,) = (folder / "deployed").glob("*/*/")
    return run


def go_on(name: str, folder: Path, run: Path, *more: str):
    cli = command_line(name, folder / "any", *more, f"--ckpt_path={run}")
    cli.start()
    return cli


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_of_clients_that_keep_nothing_may_change_place(tmp_path, caplog):
    caplog.set_level("INFO")
    expected = simulated("fedavg", tmp_path, *SMALL)
    run = killed("fedavg", tmp_path, *SMALL)
    assert json.loads((run / "metadata.json").read_text())["deployment"]["clients_keep"] is False
    cli = go_on("fedavg", tmp_path, run, *SMALL, "--trainer.engine=auto")
    assert weights(cli) == expected
    assert "engine: sequential" in caplog.text
    run = stopped("fedavg", tmp_path, *SMALL)
    cli = deployed("fedavg", tmp_path, InProcess(nodes_in(tmp_path)), *SMALL, f"--ckpt_path={run}")
    assert weights(cli) == expected


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(("name", "more"), [("fedkd", KD), ("local_only", SMALL)])
def test_a_run_of_clients_that_keep_something_is_refused_elsewhere(name, more, tmp_path):
    run = killed(name, tmp_path, *more)
    before = (run / "metadata.json").read_text()
    with pytest.raises(
        InputError, match=r"it was deployed, and what its clients keep is on their nodes.*deploy"
    ):
        go_on(name, tmp_path, run, *more)
    assert (run / "metadata.json").read_text() == before
    run = stopped(name, tmp_path, *more)
    with pytest.raises(
        InputError, match="it was simulated, and what its clients keep is in its checkpoints"
    ):
        deployed(name, tmp_path, InProcess(nodes_in(tmp_path)), *more, f"--ckpt_path={run}")


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("name", ["local_only", "fedavg"])
def test_a_test_of_a_deployed_run_says_where_it_has_no_models_of_clients(name, tmp_path, capsys):
    run = killed(name, tmp_path, *SMALL)
    assert main(["test", "--ckpt_path", str(run), "--probes", "clean,cost"]) == 0
    found = json.loads((run / "test.json").read_text())
    here = name == "fedavg"
    said = "clean left out: the clients' own models are on their nodes"
    assert (said in " ".join(capsys.readouterr().out.split())) != here
    assert found["skipped"] == ({} if here else {"clean": [said]})
    assert ("test/accuracy" in found["metrics"]) == here
    assert "cost/flops" in found["metrics"]


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_goes_on_from_any_checkpoint_that_the_server_has_kept(tmp_path, caplog):
    """Of each the nodes have what clients kept then, also of those that were not trained in
    between. Its rounds are others, by the clock of nodes."""
    more = [
        *SMALL,
        "--trainer.max_rounds=6",
        "--trainer.keep_checkpoints=9",
        "--trainer.participation=0.5",
    ]
    expected = simulated("scaffold", tmp_path, *more)
    run = deployed("scaffold", tmp_path, InProcess(nodes_in(tmp_path)), *more).trainer.run_dir
    for round in (4, 2, 1):
        past = f"--ckpt_path={run}/checkpoints/round_{round:06d}"
        again = deployed("scaffold", tmp_path, InProcess(nodes_in(tmp_path)), *more, past)
        assert weights(again) == expected
        assert f"rounds after {round} are made anew in another way" in caplog.text


@pytest.mark.slow
@pytest.mark.essential
def test_a_copy_does_not_write_over_the_states_of_the_original(tmp_path):
    more = [*SMALL, "--trainer.max_local_steps=1"]
    expected, run = simulated("scaffold", tmp_path, *more), killed("scaffold", tmp_path, *more)
    copy = shutil.copytree(run, tmp_path / "copy")
    states = {path: path.read_bytes() for path in tmp_path.glob("node*/states/*/*/*")}
    with pytest.raises(InputError, match=f"--ckpt_path {copy}; it is a copy of {run}, .* move it"):
        deployed("scaffold", tmp_path, InProcess(nodes_in(tmp_path)), *more, f"--ckpt_path={copy}")
    assert states
    assert {path: path.read_bytes() for path in tmp_path.glob("node*/states/*/*/*")} == states
    moved = run.rename(tmp_path / "moved")
    cli = deployed(
        "scaffold", tmp_path, InProcess(nodes_in(tmp_path)), *more, f"--ckpt_path={moved}"
    )
    assert weights(cli) == expected
    assert metadata_of(cli)["deployment"]["directory"] == str(moved)


@pytest.mark.slow
@pytest.mark.essential
def test_private_runs_and_batched_ones_are_refused_elsewhere(tmp_path):
    """Noise of a simulation follows from the seed, and stacked clients are rounded in another
    way."""
    private = [*SMALL, "--trainer.participation=1.0", "--model.weigh_by=clients"]
    noise = "--trainer.privacy={clip_norm: 0.5, noise_multiplier: 0.8, where: central}"
    run = killed("fedavg", tmp_path, *private, noise)
    with pytest.raises(InputError, match="it was deployed, with noise that nobody can repeat"):
        go_on("fedavg", tmp_path, run, *private, noise)
    for more, says in (
        ([noise], "noise that follows from the seed"),
        (["--trainer.engine=batched"], "batched"),
    ):
        run = stopped("fedavg", tmp_path, *private, *more)
        nodes = InProcess(nodes_in(tmp_path))
        with pytest.raises(InputError, match=f"it was simulated,? with .*{says}"):
            deployed("fedavg", tmp_path, nodes, *private, *more, f"--ckpt_path={run}")


def test_a_run_on_the_nodes_own_data_is_not_simulated_further(tmp_path):
    test = leaf_file(tmp_path / "test.json", {"t": 30})
    each = {0: leaf_file(tmp_path / "own0.json", {"a": 9})}
    cli = config(tmp_path, "server", leaf(test, test), max_rounds=1)
    run = deployed_on_own_data(cli, own_nodes(tmp_path, each, 1), 1).trainer.run_dir
    words = [
        "--config",
        str(tmp_path / "server.yaml"),
        f"--ckpt_path={run}",
        "--trainer.allow_changed=true",
    ]
    assert main(["fit", *words]) == 2
    with pytest.raises(
        InputError, match=r"nodes' own data; continue it with deploy and --deploy.own_data"
    ):
        type(cli)("fit", words).start()


def test_deploy_refuses_before_anything_is_started(tmp_path, monkeypatch, capsys):
    more = [*SMALL, "--trainer.max_local_steps=1"]
    run = stopped("local_only", tmp_path, *more)
    monkeypatch.setattr(command.launch, "require_flower", lambda: None)
    monkeypatch.setattr(command.launch, "flwr_run", lambda *a: pytest.fail("it was started"))
    words = command_line("local_only", tmp_path / "any", *more).typed
    assert main(["deploy", *words, f"--ckpt_path={run}"]) == 2
    assert (
        "it was simulated, and what its clients keep is in its checkpoints"
        in capsys.readouterr().err
    )


def test_clients_may_begin_to_keep_something_in_a_later_round(tmp_path, monkeypatch):
    """What they have not kept until then is not lost."""
    ended = FedAvg.end_client

    def end_client(self, client):
        ended(self, client)
        if self.round > 1:
            client.state["rounds"] = client.state.get("rounds", torch.zeros(1)) + 1

    monkeypatch.setattr(FedAvg, "end_client", end_client)
    monkeypatch.setattr(FedAvg, "keeps_state", True)
    cli = deployed("fedavg", tmp_path, InProcess(nodes_in(tmp_path)), *SMALL)
    assert ",dropped," not in (cli.trainer.run_dir / "ledger.csv").read_text()
    (last,) = tmp_path.glob("node0/states/*/client_000000/after_000003.safetensors")
    assert load_file(last)["rounds"] == 2


class LosesFolders(InProcess):
    """Nodes lose what clients keep before round 2."""

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__(nodes_in(folder))
        self.folders = [folder / name / "states" for name in names]

    def exchange(self, messages, timeout):
        headers = [Message.from_bytes(message).header for message in messages.values()]
        if {header.get("round") for header in headers} == {2} and headers[0]["kind"] == "train":
            for folder in self.folders:
                shutil.rmtree(folder)
        yield from super().exchange(messages, timeout)


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_whose_clients_have_all_lost_their_state_stops(tmp_path):
    with pytest.raises(RunStopped, match=r"what clients 0, 1, 2, 3 kept is on none.*--ckpt_path"):
        deployed("fedkd", tmp_path, LosesFolders(tmp_path, "node0", "node1"), *KD)
    (found,) = (tmp_path / "deployed").glob("*/*/metadata.json")
    assert json.loads(found.read_text())["status"] == "failed"
    assert len((found.parent / "metrics.csv").read_text().splitlines()) == 2  # round 1 and no other


@pytest.mark.slow
@pytest.mark.essential
def test_clients_without_the_factor_that_rests_are_known_to_have_lost_it(tmp_path, caplog):
    """In round 2 they are sent the other factor alone, and cannot be trained; in round 3 they are
    sent both."""
    words = [
        "--trainer.participation=1.0",
        "--trainer.max_local_steps=2",
        "--data.num_clients=4",
        "--data.partition=Natural",
        "--data.examples_per_client=12",
        "--data.tests_per_task=1",
        "--data.generate=false",
        "--model.adapter_average=alternate",
    ]
    cli = deployed("lora_default", tmp_path, LosesFolders(tmp_path, "node1"), *words)
    assert metadata_of(cli)["status"] == "finished"
    line = "node n1: client 1: what it kept after round 1"
    assert len([said for said in caplog.messages if said.startswith(line)]) == 2
    assert "what clients 1, 3 kept is not on their nodes any more" in caplog.text


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_of_which_some_have_says_so_at_its_end(tmp_path, caplog):
    cli = deployed("fedkd", tmp_path, LosesFolders(tmp_path, "node1"), *KD)
    assert metadata_of(cli)["status"] == "finished"
    assert "what clients 1, 3 kept is not on their nodes any more" in caplog.text
