"""What leaks of the clients' examples through the model that is released, and through what the
server sees.

    membership  the loss of an example says whether it was trained on  Yeom et al., CSF 2018
    inversion   an update gives back the images that it was made of    Geiping et al., NeurIPS 2020

The attacker of ``membership`` takes an example for a member where its loss is below a threshold (as
Adversary 2 of Yeom et al.); all thresholds are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.data.example_batches import Split
from fl_lightning.engines import ClientTask, SequentialEngine
from fl_lightning.evaluation import evaluation_mode
from fl_lightning.models.tensors import tensors_of
from fl_lightning.probing.inversion import STEPS, Attacker, psnr, recognised
from fl_lightning.probing.probed_model import BATCH_SIZE, Finding, ProbedModel
from fl_lightning.rng import stream
from fl_lightning.tasks.base import in_float32
from fl_lightning.wire import Payload

MAX_EXAMPLES = 2000
"""Members, and as many others, that membership is tested on."""
NO_WEIGHTS = "the server of {} adds up no weights"
FALSE_POSITIVES = 0.01
"""Rate of false positives at which true ones are counted (Carlini et al., S&P 2022)."""
VICTIMS = 8
"""Clients whose images are looked for; a sum over a larger cohort is attacked as one over so
many."""
CANDIDATES = 1000
"""Training images among which a reconstruction has to be nearest to the victim's."""


def membership(subject: ProbedModel) -> Finding:
    """Tell training examples of clients that took part from test examples by the loss of the
    deployed model."""
    from sklearn.metrics import roc_auc_score, roc_curve

    if subject.method.personalised:
        return Finding(skipped=["membership left out: each client has a model of its own"])
    clients = _clients(subject)
    trained = np.sort(np.concatenate([client.train for client in clients]))
    members = _losses(subject, "train", _some(subject, trained))
    others = _losses(subject, "test", _some(subject, np.arange(len(subject.data.test_target))))
    if not (np.isfinite(members).all() and np.isfinite(others).all()):
        return Finding(skipped=["membership left out: the model's outputs are not finite"])
    is_member = np.repeat([1, 0], [len(members), len(others)])
    score = -np.concatenate([members, others])
    false, true, _ = roc_curve(is_member, score, drop_intermediate=False)
    return Finding(
        {
            "membership/auc": float(roc_auc_score(is_member, score)),
            "membership/tpr": float(true[false <= FALSE_POSITIVES].max()),
        },
        details={
            "members": f"{len(members)} examples of {len(clients)} clients that took part",
            "others": f"{len(others)} test examples",
            "score": "loss of the example",
            "tpr": f"at a false-positive rate of {FALSE_POSITIVES}",
        },
    )


def _clients(subject: ProbedModel) -> list[Client]:
    """Return the clients whose examples went into the model: others are no members."""
    ids = [
        int(id)
        for id in subject.data.active
        if subject.trained_on is None or id in subject.trained_on
    ]
    return [subject.data.client(id, subject.states.get(id)) for id in ids]


def _some(subject: ProbedModel, index: np.ndarray) -> Tensor:
    """Return at most ``MAX_EXAMPLES`` of the examples, drawn by the run's seed."""
    if len(index) > MAX_EXAMPLES:
        index = stream(subject.seed, "membership").choice(index, MAX_EXAMPLES, replace=False)
    return torch.from_numpy(np.sort(index)).to(subject.data.device)


@torch.no_grad()
def _losses(subject: ProbedModel, split: Split, index: Tensor) -> np.ndarray:
    """Return the loss of each example under the deployed model, float64 ``[n]``."""
    data, losses = subject.data, []
    target = data.train_target if split == "train" else data.test_target
    with evaluation_mode(subject.method.deploy()) as network, subject.fabric.autocast():
        for part in index.split(min(BATCH_SIZE, data.evaluation_batch)):
            outputs = in_float32(network(data.inputs(split, part)))
            total, weight = data.task.examplewise(outputs, target[part])["loss"]
            losses.append((total / weight.clamp_min(1)).cpu())
    return torch.cat(losses).numpy()


def inversion(subject: ProbedModel) -> Finding:
    """Reconstruct images of clients from what the server sees of their updates, and from what is
    released.

    Each client makes one step on one of its images, from the checkpoint's weights. The server sees
    each update by itself, or their sum where sums are secure. Their sum is released: anybody can
    subtract one model from the next. Where the server sees no bare update, the attack is also made
    on bare ones, which says whether it would succeed without protection.
    """
    why_not = _not_invertible(subject)
    if why_not:
        return Finding(skipped=[f"inversion left out: {why_not}"])
    data, guard = subject.images, subject.protection
    assert data is not None
    clients = _victims(subject)
    index = torch.tensor([int(client.train[0]) for client in clients], device=data.device)
    images = data.view(data.train_images[index]).float() / 255
    moved = [update for client in clients for update in _update(subject, client)]
    if not moved:
        why_not = NO_WEIGHTS.format(type(subject.method).__name__)
        return Finding(skipped=[f"inversion left out: {why_not}"])
    bare = torch.stack(moved)
    updates = guard.clipped(bare)
    noise = torch.from_numpy(
        stream(subject.seed, "inversion noise").standard_normal(updates.shape, dtype=np.float32)
    )
    total = updates.sum(0, keepdim=True)
    released = total + guard.noise_std / len(clients) ** 0.5 * noise.sum(0, keepdim=True)
    seen = updates + guard.share_std * noise
    if guard.secure:
        seen = released if guard.share_std else total
    views = {"server": seen, "released": released}
    if guard.secure or guard.share_std:
        views["unprotected"] = bare
    others = data.view(data.train_images[_candidates(subject, index)]).float() / 255
    pool = len(clients) + len(others)
    metrics = {"inversion/guess_psnr": float(psnr(others.mean(0, keepdim=True), images).mean())}
    for name, messages in views.items():
        found = _reconstruct(subject, messages, data.train_target[index], images.shape)
        metrics[f"inversion/{name}_psnr"] = float(psnr(found, images).mean())
        metrics[f"inversion/{name}_recognised"] = recognised(found, images, others)
    details = {
        "clients": len(clients),
        "client": "one step on one image",
        "attack": f"{STEPS} steps from one random start, labels known",
        "server sees": "the sum of the updates" if guard.secure else "each update",
        "psnr": "dB, mean over the images; guess: of the mean training image",
        "recognised": f"share of the images that are the nearest of {pool} to a reconstruction",
    }
    return Finding(metrics, details=details)


def _reconstruct(
    subject: ProbedModel, messages: Tensor, labels: Tensor, shape: Sequence[int]
) -> Tensor:
    """Return the images ``[K, 3, side, side]`` that messages ``[K, P]`` give back one by one, or
    one sum ``[1, P]`` all at once."""
    data, method = subject.images, subject.method
    assert data is not None
    method.receive(method.broadcast(data.client(0)), data.client(0))
    method.network.train()
    weights = {name: tensor.detach().clone() for name, tensor in tensors_of(method.network).items()}
    attacker = Attacker(method.network, weights, data.task, data)
    start = torch.from_numpy(
        stream(subject.seed, "inversion").random(tuple(shape), dtype=np.float32)
    )
    start = start.to(data.device)
    parts = zip(
        start.split(len(start) // len(messages)),
        labels.split(len(labels) // len(messages)),
        strict=True,
    )
    found = []
    for message, (first, label) in zip(messages, parts, strict=True):
        named = method.layout.unpack(message.to(data.device))
        update = {name: named[name] for name in method.trained_names}
        found.append(attacker.reconstruct(update, label, first))
    return torch.cat(found)


def _update(subject: ProbedModel, client: Client) -> list[Tensor]:
    """Return what the client's round of one step moves of the weights, ``[P]``, as the server
    decodes it; nothing where it adds up something else than weights."""
    method, data = subject.method, subject.data
    labels = data.labels_of([client])[0]
    message = method.broadcast(client).to_bytes()
    task = ClientTask(client, method.round, message, labels, epochs=1, steps=1)
    (result,) = SequentialEngine(subject.fabric, method, data).train([task])
    addends = method.addends(Payload.from_bytes(result.upload), client.id, 1).values()
    return [one.values - one.start for one in addends if one.start is not None][:1]


def _victims(subject: ProbedModel) -> list[Client]:
    """Return some clients with one training image each, drawn by the run's seed."""
    draw = stream(subject.seed, "inversion clients")
    count = min(VICTIMS, subject.cohort)
    chosen = [
        subject.data.client(int(id))
        for id in np.sort(draw.choice(subject.data.active, count, replace=False))
    ]
    return [replace(client, train=draw.choice(client.train, 1)) for client in chosen]


def _candidates(subject: ProbedModel, without: Tensor) -> Tensor:
    """Return training images that are not the victims', drawn by the run's seed."""
    left = np.setdiff1d(np.arange(len(subject.data.train_target)), without.cpu().numpy())
    count = min(CANDIDATES, len(left))
    chosen = stream(subject.seed, "inversion candidates").choice(left, count, replace=False)
    return torch.from_numpy(np.sort(chosen)).to(subject.data.device)


def _not_invertible(subject: ProbedModel) -> str:
    """Return why no image can be looked for; empty where it can."""
    if why_not := subject.why_no_classified_images:
        return why_not
    method, name = subject.method, type(subject.method).__name__
    if not method.is_sum:
        return NO_WEIGHTS.format(name)
    if method.own.size and method.own_part_learns:
        return f"a part of the model of {name} stays on its clients, where no attacker sees it"
    if "weights" not in method.server:
        return f"clients of {name} do not all start from one model"
    return ""
