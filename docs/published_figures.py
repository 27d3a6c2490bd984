"""Write the page of published figures beside ours, ``docs/results/published.md``:

    # from the tables in docs/results/published
    python docs/published_figures.py
    # after it has added the runs of configs/published there
    python docs/published_figures.py --runs runs
    # and what the benchmark's own code had in as many rounds, from benchmarks/peers
    python docs/published_figures.py --runs runs --theirs pfllib=theirs.csv

``figures.csv`` has what was published, ``ours.csv`` the runs, ``costs.csv`` the CPU seconds of a
round, ``side_by_side.csv`` the accuracy after each round of the benchmarks' own code and of ours.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path

from fl_lightning.study.plan.study import Study
from fl_lightning.study.results.run_records import RunRecord, read_folder
from fl_lightning.study.statistics import mean_std, t_interval

DOCS = Path(__file__).parent
TABLES, PAGE = DOCS / "results/published", DOCS / "results/published.md"
CONFIGS = DOCS.parent / "configs/published"
POINTS = 2.0
"""A disagreement beyond so many points is named."""
LOST = 10.0
"""So is a run that ends so many points or more below its best round."""
Row = Mapping[str, str]
RUN = ("study", "level", "method", "seed", "rounds", "best", "last")
SIDE_BY_SIDE = ("study", "level", "method", "seed", "round", "theirs", "ours")
RUNS_BESIDE = {"niid_bench": "niid_bench_brief", "pfllib": "pfllib_short"}
"""The study of ours that a benchmark's own code stands beside; ``benchmarks/peers/README.md`` makes
it of the whole one."""
SOURCES = {
    "niid_bench": (
        "NIID-Bench",
        "Li, Diao, Chen and He, Federated Learning on Non-IID Data Silos, ICDE 2022, in the reproduction of "
        "Flower: the table under *Expected Results* in the README of `baselines/niid_bench` (adap/flower "
        "at 77068b8), which has the form of Table III of the paper: best round on the test set, mean ± "
        "standard deviation. The paper's own table was not at hand, so that `quantity` and `noise`, which "
        "Flower did not run, have no published figure here. Flower draws its partitions from a generator of "
        "its own, and one for all seeds; here they are those of NIID-Bench's code",
    ),
    "pfllib": (
        "PFLlib",
        "Zhang et al., PFLlib, JMLR 2025: the first table of the leaderboard in its documentation "
        "(`docs/benchmark.html` of TsingZ0/PFLlib at d832e76), *pathological* and *practical label skew* on "
        "FMNIST: best round on the clients' test sets, of FedAvg and FedProx the global model's and of the "
        "others the clients' own, mean ± standard deviation of three trials",
    ),
}
HEAD = """\
# Published figures beside ours

This page is made by `python docs/published_figures.py` from the tables in `docs/results/published`.

The studies in `configs/published` are the protocols of the field's benchmarks on Fashion-MNIST: network,
partition (example by example that of the published code), optimizer, epochs, batch, rounds and normalisation
of pixels. What is other than published stands at the head of each file. A figure of ours is the mean over
seeds of the best round on the test set, as published, and its 95 % interval. The test set chooses the round
there, so that these figures are no estimate of how good a method is; they are here to be compared with
published ones alone. What was run with fewer rounds says how many, and agrees or disagrees with nothing.
A run that ends ten points or more below its best round is said to have *ended at* its last figure.
*N minutes* are what a run of all rounds takes on two cores, by CPU seconds of a round on a machine in use.
"""
BESIDE = {
    "niid_bench": """\
### NIID-Bench's own code beside ours

`benchmarks/peers/niid_bench.py` runs a method of a checkout of NIID-Bench at 61b901a. Each figure is the
global model's accuracy (%) on the test set after a round of **two epochs**, a fifth of the protocol's ten,
on both sides, and the mean over seeds 0, 1 and 2; ours are of the study above otherwise. Both sides have a
seed's partition, network, batch and, but for SCAFFOLD, optimizer and rate in common, and FedProx's mu, 0.01.
Initial weights and the order of examples are each side's own. A difference is the mean of the seeds', ours
less theirs, with its 95 % t interval, which three seeds make wide: where clients have two or three labels,
accuracy changes by ten points and more from one round to the next, on both sides. Of so many
intervals one or two leave zero out by chance.

In one of our runs of five rounds, of seeds 1 and 2, uploads were refused: with SCAFFOLD, two labels and seed
1 a client had diverged in rounds 4 and 5. NIID-Bench checks none. Of seed 0 it is not known.

Of the whole protocol's runs in the first table, SCAFFOLD's of seed 0 had 42 of 500 uploads refused from
round 10 on, of clients that had diverged, and is at chance from round 20 on: its figure is that of round
15. That of seed 1 had 30 refused from round 25 on, is at chance from round 26 on, and its figure is that of
round 20. That of seed 2 had 58 refused, one in round 11 and the others from round 20 on, is at chance from
round 19 on, and its figure is that of round 14. Ten times the rate, which stands for the momentum that its
clients do without, is too much there with ten epochs; a smaller one was not tried. None of FedNova's and
FedProx's uploads was refused, nor of FedAvg's with seeds 1 and 2; of its seed 0 it is not known.

Some of NIID-Bench's rules are others, and were left so. SCAFFOLD's clients have momentum there, so that its
control variates are some ten times a gradient, and a weight decay of 1e-5; here they have neither, and ten
times the rate. Its clients count by their examples there, once each here, as in its paper, which matters
where they have unlike numbers of them (`quantity`). Of the setting `noise`, each client's noise is drawn anew
whenever an image is read there, once here, and the model is tested there on ten copies of the test set, each
as a client sees it, here on one copy, a tenth of it for each client.
""",
    "pfllib": """\
### PFLlib's own code beside ours

`benchmarks/peers/pfllib.py` runs a method of a checkout of PFLlib at d832e76, on the partition that its own
generator makes. Ours are the first rounds of the study above, setting `practical`. Each figure is the
accuracy (%) on the clients' test sets after a round, and the mean over seeds 0, 1 and 2: of FedAvg and
FedProx the global model's, of the others the clients' own. Both sides have network, partition (one for all
seeds), optimizer, rate, batch, epochs and mu (FedProx 0.001, Ditto 0.1) in common. Initial weights, the order
of examples and which quarter of a client's images is its test set are each side's own, and PFLlib leaves out
a client's last batch of fewer than ten images. A difference is the mean of the seeds', ours less theirs, with
its 95 % t interval, which three seeds make wide.

Some of PFLlib's rules are others, and were left so. FedRep's head is trained for an epoch of each client
there, for 262 steps of each here. FedALA learns its mixture there on four fifths of a client's examples, in
its first round until the loss settles, and tests a client when it has mixed, here on all examples once and
when it has trained, which may be why its first rounds differ. APFL's own model descends there along its own
loss, here along the mixture's. FedProto's prototypes are means over the local steps there, over the
examples after them here; clients weigh the same there, by their examples here; and an example is told there
by the nearest prototype, here by the client's last layer. *Own head* is PFLlib's FedProto with its clients
tested by their last layer.
""",
}


def read(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    with (TABLES / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def counted_in(folder: Path, study: str) -> Iterator[tuple[tuple[str, str, str], RunRecord]]:
    """Yield setting, method and seed of each finished cell of a study in a folder, and the cell;
    damaged runs and those of no cell do not count."""
    (axis,) = Study.read(CONFIGS / f"{study}.yaml").grid
    for record in read_folder(folder) if folder.is_dir() else []:
        if not record.problem and {axis, "label"} <= {*record.tags}:
            cell = record.tags[axis], record.tags["label"], record.metadata["seed"]
            yield (str(cell[0]), str(cell[1]), str(cell[2])), record


def rows_of_runs(root: Path) -> Iterator[dict[str, str]]:
    """Yield a row for each finished run of the studies, and of copies of them with fewer rounds,
    whose name is ``<study>_short``."""
    for study in SOURCES:
        for folder in (root / study, root / f"{study}_short"):
            for (level, method, seed), record in counted_in(folder, study):
                found = [row["test/accuracy"] for row in record.history if "test/accuracy" in row]
                if not found:
                    continue
                yield {
                    "study": study,
                    "level": level,
                    "method": method,
                    "seed": seed,
                    "rounds": str(len(record.history)),
                    "best": f"{max(found):.6f}",
                    "last": f"{found[-1]:.6f}",
                }


def accuracies_of_pfllib(theirs: Path) -> Iterator[tuple[str, ...]]:
    """Yield setting, method, seed, round and accuracy: of the clients' own models where there are
    some."""
    rows = [*rows_of(theirs)]
    personal = {method for method, kind, *_ in rows if kind == "personal"}
    for method, kind, *found in rows:
        if kind == "personal" or method not in personal:
            yield "practical", method.replace("FedROD", "FedRoD"), *found


def rows_of(theirs: Path) -> Iterator[list[str]]:
    with theirs.open(encoding="utf-8", newline="") as file:
        yield from csv.reader(file)


def side_by_side(study: str, root: Path, theirs: Path) -> list[dict[str, str]]:
    """Return a row for each round that both a benchmark's own code and a run of ours have made, of
    each way in which PFLlib's models were tested."""
    found = [*(accuracies_of_pfllib if study == "pfllib" else rows_of)(theirs)]
    both = []
    for cell, record in counted_in(root / RUNS_BESIDE[study], study):
        made = {
            str(int(row["round"])): f"{row['test/accuracy']:.6f}"
            for row in record.history
            if "test/accuracy" in row
        }
        both += [
            dict(
                zip(
                    SIDE_BY_SIDE,
                    (study, level, method, seed, round, accuracy, made[round]),
                    strict=True,
                )
            )
            for level, method, seed, round, accuracy in found
            if (level, method.partition(" ")[0], seed) == cell and round in made
        ]
    return both


def with_rounds(rows: Iterable[Row], found: Iterable[Row]) -> list[Row]:
    """Return the rows of both, in order: of a round that both have the found one's."""
    rounds = {
        (*(row[name] for name in SIDE_BY_SIDE[:3]), int(row["seed"]), int(row["round"])): row
        for row in [*rows, *found]
    }
    return [rounds[key] for key in sorted(rounds)]


def with_runs(rows: Iterable[Row], found: Iterable[Row]) -> list[Row]:
    """Return the rows with those of more runs, such as of another machine: of one run that of most
    rounds."""
    longest: dict[tuple[str, ...], Row] = {}
    for row in sorted([*rows, *found], key=lambda row: int(row["rounds"])):
        longest[tuple(row[name] for name in RUN[:4])] = row
    return [longest[key] for key in sorted(longest)]


def minutes(study: str, method: str) -> float:
    """Return the minutes of a run of all rounds on two cores."""
    (seconds,) = [
        float(row["seconds"])
        for row in read("costs")
        if (row["study"], row["method"]) == (study, method)
    ]
    return seconds * rounds_of(study) / 60 / 2


def rounds_of(study: str) -> int:
    return int(Study.read(CONFIGS / f"{study}.yaml").settings["trainer.max_rounds"])


def ours(study: str, runs: Sequence[Row], method: str, published: float | None) -> tuple[str, str]:
    """Return our figure as it is written, and what there is to say of it."""
    every = rounds_of(study)
    if not runs:
        return "-", f"not run, {minutes(study, method):.0f} minutes on two cores"
    most = max(int(row["rounds"]) for row in runs)
    values = [100 * float(row["best"]) for row in runs if int(row["rounds"]) == most]
    mean, (low, high) = mean_std(values)[0], t_interval(values)
    shown = f"{mean:.2f}" + (f" [{low:.2f}, {high:.2f}]" if isfinite(low) else "")
    seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
    if most < every:
        takes = f"all take {minutes(study, method):.0f} minutes on two cores"
        return shown, f"{most} of {every} rounds, {seeds}; {takes}"
    if published is None:
        return shown, seeds
    unexplained = ", not explained" if abs(mean - published) > POINTS else ""
    ends = [100 * float(row["last"]) for row in runs if int(row["rounds"]) == most]
    lost = [
        f"{end:.2f}" for best, end in zip(values, ends, strict=True) if round(best - end, 4) >= LOST
    ]
    fallen = f"; {len(lost)} ended at {', '.join(lost)}" if lost else ""
    return shown, f"{seeds}; {mean - published:+.1f} points{unexplained}{fallen}"


def signed(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}"  # and no -0.00


def beside_their_code(study: str) -> str:
    """Return the section of a benchmark's own code beside ours."""
    accuracy: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
    for row in read("side_by_side"):
        if row["study"] == study:
            both = 100 * float(row["theirs"]), 100 * float(row["ours"])
            of_method = accuracy.setdefault((row["level"], row["method"]), {})
            of_method.setdefault(int(row["round"]), []).append(both)
    last = min(map(max, accuracy.values()))  # which all have made
    shown = sorted({1, (last + 1) // 2, last})
    heads = [f"round {round}, {who}" for round in shown for who in (SOURCES[study][0], "ours")]
    lines = ["| setting | method | " + " | ".join(heads) + " | difference |"]
    lines.append("|---|---" + "|---:" * (len(heads) + 1) + "|")
    apart: dict[tuple[str, str], float] = {}
    intervals: dict[tuple[str, str], tuple[float, float]] = {}
    ((_, levels),) = Study.read(CONFIGS / f"{study}.yaml").grid.items()
    for key, found in sorted(accuracy.items(), key=lambda one: [*levels].index(one[0][0])):
        gaps = [mine - theirs for theirs, mine in found[last]]
        apart[key] = mean_std(gaps)[0]
        written = signed(apart[key])
        low, high = t_interval(gaps)
        if isfinite(low):  # of one seed, or of equal gaps, there is none
            written += f" [{signed(low)}, {signed(high)}]"
            intervals[key] = low, high
        means = [mean_std(side)[0] for round in shown for side in zip(*found[round], strict=True)]
        cells = [f"{value:.2f}" for value in means]
        lines.append(f"| {' | '.join([*key, *cells])} | {written} |")
    first, second = sorted(apart, key=lambda key: -abs(apart[key]))[:2]
    largest, next_one = (
        f"{apart[key]:+.1f}{' points' * (key == first)}, of {key[1]} ({key[0]})"
        for key in (first, second)
    )
    said = f"After {last} rounds the largest difference is {largest}, and the next {next_one}."
    most = {
        level: max(abs(gap) for key, gap in apart.items() if key[0] == level) for level, _ in apart
    }
    if len(most) > 1:
        said += (
            f" The largest of each setting: {', '.join(f'{one} {most[one]:.1f}' for one in most)}."
        )
    if intervals:
        without = [key for key, (low, high) in intervals.items() if low > 0 or high < 0]
        names = ", ".join(f"{method} ({level})" for level, method in without)
        said += f" Zero is outside {len(without)} of {len(intervals)} intervals{': ' * bool(without)}{names}."
    return "\n\n".join([BESIDE[study].strip(), "\n".join(lines), said])


def page() -> str:
    """Return the page."""
    figures, runs, parts = read("figures"), read("ours"), [HEAD]
    for study, (name, source) in SOURCES.items():
        parts += [f"## {name}", f"Source: {source}. Study: `configs/published/{study}.yaml`."]
        lines = [
            "| setting | method | published (%) | ours (%) | of ours |",
            "|---|---|---:|---:|---|",
        ]
        for row in figures:
            if row["study"] != study:
                continue
            key = (study, row["level"], row["method"])
            mine = [run for run in runs if (run["study"], run["level"], run["method"]) == key]
            published = f"{row['mean']} ± {row['std']}" if row["mean"] else "-"
            number, said = ours(
                study, mine, row["method"], float(row["mean"]) if row["mean"] else None
            )
            lines.append(f"| {row['level']} | {row['method']} | {published} | {number} | {said} |")
        parts.append("\n".join(lines))
        parts.append(beside_their_code(study))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of runs that are added to ours.csv")
    parser.add_argument(
        "--theirs",
        metavar="STUDY=FILE",
        help=f"what the own code of {' or '.join(RUNS_BESIDE)} had, beside --runs",
    )
    given = parser.parse_args(arguments)
    if given.theirs is not None:
        study, _, theirs = given.theirs.partition("=")
        if study not in RUNS_BESIDE or not Path(theirs).is_file():
            parser.error(f"--theirs {given.theirs}: write {' or '.join(RUNS_BESIDE)}, = and a file")
        if given.runs is None:
            parser.error("--theirs needs the folder of the runs beside it: add --runs runs")
        found = side_by_side(study, given.runs, Path(theirs))
        write("side_by_side", SIDE_BY_SIDE, with_rounds(read("side_by_side"), found))
    if given.runs is not None:
        merged = with_runs(read("ours"), rows_of_runs(given.runs))
        write("ours", RUN, merged)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
