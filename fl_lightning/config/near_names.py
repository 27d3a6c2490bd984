"""What to write in place of a name that is not there: the nearest that is, or the list.

Every refusal of an unknown name asks here, so that all have one measure of "near" and none guesses
below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from fl_lightning.errors import require

LEAST_RATIO = 0.72  # difflib's: twice the letters in common, over the letters of both names
# of names of at most four letters, where one wrong letter is a third of the name
LEAST_RATIO_SHORT = 0.6
MOST_LISTED = 20

ALIASES: Mapping[str, str] = {
    # commands
    "train": "fit",
    "run": "fit",
    "eval": "test",
    "evaluate": "test",
    "validate": "test",
    "search": "tune",
    "optimize": "tune",
    "report": "compare",
    # methods: one step of all of a client's data is FedAvg with max_local_steps 1
    "fedsgd": "FedAvg",
    # precisions
    "16": "16-mixed",
    "fp16": "16-mixed",
    "half": "16-mixed",
    "float16": "16-mixed",
    "16-true": "16-mixed",
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "bf16-true": "bf16-mixed",
    "32": "32-true",
    "fp32": "32-true",
    "float32": "32-true",
    # loggers
    "wandb": "WandbLogger",
    "mlflow": "MLFlowLogger",
    "tensorboard": "TensorBoardLogger",
    "csv": "CSVLogger",
    # keys of a study
    "name": "study",
    "title": "study",
}
"""What the field calls something, in small letters, and the name here; it counts only where that is
valid."""


FOREIGN_NAMES = {
    "seed": "seed_everything",
    "random_seed": "seed_everything",
    "random_state": "seed_everything",
    "lr": "model.optimizer.lr",
    "learning_rate": "model.optimizer.lr",
    "momentum": "model.optimizer.momentum",
    "weight_decay": "model.optimizer.weight_decay",
    "batch": "data.batch_size",
    "data.alpha": "data.partition.beta",
    "dirichlet_alpha": "data.partition.beta",
    "clients": "data.num_clients",
    "n_clients": "data.num_clients",
    "num_users": "data.num_clients",
    "method": "model",
    "algorithm": "model",
    "rounds": "trainer.max_rounds",
    "num_rounds": "trainer.max_rounds",
    "n_rounds": "trainer.max_rounds",
    "fraction": "trainer.participation",
    "fraction_fit": "trainer.participation",
    "join_ratio": "trainer.participation",
    "clients_per_round": "trainer.participation",
    "client_fraction": "trainer.participation",
    "gpu": "trainer.devices",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "device": "trainer.accelerator",
    "num_workers": "trainer.workers",
    "name": "trainer.run_name",
    "output": "trainer.default_root_dir",
    "output_dir": "trainer.default_root_dir",
    "save_dir": "trainer.default_root_dir",
    "resume": "ckpt_path",
    "resume_from_checkpoint": "ckpt_path",
    "checkpoint": "ckpt_path",
    "study": "config",
}
"""The name of a setting here, by the name that other programs give it (the whole or its last
part)."""

EPOCH_NAMES = ("epochs", "max_epochs", "num_epochs", "n_epochs", "max_epoch")
"""What other programs call the number of epochs, which is two settings here."""

EPOCHS = "{rounds} for rounds of the federation, {epochs} for a client's passes over its data"
"""What to write in place of one of ``EPOCH_NAMES``, by the names of the two settings."""


def short_name(key: str) -> str:
    """Return a dotted key without the levels that may be left out.

    >>> short_name("model.init_args.network.class_path")
    'model.network'
    """
    return key.replace(".init_args", "").removesuffix(".class_path")


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name closest to ``name``; None if none is close.

    What the field calls it comes first, then whole names, then the last parts of dotted names.
    Capitals do not count.

    >>> nearest("max_round", ["trainer.max_rounds", "seed_everything"])
    'trainer.max_rounds'
    >>> nearest("SCAFFOLD", ["AQFL", "FedAvg"])
    """
    valid = [str(option) for option in valid]
    if (known := ALIASES.get(name.lower())) in valid:
        return known
    leaf = name.rpartition(".")[2].lower()
    lowered = {option.lower(): option for option in valid}
    leaves = {option.rpartition(".")[2].lower(): option for option in reversed(valid)}
    for written, options in ((name.lower(), lowered), (leaf, leaves)):
        least = LEAST_RATIO if len(written) > 4 else LEAST_RATIO_SHORT
        near = get_close_matches(written, options, n=5, cutoff=least)
        if len(written) <= 2:  # pt is no slip of peft
            near = [
                option
                for option in near
                if option[0] == written[0] and len(option) <= len(written) + 1
            ]
        if near:
            # letters swapped
            swapped = [option for option in near if sorted(option) == sorted(written)]
            return options[(swapped or near)[0]]
    return None


def nearest_or_list(name: object, valid: Iterable[object]) -> str:
    """Return the valid name closest to ``name``, or in words which there are.

    >>> nearest_or_list("labl", ["label", "image"])
    'label'
    >>> nearest_or_list("x1", ["label", "image"])
    'one of label, image'
    """
    known = [str(option) for option in valid]
    return nearest(str(name), known) or listed(known)


def argument_for(name: str, arguments: Sequence[str]) -> str:
    """Return what to write in place of an argument that a constructor does not have: what the field
    calls so, the nearest argument, or the list.

    >>> argument_for("rounds", ["max_rounds", "local_epochs"])
    'max_rounds'
    >>> argument_for("lr", ["network", "optimizer"])
    'optimizer'
    """
    if name in EPOCH_NAMES and {"max_rounds", "local_epochs"} <= set(arguments):
        return EPOCHS.format(rounds="max_rounds", epochs="local_epochs")
    meant = [part for part in FOREIGN_NAMES.get(name, "").split(".")[::-1] if part in arguments]
    return meant[0] if meant else nearest_or_list(name, arguments)


def nearest_of_listed(name: object, valid: Iterable[object]) -> str:
    """Return the valid name closest to ``name``, or "one of them" after a rule that lists them.

    >>> nearest_of_listed("noise", ["lr"])
    'lr'
    >>> nearest_of_listed("noise", ["lr", "bits"])
    'one of them'
    """
    known = [str(option) for option in valid]
    return nearest(str(name), known) or (known[0] if len(known) == 1 else "one of them")


def listed(names: Iterable[str]) -> str:
    """Return names as "one of A, B, C", at most ``MOST_LISTED`` of them."""
    names = list(names)
    if len(names) == 1:
        return names[0]
    return f"one of {', '.join(names[:MOST_LISTED])}{' ...' if len(names) > MOST_LISTED else ''}"


def require_choice(value: object, choices: Sequence[str], setting: str) -> None:
    """Refuse what is none of ``choices``, such as a misspelt name that was given in Python, where
    no parser checks it.

    Args:
        value: what was given.
        choices: what is allowed, first the one to propose where none is near.
        setting: its name, as ``--model.rounding``.
    """
    near = nearest(str(value), choices) or choices[0]
    require(
        value in choices,
        f"{setting} {value}",
        f"one of {', '.join(choices)}",
        f"write {setting} {near}",
    )
