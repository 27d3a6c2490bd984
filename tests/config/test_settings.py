"""Runs of version 0.1.0 are continued and counted: settings that came later change no hash while
they are neutral."""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase

import pytest

from fl_lightning import methods
from fl_lightning.config.documents import document_hash
from fl_lightning.config.settings import (
    FREE_KEYS,
    NEUTRAL_VALUES,
    changed_settings,
    flatten,
    has_hash,
    settings_hash,
)
from fl_lightning.models.language import LlamaTiny
from fl_lightning.models.language.hf import TransformersLM
from fl_lightning.trainer import FederatedTrainer

TRAINER_OF_0_1_0 = [
    "accelerator",
    "devices",
    "strategy",
    "num_nodes",
    "rank_timeout",
    "precision",
    "engine",
    "workers",
    "max_rounds",
    "participation",
    "local_epochs",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "callbacks",
    "logger",
    "default_root_dir",
    "experiment",
    "run_name",
    "deterministic",
    "auto_resume",
    "allow_changed",
    "tags",
]
METHOD_OF_0_1_0 = ["network", "optimizer", "average"]
ADAPTED = ["num_classes", "rank", "alpha", "targets", "ffa", "pretrained"]
OF_TRANSFORMERS = ["name", "dtype", "gguf_file", "load_in_4bit", "gradient_checkpointing"]
"""Settings of language models in the studies that were run before there were other adapters."""


@pytest.mark.parametrize(
    ("cls", "group", "known"),
    [
        (FederatedTrainer, "trainer", TRAINER_OF_0_1_0),
        (methods.Method, "model.init_args", METHOD_OF_0_1_0),
        (LlamaTiny, "model.init_args.network.init_args", ADAPTED),
        (TransformersLM, "model.init_args.network.init_args", [*ADAPTED, *OF_TRANSFORMERS]),
    ],
    ids=["trainer", "method", "llama_tiny", "hf"],
)
def test_a_later_setting_is_free_or_has_a_neutral_value(cls, group, known):
    parameters = inspect.signature(cls.__init__).parameters
    for name in [name for name in parameters if name not in ("self", *known)]:
        key = f"{group}.{name}"
        neutral = [value for pattern, value in NEUTRAL_VALUES.items() if fnmatchcase(key, pattern)]
        assert key in FREE_KEYS or neutral == [parameters[name].default], key


def test_a_configuration_of_then_and_one_of_now_are_the_same():
    before = {"trainer.max_rounds": 3, "model.class_path": "fl_lightning.methods.FedProx"}
    later = {
        "trainer.cuda_graphs": False,
        "trainer.gradient_clip_val": None,
        "model.init_args.module": None,
        "model.init_args.max_share": 1.0,
    }
    assert settings_hash(before) == settings_hash(before | later)
    assert changed_settings(before, before | later) == []
    assert changed_settings(before, before | {"model.init_args.max_share": 0.5})


@pytest.mark.parametrize(
    ("before", "later"),
    [
        ({"model.class_path": "fl_lightning.methods.FedMPQ"}, {"model.init_args.supernet": False}),
        ({"model.class_path": "a.FedMPQKD"}, {"model.init_args.supernet": False}),
        ({"model.class_path": "a.HESTLadder"}, {"model.init_args.controller": "none"}),
        ({"trainer.clock.network": "x"}, {"trainer.clock.availability": None}),
        ({"trainer.rounds.class_path": "a.OverSelection"}, {"trainer.rounds.init_args.ties": "id"}),
        (
            {"trainer.callbacks.1.class_path": "callbacks.GradientNorms"},
            {"trainer.callbacks.1.init_args.last_step": False},
        ),
        (
            {"data.class_path": "fl_lightning.data.NaturalInstructions"},
            {"data.init_args.columns": None, "data.init_args.constants": None},
        ),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_an_argument_that_a_class_got_later_keeps_the_hashes_of_before_and_of_since(before, later):
    now, other = before | later, before | dict.fromkeys(later, "other")
    assert changed_settings(before, now) == changed_settings(now, before) == []
    assert settings_hash(before) == settings_hash(now) == document_hash(now)  # as runs are found
    for written in (document_hash(before), document_hash(now)):
        assert has_hash(before, written)
        assert has_hash(now, written)
        assert not has_hash(other, written)
    assert changed_settings(before, other)
    below = before | {f"{name}.class_path": "x" for name in later}
    assert settings_hash(below) == document_hash(below)  # the argument is there


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("mine.Wards", ['data.init_args.root: "/2023" -> "/2024"']),
        ("fl_lightning.data.FederatedImages", []),
    ],
)
def test_a_folder_is_free_where_a_run_knows_the_content_of_its_files(path, changed):
    at_2023, at_2024 = (
        {"data.class_path": path, "data.init_args.root": root} for root in ("/2023", "/2024")
    )
    assert changed_settings(at_2023, at_2024) == changed
    assert (settings_hash(at_2023) != settings_hash(at_2024)) == bool(changed)
    assert settings_hash({"data.root": "a"}) == settings_hash({"data.root": "b"})


def test_a_whole_number_is_one_from_python_and_from_the_command_line():
    assert changed_settings({"model.init_args.bits": 4}, {"model.init_args.bits": 4.0}) == []
    assert changed_settings({"model.init_args.bits": 4}, {"model.init_args.bits": 4.5})
    assert changed_settings({"trainer.deterministic": True}, {"trainer.deterministic": 1})


def test_no_callbacks_are_null_or_an_empty_list():
    null, empty, one = (
        flatten({"trainer": {"callbacks": given}}) for given in (None, [], ["LabelNoise"])
    )
    assert changed_settings(null, empty) == changed_settings(empty, null) == []
    assert changed_settings(null, one)
    assert changed_settings(empty, one)
    assert changed_settings({"trainer.sampler": "x"}, {})


def test_a_default_that_follows_the_task_has_the_hash_of_the_former_one():
    key = "trainer.callbacks.0.init_args.monitor"
    follows, former, other = ({key: value} for value in (None, "val/accuracy", "train/loss"))
    assert settings_hash(follows) == settings_hash(former) != settings_hash(other)
    assert not changed_settings(former, follows)


def test_a_class_that_moved_has_the_hash_of_its_former_place():
    """As the command line wrote and writes them: an object that is a default, and a class."""
    for key, former in (
        ("average", "averaging.WEIGHTED_MEAN"),
        ("average.class_path", "TrimmedMean"),
    ):
        then = {f"model.init_args.{key}": f"fl_lightning.methods.{former}"}
        name = former.rpartition(".")[2]
        now = {f"model.init_args.{key}": f"fl_lightning.aggregation.averages.{name}"}
        assert settings_hash(then) == settings_hash(now)
        assert not changed_settings(then, now)
