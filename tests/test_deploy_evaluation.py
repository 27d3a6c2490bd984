"""Clients whose models are their own evaluate them on their nodes: what is logged is what a simulation logs."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from test_deploy import command_line, deployed, nodes_in, weights

from callbacks import ConfusionMatrix
from fl_lightning.deploy.deployable import check_deployable
from fl_lightning.deploy.evaluating import read_sums
from fl_lightning.deploy.messages import Message
from fl_lightning.deploy.transport_local import InProcess
from fl_lightning.errors import InputError
from fl_lightning.evaluation import MAX_PARTS

SMALL = ["--trainer.eval_every=1", "--trainer.max_rounds=2", "--data.num_clients=5"]
IMAGES = [*SMALL, "--data.dataset=synthetic", "--data.synthetic_examples=240"]
IMAGES += ["--data.synthetic_test_examples=40"]
TEXTS = [*SMALL, "--trainer.max_local_steps=1", "--data.partition=IID", "--data.examples_per_client=60"]


def measured(cli, name: str = "metrics") -> list[dict[str, str]]:
    with (cli.trainer.run_dir / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    timed = ("time/", "energy/")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("local_only", IMAGES),
        ("fedmosaic_digits", SMALL),
        ("vemoe_default", TEXTS),
        ("lora_default", [*TEXTS, "--model=LocalOnly"]),
    ],
    ids=["LocalOnly", "FedMosaic", "FedVEMoE", "LocalOnly on text"],
)
def test_metrics_of_personal_models_are_those_of_the_simulation(config, more, tmp_path):
    cli = deployed(config, tmp_path, InProcess(nodes_in(tmp_path)), *more)
    reference = command_line(config, tmp_path / "simulated", *more)
    reference.start()
    assert weights(cli) == weights(reference)
    rows = measured(cli)
    assert rows == measured(reference)
    assert all(math.isfinite(float(row["test/loss"])) for row in rows)
    assert {key.split("/")[0] for row in rows for key in row} >= {"test", "val"}
    assert measured(cli, "clients") == measured(reference, "clients")


class DeafToEvaluation(InProcess):
    """The second node does not answer when it is asked to evaluate."""

    def exchange(self, messages, timeout):
        deaf = {key for key in messages if Message.from_bytes(messages[key]).kind == "evaluate"} & {"node1"}
        yield from super().exchange({key: messages[key] for key in messages.keys() - deaf}, timeout)


def test_a_node_that_does_not_evaluate_is_left_out_of_the_mean_and_named(tmp_path, caplog):
    more = [*IMAGES, "--trainer.max_rounds=1", "--trainer.max_local_steps=1", "--trainer.participation=1.0"]
    cli = deployed("local_only", tmp_path, DeafToEvaluation(nodes_in(tmp_path)), *more)
    assert "clients 1, 3 are left out of val/* and test/*: they did not answer" in caplog.text
    assert {row["client"] for row in measured(cli, "clients")} == {"0", "2", "4"}


def test_a_node_whose_folder_is_lost_leaves_its_clients_out(tmp_path, caplog):
    class Loses(InProcess):
        def exchange(self, messages, timeout):
            if Message.from_bytes(next(iter(messages.values()))).kind == "evaluate":
                for path in (tmp_path / "node0" / "states").glob("*/client_000002/*"):
                    path.unlink()
            yield from super().exchange(messages, timeout)

    more = [*IMAGES, "--trainer.max_rounds=1", "--trainer.max_local_steps=1", "--trainer.participation=1.0"]
    cli = deployed("local_only", tmp_path, Loses(nodes_in(tmp_path)), *more)
    assert "client 2 cannot be evaluated: what it kept after round 1 is not here" in caplog.text
    assert {row["client"] for row in measured(cli, "clients")} == {"0", "1", "3", "4"}


def test_sums_that_were_not_asked_for_are_refused():
    key, pair = f"{3 * MAX_PARTS}/loss", torch.ones(2, dtype=torch.float64)
    rows = torch.tensor([[3.0, 1.0, 1.0]], dtype=torch.float64)
    assert torch.equal(read_sums(save({key: pair}), "test", {3})[key], pair)
    assert torch.equal(read_sums(save({key: rows}), "validation", {3})[key], rows)
    for split, sums, clients in (
        ("test", {key: pair}, {2}),  # of a client that is not its own
        ("validation", {key: rows + 1}, {3, 5}),  # rows of another client
        ("test", {key: pair.float()}, {3}),
        ("test", {"loss": pair}, {3}),
        ("test", {key: rows}, {3}),
    ):
        with pytest.raises(ValueError, match="was not asked for"):
            read_sums(save(sums), split, clients)
    with pytest.raises(ValueError, match="cannot be read"):
        read_sums(b"nonsense", "test", {3})


def test_what_reads_outputs_of_personal_models_is_refused(tmp_path: Path):
    cli = command_line("local_only", tmp_path, *IMAGES)
    cli.trainer.callbacks.append(ConfusionMatrix())
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=0)
    with pytest.raises(InputError, match=r"callbacks.ConfusionMatrix; it reads the outputs"):
        check_deployable(fed)
