"""FederatedTrainer: Fabric, callbacks, checkpoints, trackers around the rounds of ``loop.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal

from lightning.fabric.loggers import Logger

from fl_lightning.clock import Clock, Rounds
from fl_lightning.compatibility.signatures import check_signatures
from fl_lightning.config.constraints import at_least, within
from fl_lightning.config.documents import as_yaml
from fl_lightning.config.recorded import settings_of_run
from fl_lightning.data import FederatedData
from fl_lightning.distributed.launch import join, launched_from_outside, make_fabric
from fl_lightning.engines import Engine, EngineName, make_engine
from fl_lightning.engines.determinism import deterministic
from fl_lightning.errors import require
from fl_lightning.export import FormatName, Target, export_checkpoint
from fl_lightning.federation import Federation
from fl_lightning.hooks import Callback, stop_reason
from fl_lightning.methods import Method
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.probing import command as probing
from fl_lightning.rng import generators_kept
from fl_lightning.run.directory import RunName, check_name
from fl_lightning.run.dry_run import forecast, show
from fl_lightning.run.given import check_given
from fl_lightning.run.interrupts import Interrupts
from fl_lightning.run.journal import Journal
from fl_lightning.run.log import RunLog
from fl_lightning.run.metadata import name_of
from fl_lightning.run.preparation import DealFunction, check_settings, prepare_federation
from fl_lightning.run.progress import Progress
from fl_lightning.run.resume import choose_start, identity_of
from fl_lightning.run.round_parts import RoundParts
from fl_lightning.run.session import RunSession
from fl_lightning.run.trial import trial_run
from fl_lightning.run.views import RunViews
from fl_lightning.sampling import Sampler
from fl_lightning.support.notebook import Results
from fl_lightning.support.redaction import redact_settings
from fl_lightning.topology import Topology

log = logging.getLogger("fl_lightning")

RemoteFactory = Callable[[Federation, Mapping[str, Any]], Engine]
"""Makes the engine of a deployment, of the federation and the ``metadata.json`` of the run that is
continued; that is empty for a new run."""


class FederatedTrainer(RunViews):
    """Runs a method over a federation, round by round.

    Args:
        accelerator: Fabric's: ``auto``, ``cpu``, ``cuda``; none is MPS, which has no float64.
        devices: number of devices, or which ones, as Fabric takes them.
        strategy: Fabric's: ``auto``, or ``ddp`` for several processes.
        num_nodes: number of machines.
        rank_timeout: seconds that a process waits for the others, who may still be training, before
            the run is given up; at least 1. A process that died is noticed at once.
        precision: of the local training steps and of evaluation: ``32-true``, ``bf16-mixed`` or
            ``16-mixed``.
        engine: how clients are executed: ``sequential``, one after another; ``batched``, many at
            once through ``torch.func``; ``auto`` measures both and stays with its choice when the
            run is continued.
        workers: processes that train clients side by side on a CPU, at least 1; a client trains on
            one thread in any case. Their number changes nothing but the time and the memory.
            ``auto``: on a CPU as many as torch would use threads; on CUDA 1.
        cuda_graphs: has no effect any more; it stands in configurations of earlier versions, in
            which it changed no result.
        gradient_clip_val: above 0; what the gradient of each local step is clipped to, by the
            client itself. Default: it is not clipped.
        gradient_clip_algorithm: ``norm``: the L2 norm over all parameters is clipped; ``value``:
            each value by itself.
        max_rounds: rounds to run, at least 1.
        participation: share of the clients sampled each round, in (0, 1].
        local_epochs: passes that a client makes over its own data in a round, at least 1.
        max_local_steps: bound on the local steps of a client in a round, at least 1. Default: no
            bound. With one, each round of a client begins a new order of its examples.
        secure_sum: adds up the clients' uploads under masks, so that the server learns their sum
            alone; null: it gets every upload. It needs the extra ``privacy``.
        privacy: client-level differential privacy, as :class:`fl_lightning.privacy.ClientPrivacy`
            has it: ``noise_multiplier``, ``clip_norm``, ``delta``, ``max_epsilon`` ... Default:
            none.
        clock: virtual seconds of devices and lines, as :class:`fl_lightning.clock.Clock` has them:
            ``devices``, ``network``, ``availability``, ``edges``. Default: rounds take none.
        rounds: ``Synchronous``, ``OverSelection``, ``Deadline``, ``FedBuff`` or ``FedAsync`` of
            :mod:`fl_lightning.clock`; in simulation all but the first need a clock, and the last
            two have a concurrency in place of ``participation``. Default: ``Synchronous``.
        topology: who talks to whom: ``Star``, ``Hierarchy``, ``Gossip`` or ``Moshpit`` of
            :mod:`fl_lightning.topology`. Default: ``Star``, one server.
        sampler: who is asked: ``Uniform``, ``PowerOfChoice`` or ``Oort`` of
            :mod:`fl_lightning.sampling`; the last needs a clock. Default: ``Uniform``.
        eval_every: rounds between evaluations, at least 1; the last of ``max_rounds`` is always
            evaluated, and so is the one with which privacy ends the run.
        checkpoint_every: rounds between checkpoints, at least 1; 0 writes only the last one.
            Default: every round, or where rounds are short as often as takes 2 % of the time.
            Resume is exact whichever it is: rounds are repeated.
        keep_checkpoints: number of newest checkpoints that are kept, at least 1, beside the best
            one.
        callbacks: stressors and meters, in this order.
        logger: true for MLflow at ``sqlite:///mlflow.db``, false for none, or any Lightning
            loggers.
        default_root_dir: folder of all runs.
        experiment: folder of this run's experiment, and its name in MLflow.
        run_name: name of the run; default: method, its module if it has one, data set, what flags
            change in the configuration files (:mod:`fl_lightning.cli.run_names`) and seed. A name
            that exists gets a number.
        deterministic: use deterministic algorithms and name in the log those that have no such
            form.
        auto_resume: continue the latest run of the same experiment, name and configuration if there
            is one, else start it.
        allow_changed: resume although the configuration differs from the checkpoint's.
        fast_dev_run: true or a number of rounds: try everything out, in 1 or so many rounds of at
            most two clients with one local step each, without trackers, and leave nothing behind.
        tags: names and values that the trackers show beside the run, and that are kept in
            ``metadata.json``; they change nothing.
    """

    settings_shown = ("--trainer.{name} {value}", "--trainer.{name} {value}")

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str = 1,
        strategy: str = "auto",
        num_nodes: Annotated[int, at_least(1)] = 1,
        rank_timeout: Annotated[int, at_least(1)] = 1800,
        precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true",
        engine: EngineName = "auto",
        workers: Annotated[int | Literal["auto"], at_least(1)] = "auto",
        cuda_graphs: bool = False,
        gradient_clip_val: Annotated[
            float | None,
            within("(0, inf)", "it is above 0 and finite, or null: nothing is clipped", 1.0),
        ] = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        max_rounds: Annotated[int, at_least(1)] = 100,
        participation: Annotated[
            float, within("(0, 1]", "it is a share of the clients, in (0, 1]", 0.2)
        ] = 0.2,
        local_epochs: Annotated[int, at_least(1)] = 2,
        max_local_steps: Annotated[int | None, at_least(1)] = None,
        secure_sum: SecureSum | None = None,
        privacy: ClientPrivacy | None = None,
        clock: Clock | None = None,
        rounds: Rounds | None = None,
        topology: Topology | None = None,
        sampler: Sampler | None = None,
        eval_every: Annotated[int, at_least(1)] = 1,
        checkpoint_every: Annotated[int | None, at_least(0)] = None,
        keep_checkpoints: Annotated[int, at_least(1)] = 2,
        callbacks: list[Callback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        default_root_dir: str = "runs",
        experiment: str = "fl_lightning",
        run_name: str | None = None,
        deterministic: bool = True,
        auto_resume: bool = False,
        allow_changed: bool = False,
        fast_dev_run: Annotated[int | bool, at_least(0)] = False,
        tags: dict[str, str] | None = None,
    ) -> None:
        for name, text in (("experiment", experiment), ("run_name", run_name or "x")):
            check_name(text, f"--trainer.{name} {text!r}")
        self.parts = RoundParts.of(secure_sum, privacy, clock, rounds, topology, sampler)
        self.callbacks = self.parts.around(callbacks or [])
        check_signatures(self.callbacks)
        self.fabric = make_fabric(
            accelerator,
            devices,
            strategy,
            num_nodes,
            precision=precision,
            timeout=rank_timeout,
            callbacks=self.callbacks,
        )
        self.engine, self.workers = engine, workers
        if cuda_graphs:
            log.warning("trainer.cuda_graphs has no effect: steps are not recorded; leave it out")
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.max_rounds = max_rounds
        self.participation = participation
        self.local_epochs = local_epochs
        self.max_local_steps = max_local_steps
        self.eval_every = eval_every
        self.checkpoint_every = checkpoint_every
        self.keep_checkpoints = keep_checkpoints
        self.logger = logger
        self.root = Path(expanduser(default_root_dir)).absolute()
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
        self.overrides: Sequence[str] = ()
        self.remote: RemoteFactory | None = None
        self.deal: DealFunction | None = None

    def fit(
        self,
        method: Method,
        data: FederatedData,
        *,
        seed: int = 0,
        ckpt_path: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, float]:
        """Train and return the ``final/*`` metrics, a dictionary that a notebook shows as a table.

        Args:
            ckpt_path: a checkpoint, a run directory, or ``last``, to continue that run.
            dry_run: print how much memory a client takes and what travels in a round, and return
                that, from the configuration of the network alone: no weights or data are loaded,
                and nothing is trained or created.

        Raises:
            InputError: the data, the checkpoint or the output folder cannot be used; nothing has
                been created then.
            RunStopped: a process was lost, the run directory cannot be written any more, or no
                upload ever counted.
        """
        self._take(method, data, seed)
        if dry_run:
            return self._forecast(method, data)
        with (
            deterministic(self.deterministic),
            generators_kept(),
            self.interrupts,
            self.log_file,
            trial_run(self, method, ckpt_path),
        ):
            outside = launched_from_outside(self.fabric)
            if outside:
                join(self.fabric)
            settings = self._settings()
            config = self.config_text if settings == self.config else as_yaml(settings)
            folder = self.root / self.experiment
            start = choose_start(
                ckpt_path, folder, self._name, settings, auto_resume=self.auto_resume
            )
            data.continued = start.run is not None
            fed = self._prepare()
            deployed = self.remote is not None
            self.parts.check_start(start, data, deployed=deployed)
            self.parts.check_masks(fed, deployed=deployed)
            every, keep = self.checkpoint_every, self.keep_checkpoints
            progress = Progress(settings, identity_of(fed), data.task, every=every, keep=keep)
            progress.restore(fed, start, self.allow_changed)
            self.parts.continue_in(start.run, progress, self.fabric.device)
            method.round = progress.done.round
            place = self.root, self.experiment, str(self._name)
            journal = Journal(start, progress, config, *place, logger=self.logger)
            session = RunSession(
                fed,
                journal,
                self.interrupts,
                self.log_file,
                make_engine=partial(self._make_engine, journal),
                stop_reason=lambda: self._stop_reason,
                begun=partial(self._show, journal, method, data),
                command_line=self.command_line,
                tags=self.tags,
                keeps=not self.fast_dev_run,
            )
            return Results(session.run(launch_as=None if outside else start.name))

    def _forecast(self, method: Method, data: FederatedData) -> dict[str, float]:
        self.check_settings(method)
        found = forecast(
            method,
            data,
            participation=self.participation,
            rounds=self.max_rounds,
            secure_sum=self.parts.masks,
            kind=self.parts.rounds,
            topology=self.parts.topology,
            sampler=self.parts.sampler,
        )
        show(found, method, data, str(self.fabric.strategy.precision.precision))
        return Results(found.metrics())

    def test(
        self,
        method: Method,
        data: FederatedData,
        *,
        seed: int | None = None,
        ckpt_path: str | None = None,
        checkpoint: str | None = None,
        probes: str | None = None,
    ) -> dict[str, float]:
        """Probe a run that has ended, in one process, and return the metrics; nothing is trained.

        Args:
            ckpt_path: a run directory or one of its checkpoints, whose configuration is used; with
                --config also ``last``, the last run of the experiment. In Python the default is
                the run that this trainer has fitted last, with its seed.
            checkpoint: which of the run's checkpoints: ``last`` (the default), ``best`` (of
                validation), or a name like round_000060.
            probes: which of clean, clients, calibration, corruptions, fgsm, pgd, kinds, cost,
                latency, generation, membership, inversion; separated by commas. Default: all but
                inversion.

        Raises:
            InputError: there is no such checkpoint, or it was trained with another method, other
                data or another seed.
        """
        with deterministic(self.deterministic), generators_kept(), self.interrupts:
            self._take(method, data, self._seed_of(seed, ckpt_path), alone="test")
            data.continued = True
            found = probing.examine(
                self._prepare,
                ckpt_path or self._own_run,
                self.root / self.experiment,
                checkpoint=checkpoint,
                probes=probes,
                logger=self.logger,
                settings=self._settings(),
                allow_changed=self.allow_changed,
            )
            return Results(found)

    def export(
        self,
        method: Method,
        data: FederatedData,
        *,
        seed: int | None = None,
        ckpt_path: str | None = None,
        to: str | None = None,
        client: int | None = None,
        checkpoint: str | None = None,
        format: FormatName = "auto",
        overwrite: bool = False,
    ) -> Path:
        """Write the model of a run into a folder that other programs load, and return the folder.

        Args:
            ckpt_path: a run directory or one of its checkpoints, whose configuration is used; with
                --config also ``last``, the last run of the experiment. In Python the default is
                the run that this trainer has fitted last, with its seed.
            to: the folder; it is new or empty.
            client: whose model, of a personalised method.
            checkpoint: which of the run's checkpoints: ``last`` (the default), ``best`` (of
                validation), or a name like round_000060.
            format: ``safetensors``: named tensors; ``peft``: adapters; ``transformers``: a language
                model, adapters merged; ``onnx``; ``auto``: peft or transformers where they can load
                it, else safetensors.
            overwrite: whether the folder may hold files; those of an export before are replaced.

        Raises:
            InputError: there is no such checkpoint, client or format, an optional extra is missing,
                or the folder is not empty.
        """
        with deterministic(self.deterministic), generators_kept(), self.interrupts:
            self._take(method, data, self._seed_of(seed, ckpt_path), alone="export")
            data.continued = True
            return export_checkpoint(
                self._prepare,
                ckpt_path or self._own_run,
                self.root / self.experiment,
                Target(to or "", client, format, overwrite),
                checkpoint=checkpoint,
                settings=self._settings(),
                allow_changed=self.allow_changed,
            )

    def prepare(self, method: Method, data: FederatedData, *, seed: int = 0) -> Federation:
        """Deal out the data, build the network, and return the federation; nothing is trained or
        created.

        Raises:
            InputError: the data or the method cannot be used.
        """
        with deterministic(self.deterministic), generators_kept():
            self._take(method, data, seed)
            return self._prepare()

    def check_settings(self, method: Method, data: FederatedData | None = None) -> None:
        """Refuse what cannot be combined, as far as that can be told before the network is made.

        Args:
            data: dealt out to the clients; None: they have not been read.
        """
        check_settings(self, method, data)

    def _take(self, method: Method, data: FederatedData, seed: int, alone: str = "") -> None:
        check_given(method, data, seed)
        self.method, self.data, self.seed = method, data, int(seed)
        require(
            not alone or not launched_from_outside(self.fabric),
            f"{alone} in several processes",
            "it runs in one",
            "start it without torchrun or srun",
        )

    def _settings(self) -> dict[str, Any]:
        """Return the configuration without secrets: from the command line, or else from the
        constructors' arguments."""
        return redact_settings(
            self.config or settings_of_run(self, self.method, self.data, self.seed)
        )

    @property
    def _name(self) -> RunName:
        return name_of(
            self.method, self.data, self.seed, asked=self.run_name, changed=self.overrides
        )

    @property
    def _stop_reason(self) -> str:
        """Why the run ends after the rounds that are done; empty: it goes on."""
        return stop_reason(self.parts.budgets if self.fast_dev_run else self.callbacks)

    def _prepare(self) -> Federation:
        check_name(str(self._name), f"the run's name {str(self._name)!r}")
        return prepare_federation(self, self.method, self.data, self.seed)

    def _make_engine(self, journal: Journal, fed: Federation) -> Engine:
        if self.remote is not None:
            return self.remote(fed, journal.before)
        return make_engine(
            self.fabric,
            self.method,
            self.data,
            engine=self.engine,
            workers=self.workers,
            before=journal.engine,
            cohort=fed.cohort_size,
            timeout=self.rank_timeout,
            holders=fed.holders,
        )
