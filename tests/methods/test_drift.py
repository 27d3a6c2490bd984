"""Methods against client drift: what holds in every round, where they end on quadratics, and the
mistakes of public code, each of which a golden file or a refusal catches."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from fates import Fates
from golden_adapters import found_by_a_file
from golden_cases import Adapter, cases_of, differences, run_case
from refusals import refused
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from toy import CENTRES, Points, Quadratic, point_network, run, sgd

from callbacks import ByzantineClients
from fl_lightning.aggregation.averages import WEIGHTED_MEAN
from fl_lightning.conformance.toy import images, small_network
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter
from fl_lightning.methods import (
    SCAFFOLD,
    CenteredClipping,
    CoordinateMedian,
    FedAvg,
    FedCM,
    FedDC,
    FedDyn,
    FedNova,
    FedProx,
    FedSAM,
    FedSpeed,
    Krum,
    MoFedSAM,
    NormClipping,
)
from fl_lightning.methods.optimizing import round_lr
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import PayloadError


class MeanOfKept(Meter):
    """The largest distance, in any round, of a vector of the server from the mean of what clients
    keep."""

    def __init__(self, of_server, of_client):
        self.of_server, self.of_client, self.furthest, self.size = of_server, of_client, 0.0, 0.0

    def on_round_end(self, record, context):
        mean = context.method.server[self.of_server]
        kept = [state[self.of_client] for state in context.states.values()]
        self.furthest = max(self.furthest, float((mean - sum(kept) / 6).abs().max()))
        self.size = float(mean.abs().max())


WAYS = {
    "one": {"workers": 1, "engine": "sequential"},
    "pool": {"workers": 2, "engine": "sequential"},
    "batched": {"workers": 1, "engine": "batched"},
    "two_of_six": {"workers": 1, "participation": 2 / 6},
    "masked": {"workers": 1, "secure_sum": SecureSum(threshold=0.6)},
}


@pytest.mark.quick("SCAFFOLD", "FedDC-masked", "FedSpeed-batched")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("method", "names"),
    [
        (SCAFFOLD, [("c", "c_i")]),
        (partial(SCAFFOLD, option=1), [("c", "c_i")]),
        (FedDyn, [("H", "H_i")]),
        (FedDC, [("H", "H_i"), ("G", "g_i")]),
        (FedSpeed, [("H", "H_i")]),
    ],
    ids=["SCAFFOLD", "SCAFFOLD-option1", "FedDyn", "FedDC", "FedSpeed"],
)
def test_the_server_has_the_mean_of_what_clients_keep(method, names, way, tmp_path):
    if way == "masked":
        pytest.importorskip("cryptography")
    means = [MeanOfKept(*pair) for pair in names]
    subject = method(network=small_network, optimizer=sgd(0.05))
    run(
        subject,
        images(),
        tmp_path,
        max_rounds=5,
        max_local_steps=3,
        callbacks=[Fates(), *means],
        **WAYS[way],
    )
    for mean in means:
        assert mean.size > 1e-3
        assert mean.furthest < 1e-6


@pytest.mark.parametrize("method", [SCAFFOLD, FedDyn])
def test_the_first_round_is_that_of_uniform_fedavg(method, tmp_path):
    """Of FedDyn with a single step, where its terms have no gradient yet, before H is added."""
    more = {"max_rounds": 1, "local_epochs": 1, "max_local_steps": 1 if method is FedDyn else 3}
    servers = []
    for kind, own in ((method, {}), (FedAvg, {"weigh_by": "clients"})):
        subject = kind(network=small_network, optimizer=sgd(0.05), **own)
        run(subject, images(), tmp_path, participation=0.5, **more)
        servers.append(subject.server)
    mine, fedavg = servers
    if method is FedDyn:
        shift = torch.cat([mine["H"], torch.zeros(len(fedavg["weights"]) - len(mine["H"]))])
        fedavg["weights"] = fedavg["weights"] + shift
    torch.testing.assert_close(mine["weights"], fedavg["weights"], rtol=0, atol=1e-7)


# Where they end: two clients, |y - c_k|^2 / 2, that make 1 and 4 steps

LR, STEPS, MU = 0.2, (1, 4), 0.5


def end_of(kind, folder, *, rounds=150, lr=LR, **settings):
    method = kind(network=point_network, optimizer=sgd(lr), weigh_by="clients", **settings)
    method.task_loss = Quadratic()
    run(
        method,
        Points(STEPS, batch_size=1),
        folder,
        max_rounds=rounds,
        local_epochs=1,
        eval_every=10**6,
    )
    return method.server["weights"]


def weighed(*weights):
    share = torch.tensor(weights, dtype=torch.float64)
    return ((share / share.sum()) @ CENTRES[:2].double()).float()


def reach(lr):
    """How much of its way to its optimum a client makes in a round."""
    return [1 - (1 - lr) ** steps for steps in STEPS]


def end_of_fedcm(A):
    """Both clients go by r_i (c_i - (1 - A) / A M - x), which cancel: D and -D."""
    far, near = (1 - (1 - A * LR) ** steps for steps in STEPS)
    first, second = CENTRES[:2].double()
    D = (first - second) / (1 / far + 1 / near)
    M = (D / STEPS[1] - D / STEPS[0]) / (2 * LR)
    return (first - (1 - A) / A * M - D / far).float()


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        (FedDC, {"alpha": 0.5}, weighed(1, 1)),
        (FedSpeed, {"lamb": 0.5}, weighed(1, 1)),
        (FedCM, {"A": 0.5}, end_of_fedcm(0.5)),
        (SCAFFOLD, {}, weighed(1, 1)),
        (SCAFFOLD, {"option": 1}, weighed(1, 1)),
        (FedDyn, {"alpha": 0.5}, weighed(1, 1)),
        (FedAvg, {}, weighed(*reach(LR))),
        (FedProx, {"mu": MU}, weighed(*reach(LR * (1 + MU)))),
        (FedNova, {}, weighed(*(way / steps for way, steps in zip(reach(LR), STEPS, strict=True)))),
    ],
)
def test_where_a_method_ends_on_two_quadratics(kind, own, expected, tmp_path):
    torch.testing.assert_close(end_of(kind, tmp_path, **own), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.essential
def test_fednova_is_unbiased_as_the_rate_goes_to_0_and_fedavg_is_not(tmp_path):
    best = weighed(1, 1)
    off = [
        float((end_of(FedNova, tmp_path, lr=lr, rounds=250) - best).norm()) for lr in (0.1, 0.02)
    ]
    assert off[1] < off[0] / 4
    assert float((end_of(FedAvg, tmp_path, lr=0.02, rounds=250) - best).norm()) > 10 * off[1]


def test_fednova_with_equal_steps_is_fedavg(tmp_path):
    servers = []
    for kind in (FedNova, FedAvg):
        method = kind(network=small_network, optimizer=sgd(0.05, momentum=0.9))
        run(method, images(), tmp_path, max_rounds=2, max_local_steps=1)
        servers.append(method.server["weights"])
    assert torch.equal(*servers)  # one step, by which nothing is divided
    for kind in (FedNova, FedAvg):
        method = kind(network=point_network, optimizer=sgd(0.1, momentum=0.5))
        method.task_loss = Quadratic()
        run(method, Points((3, 1)), tmp_path, max_rounds=3, local_epochs=4)
        servers.append(method.server["weights"])
    torch.testing.assert_close(*servers[2:], rtol=0, atol=2e-6)


@pytest.mark.parametrize("average", [CoordinateMedian(), Krum(1), CenteredClipping(0.1)])
def test_a_robust_average_guards_fedcms_momentum(average, tmp_path):
    """One client of six sends its update a thousand times over."""
    sizes = []
    for guard in (average, WEIGHTED_MEAN):
        attack = [ByzantineClients(clients=1 / 6, strength=1000.0, round=1)]
        method = FedCM(network=small_network, optimizer=sgd(0.05), average=guard)
        run(method, images(), tmp_path, max_rounds=1, callbacks=attack)
        sizes.append(float(method.server["M"].norm()))
    assert 0 < sizes[0] < sizes[1] / 20


class Start(Meter):
    """The server's weights before the first round."""

    def on_round_start(self, round, context):
        self.weights = context.method.server["weights"].clone()


@pytest.mark.parametrize("kind", [FedAvg, FedNova, FedCM])
def test_clipping_bounds_what_a_client_moves_whatever_its_update_is_divided_by(kind, tmp_path):
    """``max_norm`` is a length of what a client moves, in twenty steps or more, and not of one."""
    attack, start = ByzantineClients(clients=0.5, strength=1000.0, round=1), Start()
    method = kind(network=point_network, optimizer=sgd(0.01), average=NormClipping(0.1))
    method.task_loss = Quadratic()
    run(method, Points((2, 2)), tmp_path, max_rounds=1, local_epochs=20, callbacks=[attack, start])
    lengths = [float((method.server["weights"] - start.weights).norm())]
    lengths += [20 * 0.01 * float(method.server["M"].norm())] if kind is FedCM else []
    assert 0 < max(lengths) <= 0.1 * 1.001


@pytest.mark.parametrize("kind", [FedNova, FedCM])
def test_an_attack_leaves_the_number_of_steps_alone(kind, tmp_path):
    """An upload with another number would be refused, and the attack tell nothing of the method."""
    attack = [ByzantineClients(clients=1 / 6, round=1)]
    method = kind(network=small_network, optimizer=sgd(0.05))
    trainer = run(method, images(), tmp_path, max_rounds=1, callbacks=attack)
    assert ",rejected," not in (trainer.run_dir / "ledger.csv").read_text()


# Mistakes of public code


class OverReturned(SCAFFOLD):
    """NIID-Bench: c moves by the mean over the round's clients."""

    def next_state(self, sums):
        self.clients = len(self.served)
        super().next_state(sums)


class OverInvited(SCAFFOLD):
    """PFLlib: the mean is divided by the clients that were asked."""

    def next_state(self, sums):
        start, share = self.server["weights"], len(self.served) / self.cohort
        super().next_state(sums)
        self.server["weights"] = start + share * (self.server["weights"] - start)


class UndecayedRate(SCAFFOLD):
    """FedDyn's repository, PFLlib: eta is the optimiser's, whatever the schedule says."""

    @property
    def local_lr(self):
        return self.configure_optimizers().param_groups[0]["lr"]


class StepsOfAnother(SCAFFOLD):
    """FL-Simulator: K is that of client 0."""

    local_steps = 3


class StartsFromWeights(SCAFFOLD):
    """Flower's baseline: the first c_i is the weights."""

    def kept(self, client, name):
        return client.state.get(name, self.start)


class UndecayedMomentum(FedCM):
    """FL-Simulator where the schedule is not its own: M is a step over the optimiser's eta."""

    def next_state(self, sums):
        super().next_state(sums)
        undecayed = self.configure_optimizers().param_groups[0]["lr"]
        self.server["M"] = self.server["M"] * (round_lr(self) / undecayed)


class MomentumOfSteps(FedCM):
    """FL-Simulator: K is that of client 0 in its first round."""

    def addends(self, upload, client_id, weight):
        return super().addends(
            type(upload)({**upload, "steps": torch.tensor(3.0)}), client_id, weight
        )


class UndecayedDrift(FedDC):
    """The authors' code: eta is the optimiser's, whatever the schedule says."""

    local_lr = UndecayedRate.local_lr


class Unsquared(FedDyn):
    """PFLlib: a / 2 ||y - x||, the norm unsquared."""

    def training_step(self, batch, batch_idx=0):
        outputs = FedAvg.training_step(self, batch, batch_idx)
        y = torch.cat([weight.reshape(-1) for _, weight in self.own_parameters()])
        moved = y - self.start
        term = self.weight * (
            moved @ (self.start - self.centre) + (moved.square().sum() + 1e-12).sqrt() / 2
        )
        return {**outputs, "loss": outputs["loss"] + term}


class NoQuadratic(FedDyn):
    """FL-bench: the linear term alone."""

    def training_step(self, batch, batch_idx=0):
        outputs = FedAvg.training_step(self, batch, batch_idx)
        y = torch.cat([weight.reshape(-1) for _, weight in self.own_parameters()])
        return {**outputs, "loss": outputs["loss"] + self.weight * (y @ (self.start - self.centre))}


class Reversed(FedDyn):
    """fluke: the linear term has the other sign."""

    def receive(self, message, client):
        super().receive(message, client)
        self.centre = 2 * self.start - self.centre


class PlannedSteps(FedNova):
    """a_i of the steps that were planned: a straggler made fewer."""

    def work_of(self, steps):
        return super().work_of(4)


class NotScaledBack(FedNova):
    """The mean direction without tau: the server moves by one step."""

    def next_state(self, sums):
        self.server["weights"] = self.layout.to_wire(sums.mean("weights"))


class StepsWhateverTheMomentum(FedNova):
    """a_i is K_i, also with momentum."""

    def work_of(self, steps):
        return float(steps)


class NotNormalised(FedSAM):
    """rho times the gradient, whatever its length."""

    def training_step(self, batch, batch_idx=0):
        weights = self.trained_weights()
        first, _ = self.task_and_logits(batch, batch_idx)
        found = torch.autograd.grad(first, list(weights.values()))
        copies = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        parts = zip(weights.items(), found, strict=True)
        uphill = {name: weight + self.rho * part for (name, weight), part in parts}
        return {"loss": self.task_and_logits(batch, batch_idx, {**copies, **uphill})[0]}


class MovesStatisticsTwice(FedSAM):
    """The second pass moves the statistics of BatchNorm too."""

    second = False

    def _first_pass(self, batch, batch_idx):
        found = super()._first_pass(batch, batch_idx)
        self.second = True
        return found

    def task_and_logits(self, batch, batch_idx, weights=None):
        if self.second:
            weights = {name: weights[name] for name, _ in self.network.named_parameters()}
            self.second = False
        return super().task_and_logits(batch, batch_idx, weights)


FAULTS = (
    *(NotNormalised, MovesStatisticsTwice, UndecayedMomentum, MomentumOfSteps, UndecayedDrift),
    *(OverReturned, OverInvited, UndecayedRate, StepsOfAnother, StartsFromWeights),
    *(Unsquared, NoQuadratic, Reversed, PlannedSteps, NotScaledBack, StepsWhateverTheMomentum),
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_golden_file_catches_it(fault, tmp_path):
    assert found_by_a_file(fault, tmp_path)


# FedSpeed, which no golden file has


def fedspeed(case, lamb, rho):
    """x after each round, in float64: the paper's formulas, with the mean of all H_i at the
    server."""
    problem, settings = case["problem"], case["settings"]
    shapes, clients = dict(problem["layout"]), problem["clients"]
    x = torch.tensor(problem["initial"], dtype=torch.float64)
    H, after = torch.zeros(len(clients), len(x), dtype=torch.float64), []

    def gradient(y, client):
        y = y.detach().requires_grad_()
        pieces = y.split([math.prod(shape) for shape in shapes.values()])
        w = {
            name: piece.view(shape)
            for piece, (name, shape) in zip(pieces, shapes.items(), strict=True)
        }
        z = torch.tensor(client["x"], dtype=torch.float64)
        z = (
            torch.tanh(z @ w["base.weight"].T + w["base.bias"]) @ w["head.weight"].T
            + w["head.bias"]
        )
        loss = torch.nn.functional.cross_entropy(z, torch.tensor(client["y"]))
        return torch.autograd.grad(loss, y)[0]

    for t, cohort in enumerate(case["cohorts"]):
        lr, ended = settings["lr"] * settings["lr_decay"] ** t, []
        for i in cohort["arrived"]:
            y = x
            for _ in range(cohort.get("steps", {}).get(str(i), settings["steps"][i])):
                q = gradient(y, clients[i])
                g = gradient(y + rho * q / (q.norm() + 1e-7), clients[i])
                y = y - lr * (g + lamb * (y - x + H[i]))
            H[i] += y - x
            ended.append(y)
        x = torch.stack(ended).mean(0) + H.mean(0)
        after.append(x)
    return after


def test_fedspeed_is_its_formula(tmp_path):
    (case, *_) = cases_of("FedDC")
    case["settings"] = {**case["settings"], "lamb": 0.25, "rho": 0.1}
    del case["settings"]["alpha"]
    case["after"] = {
        str(t): {"server": x.tolist()} for t, x in enumerate(fedspeed(case, 0.25, 0.1), start=1)
    }
    for lost in (False, True):
        found = run_case("FedSpeed", Adapter(weights="uniform"), case, tmp_path, lost=lost)
        assert not differences(case["after"], found)


# What is refused


@pytest.mark.parametrize(
    ("method", "optimizer", "says"),
    [
        (SCAFFOLD, partial(SGD, lr=0.1, momentum=0.9), "write --model.optimizer.momentum 0"),
        (
            SCAFFOLD,
            partial(SGD, lr=0.1, weight_decay=1e-4),
            "write --model.optimizer.weight_decay 0",
        ),
        (SCAFFOLD, partial(AdamW, lr=0.1), "write --model.optimizer SGD"),
        (FedCM, partial(SGD, lr=0.1, momentum=0.9), "write --model.optimizer.momentum 0"),
        (
            MoFedSAM,
            partial(SGD, lr=0.1, weight_decay=1e-4),
            "write --model.optimizer.weight_decay 0",
        ),
        (FedDC, partial(SGD, lr=0.1, momentum=0.9), "write --model.optimizer.momentum 0"),
        (FedNova, partial(AdamW, lr=0.1), "write --model.optimizer SGD"),
        (FedNova, partial(SGD, lr=0.1, momentum=0.9, nesterov=True), "optimizer.nesterov false"),
        (partial(FedNova, mu=20.0), partial(SGD, lr=0.1), "write --model.mu 0.01"),
    ],
)
def test_local_steps_that_break_the_identity_are_refused(method, optimizer, says, tmp_path):
    with pytest.raises(InputError, match=says):
        run(method(network=small_network, optimizer=optimizer), images(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("method", [SCAFFOLD, FedCM, FedDC])
def test_a_schedule_that_sets_a_momentum_is_refused(method, tmp_path):
    cycle = partial(OneCycleLR, max_lr=0.1, total_steps=5)
    settings = {"network": small_network, "optimizer": sgd(0.1)}
    with refused("a schedule with a momentum", "give the scheduler cycle_momentum false"):
        run(method(scheduler=cycle, **settings), images(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    without = method(scheduler=partial(cycle, cycle_momentum=False), **settings)
    run(without, images(), tmp_path / "runs", max_rounds=1)


def test_a_rate_of_a_later_round_is_refused_before_the_first(tmp_path):
    scheduler = partial(LambdaLR, lr_lambda=lambda epoch: 30.0 if epoch == 2 else 1.0)
    method = FedNova(mu=1.0, network=small_network, optimizer=sgd(0.1), scheduler=scheduler)
    with refused("mu 1 at a learning rate of 3, that of round 3", "write --model.mu"):
        run(method, images(), tmp_path / "runs", max_rounds=4)
    assert not (tmp_path / "runs").exists()
    run(method, images(), tmp_path / "runs", max_rounds=2)


class WithUnused(torch.nn.Module):
    """A network with a parameter that it does not compute with."""

    def __init__(self, classes):
        super().__init__()
        self.used = small_network(classes)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return self.used(inputs)


@pytest.mark.parametrize(
    "method", [FedSAM, MoFedSAM, FedSpeed, partial(SCAFFOLD, option=1)], ids=str
)
def test_a_parameter_without_a_gradient_changes_nothing(method, tmp_path):
    found = []
    for network in (WithUnused, small_network):
        made = method(network=network, optimizer=sgd(0.05))
        run(made, images(), tmp_path / network.__name__, max_rounds=2, engine="sequential")
        found.append(dict(made.layout.unpack(made.server["weights"])))
    unused = found[0].pop("unused")
    assert torch.equal(unused, torch.ones(3))
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name.removeprefix("used.")])


@pytest.mark.parametrize("method", [SCAFFOLD, FedCM, FedDC])
def test_clipped_gradients_are_refused(method, tmp_path):
    with pytest.raises(InputError, match="leave gradient_clip_val out"):
        run(method(network=small_network), images(), tmp_path / "runs", gradient_clip_val=1.0)


@pytest.mark.parametrize("method", [SCAFFOLD, FedDyn, FedCM, MoFedSAM, FedDC, FedSpeed])
def test_clients_of_unequal_weight_are_refused(method):
    with pytest.raises(InputError, match="leave weigh_by out"):
        method(weigh_by="examples")


@pytest.mark.parametrize("kind", [FedNova, FedCM])
def test_a_number_of_steps_is_bounded(kind, tmp_path):
    method = kind(network=small_network, optimizer=sgd(0.05))
    trainer = run(method, images(), tmp_path, max_rounds=1)
    client = trainer.data.client(0)
    upload = method.broadcast(client)
    for steps in (0.0, 1.5, 99.0):
        sent = {**upload, "examples": method.examples_of(client), "steps": torch.tensor(steps)}
        with pytest.raises(PayloadError, match="they are a whole number"):
            method.check(type(upload)(sent), client)
