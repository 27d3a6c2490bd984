"""The command ``compare``: it makes tables, tests, verdicts and figures of finished runs.

For example:

    python -m fl_lightning compare --study exp2_embedded --out reports/exp2
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fl_lightning.errors import as_bad_input, require
from fl_lightning.figures import plain_text
from fl_lightning.study.plan.published import PLAN
from fl_lightning.study.report import tables
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.document import differences_csv, plan_yaml, report, runs_csv
from fl_lightning.study.report.figures import FIGURES, as_svg, figures
from fl_lightning.study.report.latex import Layout, tables_tex, timings_tex
from fl_lightning.study.report.looks import counted
from fl_lightning.study.report.markdown import answers, criteria_tables, markdown
from fl_lightning.study.report.overall import proposed_table
from fl_lightning.study.report.page import page
from fl_lightning.study.report.registered import (
    NOT_REGISTERED,
    RegistrationReport,
    registration_report,
)
from fl_lightning.study.report.transfer_tables import transfer_tables
from fl_lightning.study.report.verdicts import check_criteria
from fl_lightning.study.results.gather import check_comparable, gather, locate, with_metric
from fl_lightning.study.results.published import add_published

OWN = {
    *(
        "report.md",
        "report.html",
        "report.json",
        "runs.csv",
        "differences.csv",
        "timings.csv",
        PLAN,
    ),
    *("timing_differences.csv", "transfer.csv", "tables.tex", "timings.tex", "figures"),
}
"""The files of a report; anything else in its folder is the user's, and stays."""


def compare(
    study: str,
    out: Path,
    root: Path = Path("runs"),
    mlflow: str | None = None,
    metric: str | None = None,
    overwrite: bool = False,
    columns: str | None = None,
    caption: str | None = None,
    label: str | None = None,
) -> None:
    """Compare the finished runs of a study and write a report.

    Args:
        study: name of a study, its YAML file, or any folder of runs.
        out: folder of the report; a new one.
        root: folder that the studies' folders are in, ``trainer.default_root_dir`` of the runs.
        mlflow: read the runs from this MLflow store instead, such as ``sqlite:///mlflow.db``.
        metric: primary metric instead of the study's, such as ``final/auc_accuracy``.
        overwrite: replace the report that is in ``out``; other files in there stay.
        columns: metrics of the table of results in ``tables.tex``, such as ``accuracy,ece,upload``;
            by default the headline metrics in which not all rows are the same.
        caption: the caption of that table, in LaTeX.
        label: the label of that table, such as ``tab:main``; those of the other tables begin with
            it.

    Raises:
        InputError: there is nothing to compare, the runs cannot be compared, or ``out`` holds
            something.
    """
    layout = Layout.read(columns, caption, label)
    check_out(out, overwrite)
    results = with_metric(add_published(counted(gather(study, root, mlflow))), metric)
    check_comparable(results)
    comparison = Comparison(results)
    check_criteria(comparison)
    layout.metrics(comparison)
    _, folder = locate(study, root, must_exist=False)
    registration = registration_report(results, folder)
    write(comparison, out.resolve(), registration, layout)  # of a link, what it leads to
    show(comparison, out, registration)


def check_out(out: Path, overwrite: bool) -> None:
    """Check that the report would overwrite nothing but an older report that it may overwrite.

    Raises:
        InputError: something else is in the folder.
    """
    with as_bad_input(f"--out {out}", "it cannot be looked at", "name another folder", OSError):
        require(not out.exists() or out.is_dir(), f"--out {out}", "it is a file", "name a folder")
    if out.is_dir() and any(out.iterdir()):
        rule = "it is not empty and nothing is overwritten"
        instead = "name another, or add --overwrite true"
        require(overwrite, f"--out {out}", rule, instead)
        rule = "only a report is overwritten and there is no report.json in it"
        require((out / "report.json").is_file(), f"--out {out}", rule, "name another folder")


def write(
    comparison: Comparison,
    out: Path,
    registration: RegistrationReport = NOT_REGISTERED,
    layout: Layout = Layout(),  # noqa: B008 (it is frozen)
) -> None:
    """Write the report: it is made aside and put in its place as a whole."""
    with _in_place_of(out) as folder:
        drawn, empty = dict[str, bytes](), []
        (folder / "figures").mkdir()
        for name, figure in figures(comparison):
            if figure is None:
                empty.append(name)
                continue
            plain_text(figure)
            figure.savefig(folder / "figures" / f"{name}.png", dpi=150, metadata={"Software": None})
            figure.set_layout_engine("none")  # it is laid out once, for all forms of the file
            undated = {"Creator": None, "Producer": None, "CreationDate": None}
            figure.savefig(folder / "figures" / f"{name}.pdf", metadata=undated)
            drawn[name] = as_svg(figure)
        text = markdown(comparison, list(drawn), empty, registration)
        texts = {
            "report.json": json.dumps(
                report(comparison, registration), indent=1, allow_nan=False, default=str
            )
            + "\n",
            "report.md": text,
            "report.html": page(text, drawn),
            "runs.csv": runs_csv(comparison, timing=False),
            "timings.csv": runs_csv(comparison, timing=True),
            "differences.csv": differences_csv(comparison, timing=False),
            "timing_differences.csv": differences_csv(comparison, timing=True),
            "tables.tex": tables_tex(comparison, layout),
            "timings.tex": timings_tex(comparison, layout),
        }
        if comparison.study.path.is_file():
            texts[PLAN] = plan_yaml(comparison, out)
        if comparison.transfer.alone:
            texts["transfer.csv"] = comparison.transfer.csv()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


@contextmanager
def _in_place_of(out: Path) -> Iterator[Path]:
    """Yield a new folder that then takes the place of ``out`` and keeps what is not part of a
    report there."""
    aside, old = (out.parent / f".{out.name}.{os.getpid()}.{what}" for what in ("writing", "old"))
    with as_bad_input(
        f"--out {out}", "no report can be written there", "name a folder you may write to"
    ):
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    try:
        yield aside
        if out.is_dir():
            _keep(out, aside, OWN)
            _keep(out / "figures", aside / "figures", _own_figures(out))
        if out.is_dir():
            out.rename(old)
        aside.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _keep(old: Path, new: Path, own: set[str]) -> None:
    """Copy what is the user's; a link stays a link."""
    for entry in sorted(old.iterdir()) if old.is_dir() else []:
        if entry.name in own or (new / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _own_figures(out: Path) -> set[str]:
    """Return the files of the figures that the report in ``out`` shows, also of levels that are
    gone."""
    try:
        text = (out / "report.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return set()
    shown = re.findall(r"!\[[^\]]*\]\(<figures/(.+)\.png>\)", text)
    names = [name for name in shown if FIGURES.match(name)]
    return {f"{name}.{suffix}" for name in names for suffix in ("png", "pdf")}


def show(
    comparison: Comparison, out: Path, registration: RegistrationReport = NOT_REGISTERED
) -> None:
    """Print the most important part in the terminal; the columns that are left out are in the
    report."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    _print_line(console, registration.line.replace("**", ""))

    def print_table(table: tables.ReportTable) -> None:
        console.print(table.rich(console.width))

    for levels in comparison.levels:
        table = tables.results(comparison, levels)
        print_table(table)
        tested = tables.differences(comparison, levels)
        if tested is not None:
            print_table(tested.without("bootstrap", "p (t)", "p (sequence)", "p (Wilcoxon)", "g_z"))
    for table in transfer_tables(comparison):
        print_table(table.without("clients", "bootstrap"))
    if (places := proposed_table(comparison)) is not None:
        print_table(places)
    drops = tables.degradation(comparison)
    judged = [tables.premises(comparison, timing) for timing in (False, True)]
    for one, title in criteria_tables(comparison, registration):
        judged += [tables.verdicts(one, timing, title) for timing in (False, True)]
    for found in (drops, *judged):
        if found is not None:
            print_table(found.without("left", "right", "because", "bootstrap"))
    for line in closing(comparison, out):
        _print_line(console, line)


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def closing(comparison: Comparison, out: Path) -> Iterator[str]:
    """Yield the last lines of the terminal."""
    yield from (answer.replace("**", "") for answer in answers(comparison))
    yield from (f"not counted: {entry.name}: {entry.reason}" for entry in comparison.not_counted)
    yield f"report: {out / 'report.md'} and report.html"
