"""The tables of a report, as text in cells; and a table as Markdown, as LaTeX (booktabs) or for the
terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from fl_lightning.study.metric_names import (
    CLOCKS,
    Column,
    column,
    headline,
    higher_is_better,
    is_timing,
    p_value,
    plain,
    seeds,
)
from fl_lightning.study.report.comparison import Comparison, Difference, Levels, name_of
from fl_lightning.study.report.verdicts import Judgement, Verdict
from fl_lightning.study.report.verdicts import verdicts as every_verdict
from fl_lightning.study.spec.criteria import QUANTITIES
from fl_lightning.study.statistics import mean_std

LATEX = {
    "\\": r"\textbackslash{}",
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "<": "$<$",
    ">": "$>$",
    "=": "$=$",
}

STYLES = {"holds": "green", "fails": "red", "undecided": "yellow"}


@dataclass(frozen=True)
class Table:
    """Text in cells.

    Args:
        title: above it.
        header: of its columns.
        rows: its cells.
        texts: number of leading columns that are text.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    texts: int = 1

    def markdown(self) -> str:
        rule = [" --- " if i < self.texts else " ---: " for i in range(len(self.header))]
        lines = [self.header, *self.rows]
        text = [
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
            for line in lines
        ]
        return "\n".join([text[0], "|" + "|".join(rule) + "|", *text[1:]])

    def latex(self) -> str:
        """A tabular environment; needs the package booktabs."""

        def escape(cell: str) -> str:
            return "".join(LATEX.get(character, character) for character in cell)

        def row(line: list[str]) -> str:
            text = " & ".join(escape(cell) for cell in line)
            if text.startswith(("[", "*")):  # after \\ these would be its arguments
                text = f"{{{text[0]}}}{text[1:]}"
            return rf"{text} \\"

        lines = [row(line) for line in [self.header, *self.rows]]
        columns = "l" * self.texts + "r" * (len(self.header) - self.texts)
        begin, end = (
            [f"% {self.title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"],
            [r"\bottomrule", r"\end{tabular}"],
        )
        return "\n".join([*begin, lines[0], r"\midrule", *lines[1:], *end]) + "\n"

    def without(self, *names: str) -> Table:
        """The same without some columns."""
        kept = [i for i, name in enumerate(self.header) if name not in names]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.title, [self.header[i] for i in kept], rows, sum(i < self.texts for i in kept))

    def rich(self) -> RichTable:
        """For the terminal, where Markdown's marks are left out."""
        table = RichTable(
            title=self.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
        )
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i < self.texts else "right", overflow="fold")
        for row in self.rows:
            cells = [Text(cell.replace("**", "").strip("`")) for cell in row]
            for cell in cells:
                cell.stylize(STYLES.get(cell.plain, ""))
            table.add_row(*cells)
        return table


def _at(levels: Levels) -> str:
    return f" at {name_of(levels)}" if levels else ""


def results(comparison: Comparison, levels: Levels) -> Table:
    """Mean and standard deviation of the headline metrics, by method, the best first."""
    columns = headline(comparison.study.metric, [name for name in comparison.metrics if not is_timing(name)])
    return _means(
        comparison,
        levels,
        columns,
        f"Results{_at(levels)}, mean ± standard deviation over seeds",
        best_first=True,
    )


def clocks(comparison: Comparison, levels: Levels) -> Table:
    """The same of what a clock measured."""
    columns = [one for one in CLOCKS if one.metric in comparison.metrics]
    columns += [
        column(name)
        for name in comparison.metrics
        if is_timing(name) and name not in [one.metric for one in CLOCKS]
    ]
    return _means(
        comparison,
        levels,
        columns,
        f"Time{_at(levels)}, mean ± standard deviation over seeds",
        best_first=False,
    )


def target(comparison: Comparison, levels: Levels) -> Table | None:
    """Rounds and megabytes until the target accuracy."""
    if comparison.study.target_accuracy is None:
        return None
    columns = [column("target/rounds"), column("target/megabytes")]
    table = _means(
        comparison,
        levels,
        columns,
        f"Until {comparison.study.target_accuracy:.1%} test accuracy{_at(levels)}",
        False,
    )
    for row in table.rows:
        runs = comparison.runs(row[0], levels)
        row.append(f"{len(comparison.values('target/rounds', row[0], levels))} of {len(runs)}")
    return Table(table.title, [*table.header, "seeds that reach it"], table.rows)


def _means(
    comparison: Comparison, levels: Levels, columns: list[Column], title: str, best_first: bool
) -> Table:
    labels = [label for label in comparison.labels if comparison.runs(label, levels)]
    if best_first:
        sign = -1 if higher_is_better(comparison.study.metric) else 1
        means = {
            label: mean_std(list(comparison.values(comparison.study.metric, label, levels).values()))[0]
            for label in labels
        }
        labels.sort(key=lambda label: sign * means[label] if isfinite(means[label]) else float("inf"))
    rows = []
    for label in labels:
        cells = [one.mean(list(comparison.values(one.metric, label, levels).values())) for one in columns]
        rows.append([label, str(len(comparison.runs(label, levels))), *cells])
    return Table(title, ["method", "seeds", *(one.title for one in columns)], rows)


def differences(comparison: Comparison, levels: Levels) -> Table:
    """The tests of the primary metric."""
    metric = comparison.study.metric
    header = [
        "difference",
        "seeds",
        f"mean{column(metric).unit}",
        "95 % interval",
        "bootstrap",
        "p (t)",
        "p (Holm)",
        "p (Wilcoxon)",
        "g_z",
        "detectable",
        "seeds needed",
    ]
    rows = [[f"{one.a} − {one.b}", *difference_cells(one)] for one in comparison.differences(metric, levels)]
    return Table(f"Differences in {column(metric).title}{_at(levels)}, paired by seed", header, rows)


def difference_cells(one: Difference) -> list[str]:
    written, test = column(one.metric), one.test
    return [
        str(test.n) + (f" ({len(one.unpaired)} unpaired)" if one.unpaired else ""),
        written.number(test.mean, sign=True),
        interval(written, test.low, test.high),
        interval(written, test.bootstrap_low, test.bootstrap_high),
        p_value(test.p_t),
        p_value(test.p_holm),
        p_value(test.p_wilcoxon),
        f"{test.g_z:+.2f}".replace("-", "−") if isfinite(test.g_z) else "-",
        written.number(test.detectable),
        seeds(test.seeds_needed),
    ]


def interval(written: Column, low: float, high: float) -> str:
    return f"[{written.number(low, sign=True)}, {written.number(high, sign=True)}]" if isfinite(low) else "-"


def degradation(comparison: Comparison) -> Table | None:
    """How much is lost under stress, against the same seed without it."""
    entry = comparison.study.degradation
    if not entry:
        return None
    written = column(comparison.study.metric)
    header = ["method", "seeds", f"drop{written.unit}", "95 % interval", "bootstrap", "p (t)", "g_z"]
    rows = []
    for others, label, one in comparison.degradations():
        cells = difference_cells(one)
        name = f"{label} ({name_of(others)})" if others else label
        rows.append([name, *cells[:5], cells[7]])
    stress = f"{entry['axis']}: {entry['clean']} against {entry['stressed']}"
    return Table(f"Degradation of {written.title}, {stress}; positive: worse under stress", header, rows)


def verdicts(comparison: Comparison, timing: bool) -> Table | None:
    """Criteria and what became of them; those on time apart, because they differ from machine to machine."""
    chosen = [verdict for verdict in every_verdict(comparison) if verdict.criterion.is_timing == timing]
    if not chosen:
        return None
    rows = [row for verdict in chosen for row in _verdict_rows(verdict)]
    return Table(
        "Criteria",
        ["criterion", "verdict", "left", "right", "left − right", "95 % interval", "seeds", "because"],
        rows,
        2,
    )


def _verdict_rows(verdict: Verdict) -> Iterator[list[str]]:
    several = len(verdict.judgements) > 1
    if several:
        shares = sum(judgement.decision == "holds" for _, judgement in verdict.judgements)
        because = f"holds at {shares} of {len(verdict.judgements)} levels"
        yield [f"`{verdict.criterion.text}`", f"**{verdict.decision}**", "", "", "", "", "", because]
    for levels, one in verdict.judgements:
        name = f"... {name_of(levels)}" if several else f"`{verdict.criterion.text}`"
        yield [name, one.decision if several else f"**{one.decision}**", *judgement_cells(one)]


def judgement_cells(one: Judgement) -> list[str]:
    bounds = f"[{plain(one.low)}, {plain(one.high)}]" if isfinite(one.low) else "-"
    return [plain(one.left), plain(one.right), plain(one.difference), bounds, str(len(one.seeds)), one.reason]


def claims(comparison: Comparison) -> tuple[Table | None, list[str]]:
    """What was claimed beside what was measured, and claims that are no figures of a method."""
    rows, texts = [], []
    levels = comparison.main_levels
    for path, value in _leaves(comparison.study.claimed):
        label = next((part for part in path if part in comparison.study.methods), None)
        names = [part for part in path if part != label]
        if label is None or len(names) != 1:
            texts.append(": ".join([*path, str(value)]))
            continue
        rows.append([label, names[0], str(value), _measured(comparison, names[0], label, levels)])
    header = ["method", "what", "claimed", f"measured{_at(levels)}"]
    return (Table("Claimed and measured", header, rows, 2) if rows else None), texts


def _measured(comparison: Comparison, name: str, label: str, levels: Levels) -> str:
    """In the metric's own unit."""
    if name == "megabytes":
        columns = [(column(f"client/{way}load_bytes"), way) for way in ("up", "down")]
        means = [
            f"{one.mean(list(comparison.values(one.metric, label, levels).values()))} {way}"
            for one, way in columns
        ]
        return f"{', '.join(means)}, per client and round"
    if name in ("time", "seconds per round") or is_timing(name):
        return "see Time"
    if name == "drop" or name.endswith(" drop"):
        others = {
            axis: level
            for axis, level in levels.items()
            if axis != (comparison.study.degradation or {}).get("axis")
        }
        found = comparison.drops(comparison.study.metric, label, others)
    else:
        found = comparison.values(QUANTITIES.get(name, name), label, levels)
    mean, std = mean_std(list(found.values()))
    return plain(mean) + (f" ± {plain(std)}" if isfinite(std) else "")


def _leaves(claimed: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(claimed, Mapping):
        for name, value in claimed.items():
            yield from _leaves(value, (*path, str(name)))
    elif isinstance(claimed, list):
        for value in claimed:
            yield from _leaves(value, path)
    elif claimed is not None:
        yield path, claimed
