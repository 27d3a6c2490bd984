"""Many clients in one call: their tensors are stacked, and ``torch.func.vmap`` runs the step."""
