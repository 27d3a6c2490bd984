"""What is learnt. A task is one file: its loss, the weight of an example, its metrics and which of
them selects a model."""

from __future__ import annotations

from fl_lightning.tasks.base import ClassRows, Sums, Task, likeliest
from fl_lightning.tasks.classification import Classification
from fl_lightning.tasks.language_modelling import LanguageModelling
from fl_lightning.tasks.preference import Preference
from fl_lightning.tasks.regression import Regression
