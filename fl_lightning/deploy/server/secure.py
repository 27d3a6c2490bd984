"""The server's half of a secure sum whose clients are on nodes: four exchanges of messages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fl_lightning.aggregation.adapters.cohort import PRODUCTS
from fl_lightning.aggregation.masked_round import MaskedRound
from fl_lightning.aggregation.receiving import max_undeclared
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.deploy.server.ring import drawn_ring, kept_ring
from fl_lightning.privacy import Randomness, from_system
from fl_lightning.privacy.secure.server import RoundVoid, SecureServer
from fl_lightning.privacy.secure.simulation import Outcome, add_delivered, lengths, stays

log = logging.getLogger("fl_lightning")

Ask = Callable[[str, Mapping[int, bytes]], Iterator[tuple[int, bytes]]]
"""Sends the messages of a phase to clients, by id, and yields client and answer as answers come, in
time."""


def add_up_on_nodes(
    asked: MaskedRound,
    forms: Mapping[int, SumForm],
    ask: Ask,
    randomness: Randomness = from_system,
    run_dir: Path | None = None,
) -> tuple[SumForm, Outcome]:
    """Have clients that were trained on nodes mask and add up their uploads.

    A client whose node does not answer a phase has left before it.

    Args:
        asked: what is to be added up; uploads and addends are the nodes'.
        forms: what each client that was trained says of its vector; one whose upload was refused
            has the form without parts.
        ask: reaches the nodes.
        randomness: what the ring is drawn from. Whoever knew it before could take the places beside
            a client.
        run_dir: the run's, whose secret the ring follows from in place of that.

    Returns:
        The form of all vectors, and what came of the round.
    """
    method, outcome = asked.method, Outcome()
    known = lengths_known(method)
    form = common_form(forms, max_undeclared(method) + sum(known.values()), known)
    here = {id for id, other in forms.items() if other in (form, SumForm())}
    for id in sorted(forms.keys() - here):
        log.warning("round %d: client %d leaves: its vector has another form", asked.round, id)
    try:
        ring = drawn_ring(asked, randomness) if run_dir is None else kept_ring(asked, run_dir)
        _exchange(asked, ring, here, form.length, ask, outcome)
    except RoundVoid as error:
        outcome.void = str(error)
    return form, outcome


def common_form(
    forms: Mapping[int, SumForm], most: int, known: Mapping[str, int] | None = None
) -> SumForm:
    """Return the form that most clients have; of equally many, that of the client with the smallest
    id.

    Args:
        forms: by client.
        most: longest vector that a server takes memory for.
        known: lengths of sums that every form has, by name; others are no clients' of the method.
    """
    wanted = (known or {}).items()
    counts = Counter(
        form
        for _, form in sorted(forms.items())
        if form.parts
        and form.length <= most
        and wanted <= {name: size for name, size, _ in form.parts}.items()
    )
    return max(counts, key=lambda form: counts[form]) if counts else SumForm()


def lengths_known(method: SummingServer) -> dict[str, int]:
    """Return the lengths of sums that every client adds to, by name: products of adapters, and
    those of ``starts`` unless the method is somebody's own, whose ``addends`` may have other
    names."""
    shapes = method.adapters.product_shapes(method)
    products = {PRODUCTS: sum(m * n for m, n in shapes)} if shapes else {}
    owner = next((cls for cls in type(method).__mro__ if "addends" in vars(cls)), type(method))
    if "addends" in vars(method) or not owner.__module__.startswith("fl_lightning."):
        return products
    return {name: len(start) for name, start in method.starts().items()} | products


def _exchange(
    asked: MaskedRound, ring: list[int], here: set[int], length: int, ask: Ask, outcome: Outcome
) -> None:
    cohort, traffic = sorted(asked.leaves_before), outcome.traffic
    server = SecureServer(asked.settings, ring, length)
    outcome.named = server.named

    def answers(
        phase: str, messages: Mapping[int, bytes], counted_as: str
    ) -> Iterator[tuple[int, bytes]]:
        """Ask those that have not left before a phase, and count messages as a simulation does."""
        present = {
            id: message
            for id, message in messages.items()
            if id in here and stays(asked.leaves_before[id], phase)
        }
        traffic.received(counted_as, lengths(present))
        for id, answer in ask(phase, present):
            traffic.sent(phase, {id: len(answer)})
            yield id, answer

    lists = server.pass_on_keys(dict(answers("keys", dict.fromkeys(cohort, b""), "keys")))
    boxes = server.pass_on_shares(dict(answers("shares", lists, "keys")))
    # one at a time: a vector is as long as the model
    for id, message in answers("masked", boxes, "shares"):
        add_delivered(server, id, asked.deliver(id, message), outcome, asked.round)
    outcome.living = server.living
    outcome.total = server.unmask(dict(answers("unmask", server.unmask_requests(), "unmask")))
