"""The weights of the mean: examples or labelled tokens, as a client's settings say."""

from __future__ import annotations

import pytest
import torch
from ten import make
from tiny_language import fit, method_of
from toy import run

from fl_lightning.conformance.toy import images
from fl_lightning.data.text.tokens import IGNORED
from fl_lightning.errors import InputError
from fl_lightning.hooks import Stressor


class Keeps(Stressor):
    """Remembers the weights that each client sent last, and what it says that it weighs."""

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}
        self.weight: dict[int, int] = {}

    def change_upload(self, upload, *, client, round, context):
        self.sent[client.id] = upload.tensor("weights").double()
        self.weight[client.id] = int(upload.tensor("examples"))
        return upload


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_labelled_tokens_are_the_weights_of_the_mean(engine, tmp_path):
    """Of what the clients sent, against a mean by hand; by examples all four weigh about the
    same."""
    found = {}
    for what in ("tokens", "examples"):
        keeps = Keeps()
        trainer = fit(method_of(weigh_by=what), tmp_path / what, engine=engine, callbacks=[keeps])
        data = trainer.data
        targets = {
            id: data.train_target[torch.from_numpy(data.client(id).train)] for id in range(4)
        }
        by_hand = {
            id: int((target != IGNORED).sum()) if what == "tokens" else len(target)
            for id, target in targets.items()
        }
        assert keeps.weight == by_hand
        mean = sum(by_hand[id] * keeps.sent[id] for id in range(4)) / sum(by_hand.values())
        torch.testing.assert_close(
            trainer.method.server["weights"], mean.float(), rtol=1e-6, atol=1e-8
        )
        found[what] = by_hand
    shares = [found["tokens"][id] / found["examples"][id] for id in range(4)]
    assert max(shares) > 1.5 * min(shares), "the clusters' answers have different lengths"


def test_a_claim_of_tokens_is_bounded_by_those_of_the_client(tmp_path, caplog):
    class Claims(Stressor):
        def change_upload(self, upload, *, client, round, context):
            most = context.method.client_weights.of(client)
            claim = torch.tensor(most + (client.id == 1))
            return type(upload)({**upload, "examples": claim})

    fit(method_of(weigh_by="tokens"), tmp_path, callbacks=[Claims()], max_rounds=1)
    (line,) = [record.message for record in caplog.records if "rejected" in record.message]
    assert "client 1 rejected" in line
    assert "labelled tokens" in line


def test_tokens_where_there_are_none_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"weigh_by tokens where the task is Classification; .*; write"
    ):
        run(make("FedAvg", weigh_by="tokens"), images(), tmp_path)
    with pytest.raises(
        InputError, match=r"weigh_by labels; one of examples, tokens, clients; write"
    ):
        run(make("FedAvg", weigh_by="labels"), images(), tmp_path)
    assert not list(tmp_path.iterdir())
