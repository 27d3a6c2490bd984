"""The kit fails averaging methods that are broken on purpose, each in the checks that are there for
it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from breaking import (
    BY_N,
    OPTIMA,
    Breaks,
    DividesByTheRound,
    KeepsInAnAttribute,
    Repels,
    failed_checks,
    padded,
)
from torch.nn import functional as F
from torch.optim import SGD

from fl_lightning.aggregation.sums import Addend
from fl_lightning.methods import AQFL, FedAvg, FedMPQ
from fl_lightning.wire import Layout, Payload

# what proves the kit, which itself runs in every run
pytestmark = [pytest.mark.slow, pytest.mark.essential]

BROKEN = Breaks()


# Six ways to break an average


@BROKEN.fails(OPTIMA, "learning")
class WrongSign(FedAvg):
    def aggregate(self, uploads):
        start = self.server["weights"]
        super().aggregate(uploads)
        self.server["weights"] = 2 * start - self.server["weights"]


@BROKEN.fails(BY_N)
class Unweighted(FedAvg):
    def aggregate(self, uploads):
        self.server["weights"] = torch.stack(
            [upload.tensor("weights") for upload in uploads.values()]
        ).mean(0)


@BROKEN.fails("server reads uploads only")
class ReadsUnsentState(FedAvg):
    def aggregate(self, uploads):
        super().aggregate(uploads)
        self.server["weights"] = (self.server["weights"] + self.layout.read(self.network)) / 2


@BROKEN.fails("shapes of entries", "hostile entries")
class StacksAnyShape(FedAvg):
    """It declares how many values its entry has, and not their shape."""

    def upload(self, client):
        return Payload({**super().upload(client), "more": torch.ones(3)})

    def upload_limits(self, client):
        return {"examples": 1, "weights": self.layout.size, "more": 3}

    def aggregate(self, uploads):
        torch.stack([upload.tensor("more") for upload in uploads.values()])
        super().aggregate(uploads)


@BROKEN.fails("hostile entries")
class ReadsLate(FedAvg):
    """What it sends beside weights is first read where it is added up."""

    def upload(self, client):
        return Payload({**super().upload(client), "more": torch.ones(3)})

    def upload_limits(self, client):
        return {**super().upload_limits(client), "more": (3,)}

    def addends(self, upload, client_id, weight):
        return {**super().addends(upload, client_id, weight), "more": Addend(upload.tensor("more"))}


@BROKEN.fails("order of uploads")
class TrustsTheFirst(FedAvg):
    """What a client adds depends on how many came before it."""

    def addends(self, upload, client_id, weight):
        if vars(self).get("heard_in") != self.round:
            self.heard_in, self.heard = self.round, 0
        self.heard += 1
        return super().addends(upload, client_id, max(1, weight // self.heard))


@BROKEN.fails("settings of the server")
class GivesNoStart(FedAvg):
    def addends(self, upload, client_id, weight):
        return {"weights": Addend(self.decode(upload), weight, self.largest_weight)}


@BROKEN.fails("settings of the server")
class NeverAsksTheOptimizer(FedAvg):
    calls_server_optimizer = True

    def next_state(self, sums):
        self.server["weights"] = sums.mean("weights")


@BROKEN.fails("known optimum", "partial participation", "copies", "weights by examples")
class TrainsPadding(FedAvg):
    def local_batches(self, data, client, **order):
        yield from padded(super().local_batches(data, client, **order), data.batch_size)


@BROKEN.fails("no stale state")
class KeepsStaleState(FedAvg):
    def receive(self, message, client):
        before = {name: b.clone() for name, b in self.network.named_buffers()}
        super().receive(message, client)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(before[name])


class Pulled(FedAvg):
    """It pulls a client back to where its last round ended."""

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        now = torch.cat([p.flatten() for p in self.network.parameters()])
        pull = (now - self.last[: now.numel()]).square().sum() / 20
        return {**outputs, "loss": outputs["loss"] + pull}

    def upload(self, client):
        client.state["last"] = self.layout.read(self.network)
        return super().upload(client)


@BROKEN.fails("no stale state")
class LeavesWhatItKept(Pulled):
    """A newcomer finds the state of whoever trained before it, from the second round on."""

    def receive(self, message, client):
        super().receive(message, client)
        if "last" in client.state or not hasattr(self, "last"):
            now = self.layout.read(self.network)
            self.register_buffer("last", client.state.get("last", now))


@BROKEN.fails("clients read messages only")
class ReadsTheServerLater(Pulled):
    """A client that has kept something reads a tensor of the server that it was never sent."""

    def build(self, data):
        super().build(data)
        self.server["before"] = self.server["weights"]

    def receive(self, message, client):
        super().receive(message, client)
        last = client.state.get("last", self.layout.read(self.network))
        unsent = self.server["before"] if client.state else last
        self.register_buffer("last", (last + unsent) / 2)

    def next_state(self, sums):
        before = self.server["weights"]
        super().next_state(sums)
        self.server["before"] = before


@BROKEN.fails("same start as declared")
class StartsByClient(FedAvg):
    """It says that all clients start alike, and reads who it is."""

    same_start = True

    def receive(self, message, client):
        super().receive(message, client)
        self.layout.write(self.network, message.tensor("weights") * (1 + client.id % 2))


@BROKEN.fails("clients read messages only")
class ReadsTheServer(FedAvg):
    def receive(self, message, client):
        self.layout.write(self.network, self.server["weights"])


@BROKEN.fails("stacked as alone")
class RemembersInAList(FedAvg):
    """It says that clients can be stacked, and changes a list that all of a stack share."""

    stackable = True

    def receive(self, message, client):
        super().receive(message, client)
        vars(self).setdefault("whose", [0])[0] = client.id

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * (1 + self.whose[0])}


@BROKEN.fails("stacked as alone")
class RemembersAStateInAList(FedAvg):
    """The same, of what each client has kept, so that the first round is right."""

    stackable = True

    def receive(self, message, client):
        super().receive(message, client)
        vars(self).setdefault("whose", [0.0])[0] = float(client.state.get("id", 0.0))

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * (1 + self.whose[0])}

    def upload(self, client):
        client.state["id"] = torch.tensor(float(client.id))
        return super().upload(client)


@BROKEN.fails("orders are obeyed")
class IgnoresLabels(FedAvg):
    def local_batches(self, data, client, *, labels, **order):
        return super().local_batches(data, client, labels=data.labels(client), **order)


@BROKEN.fails("orders are obeyed")
class IgnoresSteps(FedAvg):
    def local_batches(self, data, client, *, epochs, steps, **order):
        return super().local_batches(
            data, client, epochs=epochs, steps=data.num_steps(client, epochs), **order
        )


@BROKEN.fails("only its own examples")
class TrainsOnValidation(FedAvg):
    def local_batches(self, data, client, **order):
        yield from super().local_batches(data, client, **order)
        yield from (batch[:2] for batch in data.val_batches([client]))


@BROKEN.fails("only its own examples")
class TrainsOnTest(FedAvg):
    def local_batches(self, data, client, **order):
        yield from super().local_batches(data, client, **order)
        yield from data.test_batches()


@BROKEN.fails("only its own examples")
class KeepsAModelOfValidation(FedAvg):
    """Its upload is of its own examples alone."""

    def local_batches(self, data, client, **order):
        yield from super().local_batches(data, client, **order)
        own = deepcopy(self.network)
        step = SGD(own.parameters(), lr=0.05)
        for inputs, target, *_ in data.val_batches([client]):
            F.cross_entropy(own(inputs), target).backward()
            step.step()
        client.state["own"] = next(own.parameters()).detach()


@BROKEN.fails("no stale state")
class KeepsItsOptimizer(FedAvg):
    def configure_optimizers(self):
        if not hasattr(self, "optimizer"):
            self.optimizer = SGD(self.trainable(), lr=0.05, momentum=0.9)
        return self.optimizer


@BROKEN.fails("deployed from the server")
class LeavesStatistics(FedAvg):
    def build(self, data):
        super().build(data)
        names = dict(self.network.named_parameters())
        self.layout = Layout.of(self.network, include=names.__contains__)
        self.server = {"weights": self.layout.read(self.network)}


@BROKEN.fails("budget")
class OvershootsBudget(FedMPQ):
    def allocate(self, budget):
        bits = super().allocate(budget)
        return [min(8, bits[0] + 1), *bits[1:]]


# More of them


@BROKEN.fails("budget")
class SendsMoreThanItsBudget(AQFL):
    def receive(self, message, client):
        super().receive(message, client)
        self.bits = 8


@BROKEN.fails("partial participation", "broadcast")
class DividesByEverybody(FedAvg):
    def build(self, data):
        super().build(data)
        self.examples = int(data.sizes.sum())

    def aggregate(self, uploads):
        n = [int(upload.tensor("examples")) for upload in uploads.values()]
        start = self.server["weights"]
        super().aggregate(uploads)
        self.server["weights"] = start + sum(n) / self.examples * (self.server["weights"] - start)


@BROKEN.fails("permutation", "weights by examples")
class WeighsByNumber(FedAvg):
    def upload(self, client):
        return Payload(
            {
                **super().upload(client),
                "examples": torch.tensor(min(client.id + 1, len(client.train))),
            }
        )


@BROKEN.fails("bytes on the wire")
class SendsMoreThanItSays(FedAvg):
    def upload(self, client):
        return Payload({**super().upload(client), "again": self.server["weights"]})


@BROKEN.fails("nothing in place")
class WritesTheServerInPlace(FedAvg):
    def aggregate(self, uploads):
        before = self.server["weights"]
        super().aggregate(uploads)
        self.server["weights"] = before.copy_(self.server["weights"])


@BROKEN.fails("kept state is used")
class KeepsForNothing(FedAvg):
    def upload(self, client):
        client.state["last"] = self.layout.read(self.network)
        return super().upload(client)


@BROKEN.fails("resume")
class HidesState(FedAvg):
    momentum = 0.0

    def aggregate(self, uploads):
        start = self.server["weights"]
        super().aggregate(uploads)
        self.momentum = 0.5 * self.momentum + (self.server["weights"] - start)
        self.server["weights"] = start + self.momentum


@BROKEN.fails("determinism")
class DrawsFromTheGlobalGenerator(FedAvg):
    def aggregate(self, uploads):
        super().aggregate(uploads)
        self.server["weights"] = self.server["weights"] + 1e-3 * torch.randn_like(
            self.server["weights"]
        )


@BROKEN.fails("diverged client")
class HidesDivergence(FedAvg):
    def upload(self, client):
        sent = super().upload(client)
        return Payload({**sent, "weights": sent.tensor("weights").nan_to_num(0.0)})


class OwnLoss(FedAvg):
    """Never asks ``task_loss``."""

    def training_step(self, batch, batch_idx=0):
        inputs, target = batch
        loss = F.cross_entropy(self.network(inputs), target)
        return {"loss": loss, "loss_task": loss}


@BROKEN.fails("learning")
class OwnLossWrongSign(OwnLoss, WrongSign):
    pass


@BROKEN.fails("weights by examples")
class OwnLossUnweighted(OwnLoss, Unweighted):
    pass


@BROKEN.fails("copies", "weights by examples")
class OwnLossPadding(OwnLoss, TrainsPadding):
    pass


@BROKEN.fails("diverged client")
class OwnLossHidesDivergence(OwnLoss, HidesDivergence):
    pass


# FedDyn by a stranger, of which the kit knows what it declares

BROKEN.fails("federation size", "dynamic regularisation")(DividesByTheRound)
BROKEN.fails("resume", "dynamic regularisation")(KeepsInAnAttribute)
BROKEN.fails("dynamic regularisation")(Repels)


@pytest.mark.parametrize(("broken", "checks"), BROKEN)
def test_the_kit_catches(broken, checks):
    assert set(failed_checks(broken, checks)) == checks
