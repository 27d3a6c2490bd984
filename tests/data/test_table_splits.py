"""A value is the same name, or the same number, in the training file and in the test file."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from test_table_data import ready, written

from fl_lightning.errors import InputError


def of(names, count: int = 60) -> pd.DataFrame:
    """Rows with a number, a column of names, and a class."""
    place = np.arange(count)
    return pd.DataFrame(
        {"x": place / count, "z": np.array(names)[place % len(names)], "kind": place % 2}
    )


@pytest.mark.parametrize(
    ("train", "test", "settings"),
    [
        # the test file alone would have the numbers 1 and 2
        (["01", "02", "0A"], ["01", "02"], {}),
        ([1, 2, 3], [1.0, 2.0], {"categorical": ["z"]}),  # as pandas writes numbers beside a gap
    ],
)
def test_a_category_is_known_again(train, test, settings, tmp_path, caplog):
    data = ready(
        written(tmp_path, of(train)),
        test=str(written(tmp_path, of(test, 20), "test.csv")),
        **settings,
    )
    (inputs, _), *_ = data.test_batches()
    assert (inputs[:, 1:].sum(1) == 1).all()
    assert inputs[:, 1:].argmax(1).tolist() == [n % 2 for n in range(20)]
    assert "category that no training row has" not in caplog.text


def test_a_class_is_known_again(tmp_path):
    train, test = of(["01", "02", "0A"]), of(["01", "02"], 20)
    path = written(tmp_path, train), str(written(tmp_path, test, "test.csv"))
    data = ready(path[0], test=path[1], target="z")
    assert data.test_target.tolist() == [n % 2 for n in range(20)]


def test_numbers_beyond_64_bits(tmp_path, caplog):
    large = of([0]).assign(z=[2**70 + n * 2**60 for n in range(60)])
    (inputs, _), *_ = ready(written(tmp_path, large)).test_batches()
    assert inputs[:, 1].unique().numel() > 2
    with pytest.raises(InputError, match=r"column z; \w+ is no finite number"):
        ready(written(tmp_path, of([0]).assign(z=[10**400 + n for n in range(60)])))
    ready(written(tmp_path, of([0]).assign(z=[2**60 + n for n in range(60)])))
    assert "column z: whole numbers from 2^53 on are rounded" in caplog.text
