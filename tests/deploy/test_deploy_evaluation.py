"""Clients whose models are their own evaluate them on their nodes: what is logged is what a
simulation logs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from deploy_transports import InProcess
from outcomes import rows_of
from safetensors.torch import save
from test_deploy import command_line, deployed, nodes_in, weights

from callbacks import ConfusionMatrix, GradientNorms
from fl_lightning.deploy.protocol.batch_states import parts_asked, read_states
from fl_lightning.deploy.protocol.messages import Message, MessageError
from fl_lightning.deploy.server.deployable import check_deployable
from fl_lightning.deploy.server.evaluating import read_sums
from fl_lightning.errors import InputError
from fl_lightning.evaluation import MAX_PARTS
from fl_lightning.hooks import Meter

SMALL = ["--trainer.eval_every=1", "--trainer.max_rounds=2", "--data.num_clients=5"]
IMAGES = [*SMALL, "--data.dataset=synthetic", "--data.synthetic_examples=240"]
IMAGES += ["--data.synthetic_test_examples=40"]
TEXTS = [
    *SMALL,
    "--trainer.max_local_steps=1",
    "--data.partition=IID",
    "--data.examples_per_client=12",
]
TEXTS += ["--data.tests_per_task=1"]


def measured(cli, name: str = "metrics") -> list[dict[str, str]]:
    rows = rows_of(cli.trainer.run_dir / f"{name}.csv")
    timed = ("time/", "energy/")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


PERSONAL = ("APFL", "Ditto", "FedALA", "FedProto", "FedRoD")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        pytest.param("local_only", IMAGES, marks=pytest.mark.essential),
        ("fedmosaic_digits", SMALL),
        pytest.param("vemoe_default", TEXTS, marks=pytest.mark.essential),
        ("lora_default", [*TEXTS, "--model=LocalOnly"]),
        pytest.param(
            "lora_default",
            [*TEXTS, "--model.adapter_average=residual"],
            marks=pytest.mark.essential,
        ),
        pytest.param("fedper", IMAGES, marks=pytest.mark.essential),
        ("finetune", IMAGES),
        *((name.lower(), IMAGES) for name in PERSONAL),
    ],
    ids=[
        "LocalOnly",
        "FedMosaic",
        "FedVEMoE",
        "LocalOnly on text",
        "residual",
        "FedPer",
        "FineTune",
        *PERSONAL,
    ],
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


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["stack", "alternate", "share_a"])
def test_adapters_that_travel_in_parts_are_those_of_the_simulation(rule, tmp_path):
    more = [*TEXTS, f"--model.adapter_average={rule}"]
    test_metrics_of_personal_models_are_those_of_the_simulation("lora_default", more, tmp_path)


class DeafToEvaluation(InProcess):
    """The second node does not answer when it is asked to evaluate."""

    def exchange(self, messages, timeout):
        deaf = {key for key in messages if Message.from_bytes(messages[key]).kind == "evaluate"} & {
            "node1"
        }
        yield from super().exchange({key: messages[key] for key in messages.keys() - deaf}, timeout)


def test_a_node_that_does_not_evaluate_is_left_out_of_the_mean_and_named(tmp_path, caplog):
    more = [
        *IMAGES,
        "--trainer.max_rounds=1",
        "--trainer.max_local_steps=1",
        "--trainer.participation=1.0",
    ]
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

    more = [
        *IMAGES,
        "--trainer.max_rounds=1",
        "--trainer.max_local_steps=1",
        "--trainer.participation=1.0",
    ]
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
    with pytest.raises(ValueError, match="SafetensorError"):
        read_sums(b"nonsense", "test", {3})


def test_what_reads_outputs_of_personal_models_is_refused(tmp_path: Path):
    cli = command_line("local_only", tmp_path, *IMAGES)
    cli.trainer.callbacks.append(ConfusionMatrix())
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=0)
    with pytest.raises(InputError, match=r"callbacks.ConfusionMatrix; it reads the outputs"):
        check_deployable(fed)
    named = command_line("local_only", tmp_path, *IMAGES, "--data.metrics+=torchmetrics.AUROC")
    fed = named.trainer.prepare(named.model, named.datamodule, seed=0)
    with pytest.raises(
        InputError, match=r"AUROC with LocalOnly in a deployment; it keeps outputs for test"
    ):
        check_deployable(fed)


class Shows(Meter):
    reads_states = "router/*"


@pytest.mark.parametrize(("config", "keeps"), [("local_only", True), ("fedavg", False)])
def test_what_reads_states_is_refused_or_named_where_nodes_have_them(
    tmp_path: Path, caplog, config, keeps
):
    cli = command_line(config, tmp_path, *IMAGES)
    cli.trainer.callbacks.append(Shows())
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=0)
    check_deployable(fed)
    assert ("Shows: router/* is left out" in caplog.text) == keeps
    fed.callbacks.append(GradientNorms())
    with (
        pytest.raises(InputError, match=r"callbacks.GradientNorms with LocalOnly in a deployment")
        if keeps
        else nullcontext()
    ):
        check_deployable(fed)


MODULE = """
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
        self.f1, self.kept = MulticlassF1Score(num_classes=10), MulticlassAUROC(num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def _log(self, split, batch):
        logits = self(batch[0])
        self.f1(logits, batch[1])
        self.kept.update(logits.softmax(1), batch[1])
        self.log(f"{split}/own_f1", self.f1)
        self.log(f"{split}/kept", self.kept)
        self.log(f"{split}/largest", logits.abs().max(), reduce_fx="max")
        self.log(f"{split}/noisy", logits.mean() + torch.rand(()))

    def validation_step(self, batch, batch_idx):
        self._log("val", batch)

    def test_step(self, batch, batch_idx):
        self._log("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_named_metrics_and_logs_of_a_module_are_those_of_the_simulation(
    tmp_path, monkeypatch, caplog
):
    """But for a metric that keeps outputs, which stay on nodes: that is left out, and the log says
    so."""
    (tmp_path / "lit_of_nodes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    more = [*IMAGES, "--model.module=lit_of_nodes.Lit", "--trainer.callbacks=[]"]
    more += ["--data.metrics+=torchmetrics.classification.MulticlassF1Score"]
    more += ["--data.metrics+=torchmetrics.AUROC", "--data.metrics.thresholds=10"]
    reference = command_line("local_only", tmp_path / "simulated", *more)
    reference.start()
    cli = deployed(
        "local_only", tmp_path, InProcess(nodes_in(tmp_path, allow=("lit_of_nodes",))), *more
    )
    expected = measured(reference)
    for row in expected:
        assert {row.pop("test/kept"), row.pop("val/kept")} != {""}
        assert 0 < float(row["personal/f1_score"]) != float(row["test/f1_score"])
        assert all(
            math.isfinite(float(row[f"{split}/{name}"]))
            for split in ("test", "val")
            for name in LOGGED
        )
    assert measured(cli) == expected
    assert (
        "Lit.kept keeps outputs, which stay on nodes: what is logged of it there is left out"
        in caplog.text
    )


LOGGED = ("own_f1", "largest", "noisy", "f1_score", "auroc")


def test_states_that_were_not_asked_for_are_refused(tmp_path, monkeypatch):
    (tmp_path / "lit_of_nodes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    more = [
        *IMAGES,
        "--model.module=lit_of_nodes.Lit",
        "--data.metrics+=torchmetrics.classification.MulticlassF1Score",
    ]
    cli = command_line("local_only", tmp_path, *more)
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=0)
    assert parts_asked(fed, ["test", "validation"]) == ["named", "test_logs", "val_logs"]
    assert parts_asked(fed, ["validation"]) == ["val_logs"]
    mine, one, ten = (
        3 * MAX_PARTS,
        torch.ones((), dtype=torch.float64),
        torch.ones(10, dtype=torch.int64),
    )
    for kind, key, value, good in (
        ("named", f"{mine}||f1_score|.tp", ten, True),
        ("named", f"{mine}||f1_score|.tp", ten[:9], False),
        ("named", f"{mine}||f1_score|.tp", ten.float(), False),
        ("named", f"{mine}||f1_score|not finite", torch.ones(()), True),
        ("named", f"{mine}||auroc|.tp", ten, False),
        ("named", f"{mine + MAX_PARTS}||f1_score|.tp", ten, False),
        ("named", "f1_score", ten, False),
        ("test_logs", f"{mine}|=mean|test/largest|value", one, True),
        ("test_logs", f"{mine}|=mean|val/largest|value", one, False),
        ("test_logs", f"{mine}|=mean|final/largest|value", one, False),
        ("test_logs", f"{mine}|=mean|test/largest|value", one.float(), False),
        ("test_logs", f"{mine}|=median|test/largest|value", one, False),
        ("val_logs", f"{mine}|f1|val/own_f1|.tp", ten, True),
        ("val_logs", f"{mine}|kept|val/kept|.preds", torch.ones(3, 10), False),
        ("val_logs", f"{mine}|=sum", one, False),
    ):
        part = save({key: value})
        if good:
            assert torch.equal(read_states(fed, part, kind, {3})[key], value)
        else:
            with pytest.raises(MessageError, match="was not asked for"):
                read_states(fed, part, kind, {3})
    with pytest.raises(MessageError, match="SafetensorError"):
        read_states(fed, b"nonsense", "named", {3})
