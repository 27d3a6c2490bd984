"""FederatedTrainer: Fabric, callbacks, trackers, checkpoints and the run directory around the rounds of ``loop.py``."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import Logger

from fl_lightning import rng
from fl_lightning.checkpoint import checkpoints_in, save_checkpoint
from fl_lightning.data import FederatedData
from fl_lightning.engines import SequentialEngine
from fl_lightning.errors import InputError
from fl_lightning.hooks import Callback
from fl_lightning.loop import Federation, final_weights, run_round
from fl_lightning.methods import Method
from fl_lightning.metrics import final_summary
from fl_lightning.resume import Progress, find_checkpoint, restore
from fl_lightning.run_directory import RunDirectory, git_state, versions
from fl_lightning.tracking import Tracking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fl_lightning")


class FederatedTrainer:
    """Runs a method over a federation, round by round.

    Args:
        accelerator: Fabric's: ``auto``, ``cpu``, ``cuda``, ``mps``.
        devices: number of devices, or which ones, as Fabric takes them.
        strategy: Fabric's: ``auto``, or ``ddp`` for several processes.
        num_nodes: number of machines.
        precision: of the local training steps and of evaluation: ``32-true``, ``bf16-mixed`` or ``16-mixed``.
        engine: how clients are executed: ``auto`` or ``sequential``.
        max_rounds: rounds to run, at least 1.
        participation: share of the clients sampled each round, in (0, 1].
        local_epochs: passes that a client makes over its own data in a round, at least 1.
        eval_every: rounds between evaluations, at least 1; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints, at least 1; 0 writes only the last one.
        keep_checkpoints: number of newest checkpoints that are kept, at least 1, beside the best one.
        callbacks: stressors and meters, in this order.
        logger: true for MLflow at ``sqlite:///mlflow.db``, false for none, or any Lightning loggers.
        default_root_dir: folder of all runs.
        experiment: folder of this run's experiment, and its name in MLflow.
        run_name: name of the run; default: method, data set and seed. A name that exists gets a number.
        deterministic: use deterministic algorithms and name in the log those that have no such form.
        allow_changed: resume although the configuration differs from the checkpoint's.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str = 1,
        strategy: str = "auto",
        num_nodes: int = 1,
        precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true",
        engine: Literal["auto", "sequential"] = "auto",
        max_rounds: int = 100,
        participation: float = 0.2,
        local_epochs: int = 2,
        eval_every: int = 1,
        checkpoint_every: int = 1,
        keep_checkpoints: int = 2,
        callbacks: list[Callback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        default_root_dir: str = "runs",
        experiment: str = "fl_lightning",
        run_name: str | None = None,
        deterministic: bool = True,
        allow_changed: bool = False,
    ) -> None:
        for name, value, least in (
            ("max_rounds", max_rounds, 1),
            ("local_epochs", local_epochs, 1),
            ("eval_every", eval_every, 1),
            ("checkpoint_every", checkpoint_every, 0),
            ("keep_checkpoints", keep_checkpoints, 1),
            ("num_nodes", num_nodes, 1),
        ):
            if value < least:
                raise ValueError(f"--trainer.{name} {value}; at least {least} is needed; write --trainer.{name} {max(least, 1)}")
        if not 0 < participation <= 1:
            raise ValueError(
                f"--trainer.participation {participation}; it is a share of the clients, in (0, 1]; write --trainer.participation 0.2"
            )
        for name, text in (("experiment", experiment), ("run_name", run_name or "x")):
            if Path(text).name != text or text.startswith("."):
                raise ValueError(f"--trainer.{name} {text!r}; it names one folder inside default_root_dir; write a name without '/'")
        self.callbacks = callbacks or []
        try:
            self.fabric = Fabric(
                accelerator=accelerator,
                devices=devices,
                strategy=strategy,
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
        self.allow_changed = allow_changed
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
        with _deterministic(self.deterministic), _sigterm_as_exit():
            self.method, self.data, self.seed = method, data, seed
            fed, progress = self._prepare(ckpt_path)
            try:
                while progress.round < self.max_rounds:
                    self._run_round(fed, progress)
            except BaseException as error:
                self._stop(fed, progress, error)
                raise
            return self._finish(fed, progress)

    def _prepare(self, ckpt_path: str | None) -> tuple[Federation, Progress]:
        """Everything that can refuse its input comes before the first thing that is created."""
        checkpoint = find_checkpoint(ckpt_path, self.root / self.experiment) if ckpt_path else None
        try:
            self.data.prepare_data()
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
        self.fabric.launch()
        fed = Federation(
            fabric=self.fabric,
            method=self.method,
            data=self.data,
            engine=SequentialEngine(self.fabric, self.method, self.data),
            callbacks=self.callbacks,
            context=self,
            seed=self.seed,
            participation=self.participation,
            local_epochs=self.local_epochs,
            eval_every=self.eval_every,
        )
        progress = Progress()
        if checkpoint is not None:
            progress = restore(fed, checkpoint, self.config, self.allow_changed)
            self.run = RunDirectory(checkpoint.path.parent.parent)
        self._open_run(progress)
        return fed, progress

    def _open_run(self, progress: Progress) -> None:
        name = self.run_name or f"{type(self.method).__name__}-{getattr(self.data, 'dataset', type(self.data).__name__)}-seed{self.seed}"
        if progress.round == 0:
            try:
                self.run = RunDirectory.create(self.root, self.experiment, name)
            except OSError as error:
                raise InputError(
                    f"--trainer.default_root_dir {self.root}; no run can be created there ({error}); name a folder you may write to"
                ) from error
            self.run.write("config.yaml", self.config_text)
            self.run.write_json("partition.json", self.data.partition_summary())
        self.metadata = {
            "seed": self.seed,
            "method": type(self.method).__name__,
            "dataset": getattr(self.data, "dataset", type(self.data).__name__),
            "git": git_state(),
            "versions": versions(),
            "device": str(self.fabric.device),
            "processes": self.fabric.world_size,
            "threads": torch.get_num_threads(),
            "precision": self.fabric.strategy.precision.precision,
            "command_line": list(self.command_line),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "partition_sha256": self.data.partition_hash,
            "weights_sha256": None,
            "status": "running",
        }
        self.run.write_json("metadata.json", self.metadata)
        self.tracker = Tracking(self.logger, experiment=self.experiment, run_name=self.run_dir.name, run_dir=self.run_dir, run_id=progress.run_id)
        self.tracker.start(params=self.config, tags=self._tags())
        progress.run_id = self.tracker.run_id
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
            "run_dir": str(self.run_dir),
            "partition_sha256": self.data.partition_hash,
        }

    def _run_round(self, fed: Federation, progress: Progress) -> None:
        round = progress.round + 1
        self.fabric.call("on_round_start", round, self)
        record = run_round(fed, round)
        self.fabric.call("on_round_end", record, self)
        progress.advance(fed, record)
        self.run.write_history(progress.history)
        self.run.write("ledger.csv", fed.ledger.to_csv())
        if self.checkpoint_every and round % self.checkpoint_every == 0:
            self._checkpoint(progress)
        self.tracker.log_metrics(record.metrics, step=round)

    def _checkpoint(self, progress: Progress) -> None:
        tensors, documents = progress.snapshot(self.config)
        save_checkpoint(self.run.checkpoints / f"round_{progress.round:06d}", tensors, documents)
        keep = {f"round_{progress.best_round:06d}"}
        for old in checkpoints_in(self.run.checkpoints)[self.keep_checkpoints :]:
            if old.name not in keep:
                _remove(old)

    def _stop(self, fed: Federation, progress: Progress, error: BaseException) -> None:
        """The run ends early: keep what is done, say how to continue."""
        self.fabric.call("on_exception", error, self)
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        if progress.round:
            self._checkpoint(progress)
            log.error("stopped after round %d; continue with --ckpt_path %s", progress.round, self.run_dir)
        self.metadata["status"] = "interrupted" if interrupted else "failed"
        self.run.write_json("metadata.json", self.metadata)
        self.tracker.finish("KILLED" if interrupted else "FAILED", {})

    def _finish(self, fed: Federation, progress: Progress) -> dict[str, float]:
        summary = final_summary(progress.history)
        self._checkpoint(progress)
        self.metadata |= {
            "status": "finished",
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "weights_sha256": sha256(final_weights(fed).numpy().tobytes()).hexdigest(),
            **summary,
        }
        self.run.write_json("metadata.json", self.metadata)
        self.fabric.call("on_fit_end", summary, self)
        for name in ("metadata.json", "metrics.csv", "ledger.csv", "partition.json"):
            self.tracker.log_artifact(self.run_dir / name)
        self.tracker.finish("FINISHED", summary)
        log.info("%s", self._closing(summary, progress))
        return summary

    def _closing(self, summary: Mapping[str, float], progress: Progress) -> str:
        megabytes = sum(entry.upload + entry.download for entry in progress.ledger) / 1e6
        lines = [
            f"finished: {progress.round} rounds, {megabytes:.1f} MB over the wire",
            *(f"  {name:<26}{value:.4f}" for name, value in summary.items()),
            f"run directory  {self.run_dir}",
        ]
        if self.tracker.hint:
            lines.append(f"compare runs   {self.tracker.hint}")
        return "\n".join(lines)

    def log_figure(self, name: str, figure: Figure) -> None:
        """Save ``figures/<name>.png`` and ``.pdf`` and hand them to the loggers."""
        for suffix in ("png", "pdf"):
            path = self.run.figures / f"{name}.{suffix}"
            figure.savefig(path, dpi=150)
            self.tracker.log_artifact(path, "figures")


def _check_optimizer(method: Method) -> None:
    try:
        optimizer = method.configure_optimizers()
    except (ValueError, TypeError) as error:
        raise InputError(f"--model.optimizer; it cannot be built ({error}); correct that argument") from error
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("--model.optimizer LBFGS; a local step has one gradient and no closure; write --model.optimizer SGD")


def _remove(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        file.unlink()
    checkpoint.rmdir()


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM (SLURM's notice) stops the run like Ctrl-C, with exit code 143."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
