"""Local steps recorded once and played again: on CUDA one launch a step instead of hundreds (a *CUDA graph*).

A recording reads and writes fixed memory. So the clients of one kind (:mod:`fl_lightning.engines.cuda.kinds`)
share one set of static tensors: what ``receive`` put somewhere else is copied in before the steps and out
after them, each batch is copied into static inputs, and the optimiser's state is set to zero instead of made
anew. There is one recording for each kind and form of batch: the forward pass under autocast, the backward
pass, the optimiser's step, ``on_train_batch_end``, and the float64 sums of the loss terms.

A recording is used only after its first play, on a copy of the state, gave what the eager step gave on the
same state: bit for bit, or within ``TOLERANCE`` where two eager steps differ already. So where steps repeat
themselves it changes no result whether a step is played, and resume stays exact. Everything else is done
eagerly, and the log says why, once: methods that are not ``stackable``; loss scales of 16-mixed; optimisers
other than those of :func:`starts_at_zero`; steps that draw random numbers (PyTorch documents that replays
advance the default generator as eager steps do; no card was at hand to see it), read the number of the step
or round, set Python attributes, or wait for the device. Forms of batches that have turned up fewer than
``MIN_EAGER_STEPS`` times are done eagerly too.

Of all this only the capture itself (:class:`~fl_lightning.engines.cuda.recorders.CudaGraphs`) has never run:
the tests play tapes on a CPU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from fl_lightning.engines.base import size_of
from fl_lightning.engines.cuda.attributes import Attributes, Unreadable
from fl_lightning.engines.cuda.kinds import Kind, Recording, RefusedError, Saved, client_form, strange_value
from fl_lightning.engines.cuda.recorders import CudaGraphs, Recorder
from fl_lightning.engines.steps import Steps, local_step
from fl_lightning.methods import Method
from fl_lightning.methods.base import is_stackable

log = logging.getLogger("fl_lightning")

MIN_EAGER_STEPS = 4
"""Eager steps of a kind and form before it is recorded, which takes about as long as twice as many."""
MAX_KINDS = 8
"""Kinds whose recordings are kept: their memory is that of the activations of a step for each form of batch.
One more, and all go: a CUDA graph must not outlive others of its recorder
(:class:`~fl_lightning.engines.cuda.recorders.CudaGraphs`)."""
TOLERANCE = 1e-4
"""Relative to the largest value of a tensor; where an eager step does not repeat itself bit for bit."""


def make_steps(fabric: Fabric, method: Method) -> Steps:
    """Return what takes the steps: recorded on CUDA, eager elsewhere."""
    return (
        RecordedSteps(fabric, method, CudaGraphs(fabric.device))
        if fabric.device.type == "cuda"
        else Steps(fabric, method)
    )


def starts_at_zero(optimizer: Optimizer) -> bool:
    """Return whether an optimiser with zeros for a state makes the steps of a fresh one.

    Adam and AdamW begin with zeros. SGD begins without a momentum buffer and sets it to the first gradient g;
    from zero it would be momentum * 0 + (1 - dampening) g, the same without dampening, with Nesterov's
    momentum too.
    """
    if type(optimizer) is SGD:
        return all(group["momentum"] == 0 or group["dampening"] == 0 for group in optimizer.param_groups)
    return type(optimizer) in (Adam, AdamW)


class RecordedSteps(Steps):
    """Steps of clients, played from a recording where there is one.

    Args:
        recorder: what records them.
        after: eager steps of a kind and form of batch before it is recorded.
    """

    def __init__(
        self, fabric: Fabric, method: Method, recorder: Recorder, after: int = MIN_EAGER_STEPS
    ) -> None:
        super().__init__(fabric, method)
        self.recorder, self.after = recorder, after
        self.kinds: OrderedDict[Any, Kind] = OrderedDict()
        self.kind: Kind | None = None
        self.said: set[str] = set()
        self.resident = {id(tensor): tensor for tensor in [*method.parameters(), *method.buffers()]}

    # One client

    def before(self) -> None:
        self.was = dict(vars(self.method))

    def start(self) -> None:
        super().start()
        self.kind = None
        reason = self._refusal()
        if reason:
            self._say(reason)
            return
        form = client_form(self.method, self.optimizer)
        if form not in self.kinds:
            if len(self.kinds) == MAX_KINDS:
                oldest = next(iter(self.kinds.values()))
                if not oldest.recordings and not oldest.refused:
                    self._say(
                        f"clients are of more than {MAX_KINDS} kinds (shapes, modes, plain values that "
                        "receive sets)"
                    )
                self.kinds.clear()
                self.recorder.forget()
            self.kinds[form] = Kind(self.method, self.fabric.device, self.optimizer, self.resident)
        self.kinds.move_to_end(form)
        if self.kinds[form].refused:
            return
        self.kind = self.kinds[form]
        self.kind.enter()
        self.optimizer = self.kind.optimizer

    def step(self, batch: Any, index: int) -> None:
        kind = self.kind
        if kind is None:
            super().step(batch, index)
            return
        size, form = size_of(batch), batch_form(batch)
        if not kind.refused and not kind.settle():
            self._refuse(kind, "the module's tensors or attributes are replaced between two steps")
        kind.times[form] += 1
        if not kind.refused and form not in kind.recordings and kind.times[form] > self.after:
            self._record(kind, form, batch, index)
        if kind.refused or form not in kind.recordings:
            names = self._work(kind, batch, index)
        else:
            names = kind.recordings[form].again(batch)
        for name in names:
            self.losses.seen[name] = self.losses.seen.get(name, 0) + size

    def end(self) -> None:
        if self.kind is not None:
            self.losses.sums = {name: self.kind.sums[name] for name in self.losses.seen}
            self.kind.leave()

    def _work(self, kind: Kind, batch: Any, index: Any) -> list[str]:
        """Make a local step on the static tensors and return the names of its loss terms."""
        outputs = local_step(self.fabric, self.method, kind.optimizer, batch, index)
        kind.keep()
        size = size_of(batch)
        for name, value in outputs.items():
            if name not in kind.sums:
                kind.sums[name] = torch.zeros((), dtype=torch.float64, device=value.device)
            kind.sums[name].add_(value.double() * size)
        return list(outputs)

    # What can be recorded

    def _refusal(self) -> str:
        """Return why this client's steps cannot be recorded; empty when they can."""
        precision, name = self.fabric.strategy.precision, type(self.method).__name__
        if not is_stackable(self.method):
            return f"{name} does not say that it is stackable"
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            return "each client has a loss scale of its own in 16-mixed"
        if not starts_at_zero(self.optimizer):
            return f"{type(self.optimizer).__name__} with zeros for a state is not known to be a fresh one"
        if reason := self.recorder.refuses(self.optimizer):
            return reason
        if strange := strange_value(self.method, self.was):
            return (
                f"{name}.receive sets {strange!r}, which is neither a parameter, a buffer nor a plain value"
            )
        return ""

    def _record(self, kind: Kind, form: Any, batch: Any, index: int) -> None:
        """Record this step and see whether it then does what the step does. Nothing has happened
        afterwards."""
        wait_for(
            self.fabric.device
        )  # what is restored may be read beside these steps: a teacher is at the next batches
        attributes, saved = Attributes(self.method), kind.save()
        try:
            with torch.random.fork_rng(devices=_devices(self.fabric.device)):
                kind.recordings[form] = self._tried(kind, batch, index, attributes, saved)
        except (
            Exception
        ) as error:  # whatever it is, the eager step will raise it again if it was to be raised
            self._refuse(kind, str(error).splitlines()[0] if str(error) else type(error).__name__)
        finally:
            attributes.restore()
            kind.restore(saved)

    def _tried(self, kind: Kind, batch: Any, index: int, attributes: Attributes, saved: Saved) -> Recording:
        generators, elsewhere = _generators(self.fabric.device), kind.elsewhere()
        names = self._work(kind, batch, index)
        expected = kind.save()
        if changed := attributes.changed():
            raise RefusedError(f"a step sets {changed!r}, which is neither a parameter nor a buffer")
        if not all(map(torch.equal, generators, _generators(self.fabric.device))):
            raise RefusedError("a step draws random numbers")
        if elsewhere != kind.elsewhere():
            raise RefusedError("a step writes a tensor that is not on the device")
        if len(expected) != len(saved):
            raise RefusedError("a step makes state that the steps before it did not have")
        if any(value.device != self.fabric.device for value in kind.sums.values()):
            raise RefusedError("a loss term is not on the device")
        kind.restore(saved)
        self._work(kind, batch, index)
        agree = same if agreed(same, expected, kind.save()) else near
        kind.restore(saved)
        inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)

        def work() -> None:
            self._work(kind, inputs, Unreadable("the number of the step"))

        with _unreadable(self.method):
            play, kind.pool = self.recorder.record(work, kind.pool)
        kind.restore(saved)
        recording = Recording(inputs, play, names)
        with _unreadable(self.method):
            recording.again(batch)
        if not agreed(agree, expected, kind.save()):
            raise RefusedError("a recorded step does not do what the step does")
        return recording

    def _refuse(self, kind: Kind, reason: str) -> None:
        kind.refused = reason
        kind.recordings.clear()
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            log.info("local steps are not recorded and played again: %s", reason)


def batch_form(batch: Any) -> Any:
    """Structure, shapes and types."""
    leaves, structure = tree_flatten(batch)
    return str(structure), tuple(
        (leaf.shape, leaf.dtype, leaf.stride(), leaf.device) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )


def agreed(alike: Callable[[Tensor, Tensor], bool], one: Saved, other: Saved) -> bool:
    return all(alike(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but for the sign of zeros and the kind of NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def near(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return same(one, other)
    largest = float(one.abs().nan_to_num(0.0).max())
    return torch.allclose(one, other, rtol=0, atol=TOLERANCE * largest, equal_nan=True)


@contextmanager
def _unreadable(method: Method) -> Iterator[None]:
    """Make the number of the round unreadable within the block: a recording would read this one for ever."""
    round = vars(method).pop("round", None)
    vars(method)["round"] = Unreadable("the number of the round")
    try:
        yield
    finally:
        del vars(method)["round"]
        if round is not None:
            method.round = round


def wait_for(device: torch.device) -> None:
    """Wait until nothing is under way on any stream of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []


def _generators(device: torch.device) -> list[Tensor]:
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]
