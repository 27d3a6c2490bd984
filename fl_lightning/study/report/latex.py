"""The tables of a report as LaTeX for a paper: ``tables.tex`` and ``timings.tex``.

They need the packages booktabs and graphicx. A table that is wider than the line is shrunk to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from textwrap import wrap

import pandas as pd

from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.errors import InputError, require
from fl_lightning.study.metric_names import OF_EVERY_METHOD, Column, direction, with_own_titles
from fl_lightning.study.plan.quantities import metric_of
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.plan.selection import ACCURACY
from fl_lightning.study.report import tables
from fl_lightning.study.report.comparison import Comparison, Levels
from fl_lightning.study.report.overall import overall_table, proposed_table
from fl_lightning.study.report.places import places_table
from fl_lightning.study.report.tables import ReportTable
from fl_lightning.study.report.transfer_tables import transfer_tables

HEAD = "% in the preamble: \\usepackage{booktabs,graphicx}\n"
ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "%&_#${}"}
    | {character: f"${character}$" for character in "<>="}
    | {
        "\\": r"\textbackslash{}",
        "|": r"\textbar{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    | {"±": r"$\pm$", "−": "$-$"}
)
"""How characters that mean something to LaTeX are written."""
HEADER_WIDTH = 14
"""Characters of a line of a header."""
NOT_ON_PAPER = ("bootstrap", "p (t)", "p (sequence)", "p (Wilcoxon)", "detectable", "seeds needed")
"""Columns of the table of differences that are in the report alone."""
FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Shrinks a table to the line, and leaves one that fits as it is."""


@dataclass(frozen=True)
class Layout:
    """What the user asks of the table of results.

    Args:
        columns: its metrics, or quantities of criteria such as ``ece``; empty: the headline metrics
            without those in which all rows are the same.
        caption: its caption in LaTeX; empty: what the report says of the table.
        label: the label of the table, from which those of all others are made; empty: ``tab:`` and
            the name of the study.
    """

    columns: Sequence[str] = ()
    caption: str = ""
    label: str = ""

    @classmethod
    def read(cls, columns: str | None, caption: str | None, label: str | None) -> Layout:
        """Return the layout that the flags of ``compare`` ask for.

        Raises:
            InputError: a name is empty, or the label cannot be one.
        """
        names = [] if columns is None else [name.strip() for name in columns.split(",")]
        given, rule = f"--columns {columns}", "it is names of metrics with commas between them"
        require(all(names), given, rule, "write --columns accuracy,ece,upload")
        rule = "a label has letters, digits and : . _ / -"
        is_label = label is None or re.fullmatch(r"[\w:./-]+", label, re.ASCII)
        require(is_label, f"--label {label}", rule, "write --label tab:results")
        return cls(names, caption or "", label or "")

    def metrics(self, comparison: Comparison) -> list[Column]:
        """Return the columns that are asked for.

        Raises:
            InputError: no run has one of them.
        """
        study = comparison.study
        found: dict[str, Column] = {}
        for name in self.columns:
            is_other_task = name == ACCURACY != study.task.primary
            meant = None if is_other_task else metric_of(name, study.selection, study.task.primary)
            metric = name if name in comparison.metrics or meant is None else meant
            if metric not in comparison.metrics:
                known = [
                    *comparison.metrics,
                    "primary",
                    "auc",
                    "ece",
                    "bytes",
                    "upload",
                    "download",
                ]
                raise InputError(
                    f"--columns {name}",
                    "no run has this metric",
                    f"write {nearest_or_list(name, known)}",
                )
            found[metric] = comparison.column(metric)
        return with_own_titles([*found.values()])


def tables_tex(comparison: Comparison, layout: Layout) -> str:
    """Return the tables of results, places, bits, differences and negative transfer, level by
    level."""
    base = layout.label or f"tab:{_slug(comparison.study.name)}"
    parts = []
    for levels in comparison.levels:
        table, bold = results(comparison, levels, layout)
        caption = layout.caption + (f" ({escaped(level_key(levels))})" if levels else "")
        parts.append(
            latex(table, _label(base, "", levels), caption if layout.caption else "", bold)
        )
    if (proposed := proposed_table(comparison)) is not None:
        parts.append(latex(proposed, _label(base, "place")))
    if (every := overall_table(comparison)) is not None:
        parts.append(latex(every, _label(base, "overall")))
    for kind in (places_table, tables.bits, tables.differences):
        for levels in comparison.levels:
            if (found := kind(comparison, levels)) is not None:
                label = _label(base, kind.__name__.removesuffix("_table"), levels)
                parts.append(latex(found.without(*NOT_ON_PAPER), label))
    for number, table in enumerate(transfer_tables(comparison), start=1):
        parts.append(latex(table, _label(base, f"transfer{number}")))
    return _with_own_labels("\n".join([HEAD, *parts]))


def timings_tex(comparison: Comparison, layout: Layout) -> str:
    """Return the tables of what a clock measured."""
    base = layout.label or f"tab:{_slug(comparison.study.name)}"
    made = ((tables.clocks(comparison, levels), levels) for levels in comparison.levels)
    return _with_own_labels(
        "\n".join([HEAD, *(latex(table, _label(base, "time", levels)) for table, levels in made)])
    )


def _with_own_labels(text: str) -> str:
    """Number labels that levels share, such as those of ``p q`` and ``p+q``."""
    seen = Counter[str]()

    def numbered(found: re.Match[str]) -> str:
        seen[found[1]] += 1
        return found[0] if seen[found[1]] == 1 else f"\\label{{{found[1]}-{seen[found[1]]}}}"

    return re.sub(r"\\label\{([^}]*)\}", numbered, text)


def _label(base: str, kind: str, levels: Levels | None = None) -> str:
    return "-".join(filter(None, (base, kind, _slug(level_key(levels or {})))))


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")


def results(
    comparison: Comparison, levels: Levels, layout: Layout
) -> tuple[ReportTable, set[tuple[int, int]]]:
    """Return the table of results for a paper, and the row and column of each cell that has the
    best mean of its column.

    Headers are short. Unless columns were chosen, there is none in which all rows are the same,
    other than the primary metric.
    """
    columns = layout.metrics(comparison) or tables.headline_of(comparison)
    table = tables.means_of(
        comparison, levels, columns, f"Results{tables.at(levels)}", best_first=True
    )
    labels, places, seeds = list(table.cells.method), dict[str, int](), "over seeds"
    cells = pd.DataFrame({"method": labels})
    if table.cells.seeds.nunique() > 1:
        cells["seeds"] = table.cells.seeds
    elif labels:
        seeds = f"over {table.cells.seeds[0]} seed{'s' * (table.cells.seeds[0] != '1')}"
    taken = {*OF_EVERY_METHOD, *(one.title for one in columns)}
    for number, one in enumerate(columns):
        is_constant = table.cells[one.title].nunique() == 1 < len(labels)
        if layout.columns or number == 0 or not is_constant:
            name = one.short if one.short and one.short not in taken else one.title
            taken.add(name)
            cells[name] = table.cells[one.title]
            places[one.metric] = len(cells.columns) - 1
    bold, shown = set(), [one for one in columns if one.metric in places]
    for one in shown:
        if not comparison.unlike_rounds(one.metric, levels):
            means = comparison.table(one.metric, levels).mean()[labels]
            bold |= {(row, places[one.metric]) for row in _best(one, means.tolist(), comparison)}
    best = "; the best mean is bold" if bold else ""
    caption = f"{tables.model_of(comparison)}; mean ± standard deviation {seeds}{best}"
    caption = "; ".join([caption, *tables.unlike(comparison, levels, shown)])
    return replace(table, cells=cells, caption=caption), bold


def _best(one: Column, means: Sequence[float], comparison: Comparison) -> list[int]:
    """Return which of the means are written as the best one is; none where it is not known what is
    better, or all are equal."""
    better = direction(one.metric, comparison.study.task)
    finite = [mean for mean in means if isfinite(mean)]
    if better is None or len(finite) < 2:
        return []
    best = one.number(max(finite) if better > 0 else min(finite))
    found = [row for row, mean in enumerate(means) if one.number(mean) == best]
    return found if len(found) < len(finite) else []


def latex(
    table: ReportTable,
    label: str,
    caption: str = "",
    bold: Collection[tuple[int, int]] = frozenset(),
) -> str:
    """Return a table environment with the rules of booktabs.

    Args:
        table: the table.
        label: its label.
        caption: its caption, in LaTeX; empty: its title and its own caption.
        bold: row and column of the cells that are bold.
    """
    rows = [[escaped(cell) for cell in row] for row in table.rows]
    for row, column in bold:
        rows[row][column] = f"\\textbf{{{rows[row][column]}}}"
    for row_ in rows:  # after the \\ of the line above, a first [ or * would be its argument
        row_[0] = re.sub(r"^[\[*]", r"{\g<0>}", row_[0])
    aligned = "l" * table.texts + "r" * (len(table.header) - table.texts)
    header = [_header(name, side) for name, side in zip(table.header, aligned, strict=True)]
    return "\n".join(
        [
            f"% {table.line}",
            r"\begin{table}[t]",
            r"\centering",
            f"\\caption{{{caption or escaped(table.line) + '.'}}}",
            f"\\label{{{label}}}",
            r"\smallskip\small\setlength{\tabcolsep}{4pt}",
            FIT,
            f"\\begin{{tabular}}{{{aligned}}}",
            r"\toprule",
            *_lines([header]),
            r"\midrule",
            *_lines(rows),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    return [" & ".join(row) + r" \\" for row in rows]


def escaped(text: str) -> str:
    return text.translate(ESCAPES)


def _header(name: str, side: str) -> str:
    """Return a header, of several lines where it is long."""
    lines = [escaped(line) for line in wrap(name, HEADER_WIDTH, break_long_words=False)]
    stacked = r" \\ ".join(lines)
    return stacked if len(lines) < 2 else f"\\shortstack[{side}]{{{stacked}}}"
