"""Bytes by hand: from the networks' layers and the methods' settings alone, not from anything that encodes.

``n_l`` weights of layer l, ``R`` values of everything else, 4 bytes each in fp32. A payload is framed by 19
bytes, an entry by 3, its name and 4 a dimension. Where the client decides how much it sends (the bits that
FedMPQ's pruning leaves, the centroids that FedPQ's k-means found), the formula starts from what the upload
announces.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from fl_lightning.wire import Payload


def fp32(values: int) -> int:
    return 4 * values


def packed(values: int, bits: int) -> int:
    return math.ceil(values * bits / 8)


def framed(entries: dict[str, tuple[int, int]]) -> int:
    """Bytes of a payload with these entries: name -> (dimensions, bytes of its values)."""
    return 19 + sum(3 + len(name) + 4 * dimensions + nbytes for name, (dimensions, nbytes) in entries.items())


def layers(network: nn.Module) -> list[int]:
    """n_l of every convolution and linear layer."""
    return [m.weight.numel() for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


def values(network: nn.Module) -> int:
    """All that a network learns or measures: parameters, and the statistics of its normalisation."""
    statistics: list[Tensor] = [b for b in network.buffers() if b.is_floating_point()]
    return sum(p.numel() for p in network.parameters()) + sum(b.numel() for b in statistics)


EXAMPLES = {"examples": (0, 4)}


def weights_up(method: Any, upload: Payload) -> int:
    """FedAvg, FedProx, FedNTD: n_k and every value in fp32."""
    return framed({**EXAMPLES, "weights": (1, fp32(values(method.network)))})


def weights_down(method: Any, message: Payload) -> int:
    """Every value in fp32."""
    return framed({"weights": (1, fp32(values(method.network)))})


def qsgd_up(method: Any, upload: Payload) -> int:
    """QFedAvg: b bits for each weight, one fp32 norm a layer or bucket, the rest in fp32; 32 bits are
    FedAvg's."""
    if method.bits == 32:
        return weights_up(method, upload)
    n = layers(method.network)
    norms = sum(math.ceil(size / (method.bucket or size)) for size in n)
    rest = values(method.network) - sum(n)
    entries = {"codes": (1, packed(sum(n), method.bits)), "norms": (1, fp32(norms)), "rest": (1, fp32(rest))}
    return framed({**EXAMPLES, **entries})


def product_up(method: Any, upload: Payload) -> int:
    """FedPQ: ceil(log2 K) bits for every d weights, K d fp32 a layer, layers of fewer than 8 sub-vectors and
    the rest in fp32."""
    d, entries = method.dim, {}
    n = [size for size in layers(method.network) if math.ceil(size / d) >= 8]
    for layer, size in enumerate(n):
        most = min(method.centroids, math.ceil(size / d) // 4)
        centroids = min(most, len(upload.tensor(f"c{layer}")))
        entries[f"i{layer}"] = (1, packed(math.ceil(size / d), max(1, math.ceil(math.log2(centroids)))))
        entries[f"c{layer}"] = (2, fp32(centroids * d))
    return framed({**EXAMPLES, **entries, "rest": (1, fp32(values(method.network) - sum(n)))})


def planes_up(method: Any, upload: Payload) -> int:
    """FedMPQ, FedMPQKD, AQFL: n_k and the planes."""
    return framed({**EXAMPLES, **_planes(method, upload)})


def _planes(method: Any, payload: Payload) -> dict[str, tuple[int, int]]:
    """Per layer 4 bits for N_l, an fp32 scale, N_l + 1 bits for each weight; the rest in fp32."""
    n, N = layers(method.network), payload.codes("bits").values.tolist()
    codes = {
        f"w{layer}": (1, packed(size, bits + 1)) for layer, (size, bits) in enumerate(zip(n, N, strict=True))
    }
    rest = values(method.network) - sum(n)
    return {"bits": (1, packed(len(n), 4)), "scales": (1, fp32(len(n))), **codes, "rest": (1, fp32(rest))}


def planes_down(method: Any, message: Payload) -> int:
    """FedMPQ, FedMPQKD: 4 bits a layer and every value in fp32, or ``quantised`` the planes and, if need be,
    the teacher in fp32."""
    weights = (1, fp32(values(method.network)))
    if method.download == "full":
        return framed({"bits": (1, packed(len(layers(method.network)), 4)), "weights": weights})
    taught = getattr(method, "teacher_source", "received") == "full" and method.alpha > 0
    return framed(_planes(method, message) | ({"teacher": weights} if taught else {}))


def one_width_down(method: Any, message: Payload) -> int:
    """AQFL: every value in fp32, or ``quantised`` the planes."""
    return weights_down(method, message) if method.download == "full" else framed(_planes(method, message))


def soft_labels_up(method: Any, upload: Payload) -> int:
    """FedKD: C fp32 for each of the |P| public examples, and the weights where they travel too."""
    return framed({**EXAMPLES, **_soft_labels(method), **_weights_too(method)})


def soft_labels_down(method: Any, message: Payload) -> int:
    """The same, but no soft labels before the first aggregation."""
    return framed((_soft_labels(method) if method.round > 1 else {}) | _weights_too(method))


def _soft_labels(method: Any) -> dict[str, tuple[int, int]]:
    classifier = [m for m in method.network.modules() if isinstance(m, nn.Linear)][-1]
    return {"soft_labels": (2, fp32(len(method.public_data.public) * classifier.out_features))}


def _weights_too(method: Any) -> dict[str, tuple[int, int]]:
    return {"weights": (1, fp32(values(method.network)))} if method.average_weights else {}


def adapters_up(method: Any, upload: Payload) -> int:
    """FedMosaic: P [r, r] and Q [r] of each block, and the gradient of the reference's last layer on a share
    of its inputs."""
    last = [m for m in method.reference.modules() if isinstance(m, nn.Linear)][-1]
    kept = max(1, round(method.sketch_rows * last.in_features)) * last.out_features
    return framed({"adapters": (3, _adapters(method)), "sketch": (1, fp32(kept))})


def adapters_down(method: Any, message: Payload) -> int:
    """Pg and Qg of each block."""
    return framed({"adapters": (3, _adapters(method))})


def _adapters(method: Any) -> int:
    num_blocks, rank, *_ = method.adapter_settings
    return fp32(num_blocks * rank * (rank + 1))
