"""What is refused before the first round."""

from __future__ import annotations

import pytest
import torch
from ten import SMALL
from toy import run

from fl_lightning.conformance.toy import images
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg


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
