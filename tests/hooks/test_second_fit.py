"""A trainer that fits again: its callbacks begin anew."""

from __future__ import annotations

import json
from functools import partial

import pytest
from ten import make

from callbacks import (
    AccuracyBytesFigure,
    Calibration,
    ClientAccuracyFigure,
    GradientNorms,
    ProgressBar,
    TrainingCost,
)
from fl_lightning.conformance.toy import images, trainer_in
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
