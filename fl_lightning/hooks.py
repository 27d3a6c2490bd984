"""The two kinds of callback: a stressor changes a value, a meter observes.

Stressors are asked by :func:`stress`, all callbacks are told by :func:`tell`: Fabric's ``call``
drops what callbacks return and reads their signatures at every call, which takes longer than the
training of a small client. Neither keeps hidden randomness: draw from
``fl_lightning.rng.stream(context.seed, purpose, round, client)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from fl_lightning.client import Assignment, Client
from fl_lightning.config.overriding import overrides
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import MisuseError
from fl_lightning.metrics.declared import Emitter
from fl_lightning.support.hook_forms import check_labels
from fl_lightning.wire import Payload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
RETURNS: Mapping[str, tuple[Any, ...]] = {
    "change_cohort": (list, tuple),
    "change_labels": (Tensor,),
    "change_bytes": (bytes, bytearray),
    "change_upload": (Payload,),
    "change_uploads": (dict, Mapping),
}
MAY_LOSE = ("change_bytes", "change_upload")  # of these hooks None means that the upload is lost


class RunFiles(Protocol):
    """Where a run leaves its files."""

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""

    def log_figure(self, name: str, figure: Figure) -> None:
        """Save ``figures/<name>.png`` and ``.pdf`` in the run directory and hand them to the
        loggers."""

    def log_text(self, name: str, text: str) -> None:
        """Save ``figures/<name>``, such as the numbers of a figure, and hand it to the loggers."""


class Context(RunFiles, Protocol):
    """What a callback may read of the run: a :class:`fl_lightning.federation.Federation`."""

    seed: int
    max_rounds: int
    local_epochs: int
    fabric: Any
    method: Any
    data: Any
    aggregation: Any
    callbacks: Any
    timing: Any
    sampler: Any


@dataclass
class RoundRecord:
    """What was measured in one round.

    Args:
        round: the round, counted from 1.
        metrics: metrics by name; meters add to them.
        clients: metrics of each client on its own validation examples, by name and by the client's
            id; empty where the round was not evaluated.
        named: ids of clients that sent wrong shares in the round's secure sum.
        writers: who has written a metric, where that is not the run.
    """

    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[int, float]] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)
    writers: dict[str, object] = field(default_factory=dict)

    @contextmanager
    def written_by(self, writer: object) -> Iterator[None]:
        """Return a context in which a method or a callback adds metrics.

        Raises:
            MisuseError: it has replaced one that it had not written.
        """
        before = dict(self.metrics)
        yield
        for name, value in before.items():
            found = self.metrics.get(name)
            if repr(found) != repr(value) and self.writers.get(name) is not writer:
                rule = f"{type(writer).__name__} makes it {found}, and it is {value} already"
                raise MisuseError(f"the metric {name}", rule, "write another name")
        self.writers |= dict.fromkeys(self.metrics.keys() - before.keys(), writer)


class Callback(Recorded, Emitter):
    """Base of stressors and meters. What must survive a resume goes through ``state_dict``; there
    is no other state."""

    settings_shown = ("{cls}({name}={value})", "{name}: {value}")

    def on_check(self, context: Context) -> None:
        """Check own arguments against the run before anything is created, and forget what a fit
        before this one has left; what ``state_dict`` gave comes back after it.

        Raises:
            InputError: they do not fit.
        """

    def on_setup(self, context: Context) -> None:
        """Prepare for the first round, or the first after a resume: the run directory exists."""

    def stop_reason(self) -> str:
        """Return why the run is to end after the rounds that are done; empty: it goes on.

        It follows from arguments and ``state_dict`` alone: a run that is continued comes to the
        same end. End in an evaluated round, or ``final/*`` are of an earlier one.
        """
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a resume, as JSON; nothing of a function of its streams
        alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""


class Stressor(Callback):
    """A callback that makes life harder: each of its hooks gets a value and returns the one to use
    instead.

    None may depend on ``client.state``, which is not on all of several processes.
    """

    attacks: bool = False
    """Whether it replaces what clients have learned, which not all methods have them send."""
    by_group: bool = False
    """Whether it goes by the clients' groups, which the server does not know of the nodes' own
    data."""

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        return cohort

    def change_labels(
        self, labels: Tensor, *, client: Client, round: int, context: Context
    ) -> Tensor:
        """``labels`` int64 ``[n_k]`` of the client's training examples, in the order of
        ``client.train``. Return a new tensor."""
        return labels

    def change_bytes(
        self, upload: bytes, *, client: Client, round: int, context: Context
    ) -> bytes | None:
        """Return the upload as the client sent it, before it is decoded; bytes that are no payload
        are rejected. None when it is lost."""
        return upload

    def change_upload(
        self, upload: Payload, *, client: Client, round: int, context: Context
    ) -> Payload | None:
        """Return the same upload, decoded; None when it is lost."""
        return upload

    def change_uploads(
        self, uploads: dict[int, Payload], *, round: int, context: Context
    ) -> dict[int, Payload]:
        """Return the uploads of the round that count, by client id, where some of them depend on
        the others; one that is left out is lost.

        Where a stressor has this hook, each process of the run is sent all uploads; under a secure
        sum or client-level privacy there are none.
        """
        return uploads


class Meter(Callback):
    """A callback that observes: its hooks change nothing but ``record.metrics`` and their own
    state."""

    reads_states: str = ""
    """Which of its metrics come of what clients keep, which nodes do not send to a deployment."""

    def on_round_start(self, round: int, context: Context) -> None:
        pass

    def on_cohort(self, cohort: list[Assignment], round: int, context: Context) -> None:
        """The cohort as the stressors left it, before anyone trains."""

    def on_client_start(
        self, client: Client, message: bytes, labels: Tensor, round: int, context: Context
    ) -> None:
        """One client of the cohort is about to train: the broadcast that it gets, and the
        ``labels`` int64 ``[n_k]`` that it trains on."""

    def on_client_end(self, client: Client, round: int, context: Context) -> None:
        """One client of the cohort has been trained; its upload is next, others may still be
        trained. Several processes all call it for every client. What the client keeps is in
        ``client.state`` on rank 0, whose metrics count, and on the rank that trained it, and not on
        the others; in a deployment it is on nodes alone."""

    def on_evaluate(
        self, probs: Tensor, target: Tensor, record: RoundRecord, context: Context
    ) -> None:
        """The global test set: ``probs`` float32 ``[n, C]`` (softmax output), ``target`` int64
        ``[n]``. Only of classification, and only where a callback overrides this hook: nothing else
        collects outputs."""

    def on_validate(self, values: dict[int, float], record: RoundRecord, context: Context) -> None:
        """The task's primary metric, such as the accuracy in [0, 1], of every client that has
        validation examples, by id."""

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        pass

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        """After the last round, when it is on disk; a run that ends early has ``on_exception``
        instead, and one that went through all rounds and learned nothing has both."""

    def on_exception(self, error: BaseException, context: Context) -> None:
        """The run ends early. What was done is on disk, if that could be written."""


def reads_probabilities(callback: object) -> bool:
    """Return whether a callback asks for the probabilities of the whole test set."""
    if isinstance(callback, Meter):
        return overrides(callback, Meter, "on_evaluate")
    return hasattr(callback, "on_evaluate")


def sees_uploads(callback: object) -> bool:
    """Return whether a callback changes uploads knowing all of the round."""
    return isinstance(callback, Stressor) and overrides(callback, Stressor, "change_uploads")


def sees_one_upload(callback: object) -> bool:
    """Return whether a callback changes, or looks at, uploads one by one."""
    return isinstance(callback, Stressor) and any(
        overrides(callback, Stressor, hook) for hook in MAY_LOSE
    )


def stop_reason(callbacks: Iterable[object]) -> str:
    """Return why a callback wants the run to end after the rounds that are done; empty when none
    does."""
    return "; ".join(
        filter(
            None,
            (callback.stop_reason() for callback in callbacks if isinstance(callback, Callback)),
        )
    )


def stress(callbacks: Iterable[object], hook: str, value: T, **details: Any) -> T:
    """Pass ``value`` through ``hook`` of every stressor, in the order of the configuration.

    Raises:
        TypeError: a hook returned what is no such value, or None where nothing may be lost.
        MisuseError: labels are none that the task can train on.
    """
    for callback in callbacks:
        if isinstance(callback, Stressor):
            before, value = value, getattr(callback, hook)(value, **details)
            if value is None and hook in MAY_LOSE:
                break
            kinds = RETURNS[hook]
            if not isinstance(value, kinds):
                name, found = type(callback).__name__, type(value).__name__.removesuffix("Type")
                raise TypeError(
                    f"{name}.{hook} returned {found}; a stressor returns the value to use instead, a "
                    f"{kinds[0].__name__}; return it"
                )
            if isinstance(value, Tensor) and overrides(callback, Stressor, hook):
                check_labels(callback, value, before, details["client"], details["context"].data)
    return value


def tell(callbacks: Iterable[object], hook: str, *details: Any) -> None:
    """Call ``hook`` of every callback that has it, in the order of the configuration."""
    for callback in callbacks:
        method = getattr(callback, hook, None)
        if method is not None:
            record = next((each for each in details if isinstance(each, RoundRecord)), None)
            with record.written_by(callback) if record else nullcontext():
                method(*details)
