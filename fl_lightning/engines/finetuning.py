"""Fine-tuning: the local steps that a client's model makes before it is evaluated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import one_thread
from fl_lightning.engines.sequential import descend, start_optimizer
from fl_lightning.errors import require
from fl_lightning.methods.base import Method
from fl_lightning.methods.personal import training_only, tuned_names
from fl_lightning.models.features import linear_layers


def prepare_finetuning(
    fabric: Fabric, method: Method, data: FederatedData, labels_of: Callable[[Client], Tensor]
) -> None:
    """Get ready the steps of a method's ``finetune``, which ``deploy`` makes from now on, and the
    labels that it reads.

    Args:
        fabric: device and precision.
        method: it was built.
        data: of the run.
        labels_of: returns the labels that a client trains on.
    """
    if method.labels_of is not None:
        method.labels_of = lambda client: labels_of(client)  # a copy of it copies no federation
    tuning = method.finetune
    if tuning is None or not (tuning.epochs or tuning.steps):
        method.finetuner = None
        return

    trained = [*method.trained_names, *method.own.shapes]
    there = tuning.part == "full" or linear_layers(method.network)
    names = tuned_names(method.network, tuning.part, trained) if there else set()
    flag = "finetune_part" if "finetune" in method.owns else "finetune.part"
    require(
        bool(names),
        f"--model.{flag} {tuning.part} with a network of which nothing there is trained",
        "fine-tuning makes steps on what is trained",
        f"write --model.{flag} full",
    )

    def finetune(client: Client) -> None:
        network = method.network
        steps = data.num_steps(client, tuning.epochs) if tuning.epochs else tuning.steps
        was_training = network.training
        method.unsent.restore()
        with (
            one_thread(fabric.device),
            torch.enable_grad(),
            training_only(network, names),
            rng.torch_stream(method.seed, "finetune", method.round, client.id),
        ):
            network.train()
            optimizer = start_optimizer(fabric, method)
            for group in optimizer.param_groups if tuning.lr is not None else ():
                group["lr"] = tuning.lr
            batches = data.train_batches(
                client,
                round=method.round,
                epochs=data.epochs_for(client, steps),
                labels=labels_of(client),
                steps=steps,
            )
            for number, batch in enumerate(batches):
                with fabric.autocast():
                    loss, _ = method.task_and_logits(batch, number)
                descend(fabric, method, optimizer, loss)
        network.train(was_training)

    method.finetuner = finetune
