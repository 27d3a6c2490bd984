"""The tables of a report, as text in cells; and a table as Markdown or for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from fl_lightning.study.metric_names import (
    CLOCKS,
    OF_EVERY_METHOD,
    OF_THE_RUN,
    Column,
    column,
    headline,
    is_timing,
    p_value,
    plain,
    seeds,
    words_of,
)
from fl_lightning.study.plan.quantities import PRIMARY, metric_of
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.plan.selection import ACCURACY, described, selected_metrics
from fl_lightning.study.plan.tuned import TunedRecord
from fl_lightning.study.report.comparison import Comparison, Difference, Levels
from fl_lightning.study.report.judging import Judgement
from fl_lightning.study.report.verdicts import Verdict, premise_verdicts
from fl_lightning.study.report.verdicts import verdicts as every_verdict
from fl_lightning.study.results.labels import short_names
from fl_lightning.study.statistics import mean_std

AVERAGE, LAYER = "bits/average", "bits/layer/"
"""The metric of the average, and the beginning of the metrics of the layers."""
FULL_PRECISION = 32
"""Bits of a method that does not quantise."""
MOST_PAIRS = 100
"""Differences of one level that a report names one by one."""
BIT_CHANGES = {
    "total/bits_pruned": "bit planes that clients pruned, all rounds",
    "total/bits_moved": "changes of a layer's width by the server, all rounds",
}
"""The sums over rounds below the table of bits."""
OVER_SEEDS = "mean ± standard deviation over seeds"
"""What a cell of most tables holds."""
BETWEEN_COLUMNS = 3
"""Characters between two columns of a table in the terminal."""
LONGEST_WORD = 24
"""Characters of the longest word of text that a table in the terminal does not split."""
STYLES = {"holds": "green", "fails": "red", "undecided": "yellow", "not tested": "magenta"}
"""Colours of decisions in the terminal."""


@dataclass(frozen=True)
class ReportTable:
    """A table of a report.

    Args:
        title: its heading, a few words.
        cells: the text of its cells.
        texts: the number of leading columns that are text; the others are numbers.
        caption: what its numbers are; it begins with a small letter and has no full stop.
    """

    title: str
    cells: pd.DataFrame
    texts: int = 1
    caption: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        header: list[str],
        rows: Sequence[Sequence[str]],
        texts: int = 1,
        caption: str = "",
    ) -> ReportTable:
        return cls(title, pd.DataFrame(list(rows), columns=header, dtype=object), texts, caption)

    @property
    def line(self) -> str:
        """Title and caption in one line."""
        return f"{self.title}: {self.caption}" if self.caption else self.title

    @property
    def header(self) -> list[str]:
        return list(self.cells.columns)

    @property
    def rows(self) -> list[list[str]]:
        return self.cells.to_numpy().tolist()

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["---"] * self.texts + ["---:"] * (len(self.header) - self.texts)
        lines = [
            " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line)
            for line in (self.header, *self.rows)
        ]
        lines.insert(1, " | ".join(rule))
        return "\n".join(f"| {line} |" for line in lines)

    def without(self, *names: str) -> ReportTable:
        """Return the table without some columns."""
        texts = sum(name not in names for name in self.header[: self.texts])
        cells = self.cells.drop(columns=[*names], errors="ignore")
        return replace(self, cells=cells, texts=texts)

    def rich(self, width: int) -> Table:
        """Return the columns that fit in a terminal of ``width`` characters, from the left, without
        Markdown's marks: no number is split, and no heading inside a word."""
        title = Text(self.line, style="bold")  # no text of a report is rich's markup
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        plain = self.cells.map(lambda cell: cell.replace("**", "").replace("`", ""))
        left = width - 2  # the edges
        for i, name in enumerate(self.header):
            whole = [*name.split(), *plain[name]]
            words = [min(len(word), LONGEST_WORD) for text in whole for word in text.split()]
            least = max(words if i < self.texts else map(len, whole))
            if least > left and i:
                table.caption, table.caption_justify = "other columns: report.md", "left"
                break
            left -= least + BETWEEN_COLUMNS
            side: JustifyMethod = "left" if i < self.texts else "right"
            table.add_column(Text(name), justify=side, min_width=least, overflow="fold")
        for row in plain.to_numpy()[:, : len(table.columns)]:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        return table


def at(levels: Levels) -> str:
    """Return the end of a title: at which levels the numbers are."""
    return f" at {level_key(levels)}" if levels else ""


def results(comparison: Comparison, levels: Levels) -> ReportTable:
    """Return mean and standard deviation of the headline metrics, by method, the best first.

    All columns are of the model that the study selects, or of the whole run.
    """
    of = f"{model_of(comparison)}; {OVER_SEEDS}"
    return means_of(
        comparison, levels, headline_of(comparison), f"Results{at(levels)}", of, best_first=True
    )


def model_of(comparison: Comparison) -> str:
    """Return which model the tables are of, in words."""
    return described(comparison.study.selection, comparison.study.task.primary_in_words)


def headline_of(comparison: Comparison) -> list[Column]:
    """Return the columns of the table of results."""
    study = comparison.study
    selected = selected_metrics(study.selection, study.task.primary)
    return headline(study.metric, selected, comparison.metrics, study.task)


def other_results(comparison: Comparison, levels: Levels) -> ReportTable | None:
    """Return the same of the model that the study does not select; None where no run has it."""
    other = comparison.other
    of_the_run = (*OF_THE_RUN, metric_of("auc", other.study.selection, other.study.task.primary))
    columns = [
        one
        for one in headline_of(other)
        if one.metric not in of_the_run and _is_complete(other, one.metric, levels)
    ]
    if not columns:
        return None
    of = f"{model_of(other)}; {OVER_SEEDS}"
    return means_of(other, levels, columns, f"Beside it{at(levels)}", of, best_first=True)


def _is_complete(comparison: Comparison, metric: str, levels: Levels) -> bool:
    """Return whether all runs of a method have the metric, or none has, whatever the method.

    What ``test`` measured of the model that was selected can be of the other one by chance, in some
    seeds.
    """
    counts = comparison.table(metric, levels).count()
    return all(
        counts[label] in (0, len(comparison.runs(label, levels))) for label in comparison.labels
    )


def bits(comparison: Comparison, levels: Levels) -> ReportTable | None:
    """Return the bits that every quantised method ends with, layer by layer, and how often they
    changed.

    None where no method has bits.
    """
    means = comparison.means(AVERAGE, levels)
    quantised = [
        label for label in comparison.labels if means.get(label, FULL_PRECISION) < FULL_PRECISION
    ]
    if not quantised:
        return None
    layers = [name for name in comparison.metrics if name.startswith(LAYER)]
    rows = [
        (AVERAGE, "average"),
        *((name, name.removeprefix(LAYER)) for name in _in_order(comparison, layers)),
    ]
    rows += [(name, said) for name, said in BIT_CHANGES.items() if name in comparison.metrics]
    cells = [
        [
            said,
            *(
                column(name).mean(comparison.values(name, label, levels).tolist())
                for label in quantised
            ),
        ]
        for name, said in rows
    ]
    title, model = f"Magnitude bits per weight{at(levels)}", model_of(comparison).partition(",")[0]
    return ReportTable.of(title, ["layer", *quantised], cells, caption=f"{model}; {OVER_SEEDS}")


def _in_order(comparison: Comparison, layers: Sequence[str]) -> list[str]:
    """Return metrics in the order in which the runs record them, which is that of the network."""
    recorded = (
        name for run in comparison.results.runs for row in run.record.history[-1:] for name in row
    )
    place = {name: number for number, name in enumerate(dict.fromkeys(recorded))}
    return sorted(layers, key=lambda name: (place.get(name, len(place)), name))


def clocks(comparison: Comparison, levels: Levels) -> ReportTable:
    """Return mean and standard deviation of what a clock measured, by method."""
    measured = [name for name in comparison.metrics if is_timing(name)]
    names = dict.fromkeys([*(one.metric for one in CLOCKS if one.metric in measured), *measured])
    columns = [column(name) for name in names]
    return means_of(comparison, levels, columns, f"Measured times{at(levels)}", OVER_SEEDS)


def target(comparison: Comparison, levels: Levels) -> ReportTable | None:
    """Return rounds, megabytes and virtual seconds until the target, and how many seeds reach
    it."""
    value, task = comparison.study.target_value, comparison.study.task
    if value is None:
        return None
    columns = [column("target/rounds"), column("target/megabytes")]
    seconds = f"target/seconds_to_{task.primary}"
    columns += [column(seconds, task)] if seconds in comparison.metrics else []
    shown = f"{value:.1%} test {words_of(task.primary)}"
    if not task.is_share(task.primary):
        shown = f"a test {words_of(task.primary)} of {value:g}"
    table = means_of(comparison, levels, columns, f"Until {shown}{at(levels)}")
    counts = [_reached(comparison, row[0], levels) for row in table.rows]
    return replace(table, cells=table.cells.assign(**{"seeds that reach it": counts}))


def _reached(comparison: Comparison, label: str, levels: Levels) -> str:
    """Return how many seeds of a method reach the target, which is not known of published ones with
    another target."""
    rounds = [run.metrics.get("target/rounds") for run in comparison.runs(label, levels).values()]
    if None in rounds:
        return "not known"
    return f"{sum(isfinite(one) for one in rounds)} of {len(rounds)}"  # type: ignore[arg-type]


def means_of(
    comparison: Comparison,
    levels: Levels,
    columns: Sequence[Column],
    title: str,
    caption: str = "",
    *,
    best_first: bool = False,
) -> ReportTable:
    """Return mean and standard deviation of some metrics, by method.

    The caption names those that cannot be compared, since runs are of unlike rounds.
    """
    counts = {label: len(comparison.runs(label, levels)) for label in comparison.labels}
    labels = [label for label in comparison.labels if counts[label]]
    if best_first:
        ordered = comparison.order(comparison.study.metric, levels)
        labels.sort(key=lambda label: ordered.index(label) if label in ordered else len(ordered))
    cells = {one.title: comparison.table(one.metric, levels) for one in columns}

    def written(label: str, one: Column) -> str:
        values = cells[one.title][label].dropna().tolist()
        some = 0 < len(values) < counts[label]
        return one.mean(values) + (f" ({len(values)} of {counts[label]})" if some else "")

    rows = [
        [label, str(counts[label]), *(written(label, one) for one in columns)] for label in labels
    ]
    caption = "; ".join(filter(None, (caption, *unlike(comparison, levels, columns))))
    return ReportTable.of(title, [*OF_EVERY_METHOD, *cells], rows, caption=caption)


def unlike(comparison: Comparison, levels: Levels, columns: Sequence[Column]) -> Iterator[str]:
    """Yield of each column that cannot be compared, since runs are of unlike rounds, that it
    cannot."""
    for one in columns:
        if rounds := comparison.unlike_rounds(one.metric, levels):
            yield f"{one.title}: of runs of {rounds} rounds, not to be compared where these differ"


def differences(comparison: Comparison, levels: Levels) -> ReportTable | None:
    """Return the tests of the primary metric; None where there is one method alone."""
    written = comparison.column(comparison.study.metric)
    tested = comparison.differences(comparison.study.metric, levels)
    if not tested:
        return None
    caption = f"in {written.title}, paired by seed"
    shown = tested
    if len(tested) > MOST_PAIRS:
        shown = sorted(tested, key=lambda one: (isnan(one.test.p_t), one.test.p_t))[:MOST_PAIRS]
        caption += (
            f"; of {len(tested)} pairs the {MOST_PAIRS} with the smallest p, report.json has all"
        )
    rows = [{"difference": f"{one.a} − {one.b}", **difference_cells(one, "mean")} for one in shown]
    return ReportTable(
        f"Differences{at(levels)}", pd.DataFrame(rows, dtype=object), caption=caption
    )


def tuned(record: TunedRecord) -> ReportTable:
    """Return what ``tune`` chose for each method, and how good it was on validation."""
    names = short_names({key: None for one in record.chosen.values() for key in one.settings})
    rows = [
        [
            label,
            ", ".join(f"{names[key]} {_rounded(value)}" for key, value in one.settings.items()),
            f"{one.value:.4g}",
            f"{one.finished} finished, {one.pruned} pruned, {one.failed} failed",
        ]
        for label, one in record.chosen.items()
    ]
    return ReportTable.of(
        "Settings that tune chose", ["method", "chosen", record.metric, "trials"], rows
    )


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def difference_cells(one: Difference, name: str) -> dict[str, str]:
    """Return a test by column; ``name`` is what its mean is called."""
    written, test = one.column, one.test
    return {
        "seeds": str(test.n) + (f" ({len(one.unpaired)} unpaired)" if one.unpaired else ""),
        f"{name}{written.unit}": written.number(test.mean, sign=True),
        "95 % interval": interval(written, test.low, test.high),
        "bootstrap": interval(written, test.bootstrap_low, test.bootstrap_high),
        "p (sequence)" if test.sequential else "p (t)": p_value(test.p_t),
        "p (Holm)": p_value(test.p_holm),
        "p (Wilcoxon)": p_value(test.p_wilcoxon),
        "g_z": f"{test.g_z:+.2f}".replace("-", "−") if isfinite(test.g_z) else "-",
        "detectable": written.number(test.detectable),
        "seeds needed": seeds(test.seeds_needed),
    }


def interval(written: Column, low: float, high: float, sign: bool = True) -> str:
    return f"[{written.number(low, sign)}, {written.number(high, sign)}]" if isfinite(low) else "-"


def degradation(comparison: Comparison) -> ReportTable | None:
    """Return how much is lost under stress, against the same seed without it."""
    entry = comparison.study.degradation
    if not entry:
        return None
    rows = [
        {
            "method": f"{label} ({level_key(others)})" if others else label,
            **difference_cells(one, "drop"),
        }
        for others, label, one in comparison.degradations()
    ]
    sides = f"{entry['clean']} against {entry['stressed']}"
    what = comparison.column(comparison.study.metric).title
    caption = f"of {what}, {sides}; positive: worse under stress"
    table = ReportTable(
        f"Degradation by {entry['axis']}", pd.DataFrame(rows, dtype=object), caption=caption
    )
    return table.without("p (Holm)", "p (Wilcoxon)", "detectable", "seeds needed")


def verdicts(comparison: Comparison, timing: bool, title: str = "Criteria") -> ReportTable | None:
    """Return criteria and their verdicts; those on time apart, because they differ from machine to
    machine."""
    chosen = [verdict for verdict in every_verdict(comparison) if verdict.is_timing == timing]
    return _verdict_table(title, "criterion", chosen)


def premises(comparison: Comparison, timing: bool) -> ReportTable | None:
    """Return the premises and whether they hold; those on time apart."""
    chosen = [verdict for verdict in premise_verdicts(comparison) if verdict.is_timing == timing]
    return _verdict_table("Premises", "premise", chosen)


def _verdict_table(title: str, what: str, judged: Sequence[Verdict]) -> ReportTable | None:
    if not judged:
        return None
    header = [what, "verdict", "left", "right", "left − right", "95 % interval", "seeds", "because"]
    return ReportTable.of(
        title, header, [row for verdict in judged for row in _verdict_rows(verdict)], 2
    )


def _verdict_rows(verdict: Verdict) -> Iterator[list[str]]:
    """Return a line per level, below one of the whole criterion where there are several levels."""
    criterion, several = verdict.criterion, len(verdict.judgements) > 1
    name = f"{criterion.name}: `{criterion.text}`" if criterion.name else f"`{criterion.text}`"
    if criterion.claim:
        name += f" ({criterion.claim})"
    if several:
        because = f"holds at {verdict.count('holds')} of {len(verdict.judgements)} levels"
        because += (
            f"; {verdict.needed} are needed" if verdict.needed < len(verdict.judgements) else ""
        )
        yield [name, f"**{verdict.decision}**", "", "", "", "", "", because]
    for levels, one in verdict.judgements:
        first = (
            [f"... {level_key(levels)}", one.decision] if several else [name, f"**{one.decision}**"]
        )
        yield [*first, *judgement_cells(one)]
        for text, part in one.parts:
            yield [f"... ... `{text}`", part.decision, *judgement_cells(part)]


def judgement_cells(one: Judgement) -> list[str]:
    bounds = f"[{plain(one.low)}, {plain(one.high)}]" if isfinite(one.low) else "-"
    return [
        plain(one.left),
        plain(one.right),
        plain(one.difference),
        bounds,
        str(len(one.seeds)),
        one.reason,
    ]


def claims(comparison: Comparison) -> tuple[ReportTable | None, list[str]]:
    """Return what was claimed beside what was measured, and the claims that are no figures of a
    method."""
    rows, texts = [], []
    levels = comparison.main_levels
    for path, value in _leaves(comparison.study.claimed):
        label = next((part for part in path if part in comparison.study.methods), None)
        names = [part for part in path if part != label]
        if label is None or len(names) != 1:
            texts.append(": ".join([*path, str(value)]))
            continue
        rows.append([label, names[0], str(value), _measured(comparison, names[0], label, levels)])
    header = ["method", "what", "claimed", f"measured{at(levels)}"]
    return (ReportTable.of("Claimed and measured", header, rows, 2) if rows else None), texts


def _measured(comparison: Comparison, name: str, label: str, levels: Levels) -> str:
    """Return what the runs gave for a claimed figure, in the metric's own unit."""
    if name == "megabytes":
        columns = {way: column(f"client/{way}load_bytes") for way in ("up", "down")}
        means = [
            f"{one.mean(comparison.values(one.metric, label, levels).tolist())} {way}"
            for way, one in columns.items()
        ]
        return f"{', '.join(means)}, per counted upload"
    if name in ("time", "seconds per round") or is_timing(name):
        return "see Time"
    if name == "drop" or name.endswith(" drop"):
        (others,) = comparison.without_stressor([levels])
        found = comparison.drops(comparison.study.metric, label, others)
    else:
        study = comparison.study
        quantity, primary = PRIMARY if name == study.task.primary else name, study.task.primary
        of_other_task = name == ACCURACY != primary
        meant = None if of_other_task else metric_of(quantity, study.selection, primary)
        metric = meant or name
        found = comparison.measured(metric, label, levels)
    mean, std = mean_std(found)
    return plain(mean) + (f" ± {plain(std)}" if isfinite(std) else "")


def _leaves(claimed: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values in nested mappings and lists, each with its keys."""
    if isinstance(claimed, Mapping):
        for name, value in claimed.items():
            yield from _leaves(value, (*path, str(name)))
    elif isinstance(claimed, list):
        for value in claimed:
            yield from _leaves(value, path)
    elif claimed is not None:
        yield path, claimed
