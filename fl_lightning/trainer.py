"""FederatedTrainer: Fabric, callbacks, checkpoints and trackers around the rounds of ``loop.py``."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from lightning.fabric.loggers import Logger

from fl_lightning import rng
from fl_lightning.data import FederatedData
from fl_lightning.distributed.launch import (
    join,
    launched_from_outside,
    make_fabric,
    one_first,
    start_others,
    stop_others,
)
from fl_lightning.engines import (
    Engine,
    EngineName,
    check_optimizer,
    check_workers,
    make_engine,
    spread_states,
)
from fl_lightning.engines.determinism import deterministic
from fl_lightning.errors import InputError, MisuseError, require, require_choice
from fl_lightning.hooks import Callback, check_probabilities, stop_reason, tell
from fl_lightning.loop import Federation, run_round, weights_hash
from fl_lightning.methods import Method
from fl_lightning.methods.client_privacy import PrivateAggregation
from fl_lightning.methods.secure import check_secure_sum
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.probing import command as probing
from fl_lightning.run.clients import clients_csv
from fl_lightning.run.directory import RunDirectory, check_name
from fl_lightning.run.interrupts import Interrupts
from fl_lightning.run.journal import Journal
from fl_lightning.run.log import RunLog
from fl_lightning.run.metadata import dataset_of
from fl_lightning.run.places import check_place
from fl_lightning.run.progress import Progress
from fl_lightning.run.resume import Start, find_same, find_start, identity_of, start_on_all_ranks
from fl_lightning.run.trial import trial_run
from fl_lightning.support.recorded import Recorded, settings_of_run
from fl_lightning.support.redaction import redact_settings
from fl_lightning.support.user_code import is_bug_of_user

log = logging.getLogger("fl_lightning")

DealFunction = Callable[[FederatedData, int, torch.device], None]
"""Gives the data their clients, by the run's seed, and moves them to a device."""
RemoteFactory = Callable[[Federation, Mapping[str, Any]], Engine]
"""Makes the engine of a deployment, of the federation and the ``metadata.json`` of the run that is continued;
that is empty for a new run."""


class FederatedTrainer(Recorded):
    """Runs a method over a federation, round by round.

    Args:
        accelerator: Fabric's: ``auto``, ``cpu``, ``cuda``, ``mps``.
        devices: number of devices, or which ones, as Fabric takes them.
        strategy: Fabric's: ``auto``, or ``ddp`` for several processes.
        num_nodes: number of machines.
        rank_timeout: seconds that a process waits for the others, who may still be training, before the run
            is given up; at least 1. A process that died is noticed at once.
        precision: of the local training steps and of evaluation: ``32-true``, ``bf16-mixed`` or ``16-mixed``.
        engine: how clients are executed: ``sequential``, one after another; ``batched``, many at once through
            ``torch.func``; ``auto`` measures both and stays with its choice when the run is continued.
        workers: what trains clients side by side, at least 1: processes on a CPU, where a client trains on
            one thread in any case; with ``cuda_graphs`` streams, at most 8, each with a copy of the model.
            Their number changes nothing but the time and the memory. ``auto``: on a CPU as many as torch
            would use threads; on CUDA 1.
        cuda_graphs: on CUDA, record local steps as CUDA graphs and allow several ``workers``, as streams. No
            card has run this code yet; results are the same bit for bit, or the step is taken eagerly.
        gradient_clip_val: above 0; what the gradient of each local step is clipped to, by the client itself.
            Default: it is not clipped.
        gradient_clip_algorithm: ``norm``: the L2 norm over all parameters is clipped; ``value``: each value
            by itself.
        max_rounds: rounds to run, at least 1.
        participation: share of the clients sampled each round, in (0, 1].
        local_epochs: passes that a client makes over its own data in a round, at least 1.
        max_local_steps: bound on the local steps of a client in a round, at least 1. Default: no bound. With
            one, each round of a client begins a new order of its examples.
        secure_sum: adds up the clients' uploads under masks, so that the server learns their sum alone; null:
            it gets every upload. It needs the extra ``privacy``.
        privacy: client-level differential privacy, as :class:`fl_lightning.privacy.ClientPrivacy` has it:
            ``noise_multiplier``, ``clip_norm``, ``delta``, ``max_epsilon`` ... Default: none.
        eval_every: rounds between evaluations, at least 1; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints, at least 1; 0 writes only the last one. Default: every
            round, or where rounds are short as often as takes 2 % of the time. Resume is exact whichever it
            is: rounds are repeated.
        keep_checkpoints: number of newest checkpoints that are kept, at least 1, beside the best one.
        callbacks: stressors and meters, in this order.
        logger: true for MLflow at ``sqlite:///mlflow.db``, false for none, or any Lightning loggers.
        default_root_dir: folder of all runs.
        experiment: folder of this run's experiment, and its name in MLflow.
        run_name: name of the run; default: method, its module if it has one, data set and seed. A name that
            exists gets a number.
        deterministic: use deterministic algorithms and name in the log those that have no such form.
        auto_resume: continue the latest run of the same experiment, name and configuration if there is one,
            else start it.
        allow_changed: resume although the configuration differs from the checkpoint's.
        fast_dev_run: true or a number of rounds: try everything out, in 1 or so many rounds of at most two
            clients with one local step each, without trackers, and leave nothing behind.
        tags: names and values that the trackers show beside the run, and that are kept in ``metadata.json``;
            they change nothing.
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
        engine: EngineName = "auto",
        workers: int | Literal["auto"] = "auto",
        cuda_graphs: bool = False,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        max_rounds: int = 100,
        participation: float = 0.2,
        local_epochs: int = 2,
        max_local_steps: int | None = None,
        secure_sum: SecureSum | None = None,
        privacy: ClientPrivacy | None = None,
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
        fast_dev_run: int | bool = False,
        tags: dict[str, str] | None = None,
    ) -> None:
        for name, value, least in (
            ("max_rounds", max_rounds, 1),
            ("local_epochs", local_epochs, 1),
            ("max_local_steps", 1 if max_local_steps is None else max_local_steps, 1),
            ("eval_every", eval_every, 1),
            ("checkpoint_every", checkpoint_every or 0, 0),
            ("keep_checkpoints", keep_checkpoints, 1),
            ("num_nodes", num_nodes, 1),
            ("rank_timeout", rank_timeout, 1),
            ("workers", 1 if workers == "auto" else workers, 1),
            ("fast_dev_run", fast_dev_run, 0),
        ):
            require(
                value >= least,
                f"--trainer.{name} {value}",
                f"at least {least} is needed",
                f"write --trainer.{name} {max(least, 1)}",
            )
        require(
            0 < participation <= 1,
            f"--trainer.participation {participation}",
            "it is a share of the clients, in (0, 1]",
            "write --trainer.participation 0.2",
        )
        require(
            gradient_clip_val is None or 0 < gradient_clip_val < math.inf,
            f"--trainer.gradient_clip_val {gradient_clip_val}",
            "it is above 0 and finite, or null: nothing is clipped",
            "write --trainer.gradient_clip_val 1.0",
        )
        require_choice(gradient_clip_algorithm, ("norm", "value"), "--trainer.gradient_clip_algorithm")
        for name, text in (("experiment", experiment), ("run_name", run_name or "x")):
            check_name(text, f"--trainer.{name} {text!r}")
        self.privacy = None if privacy is None else PrivateAggregation(privacy)
        self.callbacks = [*([self.privacy] if self.privacy else []), *(callbacks or [])]
        self.fabric = make_fabric(
            accelerator,
            devices,
            strategy,
            num_nodes,
            precision=precision,
            timeout=rank_timeout,
            callbacks=self.callbacks,
        )
        self.engine, self.workers, self.cuda_graphs = engine, workers, cuda_graphs
        self.gradient_clip_val, self.gradient_clip_algorithm = gradient_clip_val, gradient_clip_algorithm
        self.max_rounds = max_rounds
        self.participation = participation
        self.local_epochs = local_epochs
        self.max_local_steps = max_local_steps
        self.secure_sum = secure_sum
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
        self.tags = dict(tags or {})
        self.rank_timeout = rank_timeout
        self.fast_dev_run = int(fast_dev_run)
        self.interrupts = Interrupts()
        self.log_file = RunLog()
        self.config: dict[str, Any] = {}
        self.config_text = ""
        self.command_line: Sequence[str] = ()
        self.remote: RemoteFactory | None = None
        self.deal: DealFunction | None = None

    @property
    def run(self) -> RunDirectory:
        return self.journal.run

    @property
    def run_dir(self) -> Path:
        return self.run.path

    def fit(
        self, method: Method, data: FederatedData, *, seed: int = 0, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Train and return the ``final/*`` metrics.

        Args:
            ckpt_path: a checkpoint, a run directory, or ``last``, to continue that run.

        Raises:
            InputError: the data, the checkpoint or the output folder cannot be used; nothing has been created
                then.
            RunStopped: a process was lost, the run directory cannot be written any more, or no upload ever
                counted.
        """
        with deterministic(self.deterministic), self.interrupts, self.log_file, trial_run(self, ckpt_path):
            self.method, self.data, self.seed = method, data, seed
            outside = launched_from_outside(self.fabric)
            if outside:
                join(self.fabric)
            settings = self._settings()
            config = (
                self.config_text if settings == self.config else yaml.safe_dump(settings, sort_keys=False)
            )
            start = start_on_all_ranks(lambda: self._choose_start(ckpt_path, settings))
            fed = self._prepare()
            self.check_start(start, deployed=self.remote is not None)
            if self.secure_sum is not None:
                check_secure_sum(self.secure_sum, method, fed.cohort_size)
                if self.remote is None:
                    log.info(
                        "secure_sum: keys are drawn from the seed, for reproducible runs; they are no secrets"
                    )
            self.progress = Progress(
                settings,
                identity_of(fed),
                data.task,
                every=self.checkpoint_every,
                keep=self.keep_checkpoints,
            )
            self.progress.restore(fed, start, self.allow_changed)
            if self.privacy is not None:
                self.privacy.check_rounds(self.progress.done.round)
            method.round = self.progress.done.round
            self.journal = Journal(
                start, self.progress, config, self.root, self.experiment, self._name, logger=self.logger
            )
            if self.journal.is_finished(self.max_rounds, self._stop_reason):
                return self.progress.summary
            fed.files = self.journal
            running = ExitStack()
            running.callback(self.journal.close)
            try:
                if not outside:
                    start_others(self.fabric, start.name)
                with (
                    self.interrupts.held()
                ):  # Python drops what a signal handler raises while a worker is forked
                    engine = self._start_engine(fed, running)
                with self.interrupts.held(), self.journal.writing():
                    self.journal.open(fed, engine.name, self.command_line, self.tags, self.log_file)
                    self._note(engine)
                try:
                    tell(self.callbacks, "on_setup", fed)
                finally:  # not before: opening a store takes seconds, which the callbacks need not share
                    self.journal.track()
                while self.progress.done.round < self.max_rounds and not self._stop_reason:
                    self._run_round(fed, engine)
                return self._finish(fed)
            except BaseException as error:
                stop_others()
                if isinstance(error, SystemExit) and not self._is_interrupt(error):
                    error = _left(error)
                if self.journal.is_open:
                    self._stop(error, fed)
                raise error
            finally:
                running.close()

    def test(
        self,
        method: Method,
        data: FederatedData,
        *,
        seed: int = 0,
        ckpt_path: str | None = None,
        checkpoint: str | None = None,
        probes: str | None = None,
    ) -> dict[str, float]:
        """Probe a run that has ended, in one process, and return the metrics; nothing is trained.

        Args:
            ckpt_path: a run directory, one of its checkpoints, or ``last``. Without --config, the run's own
                configuration is used.
            checkpoint: which of the run's checkpoints: ``last`` (the default), ``best`` (of validation), or a
                name like round_000060.
            probes: which of clean, clients, calibration, corruptions, fgsm, pgd, kinds, cost, latency,
                generation, membership, inversion; separated by commas. Default: all but inversion.

        Raises:
            InputError: there is no such checkpoint, or it was trained with another method, other data or
                another seed.
        """
        with deterministic(self.deterministic), self.interrupts:
            self.method, self.data, self.seed = method, data, seed
            if launched_from_outside(self.fabric):
                raise InputError(
                    "test in several processes", "it runs in one", "start it without torchrun or srun"
                )
            return probing.examine(
                self._prepare,
                ckpt_path,
                self.root / self.experiment,
                checkpoint=checkpoint,
                probes=probes,
                logger=self.logger,
                settings=self._settings(),
                allow_changed=self.allow_changed,
            )

    def prepare(self, method: Method, data: FederatedData, *, seed: int = 0) -> Federation:
        """Deal out the data, build the network, and return the federation; nothing is trained or created.

        Raises:
            InputError: the data or the method cannot be used.
        """
        with deterministic(self.deterministic):
            self.method, self.data, self.seed = method, data, seed
            return self._prepare()

    def _choose_start(self, ckpt_path: str | None, settings: dict[str, Any]) -> Start:
        if ckpt_path:
            return find_start(ckpt_path, self.root / self.experiment, self.run_name)
        if self.auto_resume:
            return find_same(self.root / self.experiment, self._name, settings)
        return Start()

    def check_start(self, start: Start, *, deployed: bool) -> None:
        """Refuse to continue a run whose clients' states are elsewhere; the data have been prepared.

        Args:
            start: the run that is continued, if one is.
            deployed: whether clients are on nodes from here on.

        Raises:
            InputError: it cannot be continued here.
        """
        check_place(start, deployed=deployed, private=self.privacy is not None, own_data=self.data.apart)

    def _settings(self) -> dict[str, Any]:
        """Return the configuration without secrets: from the command line, or else from the constructors'
        arguments."""
        return redact_settings(self.config or settings_of_run(self, self.method, self.data, self.seed))

    @property
    def _name(self) -> str:
        module = [] if self.method.module is None else [type(self.method.module).__name__]
        return self.run_name or "-".join(
            [type(self.method).__name__, *module, dataset_of(self.data), f"seed{self.seed}"]
        )

    @property
    def _stop_reason(self) -> str:
        """Why the run ends after the rounds that are done; empty: it goes on."""
        return stop_reason([self.privacy] if self.fast_dev_run else self.callbacks)

    def _prepare(self) -> Federation:
        """Build all that can refuse its input, before anything is created."""
        try:
            self._build()
        except (InputError, MisuseError):
            raise
        except (ValueError, OSError) as error:
            if isinstance(error, ValueError) and is_bug_of_user(error):
                raise
            raise InputError.from_text(str(error)) from error
        fed = Federation(
            self.fabric,
            self.method,
            self.data,
            self.callbacks,
            seed=self.seed,
            max_rounds=self.max_rounds,
            participation=self.participation,
            local_epochs=self.local_epochs,
            max_local_steps=self.max_local_steps,
            secure_sum=self.secure_sum,
            eval_every=self.eval_every,
            privacy=self.privacy,
        )
        try:
            check_probabilities(self.callbacks, self.data.task)
            tell(self.callbacks, "on_check", fed)
        except (InputError, MisuseError):
            raise
        except ValueError as error:
            if is_bug_of_user(error):
                raise
            raise InputError.from_text(str(error)) from error
        return fed

    def _build(self) -> None:
        """Prepare the data, deal them out and build the network."""
        one_first(self.fabric, self.data.prepare_data)
        self.data.setup("fit")
        if self.deal is None:
            self.data.distribute(self.seed, self.fabric.device)
        else:
            self.deal(self.data, self.seed, self.fabric.device)
        self.method.seed = self.seed
        self.method.gradient_clip_val = self.gradient_clip_val
        self.method.gradient_clip_algorithm = self.gradient_clip_algorithm
        with rng.torch_stream(self.seed, "weights"):
            self.method.build(self.data)
        self.method.to(self.fabric.device)
        check_name(self._name, f"the run's name {self._name!r}")
        check_optimizer(self.method, self.max_rounds)
        check_workers(self.fabric, self.workers, self.engine, cuda_graphs=self.cuda_graphs)

    def _start_engine(self, fed: Federation, running: ExitStack) -> Engine:
        """Choose and start the engine, which ``running`` closes.

        It comes before the trackers: workers are forks, and a fork must not find locks that threads of this
        process hold.
        """
        spread_states(fed.states, fed.holders)
        engine = self._make_engine(fed)
        running.callback(engine.close)
        engine.start()
        return engine

    def _make_engine(self, fed: Federation) -> Engine:
        if self.remote is not None:
            return self.remote(fed, self.journal.before)
        return make_engine(
            self.fabric,
            self.method,
            self.data,
            engine=self.engine,
            workers=self.workers,
            before=self.journal.engine,
            cohort=fed.cohort_size,
            timeout=self.rank_timeout,
            cuda_graphs=self.cuda_graphs,
            holders=fed.holders,
        )

    def _note(self, engine: Engine) -> None:
        """Note where clients are trained, if there is something to note and it is new."""
        notes = engine.notes()
        if any(self.journal.metadata.get(name) != value for name, value in notes.items()):
            self.journal.note(**notes)

    def _run_round(self, fed: Federation, engine: Engine) -> None:
        self.interrupts.check()
        round = self.progress.done.round + 1
        tell(self.callbacks, "on_round_start", round, fed)
        record = run_round(fed, engine, round)
        tell(self.callbacks, "on_round_end", record, fed)
        with self.interrupts.held(), self.journal.writing():
            self.progress.add(fed, record, self.run)
            self.journal.log_round(record.metrics, round)
            self._note(engine)

    def _finish(self, fed: Federation) -> dict[str, float]:
        summary = self.progress.summary
        with self.interrupts.held(), self.journal.writing():
            self.progress.save(self.run)
        tell(self.callbacks, "on_fit_end", summary, fed)
        self.progress.check_learned()
        early = self.progress.done.round < self.max_rounds
        reason = self._stop_reason if early else ""
        with self.journal.writing():
            self.journal.finish(
                summary,
                weights_hash(fed),
                clients=clients_csv(fed.data, self.progress.done.clients),
                stopped_early=reason,
                kept=not self.fast_dev_run,
            )
        return summary

    def _stop(self, error: BaseException, fed: Federation) -> None:
        """End the run early: keep what is done and say how to continue."""
        self.interrupts.ignore()
        interrupted, done = self._is_interrupt(error), self.progress.done.round
        if not interrupted:
            self.log_file.add_traceback(error)
            if self.log_file.path is not None and not self.fast_dev_run:
                error.run_log = self.log_file.path  # type: ignore[attr-defined]
        try:
            self.progress.save(self.run)
            self.journal.note(status="interrupted" if interrupted else "failed")
        except OSError as problem:
            log.error("no checkpoint of round %d could be written (%s)", done, problem)
        try:
            tell(self.callbacks, "on_exception", error, fed)
        except Exception as second:  # it must not hide the first one, nor keep the trackers from being closed
            log.exception("on_exception of a callback failed (%s: %s)", type(second).__name__, second)
        if self.fast_dev_run:
            log.error("fast_dev_run: stopped in round %d; nothing was kept", done + 1)
        elif min(done, self.progress.saved) < self.max_rounds:
            again = f"after round {self.progress.saved}" if self.progress.saved else "from the start"
            log.error(
                "stopped in round %d; continue %s with --ckpt_path %s",
                min(done + 1, self.max_rounds),
                again,
                self.run_dir,
            )
        self.interrupts.release()
        self.journal.stop("KILLED" if interrupted else "FAILED")

    def _is_interrupt(self, error: BaseException) -> bool:
        """Return whether a signal, or an exit as after one, ends the run, and not an error."""
        asked = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
        return self.interrupts.received or isinstance(error, KeyboardInterrupt) or asked


def _left(error: SystemExit) -> RuntimeError:
    """Make an error of a ``sys.exit`` in the code of a run, whose code 0 would say that the run is done."""
    found = RuntimeError(f"code of this run called sys.exit({error.code!r}) in mid-run; raise an exception")
    found.__cause__ = error
    return found
