"""References of a comparison: every client alone, and one average inside the true groups."""

import numpy as np
import pytest
import torch
from ten import REFERENCES, SMALL, fit, same
from toy import ready, run, sgd

from fl_lightning import methods, rng
from fl_lightning.aggregation.average import NoAverageError
from fl_lightning.conformance.toy import images
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg, Krum, LocalOnly, Oracle
from fl_lightning.wire import Payload


def made(name, **settings):
    return getattr(methods, name)(network=SMALL, optimizer=sgd(0.05, momentum=0.9), **settings)


def test_a_client_alone_is_one_client_that_trains_for_all_rounds(tmp_path):
    """Its weights after three rounds are those of a federation of which it is the only client."""
    alone = made("LocalOnly")
    trainer = run(alone, images(), tmp_path / "alone", max_rounds=3)
    kept = trainer.progress.done.states
    assert sorted(kept) == trainer.data.active.tolist()
    for id in (0, 3):
        data = images()
        trained = run(made("FedAvg"), only(data, id), tmp_path / f"only{id}", max_rounds=3)
        torch.testing.assert_close(kept[id]["weights"], trained.method.server["weights"])
    rows = trainer.progress.history
    assert {row["comm/upload_bytes"] / row["clients/trained"] for row in rows} == {34.0}


def only(data, id):
    """The same data where nobody but one client has examples to train on."""
    distribute = data.distribute

    def distributed(seed, device):
        distribute(seed, device)
        data.__dict__["active"] = np.array([id])

    data.distribute = distributed
    return data


def test_an_oracle_with_one_group_is_fedavg(tmp_path):
    class OneGroup(Oracle):
        def build(self, data):
            super().build(data)
            self.group = np.zeros_like(self.group)

    oracle = OneGroup(network=SMALL, optimizer=sgd(0.05, momentum=0.9))
    run(oracle, images(), tmp_path / "oracle", max_rounds=2)
    plain = made("FedAvg")
    run(plain, images(), tmp_path / "plain", max_rounds=2)
    assert torch.equal(oracle.server["groups"][0], plain.server["weights"])


def test_an_oracle_averages_inside_groups_alone(tmp_path):
    """Of uploads made up here; a group of which nobody returned keeps what it had."""
    oracle, data = made("Oracle"), images()
    run(oracle, data, tmp_path, max_rounds=1)
    group, before = data.group_counts().argmax(1), oracle.server["groups"].clone()
    assert len(set(group.tolist())) > 1
    ids = [int(id) for id in data.active][:-1]
    vectors = {id: torch.full((oracle.layout.size,), float(id)) for id in ids}
    examples = {id: torch.tensor(id + 1, dtype=torch.int32) for id in ids}
    oracle.aggregate(
        {id: Payload({"examples": examples[id], "weights": vectors[id]}) for id in ids}
    )
    for value in range(data.num_groups):
        mine = [id for id in ids if group[id] == value]
        mean = (
            sum(id * (id + 1) for id in mine) / sum(id + 1 for id in mine)
            if mine
            else before[value]
        )
        torch.testing.assert_close(
            oracle.server["groups"][value], torch.zeros(oracle.layout.size) + mean
        )


def test_a_group_with_too_few_uploads_for_the_average_rests():
    """Krum(1) needs five; of two groups one has six and the other two."""
    oracle, data = made("Oracle", average=Krum(1)), ready(num_clients=8)
    oracle.build(data)
    oracle.group = np.array(6 * [0] + 2 * [1])
    before, size = oracle.server["groups"].clone(), oracle.layout.size
    uploads = {
        id: Payload({"examples": torch.tensor(1), "weights": torch.full((size,), float(id))})
        for id in range(8)
    }
    oracle.aggregate(uploads)
    groups = oracle.server["groups"]
    assert groups[0][0] in (1, 2, 3, 4)
    assert torch.equal(groups[1], before[1])
    with pytest.raises(NoAverageError):
        oracle.aggregate({id: uploads[id] for id in (6, 7)})
    assert torch.equal(oracle.server["groups"], groups)


@pytest.mark.parametrize("name", REFERENCES)
def test_engines_agree_on_references(name, tmp_path):
    one, _ = fit(made(name), tmp_path / "one")
    two, _ = fit(made(name), tmp_path / "two", workers=2)
    batched, _ = fit(made(name), tmp_path / "batched", engine="batched")
    assert same(one, two)
    for tensor in one:
        torch.testing.assert_close(one[tensor], batched[tensor])


@pytest.mark.parametrize("method", [LocalOnly, Oracle, FedAvg])
def test_the_test_set_is_answered_by_whom_it_is_dealt_to(method, tmp_path):
    trainer = run(made(method.__name__), images(), tmp_path, max_rounds=2)
    assert method.personalised == (method is not FedAvg)
    assert 0 <= trainer.progress.history[-1]["test/accuracy"] <= 1


def test_everything_in_one_place_is_one_client_with_everything(tmp_path):
    """Its rounds are those of a federation of one client that holds all examples and makes as many
    steps."""
    central, data = made("Centralised"), images()
    trainer = run(central, data, tmp_path / "central", max_rounds=2)
    assert len(central.everyone.train) == data.sizes.sum()
    steps = sum(data.num_steps(data.client(int(k)), trainer.local_epochs) for k in data.active)
    start = made("FedAvg")
    with rng.torch_stream(trainer.seed, "weights"):
        start.build(data)
    weights = start.server["weights"]
    for round in (1, 2):
        start.layout.write(start.network, weights)
        start.train()
        optimizer = start.configure_optimizers()
        for batch in data.train_batches(central.everyone, round=round, epochs=9, steps=steps):
            optimizer.zero_grad()
            start.training_step(batch)["loss"].backward()
            optimizer.step()
        weights = start.layout.read(start.network)
    assert torch.equal(weights, central.server["weights"])
    assert trainer.progress.history[-1]["train/loss"] > 0


@pytest.mark.parametrize(
    ("claimed", "counts"), [(8, True), (1, True), (9, False), (0, False), (1.5, False)]
)
def test_a_client_has_the_server_make_no_more_steps_than_it_was_asked_for(
    claimed, counts, tmp_path
):
    class Claim(Stressor):
        def change_upload(self, upload, *, client, round, context):
            assert context.method.steps_asked[client.id] == int(upload.tensor("steps")) == 8
            forged = Payload({**dict(upload.items()), "steps": torch.tensor(float(claimed))})
            return forged if client.id == 0 else upload

    settings = {"max_rounds": 1, "max_local_steps": 8, "local_epochs": 50, "callbacks": [Claim()]}
    trainer = run(made("Centralised"), images(), tmp_path, **settings)
    assert trainer.progress.history[-1]["clients/rejected"] == (0 if counts else 1)
