"""Server optimisers with everything else that makes or changes the clients' mean, and with known
mistakes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from golden_adapters import ADAPTERS
from golden_cases import cases_of, differences, make_method, run_case
from refusals import refused
from ten import SMALL, fit, make, same
from torch import nn
from toy import run, sgd

from fl_lightning.aggregation.server_optimizers import (
    SQUARES,
    Extrapolation,
    Lookahead,
    ServerAdagrad,
    ServerAdam,
    ServerOptimizer,
    ServerSGD,
    ServerYogi,
    Step,
)
from fl_lightning.aggregation.sums import Addend
from fl_lightning.conformance.bench import prepare_data
from fl_lightning.conformance.server_steps import momentum, next_weights
from fl_lightning.conformance.toy import images
from fl_lightning.conformance.watch import RunRecorder
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods import (
    SCAFFOLD,
    CoordinateMedian,
    FedAvg,
    FedAvgM,
    FedCM,
    FedExP,
    MoFedSAM,
    NormClipping,
    TrimmedMean,
)
from fl_lightning.models.adapters import add_adapter
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.wire import Payload

OPTIMIZERS = {
    "sgd": ServerSGD(0.7, 0.9, nesterov=True),
    "adam": ServerAdam(),
    "yogi": ServerYogi(),
    "adagrad": ServerAdagrad(),
    "extrapolation": Extrapolation(),
    "lookahead": Lookahead(0.5),
}


# Known mistakes: each leaves something else than the reference


class BiasCorrected(ServerAdam):
    def step(self, found, state):
        step = super().step(found, state)
        m = step.state["first_moment"] / (1 - self.betas[0] ** found.round)
        v = step.state["second_moment"] / (1 - self.betas[1] ** found.round)
        return Step(found.before + self.lr * m / (v.sqrt() + self.tau), step.state)


class StartsAtZero(ServerAdam):
    def start(self, weights):
        return Step(
            weights, {name: 0 * value for name, value in super().start(weights).state.items()}
        )


class MovesStatistics(ServerSGD):
    def first_entries(self, weights, trained):
        return super().first_entries(weights, len(weights))

    def next_entries(self, server, mean, trained, round, squares):
        return super().next_entries(server, mean, len(mean), round, squares)


class DropsRoundOne(ServerSGD):
    def step(self, found, state):
        step = super().step(found, state)
        return Step(found.before, step.state) if found.round == 1 else step


class NesterovUnasked(ServerSGD):
    def step(self, found, state):
        self.nesterov = True
        return super().step(found, state)


class EpsTimesClients(Extrapolation):
    def step(self, found, state):
        self.eps = 0.007  # 0.001 times the clients that returned
        return super().step(found, state)


class ExtrapolatesStatistics(Extrapolation):
    def next_entries(self, server, mean, trained, round, squares):
        return super().next_entries(server, mean, len(mean), round, squares)


class MomentumOfX(Lookahead):
    """M gets the mean of y - x, and not of y - x'."""

    def step(self, found, state):
        change = found.change + self.lam * state["momentum"]
        kept = self.lam * state["momentum"] + change
        return Step(found.mean + self.lam * kept, {"momentum": kept}, found.mean)


class EvaluatesWhatTravels(Lookahead):
    def step(self, found, state):
        step = super().step(found, state)
        return Step(step.weights, step.state, step.weights)


class CountsTheInvited(FedAvgM):
    """It divides by the clients that were asked, and the model moves less where some do not
    return."""

    def add_up(self, uploads, examples):
        self.share = len(examples) / self.cohort
        return super().add_up(uploads, examples)

    def next_weights(self, sums):
        before = self.server["weights"]
        return before + self.share * (super().next_weights(sums) - before)


class CountsAlike(FedExP):
    """The squares of all clients weigh the same, whatever their examples."""

    def addends(self, upload, client_id, weight):
        found = super().addends(upload, client_id, weight)
        return {**found, "squares": super().addends(upload, client_id, 1)["squares"]}


def replaced(kind, method):
    """The method with another optimiser of the same settings."""
    wrong = kind()
    vars(wrong).update(vars(method.server_optimizer))
    method.server_optimizer = wrong
    return method


def reclassed(kind, method):
    method.__class__ = kind
    return method


MISTAKES = [
    ("FedAdam", "adam", partial(replaced, BiasCorrected)),
    ("FedAdam", "adam", partial(replaced, StartsAtZero)),
    ("FedAvgM", "statistics", partial(replaced, MovesStatistics)),
    ("FedAvgM", "momentum 0.7", partial(replaced, DropsRoundOne)),
    ("FedAvgM", "momentum 0.7", partial(replaced, NesterovUnasked)),
    ("FedAvgM", "momentum 0.7", partial(reclassed, CountsTheInvited)),
    ("FedExP", "extrapolates", partial(replaced, EpsTimesClients)),
    ("FedExP", "extrapolates", partial(reclassed, CountsAlike)),
    ("FedExP", "statistics, uniform", partial(replaced, ExtrapolatesStatistics)),
    ("FedACG", "lookahead", partial(replaced, MomentumOfX)),
    ("FedACG", "lookahead", partial(replaced, EvaluatesWhatTravels)),
]


def case_of(name, case):
    return next(each for each in cases_of(name) if each["name"] == case)


@pytest.mark.parametrize(
    ("name", "case", "mistake"), MISTAKES, ids=[change.args[0].__name__ for *_, change in MISTAKES]
)
def test_the_reference_tells_known_mistakes(name, case, mistake, tmp_path):
    case = case_of(name, case)
    found = run_case(name, ADAPTERS[name], case, tmp_path, change=mistake)
    assert differences(case["after"], found, tolerance=1e-4)


def test_a_counter_of_batches_stays_an_integer_and_does_not_travel(tmp_path):
    case, adapter = case_of("FedAvgM", "statistics"), ADAPTERS["FedAvgM"]
    method = make_method("FedAvgM", adapter, case)
    run_case("FedAvgM", adapter, case, tmp_path, change=lambda _: method)
    assert "norm.running_var" in method.layout.shapes
    assert not [name for name in method.layout.shapes if "num_batches" in name]
    assert method.network.norm.num_batches_tracked.dtype == torch.int64


# With other methods, averages, masks and noise


@pytest.mark.parametrize("name", ["QFedAvg", "AQFL", "FedPQ", "FedNTD", "FedMPQ", "FedMPQKD"])
def test_a_step_of_length_one_without_momentum_changes_nothing(name, tmp_path):
    plain, _ = fit(make(name), tmp_path / "plain")
    server, _ = fit(make(name, server_optimizer=ServerSGD()), tmp_path / "sgd")
    assert torch.count_nonzero(server.pop("optimizer/velocity"))
    assert same(server, plain)


@pytest.mark.parametrize("average", [CoordinateMedian(), TrimmedMean(0.2), NormClipping(0.1)])
def test_it_steps_from_whatever_the_average_is(average, tmp_path):
    plain, _ = fit(make("FedAvg", average=average), tmp_path / "plain")
    server, _ = fit(make("FedAvg", average=average, server_optimizer=ServerSGD()), tmp_path / "sgd")
    assert torch.equal(server["weights"], plain["weights"])


def normalised(classes: int) -> nn.Module:
    """Two layers with LoRA and a BatchNorm, of which the adapters alone are trained."""
    layers = nn.Linear(768, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)
    return add_adapter(nn.Sequential(nn.Flatten(), *layers), "lora", rank=2, targets=["1", "3"])


@pytest.mark.parametrize(("rule", "round"), [(None, 1), ("alternate", 1), ("alternate", 2)])
def test_squares_are_of_what_a_round_trains_and_of_no_statistics(rule, round):
    method = FedExP(network=normalised, optimizer=sgd(0.05), adapter_average=rule)
    method.build(prepare_data(images()))
    method.round, method.cohort, before = round, 2, method.server["weights"]
    half = method.adapters.moving(method)
    moved, uploads = {}, {}
    for id, n in ((0, 1), (1, 3)):
        after = before + torch.randn(len(before), generator=torch.Generator().manual_seed(id))
        if half is not None:
            after = torch.where(half, after, before)
        change = method.layout.unpack((after - before).double())
        assert any("running_var" in name for name in change)
        moved[n] = sum(float(t.square().sum()) for name, t in change.items() if "lora" in name)
        sent = after if half is None else after[half]
        uploads[id] = Payload({"weights": sent, "examples": torch.tensor(n, dtype=torch.int32)})
    sums = method.add_up(uploads, {0: 1, 1: 3})
    assert float(sums.mean(SQUARES)) == pytest.approx((moved[1] + 3 * moved[3]) / 4, rel=1e-6)


@pytest.mark.parametrize("download", ["full", "quantised"])
def test_quantised_clients_with_a_teacher_and_momentum_of_the_server(download, tmp_path):
    method = make("FedMPQKD", download=download, server_optimizer=ServerSGD(0.5, 0.8))
    seen = RunRecorder()
    run(method, images(), tmp_path, max_rounds=3, callbacks=[seen])
    states = [*seen.servers[1:], dict(method.server)]
    for round, (before, after) in enumerate(zip(seen.servers, states, strict=True), start=1):
        uploads, method.server = seen.uploads_of(round), before
        sizes = [int(uploads[id].tensor("examples")) for id in range(6)]
        expected = next_weights(momentum)([uploads], sizes, method, 0)
        torch.testing.assert_close(after["weights"].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["FedAdam", "FedExP", "FedACG"])
def test_a_secure_sum_is_the_plain_one(name, tmp_path):
    pytest.importorskip("Crypto")
    from fl_lightning.privacy.secure import SecureSum

    plain, _ = fit(make(name), tmp_path / "plain")
    secure, _ = fit(make(name), tmp_path / "secure", secure_sum=SecureSum(threshold=0.67))
    assert same(secure, plain)


def private(optimizer, noise, folder):
    settings = ClientPrivacy(noise_multiplier=noise, clip_norm=1000.0, delta=0.1)
    method = make("FedAvg", weigh_by="clients", server_optimizer=optimizer)
    return run(method, images(), folder, max_rounds=2, privacy=settings).method.server


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lookahead"])
def test_with_client_level_privacy_it_steps_from_the_noisy_mean(optimizer, tmp_path):
    little, much = (private(OPTIMIZERS[optimizer], z, tmp_path / str(z)) for z in (1e-8, 1e-3))
    method = make("FedAvg", weigh_by="clients", server_optimizer=OPTIMIZERS[optimizer])
    plain, _ = fit(method, tmp_path / "plain")
    apart = [float((server["weights"] - plain["weights"]).abs().max()) for server in (little, much)]
    assert 0 < apart[0] < 0.01 < apart[1]


# What it remembers


@pytest.mark.parametrize("make_method", [SCAFFOLD, FedCM, MoFedSAM])
def test_a_servers_rate_beside_an_optimiser_of_the_server_is_refused(make_method):
    with refused("--model.server_lr 0.5 with --model.server_optimizer", "its lr"):
        make_method(network=SMALL, optimizer=sgd(), server_lr=0.5, server_optimizer=ServerAdam())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clients_that_add_up_themselves_are_not_sent_what_it_remembers(name, tmp_path):
    server, _ = fit(FedAvg(network=make("FedAvg").network_spec), tmp_path / "plain")
    assert set(server) == {"weights"}
    method = make("FedAvg", server_optimizer=OPTIMIZERS[name])
    server, _ = fit(method, tmp_path / name)
    assert set(server) > {"weights"}
    assert set(method.summing_state()) == {"weights"}


@pytest.mark.parametrize("kind", [ServerAdam, ServerYogi, ServerAdagrad])
def test_betas_are_shares(kind):
    with pytest.raises(InputError, match=r"betas=\[1.0, 0.9\].*write betas: \[0.9, 0.99\]"):
        kind(betas=(1.0, 0.9))


# What does not go with it


class OwnStep(FedAvg):
    def next_state(self, sums):
        self.server["weights"] = sums.mean("weights")


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        *(
            (partial(make, name, server_optimizer=ServerSGD()), "ServerSGD with --model " + name)
            for name in ("FedKD", "Oracle", "LocalOnly", "FedMosaic", "Centralised")
        ),
        (
            partial(OwnStep, server_optimizer=ServerSGD()),
            "its own next_state makes the next weights",
        ),
        (
            partial(FedExP, average=CoordinateMedian()),
            "Extrapolation with --model.average CoordinateMedian",
        ),
    ],
)
def test_a_server_that_has_no_mean_is_refused(make_it, says):
    with pytest.raises(InputError, match=says):
        make_it()


def test_an_extrapolation_is_refused_where_no_length_can_be_added(tmp_path):
    settings = ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0, delta=0.1)
    with pytest.raises(InputError, match=r"Extrapolation with trainer\.privacy"):
        run(make("FedExP", weigh_by="clients"), images(), tmp_path, max_rounds=1, privacy=settings)
    pytest.importorskip("Crypto")
    from fl_lightning.privacy.secure import SecureSum

    method = make("AQFL", download="quantised", server_optimizer=Extrapolation())
    with pytest.raises(InputError, match=r"secure_sum and --model\.download quantised"):
        run(method, images(), tmp_path, max_rounds=1, secure_sum=SecureSum())


class OwnAddends(FedAvg):
    def addends(self, upload, client_id, weight):
        return {"weights": Addend(self.decode(upload), weight, self.largest_weight)}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        (
            {"average": CoordinateMedian()},
            "OwnAddends.addends; it gives no start, by which CoordinateMedian",
        ),
        (
            {"average": NormClipping(1.0)},
            "OwnAddends.addends; it gives no start, by which NormClipping",
        ),
        (
            {"server_optimizer": Extrapolation()},
            "OwnAddends.addends; it gives no sum 'squares', by which Ext",
        ),
    ],
)
def test_addends_that_leave_out_what_a_setting_goes_by(settings, lacks, masked, tmp_path):
    more = {}
    if masked and "Median" not in lacks:  # which needs the single uploads
        pytest.importorskip("Crypto")
        from fl_lightning.privacy.secure import SecureSum

        more = {"secure_sum": SecureSum()}
    with pytest.raises(MisuseError, match=lacks):
        run(OwnAddends(**settings), images(), tmp_path, max_rounds=1, **more)


# Rules of a user's own


class Own(ServerOptimizer):
    """The mean, unless a test says otherwise."""

    def __init__(self, make=None, first=None):
        self.make, self.first = make, first

    def start(self, weights):
        return Step(weights) if self.first is None else self.first(weights)

    def step(self, found, state):
        return Step(found.mean) if self.make is None else self.make(found, state)


class TakesNothing(Own):
    def start(self):
        return Step(torch.zeros(1))


def own(folder, optimizer, **settings):
    method = FedAvg(network=SMALL, optimizer=sgd(0.05), server_optimizer=optimizer)
    return run(method, images(), folder, max_rounds=2, participation=0.5, **settings)


MAKES = {
    "short": lambda found, state: Step(found.mean[:-1]),
    "scalar": lambda found, state: Step(found.mean.mean()),
    "integers": lambda found, state: Step(found.mean.long()),
    "no numbers": lambda found, state: Step(found.mean * torch.nan),
    "a tensor": lambda found, state: found.mean,
    "nothing": lambda found, state: None,
    "short evaluated": lambda found, state: Step(found.mean, {}, found.mean[1:]),
    "a number remembered": lambda found, state: Step(found.mean, {"t": 1}),
    "NaN remembered": lambda found, state: Step(found.mean, {"t": found.mean * torch.nan}),
    "a list remembered": lambda found, state: Step(found.mean, [found.mean]),
    "evaluated remembered": lambda found, state: Step(found.mean, {"evaluated": found.mean}),
    "unknown": lambda found, state: Step(found.mean, {"v": state["velocity"]}),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_step_of_the_wrong_form_is_named_with_its_class(name, tmp_path):
    with refused("Own.step, wh", "", MisuseError):
        own(tmp_path, Own(MAKES[name]))


def test_so_is_a_start(tmp_path):
    for first in (lambda weights: None, lambda weights: Step(weights, {"t": 0})):
        with refused("Own.start, wh", "", MisuseError):
            own(tmp_path, Own(first=first))
    with refused("the arguments of TakesNothing.start", "def start(self, weights)", MisuseError):
        own(tmp_path, TakesNothing())


@pytest.mark.parametrize("error", [TypeError("mine"), KeyError("m")])
def test_an_exception_of_its_own_code_stays_what_it_is(error, tmp_path):
    def fails(found, state):
        raise error

    first = lambda weights: Step(weights, {"m": weights})  # noqa: E731
    with pytest.raises(type(error), match=error.args[0]):
        own(tmp_path, Own(fails, first))


def test_nothing_of_a_step_outlives_the_next(tmp_path):
    """Zeros are evaluated after the first round alone, and a name that is not returned is gone."""
    first = lambda weights: Step(weights, {"a": weights, "b": weights})  # noqa: E731

    def make(found, state):
        evaluated = None if found.round == 2 else found.mean * 0
        return Step(found.mean, {"b": state["b"]}, evaluated)

    optimizer = Own(make, first)
    method = FedAvg(network=SMALL, optimizer=sgd(0.05), server_optimizer=optimizer)
    trainer = run(method, images(), tmp_path / "a", max_rounds=2, participation=0.5)
    plain = own(tmp_path / "b", Own())
    losses = [each.history["test/loss"].tolist() for each in (trainer, plain)]
    assert losses[0][1] == losses[1][1]
    assert losses[0][0] != losses[1][0]
    assert method.server.keys() == {"weights", "optimizer/b"}
