"""A slip in a hook of one's own ends the run in its first round with one line that names the
hook."""

from __future__ import annotations

import pytest
import torch
from toy import ready, run, sgd

from fl_lightning.errors import MisuseError
from fl_lightning.methods import FedAvg
from fl_lightning.wire import Payload


class ReturnsState(FedAvg):
    def next_state(self, sums):
        return {"weights": sums.mean("weights")}


class ReturnsAggregate(FedAvg):
    def aggregate(self, uploads):
        return {"weights": self.server["weights"]}


class KeepsNumber(FedAvg):
    def keep_own(self, client):
        client.state["visits"] = 3


class BeginsWithNumber(FedAvg):
    def build(self, data):
        super().build(data)
        self.server["count"] = 0


class CountsInList(FedAvg):
    def next_state(self, sums):
        super().next_state(sums)
        self.server["counts"] = [1]


class ReturnsLoss(FedAvg):
    def training_step(self, batch, batch_idx=0):
        return super().training_step(batch, batch_idx)["loss"]


class ReturnsFloat(FedAvg):
    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss_other": 1.0}


class ReturnsEach(FedAvg):
    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss_each": outputs["loss"].detach().expand(3)}


class ReturnsLosses(FedAvg):
    def training_step(self, batch, batch_idx=0):
        return {"loss": super().training_step(batch, batch_idx)["loss"].expand(3)}


class ReturnsRow(FedAvg):
    """Its terms have one value each, in other forms."""

    def training_step(self, batch, batch_idx=0):
        loss = super().training_step(batch, batch_idx)["loss"]
        return {"loss": loss[None], "loss_own": loss.detach()[None, None], "loss_plain": loss}


class ReturnsNothing(FedAvg):
    def training_step(self, batch, batch_idx=0):
        super().training_step(batch, batch_idx)


class UploadsDictionary(FedAvg):
    def upload(self, client):
        return {"weights": torch.zeros(1)}


class UploadsHalf(FedAvg):
    """Its server could read it, if it came."""

    def upload(self, client):
        return Payload({**super().upload(client), "weights": self.layout.read(self.network).half()})

    def decode(self, upload):
        return upload.tensor("weights").float()


class UploadsSigns(FedAvg):
    def upload(self, client):
        signs = self.layout.read(self.network).sign().to(torch.int8)
        return Payload({**super().upload(client), "signs": signs})

    def upload_limits(self, client):
        return {**super().upload_limits(client), "signs": (self.layout.size,)}


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (ReturnsState, r"ReturnsState.next_state returned dict; it changes self.server"),
        (ReturnsAggregate, r"ReturnsAggregate.aggregate returned dict; it changes self.server"),
        (KeepsNumber, r"client.state\['visits'\] is int; .*write torch.tensor"),
        (BeginsWithNumber, r"self.server\['count'\] is int; .*write torch.tensor"),
        (CountsInList, r"self.server\['counts'\] is list"),
        (
            ReturnsLoss,
            r"ReturnsLoss.training_step returned torch.Tensor; .*write return \{\"loss\": loss\}",
        ),
        (
            ReturnsFloat,
            r"ReturnsFloat.training_step returned 'loss': torch.Tensor, .*'loss_other': float",
        ),
        (ReturnsEach, r"ReturnsEach.training_step returned .*'loss_each': torch.Tensor of shape"),
        (ReturnsLosses, r"ReturnsLosses.training_step.* returned a loss of shape \(3,\); a local"),
        (ReturnsNothing, r"ReturnsNothing.training_step returned nothing"),
        (UploadsDictionary, r"UploadsDictionary.upload returned dict; it returns a Payload"),
        (UploadsHalf, r"UploadsHalf.upload, .* of torch.float16; values travel as float32"),
        (UploadsSigns, r"UploadsSigns.upload, .* of torch.int8; values travel as float32"),
    ],
)
@pytest.mark.parametrize("settings", [{"engine": "sequential", "workers": 1}, {"workers": 2}])
def test_the_hook_is_named(method, says, settings, tmp_path):
    with pytest.raises(MisuseError, match=says) as error:
        run(method(network="mlp", optimizer=sgd()), ready(), tmp_path, max_rounds=1, **settings)
    assert error.value.__context__ is None, "one error, not two"


@pytest.mark.parametrize(("method", "says"), [(ReturnsEach, "loss_each"), (ReturnsLosses, "mean")])
def test_a_stack_that_returns_no_terms_is_named_too(method, says, tmp_path):
    with pytest.raises(MisuseError, match=f"{method.__name__}.training_step.*{says}"):
        run(method(network="mlp", optimizer=sgd()), ready(), tmp_path, engine="batched")


def test_terms_of_one_value_may_have_any_form(tmp_path, caplog):
    found = []
    for method, engine in (
        (FedAvg, "sequential"),
        (ReturnsRow, "sequential"),
        (ReturnsRow, "batched"),
    ):
        method.stackable = True
        trainer = run(
            method(network="mlp", optimizer=sgd()), ready(), tmp_path, max_rounds=1, engine=engine
        )
        found.append(trainer)
    plain, *others = (one.progress.history[-1] for one in found)
    for metrics in others:
        for name in ("train/loss", "train/loss_own", "train/loss_plain"):
            assert metrics[name] == pytest.approx(plain["train/loss"], rel=1e-5)
    assert "one by one" not in caplog.text
