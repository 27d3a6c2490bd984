"""Methods of unusual form: their own losses and batches are no failure, what cannot make a step is
told so once."""

from __future__ import annotations

import pytest
import torch
from breaking import OPTIMA
from torch.nn import functional as F
from torch.optim import SGD

from fl_lightning.aggregation.sums import Addend
from fl_lightning.conformance import method_under_test, run_checks
from fl_lightning.conformance.checks_wire import shapes_of_entries
from fl_lightning.methods import FedAvg
from fl_lightning.wire import Payload

# what proves the kit, which itself runs in every run
pytestmark = [pytest.mark.slow, pytest.mark.essential]


class OwnLoss(FedAvg):
    """Never asks ``task_loss``."""

    def training_step(self, batch, batch_idx=0):
        inputs, target = batch
        loss = F.cross_entropy(self.network(inputs), target)
        return {"loss": loss, "loss_task": loss}


class DictionaryBatches(FedAvg):
    """Batches as dictionaries, and a loss of its own."""

    def local_batches(self, data, client, **order):
        for inputs, target in super().local_batches(data, client, **order):
            yield {"image": inputs, "label": target}

    def training_step(self, batch, batch_idx=0):
        loss = F.cross_entropy(self.network(batch["image"]), batch["label"])
        return {"loss": loss, "loss_task": loss}


class OwnOptimizer(FedAvg):
    """Small steps, whatever the configuration says."""

    def configure_optimizers(self):
        return SGD(self.trainable(), lr=0.02)


@pytest.mark.parametrize(
    ("unusual", "why"),
    [
        (OwnLoss, "does not call task_loss"),
        (DictionaryBatches, "does not call task_loss"),
        (OwnOptimizer, "an optimiser of its own"),
    ],
)
def test_what_is_ones_own_is_no_failure(unusual, why):
    outcomes = {outcome.check: outcome for outcome in run_checks(method_under_test(unusual))}
    assert [(o.check, o.detail) for o in outcomes.values() if o.verdict == "failed"] == []
    for check in OPTIMA:
        assert outcomes[check].verdict == "not applicable"
        assert why in outcomes[check].detail
    assert {
        outcomes[check].verdict
        for check in ("learning", "copies", "weights by examples", "diverged client")
    } == {"passed"}


class PlainLoss(FedAvg):
    def training_step(self, batch, batch_idx=0):
        return super().training_step(batch, batch_idx)["loss"]


class NestedLosses(FedAvg):
    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {"loss": outputs["loss"], "terms": {"task": outputs["loss"]}}


class OneLossAnExample(FedAvg):
    def task_loss(self, outputs, target):
        return F.cross_entropy(outputs, target, reduction="none")


class WantsTokens(FedAvg):
    def training_step(self, batch, batch_idx=0):
        return {"loss": self.network(batch["input_ids"])}


class StepsByClient(FedAvg):
    """Its rate is known once a client has received something."""

    def receive(self, message, client):
        super().receive(message, client)
        self.rate = 1 / len(client.train)

    def configure_optimizers(self):
        return SGD(self.trainable(), self.rate)


class SendsADictionary(FedAvg):
    def upload(self, client):
        return dict(super().upload(client))


class DeploysNothing(FedAvg):
    def deploy(self, client=None):
        super().deploy(client)


class MeasuresNothing(FedAvg):
    def server_metrics(self):
        super().server_metrics()


class TrainsOnNothing(FedAvg):
    def local_batches(self, data, client, **order):
        return iter(())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (PlainLoss, "gives Tensor []; a dictionary with 'loss' is needed"),
        (NestedLosses, "gives 'terms' as a dictionary of task: Tensor []"),
        (OneLossAnExample, "gives 'loss' as Tensor [16]"),
        (
            WantsTokens,
            "its training_step fails on a tuple of Tensor [16, 3, 16, 16], Tensor [16]: TypeError",
        ),
        (StepsByClient, "a run calls it before any client has received anything: AttributeError"),
        (SendsADictionary, "SendsADictionary.upload returned dict; it returns a Payload"),
        (DeploysNothing, "deploy gives NoneType; return a network"),
        (MeasuresNothing, "server_metrics gives NoneType; return a dictionary of numbers"),
        (TrainsOnNothing, "local_batches yields nothing; yield a batch for each local step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_method_of_another_form_is_told_so_once(wrong, says):
    first, *others = run_checks(method_under_test(wrong))
    assert (first.check, first.verdict) == ("contract", "failed")
    assert says in first.detail
    assert {(o.verdict, o.detail) for o in others} == {
        ("not applicable", "it makes no step: see contract")
    }


class AddsAProduct(FedAvg):
    """It adds u v up, of entries whose shapes it does not declare."""

    def upload(self, client):
        more = {"u": torch.ones(3, 2), "v": torch.ones(2, 4)}
        return Payload({**super().upload(client), **more})

    def addends(self, upload, client_id, weight):
        product = (upload.tensor("u") @ upload.tensor("v")).flatten()
        return {**super().addends(upload, client_id, weight), "product": Addend(product)}


def test_an_upload_that_a_run_finds_odd_among_others_is_refused():
    (outcome,) = run_checks(method_under_test(AddsAProduct), [shapes_of_entries])
    assert outcome.verdict == "passed", outcome.detail
