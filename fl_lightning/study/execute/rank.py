"""The command ``rank``: it trains one method on the protocol of a published study, and says which
place it has among the published methods. None of those is run again.

    python -m fl_lightning rank --model my_package.MyMethod --setting dirichlet01
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fl_lightning.config.near_names import nearest
from fl_lightning.config.packaged import find_config
from fl_lightning.errors import InputError, require
from fl_lightning.run.directory import read_json
from fl_lightning.study.execute.cells import CellState, StudyCells
from fl_lightning.study.execute.estimate import show_plan
from fl_lightning.study.execute.jobs import Job, RunningJob, slots_for
from fl_lightning.study.execute.session import SweepSession
from fl_lightning.study.execute.sweep import Resolve, planned, pool_of
from fl_lightning.study.plan.protocol import protocol_of
from fl_lightning.study.plan.published import PLAN, REPORT, PublishedStudy, find_published
from fl_lightning.study.plan.spec_file import SpecFile
from fl_lightning.study.plan.study import Study
from fl_lightning.study.plan.variations import Variation
from fl_lightning.study.report.compare import check_out, compare
from fl_lightning.study.results.published import check_paired, check_protocol, published_rows
from fl_lightning.study.results.run_records import read_directory
from fl_lightning.study.results.runs import FinishedRun

log = logging.getLogger("fl_lightning")
LEADERBOARD = "leaderboard_digits"
"""The published study that is taken where none is named."""


@dataclass
class RankSession(SweepSession):
    """One session of ``rank``: a sweep that ends at the first run that cannot be paired."""

    published: PublishedStudy = field(kw_only=True)

    def begin(self) -> None:
        for state in self.cells:
            self.check(state)

    def check(self, state: CellState) -> None:
        """Check that a finished run can be paired.

        Raises:
            InputError: data, protocol or partition are not the published ones.
        """
        if state.status == "finished" and state.run is not None:
            record = read_directory(state.run)
            check_paired(
                self.published, FinishedRun("", state.cell.seed, state.cell.levels, record)
            )

    def ended(self, running: RunningJob, code: int) -> Job | None:
        following = super().ended(running, code)
        self.check(self.cells[running.job.name])
        return following


Plain = bool | int | float | str | list | dict | None
"""What a file can hold; of ``Any`` the parser makes the objects that a ``class_path`` names."""


def rank(
    model: str,
    against: str = LEADERBOARD,
    setting: str | None = None,
    seeds: int | None = None,
    label: str | None = None,
    method_config: str | None = None,
    settings: dict[str, Plain] | None = None,
    out: Path | None = None,
    jobs: int = 1,
    root: str = "runs",
    devices: str = "auto",
    logger: bool = True,
    dry_run: bool = False,
    *,
    resolve: Resolve,
) -> None:
    """Train a method as a published study trained its own, and print its place.

    Partitions, seeds and protocol are the study's. Started again, it does what is left; a finished
    run is not trained twice.

    Args:
        model: the method's class, such as ``my_package.MyMethod``; network and optimizer are the
            study's unless ``method_config`` or ``settings`` say otherwise.
        against: the folder of the published study: a path, or a name in ``docs/results``.
        setting: levels of its grid, with commas between them, such as ``dirichlet01`` or
            ``noise=on``; default: all.
        seeds: how many of its seeds, the first ones; default: all.
        label: the name of the method in tables; default: that of its class.
        method_config: a configuration of ``fit`` with the method's settings.
        settings: dotted settings of the method, such as ``{model.init_args.mu: 0.1}``.
        out: folder of the report; default: ``reports/<study>-<label>``.
        jobs: runs at a time.
        root: folder of all runs; these go to ``<root>/<study>-<label>/``.
        devices: GPUs that runs are dealt to in turn: ``auto`` for all, ``none``, or their numbers.
        logger: false: no MLflow.
        dry_run: print the runs and an estimate of time, check the protocol, and create nothing.

    Raises:
        InputError: there is no such study, or the runs could not be paired with it; the message
            names what differs.
    """
    published = PublishedStudy.read(find_published(against), f"--against {against}")
    published_rows(published)
    label = label or model.rpartition(".")[2]
    files = [] if method_config is None else [_file(method_config)]
    more = SpecFile(Path("rank")).settings(settings or {}, "--settings")
    other = more.get("model.class_path", model)
    rule = "the method that is ranked is another one, and has its name in the table"
    require(other == model, f"--settings model.class_path: {other}", rule, f"write --model {other}")
    own = Variation(tuple(files), {"model.class_path": model, **more})
    study = study_of(published, label, own, setting, seeds)
    if taken := study.set_by_levels(more):
        log.warning(
            "--settings %s: a level of the study's grid sets it, and that is what counts", taken
        )
    out = out or Path("reports") / study.name
    check_out(out, overwrite=read_json(out / REPORT).get("study") == study.name)
    slots = slots_for(jobs, devices)
    cells = planned(StudyCells.plan(study, Path(root), resolve), jobs)
    if stale := cells.stale():
        names, modules = map(", ".join, stale)
        rule = f"trained with another {modules}, and ranked as if it were this one"
        raise InputError(names, rule, "move these runs away, or write another --label")
    for state in cells:
        check_protocol(published, state.cell.name, state.cell.levels, protocol_of(state.config))
    if dry_run:
        show_plan(cells, jobs)
        return
    with pool_of(cells, slots) as pool:
        RankSession(cells, pool, logger, published=published).run()
    compare(study.name, out, Path(root), overwrite=True)


def study_of(
    published: PublishedStudy,
    label: str,
    method: Variation,
    setting: str | None = None,
    seeds: int | None = None,
) -> Study:
    """Return the study of one method beside the published ones.

    Args:
        published: the published study; its folder has the plan.
        label: the name of the method.
        method: what it changes in the plan's configuration.
        setting: levels of the grid, with commas between them; None: all.
        seeds: the number of seeds; None: all.

    Raises:
        InputError: the plan is missing, or a level, the number of seeds or the label does not fit
            it.
    """
    path, given = published.path / PLAN, f"--against {published.path}"
    rule = f"the folder has no {PLAN}, the plan of its study: an earlier release wrote it"
    require(
        path.is_file(),
        given,
        rule,
        "make the report again with compare of this release, from the runs",
    )
    plan, most = Study.read(path, with_record=False), len(published.seeds)
    count = most if seeds is None else seeds
    rule = f"{most} seeds are published, and runs are paired by seed"
    require(0 < count <= most, f"--seeds {seeds}", rule, f"write --seeds {most}")
    rule = f"a method of that name is published in {published.name}"
    instead = f"write --label My{label}"
    require(not published.label_among([label]), f"--label {label}", rule, instead)
    study = Study(
        path=path,
        name=f"{published.name}-{label}",
        seeds=published.seeds[:count],
        methods={label: method},
        configs=plan.configs,
        settings=plan.settings,
        overlays=plan.overlays,
        grid=_levels(plan.grid, setting),
        test=plan.test,
        selection=plan.selection,
        metric=plan.metric,
        proposed=[label],
        target_accuracy=plan.target_accuracy,
        target=plan.target,
        published=(published,),
    )
    for name in (study.name, *(cell.name for cell in study.cells())):
        SpecFile(path).name(name, f"--label {label}")
    published.check("", study.seeds, study.combinations(), study.selection)
    return study


def _levels(
    grid: Mapping[str, Mapping[str, Variation]], setting: str | None
) -> dict[str, Mapping[str, Variation]]:
    """Return the grid with the levels that are asked for; an axis of which none is named keeps
    all."""
    if setting is None:
        return dict(grid)
    wanted = [name.strip() for name in setting.split(",")]
    names = {f"{axis}={level}": level for axis, levels in grid.items() for level in levels}
    levels = [*names.values()]
    known = levels if len({*levels}) == len(names) else [*names]
    for name in wanted:
        rule = f"it is one of {', '.join(known)}" if known else "the published study has no grid"
        near = nearest(name, known)
        instead = (
            f"write --setting {near or known[0]}, or another of them" if known else "leave it out"
        )
        # a level of two axes, such as on, would restrict both
        require(name in names or levels.count(name) == 1, f"--setting {name}", rule, instead)
    chosen = {
        axis: {one: levels[one] for one in levels if {one, f"{axis}={one}"} & {*wanted}}
        for axis, levels in grid.items()
    }
    return {axis: chosen[axis] or grid[axis] for axis in grid}


def _file(name: str) -> Path:
    path = find_config(name)
    if path is None:
        raise InputError(
            f"--method_config {name}", "there is no such file", "write the path of a YAML file"
        )
    return path
