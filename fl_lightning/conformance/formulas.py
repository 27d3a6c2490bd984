"""Hand formulas for the bytes of payloads, from the layers of a network and the settings of a
method alone.

They share no code with the encoders. ``n_l`` weights of layer l; all other values take 4 bytes each
in fp32. A payload has a header of 19 bytes, an entry one of 3 bytes, its name and 4 bytes for each
dimension. Where the client decides how much it sends (the bits that FedMPQ's pruning leaves, the
centroids that FedPQ's k-means found), the formula starts from the number that the upload states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.wire import Payload


def fp32_bytes(values: int) -> int:
    """Return the bytes of so many fp32 values."""
    return 4 * values


def packed_bytes(values: int, bits: int) -> int:
    """Return the bytes of so many packed codes of ``bits`` bits."""
    return math.ceil(values * bits / 8)


def payload_bytes(entries: dict[str, tuple[int, int]]) -> int:
    """Return the bytes of a payload, given its entries as name -> (dimensions, bytes of the
    values)."""
    return 19 + sum(
        3 + len(name) + 4 * dimensions + nbytes for name, (dimensions, nbytes) in entries.items()
    )


def layer_sizes(network: nn.Module, personal: str | None = None) -> list[int]:
    """Return the number of weights n_l of every convolution and linear layer that does not stay on
    a client."""
    layers = [
        (name, m) for name, m in network.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))
    ]
    head = [name for name, m in layers if isinstance(m, nn.Linear)][-1:]
    stays: dict[str | None, Callable[[str], bool]] = {
        None: lambda name: False,
        "norm": lambda name: False,
        "head": lambda name: name in head,
        "body": lambda name: name not in head,
    }
    is_own = stays.get(personal, lambda name: fnmatchcase(f"{name}.weight", str(personal)))
    return [m.weight.numel() for name, m in layers if not is_own(name)]


def coded_sizes(method: Any) -> list[int]:
    """Return the number of weights n_l of every layer that travels as codes."""
    return layer_sizes(method.network, method.personal)


def num_values(network: nn.Module) -> int:
    """Return the number of parameters and of statistics of normalisation layers."""
    statistics: list[Tensor] = [b for b in network.buffers() if b.is_floating_point()]
    return sum(p.numel() for p in network.parameters()) + sum(b.numel() for b in statistics)


def num_sent(method: Any, *, trained: bool = False) -> int:
    """Return the number of values that travel: all but those of layers that stay on a client.

    They are counted by the types of layers here, and by names of tensors in the methods.

    Args:
        method: whose network and ``personal`` are read.
        trained: whether trained parameters alone are counted.
    """
    network, stays, count = method.network, 0, num_parameters if trained else num_values
    if method.personal == "norm":
        stays = sum(count(m) for m in network.modules() if isinstance(m, (_NormBase, *PLAIN_NORMS)))
    elif method.personal in ("head", "body"):
        head = count([m for m in network.modules() if isinstance(m, nn.Linear)][-1])
        stays = head if method.personal == "head" else count(network) - head
    elif method.personal is not None:
        named = [(n, p) for n, p in network.named_parameters() if p.requires_grad or not trained]
        if not trained:
            named += [(n, b) for n, b in network.named_buffers() if b.is_floating_point()]
        stays = sum(t.numel() for name, t in named if fnmatchcase(name, method.personal))
    return count(network) - stays


EXAMPLES = {"examples": (0, 4)}
PLAIN_NORMS = (nn.GroupNorm, nn.LayerNorm)


def weights_up(method: Any, upload: Payload) -> int:
    """Uploads of FedAvg, FedProx, FedNTD hold n_k and every value that travels in fp32."""
    return payload_bytes({**EXAMPLES, "weights": (1, fp32_bytes(num_sent(method)))})


def num_parameters(network: nn.Module) -> int:
    """Return the number of trained values."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def weights_and_steps_up(method: Any, upload: Payload) -> int:
    """Uploads of FedNova and FedCM hold n_k, every value that travels, and a number of steps in
    fp32."""
    return payload_bytes(
        {**EXAMPLES, "weights": (1, fp32_bytes(num_sent(method))), "steps": (0, 4)}
    )


def control_up(method: Any, upload: Payload) -> int:
    """Uploads of SCAFFOLD and FedDC hold n_k, every value that travels, and a change of the control
    variate for each parameter of these."""
    change = {"change": (1, fp32_bytes(num_sent(method, trained=True)))} if method.corrects else {}
    return payload_bytes({**EXAMPLES, "weights": (1, fp32_bytes(num_sent(method))), **change})


def control_down(method: Any, message: Payload, name: str = "c") -> int:
    """A broadcast of SCAFFOLD, FedDC and FedCM holds every value that travels, and one more vector
    over the parameters of these."""
    vector = {name: (1, fp32_bytes(num_sent(method, trained=True)))} if method.corrects else {}
    return payload_bytes({"weights": (1, fp32_bytes(num_sent(method))), **vector})


def examples_up(method: Any, upload: Payload) -> int:
    """Uploads of LocalOnly hold n_k."""
    return payload_bytes(EXAMPLES)


def nothing_down(method: Any, message: Payload) -> int:
    """Broadcasts of LocalOnly and Centralised are empty."""
    return payload_bytes({})


def weights_down(method: Any, message: Payload) -> int:
    """A broadcast of weights holds every value that travels in fp32."""
    return payload_bytes({"weights": (1, fp32_bytes(num_sent(method)))})


def qsgd_up(method: Any, upload: Payload) -> int:
    """Uploads of QFedAvg hold b bits for each weight and one fp32 norm for each layer or bucket.

    All other values are fp32. With 32 bits the upload is FedAvg's.
    """
    if method.bits == 32:
        return weights_up(method, upload)
    n = coded_sizes(method)
    norms = sum(math.ceil(size / (method.bucket or size)) for size in n)
    rest = num_sent(method) - sum(n)
    entries = {
        "codes": (1, packed_bytes(sum(n), method.bits)),
        "norms": (1, fp32_bytes(norms)),
        "rest": (1, fp32_bytes(rest)),
    }
    return payload_bytes({**EXAMPLES, **entries})


def product_up(method: Any, upload: Payload) -> int:
    """Uploads of FedPQ hold ceil(log2 K) bits for every d weights and K d fp32 values for each
    layer.

    Layers of fewer than 8 sub-vectors, and all other values, are fp32.
    """
    d, entries = method.dim, {}
    n = [size for size in coded_sizes(method) if math.ceil(size / d) >= 8]
    for layer, size in enumerate(n):
        most = min(method.centroids, math.ceil(size / d) // 4)
        centroids = min(most, len(upload.tensor(f"c{layer}")))
        entries[f"i{layer}"] = (
            1,
            packed_bytes(math.ceil(size / d), max(1, math.ceil(math.log2(centroids)))),
        )
        entries[f"c{layer}"] = (2, fp32_bytes(centroids * d))
    return payload_bytes(
        {**EXAMPLES, **entries, "rest": (1, fp32_bytes(num_sent(method) - sum(n)))}
    )


def codes_up(method: Any, upload: Payload) -> int:
    """Uploads of AQFL hold n_k and the codes."""
    return payload_bytes({**EXAMPLES, **_codes(method, upload)})


def pruned_codes_up(method: Any, upload: Payload) -> int:
    """Uploads of FedMPQ and FedMPQKD hold n_k, the codes, and for each layer 4 bits for the planes
    dropped at the top."""
    tops = (1, packed_bytes(len(coded_sizes(method)), 4))
    return payload_bytes({**EXAMPLES, **_codes(method, upload), "tops": tops})


def _codes(method: Any, payload: Payload) -> dict[str, tuple[int, int]]:
    """For each layer: 4 bits for N_l, an fp32 scale, N_l + 1 bits for each weight; other values in
    fp32."""
    n, N = coded_sizes(method), payload.codes("bits").values.tolist()
    codes = {
        f"w{layer}": (1, packed_bytes(size, bits + 1))
        for layer, (size, bits) in enumerate(zip(n, N, strict=True))
    }
    rest = num_sent(method) - sum(n)
    return {
        "bits": (1, packed_bytes(len(n), 4)),
        "scales": (1, fp32_bytes(len(n))),
        **codes,
        "rest": (1, fp32_bytes(rest)),
    }


def grids_down(method: Any, message: Payload) -> int:
    """Broadcasts of FedMPQ and FedMPQKD hold for each layer 4 bits, its grid's scale and the
    regulariser's pull in fp32, and every value in fp32.

    With ``download: quantised`` they hold the codes instead, and the teacher in fp32 where clients
    need it.
    """
    weights, layers = (1, fp32_bytes(num_sent(method))), len(coded_sizes(method))
    grids = {"grid": (1, fp32_bytes(layers)), "pull": (1, fp32_bytes(layers))}
    if method.download == "full":
        return payload_bytes({"bits": (1, packed_bytes(layers, 4)), "weights": weights, **grids})
    sends_teacher = getattr(method, "teacher_source", "received") == "full" and method.alpha > 0
    teacher = {"teacher": weights} if sends_teacher else {}
    return payload_bytes(_codes(method, message) | grids | teacher)


def one_width_down(method: Any, message: Payload) -> int:
    """Broadcasts of AQFL hold every value in fp32, or the codes with ``download: quantised``."""
    if method.download == "full":
        return weights_down(method, message)
    return payload_bytes(_codes(method, message))


def soft_labels_up(method: Any, upload: Payload) -> int:
    """Uploads of FedKD hold C fp32 values for each of |P| public examples, and the weights if
    averaged."""
    return payload_bytes({**EXAMPLES, **_soft_labels(method), **_weights_too(method)})


def soft_labels_down(method: Any, message: Payload) -> int:
    """Broadcasts of FedKD hold the same, but no soft labels before the first aggregation."""
    return payload_bytes((_soft_labels(method) if method.round > 1 else {}) | _weights_too(method))


def _soft_labels(method: Any) -> dict[str, tuple[int, int]]:
    classifier = [m for m in method.network.modules() if isinstance(m, nn.Linear)][-1]
    return {
        "soft_labels": (2, fp32_bytes(len(method.public_data.public) * classifier.out_features))
    }


def _weights_too(method: Any) -> dict[str, tuple[int, int]]:
    return {"weights": (1, fp32_bytes(num_sent(method)))} if method.average_weights else {}


def prototypes_up(method: Any, upload: Payload) -> int:
    """Uploads of FedProto hold n_k, d fp32 values for each class, and a count of each."""
    d, C = _last_linear(method)
    return payload_bytes(
        {**EXAMPLES, "prototypes": (2, fp32_bytes(C * d)), "counts": (1, fp32_bytes(C))}
    )


def prototypes_down(method: Any, message: Payload) -> int:
    """Broadcasts of FedProto hold d fp32 values and a bit for each class."""
    d, C = _last_linear(method)
    return payload_bytes({"prototypes": (2, fp32_bytes(C * d)), "known": (1, packed_bytes(C, 1))})


def _last_linear(method: Any) -> tuple[int, int]:
    layer = [m for m in method.network.modules() if isinstance(m, nn.Linear)][-1]
    return layer.in_features, layer.out_features


def adapters_up(method: Any, upload: Payload) -> int:
    """Uploads of FedMosaic hold P [r, r] and Q [r] of each block and a sketch.

    The sketch is the gradient of the last layer of the reference network, for a share of its
    inputs.
    """
    last = [m for m in method.reference.modules() if isinstance(m, nn.Linear)][-1]
    kept = max(1, round(method.sketch_rows * last.in_features)) * last.out_features
    return payload_bytes({"adapters": (3, _adapters(method)), "sketch": (1, fp32_bytes(kept))})


def adapters_down(method: Any, message: Payload) -> int:
    """Broadcasts of FedMosaic hold Pg and Qg of each block."""
    return payload_bytes({"adapters": (3, _adapters(method))})


def _adapters(method: Any) -> int:
    num_blocks, rank, *_ = method.adapter_settings
    return fp32_bytes(num_blocks * rank * (rank + 1))


def experts_down(method: Any, message: Payload) -> int:
    """Broadcasts of FedVEMoE hold K bits of what is active, the prior of each active expert, a
    number of rejecters, and an adapter with its router for the shared adapter and each active
    expert."""
    active = int(message.codes("active").values.sum())
    entries = {
        "active": (1, packed_bytes(method.k_max, 1)),
        "prior": (1, fp32_bytes(active)),
        "rejecters": (1, fp32_bytes(1)),
        "experts": (2, fp32_bytes((method.shared + active) * _expert_row(method))),
    }
    return payload_bytes(entries)


def experts_up(method: Any, upload: Payload) -> int:
    """Uploads of FedVEMoE hold n_k, K bits of what was trained, the share of each, two votes, and
    the same rows; an adapter alone where the client seeds an expert.

    With ``wire: oblivious`` they hold everything of all slots, and always an adapter.
    """
    trained = method.k_max if method.oblivious else int(upload.codes("slots").values.sum())
    seeds = method.oblivious or bool(upload.codes("votes").values.reshape(-1)[1])
    entries = {
        "slots": (1, packed_bytes(method.k_max, 1)),
        "shares": (1, fp32_bytes(trained)),
        "rows": (2, fp32_bytes((method.shared + trained) * _expert_row(method))),
        "votes": (1, packed_bytes(2, 1)),
    }
    sends = seeds and method.keeps_own
    own = {"own": (1, fp32_bytes(num_parameters(method.own_network)))} if sends else {}
    return payload_bytes({**EXAMPLES, **entries, **own})


def _expert_row(method: Any) -> int:
    """Values of an adapter and of its router, which has one value for each feature of a token."""
    (embedding,) = (m for m in method.network.modules() if isinstance(m, nn.Embedding))
    return num_parameters(method.own_network) + embedding.embedding_dim


def directions_down(method: Any, message: Payload) -> int:
    """Broadcasts of FedAdaLoRA hold a bit for each direction, and the values of those that are
    kept."""
    if not method.drops:
        return trained_down(method, message)
    kept = message.codes("kept").values
    values = int(kept.sum()) * _direction_values(method)
    return payload_bytes(
        {"kept": (1, packed_bytes(len(kept), 1)), "weights": (1, fp32_bytes(values))}
    )


def directions_up(method: Any, upload: Payload) -> int:
    """Uploads of FedAdaLoRA hold n_k, the values of the directions that the client received, and a
    share of importance in fp32 for each of them."""
    if not method.drops:
        return trained_up(method, upload)
    kept = len(upload.tensor("importance"))
    entries = {"weights": (1, fp32_bytes(kept * _direction_values(method)))}
    return payload_bytes({**EXAMPLES, **entries, "importance": (1, fp32_bytes(kept))})


def _direction_values(method: Any) -> int:
    """A direction has a value for each input and output of its layer, and its own. The formulas
    hold where all layers have one size."""
    layers = [module for module in method.network.modules() if hasattr(module, "lora_E")]
    (values,) = {len(layer.lora_B) + layer.lora_A.shape[1] + 1 for layer in layers}
    return values


def trained_down(method: Any, message: Payload) -> int:
    """Broadcasts of HEST hold what clients train: adapters and controller."""
    return payload_bytes({"weights": (1, fp32_bytes(num_parameters(method.network)))})


def trained_up(method: Any, upload: Payload) -> int:
    """Uploads of HEST hold n_k and what was trained; no price, no costs and no budget."""
    return payload_bytes({**EXAMPLES, "weights": (1, fp32_bytes(num_parameters(method.network)))})


def ladder_down(method: Any, message: Payload) -> int:
    """Broadcasts of HESTLadder hold the adapter; in stage B two masks of a bit a branch, and in
    stage C those of all levels."""
    if not method.has_masks:
        return trained_down(method, message)
    levels, branches = method.server["ladder"].shape
    rows = 2 if method.round < method.plan.first_ladder else levels
    weights = (1, fp32_bytes(num_parameters(method.network)))
    return payload_bytes({"masks": (2, packed_bytes(rows * branches, 1)), "weights": weights})


def ladder_up(method: Any, upload: Payload) -> int:
    """Uploads of HESTLadder hold n_k and the adapter, and in rounds that search a loss in fp32 of
    the network and of it without each branch."""
    if not method.searches:
        return trained_up(method, upload)
    losses = (1, fp32_bytes(1 + method.server["ladder"].shape[1]))
    return payload_bytes(
        {**EXAMPLES, "weights": (1, fp32_bytes(num_parameters(method.network))), "losses": losses}
    )
