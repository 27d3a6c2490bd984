"""What methods log of their own in a round of which nothing came back."""

from __future__ import annotations

from dataclasses import replace

from outcomes import rows_of
from tiny_language import fit, method_of
from toy import run, sgd

from fl_lightning.conformance.toy import images, small_network
from fl_lightning.hooks import Stressor
from fl_lightning.methods import Centralised, FedVEMoE
from fl_lightning.methods.experts.slots import Rules


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
