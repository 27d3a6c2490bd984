"""The models of nodes on the global test set."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from fl_lightning import evaluation
from fl_lightning.distributed import collectives
from fl_lightning.hooks import Meter, RoundRecord
from fl_lightning.support.tensor_bytes import raw_bytes


class NodeMeter(Meter):
    """Evaluates the model of every node on the whole test set, as often as the mean model is: mean
    over nodes, and the worst, as ``peers/accuracy`` and ``peers/accuracy_worst``.

    Args:
        family: of the metrics.
    """

    def __init__(self, family: str) -> None:
        self.family = family

    def on_validate(self, values: dict[int, float], record: RoundRecord, context: Any) -> None:
        """Add the metrics; called after each evaluation, on all ranks."""
        task, nodes = context.data.task, context.aggregation.nodes
        asked: dict[int, int] = {}
        first: dict[str, int] = {}
        for id in nodes.ids:  # those who have agreed are evaluated once
            asked[id] = first.setdefault(content_of(nodes.of(id)), id)
        found: dict[str, torch.Tensor] = {}
        for _, id in evaluation.share(sorted(first.values())):
            with nodes.at(nodes.of(id)):
                metrics = evaluation.of_network(
                    context.fabric, context.method.deploy(), context.data
                )
            found |= {
                f"{id}/{name}": torch.tensor(value, dtype=torch.float64)
                for name, value in metrics.items()
            }
        every = collectives.gather_parts(found)
        for name in dict.fromkeys((*task.per_client, "loss")):
            of_nodes = [
                float(every[f"{asked[id]}/{name}"])
                for id in nodes.ids
                if f"{asked[id]}/{name}" in every
            ]
            if of_nodes:
                worst = np.max if name == "loss" or name in task.lower_is_better else np.min
                record.metrics[f"{self.family}/{name}"] = sum(of_nodes) / len(of_nodes)
                record.metrics[f"{self.family}/{name}_worst"] = float(worst(of_nodes))


def content_of(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of tensors of the same names, shapes and types."""
    digest = sha256()
    for tensor in state.values():
        digest.update(raw_bytes(tensor.detach().cpu().contiguous()).numpy().data)
    return digest.hexdigest()
