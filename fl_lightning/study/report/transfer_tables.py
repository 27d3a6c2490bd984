"""The tables of negative transfer: by method over clients, and by kind of test examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

from fl_lightning.study.metric_names import Column, measure_column
from fl_lightning.study.report.comparison import Comparison, Levels
from fl_lightning.study.report.tables import ReportTable, at, interval
from fl_lightning.study.report.transfer import SeedSummary

SHARE = Column("below", "clients below zero (%)", 100, 1, " points")
HOW_TO_READ = (
    "Each client's model under a method is held against its own model of {alone}, which trained on the same "
    "batches with the same seed{rounds}, on the client's validation examples. The gain is the difference of "
    "the two, signed so that a negative one is harm: negative transfer. With few validation examples "
    "about half of all clients are below zero by chance, where nothing helps or harms. Each number is the "
    "mean over seeds of a mean, a share or a worst value over clients; the worst client may be another one "
    "with every seed, and the worst of many is partly chance. In brackets: {interval} over seeds. Clients "
    "count alike, however many examples they have."
)


def transfer_tables(comparison: Comparison) -> Iterator[ReportTable]:
    """Yield the tables of negative transfer, level by level, in the primary metric and the loss;
    none where no method trains clients alone."""
    for levels in comparison.levels:
        for of, table_of in (("client", of_clients), ("kind", of_kinds)):
            for metric in comparison.transfer.metrics(of):
                table = table_of(comparison, levels, metric)
                if table.rows:
                    yield table


def of_clients(comparison: Comparison, levels: Levels, metric: str) -> ReportTable:
    """Return what the clients of each method gain in a metric."""
    transfer, written = comparison.transfer, measure_column(metric, comparison.study.task)
    header = [
        *("method", "seeds", "clients", f"mean gain{_unit(written)}", "95 % interval", "bootstrap"),
        *(
            SHARE.title,
            f"worst gain of a client{_unit(written)}",
            f"worst client's {written.title}",
        ),
    ]
    rows = []
    for label in transfer.labels("client"):
        found = transfer.clients(levels, label, metric)
        if found is None:
            continue
        clients = " to ".join(
            str(count) for count in dict.fromkeys((found.clients[0], found.clients[-1]))
        )
        gains = ["-"] * 5
        if found.gain and found.harmed and found.worst_gain:
            gain = found.gain
            gains = [
                written.number(gain.mean, sign=True),
                interval(written, gain.low, gain.high),
                interval(written, gain.bootstrap_low, gain.bootstrap_high),
                _with_interval(SHARE, found.harmed, bounds=(0.0, 1.0)),
                _with_interval(written, found.worst_gain, sign=True),
            ]
        worst = _with_interval(written, found.worst, bounds=_range(comparison, metric))
        seeds = str(len(found.worst.values))
        rows.append([_named(comparison, label), seeds, clients, *gains, worst])
    title = f"Negative transfer in {written.title}{at(levels)}"
    return ReportTable.of(title, header, rows, caption=f"gain of a client against {transfer.alone}")


def of_kinds(comparison: Comparison, levels: Levels, metric: str) -> ReportTable:
    """Return what each method gains in each kind of test examples."""
    transfer, written = comparison.transfer, measure_column(metric, comparison.study.task)
    found = {label: transfer.kinds(levels, label, metric) for label in transfer.labels("kind")}
    found = {label: kinds for label, kinds in found.items() if kinds}
    names = dict.fromkeys(name for kinds in found.values() for name in kinds)
    header = ["kind", *(_named(comparison, label) for label in found)]
    rows = [
        [name]
        + [
            _with_interval(written, kinds[name], sign=label != transfer.alone)
            if name in kinds
            else "-"
            for label, kinds in found.items()
        ]
        for name in names
    ]
    what = f"{written.title} on test examples, and gain{_unit(written)} against {transfer.alone}"
    title = f"Negative transfer by kind in {written.title}{at(levels)}"
    return ReportTable.of(title, header, rows, caption=what)


def _named(comparison: Comparison, label: str) -> str:
    return f"{label} (alone)" if label == comparison.transfer.alone else label


def _range(comparison: Comparison, metric: str) -> tuple[float, float]:
    """Return the least and the largest value that a measure can have."""
    if comparison.study.task.is_share(metric.rpartition("/")[2]):
        return 0.0, 1.0
    return float(metric.endswith("perplexity")), inf


def _unit(written: Column) -> str:
    return f" ({written.unit.strip()})" if written.unit else ""


def _with_interval(
    written: Column,
    found: SeedSummary,
    *,
    sign: bool = False,
    bounds: tuple[float, float] = (float("-inf"), float("inf")),
) -> str:
    """Write a mean over seeds and, where it is known, its interval within the bounds of what can
    be."""
    low, high = (min(max(end, bounds[0]), bounds[1]) for end in (found.low, found.high))
    ends = f" {interval(written, low, high, sign)}" if isfinite(low) else ""
    return written.number(found.mean, sign) + ends


def how_to_read(comparison: Comparison) -> str:
    """Return what the numbers of the tables are."""
    kind = "the 95 % confidence sequence" if comparison.is_sequential else "the 95 % t interval"
    chosen = comparison.study.selection == "best_val"
    rounds = ", each in the round that its own validation chose" if chosen else ""
    text = HOW_TO_READ.format(alone=comparison.transfer.alone, interval=kind, rounds=rounds)
    controls = ", ".join(label for label in comparison.labels if label in comparison.study.controls)
    return text + (
        f" Left out, since clients hold other examples there: {controls}." if controls else ""
    )


def document(comparison: Comparison) -> dict[str, Any]:
    """Return all of it for ``report.json``, under the key ``transfer``; nothing without a
    reference."""
    transfer = comparison.transfer
    if not transfer.alone:
        return {}
    levels = [
        {
            "levels": dict(levels),
            "methods": {
                label: _of_method(comparison, levels, label) for label in transfer.labels("client")
            },
            "kinds": {
                label: _of_kinds(comparison, levels, label) for label in transfer.labels("kind")
            },
        }
        for levels in comparison.levels
    ]
    return {"transfer": {"alone": transfer.alone, "levels": levels}}


def _of_method(comparison: Comparison, levels: Levels, label: str) -> dict[str, Any]:
    found = {}
    for metric in sorted(set(comparison.transfer.frame.metric)):
        of = comparison.transfer.clients(levels, label, metric)
        if of is not None:
            summaries: Mapping[str, SeedSummary | None] = {
                "transfer/mean": of.gain,
                "transfer/below_zero": of.harmed,
                "transfer/worst": of.worst_gain,
                f"client/worst_{metric}": of.worst,
            }
            found[metric] = {
                "clients": list(of.clients),
                **{name: asdict(summary) for name, summary in summaries.items() if summary},
            }
    return found


def _of_kinds(comparison: Comparison, levels: Levels, label: str) -> dict[str, Any]:
    transfer = comparison.transfer
    return {
        metric: {
            name: asdict(summary) for name, summary in transfer.kinds(levels, label, metric).items()
        }
        for metric in sorted(set(transfer.frame.metric))
    }
