"""What is refused before the first round."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from ten import SMALL
from torch import nn
from toy import run, trainer_in

from fl_lightning.conformance.toy import images
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.models import SmallCNN


@pytest.mark.parametrize(("value", "said"), [(1e7, r"1e\+07"), (float("nan"), "nan")])
def test_values_that_no_upload_may_have_are_named_at_the_start(value, said, tmp_path):
    def network(persistent: bool):
        def made(num_classes: int):
            found = SMALL(num_classes)
            found.register_buffer("scale", torch.tensor(value), persistent=persistent)
            return found

        return made

    with pytest.raises(
        InputError, match=rf"'scale' of the network holds values up to {said}; .*persistent=False"
    ):
        run(FedAvg(network=network(True)), images(), tmp_path, max_rounds=1)
    run(FedAvg(network=network(False)), images(), tmp_path, max_rounds=1)


def normalised(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes)
    )


def test_single_examples_that_a_network_cannot_normalise_are_refused(tmp_path):
    method = FedAvg(network=normalised)
    with pytest.raises(InputError, match=r"batch_size 1 with a network Sequential; .*BatchNorm"):
        run(method, images(batch_size=1), tmp_path / "runs", max_rounds=1)
    assert not (tmp_path / "runs").exists()
    several = partial(SmallCNN, width=4, norm="batch")  # a channel has several values of an example
    for network, size in ((normalised, 2), (several, 1)):
        run(FedAvg(network=network), images(batch_size=size), tmp_path, max_rounds=1)


def test_what_trains_nothing_leaves_the_users_generators_alone(tmp_path):
    method, data = FedAvg(network=SMALL), images()
    trainer = trainer_in(tmp_path, max_rounds=1)
    trainer.fit(method, data)
    uses = {
        "prepare": partial(trainer.prepare, method, data),
        "export": partial(
            trainer.export, method, data, ckpt_path=str(trainer.run_dir), to=str(tmp_path / "to")
        ),
    }
    for name, use in uses.items():
        before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        use()
        assert before == (random.getstate(), np.random.get_state()[1].tolist()), name  # noqa: NPY002
