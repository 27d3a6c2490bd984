"""The model card of an export: what the model is, where it comes from, and how it did."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule

from fl_lightning import __version__
from fl_lightning.config.recorded import NOT_RECORDED, describe
from fl_lightning.export.asking import asking_lines
from fl_lightning.export.folder import SUMMARY
from fl_lightning.export.formats import FormatName
from fl_lightning.export.loader import LOADER
from fl_lightning.export.trained_model import TrainedModel
from fl_lightning.run.snapshot import Checkpoint

OF_EVALUATION = ("test/", "val/", "personal/", "global/")
"""What the metrics of an evaluation begin with."""


def record_of(saved: Checkpoint, network: Any) -> dict[str, Any]:
    """Return what a run has recorded up to a checkpoint, ready for JSON.

    They are ``base``, the network that it started from; ``data_sha256``, of the examples, and
    ``partition_sha256``; ``settings`` of the method; ``bytes`` up, down and wasted by all clients
    together; ``evaluation``, the last metrics, and the round that they are of.

    Args:
        saved: the checkpoint that is exported.
        network: ``model.network``, or ``model.module`` in place of it, where the configuration has
            no class of it.
    """
    config = saved.progress.get("config", {})
    own = {
        name.removeprefix("model.init_args."): value
        for name, value in config.items()
        if name.startswith("model.init_args.") and value is not None
    }
    rows = [*csv.DictReader(io.StringIO(saved.table("metrics")))]
    traffic = {
        way: sum(int(float(row[f"comm/{way}_bytes"] or 0)) for row in rows)
        for way in ("upload", "download", "wasted")
        if rows
    }
    evaluated: dict[str, Any] = {}
    for row in rows:
        found = {
            name: float(value)
            for name, value in row.items()
            if value and name.startswith(OF_EVALUATION)
        }
        if found:
            evaluated = {"round": int(row["round"]), **found}
    part = "module" if isinstance(network, LightningModule) else "network"
    given = {
        name.removeprefix(f"{part}.init_args."): value
        for name, value in own.items()
        if name.startswith(f"{part}.init_args.")
    }
    base = describe(network)
    if f"{part}.class_path" in own:
        base = {"class_path": own[f"{part}.class_path"], "init_args": given}
    return {
        "base": base.removeprefix(NOT_RECORDED) if isinstance(base, str) else base,
        "data_sha256": saved.progress.get("content", ""),
        "partition_sha256": saved.progress.get("partition", ""),
        "settings": own,
        "bytes": traffic,
        "evaluation": evaluated,
    }


def _facts(model: TrainedModel) -> list[str]:
    """Return paragraphs on base, data, method, bytes and evaluation, as far as the run has recorded
    them."""
    about, lines = model.about, []
    base = about.get("base")
    named = base if isinstance(base, str) else (base or {}).get("init_args", {}).get("name")
    named = named or (base or {}).get("class_path", "a network of the run")
    moved = ""
    if model.base_moved:
        moved = " The run has changed its frozen weights: what is written here holds the change."
    lines.append(f"**Base.** `{named}`.{moved}")
    data = f"**Data.** {about['dataset']}"
    if about.get("data_sha256"):
        data += f", SHA-256 of the examples `{about['data_sha256']}`, of who has which `"
        data += f"{about['partition_sha256']}`"
    lines.append(f"{data}.")
    settings = {k: v for k, v in about.get("settings", {}).items() if not k.startswith("network")}
    lines.append(f"**Method.** {about['method']}{', with these settings:' if settings else '.'}")
    if settings:
        rows = [f"| `{name}` | {_in_cell(value)} |" for name, value in settings.items()]
        lines.append("\n".join(["| setting | value |", "|---|---|", *rows]))
    if traffic := about.get("bytes"):
        up, down, wasted = (traffic[way] for way in ("upload", "download", "wasted"))
        lines.append(
            f"**Bytes.** All together {up:,} bytes went up and {down:,} down; {wasted:,} of "
            "those up did not count."
        )
    if levels := about.get("levels"):
        rows = [
            f"| {number} | {level['share']:.3f} | {', '.join(level['left_out']) or 'nothing'} |"
            for number, level in enumerate(levels)
        ]
        lines.append(
            f"**Levels.** The network that is written here has all branches. The run kept a budget of "
            f"{about['budget']:g} of its joules by leaving branches out, and what is evaluated below are the "
            f"answers within it. `{SUMMARY}` has these levels too."
        )
        lines.append(
            "\n".join(["| level | share of a step | leaves out |", "|---|---|---|", *rows])
        )
    return [*lines, *_evaluations(about)]


def _evaluations(about: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the last metrics of each kind of model that they are of."""
    metrics = dict(about.get("evaluation", {}))
    round = metrics.pop("round", 0)
    heads = {f"**Evaluation** after round {round}:": metrics}
    if about.get("personalised"):
        of_one = {name: metrics[name] for name in metrics if name.startswith("global/")}
        of_own = {name: metrics[name] for name in metrics if name not in of_one}
        heads = {
            f"**Evaluation** of the one model for all after round {round}:": of_one,
            f"**Evaluation** of the clients' own models after round {round}, each on its part of "
            "the examples and all together:": of_own,
        }
    for head, found in heads.items():
        table = [f"| {name} | {value:.6g} |" for name, value in found.items()]
        if table:
            yield "\n".join([head, "", "| | |", "|---|---|", *table])


def _in_cell(value: object) -> str:
    """Return a value as the text of one cell of a table in Markdown."""
    return " ".join(str(value).split()).replace("|", "\\|")


def card_of(model: TrainedModel, format: FormatName, needs: str, loader: str) -> str:
    """Return the README of an export.

    Args:
        model: what is exported.
        format: in which form.
        needs: what its loader needs, in words.
        loader: the text of the loader.
    """
    about, form = model.about, model.preprocessing()
    after = f"round {about['round']}"
    if "of_rounds" in about:
        after += f" of {about['of_rounds']}, when it had not finished"
    whose = (
        "the global model" if about["client"] is None else f"the model of client {about['client']}"
    )
    shape = ", ".join(["B", *(["T"] if model.reads_tokens else map(str, form["example_shape"]))])
    length = form["example_shape"][-1] if model.reads_tokens else 0
    outputs = f"logits [{shape}, {form['num_outputs']}]"
    if not model.reads_tokens:  # those of a task may be of several sequences for an example
        outputs = model.data.task.outputs_form("B", form["num_outputs"])
    lines = [
        f"# {about['method']} on {about['dataset']}",
        f"This is {whose} of the run `{about['run']}` (seed {about['seed']}) after {after}, "
        f"written by fl_lightning {__version__} in the format `{format}`.",
        *_facts(model),
        f"Inputs are {'token ids int64' if model.reads_tokens else 'examples'} [{shape}]; outputs are "
        f"{outputs}."
        + (
            f" T is any number of tokens that the model takes, {length} in the run's data."
            if length
            else ""
        ),
    ]
    if "pixels" in form:
        mean, std = form["pixels"]["mean"], form["pixels"]["std"]
        lines.append(
            "Pixels 0 to 255 are divided by 255, and then each channel becomes (x - mean) / std: mean "
            f"{mean}, std {std}."
        )
    if "columns" in form:
        lines.append(f"Columns are standardised or coded as `{SUMMARY}` says under `columns`.")
    if "target" in form:
        name, mean, std = (form["target"][key] for key in ("name", "mean", "std"))
        lines.append(f"A value of the column `{name}` is an output times {std}, plus {mean}.")
    if form["classes"]:
        lines.append(f"The classes, in the order of the outputs: {', '.join(form['classes'])}.")
    lines += [f"`{LOADER}` loads it; it needs {needs}.", f"```python\n{loader}```"]
    if format in ("peft", "transformers") and (asking := asking_lines(model)):
        lines.append("It is asked as in the run: of these tokens, and each part by itself.")
        lines.append("\n".join(["```python", *asking, "```"]))
    return "\n\n".join(lines) + "\n"
