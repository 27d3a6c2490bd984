"""From the settings of a trainer, a method and data to the federation of a run: the data are dealt
out, the network is built, and what does not fit is refused before anything is created."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning import rng
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, largest
from fl_lightning.compatibility import Run, check_run
from fl_lightning.data import FederatedData
from fl_lightning.data.checks import check_inputs, check_test_set, check_training_set, check_values
from fl_lightning.data.example_batches import Split
from fl_lightning.distributed.launch import one_first
from fl_lightning.engines import check_optimizer, check_optimizer_settings, check_workers
from fl_lightning.engines.finetuning import prepare_finetuning
from fl_lightning.engines.root_set import prepare_guides
from fl_lightning.errors import require
from fl_lightning.evaluation import evaluate_batch, evaluation_mode
from fl_lightning.federation import Federation
from fl_lightning.hooks import tell
from fl_lightning.methods import Method
from fl_lightning.metrics.declared import declared_by
from fl_lightning.models import MeasuredNetwork
from fl_lightning.models.recipe import copied
from fl_lightning.models.tensors import UnsentBuffers, tensors_of
from fl_lightning.run.round_parts import RoundParts
from fl_lightning.support.user_code import errors_as_refusals
from fl_lightning.tasks.base import in_float32
from fl_lightning.tasks.checks import check_loss, check_sums
from fl_lightning.tracking.mlflow_store import loggers_of

TRIED_EXAMPLES = 16
"""Examples that metrics are tried out on before a run begins."""
DealFunction = Callable[[FederatedData, int, torch.device], None]
"""Gives the data their clients, by the run's seed, and moves them to a device."""


class FederationSettings(Protocol):
    """The settings of a trainer that its federation follows from."""

    fabric: Fabric
    callbacks: list[Any]
    logger: Any
    parts: RoundParts
    workers: int | Literal["auto"]
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    max_rounds: int
    participation: float
    local_epochs: int
    max_local_steps: int | None
    eval_every: int
    deal: DealFunction | None
    """None: the data's own partition."""
    remote: Any
    """What makes the engine of a deployment; None: clients are simulated."""


def prepare_federation(
    settings: FederationSettings, method: Method, data: FederatedData, seed: int
) -> Federation:
    """Build all that can refuse its input, before anything is created.

    Args:
        settings: the trainer's.
        method: what is run; its network is built anew.
        data: they are read and dealt out.
        seed: of the run.

    Raises:
        InputError: something cannot be used, or not together.
    """
    with errors_as_refusals():
        _build(settings, method, data, seed)
    fed = Federation(
        settings.fabric,
        method,
        data,
        settings.parts.aggregation(method, data, settings.callbacks, settings.fabric.world_size),
        settings.callbacks,
        seed=seed,
        max_rounds=settings.max_rounds,
        participation=settings.participation,
        local_epochs=settings.local_epochs,
        max_local_steps=settings.max_local_steps,
        eval_every=settings.eval_every,
        timing=settings.parts.timing,
        sampler=settings.parts.sampler,
    )
    prepare_finetuning(settings.fabric, method, data, fed.labels_of)
    with errors_as_refusals():
        check_run(Run.of(fed, deployed=settings.remote is not None))  # now with the network
        try_metrics(settings.fabric, method, data)
        _check_uploads(fed)
        tell(settings.callbacks, "on_check", fed)
    return fed


def check_settings(
    settings: FederationSettings, method: Method, data: FederatedData | None = None
) -> None:
    """Refuse what cannot be combined, as far as that can be told before the network is made.

    Args:
        settings: the trainer's.
        method: what is run.
        data: dealt out to the clients; None: they have not been read.
    """
    require(
        torch.get_default_dtype() == torch.float32,
        f"torch.set_default_dtype({torch.get_default_dtype()}) around a run",
        "its networks and messages are made in float32, and --trainer.precision says what else",
        "write torch.set_default_dtype(torch.float32) before it",
    )
    run = settings.parts.combined(method, settings.callbacks, deployed=settings.remote is not None)
    check_run(run if data is None else replace(run, task=data.task, own_data=data.apart))
    declared_by((method, *settings.callbacks))
    loggers_of(settings.logger)
    check_optimizer_settings(method)


def _check_uploads(fed: Federation) -> None:
    """Refuse rounds that would all be void."""
    average, count, instead = fed.method.average, fed.cohort_size, "raise --trainer.participation"
    if fed.timing is not None and fed.timing.rounds.has_versions:
        count = fed.timing.rounds.exchanges(count)
        instead = "take --trainer.rounds FedBuff with a larger buffer"
    require(
        count >= average.fewest,
        f"--model.average {type(average).__name__}; a round has {count} uploads",
        f"it needs {average.fewest}",
        f"{instead}, or take another average",
    )


def _build(settings: FederationSettings, method: Method, data: FederatedData, seed: int) -> None:
    """Prepare the data, deal them out and build the network."""
    fabric = settings.fabric
    one_first(fabric, data.prepare_data)
    data.setup("fit")
    check_training_set(data)
    if settings.deal is None:
        data.distribute(seed, fabric.device)
    else:
        settings.deal(data, seed, fabric.device)
    check_test_set(data)
    check_inputs(data)
    check_settings(settings, method, data)
    method.seed = seed
    method.gradient_clip_val = settings.gradient_clip_val
    method.gradient_clip_algorithm = settings.gradient_clip_algorithm
    with rng.torch_stream(seed, "weights"):
        method.build(data)
    with fabric.autocast():  # as clients compute
        data.see_network(method.network)
    _check_first_state(method)
    method.keep_server()
    prepare_guides(fabric, method, data)
    method.has_said_no_average = False
    method.to(fabric.device)
    method.unsent = UnsentBuffers(method)
    check_values(data, method.network, fabric.autocast())
    _check_single_examples(fabric, method.network, data)
    check_optimizer(method, settings.max_rounds)
    check_workers(fabric, settings.workers)


def _check_first_state(method: Method) -> None:
    """Refuse a network that begins with values which no upload may have."""
    travels = method.layout.shapes
    for name, tensor in (tensors_of(method.network) if travels else {}).items():
        if name not in travels:
            continue
        size = largest(tensor.detach())
        require(
            size < MAX_MAGNITUDE,
            f"{name!r} of the network holds values up to {size:g}",
            f"what travels is finite and below {MAX_MAGNITUDE:.1e}",
            "scale it, or write register_buffer(..., persistent=False) for a constant, which does "
            "not travel",
        )


def _check_single_examples(fabric: Fabric, network: nn.Module, data: FederatedData) -> None:
    """Refuse batches of one example that the network's BatchNorm cannot normalise: tried out on a
    copy."""
    if data.batch_size != 1 or not any(isinstance(one, _BatchNorm) for one in network.modules()):
        return
    try:
        client = data.client(int(data.active[0]))
        with rng.torch_stream(data.seed, "example tried out"), torch.no_grad(), fabric.autocast():
            for batch in data.train_batches(client, round=1, epochs=1, steps=1):
                copied(network).train()(batch[0])
    except Exception as error:  # another one is that of a step, which may need more than inputs
        require(
            "more than 1 value per channel" not in str(error),
            f"--data.batch_size 1 with a network {type(network).__name__}",
            "its BatchNorm cannot normalise the one value that it has of an example",
            "write --data.batch_size 2 or more",
        )


def try_metrics(fabric: Fabric, method: Method, data: FederatedData) -> None:
    """Try a task of the user's, and the metrics that the user has named, out on a few examples,
    before anything is created.

    Raises:
        InputError: a metric does not take what the task gives.
        MisuseError: the task gives no loss, or no sums of its metrics.
    """
    is_own = not type(data.task).__module__.startswith("fl_lightning.")
    if not data.task.named and not is_own:
        return
    split: Split = "test" if len(data.test_target) else "train"
    every = data.test_target if split == "test" else data.train_target
    index = torch.arange(min(TRIED_EXAMPLES, len(every)), device=data.device)
    client = data.client(int(data.active[0])) if method.personalised else None
    network = method.deploy(client)
    with torch.no_grad(), evaluation_mode(network), fabric.autocast():
        if isinstance(network, MeasuredNetwork):
            network.expect(every[index])
        outputs = in_float32(network(data.inputs(split, index)))
    # what is not finite is NaN in the rounds, and no reason to refuse
    if isinstance(outputs, Tensor):
        outputs = outputs.nan_to_num()
    if is_own and len(index):
        _check_task(fabric, network, data, split, index, outputs)
    forms = data.task.metric_inputs(outputs, every[index]) if data.task.named else ()
    for one in data.task.named:
        one.choose_form(forms, type(data.task).__name__, data.task.metric_form)


def _check_task(
    fabric: Fabric, network: nn.Module, data: FederatedData, split: Split, index: Tensor, seen: Any
) -> None:
    target = (data.test_target if split == "test" else data.train_target)[index]
    with rng.torch_stream(data.seed, "task tried out"):
        check_loss(data.task, seen, target)
        found = evaluate_batch(fabric, data.task, network, data.inputs(split, index), target)[1]
    check_sums(data.task, found, len(index))
