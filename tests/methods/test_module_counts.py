"""What a LightningModule keeps beside its weights: each client begins anew, whoever trains it, and
what cannot be had again is in a run's identity or its log."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassF1Score
from toy import ready, run, sgd

from fl_lightning import rng
from fl_lightning.conformance.toy import trainer_in
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter
from fl_lightning.methods import (
    Centralised,
    Ditto,
    FedAvg,
    FedMPQKD,
    FineTuning,
    LabelSmoothing,
    LocalOnly,
)
from fl_lightning.models.constants import constants_of


class Lit(LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Weighed(Lit):
    """Its loss falls with the examples that a metric has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()

    def training_step(self, batch, batch_idx):
        self.seen.update(len(batch[1]))
        return super().training_step(batch, batch_idx) / self.seen.compute()


def seeded(make, *arguments, seed=0):
    with rng.torch_stream(seed, "weights"):
        return make(*arguments)


def measured(trainer):
    last = trainer.progress.history[-1]
    return {name: value for name, value in last.items() if not name.startswith("time/")}


@pytest.mark.parametrize(
    "make",
    [
        FedAvg,
        partial(FedAvg, finetune=FineTuning(steps=2)),
        partial(FedMPQKD, teacher="joint", optimizer=sgd(0.05)),
    ],
    ids=["steps", "finetune", "joint"],
)
def test_metrics_count_nothing_of_others_whoever_trains_and_evaluates(make, tmp_path):
    """Where one process makes all steps, those of evaluations come between the rounds."""
    one, two = (
        run(make(module=seeded(Weighed)), ready(), tmp_path, max_rounds=2, workers=workers)
        for workers in (1, 2)
    )
    assert torch.equal(one.method.server["weights"], two.method.server["weights"])
    assert measured(one) == measured(two)


class Interrupted(Meter):
    """Ends runs in their second round, while it is armed."""

    armed = False

    def on_round_start(self, round, fed):
        if round == 2 and Interrupted.armed:
            raise KeyboardInterrupt


def begun(make, folder, monkeypatch, **settings):
    """Begin a run of two rounds, and return what continues it by a method of its own."""
    settings |= {"max_rounds": 2, "callbacks": [Interrupted()]}
    trainer = trainer_in(folder, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(Interrupted, "armed", True)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(make(), ready())
    return partial(run, data=ready(), folder=folder, ckpt_path=str(trainer.run_dir), **settings)


def test_centralised_counts_anew_in_each_round(tmp_path, monkeypatch):
    """A continued run has the weights of a whole one."""

    def make():
        return Centralised(module=seeded(Weighed))

    whole = run(make(), ready(), tmp_path / "whole", max_rounds=2)
    rest = begun(make, tmp_path / "half", monkeypatch)(make())
    assert torch.equal(whole.method.server["weights"], rest.method.server["weights"])


def test_a_module_is_never_stacked(tmp_path):
    """A stack would count the examples of all its clients."""
    stacked, alone = (
        run(
            FedAvg(module=seeded(Weighed)),
            ready(),
            tmp_path / engine,
            max_rounds=2,
            engine=engine,
            workers=1,
        )
        for engine in ("batched", "sequential")
    )
    assert torch.equal(stacked.method.server["weights"], alone.method.server["weights"])
    log = (stacked.run_dir / "run.log").read_text()
    assert "nobody knows what a LightningModule keeps between steps" in log


def test_what_is_recorded_of_a_module_is_what_trains(tmp_path):
    """The user's own may change after a method has copied it."""
    module = Lit(lr=0.25)
    method = FedAvg(module=module)
    module.hparams.lr = 0.5
    trainer = run(method, ready(), tmp_path, max_rounds=1)
    config = yaml.safe_load((trainer.run_dir / "config.yaml").read_text())
    assert config["model"]["init_args"]["module"]["init_args"]["lr"] == 0.25


class WithStatistics(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.BatchNorm1d(10))


def test_logits_that_a_term_reads_move_no_statistics_of_a_personal_model(tmp_path):
    """After one step Ditto's v has seen one batch, once."""
    means = []
    for terms in ([], [LabelSmoothing(0.1)]):
        method = Ditto(module=seeded(WithStatistics), optimizer=sgd(0.05), terms=terms)
        settings = {"max_rounds": 1, "workers": 1, "max_local_steps": 1}
        states = run(method, ready(), tmp_path, **settings).progress.done.states
        kept = [method.layout.unpack(each["v"]) for each in states.values()]
        means.append(torch.stack([each["net.2.running_mean"] for each in kept]))
    torch.testing.assert_close(*means)


def test_a_run_goes_on_with_the_weights_that_its_clients_begin_with(tmp_path, monkeypatch):
    """A client that was never sampled begins with them, and no checkpoint has them."""

    def make(seed=0):
        return LocalOnly(module=seeded(Lit, seed=seed))

    again = begun(make, tmp_path, monkeypatch, participation=0.5)
    with pytest.raises(InputError, match="weights that clients begin with, which is drawn anew"):
        again(make(seed=1))
    assert again(make()).progress.done.round == 2


class Logging(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(10, average=None)

    def test_step(self, batch, batch_idx):
        self.f1(self(batch[0]), batch[1])
        self.log("f1", self.f1)


def test_a_metric_that_is_a_vector_is_left_out_before_the_run(tmp_path):
    trainer = run(FedAvg(module=seeded(Logging)), ready(), tmp_path, max_rounds=1)
    assert "Logging.test_step is left out" in (trainer.run_dir / "run.log").read_text()
    assert "test/accuracy" in trainer.progress.history[-1]


def test_an_example_of_inputs_is_no_constant_of_the_network():
    module = Lit()
    module.example_input_array = torch.rand(1, 3, 32, 32)
    assert constants_of(module, dict(module.named_parameters())) == {}
