"""Files that come with the project: configurations, which can be named from any folder, listed and
copied, and tables of costs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_lightning.errors import InputError, as_bad_input, require

HF_PREFIX = "hf:"
"""What stands before the name or folder of a model of transformers, and of its tokeniser."""
MAX_TABLE_BYTES = 2**24


def configs_folder() -> Path:
    """Return the folder of the configurations: in the package of a wheel, beside it in the
    repository."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def cost_tables() -> dict[str, Path]:
    """Return the files of the tables of costs that come with the package, by name."""
    folder = Path(__file__).resolve().parents[1] / "energy"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def cost_table(network: str) -> Path:
    """Return the file of one of them.

    Raises:
        InputError: there is none of this name.
    """
    tables = cost_tables()
    require(
        network in tables,
        f"no table of costs for {network}",
        f"{', '.join(tables)} come with the package",
        "write one of these; those of other networks are files, made by python -m fl_lightning energy "
        "--calibrate true --network NAME --out costs.json",
    )
    return tables[network]


def table_text(path: Path | str) -> str:
    """Return the text of a file with a table of costs.

    Raises:
        InputError: the file cannot be read, or is too large.
    """
    path = Path(path)
    make = f"python -m fl_lightning energy --calibrate true --network NAME --out {path.name}"
    instead = f"correct the path, or make a table: {make}"
    if str(path) in cost_tables():
        instead = f"name no file, but the network {path}, whose table comes with the package"
    with (
        as_bad_input(str(path), "it cannot be read", instead),
        path.open("rb") as file,
    ):
        data = file.read(MAX_TABLE_BYTES + 1)
        require(
            len(data) <= MAX_TABLE_BYTES, str(path), "a table has at most 16 MiB", "calibrate again"
        )
        return data.decode()


def model_folder(name: str) -> str:
    """Return the folder of an installed Python package that carries a model, of ``package:NAME``;
    any other name as it is.

    Raises:
        InputError: the package is not installed.
    """
    prefix, _, package = name.partition(":")
    if prefix != "package":
        return name
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            name,
            f"no Python package {package!r} is installed",
            f"pip install {package.replace('_', '-')}",
        )
    return spec.submodule_search_locations[0]


def find_config(
    name: str | Path, folder: Path | None = None, other_than: Path | None = None
) -> Path | None:
    """Return the file that a configuration's name means; None if there is none.

    A file of the user's takes precedence over one that comes with the project.

    Args:
        name: a path, or a name such as ``kd_default``, ``overlays/noise_on`` or
            ``configs/fedavg.yaml``.
        folder: the folder that a relative path starts from; None for the working directory.
    """
    given = Path(name)
    names = [given] if given.suffix in (".yaml", ".yml") else [given, Path(f"{given}.yaml")]
    own = folder or Path()
    candidates = [own / each for each in names] + [own / "configs" / each for each in names]
    if not given.is_absolute() and ".." not in given.parts:
        inside = [
            each.relative_to("configs") if each.parts[:1] == ("configs",) else each
            for each in names
        ]
        candidates += [configs_folder() / each for each in inside if each.suffix]
    try:
        files = (path for path in candidates if path.is_file())
        return next(
            (path for path in files if not other_than or not path.samefile(other_than)), None
        )
    except (OSError, ValueError):  # the name is too long or has a NUL in it
        return None


def with_found_configs(args: Sequence[str]) -> list[str]:
    """Return a command line that begins with its configuration files, each after those that it is
    based on: a flag beats them wherever it was written.

    Raises:
        InputError: the base of a file does not exist, or two files are the base of each other.
    """
    files: list[str] = []
    others: list[str] = []
    left = list(args)
    while left:
        arg = left.pop(0)
        flag, equals, name = arg.partition("=")
        if re.match("-c[^=]", arg):  # glued to its value
            flag, equals, name = "-c", "=", arg[2:]
        if flag not in ("--config", "-c") or not (equals or left):
            others.append(arg)
            continue
        name = name if equals else left.pop(0)
        path = find_config(name)
        files += (
            [part for layer in layers(path) for part in ("--config", str(layer))]
            if path
            else [flag, name]
        )
    return files + others


def layers(path: Path) -> list[Path]:
    """Return a configuration file after those that it is based on, the lowest first.

    A file may have a key ``base: FILE``, as the methods' configurations do for their federation:
    that file is read before it. The name is relative to the file's folder, or one that
    :func:`find_config` knows; a file that has the name of a packaged one can be based on that one.

    Raises:
        InputError: there is no such file, or files are the base of each other.
    """
    found = [path]
    while name := base_of(found[0]):
        base = find_config(name, found[0].parent, other_than=found[0])
        if base is None:
            raise InputError(
                f"{found[0]}, base: {name}",
                "it names the configuration file to layer this one on, and there is none",
                "write base: federations/digits.yaml, or remove the line",
            )
        if any(base.samefile(other) for other in found):
            chain = " on ".join(map(str, (base, *found)))
            raise InputError(
                f"base: {chain}", "files are not based on each other", "remove one of the lines"
            )
        found.insert(0, base)
    return found


def base_of(path: Path) -> str:
    """Return what the key ``base`` of a file names; empty without it, or if the file cannot be
    read.

    Raises:
        InputError: the key has no single name as its value.
    """
    # imports yaml, which --help does without
    from fl_lightning.config.documents import read_document

    try:
        nodes = _base_nodes(read_document(path, str(path)))
    except (OSError, ValueError):
        return ""
    name = nodes[1].value if nodes else ""
    if nodes and not (name and isinstance(name, str)):
        raise InputError(
            f"{path}, base",
            "it names one configuration file",
            "write base: federations/digits.yaml",
        )
    return str(name)


def without_base(text: str) -> str:
    """Return a configuration file's text with its key ``base`` blanked out; every line keeps its
    number."""
    nodes = _base_nodes(text)
    if not nodes:
        return text
    start, end = nodes[0].start_mark.index, nodes[1].end_mark.index
    if comma := re.match(r"\s*,", text[end:]):
        end += comma.end()
    blank = re.sub(r"\S", " ", text[start:end])
    rest = text[:start] + blank + text[end:]
    lines = (line.lstrip("\ufeff ") for line in rest.splitlines())
    is_empty = all(not line or line.startswith(("#", "---")) for line in lines)
    return f"{rest}\n{{}}\n" if is_empty else rest


def _base_nodes(text: str) -> list[Any]:
    """Return the key ``base`` of a YAML mapping and its value as nodes; nothing where there is
    none."""
    import yaml

    if "base" not in text and "\\" not in text:
        return []
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return []
    entries = node.value if isinstance(node, yaml.MappingNode) else []
    return next(([key, value] for key, value in entries if key.value == "base"), [])


def configs(args: Sequence[str]) -> None:
    """List the configurations, or copy them into a folder; a file there that differs stays as it
    is.

    Args:
        args: nothing, or the folder.

    Raises:
        InputError: there is more than one argument, or the folder cannot be written.
    """
    if {"-h", "--help"} & {*args}:
        sys.stdout.write(
            "usage: python -m fl_lightning configs [FOLDER]\n\n"
            "Lists the configurations, or copies them to FOLDER.\n"
        )
        return
    if len(args) > 1 or any(arg.startswith("-") or not arg for arg in args):
        raise InputError(
            f"configs {' '.join(args) or repr('')}",
            "it takes a folder to copy to, or nothing",
            "write configs FOLDER",
        )
    source = configs_folder()
    names = sorted(path.relative_to(source) for path in source.rglob("*.yaml"))
    if not args:
        about = {
            name: (source / name).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            for name in names
        }
        sys.stdout.write(
            "".join(
                f"{name.with_suffix('').as_posix():<30} {text}\n" for name, text in about.items()
            )
        )
        return
    target = Path(args[0])
    kept, new = [], "write the name of a new folder"
    with as_bad_input(f"configs {target}", "it cannot be written", new, OSError, ValueError):
        for name in names:
            text, copy = (source / name).read_bytes(), target / name
            if copy.exists():
                if copy.read_bytes() != text:
                    kept.append(str(name))
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("xb") as file:
                file.write(text)
    left = f"; {len(kept)} differ there and stay as they are: {', '.join(kept)}" if kept else ""
    sys.stdout.write(
        f"{len(names) - len(kept)} of {len(names)} configurations are in {target}{left}\n"
    )
