"""The kit fails FedKD and FedMosaic, broken on purpose, in the checks that are there for it."""

from __future__ import annotations

import pytest
import torch
from breaking import BY_N, Breaks, failed_checks, padded

from fl_lightning.methods import FedKD, FedMosaic
from fl_lightning.wire import Payload

# what proves the kit, which itself runs in every run
pytestmark = [pytest.mark.slow, pytest.mark.essential]

BROKEN = Breaks()


# FedKD


@BROKEN.fails("known optimum", "agreement", "partial participation")
class KDWrongSign(FedKD):
    def _distilled(self, weights):
        return 2 * weights - super()._distilled(weights)


@BROKEN.fails(BY_N)
class KDUnweighted(FedKD):
    def aggregate(self, uploads):
        one = torch.tensor(1, dtype=torch.int32)
        super().aggregate(
            {id: Payload({**upload, "examples": one}) for id, upload in uploads.items()}
        )


@BROKEN.fails("server reads uploads only", "permutation")
class KDReadsUnsentState(FedKD):
    """The student starts from the weights of whoever trained last."""

    def _distilled(self, weights):
        return super()._distilled(self.layout.read(self.network))


@BROKEN.fails("server reads uploads only")
class KDBroadcastsKeptState(FedKD):
    def broadcast(self, client):
        message = super().broadcast(client)
        kept = client.state.get("weights")
        return (
            message
            if kept is None or not message
            else Payload({"soft_labels": message.tensor("soft_labels") + 1e-6 * kept.mean()})
        )


@BROKEN.fails("known optimum", "partial participation", "copies")
class KDTrainsPadding(FedKD):
    def local_batches(self, data, client, **order):
        yield from padded(super().local_batches(data, client, **order), data.batch_size)


@BROKEN.fails("no stale state")
class KDKeepsStaleState(FedKD):
    """A client that is new starts where the one before it ended."""

    def receive(self, message, client):
        self.first["weights"] = self.layout.read(self.network)
        super().receive(message, client)


@BROKEN.fails("kept state is used", "known optimum")
class KDForgets(FedKD):
    def receive(self, message, client):
        client.state.pop("weights", None)
        super().receive(message, client)


@BROKEN.fails("known optimum")
class KDForgetsTheSquare(FedKD):
    """T instead of T^2."""

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return (
            outputs
            if "loss_task" in outputs
            else {name: value / self.temperature for name, value in outputs.items()}
        )


@BROKEN.fails("nothing in place")
class KDWritesKeptStateInPlace(FedKD):
    def upload(self, client):
        before = client.state.get("weights")
        sent = super().upload(client)
        if before is not None:
            client.state["weights"] = before.copy_(client.state["weights"])
        return sent


@BROKEN.fails("bytes on the wire")
class KDSendsTwice(FedKD):
    def broadcast(self, client):
        return Payload({**super().broadcast(client), "more": self.server["soft_labels"]})


# FedMosaic


@BROKEN.fails("broadcast")
class MosaicWrongSign(FedMosaic):
    """Those who learn something else help most."""

    def _mixed_for(self, id):
        self.tau = -self.tau
        mixed = super()._mixed_for(id)
        self.tau = -self.tau
        return mixed


@BROKEN.fails("known optimum", "agreement", "learning")
class MosaicAscends(FedMosaic):
    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": 2 * outputs["loss"].detach() - outputs["loss"]}


@BROKEN.fails("broadcast")
class MosaicUnweighted(FedMosaic):
    def _mixed_for(self, id):
        others = self.server["adapters"][self.server["ids"] != id]
        return others.mean(0) if len(others) else super()._mixed_for(id)


@BROKEN.fails("server reads uploads only")
class MosaicBroadcastsKeptState(FedMosaic):
    def broadcast(self, client):
        mixed = super().broadcast(client).tensor("adapters")
        return Payload(
            {"adapters": mixed + client.state["gradient"].mean() if client.state else mixed}
        )


@BROKEN.fails("server reads uploads only")
class MosaicReadsUnsentState(FedMosaic):
    def aggregate(self, uploads):
        super().aggregate(uploads)
        self.server["adapters"] = self.server["adapters"] + self.gradient.mean()


@BROKEN.fails("copies")
class MosaicTrainsPadding(FedMosaic):
    def local_batches(self, data, client, **work):
        yield from padded(super().local_batches(data, client, **work), data.batch_size)


@BROKEN.fails("no stale state")
class MosaicKeepsStaleState(FedMosaic):
    """A client that is new starts where the one before it ended."""

    def receive(self, message, client):
        index = self.family(client)
        self.start[index] = self.layouts[index].read(self.families[index])
        super().receive(message, client)


@BROKEN.fails("broadcast")
class MosaicForgetsWhoStaysAway(FedMosaic):
    def aggregate(self, uploads):
        self.server = {name: tensor[:0] for name, tensor in self.server.items()}
        super().aggregate(uploads)


@BROKEN.fails("broadcast", "permutation")
class MosaicOnlyLowerNumbers(FedMosaic):
    def _mixed_for(self, id):
        everything = self.server
        lower = everything["ids"] <= id
        self.server = {name: tensor[lower] for name, tensor in everything.items()}
        mixed = super()._mixed_for(id)
        self.server = everything
        return mixed


@BROKEN.fails("kept state is used")
class MosaicForgets(FedMosaic):
    def receive(self, message, client):
        client.state.pop("trained", None)
        super().receive(message, client)


@BROKEN.fails("nothing in place")
class MosaicWritesTheServerInPlace(FedMosaic):
    def aggregate(self, uploads):
        self.server["adapters"].zero_()
        super().aggregate(uploads)


@BROKEN.fails("bytes on the wire")
class MosaicSendsTheWholeGradient(FedMosaic):
    def build(self, data):
        super().build(data)
        self.kept = torch.arange(self.gradient.numel())
        self.server["sketches"] = torch.empty(0, len(self.kept))


@pytest.mark.parametrize(("broken", "checks"), BROKEN)
def test_the_kit_catches(broken, checks):
    assert set(failed_checks(broken, checks)) == checks
