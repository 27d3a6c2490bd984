"""What a method declares of itself is checked, not taken on trust: SCAFFOLD and FedNova pass, wrong
ones are told what is wrong."""

from __future__ import annotations

import pytest
import torch
from breaking import DividesByTheRound, Dynamic, KeepsInAnAttribute, Repels
from places import CONFIGS
from torch.optim import SGD

from fl_lightning.__main__ import main
from fl_lightning.aggregation.server_optimizers import ServerSGD
from fl_lightning.conformance import CHECKS, method_under_test, run_checks
from fl_lightning.conformance.scaffold import ScaffoldRound, scaffold_path
from fl_lightning.conformance.toy import CENTRES
from fl_lightning.methods import (
    SCAFFOLD,
    FedAdam,
    FedAvg,
    FedCM,
    FedDC,
    FedDyn,
    FedNova,
    FedProx,
    FedSpeed,
    Method,
)
from fl_lightning.methods.terms import LabelSmoothing
from fl_lightning.wire import Payload

# what proves the kit, which itself runs in every run
pytestmark = [pytest.mark.slow, pytest.mark.essential]


def failures(method, *names, settings=None):
    checks = [check for check in CHECKS if not names or check.__name__.replace("_", " ") in names]
    outcomes = run_checks(method_under_test(method, settings), checks)
    return {o.check: o.detail for o in outcomes if o.verdict == "failed"}


class Scaffold(SCAFFOLD):
    """The project's method, of which the kit knows nothing but what it declares."""


class StrangersNova(Method):
    """Normalised averaging (Wang et al., NeurIPS 2020), for plain SGD: x + tau_eff sum_k p_k (y_k -
    x) / tau_k."""

    def upload(self, client):
        return Payload({**super().upload(client), "steps": torch.tensor([float(self.local_steps)])})

    def aggregate(self, uploads):
        start = self.server["weights"]
        sent = list(uploads.values())
        total = sum(int(u.tensor("examples")) for u in sent)
        shares = [int(u.tensor("examples")) / total for u in sent]
        steps = [float(u.tensor("steps")) for u in sent]
        mean = sum(
            p * (u.tensor("weights") - start) / tau
            for p, tau, u in zip(shares, steps, sent, strict=True)
        )
        self.server["weights"] = (
            start + sum(p * tau for p, tau in zip(shares, steps, strict=True)) * mean
        )


class LastStep(FedAvg):
    """Clients go on by a tenth of what their weights changed by from one round to the next, which
    they have from their second round on."""

    keeps_state = True

    def receive(self, message, client):
        super().receive(message, client)
        if (step := client.state.get("step")) is not None:
            self.layout.write(self.network, message.tensor("weights") + 0.1 * step)

    def upload(self, client):
        now, last = self.layout.read(self.network), client.state.get("last")
        if last is not None:
            client.state["step"] = now - last
        client.state["last"] = now
        return super().upload(client)


class LeavesNothing(FedAvg):
    """What is left of an upload is sent with the next one; here nothing is ever left."""

    def upload(self, client):
        sent, nothing = super().upload(client), torch.zeros(self.layout.size)
        whole = sent.tensor("weights") + client.state.get("rest", nothing)
        client.state["rest"] = nothing
        return Payload({**sent, "weights": whole})


@pytest.mark.parametrize("method", [LastStep, LeavesNothing])
def test_what_is_kept_may_act_a_round_later(method):
    assert failures(method, "kept state is used") == {}


@pytest.mark.parametrize("method", [Scaffold, StrangersNova, Dynamic])
def test_a_strangers_method_passes(method):
    outcomes = list(run_checks(method_under_test(method)))
    assert [(o.check, o.detail) for o in outcomes if o.verdict == "failed"] == []
    passed = {o.check for o in outcomes if o.verdict == "passed"}
    assert {
        "known optimum",
        "agreement",
        "partial participation",
        "weights by examples",
        "federation size",
    } <= passed
    assert ("control variates" in passed) == (method is Scaffold)
    assert ("dynamic regularisation" in passed) == (method is Dynamic)


def test_it_trains_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "fedavg.yaml")
    command = [
        "fit",
        "--config",
        config,
        "--model",
        "SCAFFOLD",
        "--trainer.logger",
        "false",
        "--trainer.fast_dev_run",
        "2",
    ]
    assert main([*command, "--model.optimizer.momentum", "0"]) == 0
    capsys.readouterr()
    assert main(command) == 2
    assert "write --model.optimizer.momentum 0" in capsys.readouterr().err


class WrongSign(Scaffold):
    def receive(self, message, client):
        super().receive(message, client)
        self.correction = -self.correction


class SumOfChanges(Scaffold):
    def build(self, data):
        super().build(data)
        self.clients = 1


class MeanOfThoseThatReturned(Scaffold):
    def aggregate(self, uploads):
        self.clients = len(uploads)
        super().aggregate(uploads)


class Forgets(Scaffold):
    def upload(self, client):
        sent = super().upload(client)
        client.state.clear()
        return sent


class ReadsNothingKept(Scaffold):
    def receive(self, message, client):
        kept = dict(client.state)
        client.state.clear()
        super().receive(message, client)
        client.state.update(kept)


class Scaled(Scaffold):
    """K eta_l off by a factor."""

    factor = 2.0

    @property
    def local_steps(self):
        return super().local_steps / self.factor


class ForgetsTheLearningRate(Scaffold):
    local_lr = 1.0


class ForgetsTheSteps(Scaffold):
    local_steps = 1


class PlannedSteps(Scaffold):
    def local_batches(self, data, client, *, epochs, steps, **order):
        self.planned = data.num_steps(client, epochs)
        return super().local_batches(data, client, epochs=epochs, steps=steps, **order)

    @property
    def local_steps(self):
        return self.planned


class BaseLearningRate(Scaffold):
    @property
    def local_lr(self):
        return self.configure_optimizers().param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (WrongSign, "the correction has the wrong sign"),
        (SumOfChanges, "the sum of the clients' changes: divide it by N"),
        (MeanOfThoseThatReturned, "|S|/N"),
        (Forgets, "c_i stays with the client, in client.state"),
        (ReadsNothingKept, "keep it in client.state and read it in receive"),
        (Scaled, "c_i+ takes 2 (x - y_i) / (K eta_l)"),
        (ForgetsTheLearningRate, "divide by eta_l too, which is local_lr"),
        (ForgetsTheSteps, "divide by K too, which is local_steps"),
        (PlannedSteps, "a straggler makes fewer"),
        (BaseLearningRate, "that of this round is local_lr"),
    ],
)
def test_a_wrong_scaffold_is_told_what_is_wrong(wrong, says):
    assert says in failures(wrong, "control variates")["control variates"]


class NoLinearTerm(Dynamic):
    sign = 0.0


class NoQuadraticTerm(Dynamic):
    def training_step(self, batch, batch_idx=0):
        outputs, step = super().training_step(batch, batch_idx), self.weights() - self.start
        return {**outputs, "loss": outputs["loss"] - self.alpha / 2 * step @ step}


class TwiceTheQuadraticTerm(Dynamic):
    def training_step(self, batch, batch_idx=0):
        outputs, step = super().training_step(batch, batch_idx), self.weights() - self.start
        return {**outputs, "loss": outputs["loss"] + self.alpha / 2 * step @ step}


class SumOfSteps(Dynamic):
    def build(self, data):
        super().build(data)
        self.clients = 1


class LastStepAlone(Dynamic):
    def upload(self, client):
        message = super().upload(client)
        client.state["history"] = client.state["history"] - self.history
        return message


class ForgetsWhoSitsOut(Dynamic):
    def receive(self, message, client):
        trained = int(client.state.get("trained", torch.zeros(())))
        if trained != self.round - 1:
            client.state.pop("history", None)
        super().receive(message, client)

    def upload(self, client):
        client.state["trained"] = torch.tensor(float(self.round))
        return super().upload(client)


class ByExamples(Dynamic):
    def __init__(self, **settings):
        super().__init__(weigh_by="examples", **settings)


class OnlyTheMean(Dynamic):
    def next_state(self, sums):
        super().next_state(sums)
        self.server["weights"] = self.server["weights"] - self.server["H"]


class MinusH(Dynamic):
    def next_state(self, sums):
        super().next_state(sums)
        self.server["weights"] = self.server["weights"] - 2 * self.server["H"]


class NoAlpha(Dynamic):
    def build(self, data):
        super().build(data)
        self.strength = self.__dict__.pop("alpha")

    def training_step(self, batch, batch_idx=0):
        return Method.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Repels, "the linear term has the wrong sign"),
        (NoLinearTerm, "the linear term is not there"),
        (NoQuadraticTerm, "the quadratic term is not there"),
        (TwiceTheQuadraticTerm, "the quadratic term is twice as strong"),
        (DividesByTheRound, "it is |S|/N of that, the sum divided by N"),
        (SumOfSteps, "H moves by the sum of the clients' steps"),
        (LastStepAlone, "add y_i - x to the H_i that is in client.state"),
        (ForgetsWhoSitsOut, "the H_i of a client that sits out a round is lost"),
        (ByExamples, "clients count by n_k"),
        (OnlyTheMean, "H is not added to the mean"),
        (MinusH, "H is taken away from the mean"),
        (KeepsInAnAttribute, "keep nothing in client.state"),
        (NoAlpha, "it has no attribute alpha"),
    ],
)
def test_a_wrong_feddyn_is_told_what_is_wrong(wrong, says):
    assert says in failures(wrong, "dynamic regularisation")["dynamic regularisation"]


class DeclaredDyn(FedDyn):
    """The project's method, of which the kit knows nothing but what it declares."""

    dynamic_regularisation = True


class TwiceTheMean(DeclaredDyn):
    def next_state(self, sums):
        start = self.server["weights"]
        super().next_state(sums)
        self.server["weights"] = 2 * self.server["weights"] - start


AT_NEUTRAL = ("known optimum", "agreement", "partial participation", "federation size", "broadcast")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (DeclaredDyn, {"alpha": 0.0}),
        (FedDyn, {"alpha": 0.0}),
        (FedDC, {"alpha": 0.0}),
        (FedSpeed, {"lamb": 0.0, "rho": 0.001}),
        (SCAFFOLD, {"control": False}),
        (FedCM, {"A": 1.0}),
        (DeclaredDyn, {"alpha": 0.0, "weigh_by": "examples"}),
        (FedDyn, {"alpha": 0.0, "weigh_by": "examples"}),
        (FedDC, {"alpha": 0.0, "weigh_by": "examples"}),
        (FedSpeed, {"lamb": 0.0, "rho": 0.001, "weigh_by": "examples"}),
        (SCAFFOLD, {"control": False, "weigh_by": "examples"}),
        (FedCM, {"A": 1.0, "weigh_by": "examples"}),
        (FedAvg, {"weigh_by": "clients"}),
        (FedAdam, {"weigh_by": "clients"}),
        (FedNova, {"weigh_by": "clients"}),
    ],
)
def test_a_method_that_keeps_nothing_at_its_neutral_setting_passes_there(method, settings):
    """It is the mean of its clients, weighed as its setting says, and has neither vectors nor the
    number of all clients in its steps."""
    checks = [*AT_NEUTRAL, "dynamic regularisation", "control variates", "kept state is used"]
    checks.append("weights by examples")
    assert failures(method, *checks, settings=settings) == {}


def test_neutral_settings_are_fedavg_of_the_same_weights():
    assert failures(FedProx, "neutral", settings={"weigh_by": "clients"}) == {}


@pytest.mark.parametrize(
    "settings", [{"terms": [LabelSmoothing(0.1)]}, {"server_optimizer": ServerSGD(0.5)}]
)
def test_neutral_settings_are_fedavg_with_the_other_settings(settings):
    assert failures(FedProx, "neutral", settings=settings) == {}


def test_a_feddyn_is_checked_at_alpha_0_too():
    found = failures(TwiceTheMean, *AT_NEUTRAL, "dynamic regularisation", settings={"alpha": 0.0})
    assert {"partial participation", "dynamic regularisation"} <= found.keys()


class Undeclared(Dynamic):
    dynamic_regularisation = False


@pytest.mark.parametrize("check", ["known optimum", "partial participation"])
def test_a_feddyn_that_does_not_say_so_is_told_what_to_declare(check):
    assert "declare dynamic_regularisation = True" in failures(Undeclared, check)[check]


def test_what_no_checkpoint_has_is_named():
    detail = failures(KeepsInAnAttribute, "resume")["resume"]
    assert "a run changes self.histories, which no checkpoint has" in detail
    assert "client.state" in detail


class Decays(FedAvg):
    """The server's steps fall by a number, and clients' losses by one of the network."""

    calls = 0

    def next_state(self, sums):
        self.calls, before = self.calls + 1, self.server["weights"]
        super().next_state(sums)
        self.server["weights"] = before + 0.9**self.calls * (self.server["weights"] - before)

    def training_step(self, batch, batch_idx=0):
        outputs, scale = super().training_step(batch, batch_idx), getattr(self.network, "scale", 1)
        self.network.scale = 0.99 * scale
        return {**outputs, "loss": scale * outputs["loss"]}


def test_so_is_a_number_and_what_a_network_has():
    detail = failures(Decays, "resume")["resume"]
    assert "a run changes self.calls, self.network.scale, which no checkpoint has" in detail


class Uniform(FedAvg):
    def aggregate(self, uploads):
        self.server["weights"] = torch.stack(
            [upload.tensor("weights") for upload in uploads.values()]
        ).mean(0)


class DeclaredUniform(Uniform):
    uniform_clients = True


class Slower(FedAvg):
    """A step of |S| / N of the mean's."""

    def build(self, data):
        super().build(data)
        self.num_clients = data.num_clients

    def aggregate(self, uploads):
        start = self.server["weights"]
        super().aggregate(uploads)
        self.server["weights"] = start + len(uploads) / self.num_clients * (
            self.server["weights"] - start
        )


class DeclaredSlower(Slower):
    scales_with_federation = True


@pytest.mark.parametrize("declared", [DeclaredUniform, DeclaredSlower])
def test_what_is_declared_and_true_is_no_failure(declared):
    assert (
        failures(
            declared,
            "known optimum",
            "partial participation",
            "weights by examples",
            "federation size",
            "copies",
        )
        == {}
    )


class NotUniform(FedAvg):
    uniform_clients = True


class NotScaled(FedAvg):
    scales_with_federation = True


class NoVariates(FedAvg):
    control_variates = True


class WrongWay(DeclaredSlower):
    def aggregate(self, uploads):
        start = self.server["weights"]
        super().aggregate(uploads)
        self.server["weights"] = 2 * start - self.server["weights"]


@pytest.mark.parametrize(
    ("wrong", "check", "says"),
    [
        (Uniform, "weights by examples", "declare uniform_clients = True if that is meant"),
        (Uniform, "known optimum", "declare uniform_clients = True if that is meant"),
        (NotUniform, "weights by examples", "it declares uniform_clients"),
        (NotUniform, "known optimum", "it declares uniform_clients"),
        (Slower, "federation size", "declare scales_with_federation = True if that is meant"),
        (NotScaled, "federation size", "it declares scales_with_federation"),
        (NotScaled, "federation size", "divide by N"),
        (WrongWay, "partial participation", "of the clients' mean step"),
        (NoVariates, "control variates", "its clients keep nothing"),
    ],
)
def test_what_is_not_so_or_not_declared(wrong, check, says):
    assert says in failures(wrong, check)[check]


def test_the_reference_is_a_plain_torch_loop_and_ends_where_nothing_drifts():
    """Clients make 1, 2 and 5 steps: averaging ends elsewhere, and so does another sign, which a
    golden number would not notice."""
    steps, lr, clients = {0: 1, 1: 2, 2: 5}, 0.05, 3
    rounds = [ScaffoldRound(steps, steps, lr)] * 400
    found = scaffold_path(torch.zeros(6), rounds, [1.0] * clients)
    torch.testing.assert_close(found[-1], CENTRES[:clients].double().mean(0), rtol=0, atol=1e-9)
    averaging = scaffold_path(torch.zeros(6), rounds, [1.0] * clients, sign=0.0)
    assert float((averaging[-1] - CENTRES[:clients].double().mean(0)).abs().max()) > 0.3
    assert (
        not scaffold_path(torch.zeros(6), rounds, [1.0] * clients, sign=-1.0)[-1].abs().max() < 1e6
    )

    x, c, own = (
        torch.zeros(6, dtype=torch.float64),
        torch.zeros(6, dtype=torch.float64),
        torch.zeros(3, 6, dtype=torch.float64),
    )
    for expected in found[:5]:
        ended, new = [], own.clone()
        for k, count in steps.items():
            y = torch.nn.Parameter(x.clone())
            optimizer = SGD([y], lr=lr)
            for _ in range(count):
                optimizer.zero_grad()
                ((y - CENTRES[k]).square().sum() / 2).backward()
                y.grad += c - own[k]
                optimizer.step()
            ended.append(y.detach())
            new[k] = own[k] - c + (x - y.detach()) / (count * lr)
        x, c, own = torch.stack(ended).mean(0), c + (new - own).mean(0), new
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
