"""What methods log of their own in a round of which nothing came back, or nothing was kept; and
what clients are evaluated by."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from outcomes import rows_of
from tiny_language import fit, method_of
from toy import run, sgd

from fl_lightning.conformance.toy import images, small_network
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import Centralised, FedMPQ, FedVEMoE
from fl_lightning.methods.experts.slots import Rules
from fl_lightning.metrics.text import IGNORED


def breaking(kind):
    """Return the method with a server whose state after round 2 is not finite."""

    class Breaking(kind):
        def next_state(self, sums):
            super().next_state(sums)
            if self.round == 2:
                broken = {n: t * math.inf for n, t in self.server.items() if t.is_floating_point()}
                self.server = {**self.server, **broken}

    return Breaking


class Void(Stressor):
    """Nobody returns in round 2."""

    def change_cohort(self, cohort, *, round, context):
        return [replace(one, returns=round != 2) for one in cohort]


def test_a_round_without_steps_has_no_losses(tmp_path):
    method = Centralised(network=small_network, optimizer=sgd(0.05))
    trainer = run(method, images(), tmp_path, max_rounds=3, callbacks=[Void()])
    losses = [row["train/loss_task"] for row in rows_of(trainer.run_dir / "metrics.csv")]
    assert [bool(loss) for loss in losses] == [True, False, True]


def test_experts_change_in_their_round_alone(tmp_path):
    rules = Rules(merge_cosine=-0.99, merge_rounds=1, merge_loss=1.0)
    method = method_of(FedVEMoE, k_init=5, k_max=6, rules=rules)
    trainer = fit(method, tmp_path, max_rounds=3, callbacks=[Void()])
    merged = [row["experts/merged"] for row in rows_of(trainer.run_dir / "metrics.csv")]
    assert float(merged[0]) > 0
    assert float(merged[1]) == 0


def test_a_state_that_is_thrown_away_has_changed_nothing(tmp_path):
    """Neither what it would have changed is logged, nor what the round before did."""
    rules = Rules(merge_cosine=-0.99, merge_rounds=1, merge_loss=1.0)
    experts = method_of(breaking(FedVEMoE), k_init=5, k_max=6, rules=rules)
    rows = rows_of(fit(experts, tmp_path / "experts", max_rounds=2).run_dir / "metrics.csv")
    assert float(rows[0]["experts/merged"]) > 0
    assert float(rows[1]["experts/merged"]) == 0
    method = breaking(FedMPQ)(network=small_network, optimizer=sgd(0.05), prune_threshold=0.5)
    rows = rows_of(run(method, images(), tmp_path, max_rounds=3).run_dir / "metrics.csv")
    pruned = [float(row["bits/pruned"]) for row in rows]
    assert [bool(count) for count in pruned] == [True, False, True]


class OtherTokens(Stressor):
    """Every client trains on other answers than it has."""

    def change_labels(self, labels, *, client, round, context):
        return torch.where(labels == IGNORED, labels, (labels * 7 + client.id) % 40)


class Choices(Meter):
    """What clients choose by what they train on, by clean labels, and as they are evaluated."""

    def on_round_end(self, record, context):
        method, self.found = context.method, []
        for id in range(4):
            client = context.data.client(id, dict(context.states.get(id, {})))
            method.deploy(client)
            labels = context.labels_of(client), context.data.labels(client)
            chosen = [method.choose(context.data, client, each).r for each in labels]
            self.found.append((method.choice.r, *chosen))


def test_experts_are_chosen_for_evaluation_by_the_labels_of_the_round(tmp_path):
    choices = Choices()
    method = method_of(FedVEMoE, k_init=3, k_max=3)
    fit(method, tmp_path, max_rounds=2, callbacks=[OtherTokens(), choices])
    for deployed, trained, clean in choices.found:
        assert torch.equal(deployed, trained)
        assert not torch.equal(deployed, clean)
