"""A trainer that fits again: its callbacks begin anew."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from refusals import refused
from ten import make

from callbacks import (
    AccuracyBytesFigure,
    BitWidthFigure,
    ByzantineClients,
    Calibration,
    ClientAccuracyFigure,
    EarlyStopping,
    GradientNorms,
    LabelNoise,
    ProgressBar,
    TimelineFigure,
    TrainingCost,
)
from fl_lightning.clock import Clock, LogNormalDevices
from fl_lightning.conformance.toy import images, run, trainer_in
from fl_lightning.errors import RunStopped
from fl_lightning.hooks import Meter
from fl_lightning.models import SmallCNN

CLASSES = (
    AccuracyBytesFigure,
    BitWidthFigure,
    Calibration,
    ClientAccuracyFigure,
    ProgressBar,
    TimelineFigure,
    TrainingCost,
    partial(EarlyStopping, patience=1, min_delta=1.0),
    partial(GradientNorms, every=1, clients=1),
)


@pytest.mark.slow
@pytest.mark.essential
def test_callbacks_keep_nothing_of_the_fit_before(tmp_path):
    """A second method with a wider network has the states, costs and figures that it has in a
    trainer of its own; both are stopped early."""

    def trained(trainer, width):
        trainer.fit(make("FedMPQ", network=partial(SmallCNN, width=width)), images())
        assert len(trainer.progress.history) == 2
        states = [json.dumps(each.state_dict()) for each in trainer.callbacks]
        return states, sorted(path.name for path in (trainer.run_dir / "figures").iterdir())

    def trainer(name):
        settings = {"clock": Clock(devices=LogNormalDevices()), "max_rounds": 3}
        callbacks = [each() for each in CLASSES]
        return trainer_in(tmp_path / name, callbacks=callbacks, **settings)

    used = trainer("used")
    narrow = trained(used, 4)
    wide = trained(trainer("fresh"), 8)
    assert narrow != wide
    assert trained(used, 8) == wide


class Enough(Meter):
    """Ends its run in the first round, and does not forget it where another begins."""

    rounds = 0

    def on_round_end(self, record, context):
        self.rounds += 1

    def stop_reason(self):
        return "one is enough" if self.rounds else ""


def test_a_run_that_a_callback_ends_before_its_first_round_names_the_reason(tmp_path):
    trainer = trainer_in(tmp_path, max_rounds=2, callbacks=[Enough()])
    trainer.fit(make("FedAvg"), images())
    with refused("no round was run: one is enough", "on_check", RunStopped):
        trainer.fit(make("FedAvg"), images(), seed=1)


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
