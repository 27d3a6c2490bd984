"""``report.md``: tables, verdicts, and in sentences what they do not say."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from fl_lightning.study.metric_names import seeds
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.plan.selection import ACCURACY
from fl_lightning.study.plan.tuned import TunedRecord
from fl_lightning.study.report import tables
from fl_lightning.study.report.comparison import Comparison, Difference, Levels
from fl_lightning.study.report.document import provenance
from fl_lightning.study.report.judging import DECISIONS
from fl_lightning.study.report.overall import overall_table, proposed_table
from fl_lightning.study.report.pareto import pareto_table
from fl_lightning.study.report.places import places_table
from fl_lightning.study.report.registered import NOT_REGISTERED, RegistrationReport
from fl_lightning.study.report.transfer_tables import how_to_read as how_to_read_transfer
from fl_lightning.study.report.transfer_tables import transfer_tables
from fl_lightning.study.report.unequal import (
    lost_uploads,
    missing_seeds,
    unequal_code,
    unequal_methods,
    unequal_seeds,
)
from fl_lightning.study.report.verdicts import verdicts
from fl_lightning.study.statistics import POWER

SAME_CONDITIONS = "both methods met the same partition, cohorts, drop-outs and noise"
HOW_TO_READ = (
    f"Differences are paired by seed: {SAME_CONDITIONS}. "
    "The 95 % t interval decides criteria; the bootstrap (BCa) beside it is too narrow below about "
    "ten seeds. p (Holm) is the t-test's, corrected for all pairs of its level, and decides "
    "winners and pairs; Wilcoxon's cannot be below 2^(1 − n) with n seeds. g_z is the mean in "
    "standard deviations of the differences, corrected for small samples; detectable: the true "
    "difference that so many seeds find with "
    f"{POWER:.0%} probability at the strictest step of the correction; seeds needed: to find an "
    "effect of g_z so. A criterion holds when its whole interval satisfies it and fails when none "
    "of it does. Bytes and epsilon, which are counted, need no interval: all seeds satisfy it, or none; "
    "so it is with counts over rounds that are the same in all seeds. It is computed in raw units "
    "(accuracies in [0, 1], bytes, seconds) and is not corrected for the other criteria. It is not "
    "tested where one of its premises fails, and undecided where one is undecided. Each part of an "
    "`and` or `or`, and each level, keeps its own 95 %."
)
IN_A_SEQUENCE = {
    "The 95 % t interval decides criteria; the bootstrap (BCa) beside it is too narrow below about ten "
    "seeds. ": (
        "Seeds were added until the criteria were decided, so that the interval that decides them "
        "is that of a 95 % confidence sequence: with 95 % probability it holds the true mean after "
        "every number of seeds, however often one looks (Wang & Ramdas 2023, theorem 4.9, for "
        "normal differences). The bootstrap "
        "(BCa) and Wilcoxon's p beside it are not valid under such looks. "
    ),
    "p (Holm) is the t-test's,": "p (sequence) is valid at every look; p (Holm) is the same,",
}
"""What of :data:`HOW_TO_READ` is said otherwise where seeds are added."""


def how_to_read(comparison: Comparison) -> str:
    """Return what the numbers of the report mean."""
    text = HOW_TO_READ
    for fixed, sequential in IN_A_SEQUENCE.items() if comparison.is_sequential else ():
        text = text.replace(fixed, sequential)
    if unequal_methods(comparison):
        text = text.replace(SAME_CONDITIONS, f"{SAME_CONDITIONS}, but for the settings named above")
    if comparison.study.task.primary == ACCURACY:
        return text
    return text.replace("(accuracies in", "(shares in")


def markdown(
    comparison: Comparison,
    figures: Sequence[str],
    empty: Sequence[str] = (),
    registration: RegistrationReport = NOT_REGISTERED,
) -> str:
    """Return the report.

    Args:
        comparison: what the report is about.
        figures: the names of the figures in ``figures/``.
        empty: the names of the figures that have nothing to show.
        registration: whether it asks what was registered; the line below the title says so.
    """
    return (
        "\n\n".join(part for part in _parts(comparison, figures, empty, registration) if part)
        + "\n"
    )


def _parts(
    comparison: Comparison,
    figures: Sequence[str],
    empty: Sequence[str],
    registration: RegistrationReport,
) -> Iterator[str]:
    study = comparison.study
    yield f"# {study.name}"
    yield registration.line
    yield from answers(comparison)
    yield from _at_each_level(comparison, tables.results)
    yield _section(proposed_table(comparison))
    yield _section(overall_table(comparison))
    yield from _at_each_level(comparison, places_table)
    yield _section(pareto_table(comparison))
    yield from _at_each_level(comparison, tables.bits)
    yield f"Primary metric: `{study.metric}`; selection: `{study.selection}`. {_setup(comparison)}"
    yield _averaged(comparison)
    yield from _at_each_level(comparison, tables.other_results)
    yield from _tuned(comparison)
    yield _section(tables.premises(comparison, timing=False))
    for one, title in criteria_tables(comparison, registration):
        yield _section(tables.verdicts(one, timing=False, title=title))
    yield from _at_each_level(comparison, tables.differences)
    yield how_to_read(comparison)
    yield _section(tables.degradation(comparison))
    for number, table in enumerate(transfer_tables(comparison)):
        yield _section(table)
        yield how_to_read_transfer(comparison) if number == 0 else ""
    yield from _at_each_level(comparison, tables.target)
    yield "## What is not decided"
    yield "\n".join(f"- {line}" for line in undecided(comparison))
    yield from _claims(comparison)
    yield "## Figures"
    yield "\n\n".join(f"![{name}](<figures/{name}.png>)" for name in figures)
    if unseen := list(dict.fromkeys(run.label for run in comparison.results.runs if run.published)):
        names = ", ".join(unseen)
        yield f"Rounds of published runs are not published: no curve over them shows {names}."
    if empty:
        yield (
            "Not drawn, since no run, or no pair of runs with one seed, has what they show: "
            f"{', '.join(empty)}."
        )
    yield from _not_counted(comparison)
    yield "## Time"
    yield (
        "Measured by a clock, on whatever else the machine was doing: median seconds of a round "
        "after the first three. Two sweeps of one study agree in everything above; in what follows "
        "they do not."
    )
    yield from _at_each_level(comparison, tables.clocks, "###")
    yield _section(tables.premises(comparison, timing=True), "###")
    for one, title in criteria_tables(comparison, registration):
        yield _section(tables.verdicts(one, timing=True, title=title), "###")
    yield from _provenance(comparison, registration)


def criteria_tables(
    comparison: Comparison, registration: RegistrationReport
) -> Iterator[tuple[Comparison, str]]:
    """Yield whose criteria are judged, and the title of their table: the registered ones first."""
    if registration.registered is not None:
        metric = registration.registered.study.metric
        yield registration.registered, f"Criteria as registered, with metric {metric}"
    changed = registration.status == "not as registered"
    yield (
        comparison,
        f"Criteria as they are now, with metric {comparison.study.metric}"
        if changed
        else "Criteria",
    )


def _at_each_level(
    comparison: Comparison,
    table: Callable[[Comparison, Levels], tables.ReportTable | None],
    marks: str = "##",
) -> Iterator[str]:
    return (_section(table(comparison, levels), marks) for levels in comparison.levels)


def _section(table: tables.ReportTable | None, marks: str = "##") -> str:
    if table is None:
        return ""
    parts = f"{marks} {table.title}", _sentence(table.caption), table.markdown()
    return "\n\n".join(filter(None, parts))


def answers(comparison: Comparison) -> Iterator[str]:
    """Yield the answer in a few sentences, level by level."""
    for levels in comparison.levels:
        ranking = comparison.ranking(levels)
        where = f"At {level_key(levels)}: " if levels else ""
        winner = f"winner: {ranking.winner}" if ranking.winner else "no winner"
        parts = _sentence(ranking.reason), comparison.nobody_learnt(levels), _gap(ranking.gap)
        yield " ".join(filter(None, (f"**{where}{winner}.**", *parts)))
    unequal = unequal_methods(comparison), *unequal_seeds(comparison), *unequal_code(comparison)
    yield from filter(None, (_unlike(comparison), *unequal, missing_seeds(comparison)))
    yield from lost_uploads(comparison)
    counted = [verdict.decision for verdict in verdicts(comparison) if not verdict.is_timing]
    if counted:
        tally = ", ".join(
            f"{counted.count(decision)} {decision}"
            for decision in DECISIONS
            if decision != "not tested" or decision in counted
        )
        yield f"Criteria that no clock decides: {tally}."
    if stopping := comparison.results.stopping:
        yield f"Seeds are added until the criteria are decided: {stopping.sentence()}."


def _sentence(text: str) -> str:
    return text and text[0].upper() + text[1:] + "."


def _unlike(comparison: Comparison) -> str:
    """Return that some methods answer another question than others, where they do."""
    personal, others = comparison.with_own_models
    if not personal or not others:
        return ""
    primary = comparison.study.task.primary
    words = comparison.study.task.primary_in_words
    return (
        f"Not like with like: the {words} of {', '.join(personal)} is that of clients' own models, each on "
        f"the test examples that are dealt to its client; that of {', '.join(others)} is one model's on all "
        "test examples, which is another question. `FineTune` with `finetune_steps: 0` asks FedAvg the first "
        f"one, and `global/{primary}` is the answer to the second one of methods that have one model for all."
    )


def _gap(gap: Difference | None) -> str:
    if gap is None or not gap.seeds:
        return ""
    written, test = gap.column, gap.test
    size = f"{gap.a} − {gap.b}: {written.number(test.mean, sign=True)}{written.unit}"
    bounds = tables.interval(written, test.low, test.high)
    if bounds != "-":
        p = tables.p_value(test.p_holm)
        return f"{size}, 95 % interval {bounds}, p (Holm) {p}, {test.n} seed{'s' * (test.n > 1)}."
    return f"{size}, no interval."


def _tuned(comparison: Comparison) -> Iterator[str]:
    """Yield which settings ``tune`` chose, and how."""
    found = comparison.study.tuned
    if found is None:
        return
    yield "## Settings that tune chose"
    for level, record in found.parts:
        yield f"### At {level}" if level else ""
        yield _how_tuned(record)
        yield tables.tuned(record).markdown()
        keys = {key for one in record.chosen.values() for key in one.settings}
        if taken := comparison.study.set_by_levels(keys):
            yield f"Where a level of the grid sets `{taken}`, its value counts instead."


def _how_tuned(record: TunedRecord) -> str:
    own = {label: sorted({*one.settings} - {*record.space}) for label, one in record.chosen.items()}
    beside = [f"{label} `{'`, `'.join(names)}`" for label, names in own.items() if names]
    same = (
        "the same values"
        if not beside
        else f"the same values and, beside them, {'; '.join(beside)}"
    )
    at = (
        f"with the mean of seeds {', '.join(map(str, record.seeds))}"
        if record.seeds
        else f"at seed {record.seed}"
    )
    made = {one.finished + one.pruned + one.failed for one in record.chosen.values()}
    trials = " to ".join(map(str, sorted({min(made), max(made)})))
    return (
        f"Chosen for each method by `{record.metric}` ({record.direction}d), of {trials} trials over "
        f"{same} {at}, on {record.date}; search `{Path(record.search).name}`, "
        f"SHA-256 {record.search_sha256[:16]}. The test set chose nothing."
    )


def _setup(comparison: Comparison) -> str:
    runs = comparison.results.distinct
    datasets, rounds = sorted({run.dataset for run in runs}), sorted({run.rounds for run in runs})
    seen = {run.seed for run in comparison.results.runs}
    used = ", ".join(str(seed) for seed in comparison.study.seeds if seed in seen)
    controls = [label for label in comparison.labels if label in comparison.study.controls]
    partitions = len({run.partition for run in runs if run.label not in controls})
    others = f"; the controls ({', '.join(controls)}) have others" if controls else ""
    methods = comparison.study.methods
    apart = [one for one in comparison.labels if comparison.study.grid and not methods[one].in_grid]
    repeated = f" Each run of {', '.join(apart)} is compared at every level." if apart else ""
    return (
        f"{len(runs)} finished runs; data set {', '.join(datasets)}; {', '.join(map(str, rounds))} "
        f"rounds; seeds {used}; {partitions} partition{'s' * (partitions > 1)}, the same for every "
        f"method of a seed{others}.{repeated}"
    )


def _averaged(comparison: Comparison) -> str:
    """Return which rounds the mean of the last five evaluations is of, where it is not of the last
    five."""
    runs = comparison.results.runs
    if comparison.study.selection != "last5":
        return ""
    apart = {
        (run.last_evaluations, run.rounds)
        for run in runs
        if run.last_evaluations and run.last_evaluations[0] != max(1, run.rounds - 4)
    }
    return " ".join(
        f"Of runs of {rounds} rounds, the last five evaluations are those of "
        f"round{'s' * (len(evaluated) > 1)} {', '.join(map(str, evaluated))}"
        + (
            ": their mean says how fast a method learns as much as how it ends."
            if 2 * evaluated[0] <= rounds
            else "."
        )
        for evaluated, rounds in sorted(apart)
    )


def undecided(comparison: Comparison) -> Iterator[str]:
    """Yield what these runs cannot tell."""
    for verdict in verdicts(comparison):
        if verdict.decision in ("undecided", "not tested") and not verdict.is_timing:
            reasons = [
                one.reason for _, one in verdict.judgements if one.decision == verdict.decision
            ]
            said = "was not tested: " if verdict.decision == "not tested" else ""
            yield f"`{verdict.criterion.text}`: {said}{'; '.join(dict.fromkeys(reasons))}."
    for levels in comparison.levels:
        yield from _open(comparison, levels)
    few = max(
        (
            len(comparison.runs(label, levels))
            for levels in comparison.levels
            for label in comparison.labels
        ),
        default=0,
    )
    if few < 3:
        yield (
            f"With {few} seed{'s' * (few > 1)} the spread between seeds is hardly known; at least three "
            "are needed."
        )
    baselines = {*comparison.baselines}
    if len(baselines) > 1 and not any({*pair} <= baselines for pair in comparison.pairs):
        yield (
            "In the tables of differences baselines are not tested against each other; those of places test "
            "all pairs."
        )
    datasets = ", ".join(sorted({run.dataset for run in comparison.results.runs}))
    yield (
        f"Everything is about {datasets} and the settings of this study; how it carries over to other "
        "data and networks is not shown."
    )


def _open(comparison: Comparison, levels: Levels) -> Iterator[str]:
    """Yield which of the family's differences are not decided, if any is not; those with a method
    that has no run are not."""
    metric, labels = comparison.study.metric, {*comparison.labels}
    tests = [one for one in comparison.differences(metric, levels) if one.winner is None]
    needed = [f"{one.a} − {one.b}{_needed(one)}" for one in tests]
    needed += [f"{a} − {b} (no run)" for a, b in comparison.pairs if not {a, b} <= labels]
    if not needed:
        return
    written = comparison.column(metric)
    smallest = [one.test.detectable for one in tests if isfinite(one.test.detectable)]
    text = f"At {level_key(levels)}, " if levels else ""
    text += f"{len(needed)} of {len(comparison.pairs)} differences are not decided"
    text += "." if len(needed) > tables.MOST_PAIRS else f": {', '.join(needed)}."
    if smallest:
        bounds = dict.fromkeys(written.number(value) for value in (min(smallest), max(smallest)))
        text += f" Found with {POWER:.0%}: {' to '.join(bounds)}{written.unit}."
    yield text


def _needed(one: Difference) -> str:
    found = one.test.seeds_needed
    return f" ({seeds(found)} seeds needed, {one.test.n} there)" if isfinite(found) else ""


def _claims(comparison: Comparison) -> Iterator[str]:
    table, texts = tables.claims(comparison)
    if table or texts:
        yield "## What was claimed"
        yield (
            "Figures from elsewhere, beside those of this study; they are claims, not targets, and "
            "their setting may be another."
        )
        yield table.markdown() if table else ""
        yield "\n".join(f"- {text}" for text in texts)


def _not_counted(comparison: Comparison) -> Iterator[str]:
    yield "## Not counted"
    lines = [f"- {entry.name}: {entry.reason}" for entry in comparison.not_counted]
    lines += [
        f"- {one['metric']} of {one['run']} is not a number, and in no mean"
        for one in comparison.not_numbers()
    ]
    for levels in comparison.levels:
        for one in comparison.differences(comparison.study.metric, levels):
            if one.unpaired:
                pair = f"{one.a} − {one.b}{' at ' + level_key(levels) if levels else ''}"
                which = f"seed {', '.join(map(str, one.unpaired))}"
                lines.append(f"- {pair}: {which}: only one of the two has a value, and no pair")
    yield "\n".join(lines) or "Every cell is finished and counted."


def _versions(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (entry["versions"] or {}).items())


def _provenance(comparison: Comparison, registration: RegistrationReport) -> Iterator[str]:
    entries = provenance(comparison)["runs"]
    started, finished = ([str(entry[key]) for entry in entries] for key in ("started", "finished"))
    resumed = sum(bool(entry["resumed"]) for entry in entries)
    yield "## Where it comes from"
    yield "\n".join(
        [
            f"- commit: {_counted(entries, _commit)}",
            f"- device: {_counted(entries, _device)}",
            f"- versions: {_counted(entries, _versions)}",
            f"- from {min(started)} to {max(finished)}",
            f"- continued after an interruption: {resumed} of {len(entries)} runs",
            *_beyond(comparison),
            f"- registered: {', amended '.join(registration.dates) or 'no'}",
        ]
    )
    first: dict[tuple[str, ...], list[str] | None] = {}
    for run, entry in zip(comparison.results.distinct, entries, strict=True):
        first.setdefault((run.label, *run.levels.values()), entry["command_line"])
    lines = [shlex.join(words) for words in first.values() if words]
    if lines:
        yield "One run of each kind; the others differ in seed and name, and all are in `report.json`:"
        yield "```\n" + "\n".join(lines) + "\n```"


def _beyond(comparison: Comparison) -> Iterator[str]:
    stopping = comparison.results.stopping
    if stopping and stopping.beyond:
        begun = ", ".join(map(str, stopping.beyond))
        yield f"- begun before it was known that they are not needed, and not counted: seeds {begun}"


def _counted(entries: Sequence[Mapping[str, Any]], text: Any) -> str:
    every = [text(entry) for entry in entries]
    return "; ".join(f"{one} ({every.count(one)} runs)" for one in dict.fromkeys(every))


def _commit(entry: Mapping[str, Any]) -> str:
    git = entry["git"] or {}
    return (
        f"{git.get('commit') or 'unknown'}{' with uncommitted changes' if git.get('dirty') else ''}"
    )


def _device(entry: Mapping[str, Any]) -> str:
    processes = f"{entry['processes']} process of {entry['threads']} threads"
    return f"{entry['device']}, {processes}, {entry['precision']}"
