"""Toy federations on which a method is checked; runs that several checks need are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning import rng
from fl_lightning.conformance.expectations import QuadraticRun, WeightAverage
from fl_lightning.conformance.federations import IMAGES
from fl_lightning.conformance.known_methods import MethodUnderTest
from fl_lightning.conformance.toy import CENTRES, Points, Quadratic, on_points, run
from fl_lightning.conformance.verdicts import NotApplicable, Violation, expect
from fl_lightning.conformance.watch import InPlaceDetector, RunRecorder, equal_with_nan
from fl_lightning.data import FederatedData
from fl_lightning.engines import ClientResult, ClientTask, SequentialEngine
from fl_lightning.engines.finetuning import prepare_finetuning
from fl_lightning.engines.root_set import prepare_guides
from fl_lightning.engines.sequential import upload_of
from fl_lightning.hooks import Callback
from fl_lightning.methods import Method
from fl_lightning.methods.optimizing import local_optimizer
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.wire import Codes, Ledger, LedgerEntry, Payload

Value = Tensor | Codes
"""One entry of a payload."""
ONE_PROCESS = {"engine": "sequential", "workers": 1}  # the verdict is the same on every machine
LOCAL_EPOCHS = 2  # of every toy run, as its trainer has it
NO_EVALUATION = 10**6  # rounds: ``eval_every`` beyond the end of every toy run


@dataclass(frozen=True)
class FinishedRun:
    """A finished run with its method, trainer and records."""

    method: Method
    trainer: FederatedTrainer
    log: RunRecorder

    @property
    def ledger(self) -> list[LedgerEntry]:
        """Entries of the run's ledger."""
        return Ledger.from_csv((self.trainer.run_dir / "ledger.csv").read_text()).entries

    @property
    def sizes(self) -> list[int]:
        """Number of training examples of each client."""
        return [
            len(self.trainer.data.client(id).train) for id in range(self.trainer.data.num_clients)
        ]

    def answers(self) -> list[Tensor]:
        """Return the answer of the deployed model to the input 1, float32 ``[6]``.

        A personalised method gives one answer for each client.
        """
        return _answers(self.method, self.trainer.data, self.log.kept)

    def task(self, round: int, id: int, data: FederatedData, **changes: Any) -> ClientTask:
        """Return what a client was to do in a round: with the message that it was sent and what it
        had kept until then.

        Args:
            round: one of the run.
            id: of a client of its cohort.
            data: that the client finds its examples in.
            changes: fields of the task that differ from the regular ones.
        """
        client = data.client(id, dict(self.log.kept_before(round).get(id, {})))
        steps = data.num_steps(client, LOCAL_EPOCHS)
        task = {"labels": data.labels(client), "epochs": LOCAL_EPOCHS, "steps": steps, **changes}
        return ClientTask(client, round, self.log.broadcasts[round, id], **task)


class Bench:
    """The toy runs of one method.

    Args:
        subject: the method under test.
        folder: folder in which each run gets a folder of its own.
    """

    def __init__(self, subject: MethodUnderTest, folder: Path) -> None:
        self.subject, self.folder, self.in_place_detector = subject, folder, InPlaceDetector()

    # Images or text

    def run(
        self,
        *callbacks: Callback,
        method: Method | None = None,
        ckpt_path: str | None = None,
        **settings: Any,
    ) -> FinishedRun:
        """Run the method on examples of six clients; by default two rounds with every client."""
        federation = self.subject.federation
        method, log = federation.prepare(method or self.subject.make()), RunRecorder()
        settings = {"max_rounds": 2, **ONE_PROCESS, **settings}
        trainer = run(
            method,
            federation.data(),
            mkdtemp(dir=self.folder),
            callbacks=[*callbacks, log],
            ckpt_path=ckpt_path,
            **settings,
        )
        return FinishedRun(method, trainer, log)

    @cached_property
    def everyone(self) -> FinishedRun:
        """A run of three rounds with every client, watched by ``in_place_detector``."""
        return self.run(self.in_place_detector, max_rounds=3)

    @cached_property
    def two_of_six(self) -> FinishedRun:
        """A run of four rounds with two clients each."""
        return self.run(max_rounds=4, participation=2 / 6)

    @cached_property
    def data(self) -> FederatedData:
        """The examples, distributed to the clients."""
        return prepare_data(self.subject.federation.data())

    def untrained(
        self, round: int = 1, server: Mapping[str, Tensor] | None = None, cohort: Sequence[int] = ()
    ) -> Method:
        """Return a new method in the given round, all of whose cohort's uploads count, that has
        seen nothing but this state of the server."""
        method = self.subject.federation.prepare(self.subject.make())
        build_method(method, self.data)
        method.round = round
        if cohort:
            method.cohort, method.served = len(cohort), sorted(cohort)
        if server is not None:
            method.server = dict(server)
        return method

    def alone(
        self,
        run: FinishedRun,
        round: int,
        id: int,
        *,
        data: FederatedData | None = None,
        forget: bool = False,
        **changes: Any,
    ) -> ClientResult:
        """Return the result of a client in a round of a run, from a new method that has trained
        nobody.

        Args:
            run: holds what the client receives and has kept, and the server's state.
            round: one of the run.
            id: of a client of its cohort.
            data: data set in place of the bench's.
            forget: whether to overwrite the server's tensors before the client trains.
            changes: fields of the client's task that differ from the regular ones.
        """
        method, data = self.untrained(round, run.log.servers[round - 1]), data or self.data
        if forget:
            method.server = {name: torch.ones_like(value) for name, value in method.server.items()}
        engine = SequentialEngine(run.trainer.fabric, method, data)
        return engine.train_client(run.task(round, id, data, **changes))

    # The quadratic

    def points(
        self,
        counts: tuple[int, ...],
        *callbacks: Callback,
        labels: tuple[int, ...] | None = None,
        batch_size: int = 64,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        **settings: Any,
    ) -> FinishedRun:
        """Run the method on the quadratic; by default three rounds of two steps with every client.

        Args:
            counts: number of examples of each client.
            callbacks: callbacks of the run.
            labels: number of the centre of each client; None: the client's id.
            batch_size: examples of a local step.
            scheduler: makes the learning rate's scheduler, given the optimiser.
            settings: arguments of the trainer.

        Raises:
            NotApplicable: the method does not run on the quadratic.
        """
        self._require_points()
        method, log = self._on_points(), RunRecorder()
        method.scheduler_spec = scheduler
        settings = {
            "max_rounds": 3,
            "eval_every": NO_EVALUATION,
            "checkpoint_every": 0,
            **ONE_PROCESS,
            **settings,
        }
        data = Points(counts, labels, public=5, batch_size=batch_size)
        trainer = run(
            method, data, mkdtemp(dir=self.folder), callbacks=[*callbacks, log], **settings
        )
        return FinishedRun(method, trainer, log)

    def quadratic_run(
        self, counts: tuple[int, ...], local_epochs: int = 2, **settings: Any
    ) -> QuadraticRun:
        """Run the method on the quadratic, for a comparison with an :class:`Expectation`.

        Raises:
            NotApplicable: nothing is known of the method's path.
        """
        self.require_known()
        done = self.points(counts, local_epochs=local_epochs, **settings)
        start = self.start_on_points(done.trainer.data)
        epochs, noise = local_epochs, self.subject.noise
        return QuadraticRun(
            done.method, start, done.answers(), counts, done.log.cohorts, epochs, noise
        )

    def require_known(self) -> None:
        """Check that the method's path on the quadratic is known.

        Raises:
            NotApplicable: it does not run on the quadratic, or its path is not known.
        """
        self._require_points()
        if self._why_unknown:
            raise NotApplicable(self._why_unknown)

    def _on_points(self) -> Method:
        return on_points(self.subject.make(**self.subject.on_points))

    def start_on_points(self, data: FederatedData) -> Sequence[Tensor]:
        """Return the answers of the untrained method on the quadratic, in the form of
        ``answers``."""
        method = self._on_points()
        build_method(method, data)
        return _answers(method, data, {})

    def _require_points(self) -> None:
        if self.subject.federation.data is not IMAGES.data:
            raise NotApplicable(
                f"it learns {self.subject.federation.name} alone, and the quadratic has none"
            )
        try:
            self._why_unknown  # noqa: B018
        except Exception as error:
            raise NotApplicable(
                f"it does not run on the quadratic's points: {type(error).__name__}: {error}"
            ) from error

    @cached_property
    def _why_unknown(self) -> str:
        """The reason why the path on the quadratic is not known; an empty text if it is known."""
        method, data = self._on_points(), prepare_data(Points((3, 1), public=5))
        build_method(method, data)
        quadratic, batch = method.task_loss, first_batch(method, data)
        assert isinstance(quadratic, Quadratic)
        before = quadratic.calls
        method.training_step(batch, 0)
        if quadratic.calls == before:
            return "its training_step does not call task_loss, so its loss cannot be made the quadratic"
        if not type(method).configure_optimizers.__module__.startswith("fl_lightning."):
            return "it has an optimiser of its own, so the size of its steps is not known"
        if not isinstance(self.subject.expects, WeightAverage):
            return ""
        try:
            with torch.no_grad():
                weights = method.decode(
                    upload_of(method, data.client(0), 1, local_optimizer(method))
                )
        except Exception:
            return "its uploads do not decode to weights, so where it goes is not known"
        averaged = weights.shape == (CENTRES.shape[1],) and not method.personalised
        if averaged:
            return ""
        return "it does not average all of the network's weights, so where it goes is not known"


def _answers(
    method: Method, data: FederatedData, kept: Mapping[int, dict[str, Tensor]]
) -> list[Tensor]:
    ids = range(data.num_clients)
    clients = [data.client(id, kept.get(id)) for id in ids] if method.personalised else [None]
    with torch.no_grad():
        return [method.deploy(client).eval()(torch.ones(1, 1))[0].clone() for client in clients]


def build_method(method: Method, data: FederatedData, seed: int = 0) -> None:
    """Build the method for round 1, as the trainer does."""
    method.seed = seed
    with rng.torch_stream(seed, "weights"):
        method.build(data)
    fabric = Fabric(accelerator="cpu", devices=1)
    prepare_guides(fabric, method, data)
    prepare_finetuning(fabric, method, data, data.labels)
    method.round = 1


def prepare_data(data: FederatedData, seed: int = 0) -> FederatedData:
    """Load the data set and distribute it to the clients; return it."""
    data.setup("fit")
    data.distribute(seed, torch.device("cpu"))
    return data


def first_batch(method: Method, data: FederatedData) -> Any:
    """Let client 0 receive the first broadcast and return the first batch that it trains on."""
    client = data.client(0)
    message = Payload.from_bytes(method.broadcast(client).to_bytes())
    method.start_client(message, client, data.labels(client))
    method.train()
    batches = method.local_batches(data, client, epochs=1, labels=data.labels(client), steps=1)
    for batch in batches:
        return batch
    raise Violation("local_batches yields nothing; yield a batch for each local step")


def expect_same_server(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], when: str, cause: str = ""
) -> None:
    """Require two states of the server to be equal, bit for bit.

    Raises:
        Violation: they differ.
    """
    expect_same_tensors(expected, found, "the server's state", when, cause)


def expect_same_tensors(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    what: str,
    when: str,
    cause: str = "",
) -> None:
    """Require two sets of named tensors to be equal, bit for bit.

    Args:
        expected: tensors by name.
        found: tensors by name.
        what: what the tensors belong to, for the message.
        when: the circumstance that must not change them, for the message.
        cause: why they probably differ.

    Raises:
        Violation: the names differ or one tensor differs; the message names the first one.
    """
    names = f"{when} {what} has {sorted(found)} instead of {sorted(expected)}"
    expect(set(expected) == set(found), names, cause=cause)
    for name, value in expected.items():
        expect(
            equal_with_nan(value, found[name]), f"{what} has another {name!r} {when}", cause=cause
        )
