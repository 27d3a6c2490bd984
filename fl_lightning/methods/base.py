"""The contract of a method. Its defaults are FedAvg (McMahan et al., AISTATS 2017).

A method is a LightningModule with two halves. The client's half: ``receive`` makes the module's parameters
and buffers what this client starts from, ``training_step`` is the local objective, ``upload`` says what goes
back. The server's half: ``broadcast``, ``aggregate``, ``deploy``, and ``server``, the tensors that the server
remembers. One resident module serves all clients of a process in turn, so after ``receive`` nothing of
another client may be left; what a client keeps lives in ``client.state``.

Tensors in ``server`` and in ``client.state`` are replaced, never written into: checkpoints and roll-backs
hold on to the old ones.

``training_step`` has no ``.item()``, no branch on values and no metric object, so that the batched engine can
run it under ``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods.averaging import WEIGHTED_MEAN, Average
from fl_lightning.methods.lit_module import adopt, check_module, module_loss
from fl_lightning.methods.local_work import LocalWork
from fl_lightning.methods.summing import SummingServer
from fl_lightning.methods.terms import LocalStep, Term, check_terms
from fl_lightning.methods.weighing import BY_EXAMPLES, ClientWeights, Weighing
from fl_lightning.models import NetworkName, build_network
from fl_lightning.models.tensors import tensors_of
from fl_lightning.privacy import MAX_MAGNITUDE, largest
from fl_lightning.support.recorded import Recorded
from fl_lightning.tasks import Classification, LanguageModelling, Task
from fl_lightning.wire import Layout, Payload, PayloadError

OptimizerCallable = Callable[[Iterable], Optimizer]
SchedulerCallable = Callable[[Optimizer], LRScheduler]
NetworkCallable = Callable[[int], nn.Module]
NetworkSetting = NetworkName | NetworkCallable | str
"""The names come first: jsonargparse looks for any other text among all classes of ``torch.nn.Module``."""


class Method(Recorded, SummingServer, LightningModule):
    """Base of all methods; what is not overridden is FedAvg.

    Args:
        network: name of a network (``small_cnn``, ``resnet20``, ``mobilenetv2``, ``vit_small``, any timm
            model), or a class whose first argument is the number of classes.
        optimizer: the clients' local optimiser, built anew for each client and round. Default: SGD, lr 0.05,
            momentum 0.9.
        average: how the server averages its clients' weights: ``WeightedMean``, or one that survives hostile
            clients: ``CoordinateMedian``, ``TrimmedMean``, ``NormClipping``.
        max_share: largest share p_k = n_k / sum n of one client in a round, in (0, 1]; what is cut off goes
            to the others in proportion. In a cohort too small for it all weigh the same. 1: no bound.
        scheduler: a schedule of the local learning rate, of ``torch.optim.lr_scheduler``, without a metric:
            it steps once a round.
        module: a LightningModule of yours: its ``training_step`` is the task loss, ``forward`` gives the
            logits that are evaluated, ``configure_optimizers`` the local optimiser and perhaps a schedule
            over rounds; what it logs is dropped. It replaces ``network`` and, except for FedMPQ and FedMPQKD,
            ``optimizer``.
        terms: what is added to the local loss, each logged as ``train/loss_<name>``, or a ``Term`` of yours.
        weigh_by: what n_k counts: a client's training ``examples``, the labelled ``tokens`` in them, or 1 for
            each of the ``clients``.
    """

    personalised: bool = False
    """True when each client has a model of its own to evaluate."""

    logits: bool = True
    """Whether the network gives one logit for each class of the data, ``[B, num_classes]``. A method whose
    ``task_loss`` takes outputs of another width says False."""

    growing: frozenset[str] = frozenset()
    """Tensors of ``server`` with a row for each client heard of; the others keep the shape that ``build``
    gave them."""

    stackable: bool = False
    """Whether many clients can be trained as one stack: ``training_step`` and ``on_train_batch_end`` read
    parameters, buffers and plain values, and set tensors only. It holds for the class that says so and not
    for its subclasses."""

    same_start: bool = False
    """Declares that ``receive`` makes the same of a message whichever client gets it: it reads neither the
    client nor ``client.state``. Clients of a stack then share what they start from. It holds for the class
    that says so and not for its subclasses."""

    uniform_clients: bool = False
    """Declares to ``check`` that every client that returned counts once in the average, whatever its n_k."""

    control_variates: bool = False
    """Declares to ``check`` that clients and server keep the control variates of SCAFFOLD's option II, which
    steer local steps."""

    scales_with_federation: bool = False
    """Declares to ``check`` that the server's step depends on how many clients the federation has, not on
    those that returned alone."""

    own_terms: frozenset[str] = frozenset()
    """Names of the terms that the method's loss has by itself; none of ``terms`` may have one of them."""

    received_refused: str = ""
    """Why no term of ``terms`` can read what clients receive; empty when it can."""

    attack_refused: str = ""
    """Why no attack on uploads can do anything; empty where clients send what they learned."""

    secure_refused: str = ""
    """Why the server's sums cannot be secure; empty where it needs nothing but sums, of one form for all
    clients."""
    privacy_refused: str = ""
    """Why ``trainer.privacy`` cannot protect the clients; empty where their messages can be clipped and added
    up with noise."""

    classification_only: str = ""
    """Why the method knows no other task than classification; empty where it does."""

    language_only: str = ""
    """Why the method knows no other task than language modelling; empty where it does."""

    measured: frozenset[str] = frozenset()
    """Names of what clients keep for callbacks to read, and the method never does."""

    counted_metrics: frozenset[str] = frozenset()
    """Metrics of an evaluation that are counted over the test set; the others are means."""

    distils: bool = False
    """Whether the method's own loss compares logits of classes."""

    trained_names: Sequence[str] = ()
    """Names of the network's weights that clients train; ``build`` finds them."""

    has_received: bool = False
    """Whether the terms know what the client received: ``remember_received`` says so."""

    module_refused: str = ""
    """Why no LightningModule can be the network; empty when one can."""

    module_optimizes: bool = True
    """Whether a module's ``configure_optimizers`` is the local optimiser; False where clients train other
    tensors than its parameters."""

    task: Task = Classification()
    """What is learnt: that of the data, once ``build`` has seen them."""

    layout: Layout = Layout({})
    """The network's weights that travel, once ``build`` has made the network."""

    client_weights: ClientWeights = BY_EXAMPLES
    """The weight n_k of each client in averages, once ``build`` has seen the data."""

    seed: int = 0
    round: int = 0
    gradient_clip_val: float | None = None
    """The trainer's: what each local step's gradient is clipped to; None: it is not clipped."""
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"

    def __init__(
        self,
        network: NetworkSetting = "small_cnn",
        optimizer: OptimizerCallable | None = None,
        average: Average = WEIGHTED_MEAN,
        max_share: float = 1.0,
        scheduler: SchedulerCallable | None = None,
        module: LightningModule | None = None,
        terms: list[Term] | None = None,
        weigh_by: Weighing = "examples",
    ) -> None:
        super().__init__()
        if not 0 < max_share <= 1:
            raise InputError(
                f"--model.max_share {max_share}",
                "a share lies in (0, 1]",
                "write --model.max_share 0.1, or 1 for no bound",
            )
        self.network_spec = network
        self.optimizer_spec = optimizer
        self.average = average
        self.max_share = max_share
        self.scheduler_spec = scheduler
        self.weigh_by: Weighing = weigh_by
        self.terms: list[Term] = list(terms or [])
        check_terms(self.terms, self.own_terms, type(self).__name__, self.received_refused)
        self.scheduled_groups: dict[
            Any, list[dict[str, Any]]
        ] = {}  # by round and what the optimiser began with
        self.server: dict[str, Tensor] = {}
        self.module = deepcopy(module)  # the user's own stays as it is, for another method or another run
        self.module_start = (
            {} if module is None else {name: tensor.clone() for name, tensor in module.state_dict().items()}
        )
        if module is not None:
            if isinstance(module, Method):
                name = type(module).__name__
                raise InputError(f"--model.module {name}", "it is a method itself", f"write --model {name}")
            check_module(self, module)
            self.stackable = False  # nobody knows what a module keeps

    # Both halves

    def build(self, data: FederatedData) -> None:
        """Make the network for this data and the server's first state. Initial weights come from torch's
        generators as they stand."""
        self.take_task(data.task)
        self.client_weights = ClientWeights.by(self.weigh_by, data)
        if self.module is None:
            self.network = build_network(
                self.network_spec,
                data.num_classes,
                data.example_shape,
                logits=self.logits,
                task=data.task,
                inputs=data.example_inputs(),
            )
        else:
            self.module.load_state_dict(self.module_start)
            self.network = adopt(self, self.module, data)
        self.layout = Layout.of(self.network)
        self.cohort, self.most_examples = data.num_clients, self.client_weights.largest(data)
        self.server = {"weights": self.layout.to_wire(self.layout.read(self.network))}
        self._build_terms()

    def take_task(self, learnt: Task) -> None:
        """Take the data's task, if method and terms can do it.

        Raises:
            InputError: they compare logits of classes where there are none, or know classes of examples only.
        """
        self.task = learnt
        task, mine = type(learnt).__name__, type(self).__name__
        if self.classification_only and not isinstance(self.task, Classification):
            raise InputError(
                f"--model {mine} where the task is {task}", self.classification_only, "write --model FedAvg"
            )
        if self.language_only and not isinstance(self.task, LanguageModelling):
            raise InputError(
                f"--model {mine} where the task is {task}",
                self.language_only,
                "write --data.class_path InstructionData, or another one of text",
            )
        readers = [type(term).__name__ for term in self.active_terms() if term.reads_logits]
        if (self.distils or readers) and not self.task.has_classes:
            what = mine if self.distils else f"--model.terms {', '.join(readers)}"
            raise InputError(
                f"{what} where the task is {task}", "it compares logits of classes", "leave it out"
            )

    def _build_terms(self) -> None:
        """Make room for what the terms read of what clients receive."""
        terms = self.active_terms()
        self.trained_names = [name for name, p in self.network.named_parameters() if p.requires_grad]
        if any(term.reads_received_weights for term in terms):
            self.anchored = Layout.of(self.network, include={*self.trained_names}.__contains__)
            self.register_buffer("received_weights", torch.zeros(self.anchored.size))
        if any(term.reads_received_logits for term in terms):
            self.received_network = deepcopy(self.network).requires_grad_(False)

    def stream(self, purpose: str, client: Client | None = None) -> np.random.Generator:
        """Return the method's own randomness, for this round and client."""
        return rng.stream(self.seed, purpose, self.round, -1 if client is None else client.id)

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        """Set every parameter and buffer that training reads or writes from ``message`` and ``client.state``,
        and nothing else.

        One that does not call this one ends with ``self.remember_received()``.
        """
        self.layout.write(self.network, message.tensor("weights"))
        self.remember_received()

    @torch.no_grad()
    def remember_received(self) -> None:
        """Tell the terms that the model is now what the client received."""
        terms = self.active_terms()
        if any(term.reads_received_weights for term in terms):
            trained = self.trained_weights()
            self.received_weights = torch.cat([trained[name].reshape(-1) for name in self.anchored.shapes])
        if any(term.reads_received_logits for term in terms):
            received, own = tensors_of(self.received_network), tensors_of(self.network)
            for name in self.layout.shapes:
                received[name].copy_(own[name])
        self.has_received = bool(terms)

    def train(self, mode: bool = True) -> Method:
        super().train(mode)
        if "received_network" in self._modules:
            self.received_network.eval()
        return self

    def trained_weights(self) -> dict[str, Tensor]:
        """Return the network's weights that the local optimiser moves, by parameter name, before any
        rounding.

        Override where the optimiser steps on other tensors: the values are those before rounding, the
        gradient leads to what the optimiser steps on.
        """
        parameters = dict(self.network.named_parameters())
        return {name: parameters[name] for name in self.trained_names}

    def active_terms(self) -> list[Term]:
        """Return the terms that add something to the loss."""
        return [term for term in self.terms if not term.neutral]

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Yield the batches of this client's round, at most ``steps`` of its own data."""
        return data.train_batches(client, round=self.round, epochs=epochs, labels=labels, steps=steps)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Return the terms of the local objective: ``loss``, and each term by its metric name (``loss_task``,
        ...)."""
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
            L_task, a scalar, and logits ``[B, C]``; None where the loss is a module's and no term reads them.
        """
        if self.module is not None:
            reads = any(term.reads_logits for term in self.active_terms())
            logits = self._logits(batch[0], weights) if reads else None
            return module_loss(self.module, batch, batch_idx, weights), logits
        inputs, target = batch
        outputs = self._logits(inputs, weights)
        return self.task_loss(outputs, target), outputs

    def _logits(self, inputs: Any, weights: Mapping[str, Tensor] | None) -> Tensor:
        if weights is None:
            return self.network(inputs)
        return functional_call(self.network, dict(weights), (inputs,))

    def with_terms(self, outputs: dict[str, Tensor], batch: Any, logits: Tensor | None) -> dict[str, Tensor]:
        """Return the losses of a step with those of ``terms``.

        Args:
            outputs: of the method itself: ``loss``, ``loss_task``, ...
            batch: inputs and target.
            logits: ``[B, C]`` of the model that is trained.

        Raises:
            MisuseError: a term needs what the client received, and ``receive`` did not remember it.
        """
        terms = self.active_terms()
        if not terms:
            return outputs
        if not self.has_received:
            raise MisuseError(
                f"{type(self).__name__}.receive with --model.terms",
                "terms may read what the client received",
                "call super().receive or end it with self.remember_received()",
            )
        inputs, target = batch
        step = LocalStep(
            inputs,
            target,
            outputs["loss_task"],
            logits,
            trained=self.trained_weights,
            received=lambda: self.anchored.unpack(self.received_weights),
            teacher=lambda inputs: self.received_network(inputs),
            class_rows=self.task.class_rows,
        )
        added = {f"loss_{term.name}": term(step) for term in terms}
        return {**outputs, "loss": sum(added.values(), outputs["loss"]), **added}

    def task_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """L_task of outputs and target, the mean over the batch: of the data's task."""
        return self.task.loss(outputs, target)

    def configure_optimizers(self) -> Any:
        """Return the local optimiser at its own learning rate; as in Lightning, an optimiser of one's own may
        come with a scheduler, which steps once a round."""
        if self.module is not None and self.module_optimizes:
            return self.module.configure_optimizers()
        trainable = self.trainable()
        return (
            self.optimizer_spec(trainable) if self.optimizer_spec else SGD(trainable, lr=0.05, momentum=0.9)
        )

    def trainable(self) -> Iterable[nn.Parameter]:
        """Return what the local optimiser steps on. Override where the module holds parameters of clients
        other than this one's kind."""
        return [p for p in self.parameters() if p.requires_grad]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Act after each optimiser step, such as project the weights or refresh a teacher."""

    def upload(self, client: Client) -> Payload:
        """Return what the client sends. ``examples`` is its weight n_k. ``local_steps`` and ``local_lr`` say
        what its round was."""
        weights = self.layout.to_wire(self.layout.read(self.network))
        return Payload({"examples": self.examples_of(client), "weights": weights})

    def examples_of(self, client: Client) -> Tensor:
        """Return n_k as it travels, an int32 scalar: its examples, labelled tokens or 1 by ``weigh_by``."""
        return torch.tensor(self.client_weights.of(client), dtype=torch.int32)

    def upload_limits(self, client: Client) -> Mapping[str, int]:
        """Return the entries that this client's upload may hold, and the largest number of values of each.

        The server refuses more, and entries of other names, before it takes memory for them. It holds for the
        ``upload`` of the same class: a subclass that sends something else and does not override this is
        bound by ``receiving.max_undeclared`` alone.
        """
        return {"examples": 1, "weights": self.layout.size}

    local_work: LocalWork | None = None
    """What the client did in its round: set by the engine while ``upload`` runs, and only then."""

    @property
    def local_steps(self) -> int:
        """K, the optimiser steps that this client made in this round, fewer for a straggler. To be read in
        ``upload``.

        Raises:
            RuntimeError: it is read elsewhere.
        """
        return self._local_work("local_steps").steps

    @property
    def local_lr(self) -> float:
        """eta_l, the learning rate of those steps in this round, as the schedule has it. To be read in
        ``upload``.

        Raises:
            RuntimeError: it is read elsewhere.
            ValueError: groups of parameters have different learning rates.
        """
        return self._local_work("local_lr").lr

    def _local_work(self, name: str) -> LocalWork:
        if self.local_work is None:
            raise RuntimeError(
                f"{type(self).__name__}.{name} is known while upload runs, when the steps are done; "
                "read it there"
            )
        return self.local_work

    # The server's half; it sees decoded payloads and nothing else of a client

    def broadcast(self, client: Client) -> Payload:
        """Return what this client is sent at the start of the round."""
        return Payload({"weights": self.server["weights"]})

    def check(self, upload: Payload, client: Client) -> None:
        """Refuse an upload that must not be averaged.

        Raises:
            PayloadError: an entry that is missing or of the wrong size. (The loop has refused what is not
                finite, of another dtype, and ``examples`` that are not one positive integer.)
        """
        upload.tensor("examples")
        weights = self.decode(upload)
        self.layout.check(weights)
        if weights is not upload.get("weights") and not largest(weights) < MAX_MAGNITUDE:
            raise PayloadError(
                "it decodes to values that are not finite or too large",
                f"weights are below {MAX_MAGNITUDE:g}",
                "lower the lr",
            )

    def decode(self, upload: Payload) -> Tensor:
        """Return this client's weights after its round, as one vector of ``layout``, float32. The server
        still has those that it broadcast.

        Raises:
            PayloadError: an entry that is missing or of the wrong size.
        """
        return upload.tensor("weights").float()

    def work_kind(self, client: Client) -> str:
        """Return what decides, beside its number of examples, how much this client computes in this round.

        Clients of one kind do the same work for each example; it is read where the cost of training is
        measured.
        """
        return ""

    def server_metrics(self) -> dict[str, float]:
        """Return what the server knows of its own state, logged once a round."""
        return {"bits/average": 32.0}

    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return the network that is evaluated: the global one, or this client's when the method is
        personalised.

        That one is put together by the client, so it may read ``client.state``; no other half of the server
        may.
        """
        self.layout.write(self.network, self.server["weights"])
        return self.network

    def full_precision(self) -> nn.Module | None:
        """Return what ``deploy`` quantises, before it does, as a network of its own; None where it quantises
        nothing."""
        return None


def is_stackable(method: Method) -> bool:
    """Return what the method's own class declares: what a subclass adds may not be stackable, and nobody can
    tell from outside."""
    return vars(method).get("stackable", vars(type(method)).get("stackable", False))


def has_same_start(method: Method) -> bool:
    """Return what the method's own class declares as ``same_start``."""
    return vars(type(method)).get("same_start", False)


def declared_limits(method: Method, client: Client) -> Mapping[str, int] | None:
    """``upload_limits`` if it belongs to the ``upload`` in use; None where a subclass sends something else
    and does not say what."""
    for cls in type(method).__mro__:
        if "upload_limits" in vars(cls):
            return method.upload_limits(client)
        if "upload" in vars(cls):
            return None
    return None
