"""The scanned digits are those of scikit-learn's own reader, however they are read."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fl_lightning.data import local


@pytest.mark.parametrize("there", [True, False])
def test_the_digits_are_those_of_scikit_learn(monkeypatch, there):
    if not there:
        monkeypatch.setattr(local.Path, "is_file", lambda path: False)
    for found, expected in zip(local._scanned(), load_digits(return_X_y=True), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.essential
def test_reading_them_imports_no_scikit_learn():
    program = "import sys; from fl_lightning.data.local import digits; digits(); print('sklearn' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
