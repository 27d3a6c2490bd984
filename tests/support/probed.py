"""A small federation that has run for two rounds, ready to be probed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning.conformance import toy
from fl_lightning.methods import Method
from fl_lightning.probing import ProbedModel


def subject_of(method: Method, folder: Path, **data: Any) -> ProbedModel:
    method = method if method.personalised else toy.on_images(method)
    trainer = toy.run(method, toy.images(**data), folder, max_rounds=2)
    return ProbedModel(
        trainer.fabric,
        method,
        trainer.data,
        trainer.progress.done.states,
        trainer.seed,
        uploads=1.0,
    )
