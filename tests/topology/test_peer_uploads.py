"""What a peer makes of the messages that reach it, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ten import make
from toy import run

from callbacks import StragglerDropout
from fl_lightning.aggregation.exact_sum import exact_mean
from fl_lightning.client import Client
from fl_lightning.conformance.toy import images
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.topology import Gossip, Moshpit, Ring
from fl_lightning.wire import Ledger, Payload

ROUNDS = 4


class Overhears(Stressor, Meter):
    """Keeps a copy of the messages of each round, as bytes, and of what every peer has after it.

    Args:
        states: names of the entries of peers that are kept.
    """

    def __init__(self, *states: str) -> None:
        self.names = states
        self.uploads, self.starts, self.states, self.beside = {}, {}, {}, {}

    def change_upload(self, upload, *, client, round, context):
        self.uploads.setdefault(round, {})[client.id] = upload.to_bytes()
        self.beside.setdefault(round, {})[client.id] = dict(context.method.beside_upload(client.id))
        return upload

    def on_client_start(self, client, message, labels, round, context):
        self.starts.setdefault(round, {})[client.id] = Payload.from_bytes(message)

    def on_round_end(self, record, context):
        server, ids = context.method.server, context.aggregation.nodes.ids
        self.states[record.round] = {
            id: {name: server[f"peer/{id}/{name}"] for name in self.names} for id in ids
        }


def overheard(name, over, folder, *states):
    seen = Overhears(*states)
    callbacks = [StragglerDropout(0.2), StragglerDropout(0.4, mode="after"), seen]
    settings = {"max_rounds": ROUNDS, "engine": "sequential", "workers": 1, "callbacks": callbacks}
    trainer = run(make(name, weigh_by="clients"), images(), folder, topology=over, **settings)
    return seen, trainer


@pytest.mark.parametrize("name", ["QFedAvg", "FedPQ"])
def test_on_a_ring_updates_are_read_with_what_was_said_before(name, tmp_path):
    """Every neighbour keeps a copy of what a peer has told, and moves it by each update that
    counts: so all that a peer needs has been sent (DCD-PSGD). A peer that is away moves nothing."""
    seen, trainer = overheard(name, Gossip(Ring()), tmp_path, "weights", "public")
    method = trainer.method
    first = seen.starts[1][min(seen.starts[1])].tensor("weights")
    copies, models = dict.fromkeys(range(6), first), dict.fromkeys(range(6), first)
    for round in range(1, ROUNDS + 1):
        there = seen.uploads[round]
        for id, sent in there.items():
            upload = Payload.from_bytes(sent)
            method.server = {"weights": copies[id]}
            copies[id] = method.decode(upload)
        for id in there:
            near = [other for other in ((id - 1) % 6, id, (id + 1) % 6) if other in there]
            kept = [copies[other] for other in near] + [copies[id]] * (3 - len(near))
            torch.testing.assert_close(
                seen.states[round][id]["weights"], sum(kept) / 3, rtol=0, atol=1e-6
            )
            models[id] = seen.states[round][id]["weights"]
        for id in range(6):
            assert torch.equal(seen.states[round][id]["public"], copies[id])
            assert torch.equal(seen.states[round][id]["weights"], models[id])
    assert 4 < sum(len(there) for there in seen.uploads.values()) < 6 * ROUNDS
    assert any((copies[id] - models[id]).abs().max() > 1e-4 for id in range(6))


@pytest.mark.parametrize("name", ["FedMPQ", "FedMPQKD"])
def test_moshpit_averages_codes_and_teaches_with_what_was_received(name, tmp_path):
    """The model of a group is the mean of what its members' codes stand for; bits that they were
    dealt travel beside them, and say which planes were removed. It is what a member starts its next
    round from, and its teacher."""
    moshpit = Moshpit(side=2, dims=3)
    seen, trainer = overheard(name, moshpit, tmp_path, "weights", "bits", "delta")
    method = trainer.method
    for round in range(1, ROUNDS + 1):
        there = {id: Payload.from_bytes(sent) for id, sent in seen.uploads[round].items()}
        for id in there:
            members = [o for o in there if moshpit.key(o, round - 1) == moshpit.key(id, round - 1)]
            vectors = [method.decode(there[other]) for other in members]
            wanted = exact_mean(vectors, [1.0] * len(members), len(members), 6)
            found = seen.states[round][id]
            torch.testing.assert_close(found["weights"], wanted, rtol=0, atol=1e-6)
            budgets = torch.tensor(
                [method.budgets[other % len(method.budgets)] for other in members]
            )
            bits = torch.stack([there[other].codes("bits").values for other in members]).double()
            given = torch.stack([seen.beside[round][other]["given"].values for other in members])
            mean = (bits * budgets[:, None]).sum(0) / budgets.sum()
            removed = ((given - bits) * budgets[:, None]).sum(0) / budgets.sum()
            assert found["bits"].tolist() == mean.round().int().clamp(1, 8).tolist()
            assert found["delta"].tolist() == (1 + removed).round().int().clamp(min=1).tolist()
            message = seen.starts.get(round + 1, {}).get(id)
            if message is not None:
                assert torch.equal(message.tensor("weights"), found["weights"])
                method.round = round + 1
                method.receive(message, Client(id, np.arange(1), np.arange(0)))
                taught = getattr(method, "teacher", method.network)
                assert torch.equal(method.layout.read(taught), found["weights"])


def test_the_ledger_has_the_bytes_of_every_message(tmp_path):
    """FedMPQ's codes and the bits that were dealt out, to each member of the group that is there,
    and none where a peer is by itself; what is lost was sent to those members."""
    moshpit = Moshpit(side=2, dims=3)
    seen, trainer = overheard("FedMPQ", moshpit, tmp_path)
    ledger = {
        (e.round, e.client): e
        for e in Ledger.from_csv((trainer.run_dir / "ledger.csv").read_text()).entries
    }
    for round, sent in seen.uploads.items():
        sizes = {
            id: len(Payload({**Payload.from_bytes(upload), **seen.beside[round][id]}).to_bytes())
            for id, upload in sent.items()
        }
        for (_, id), entry in ((key, entry) for key, entry in ledger.items() if key[0] == round):
            others = [
                o
                for o in sizes
                if o != id and moshpit.key(o, round - 1) == moshpit.key(id, round - 1)
            ]
            if entry.status == "trained":
                assert entry.upload == sizes[id] * len(others)
                assert entry.download == sum(sizes[other] for other in others)
                assert entry.wasted == 0
            else:
                assert entry.download == 0
                assert entry.upload == entry.wasted
                assert (entry.upload > len(others)) == (entry.status == "lost" and len(others) > 0)
    assert {entry.status for entry in ledger.values()} == {"trained", "dropped", "lost"}
