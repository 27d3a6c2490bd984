"""Where a method is tried out: toy federations built on demand and, where several checks look at one, run
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning import rng
from fl_lightning.conformance.expectations import Averages, Walk
from fl_lightning.conformance.subject import Subject
from fl_lightning.conformance.toy import CENTRES, Points, Quadratic, images, on_images, on_points, run
from fl_lightning.conformance.verdicts import NotApplicable, require
from fl_lightning.conformance.watch import Intact, Log, same
from fl_lightning.data import FederatedData
from fl_lightning.engines.optimizers import local_optimizer
from fl_lightning.engines.uploads import upload_of
from fl_lightning.hooks import Callback
from fl_lightning.methods import Method
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.wire import Ledger, LedgerEntry, Payload

ALONE = {"engine": "sequential", "workers": 1}  # the verdict is the same on every machine
RARELY = 10**6


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    method: Method
    trainer: FederatedTrainer
    log: Log

    @property
    def ledger(self) -> list[LedgerEntry]:
        return Ledger.from_csv((self.trainer.run_dir / "ledger.csv").read_text()).entries

    @property
    def sizes(self) -> list[int]:
        """Examples of each client."""
        return [len(self.trainer.data.client(id).train) for id in range(self.trainer.data.num_clients)]

    def answers(self) -> list[Tensor]:
        """Of the deployed model to the input 1, float32 ``[6]``; of a personalised method, one for each
        client."""
        data = self.trainer.data
        clients = (
            [data.client(id, self.log.kept.get(id)) for id in range(data.num_clients)]
            if self.method.personalised
            else [None]
        )
        with torch.no_grad():
            return [self.method.deploy(client).eval()(torch.ones(1, 1))[0].clone() for client in clients]


class Bench:
    """One subject and its runs.

    Args:
        folder: of its runs; each gets a folder of its own.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder, self.intact = subject, folder, Intact()

    # Images

    def images(
        self,
        *callbacks: Callback,
        method: Method | None = None,
        ckpt_path: str | None = None,
        **settings: Any,
    ) -> Run:
        """Six clients with images of their own; every client, two rounds, unless told otherwise."""
        method, log = on_images(method or self.subject.make()), Log()
        settings = {"max_rounds": 2, **ALONE, **settings}
        trainer = run(
            method,
            images(),
            mkdtemp(dir=self.folder),
            callbacks=[*callbacks, log],
            ckpt_path=ckpt_path,
            **settings,
        )
        return Run(method, trainer, log)

    @cached_property
    def everyone(self) -> Run:
        """Three rounds of every client, watched by ``intact``."""
        return self.images(self.intact, max_rounds=3)

    @cached_property
    def two_of_six(self) -> Run:
        """Four rounds of two clients each."""
        return self.images(max_rounds=4, participation=2 / 6)

    @cached_property
    def data(self) -> FederatedData:
        """Those images, dealt."""
        return prepared(images())

    def untrained(self, round: int = 1, server: Mapping[str, Tensor] | None = None) -> Method:
        """A method that has seen nothing but this ``server``, that of the start of this round."""
        method = on_images(self.subject.make())
        built(method, self.data)
        method.round = round
        if server is not None:
            method.server = dict(server)
        return method

    # The quadratic

    def points(
        self,
        counts: tuple[int, ...],
        *callbacks: Callback,
        labels: tuple[int, ...] | None = None,
        batch_size: int = 64,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        **settings: Any,
    ) -> Run:
        """Clients with ``counts`` examples at the centres ``labels``; all of them, three rounds of two steps,
        unless told otherwise.

        Raises:
            NotApplicable: the method does not run there.
        """
        self._require_points()
        method, log = self._on_points(), Log()
        method.scheduler_spec = scheduler
        settings = {"max_rounds": 3, "eval_every": RARELY, "checkpoint_every": 0, **ALONE, **settings}
        data = Points(counts, labels, public=5, batch_size=batch_size)
        trainer = run(method, data, mkdtemp(dir=self.folder), callbacks=[*callbacks, log], **settings)
        return Run(method, trainer, log)

    def walk(self, counts: tuple[int, ...], local_epochs: int = 2, **settings: Any) -> Walk:
        """A run on the quadratic, to be held against what is known of it.

        Raises:
            NotApplicable: nothing is known of it.
        """
        self.require_known()
        done = self.points(counts, local_epochs=local_epochs, **settings)
        start = self.start_on_points(done.trainer.data)
        epochs, noise = local_epochs, self.subject.noise
        return Walk(done.method, start, done.answers(), counts, done.log.cohorts, epochs, noise)

    def require_known(self) -> None:
        """Raises:
        NotApplicable: it does not run on the quadratic, or where it goes there is not known.
        """
        self._require_points()
        if self._unknown:
            raise NotApplicable(self._unknown)

    def _on_points(self) -> Method:
        return on_points(self.subject.make(**self.subject.on_points))

    def start_on_points(self, data: FederatedData) -> Sequence[Tensor]:
        method = self._on_points()
        built(method, data)
        clients = [data.client(id) for id in range(data.num_clients)] if method.personalised else [None]
        with torch.no_grad():
            return [method.deploy(client).eval()(torch.ones(1, 1))[0].clone() for client in clients]

    def _require_points(self) -> None:
        try:
            self._unknown  # noqa: B018
        except Exception as error:
            raise NotApplicable(
                f"it does not run on the quadratic's points: {type(error).__name__}: {error}"
            ) from error

    @cached_property
    def _unknown(self) -> str:
        """Why nothing is known of where it goes on the quadratic; "" when something is. Raises whatever its
        first step there does."""
        method, data = self._on_points(), prepared(Points((3, 1), public=5))
        built(method, data)
        quadratic, batch = method.task_loss, first_batch(method, data)
        assert isinstance(quadratic, Quadratic)
        before = quadratic.calls
        method.training_step(batch, 0)
        if quadratic.calls == before:
            return "its training_step does not call task_loss, so its loss cannot be made the quadratic"
        if not type(method).configure_optimizers.__module__.startswith("fl_lightning."):
            return "it has an optimiser of its own, so the size of its steps is not known"
        if not isinstance(self.subject.expects, Averages):
            return ""
        try:
            with torch.no_grad():
                weights = method.decode(upload_of(method, data.client(0), 1, local_optimizer(method)))
        except Exception:
            return "its uploads do not decode to weights, so where it goes is not known"
        averaged = weights.shape == (CENTRES.shape[1],) and not method.personalised
        return (
            ""
            if averaged
            else "it does not average all of the network's weights, so where it goes is not known"
        )


def built(method: Method, data: FederatedData, seed: int = 0) -> None:
    """As the trainer builds it."""
    method.seed = seed
    with rng.torch_stream(seed, "weights"):
        method.build(data)
    method.round = 1


def prepared(data: FederatedData, seed: int = 0) -> FederatedData:
    data.setup("fit")
    data.distribute(seed, torch.device("cpu"))
    return data


def first_batch(method: Method, data: FederatedData) -> Any:
    """What client 0 trains on first, once it has received the first broadcast."""
    client = data.client(0)
    method.receive(Payload.from_bytes(method.broadcast(client).to_bytes()), client)
    method.train()
    return next(iter(method.local_batches(data, client, epochs=1, labels=data.labels(client), steps=1)))


def same_server(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], when: str) -> None:
    """The same tensors, bit for bit, or a Violation."""
    same_tensors(expected, found, "the server's state", when)


def same_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str, when: str) -> None:
    """The same tensors by name, bit for bit, or a Violation that names the first that differs.

    Args:
        expected, found: tensors by name.
        what: whose they are.
        when: the circumstance that must not matter.
    """
    require(set(expected) == set(found), f"{when} {what} has {sorted(found)} instead of {sorted(expected)}")
    for name, value in expected.items():
        require(same(value, found[name]), f"{what} has another {name!r} {when}")
