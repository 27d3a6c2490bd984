"""A LightningModule that knows nothing of us trains as the client of any method whose objective is
the task loss and other terms."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from places import CONFIGS
from ten import assert_same_within_rounding
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from toy import ready, run, sgd

from fl_lightning import methods, rng
from fl_lightning.__main__ import main
from fl_lightning.conformance.toy import images
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg, FedMPQ, FedNTD, Method

PLAIN = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F

class LitClassifier(LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)}
"""


class Lit(LightningModule):
    def __init__(self, outputs: int = 10, width: int = 3 * 32 * 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(width, outputs))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return {"loss": loss, "extra": 1}

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.05)]


def seeded(make, *arguments):
    with rng.torch_stream(0, "weights"):
        return make(*arguments)


def test_it_is_fedavg_of_the_same_network(tmp_path):
    wrapped = FedAvg(module=seeded(Lit))
    plain = FedAvg(network=lambda classes: seeded(Lit).net, optimizer=sgd(0.05))
    for method in (wrapped, plain):
        run(method, ready(), tmp_path, max_rounds=3, participation=0.5)
    assert torch.equal(wrapped.server["weights"], plain.server["weights"])


class Referring(Lit):
    """The same by itself, and by a function, a hook or an attribute that refers to the module."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.scale, self.how = nn.Parameter(torch.ones(10)), how
        self.side = nn.Linear(3 * 32 * 32, 10)
        if how == "function":
            self.scaled = lambda z: z * self.scale
        elif how == "list":
            inner = lambda z: z * self.scale  # noqa: E731
            self.steps = [lambda z, net=self.net: net(z), partial(lambda z: inner(z))]
        elif how == "hook":
            self.net[1].register_forward_hook(lambda layer, x, y: y + self.side(x[0]))
        elif how == "attribute":
            self.scale.rate = 0.5

    def forward(self, x):
        if self.how == "function":
            return self.scaled(self.net(x) + self.side(x.flatten(1)))
        if self.how == "list":
            return self.steps[1](self.steps[0](x) + self.side(x.flatten(1)))
        y = self.net(x)
        return (y if self.how == "hook" else y + self.side(x.flatten(1))) * self.scale

    def configure_optimizers(self):
        rest = [each for each in self.parameters() if each is not self.scale]
        slow = {"params": [self.scale], "lr": getattr(self.scale, "rate", 0.5)}
        return torch.optim.SGD([slow, {"params": rest}], lr=0.05)


@pytest.mark.parametrize("how", ["function", "list", "hook", "attribute"])
def test_a_copy_is_trained_as_the_module_would_be(how, tmp_path):
    methods = [FedNTD(module=seeded(Referring, each)) for each in ("", how)]
    for method in methods:
        run(method, ready(), tmp_path, max_rounds=2, participation=0.5)
    assert torch.equal(methods[0].server["weights"], methods[1].server["weights"])


def test_what_a_copy_would_lack_is_refused():
    hooked, computed = Lit(), Lit()
    hooked.net[1].weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(InputError, match=r"hook of its parameter net\.1\.weight"):
        FedAvg(module=hooked)
    computed.gain = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(InputError, match="Lit, which cannot be copied"):
        FedAvg(module=computed)


class Elsewhere(Lit):
    def __init__(self):
        super().__init__()
        made = {"net": self.net}
        self.compute = lambda x: made["net"](x)

    def forward(self, x):
        return self.compute(x)


def test_a_module_that_computes_with_weights_of_another_is_refused(tmp_path):
    with pytest.raises(InputError, match="a function, such as a hook, that uses parts of it"):
        run(FedAvg(module=Elsewhere()), ready(), tmp_path, max_rounds=1)


def test_another_default_type_is_refused(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(InputError, match=r"set_default_dtype\(torch\.float64\)"):
            run(FedAvg(module=Lit()), ready(), tmp_path, max_rounds=1)
    finally:
        torch.set_default_dtype(torch.float32)


class Mixed(Lit):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x * np.random.beta(2, 2) + random.random()), y)  # noqa: NPY002


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_step_draws_from_numpy_and_python_is_that_of_the_client_and_round(workers, tmp_path):
    ends = [FedAvg(module=seeded(Mixed)) for _ in range(2)]
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    for method, number in zip(ends, (1, workers), strict=True):
        run(method, ready(), tmp_path, max_rounds=2, participation=0.5, workers=number)
    assert torch.equal(ends[0].server["weights"], ends[1].server["weights"])
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


@pytest.mark.slow
@pytest.mark.essential
def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("plain_lit.py").write_text(PLAIN)
    config = str(CONFIGS / "fedavg.yaml")
    flags = [
        "--model.module",
        "plain_lit.LitClassifier",
        "--model.module.width",
        "4",
        "--trainer.max_rounds",
        "2",
        "--trainer.logger",
        "false",
    ]
    hashes = []
    for poison in (1, 2):
        torch.manual_seed(poison)
        assert main(["fit", "--config", config, *flags]) == 0
        newest = max(Path("runs/fedavg").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        hashes.append((newest / "metadata.json").read_text().split('"weights_sha256": "')[1][:64])
        assert newest.name.removesuffix("-2") == "FedAvg-LitClassifier-digits-width4-seed0"
    assert hashes[0] == hashes[1]  # its initial weights follow from the seed too


ADDITIVE = {
    "FedProx": {"mu": 0.1},
    "FedNTD": {},
    "QFedAvg": {},
    "FedPQ": {},
    "AQFL": {},
    "FedMPQ": {},
    "FedMPQKD": {},
    "FedMPQKD joint": {"teacher": "joint"},
    "FedKD": {"distill_epochs": 1},
}


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("name", ADDITIVE)
def test_it_is_every_additive_method_of_the_same_network(name, tmp_path):
    """The module's loss takes the place of the task loss; the other terms, and what travels,
    stay."""
    make = partial(getattr(methods, name.split()[0]), optimizer=sgd(0.05), **ADDITIVE[name])
    wrapped, plain = make(module=seeded(Lit)), make(network=lambda classes: seeded(Lit).net)
    for method in (wrapped, plain):
        run(method, ready(public_examples=20), tmp_path, max_rounds=2, participation=0.4)
    assert_same_within_rounding(name.split()[0], plain.server, wrapped.server, 1e-5)
    other = make(module=seeded(Twice))
    run(other, ready(public_examples=20), tmp_path, max_rounds=2, participation=0.4)
    assert float((other.server["weights"] - plain.server["weights"]).abs().max()) > 1e-3


class Twice(Lit):
    """Another objective than the plain task loss."""

    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)["loss"]


class WithStatistics(Lit):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.BatchNorm1d(10))


@pytest.mark.parametrize("name", ["FedNTD", "FedLC", "FedMPQKD"])
def test_logits_that_a_term_reads_move_no_statistics(name, tmp_path):
    """They are computed beside the module's own pass, which moves them once."""
    make = partial(getattr(methods, name), optimizer=sgd(0.05), **ADDITIVE.get(name, {}))
    wrapped = make(module=seeded(WithStatistics))
    plain = make(network=lambda classes: seeded(WithStatistics).net)
    found = []
    for method in (wrapped, plain):
        run(method, ready(), tmp_path, max_rounds=1, participation=0.2)
        found.append(dict(method.deploy().named_buffers()))
    statistics = {name.removeprefix("net."): value for name, value in found[0].items()}
    assert statistics["2.running_mean"].abs().sum() > 0
    for key in ("2.running_mean", "2.running_var"):
        torch.testing.assert_close(statistics[key], found[1][key], rtol=1e-3, atol=1e-4)


class Penalised(Lit):
    """A loss with more in it than the cross-entropy."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] + self.penalty()

    def penalty(self):
        return sum(weight.square().sum() for weight in self.parameters())


def test_a_term_in_place_of_the_cross_entropy_leaves_what_else_a_module_wants(tmp_path):
    """Both took away all of the module's loss, or a share of it."""
    smooth = FedAvg(module=seeded(Penalised), terms=[methods.LabelSmoothing(0.5)])
    calibrated = methods.FedLC(module=seeded(Penalised), tau=2.0)
    inputs, target = torch.ones(4, 3, 32, 32), torch.tensor([0, 1, 2, 2])
    for method in (smooth, calibrated):
        run(method, ready(), tmp_path, max_rounds=1, workers=1)
        logits = method.train().module(inputs)
        if method is calibrated:
            logits = logits + methods.CalibratedLogits(2.0).shift(method.class_counts)
        smoothing = 0.5 if method is smooth else 0.0
        expected = F.cross_entropy(logits, target, label_smoothing=smoothing)
        found = method.training_step((inputs, target), 0)["loss"]
        torch.testing.assert_close(found, expected + method.module.penalty())


class Scheduled(Lit):
    settings: ClassVar[dict] = {}
    make = partial(schedules.StepLR, step_size=1, gamma=0.5)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make(optimizer), **self.settings},
        }


class EveryOther(Scheduled):
    settings: ClassVar[dict] = {"interval": "epoch", "frequency": 2}


class AsLists(Lit):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [schedules.StepLR(optimizer, step_size=1, gamma=0.5)]


@pytest.mark.parametrize(("lit", "every"), [(Scheduled, 1), (EveryOther, 2), (AsLists, 1)])
def test_its_schedule_goes_by_rounds(lit, every, tmp_path):
    wrapped = FedAvg(module=seeded(lit))
    falling = partial(schedules.LambdaLR, lr_lambda=lambda epoch: 0.5 ** (epoch // every))
    plain = FedAvg(network=lambda classes: seeded(Lit).net, optimizer=sgd(0.05), scheduler=falling)
    constant = FedAvg(network=lambda classes: seeded(Lit).net, optimizer=sgd(0.05))
    for method in (wrapped, plain, constant):
        run(method, ready(), tmp_path, max_rounds=4, participation=0.5)
    assert torch.equal(wrapped.server["weights"], plain.server["weights"])
    assert not torch.equal(wrapped.server["weights"], constant.server["weights"])


class ByBatch(Scheduled):
    settings: ClassVar[dict] = {"interval": "step"}


class Closures(Lit):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Plateau(Scheduled):
    make = schedules.ReduceLROnPlateau
    settings: ClassVar[dict] = {"monitor": "val_loss"}


class TwoOptimizers(Lit):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.05)] * 2


class Once(Lit):
    """Its optimiser is made once, with a schedule or without."""

    def __init__(self, scheduled: bool = False) -> None:
        super().__init__()
        adam = torch.optim.Adam(self.parameters(), lr=0.05)
        self.made = ([adam], [schedules.StepLR(adam, step_size=1)]) if scheduled else adam

    def configure_optimizers(self):
        return self.made


class ScheduleOnce(Once):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.05)], self.made[1]


class CachedInAMethod(FedAvg):
    @cached_property
    def made(self):
        return torch.optim.Adam(self.trainable(), lr=0.05)

    def configure_optimizers(self):
        return self.made


class AsksTheTrainer(Lit):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] / self.trainer.num_training_batches


class AsksTheEpoch(Lit):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * (1 if self.current_epoch else 2)


class CountsSteps(Lit):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [
            schedules.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        ]


class Lossless(Lit):
    def training_step(self, batch, batch_idx):
        return None


class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Spread(Lit):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class Detached(Lit):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"].detach()


class Complex(Lit):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedAvg(module=Lit(7)), r"makes \(2, 7\) of two examples; logits \[2, 10\]"),
        (
            lambda: FedAvg(module=Lit(width=5)),
            r"--model.module Lit: it raised RuntimeError .*; it has to map",
        ),
        (lambda: FedAvg(module=FedMPQ()), "write --model FedMPQ"),
        (lambda: FedAvg(module=Manual()), "manual optimisation"),
        (lambda: FedAvg(module=Lossless()), "returned NoneType as loss"),
        (lambda: FedAvg(module=Spread()), r"a loss of shape \(\d+,\).*return its mean"),
        (lambda: FedAvg(module=Detached()), "a loss without a gradient"),
        (lambda: FedAvg(module=Complex()), "complex numbers in phase"),
        (lambda: FedAvg(module=ByBatch()), "steps its scheduler by 'step'"),
        (
            lambda: FedAvg(module=Closures()),
            "configure_optimizers returns LBFGS; a local step has one gradient and no closure",
        ),
        (lambda: FedAvg(module=Plateau()), "ReduceLROnPlateau; .* not from a metric"),
        (
            lambda: FedAvg(module=TwoOptimizers()),
            "TwoOptimizers returns 2 of them; a client has one local optimiser",
        ),
        (lambda: FedAvg(module=Once()), "of Once returns one Adam twice; .* make it inside"),
        (lambda: methods.Centralised(module=Once()), "returns one Adam twice"),
        (lambda: FedAvg(module=Once(scheduled=True)), "returns one Adam twice"),
        (lambda: FedAvg(module=ScheduleOnce(scheduled=True)), "returns one StepLR twice"),
        (CachedInAMethod, "of CachedInAMethod returns one Adam twice"),
        (
            lambda: FedAvg(module=Scheduled(), scheduler=Scheduled.make),
            "one schedule; leave one of them out",
        ),
        (
            lambda: FedAvg(module=AsksTheTrainer()),
            "AsksTheTrainer asks for self.trainer.num_training_batches",
        ),
        (lambda: FedAvg(module=AsksTheEpoch()), "AsksTheEpoch asks for self.trainer.current_epoch"),
        (
            lambda: FedAvg(module=CountsSteps()),
            "CountsSteps asks for self.trainer.estimated_stepping_batches",
        ),
        (
            lambda: FedAvg(module=Lit(), network="resnet20"),
            "--model.network resnet20 beside --model.module Lit",
        ),
        (lambda: FedMPQ(module=Lit()), "FedMPQ and no optimizer"),
        (
            lambda: methods.FedMosaic(module=Lit()),
            "FedMosaic; it cuts the networks of its clients into blocks",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(make, says, tmp_path):
    with pytest.raises(ValueError, match=says) as caught:
        run(make(), ready(), tmp_path / "runs", max_rounds=1)
    assert str(caught.value).count(";") >= 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"module": Lit},
            r"module=Lit; it is a lightning.pytorch.LightningModule that is.*write module=Lit",
        ),
        ({"module": partial(Lit, 4)}, r"module=Lit; it is a lightning.pytorch.LightningModule"),
        ({"module": nn.Linear(2, 2)}, "let Linear derive from it, uncompiled"),
        ({"network": Lit}, "its training_step would not be called; write --model.module"),
        ({"network": partial(Lit, width=3)}, "its training_step would not be called"),
        ({"network": Lit()}, "it is already built.*; write module= in place of network="),
    ],
)
def test_a_module_is_given_built_and_as_a_module(settings, says, tmp_path):
    with pytest.raises(InputError, match=says):
        run(FedAvg(**settings), images(), tmp_path, max_rounds=1)


class Teacher(Lit):
    """Its teacher follows it as an average, in parameters without a gradient."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(3 * 32 * 32, 10).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        for mine, followed in zip(self.teacher.parameters(), self.net[1].parameters(), strict=True):
            mine.data.lerp_(followed.data, 0.01)
        return super().training_step(batch, batch_idx)


class Thawing(Lit):
    def __init__(self):
        super().__init__()
        self.net.requires_grad_(False)
        self.head = nn.Linear(10, 10)

    def forward(self, x):
        return self.head(super().forward(x))

    def training_step(self, batch, batch_idx):
        self.net.requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("method", "make", "name", "workers"),
    [
        (FedAvg, Teacher, "teacher.weight", 1),
        (FedAvg, Teacher, "teacher.weight", 2),
        (FedAvg, Thawing, "net.1.weight", 1),
        (methods.Centralised, Teacher, "teacher.weight", 1),
    ],
)
def test_what_changes_without_being_trained_from_the_start_does_not_pass_between_clients(
    method, make, name, workers, tmp_path
):
    with pytest.raises(MisuseError, match=f"{name} did not require a gradient when the run began"):
        run(method(module=make()), ready(), tmp_path, max_rounds=1, workers=workers)


class Normed(Lit):
    """A frozen BatchNorm before the layer that learns, as Lightning's users freeze one."""

    def __init__(self, still: bool):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        if still:
            self.norm.eval()

    def forward(self, x):
        return self.net(self.norm(x))


def test_a_part_in_eval_mode_stays_so(tmp_path):
    for still in (True, False):
        method = FedAvg(module=Normed(still))
        run(method, ready(), tmp_path / str(still), max_rounds=1, workers=1)
        mean = method.deploy().norm.running_mean
        assert torch.equal(mean, torch.zeros(3)) == still


class Nested(Lit):
    def __init__(self):
        super().__init__()
        self.inner = Lit()

    def training_step(self, batch, batch_idx):
        return self.inner.training_step(batch, batch_idx)["loss"].reshape(1)

    forward = property(lambda self: self.inner.forward)


def test_a_module_in_a_module_logs_nothing_either_and_a_loss_may_be_one_number_in_a_list(tmp_path):
    method = FedAvg(module=Nested())
    run(method, ready(), tmp_path, max_rounds=1, workers=1)
    assert all(torch.isfinite(weight).all() for weight in method.deploy().parameters())


class Counting(Lit):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def setup(self, stage):
        pass

    def configure_callbacks(self):
        return []

    def on_train_epoch_start(self):
        pass


def test_hooks_and_counts_that_do_nothing_are_named(tmp_path, caplog):
    run(FedAvg(module=Counting()), ready(), tmp_path, max_rounds=1, workers=1)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any(
        text.startswith("configure_callbacks, on_train_epoch_start, setup of Counting: not called")
        for text in said
    )
    assert any(text.startswith("steps of Counting: persistent buffers of") for text in said)


class Buffered(Lit):
    """Of its buffers only ``mean`` travels, and ``table`` never changes."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3, momentum=m) for m in (0.1, None))
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("apart", torch.zeros(1), persistent=False)
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))

    def training_step(self, batch, batch_idx):
        for buffer in (self.mean, self.apart, self.phase):
            buffer += 1
        self.norms[1](self.norms[0](batch[0]))
        return super().training_step(batch, batch_idx)


def test_buffers_that_do_not_travel_are_named(tmp_path, caplog):
    run(FedAvg(module=Buffered()), ready(), tmp_path, max_rounds=1, workers=1)
    told = [each.message for each in caplog.records if "persistent buffers" in each.message]
    assert len(told) == 1
    assert told[0].startswith("apart, phase, norms.1.num_batches_tracked of Buffered: persistent")


def test_a_callback_of_lightning_is_told_what_it_is_not(tmp_path):
    with pytest.raises(InputError, match=r"EarlyStopping; .*write callbacks.EarlyStopping"):
        run(FedAvg(module=Lit()), ready(), tmp_path, callbacks=[EarlyStopping("loss")])


class OwnStep(Method):
    def training_step(self, batch, batch_idx=0):
        inputs, target = batch
        loss = self.task_loss(self.network(inputs), target)
        return {"loss": loss, "loss_task": loss}


def test_a_method_that_never_asks_it_does_not_ignore_it_in_silence(tmp_path):
    with pytest.raises(TypeError, match="OwnStep, whose training_step never asks Lit for a loss"):
        run(OwnStep(module=Lit()), ready(), tmp_path, max_rounds=1, workers=1)


@pytest.mark.parametrize("flags", [["--model.network", "small_cnn"], ["--model.network=resnet20"]])
def test_a_network_beside_it_is_one_line(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("plain_lit.py").write_text(PLAIN)
    assert (
        main(["fit", "--model", "FedAvg", "--model.module", "plain_lit.LitClassifier", *flags]) == 2
    )
    error = capsys.readouterr().err
    assert "--model.module" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == [
        "plain_lit.py"
    ]


@pytest.mark.parametrize(
    "hook",
    [
        "optimizer_step",
        "on_train_batch_end",
        "configure_gradient_clipping",
        "on_after_batch_transfer",
    ],
)
def test_a_hook_that_would_not_be_called_is_refused_by_name(hook):
    module = type("Hooked", (Lit,), {hook: lambda self, *arguments, **settings: None})()
    with pytest.raises(ValueError, match=f"Hooked, which overrides {hook};.*; leave it out"):
        FedAvg(module=module)


def test_the_index_of_a_batch_may_have_any_name(tmp_path):
    class Other(Lit):
        def training_step(self, batch, i):
            return super().training_step(batch, i)

    weights = [
        run(FedAvg(module=seeded(cls)), ready(), tmp_path, max_rounds=1).method.server["weights"]
        for cls in (Lit, Other)
    ]
    assert torch.equal(*weights)


def test_a_method_trains_a_copy_of_its_module_from_where_it_was(tmp_path):
    """Twice the same run, another method after it, and the user's module is as it was."""
    module = Lit()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    method = FedAvg(module=module)
    first, second = (
        run(method, ready(), tmp_path, max_rounds=2).method.server["weights"] for _ in range(2)
    )
    assert torch.equal(first, second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


class Scaled(Lit):
    """What its outputs are multiplied by is in no ``state_dict``, and moves with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        return self.net(x) * self.scale

    def training_step(self, batch, batch_idx):
        self.scale.mul_(0.9)
        return super().training_step(batch, batch_idx)


class Interrupted(Meter):
    def on_client_end(self, client, round, context):
        if round == 2:
            raise KeyboardInterrupt


def test_a_fit_goes_on_with_the_objects_that_were_interrupted_in_mid_round(tmp_path):
    """As the log says that it does; and begun anew with them it is the run of new ones."""
    whole = run(FedAvg(module=seeded(Scaled)), ready(), tmp_path, max_rounds=3).method.server[
        "weights"
    ]
    method = FedAvg(module=seeded(Scaled))
    with pytest.raises(KeyboardInterrupt):
        run(
            method,
            ready(),
            tmp_path,
            max_rounds=3,
            callbacks=[Interrupted()],
            run_name="half",
            workers=1,
        )
    path = str(next(tmp_path.glob("*/half")))
    run(method, ready(), tmp_path, max_rounds=3, ckpt_path=path, allow_changed=True)
    assert torch.equal(method.server["weights"], whole)
    run(method, ready(), tmp_path, max_rounds=3)
    assert torch.equal(method.server["weights"], whole)


def test_a_module_without_arguments_goes_on_and_one_that_keeps_none_is_told_what_to_call(tmp_path):
    class Same(Lit):
        def __init__(self) -> None:
            super().__init__()

    class Hidden(Lit):
        def __init__(self, outputs: int = 10) -> None:
            super().__init__(outputs)

    for cls in (Same, Hidden):
        path = str(run(FedAvg(module=seeded(cls)), ready(), tmp_path, max_rounds=1).run_dir)
        with (
            nullcontext()
            if cls is Same
            else pytest.raises(InputError, match=r"call save_hyperparameters\(\)")
        ):
            run(FedAvg(module=seeded(cls)), ready(), tmp_path, max_rounds=1, ckpt_path=path)


class Sometimes(Lit):
    """From the second batch on, its loss is without a gradient, or there is none."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return self.later(loss) if batch_idx else loss


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("later", "says"),
    [
        (lambda loss: loss.detach(), "Sometimes.training_step returned a loss without a gradient"),
        (lambda loss: None, "Sometimes.training_step returned NoneType as loss.* no batch is skip"),
    ],
)
def test_a_later_step_without_a_loss_is_named_as_the_first_is(later, says, workers, tmp_path):
    with pytest.raises(MisuseError, match=says):
        run(FedAvg(module=Sometimes(later)), ready(), tmp_path, max_rounds=1, workers=workers)
