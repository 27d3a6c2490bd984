"""The contract of a method. Its defaults are FedAvg (McMahan et al., AISTATS 2017).

A method is a LightningModule with two halves. The client's half: ``receive`` makes the module's
parameters and buffers what this client starts from, ``training_step`` is the local objective,
``upload`` says what goes back. The server's half: ``broadcast``, ``aggregate``, ``deploy``, and
``server``, the tensors that the server remembers. One resident module serves all clients of a
process in turn, so after ``receive`` nothing of another client may be left; what a client keeps
lives in ``client.state``.

Tensors in ``server`` and in ``client.state`` are replaced, never written into: checkpoints and
roll-backs hold on to the old ones.

``training_step`` has no ``.item()``, no branch on values and no metric object, so that the batched
engine can run it under ``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning import rng
from fl_lightning.aggregation.adapters import AdapterAverage, AdapterAverageName, chosen_rule
from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.averages import WEIGHTED_MEAN
from fl_lightning.aggregation.client_weights import ClientWeights, Weighing
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.server_optimizers import ServerOptimizer
from fl_lightning.client import Client
from fl_lightning.compatibility import Feature, Run, adopt_former, check_refuses, check_run
from fl_lightning.config.constraints import within
from fl_lightning.config.recorded import Recorded, record_copy
from fl_lightning.data import FederatedData
from fl_lightning.methods.lit_module import adopt, check_module, loss_and_logits, own_copy
from fl_lightning.methods.local_work import WithLocalWork
from fl_lightning.methods.personal import FineTuning, WithPersonal
from fl_lightning.methods.terms import Term, check_terms
from fl_lightning.methods.with_terms import WithTerms
from fl_lightning.metrics.declared import Emitter
from fl_lightning.models import KNOWN_NETWORK, NetworkName, build_network
from fl_lightning.models.recipe import copied
from fl_lightning.models.tensors import UnsentBuffers
from fl_lightning.tasks import Classification, Task
from fl_lightning.wire import Layout, Limit, Payload

OptimizerCallable = Callable[[Iterable], Optimizer]
SchedulerCallable = Callable[[Optimizer], LRScheduler]
NetworkCallable = Callable[[int], nn.Module]
NetworkSetting = NetworkName | NetworkCallable | str
"""The names come first: jsonargparse looks for any other text among all classes of
``torch.nn.Module``."""
KnownNetwork = Annotated[NetworkSetting, KNOWN_NETWORK]


class Method(Recorded, Emitter, SummingServer, WithLocalWork, WithPersonal, WithTerms):
    """Base of all methods; what is not overridden is FedAvg.

    Args:
        network: a name, any timm model, or a class whose first argument is the number of classes.
        optimizer: clients' local optimiser, new for each client and round. Default: SGD, lr 0.05,
            momentum 0.9.
        average: how the server averages its clients' weights; most withstand a few hostile ones.
        max_share: largest share n_k / sum n of one client in a round, in (0, 1]; 1: no bound.
        scheduler: of the local rate, of ``torch.optim.lr_scheduler``, without a metric: one step a
            round.
        module: a LightningModule of yours, in place of ``network`` and ``optimizer`` (not
            FedMPQ's).
        terms: what is added to the local loss, each logged as ``train/loss_<name>``, or a ``Term``
            of yours.
        weigh_by: what n_k counts: training ``examples``, their labelled ``tokens``, or ``clients``:
            1 each.
        server_optimizer: what the server makes of its clients' mean. Default: it is the next
            weights.
        personal: what stays on a client: ``norm``, ``head``, ``body``, or a pattern of names.
        finetune: local steps on a copy before a client's own model is evaluated.
        adapter_average: how the factors A and B of LoRA are averaged; null: as all weights are.
        channels_last: memory of convolutions; false is faster for many weights and small batches.
    """

    settings_shown = ("--model.{name} {value}", "--model.{name} {value}")

    kind: str = "averages"
    """What kind of method it is; ``--model.help`` lists them by it."""

    personalised: bool = False
    """True when each client has a model of its own to evaluate."""

    has_global_model: bool = False
    """Whether a personalised method also has one model for all, which ``deploy()`` gives."""

    logits: bool = True
    """Whether the network gives one logit for each class of the data, ``[B, num_classes]``. A
    method whose ``task_loss`` takes outputs of another width says False."""

    growing: frozenset[str] = frozenset()
    """Tensors of ``server`` with a row for each client heard of; the others keep the shape that
    ``build`` gave them."""

    stackable: bool = False
    """Whether many clients can be trained as one stack: ``training_step`` and
    ``on_train_batch_end`` read parameters, buffers and plain values, and set tensors only. It holds
    for the class that says so and not for its subclasses."""

    same_start: bool = False
    """Declares that ``receive`` makes the same of a message whichever client gets it: it reads
    neither the client nor ``client.state``. Clients of a stack then share what they start from. It
    holds for the class that says so and not for its subclasses."""

    own_terms: frozenset[str] = frozenset()
    """Names of the terms that the method's loss has by itself; none of ``terms`` may have one of
    them."""

    refuses: Mapping[Feature, str] = {}
    """Why the method cannot have a feature of a run, by its name; :mod:`fl_lightning.compatibility`
    has the names, and what each feature needs."""

    counted_metrics: frozenset[str] = frozenset()
    """Metrics of an evaluation that are counted over the test set; the others are means."""

    module_optimizes: bool = True
    """Whether a module's ``configure_optimizers`` is the local optimiser; False where clients train
    other tensors than its parameters."""

    shows: frozenset[str] = frozenset()
    """Names of the figures that only some methods have: ``experts``, ``options``,
    ``bit_widths``."""

    pools_examples: bool = False
    """Whether the server trains on the examples of all clients, whoever takes part."""

    space: Any = None
    """The space of the adapters in uploads, where they are not those of ``network``."""

    def __init__(
        self,
        network: KnownNetwork = "small_cnn",
        optimizer: OptimizerCallable | None = None,
        average: Average = WEIGHTED_MEAN,
        max_share: Annotated[
            float,
            within(
                "(0, 1]", "a share lies in (0, 1]", "write --model.max_share 0.1, or 1 for no bound"
            ),
        ] = 1.0,
        scheduler: SchedulerCallable | None = None,
        module: LightningModule | None = None,
        terms: list[Term] | None = None,
        weigh_by: Weighing = "examples",
        server_optimizer: ServerOptimizer | None = None,
        personal: str | None = None,
        finetune: FineTuning | None = None,
        adapter_average: AdapterAverageName | AdapterAverage | None = None,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        self.network_spec, self.channels_last = network, channels_last
        self.optimizer_spec, self.scheduler_spec = optimizer, scheduler
        self.adapters = chosen_rule(adapter_average)
        self.average, self.max_share = average, max_share
        self.weigh_by: Weighing = weigh_by
        self.server_optimizer, self.finetune = server_optimizer, finetune
        self.personal = self.adapters.personal if personal is None else personal
        if self.personal is not None or finetune is not None:
            self.personalised = self.has_global_model = True
        self.terms: list[Term] = list(terms or [])
        check_terms(self.terms, self.own_terms, type(self).__name__)
        # by round and what the optimiser began with
        self.scheduled_groups: dict[Any, list[dict[str, Any]]] = {}
        self.server: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}  # what clients begin with that no server's state has
        self.round = 0
        # of the data and the network, once build has seen them
        self.task: Task = Classification()
        self.layout = self.own = Layout({})
        self.trained_names: Sequence[str] = ()
        # the trainer's: what each local step's gradient is clipped to
        self.gradient_clip_val: float | None = None
        self.gradient_clip_algorithm: Literal["norm", "value"] = "norm"
        self.unsent = UnsentBuffers(nn.Module())  # the trainer's: of the network that it has built
        self.has_received = False  # whether terms know what the client received
        # the user's own stays as it is, for another method or another run
        self.module = own_copy(module)
        # each run trains a copy; in a tuple it is no part of this module
        self.untrained = (self.module,)
        check_run(Run(self))
        if module is not None:
            check_module(self, module)
            record_copy(self, module, self.module)
            self.stackable = False  # nobody knows what a module keeps

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        adopt_former(cls)
        check_refuses(cls)

    # Both halves

    def build(self, data: FederatedData) -> None:
        """Make the network for this data and the server's first state. Initial weights come from
        torch's generators as they stand."""
        self.take_task(data.task)
        self.client_weights = ClientWeights.by(self.weigh_by, data)
        if (untrained := self.untrained[0]) is None:
            self.network = build_network(
                self.network_spec,
                data.num_classes,
                data.example_shape,
                logits=self.logits,
                task=data.task,
                inputs=data.example_inputs(),
                channels_last=self.channels_last,
            )
        else:
            self.module = copied(untrained)
            self.network = adopt(self, self.module, data)
        self.adapters.prepare(self.network)
        self.split_network()
        self.cohort, self.most_examples = data.num_clients, self.client_weights.largest(data)
        self.start_server()
        self.server |= self.adapters.bind(self, data.num_clients)
        self.growing = type(self).growing | self.adapters.growing
        self._build_terms(data)

    def take_task(self, learnt: Task) -> None:
        """Take the data's task, if method and terms can do it.

        Raises:
            InputError: they cannot.
        """
        self.task = learnt
        check_run(Run(self, task=learnt))

    def stream(self, purpose: str, client: Client | None = None) -> np.random.Generator:
        """Return the method's own randomness, for this round and client."""
        return rng.stream(self.seed, purpose, self.round, -1 if client is None else client.id)

    # The client's half

    def start_client(self, message: Payload, client: Client, labels: Tensor) -> None:
        """Make the module what this client starts its round from: its own part, what it receives,
        and what its terms read."""
        self.take_own(client)
        self.receive(message, client)
        self.start_terms(client, labels)

    def end_client(self, client: Client) -> None:
        """Keep on the client, after its local steps, what its next round needs."""
        self.end_terms(client)
        self.keep_own(client)

    def receive(self, message: Payload, client: Client) -> None:
        """Set every parameter and buffer that training reads or writes from ``message`` and
        ``client.state``, and nothing else.

        One that does not call this one ends with ``self.remember_received()``.
        """
        self.adapters.receive(self, message, client)
        self.remember_received()

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Yield the batches of this client's round, at most ``steps`` of its own data."""
        return data.train_batches(
            client, round=self.round, epochs=epochs, labels=labels, steps=steps
        )

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Return the terms of the local objective: ``loss``, and each term by its metric name
        (``loss_task``, ...)."""
        task, logits = self.task_and_logits(batch, batch_idx)
        return self.with_terms({"loss": task, "loss_task": task}, batch, logits)

    def task_and_logits(
        self, batch: Any, batch_idx: int, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return L_task and the logits that it is of.

        Args:
            batch: inputs and target; of a module, what its ``training_step`` takes.
            batch_idx: number of the local step.
            weights: by parameter name, what is computed with in place of the network's own.

        Returns:
            L_task, a scalar, and logits ``[B, C]``; None where the loss is a module's and no term
            reads them.
        """
        if self.module is not None:
            of = self.network if self.terms_read("logits") else None
            return loss_and_logits(self.module, batch, batch_idx, weights, of)
        inputs, target = batch
        outputs = self._logits(inputs, weights)
        return self.task_loss(outputs, target), outputs

    def _logits(self, inputs: Any, weights: Mapping[str, Tensor] | None) -> Tensor:
        own = dict(weights or {})
        return functional_call(self.network, own, (inputs,)) if own else self.network(inputs)

    def task_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """L_task of outputs and target, the mean over the batch: of the data's task."""
        return self.task.loss(outputs, target)

    def configure_optimizers(self) -> Any:
        """Return a new local optimiser at its own learning rate, also before a client has received
        anything; as in Lightning, it may come with a scheduler, new too, which steps once a round."""
        if self.module is not None and self.module_optimizes:
            return self.module.configure_optimizers()
        trainable = self.trainable()
        if self.optimizer_spec:
            return self.optimizer_spec(trainable)
        return SGD(trainable, 0.05, momentum=0.9)

    def trainable(self) -> Iterable[nn.Parameter] | Iterable[dict[str, Any]]:
        """Return what the local optimiser steps on, or groups of it. Override where the module
        holds parameters of clients other than this one's kind."""
        return [p for p in self.parameters() if p.requires_grad]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Act after each optimiser step, such as project the weights or refresh a teacher."""

    def upload(self, client: Client) -> Payload:
        """Return what the client sends. ``examples`` is its weight n_k. ``local_steps`` and
        ``local_lr`` say what its round was."""
        weights = self.adapters.sent(self, client)
        return Payload({"examples": self.examples_of(client), "weights": weights})

    def examples_of(self, client: Client) -> Tensor:
        """Return n_k as it travels, an int32 scalar: its examples, labelled tokens or 1 by
        ``weigh_by``."""
        return torch.tensor(self.client_weights.of(client), dtype=torch.int32)

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        """Return the entries of this client's upload, and the shape of each: a tuple of sizes, of
        which a ``range`` allows several.

        The server refuses other shapes, entries of other names and uploads without one of these,
        before it takes memory for them; :class:`~fl_lightning.wire.OptionalShape` is of an entry
        that may be missing. What fits and then makes ``addends`` raise is therefore a bug of the
        method. An integer in place of a shape is a largest number of values, in any shape: what is
        wrong with one is told by the uploads of the other clients, see
        :mod:`fl_lightning.aggregation.undeclared`.

        It holds for the ``upload`` of the same class: a subclass that sends something else and does
        not override this is bound by ``aggregation.receiving.max_undeclared`` alone.
        """
        return {"examples": (), "weights": (self.adapters.sent_values(self, client),)}

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep anything from round to round; it is known once the network is
        built."""
        return self.terms_read("previous_features", "shift") or bool(
            self.own.size and self.own_part_learns
        )

    # The server's half; it sees decoded payloads and nothing else of a client

    def work_kind(self, client: Client) -> str:
        """Return what decides, beside its number of examples, how much this client computes in this
        round.

        Clients of one kind do the same work for each example; it is read where the cost of training
        is measured.
        """
        return ""

    def server_metrics(self) -> dict[str, float]:
        """Return what the server knows of its own state, logged once a round."""
        return {"bits/average": 32.0, **self.adapters.metrics(self)}

    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return the network that is evaluated: the global one, or this client's when the method is
        personalised.

        That one is put together by the client, so it may read ``client.state``; no other half of
        the server may.
        """
        return self.deployed(self.evaluated_weights, client)

    def deployed(self, weights: Tensor, client: Client | None) -> nn.Module:
        """Return the network with these weights ``[P]``, of the client's own rank, what stays on
        the client, and its fine-tuning."""
        own = weights if client is None else self.adapters.cut(weights, client)
        self.layout.write(self.network, own)
        self.adapters.write_base(self)
        self.take_own(client)
        if client is not None and self.finetuner is not None:
            self.finetuner(client)
        return self.network

    def full_precision(self) -> nn.Module | None:
        """Return what ``deploy`` quantises, before it does, as a network of its own; None where it
        quantises nothing."""
        return None
