"""The cost of training: floating-point operations of a round, memory of a local step.

Both are measured on a copy of the method that trains one client again after the round, so that the
run ends with the same weights and the same times as without. Operations are counted by
``torch.utils.flop_counter.FlopCounterMode`` while the client's batches are made (a teacher's cached
logits, say), while each kind of local step is taken once (forward, backward, a teacher's pass), and
while its upload is made (FedKD's soft labels). What each kind costs is then multiplied by how often
it occurs, and scaled to the other clients of the round by their numbers of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from callbacks.figures.drawing import never_fatal, own_copy
from fl_lightning import rng
from fl_lightning.client import Assignment, Client
from fl_lightning.engines.base import one_thread
from fl_lightning.engines.sequential import local_step, upload_of
from fl_lightning.exchange import asked_steps
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.methods.optimizing import local_optimizer
from fl_lightning.models.step_memory import TensorMemory
from fl_lightning.probing.cost import flop_counter
from fl_lightning.wire import Payload


@dataclass(frozen=True)
class ClientCost:
    """What the clients of one kind cost in a round.

    Args:
        fixed_flops: operations that do not depend on the client's examples, such as those on public
            ones.
        example_flops: operations for each example that it trains on, counted once for each epoch.
        step_bytes: bytes at the peak of one local step.
        pass_flops: operations for each example that it has, before its steps, such as FedALA's.
    """

    fixed_flops: float
    example_flops: float
    step_bytes: int
    pass_flops: float = 0.0

    def of(self, work: Work) -> float:
        """Return the operations of a client's round."""
        passes = self.pass_flops * len(work.client.train)
        return self.fixed_flops + passes + self.example_flops * work.examples


@dataclass(frozen=True)
class Work:
    """One client's round, as it began."""

    client: Client
    message: bytes
    labels: Tensor
    steps: int
    examples: int

    def of_first(self, count: int) -> Work:
        """Return the round of a client with the first so many examples alone."""
        few = replace(self.client, train=self.client.train[:count])
        return replace(self, client=few, labels=self.labels[:count])


class TrainingCost(Meter):
    """Adds ``cost/train_flops`` and ``cost/train_memory`` to each round.

    ``cost/train_flops`` is the number of floating-point operations of all clients of the round that
    train: of matrix products, of integers too, and convolutions, forward and backward, a
    multiply-add as two. Elementwise work is not counted, nor is what the server computes (FedKD's
    student).

    ``cost/train_memory`` is bytes at the peak of one local step of one client: parameters, buffers,
    the state of the optimiser, the batch, activations and gradients. On a CUDA device it is what
    its allocator reports; elsewhere it is the storage of all tensors that are alive at once,
    without what an operation takes for itself while it runs. Data set and server state are not part
    of it. A round in which nobody trains has none.

    Each kind of client (:meth:`fl_lightning.methods.Method.work_kind`, entries of the broadcast) is
    measured in the first round in which it occurs, on the client with most examples. That takes
    about as long as that client's round.
    """

    def __init__(self) -> None:
        self._costs: dict[str, ClientCost | None] = {}
        self._assigned: dict[int, float] = {}
        self._cohort: dict[str, list[Work]] = {}
        self._entries: tuple[bytes, str] = (b"", "")

    def on_check(self, context: Context) -> None:
        self._costs = {}

    def on_round_start(self, round: int, context: Context) -> None:
        self._assigned, self._cohort = {}, {}

    def on_cohort(self, cohort: list[Assignment], round: int, context: Context) -> None:
        self._assigned |= {assignment.client.id: assignment.work for assignment in cohort}

    def on_client_start(
        self, client: Client, message: bytes, labels: Tensor, round: int, context: Context
    ) -> None:
        if self._entries[0] is not message:
            entries = sorted(Payload.from_bytes(message, verified=True))
            self._entries = message, ",".join(entries)
        kind = f"{context.method.work_kind(client)}|{self._entries[1]}"
        steps, examples = steps_and_examples(context, client, self._assigned[client.id])
        before = replace(client, state=dict(client.state))
        self._cohort.setdefault(kind, []).append(Work(before, message, labels, steps, examples))

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        flops, peaks = 0.0, list[int]()
        for kind, works in self._cohort.items():
            if kind not in self._costs:
                self._costs[kind] = None
                with never_fatal("the cost of training"), one_thread(context.method.device):
                    self._costs[kind] = measure(context, max(works, key=lambda work: work.examples))
            cost = self._costs[kind]
            if cost is None:
                return
            flops += sum(map(cost.of, works))
            peaks.append(cost.step_bytes)
        self._cohort = {}
        record.metrics["cost/train_flops"] = float(round(flops))
        if peaks:
            record.metrics["cost/train_memory"] = float(max(peaks))

    def state_dict(self) -> dict[str, Any]:
        return {kind: None if cost is None else asdict(cost) for kind, cost in self._costs.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._costs = {
            kind: None if cost is None else ClientCost(**cost) for kind, cost in state.items()
        }


def steps_and_examples(context: Any, client: Client, work: float) -> tuple[int, int]:
    """Return how many local steps a client makes, and on how many of its own examples, each counted
    once an epoch.

    Args:
        context: the run.
        client: who trains.
        work: share of its local steps that it makes.
    """
    steps = asked_steps(context, client, work)
    return steps, sum(islice(cycle(context.data.epoch_sizes(client)), steps))


def measure(context: Context, work: Work) -> ClientCost:
    """Train one client on a copy of the method and return what it cost.

    What it computes before its steps is measured with half of its examples too.
    """
    on_cuda = context.method.device.type == "cuda"
    before = torch.cuda.memory_allocated(context.method.device) if on_cuda else 0
    trial = TrialRound(context, work)
    with rng.torch_stream(context.seed, "dropout", trial.method.round, trial.client.id):
        fixed, made = float(trial.flops(0)), trial.made
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(context.method.device)
        memory = TensorMemory()
        whole = float(trial.flops(work.steps, nullcontext() if on_cuda else memory))
    if on_cuda:
        step_bytes = torch.cuda.max_memory_allocated(context.method.device) - before
    else:
        step_bytes = memory.peak + bytes_of(trial.method)
    sent, each = trial.flops_of_upload(), 0.0
    if made:  # some of it for each of the client's examples, whatever its steps
        n, few = len(work.client.train), max(1, len(work.client.train) // 2)
        half = TrialRound(context, work.of_first(few))
        with rng.torch_stream(context.seed, "dropout", trial.method.round, trial.client.id):
            half.flops(0)
        each = (made - half.made) / max(1, n - few)
        fixed -= each * n
        whole -= each * n
    return ClientCost(fixed + sent, (whole - fixed) / max(1, work.examples), step_bytes, each)


class TrialRound:
    """One client's round on a copy of the method, which is thrown away."""

    def __init__(self, context: Context, work: Work) -> None:
        self.fed: Any = context
        self.work, self.method = work, own_copy(context)
        self.client = work.client.apart()
        self.method.start_client(Payload.from_bytes(work.message), self.client, work.labels)
        self.method.train()
        self.optimizer = local_optimizer(self.method)
        self.counter = flop_counter(convolution_backward=backward_flops)
        self.steps = self.made = 0

    def flops(self, steps: int, tracker: Any = None) -> int:
        """Return the operations of at most so many steps on the client's own batches, and of what
        comes before them; those of making batches are then in ``made`` too.

        A step of one kind is taken once, and counted as often as it occurs.

        Args:
            steps: at most so many; 0: only what is done whatever their number.
            tracker: follows the memory.
        """
        batches = iter(
            self.method.local_batches(
                self.fed.data,
                self.client,
                epochs=self.fed.local_epochs,
                labels=self.work.labels,
                steps=steps,
            )
        )
        total, known, self.steps, self.made = 0, {}, 0, 0
        with tracker or nullcontext():
            while True:
                with self.fed.fabric.autocast():
                    made, batch = counted(self.counter, lambda: next(batches, None))
                self.made += made
                if batch is None:
                    return total + self.made
                kind = self.method.step_kind(self.steps), form_of(batch)
                if kind not in known:
                    known[kind] = self._step(batch)
                total, self.steps = total + known[kind], self.steps + 1

    def _step(self, batch: Any) -> int:
        """Take a step and return its operations; then once more, now that the optimiser has its
        state, for the peak of memory."""
        flops, _ = counted(self.counter, lambda: self._step_once(batch))
        self._step_once(batch)
        return flops

    def _step_once(self, batch: Any) -> None:
        local_step(self.fed.fabric, self.method, self.optimizer, batch, self.steps)

    def flops_of_upload(self) -> int:
        """Return the operations that the upload takes."""
        flops, _ = counted(
            self.counter, lambda: upload_of(self.method, self.client, self.steps, self.optimizer)
        )
        return flops


def backward_flops(
    output_shape: Sequence[int],
    inputs_shape: Sequence[int],
    weight_shape: Sequence[int],
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
    **other: Any,
) -> int:
    """Return the operations of a convolution's backward pass: as many for each gradient, of inputs
    and of weights, as the forward pass takes.

    torch's own formula forgets the groups: for a depthwise convolution of C channels it counts the
    weights' gradient C times.
    """
    forward = conv_flop_count(
        list(inputs_shape), list(weight_shape), list(output_shape), transposed
    )
    return forward * sum(wanted[:2])


def form_of(batch: Any) -> Any:
    """Return the structure of a batch, and shapes and types of its tensors: steps on batches of one
    form do the same work."""
    leaves, form = tree_flatten(batch)
    return str(form), tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def counted(counter: FlopCounterMode, function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the operations of a call, and what it returns."""
    with counter:
        result = function()
    return int(counter.get_total_flops()), result


def bytes_of(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers; a storage that two share counts
    once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(storages.values())
