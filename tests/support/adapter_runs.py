"""Runs of two rounds with a rule for the adapters of a cohort, and what they deploy."""

from __future__ import annotations

import torch
from outcomes import rows_of
from tiny_language import fit, method_of, records

from fl_lightning.methods import FedAvg
from fl_lightning.models.adapters import adapter_layers
from fl_lightning.wire import Payload

OF_SINGLE_UPLOADS = ("residual", "stack", "product", "padded", "solve")


def fitted(tmp_path, rule, rank=2, ffa=False, cls=FedAvg, data=None, settings=None, **trainer):
    """A run of two rounds, in a folder of its own."""
    method = method_of(cls, rank=rank, ffa=ffa, adapter_average=rule, **(settings or {}))
    folder = tmp_path / str(len([*tmp_path.iterdir()]))
    ended = fit(method, folder, data or records(generate=False), eval_every=9, **trainer)
    return method, rows_of(ended.run_dir / "metrics.csv")


def deployed_weights(method) -> torch.Tensor:
    layers = adapter_layers(method.deploy()).values()
    return torch.cat([layer.full_weight().detach().flatten() for layer in layers])


class Extreme(FedAvg):
    """Uploads just below the largest values that a server takes: all alike, or of random signs."""

    alike = True

    def upload(self, client):
        sent = super().upload(client)
        weights = torch.full_like(sent.tensor("weights"), 1e6)
        if not self.alike:
            signs = (
                torch.rand(weights.shape, generator=torch.Generator().manual_seed(client.id)) < 0.5
            )
            weights = torch.where(signs, weights, -weights)
        return Payload({"examples": sent.tensor("examples"), "weights": weights})
