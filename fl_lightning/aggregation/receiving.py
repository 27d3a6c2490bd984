"""What the server does with the bytes of an upload before it counts: decode within limits, and
refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from fl_lightning.aggregation.client_weights import BY_EXAMPLES, ClientWeights
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.undeclared import UndeclaredUploads, read_upload
from fl_lightning.client import Client
from fl_lightning.wire import Limit, Payload, PayloadError

UNDECLARED_FACTOR, MIN_UNDECLARED_VALUES = 8, 2**22
"""An upload of a method that does not declare what its uploads hold has at most so many times the
values of the server's state, or so many values: 16 MiB once they are decoded."""


def decode_upload(method: SummingServer, data: bytes, client: Client, *, verified: bool) -> Payload:
    """Read an upload within the limits that its method declares, or within general ones.

    Args:
        verified: its checksum can be skipped.

    Raises:
        PayloadError: it is damaged, or holds more than it may.
    """
    limits = declared_limits(method, client)
    most = max_undeclared(method) if limits is None else None
    return Payload.from_bytes(data, verified=verified, limits=limits, max_values=most)


def max_undeclared(method: SummingServer) -> int:
    """Largest number of values of an upload of a method that does not declare ``upload_limits``."""
    values = sum(tensor.numel() for tensor in method.server.values())
    return max(MIN_UNDECLARED_VALUES, UNDECLARED_FACTOR * values)


def declared_limits(method: SummingServer, client: Client) -> Mapping[str, Limit] | None:
    """``upload_limits`` if it belongs to the ``upload`` in use; None where a subclass sends
    something else and does not say what."""
    for cls in type(method).__mro__:
        if "upload_limits" in vars(cls):
            return method.upload_limits(client)
        if "upload" in vars(cls):
            return None
    return None


def declares_shapes(method: SummingServer, client: Client) -> bool:
    """Return whether the method says which shapes the entries of a client's upload have."""
    limits = declared_limits(method, client)
    return limits is not None and all(isinstance(limit, tuple) for limit in limits.values())


def check_upload(
    method: SummingServer,
    upload: Payload,
    client: Client,
    counted: Collection[int],
    undeclared: UndeclaredUploads | None = None,
) -> None:
    """Refuse what no server may average, whatever the method.

    What passes has the shapes that the method declares, so that what ``addends`` or ``aggregate``
    then raise is a bug of the method. Where it declares none, ``addends`` is tried here.

    Args:
        method: the resident module with the server's state.
        upload: what the client sent.
        client: whose it is.
        counted: clients whose uploads of this round count already.
        undeclared: takes an upload without declared shapes and any error of the method's about it;
            None: the error ends the run.

    Raises:
        PayloadError: a second upload of one client, entries that the method does not know or of
            other shapes than it declares, no examples or more than the client has, values that are
            not finite or whose squares would not be, or whatever the method refuses. Any other
            exception is a bug of the method's ``check``, ``decode`` or ``addends`` and ends the
            run, unless ``undeclared`` takes it.
    """
    if client.id in counted:
        raise PayloadError("it is the second one of this round", "a client counts once", "send one")
    limits = declared_limits(method, client)
    if limits is not None:
        upload.require_within(limits)
    check_values(upload, method.layout.dtype)
    check_examples(upload, client, method.client_weights)
    if declares_shapes(method, client):
        method.check(upload, client)
    elif undeclared is None:
        read_upload(method, upload, client)
    else:
        undeclared.take(client.id, upload, partial(read_upload, method, upload, client))


def check_values(upload: Payload, dtype: torch.dtype = torch.float32) -> None:
    """Refuse entries that are not finite values of sane size, in float32 or in the ``dtype`` that
    the network's weights travel in; ``examples`` is checked by :func:`check_examples`."""
    allowed = {torch.float32, dtype}
    for name, value in upload.items():
        if name == "examples" or not isinstance(value, Tensor):
            continue
        if value.dtype not in allowed:
            raise PayloadError(
                f"entry {name!r} is {value.dtype}",
                f"values travel as {' or '.join(sorted(map(str, allowed)))} or as codes",
                "convert them",
            )
        least, most = torch.aminmax(value) if value.numel() else (0.0, 0.0)
        # of NaN nothing is true
        if not (float(least) > -MAX_MAGNITUDE and float(most) < MAX_MAGNITUDE):
            raise PayloadError(
                f"entry {name!r} holds NaN, infinity or values of {MAX_MAGNITUDE:.1e} and more",
                "uploads are finite",
                "lower the lr",
            )


def check_examples(upload: Payload, client: Client, weights: ClientWeights = BY_EXAMPLES) -> None:
    """Refuse an ``examples`` that is not one integer from 1 to n_k, the number of training examples
    (or labelled tokens) that the client enrolled with.

    ``examples`` is the client's weight in every average: without the bound a single client could
    claim 2**62 and be the average.
    """
    if "examples" not in upload:
        return
    examples = upload.tensor("examples")
    if examples.ndim or examples.is_floating_point() or int(examples) < 1:
        raise PayloadError(
            f"examples {examples.tolist()}",
            "the number of examples is one integer, 1 or more",
            "send nothing without data",
        )
    if int(examples) > weights.of(client):
        raise PayloadError(
            f"examples {int(examples)}",
            f"the client enrolled with {weights.says(client)}",
            "it can claim no more",
        )
