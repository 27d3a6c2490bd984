"""A federation from a configuration file, on a node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.import_gate import more_imports
from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.config.packaged import find_config, layers
from fl_lightning.config.settings import changed_settings, flatten, is_under
from fl_lightning.deploy.node.node import Build, Count
from fl_lightning.deploy.node.own_data import OwnData, form_of
from fl_lightning.deploy.protocol.gate import KEY, names_in
from fl_lightning.errors import require
from fl_lightning.federation import Federation
from fl_lightning.support import disk

APART = (
    "data.init_args.metrics",
    "data.init_args.primary",
    "trainer.secure_sum",
    "trainer.privacy",
)
"""Settings that no client's training reads, and those that the server compares itself."""
PROTECTION = ("trainer.secure_sum", "trainer.privacy")
"""Settings of which a node takes nothing from the server where its owner's files name them."""
MAX_CHANGES = 3
"""Settings that a refusal names."""


def builder(overlays: Sequence[Path] = (), own: OwnData | None = None) -> Build:
    """Return what builds federations from configuration files.

    Args:
        overlays: configuration files of the node's own, layered over the run's: where its data lie,
            and on which device it trains.
        own: the node's own data; None: it has its part of the data that the run names.
    """
    owned = _names_of_owner(overlays, own)

    def build(path: Path) -> Federation:
        with more_imports(owned):
            cli = _parsed(path, overlays, own)
            seed = cli.config["seed_everything"]
            return cli.trainer.prepare(cli.model, cli.datamodule, seed=seed)

    return build


def counter(overlays: Sequence[Path] = (), own: OwnData | None = None) -> Count:
    """Return what counts a node's own examples for the run of a configuration file."""
    owned = _names_of_owner(overlays, own)

    def count(path: Path) -> dict[str, Any]:
        with more_imports(owned):
            cli = _parsed(path, overlays, own)
            cli.datamodule.prepare_data()
            cli.datamodule.setup("fit")
            assert own is not None
            return own.census(cli.datamodule, cli.config["seed_everything"])

    return count


def _names_of_owner(overlays: Sequence[Path], own: OwnData | None) -> set[str]:
    """Return the packages that files of the node's owner name, and that are therefore imported."""
    data = [own.given] if own is not None and own.given.suffix in (".yaml", ".yml") else []
    configs = _read([*overlays, *data])
    return {name for config in configs for name in names_in(config)}


def _read(files: Sequence[Path]) -> list[Any]:
    """Return the documents of configuration files, and of those that they are based on."""
    found = []
    for file in (layer for file in files if (path := find_config(file)) for layer in layers(path)):
        with suppress(OSError, ValueError, yaml.YAMLError):  # said in words when the file is used
            found.append(yaml.safe_load(file.read_text()))
    return found


def _has(config: Any, setting: str) -> bool:
    """Return whether a document names a setting, whose key it may have in one piece."""
    return isinstance(config, dict) and any(
        f"{key}.".startswith(f"{setting}.")
        or (setting.startswith(f"{key}.") and _has(value, setting.removeprefix(f"{key}.")))
        for key, value in config.items()
    )


def _parsed(path: Path, overlays: Sequence[Path], own: OwnData | None) -> Any:
    """Return the trainer, the method and the data that a configuration describes, with the node's
    own data.
    """
    run = yaml.safe_load(path.read_text())
    entry = run.pop(KEY, None)
    require(
        entry is None or own is not None,
        "a run on the nodes' own data",
        "this node has none",
        "start it with --data and the folder of its data",
    )
    require(
        entry is not None or own is None,
        "a run that deals out the data that it names",
        "this node has data of its own",
        "start it without --data, or the run with --deploy.own_data true",
    )
    if own is not None:
        path = path.with_suffix(".own.yaml")
        disk.replace(path, yaml.safe_dump(own.config(run), sort_keys=False).encode())
    documents = _read(overlays)
    named = [name for name in PROTECTION if any(_has(each, name) for each in documents)]
    files = [path, *overlays]
    if named:  # a file between them, since a flag would beat the overlays
        without = path.with_suffix(".without.yaml")
        disk.replace(without, yaml.safe_dump(dict.fromkeys(named)).encode())
        files.insert(1, without)
    cli: Any = FederatedCLI("fit", _words(*files))
    if overlays:
        _require_same_results(FederatedCLI("fit", _words(path)).config, cli.config, own is not None)
    if own is not None:
        cli.datamodule.run_form = form_of(entry)
        cli.trainer.deal = own.deal(entry["sizes"])
    return cli


def _words(*files: Path) -> list[str]:
    return [word for file in files for word in ("--config", str(file))]


def _require_same_results(run: Any, own: Any, has_own_data: bool) -> None:
    """Refuse files of the node's owner that change what its clients compute, which nobody would
    see.

    Args:
        run: the configuration that was sent.
        own: the same with the node's own files over it.
        has_own_data: whether the node's data are its own, which it describes itself.
    """
    before, after = flatten(run.as_dict()), flatten(own.as_dict())
    for key in [*{**before, **after}]:
        is_data, value = is_under(key, ["data"]), after.get(key)
        # the server compares hashes
        is_place = is_data and isinstance(value, str) and Path(value).exists()
        if is_place or (is_data and has_own_data) or is_under(key, APART):
            before.pop(key, None), after.pop(key, None)
    changed = changed_settings(before, after)
    require(
        not changed,
        f"--overlays of this node ({'; '.join(changed[:MAX_CHANGES])})",
        "the clients of all nodes train with the settings of the run",
        "leave in them where its data lie and the accelerator",
    )
