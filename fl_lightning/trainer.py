"""FederatedTrainer: Fabric, callbacks, trackers, checkpoints and the run directory around the rounds of ``loop.py``."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from lightning.fabric.loggers import Logger

from fl_lightning import rng
from fl_lightning.data import FederatedData
from fl_lightning.engines import RankedEngine, SequentialEngine, collectives
from fl_lightning.engines.determinism import deterministic
from fl_lightning.engines.launch import join, launched_from_outside, make_fabric, one_first, processes, start_others, stop_others
from fl_lightning.errors import InputError
from fl_lightning.follower import Follower
from fl_lightning.hooks import Callback, RoundRecord
from fl_lightning.interrupts import Interrupts
from fl_lightning.loop import Federation, final_weights, run_round
from fl_lightning.methods import Method
from fl_lightning.metrics import final_summary
from fl_lightning.redaction import redact_arguments, redact_settings
from fl_lightning.resume import Snapshot, Start, changed_settings, check_same, config_of, find_same, find_start, flatten, restore
from fl_lightning.run_directory import RunDirectory, describe, is_plain_name, to_json
from fl_lightning.tables import numbers
from fl_lightning.tracking import Tracking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fl_lightning")

CHEAP = 0.05  # seconds; a checkpoint that costs less is written every round
PATIENCE = 20  # a dearer one waits until the rounds since then took so many times its cost: 5 % of the run


class FederatedTrainer:
    """Runs a method over a federation, round by round.

    Args:
        accelerator: Fabric's: ``auto``, ``cpu``, ``cuda``, ``mps``.
        devices: number of devices, or which ones, as Fabric takes them.
        strategy: Fabric's: ``auto``, or ``ddp`` for several processes.
        num_nodes: number of machines.
        rank_timeout: seconds that a process waits for the others, who may still be training, before the run is given up; at least 1.
            A process that died is noticed at once.
        precision: of the local training steps and of evaluation: ``32-true``, ``bf16-mixed`` or ``16-mixed``.
        engine: how clients are executed: ``auto`` or ``sequential``.
        max_rounds: rounds to run, at least 1.
        participation: share of the clients sampled each round, in (0, 1].
        local_epochs: passes that a client makes over its own data in a round, at least 1.
        eval_every: rounds between evaluations, at least 1; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints, at least 1; 0 writes only the last one. Default: every round; where writing one
            takes more than 0.05 s, as often as keeps it to 5 % of the time. Resume is exact whichever it is: rounds are repeated.
        keep_checkpoints: number of newest checkpoints that are kept, at least 1, beside the best one.
        callbacks: stressors and meters, in this order.
        logger: true for MLflow at ``sqlite:///mlflow.db``, false for none, or any Lightning loggers.
        default_root_dir: folder of all runs.
        experiment: folder of this run's experiment, and its name in MLflow.
        run_name: name of the run; default: method, data set and seed. A name that exists gets a number.
        deterministic: use deterministic algorithms and name in the log those that have no such form.
        auto_resume: continue the latest run of the same experiment, name and configuration if there is one, else start it.
        allow_changed: resume although the configuration differs from the checkpoint's.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str = 1,
        strategy: str = "auto",
        num_nodes: int = 1,
        rank_timeout: int = 1800,
        precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true",
        engine: Literal["auto", "sequential"] = "auto",
        max_rounds: int = 100,
        participation: float = 0.2,
        local_epochs: int = 2,
        eval_every: int = 1,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 2,
        callbacks: list[Callback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        default_root_dir: str = "runs",
        experiment: str = "fl_lightning",
        run_name: str | None = None,
        deterministic: bool = True,
        auto_resume: bool = False,
        allow_changed: bool = False,
    ) -> None:
        for name, value, least in (
            ("max_rounds", max_rounds, 1),
            ("local_epochs", local_epochs, 1),
            ("eval_every", eval_every, 1),
            ("checkpoint_every", checkpoint_every or 0, 0),
            ("keep_checkpoints", keep_checkpoints, 1),
            ("num_nodes", num_nodes, 1),
            ("rank_timeout", rank_timeout, 1),
        ):
            if value < least:
                raise ValueError(f"--trainer.{name} {value}; at least {least} is needed; write --trainer.{name} {max(least, 1)}")
        if not 0 < participation <= 1:
            raise ValueError(
                f"--trainer.participation {participation}; it is a share of the clients, in (0, 1]; write --trainer.participation 0.2"
            )
        for name, text in (("experiment", experiment), ("run_name", run_name or "x")):
            if not is_plain_name(text):
                raise ValueError(
                    f"--trainer.{name} {text!r}; it names one folder inside default_root_dir; write a name without '/'"
                )
        self.callbacks = callbacks or []
        devices, num_nodes = processes(devices, num_nodes)
        try:
            self.fabric = make_fabric(
                strategy,
                rank_timeout,
                accelerator=accelerator,
                devices=devices,
                num_nodes=num_nodes,
                precision=precision,
                callbacks=self.callbacks,
            )
        except Exception as error:
            raise ValueError(
                f"--trainer.accelerator {accelerator} devices {devices} strategy {strategy} precision {precision}; "
                f"Fabric refuses them ({error}); write --trainer.accelerator auto --trainer.devices 1"
            ) from error
        self.max_rounds = max_rounds
        self.participation = participation
        self.local_epochs = local_epochs
        self.eval_every = eval_every
        self.checkpoint_every = checkpoint_every
        self.keep_checkpoints = keep_checkpoints
        self.logger = logger
        self.root = Path(default_root_dir)
        self.experiment = experiment
        self.run_name = run_name
        self.deterministic = deterministic
        self.auto_resume = auto_resume
        self.allow_changed = allow_changed
        self.interrupts = Interrupts()
        self.best: Snapshot | None = None
        self.config: dict[str, Any] = {}
        self.config_text = ""
        self.command_line: Sequence[str] = ()

    @property
    def run_dir(self) -> Path:
        return self.run.path

    def fit(self, method: Method, data: FederatedData, *, seed: int = 0, ckpt_path: str | None = None) -> dict[str, float]:
        """Train and return the ``final/*`` metrics.

        Args:
            ckpt_path: a checkpoint, a run directory, or ``last``, to continue that run.

        Raises:
            InputError: the data, the checkpoint or the output folder cannot be used; nothing has been created then.
        """
        with deterministic(self.deterministic), self.interrupts:
            self.method, self.data, self.seed = method, data, seed
            self.settings = redact_settings(self.config)
            outside = launched_from_outside(self.fabric)
            if outside:
                join(self.fabric)
            start = self._find_start(ckpt_path)
            fed = self._prepare()
            changed = self._restore(fed, start)
            if self._is_finished(start):
                return final_summary(self.history)
            self._opened = False
            try:
                if not outside:
                    start_others(self.fabric, start.name)
                with self.interrupts.held():
                    self._open_run(start, changed)
                self._track(resumed=start.run is not None)
                while self.done.round < self.max_rounds:
                    self._run_round(fed)
                return self._finish(fed)
            except BaseException as error:
                stop_others()
                if self._opened:
                    self._stop(error)
                raise
            finally:
                if self._opened:
                    self.run.unlock()

    def _find_start(self, ckpt_path: str | None) -> Start:
        """Rank 0 chooses, the others read the same."""
        if not self.fabric.is_global_zero:
            chosen = collectives.from_rank_zero("")
            return find_start(chosen, self.root) if chosen else Start()
        start = self._choose_start(ckpt_path)
        collectives.from_rank_zero(start.name)
        return start

    def _choose_start(self, ckpt_path: str | None) -> Start:
        if ckpt_path:
            return find_start(ckpt_path, self.root / self.experiment)
        if self.auto_resume:
            return find_same(self.root / self.experiment, self._name, self.settings)
        return Start()

    @property
    def _dataset(self) -> str:
        return getattr(self.data, "dataset", type(self.data).__name__)

    @property
    def _name(self) -> str:
        return self.run_name or f"{type(self.method).__name__}-{self._dataset}-seed{self.seed}"

    def _prepare(self) -> Federation:
        """Everything that can refuse its input comes before the first thing that is created."""
        try:
            one_first(self.fabric, self.data.prepare_data)
            self.data.setup("fit")
            self.data.distribute(self.seed, self.fabric.device)
            self.method.seed = self.seed
            with rng.torch_stream(self.seed, "weights"):
                self.method.build(self.data)
            self.method.to(self.fabric.device)
            _check_optimizer(self.method)
            self.fabric.call("on_check", self)
        except (ValueError, OSError) as error:
            raise InputError(str(error)) from error
        self.partition = self.data.partition_hash
        return Federation(
            fabric=self.fabric,
            method=self.method,
            data=self.data,
            engine=RankedEngine(SequentialEngine(self.fabric, self.method, self.data), self.data),
            callbacks=self.callbacks,
            context=self,
            seed=self.seed,
            participation=self.participation,
            local_epochs=self.local_epochs,
            eval_every=self.eval_every,
        )

    def _restore(self, fed: Federation, start: Start) -> bool:
        """Take the federation to where it is continued; whether its configuration has changed. Reads only."""
        self.done, self.best = Snapshot(), None
        self.history: list[dict[str, float]] = []
        self._saved, self._next_checkpoint = 0, 0.0
        if start.run is None:
            return False
        self.run = RunDirectory(start.run)
        changed = check_same(start, self.settings, self.partition, self.allow_changed)
        if start.checkpoint is not None:
            self.done = restore(fed, start.checkpoint)
            self._saved = self.done.round
            self.history = numbers(self.run.tables["metrics"].until(self.done.tables["metrics"]))
        return changed

    def _is_finished(self, start: Start) -> bool:
        """The run that is to be continued has nothing left to do: say so and leave it alone."""
        if (
            start.run is None
            or self.done.round < self.max_rounds
            or self.run.read_json("metadata.json").get("status") != "finished"
        ):
            return False
        log.info("%s is finished: %d rounds, nothing to do", start.run, self.done.round)
        return True

    def _open_run(self, start: Start, changed: bool) -> None:
        collectives.barrier()  # all have read what rank 0 is about to change
        self.metadata = self._describe()
        if not self.fabric.is_global_zero:
            self.run = Follower(Path(collectives.from_rank_zero("")))
        else:
            if start.run is None:
                self.run = self._create_run()
            else:
                self._reopen_run(changed)
            collectives.from_rank_zero(str(self.run_dir))
        self.tracker = Tracking(
            self.logger,
            experiment=self.experiment,
            run_name=self.run_dir.name,
            run_dir=self.run_dir,
            run_id=self.metadata["tracking_run_id"],
            since=self.run.created if start.run else None,
        )
        self._opened = True

    def _config_text(self) -> str:
        return self.config_text if self.settings == self.config else yaml.safe_dump(self.settings, sort_keys=False)

    def _create_run(self) -> RunDirectory:
        files = {
            "config.yaml": self._config_text(),
            "partition.json": to_json(self.data.partition_summary()),
            "metadata.json": to_json(self.metadata),
        }
        try:
            return RunDirectory.create(self.root, self.experiment, self._name, files)
        except OSError as error:
            raise InputError(
                f"--trainer.default_root_dir {self.root}; no run can be created there ({error}); name a folder you may write to"
            ) from error

    def _reopen_run(self, changed: bool) -> None:
        self.run.lock()
        log.info("continuing %s after round %d", self.run_dir, self.done.round)
        before = self.run.read_json("metadata.json")
        for name in ("device", "threads", "versions"):  # ranks are not among them: they change nothing
            if name in before and before[name] != self.metadata[name]:
                log.warning("%s: %s -> %s; from here on sums may be rounded differently", name, before[name], self.metadata[name])
        self.run.rewind(self.done.round, self.done.tables, changed=changed)
        self.run.prune(self.keep_checkpoints, self.done.best_round)  # a kill may have come in between
        if changed or changed_settings(config_of(self.run_dir), flatten(self.settings)):
            self.run.write("config.yaml", self._config_text())
        self.metadata["started"] = before.get("started", self.metadata["started"])
        self.metadata["tracking_run_id"] = before.get("tracking_run_id")
        self.metadata["resumed"] = [*before.get("resumed", []), {"after_round": self.done.round, "at": _now()}]
        self.run.write_json("metadata.json", self.metadata)

    def _describe(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "method": type(self.method).__name__,
            "dataset": self._dataset,
            **describe(redact_arguments(list(self.command_line))),
            "device": str(self.fabric.device),
            "processes": self.fabric.world_size,
            "threads": torch.get_num_threads(),
            "precision": self.fabric.strategy.precision.precision,
            "started": _now(),
            "partition_sha256": self.partition,
            "weights_sha256": None,
            "status": "running",
            "tracking_run_id": None,
        }

    def _track(self, resumed: bool) -> None:
        """The store's run is noted as soon as it is known: whoever is killed from here on finds it again."""
        run_id = self.metadata["tracking_run_id"]
        self.tracker.start(params=self.settings, tags=self._tags())
        if self.tracker.run_id not in (None, run_id):
            self.metadata["tracking_run_id"] = self.tracker.run_id
            self.run.write_json("metadata.json", self.metadata)
        if resumed:
            self.tracker.catch_up(self.history)
        self.tracker.log_artifact(self.run_dir / "config.yaml")
        self.fabric.call("on_setup", self)

    def _tags(self) -> dict[str, str]:
        git = self.metadata["git"]
        return {
            "method": self.metadata["method"],
            "dataset": self.metadata["dataset"],
            "seed": str(self.seed),
            "commit": str(git["commit"]),
            "dirty": str(git["dirty"]),
            "run_dir": str(self.run_dir.absolute()),
            "partition_sha256": self.partition,
        }

    def _run_round(self, fed: Federation) -> None:
        round = self.done.round + 1
        self.fabric.call("on_round_start", round, self)
        record = run_round(fed, round)
        self.fabric.call("on_round_end", record, self)
        with self.interrupts.held():
            self._keep(fed, record)
            self.tracker.log_metrics(record.metrics, step=round)

    def _keep(self, fed: Federation, record: RoundRecord) -> None:
        """The round is done: its rows to the tables, then the snapshot that counts on them, then perhaps a checkpoint."""
        row = {"round": record.round, **record.metrics}
        self.run.tables["metrics"].append([row])
        self.run.tables["ledger"].append([asdict(entry) for entry in fed.ledger.entries])
        fed.ledger.entries.clear()
        self.history.append(row)
        self.done = self.done.after(fed, record, {name: table.mark for name, table in self.run.tables.items()})
        if self.done.best_round == record.round:
            self.best = self.done
        if self._is_due(record.round):
            self._checkpoint()

    def _is_due(self, round: int) -> bool:
        if self.checkpoint_every is None:
            return time.monotonic() >= self._next_checkpoint
        return self.checkpoint_every > 0 and round % self.checkpoint_every == 0

    def _checkpoint(self) -> None:
        """Write the last whole round, and the best one if that is another and not on disk yet; then remove what is too old."""
        if self._saved == self.done.round or not self.fabric.is_global_zero:
            return
        started = time.monotonic()
        for table in self.run.tables.values():
            table.sync()
        self.done.save(self.run.checkpoints, self.settings, self.partition)
        self._saved = self.done.round
        if self.best and self.best is not self.done:
            self.best.save(self.run.checkpoints, self.settings, self.partition)
        self.best = None
        self.run.prune(self.keep_checkpoints, self.done.best_round)
        took = time.monotonic() - started
        self._next_checkpoint = started if took < CHEAP else time.monotonic() + PATIENCE * took

    def _stop(self, error: BaseException) -> None:
        """The run ends early: keep what is done, say how to continue."""
        self.interrupts.hold()
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        self.metadata["status"] = "interrupted" if interrupted else "failed"
        try:
            self._checkpoint()
            self.run.write_json("metadata.json", self.metadata)
        except OSError as problem:
            log.error("no checkpoint of round %d could be written (%s)", self.done.round, problem)
        self.fabric.call("on_exception", error, self)
        if _is_full(error):
            log.error("%s; the run needs room to write; make some", error)
        again = f"after round {self._saved}" if self._saved else "from the start"
        log.error("stopped in round %d; continue %s with --ckpt_path %s", self.done.round + 1, again, self.run_dir)
        self.interrupts.release()
        self.tracker.finish("KILLED" if interrupted else "FAILED", {})

    def _finish(self, fed: Federation) -> dict[str, float]:
        """Every step can be done twice: ``finished`` is written last, and a run killed before that does them again."""
        summary = final_summary(self.history)
        with self.interrupts.held():
            self._checkpoint()
        self.fabric.call("on_fit_end", summary, self)
        self.metadata |= {
            "status": "finished",
            "finished": _now(),
            "weights_sha256": sha256(final_weights(fed).numpy().tobytes()).hexdigest(),
            **summary,
        }
        with TemporaryDirectory() as folder:
            path = Path(folder) / "metadata.json"
            path.write_text(to_json(self.metadata))
            self.tracker.log_artifact(path)
        for name in ("metrics.csv", "ledger.csv", "partition.json"):
            self.tracker.log_artifact(self.run_dir / name)
        self.tracker.finish("FINISHED", summary)
        self.run.write_json("metadata.json", self.metadata)
        log.info("%s", self._closing(summary))
        return summary

    def _closing(self, summary: Mapping[str, float]) -> str:
        megabytes = sum(row["comm/total_bytes"] for row in self.history) / 1e6
        lines = [
            f"finished: {self.done.round} rounds, {megabytes:.1f} MB over the wire",
            *(f"  {name:<26}{value:.4g}" for name, value in summary.items()),
            f"run directory  {self.run_dir}",
        ]
        if self.tracker.hint:
            lines.append(f"compare runs   {self.tracker.hint}")
        return "\n".join(lines)

    def log_figure(self, name: str, figure: Figure) -> None:
        """Save ``figures/<name>.png`` and ``.pdf`` and hand them to the loggers."""
        if not self.fabric.is_global_zero:
            return
        for suffix in ("png", "pdf"):
            path = self.run.figure(f"{name}.{suffix}")
            figure.savefig(path, dpi=150)
            self.tracker.log_artifact(path, "figures")


def _check_optimizer(method: Method) -> None:
    try:
        optimizer = method.configure_optimizers()
    except (ValueError, TypeError) as error:
        raise InputError(f"--model.optimizer; it cannot be built ({error}); correct that argument") from error
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("--model.optimizer LBFGS; a local step has one gradient and no closure; write --model.optimizer SGD")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EROFS, EFBIG)
