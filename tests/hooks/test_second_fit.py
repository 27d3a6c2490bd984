"""A trainer that fits again: its callbacks begin anew."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from ten import make

from callbacks import (
    AccuracyBytesFigure,
    ByzantineClients,
    Calibration,
    ClientAccuracyFigure,
    GradientNorms,
    LabelNoise,
    ProgressBar,
    TrainingCost,
)
from fl_lightning.conformance.toy import images, run, trainer_in
from fl_lightning.models import SmallCNN

CLASSES = (AccuracyBytesFigure, Calibration, ClientAccuracyFigure, ProgressBar, TrainingCost)


@pytest.mark.slow
@pytest.mark.essential
def test_callbacks_keep_nothing_of_the_fit_before(tmp_path):
    """A second method with a wider network has the states, costs and figures that it has in a
    trainer of its own."""

    def trained(trainer, width):
        trainer.fit(make("FedAvg", network=partial(SmallCNN, width=width)), images())
        states = [json.dumps(each.state_dict()) for each in trainer.callbacks]
        return states, sorted(path.name for path in (trainer.run_dir / "figures").iterdir())

    def trainer(name):
        callbacks = [*(each() for each in CLASSES), GradientNorms(every=1, clients=1)]
        return trainer_in(tmp_path / name, max_rounds=2, callbacks=callbacks)

    used = trainer("used")
    narrow = trained(used, 4)
    wide = trained(trainer("fresh"), 8)
    assert narrow != wide
    assert trained(used, 8) == wide


def test_stressors_keep_no_clients_of_the_fit_before(tmp_path):
    """Nor where the second run is tested alone, which checks it and does not set it up."""

    def made():
        noise = {"round": 1, "clients": 0.5, "labels": 1.0}
        return [
            ByzantineClients(0.5, "label_flip"),
            LabelNoise(**noise),
            LabelNoise(**noise, among="cohort"),
        ]

    def changed(trainer):
        federation = trainer.prepare(make("FedAvg"), images(), seed=3)
        attack, noise, late = trainer.callbacks[:3]
        labels = torch.zeros(9, dtype=torch.int64)
        noisy = [
            noise.change_labels(labels, client=client, round=1, context=federation).tolist()
            for client in map(federation.data.client, range(6))
        ]
        return attack.attackers(federation), noisy, late.state_dict()

    used = run(make("FedAvg"), images(), tmp_path, max_rounds=1, callbacks=made())
    assert used.callbacks[2].state_dict()
    fresh = changed(trainer_in(tmp_path, max_rounds=1, callbacks=made()))
    assert fresh[2] == {}
    assert changed(used) == fresh
