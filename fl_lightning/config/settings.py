"""The comparison of two configurations: which settings may differ between a run and its
continuation."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from fl_lightning.config.documents import document_hash, read_document
from fl_lightning.config.recorded import former_path
from fl_lightning.errors import as_bad_input
from fl_lightning.support.redaction import HIDDEN, redact, redact_settings

FREE_KEYS = (
    "trainer.devices",
    "trainer.strategy",
    "trainer.num_nodes",
    "trainer.rank_timeout",
    "trainer.engine",
    "trainer.workers",
    "trainer.cuda_graphs",
    "trainer.accelerator",
    "trainer.logger",
    "trainer.default_root_dir",
    "trainer.experiment",
    "trainer.run_name",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.allow_changed",
    "trainer.auto_resume",
    "trainer.tags",
    "trainer.fast_dev_run",
    "data.root",
    "data.init_args.root",
    "data.download",
    "data.init_args.download",
    "ckpt_path",
    "config",
)
"""Settings that may differ when a run is continued, since they do not change what is computed."""

ROOTS = ("data.root", "data.init_args.root")
"""Where the files of data lie: free of ``FederatedImages`` alone, of whose images a run knows the
hash. Of another class, files elsewhere may be other ones."""

NEUTRAL_VALUES = {
    "trainer.max_local_steps": None,
    "trainer.secure_sum": None,
    "trainer.gradient_clip_val": None,
    "trainer.gradient_clip_algorithm": "norm",
    "trainer.privacy": None,
    "trainer.clock": None,
    "trainer.clock.edges": None,
    "trainer.rounds": None,
    "trainer.topology": None,
    "trainer.sampler": None,
    "trainer.callbacks.*.init_args.claimed_examples": None,
    "model.init_args.scheduler": None,
    "model.init_args.max_share": 1.0,
    "model.init_args.module": None,
    "model.init_args.terms": None,
    "model.init_args.weigh_by": "examples",
    "model.init_args.server_optimizer": None,
    "model.init_args.personal": None,
    "model.init_args.finetune": None,
    "model.init_args.adapter_average": None,
    "model.init_args.channels_last": True,
    "model.init_args.branches_per_level": 1,
    "model.init_args.gates_lr": None,
    "model.init_args.loss_scale": None,
    "model.init_args.importance_scale": 1.0,
    "model.init_args.network.init_args.adapter": "lora",
    "model.init_args.network.init_args.blocks": None,
    "model.init_args.network.init_args.example_shape": None,
    "model.init_args.loss": "cross_entropy",
    "data.init_args.batch_tokens": None,
    "data.init_args.metrics": None,
    "data.init_args.template": "{definition}\n{inputs}\n=",
    "data.init_args.primary": None,
    "data.init_args.feature_skew": None,
    "data.init_args.local_test_fraction": 0.0,
    "data.init_args.moments": None,
    "data.init_args.partition.init_args.drawn_at": None,
}
"""Settings that came after version 0.1.0, by pattern, with the value that runs of that version
had."""
NEUTRAL_VALUES_OF_CLASS: dict[str, dict[str, Any]] = {
    "TextFiles": {
        "data.init_args.generate": False,
        "data.init_args.primary": "perplexity",
        "data.init_args.columns": None,
        "data.init_args.constants": None,
    },
    "FederatedImages": {"data.init_args.channels": 3},
    "TableData": {"data.init_args.missing": None, "data.init_args.text": None},
}
"""Settings that a class of data got later and others always had, by the name of the class."""
LATER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "FedMPQ": {"supernet": False},
    "FedMPQKD": {"supernet": False},
    "HESTLadder": {"controller": "none"},
    "OverSelection": {"ties": "id"},
    "GradientNorms": {"last_step": False},
    "NaturalInstructions": {"columns": None, "constants": None},
}
"""Arguments that came later too, by the name of their class, with the value that runs had before.
Hashes that have been written since contain them: they are added where a run of before lacks them,
in place of being left out."""
LATER_SETTINGS_OF_CLOCK = {"trainer.clock.availability": None}
"""Those of ``trainer.clock``, whose class no configuration names."""
ALWAYS_HASHED = {"model.init_args.module": "fl_lightning.methods.FedAvg"}
"""Later settings that one method had in version 0.1.0 already, so that its runs' hashes contain
them."""
FORMER_DEFAULTS = {"trainer.callbacks.*.init_args.monitor": "val/accuracy"}
"""Settings that are null since they follow the task, by pattern, with the default that they had
before. It is also what null means where the task is classification, so hashes have it in place of
null."""
MAX_LISTED_CHANGES = 8
LISTS = ("trainer.callbacks",)
"""Lists of which null and an empty one, which leaves no key, mean the same."""
SAME_CLASS = {
    "fl_lightning.Meter": "fl_lightning.hooks.Meter",
    "fl_lightning.Method": "fl_lightning.methods.Method",
    "fl_lightning.Stressor": "fl_lightning.hooks.Stressor",
    **{
        f"fl_lightning.aggregation.averages.{name}": f"fl_lightning.methods.{name}"
        for name in ("CoordinateMedian", "NormClipping", "TrimmedMean", "WeightedMean")
    },
}
"""Class paths that the command line writes into configurations since the package has public names,
or since classes have moved, and what it wrote before."""


def config_of(run: Path) -> dict[str, Any]:
    """Return the configuration in a run directory, with dotted keys.

    Raises:
        InputError: its ``config.yaml`` cannot be read.
    """
    path, instead = run / "config.yaml", "mend it, or start a new run"
    with as_bad_input(f"{path}", "it cannot be read", instead, OSError, ValueError, yaml.YAMLError):
        return flatten(yaml.safe_load(read_document(path, str(path))) or {})


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as one mapping with dotted keys."""
    if isinstance(config, Mapping):
        items = [(str(key), value) for key, value in config.items()]
    elif isinstance(config, list):
        items = [(str(index), value) for index, value in enumerate(config)]
    else:
        return {
            prefix: config
            if isinstance(config, (bool, int, float, str, type(None)))
            else str(config)
        }
    return {
        key: value
        for name, item in items
        for key, value in flatten(item, f"{prefix}.{name}" if prefix else name).items()
    }


def is_free(key: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting changes nothing that is computed.

    Args:
        key: its dotted key.
        settings: all of the run's, which say of which class its data are; without it they are
            ``FederatedImages``.
    """
    if is_under(key, ROOTS):
        return _class_of_data(settings) in ("", "FederatedImages")
    return is_under(key, FREE_KEYS)


def _class_of_data(settings: Mapping[str, Any]) -> str:
    return str(settings.get("data.class_path", "")).rpartition(".")[2]


def is_under(key: str, names: Collection[str]) -> bool:
    """Return whether a dotted key is one of these names, or lies below one.

    >>> is_under("model.alpha", ["model"]), is_under("models", ["model"])
    (True, False)
    """
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _later_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the classes in these settings, and the clock, got later, as runs had it before."""
    has_clock = any(key.startswith("trainer.clock.") for key in settings)
    return (LATER_SETTINGS_OF_CLOCK if has_clock else {}) | {
        f"{key.removesuffix('class_path')}init_args.{name}": value
        for key, path in settings.items()
        if key.endswith(".class_path")
        for name, value in LATER_ARGUMENTS.get(str(path).rpartition(".")[2], {}).items()
    }


def result_settings(
    settings: Mapping[str, Any], *, prompts: bool = False, later: bool = True
) -> dict[str, Any]:
    """Return the settings that can change a result, without secrets.

    A setting that came after version 0.1.0 is left out while it has its neutral value.

    Args:
        settings: the settings with dotted keys.
        prompts: whether prompts are whole, and not as earlier versions wrote and hashed them, who
            took ``password: {inputs}`` for a secret.
        later: whether :data:`LATER_ARGUMENTS` are there, and not left out as before they came.
    """
    of_before = _later_settings(settings)
    if later:
        missing = {key for key in of_before if not any(is_under(one, [key]) for one in settings)}
        settings = {**settings, **{key: of_before[key] for key in missing}}
    else:
        settings = {
            key: one for key, one in settings.items() if (key, one) not in of_before.items()
        }
    neutral_values = NEUTRAL_VALUES | NEUTRAL_VALUES_OF_CLASS.get(_class_of_data(settings), {})
    always = {key for key, cls in ALWAYS_HASHED.items() if settings.get("model.class_path") == cls}

    def is_neutral(key: str, value: Any) -> bool:
        return key not in always and any(
            fnmatchcase(key, name) and value == neutral for name, neutral in neutral_values.items()
        )

    def same(key: str, value: Any) -> Any:
        if key.endswith("class_path"):
            return SAME_CLASS.get(value, value)
        if isinstance(value, str):
            return former_path(value) if prompts else redact(former_path(value))
        former = (default for name, default in FORMER_DEFAULTS.items() if fnmatchcase(key, name))
        return next(former, None) if value is None else value

    return {
        key: same(key, value)
        for key, value in redact_settings(settings).items()
        if not is_free(key, settings) and not is_neutral(key, value)
    }


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the settings that can change a result.

    Two hashes are equal if :func:`changed_settings` finds no difference and numbers are written
    alike, 4 or 4.0.

    Args:
        settings: the settings with dotted keys, as :func:`config_of` and :func:`flatten` give them.
    """
    return document_hash(result_settings(settings))


def has_hash(settings: Mapping[str, Any], hash: object) -> bool:
    """Return whether a hash that was written down is that of these settings, now or before their
    classes got :data:`LATER_ARGUMENTS`."""
    return hash in (settings_hash(settings), document_hash(result_settings(settings, later=False)))


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return ``key: before -> after`` for each setting that differs and can change a result.

    Secrets are not compared, since no run directory holds them.
    """
    before, after = (result_settings(each, prompts=True) for each in (before, after))

    def shown(settings: Mapping[str, Any], key: str) -> str:
        # texts are compared, since NaN does not equal itself
        return json.dumps(settings[key]) if key in settings else "not set"

    def was_hidden(key: str) -> bool:
        """Whether an earlier version has hidden a part of a prompt."""
        texts = [value for value in (before.get(key), after.get(key)) if isinstance(value, str)]
        hidden = {redact(text) for text in texts}
        return len(texts) == 2 and len(hidden) == 1 and any(HIDDEN in text for text in texts)

    return [
        f"{key}: {shown(before, key)} -> {shown(after, key)}"
        for key in {**before, **after}
        if shown(before, key) != shown(after, key)
        and not was_hidden(key)
        and not (key in LISTS and before.get(key) is None and after.get(key) is None)
        # 4 from Python is 4.0 where the command line has read it for a float
        and not (is_number(before.get(key)) and before.get(key) == after.get(key))
    ]


def listed_changes(changed: Sequence[str]) -> str:
    """Return the first changes as text, and how many more there are."""
    more = len(changed) - MAX_LISTED_CHANGES
    return ", ".join([*changed[:MAX_LISTED_CHANGES], *([f"and {more} more"] if more > 0 else [])])


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a setting or a metric is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
