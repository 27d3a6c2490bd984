"""The protocol of the secure sum: what it adds up, what the server gets to see, and who detects
what."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from averaged import entry
from places import ROOT
from scipy import stats

from fl_lightning.errors import ThreePartError
from fl_lightning.privacy.secure import PHASES, SecureSum
from fl_lightning.rng import stream
from fl_lightning.wire import Payload

pytest.importorskip("Crypto")

from fl_lightning.privacy.secure import client as clients
from fl_lightning.privacy.secure.client import SecureClient
from fl_lightning.privacy.secure.primitives import (
    ProtocolError,
    combine,
    open_envelope,
    seal,
    split,
)
from fl_lightning.privacy.secure.server import MAX_SUBSETS, SecureServer, subsets
from fl_lightning.privacy.secure.simulation import run_round

LENGTH, HEADER, DEFAULT = 33, 19, SecureSum()


def vectors_of(count: int, length: int = LENGTH) -> dict[int, torch.Tensor]:
    """Integers of all sizes up to 2^61, of both signs; ids with gaps."""
    draws = np.random.default_rng(count)
    values = draws.integers(-(2**61), 2**61, (count, length)) >> draws.integers(
        0, 60, (count, length)
    )
    return {3 * at + 1: torch.from_numpy(row) for at, row in enumerate(values)}


def summed(vectors, settings=DEFAULT, leaves=None, **details):
    leaves = dict.fromkeys(vectors, "") | (leaves or {})
    sends = {id: lambda id=id: vectors[id] for id in vectors if leaves[id] in ("", "unmask")}
    return run_round(
        settings, seed=1, round=2, leaves_before=leaves, length=LENGTH, vectors=sends, **details
    )


def total_of(vectors, ids) -> list[int]:
    """The sum modulo 2^64 in Python's integers, as int64."""
    sums = [sum(column) for column in zip(*(vectors[id].tolist() for id in ids), strict=True)]
    return [(value + 2**63) % 2**64 - 2**63 for value in sums]


def group_of(settings: SecureSum, ids, cohort: int = 0) -> dict[int, SecureClient]:
    """Clients that were told of a cohort; 0: their own."""
    cohort = cohort or len(ids)
    return {id: SecureClient(id, settings, cohort, stream(0, "k", 0, id).bytes) for id in ids}


@pytest.mark.parametrize(
    "settings", [SecureSum(), SecureSum(neighbours=4), SecureSum(0.51, neighbours=2)]
)
def test_every_pattern_of_dropouts_gives_the_sum_or_a_void_round(settings):
    vectors, voids = vectors_of(8), 0
    for pattern in range(15):
        draws = np.random.default_rng(pattern)
        leaves = {id: PHASES[draws.integers(4)] for id in vectors if draws.random() < pattern / 30}
        outcome = summed(vectors, settings, leaves)
        voids += bool(outcome.void)
        stayed = {id for id in vectors if id not in leaves}
        counted = stayed | {id for id, phase in leaves.items() if phase == "unmask"}
        if len(stayed) < settings.least_clients(len(vectors)):
            assert outcome.void
        if outcome.void:
            assert outcome.total is None
            continue
        assert outcome.living == counted
        assert outcome.total.tolist() == total_of(vectors, counted)
    assert 0 < voids < 15


def test_a_graph_of_all_clients_voids_only_below_the_threshold():
    vectors = vectors_of(6)
    for phase in PHASES:
        for gone in range(3):
            outcome = summed(vectors, leaves=dict.fromkeys([*vectors][:gone], phase))
            assert bool(outcome.void) == (gone > 1), (phase, gone)  # 5 of 6 are needed


def test_masked_vectors_are_uniform():
    """Chi-square of the bytes of one message, and of the difference of two, whatever the vector
    is."""
    length, sent = 8192, {}
    constant = torch.full((length,), 12345)
    run_round(
        SecureSum(),
        seed=5,
        round=1,
        leaves_before=dict.fromkeys(range(3), ""),
        length=length,
        vectors=dict.fromkeys(range(3), lambda: constant),
        deliver=lambda id, message: sent.setdefault(id, message),
    )
    masked = [Payload.from_bytes(message).tensor("masked") for _, message in sorted(sent.items())]
    for values in (*masked, masked[0] - masked[1], masked[1] - masked[2]):
        counts = np.bincount(values.numpy().view(np.uint8), minlength=256)
        assert 1e-3 < stats.chisquare(counts).pvalue < 1 - 1e-3
    assert torch.equal(sum(masked), 3 * constant) is False  # own masks are still on


def test_the_server_sees_no_vector_and_one_secret_of_each_client_at_most(monkeypatch):
    seen, made = [], {}

    class Watched(SecureClient):
        def __init__(self, id, *details):
            super().__init__(id, *details)
            made[id] = self

    def watched(hook):
        def watch(self, *given):
            seen.extend(given[0].values() if len(given) == 1 else given[1:])
            return hook(self, *given)

        return watch

    for name in ("pass_on_keys", "pass_on_shares", "add_masked", "unmask"):
        monkeypatch.setattr(SecureServer, name, watched(getattr(SecureServer, name)))
    monkeypatch.setattr("fl_lightning.privacy.secure.simulation.SecureClient", Watched)
    vectors = vectors_of(9)
    for id, vector in vectors.items():
        vector[-1] = 1_000_003 + id  # n_k
    dropped = [*vectors][2]
    outcome = summed(vectors, leaves={dropped: "masked"})
    assert outcome.total.tolist() == total_of(vectors, set(vectors) - {dropped})
    transcript = b"".join(seen)
    assert len(seen) == 9 + 9 + 8 + 8
    for id, vector in vectors.items():
        large = vector[vector.abs() > 2**18]
        assert len(large) > 10
        assert not [value for value in large if value.numpy().tobytes() in transcript]
        for secret in (
            made[id].own_seed,
            made[id].mask_seed,
            made[id].envelope_key.private_bytes_raw(),
        ):
            assert secret not in transcript
    # the one secret that the server has no share of, of each client
    for holder, client in made.items():
        for id, (own, key) in client.held.items():
            assert (own in transcript) == (id != dropped and holder != dropped)
            assert (key in transcript) == (id == dropped and holder != dropped)


def test_one_share_too_few_says_nothing_of_a_secret():
    """The secret is a one-to-one function of the share that is missing: 128 independent bits."""
    secret, threshold = stream(0, "secret").bytes(16), 3
    shares = split(secret, threshold, 5)
    assert combine({0: shares[0], 2: shares[2], 4: shares[4]}) == secret
    assert combine({0: shares[0], 2: shares[2]}) != secret
    known = {0: shares[0], 2: shares[2]}

    def secret_of(missing: int) -> int:
        return int.from_bytes(combine({**known, 4: missing.to_bytes(16, "big")}), "big")

    rows = [secret_of(1 << bit) ^ secret_of(0) for bit in range(128)]
    rank = 0
    for bit in range(127, -1, -1):  # Gauss over GF(2)
        pivot = next((row for row in rows if row >> bit == 1), None)
        if pivot is not None:
            rank += 1
            rows = [row ^ pivot if row >> bit & 1 else row for row in rows]
    assert rank == 128


def lying_holders(monkeypatch, liars, lies_of=lambda id: True) -> None:
    """Has clients give wrong shares of the secrets of those that ``lies_of`` says."""
    honest = SecureClient.unmask

    def unmask(self, message):
        asked = Payload.from_bytes(message)
        ids = [*asked.tensor("living").tolist(), *asked.tensor("dropped").tolist()]
        answer = Payload.from_bytes(honest(self, message)).tensor("shares").clone()
        for row, id in zip(answer, ids, strict=True):
            row ^= self.id in liars and lies_of(id)
        return Payload({"shares": answer}).to_bytes()

    monkeypatch.setattr(SecureClient, "unmask", unmask)


@pytest.mark.parametrize("leaves", ["", "masked"])
@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize(
    "settings", [SecureSum(0.6), SecureSum(0.6, neighbours=8)], ids=["all", "graph"]
)
def test_wrong_shares_of_holders_are_left_out_and_their_holders_named(
    settings, liars, leaves, monkeypatch
):
    """Shares at the end of the order are not used where all are there, and who sends them is not
    looked at."""
    vectors = vectors_of(14)
    ids, gone = [*vectors], [*vectors][4]
    for liars_of_round in ({*ids[:liars]}, {*ids[1:9:7][:liars]}, {*ids[-liars:]}):
        with monkeypatch.context() as patch:
            lying_holders(patch, liars_of_round)
            outcome = summed(vectors, settings, {gone: leaves})
        assert not outcome.void
        assert outcome.total.tolist() == total_of(
            vectors, {*vectors} - ({gone} if leaves else set())
        )
        assert outcome.named == (set() if liars_of_round == {*ids[-liars:]} else liars_of_round)


@pytest.mark.parametrize("kind", ["shares", "one share", "fingerprint"])
def test_a_dealer_is_named_and_nobody_in_its_place(kind, monkeypatch, caplog):
    """Shares that do not fit, and a wrong fingerprint, void the round. One share that does not fit
    is left out: its dealer and its holder blame each other, and neither is named."""
    vectors, dealt = vectors_of(6), []
    liar = min(vectors)  # it deals first
    honest_split, honest_fingerprint = clients.split, clients.fingerprint

    def split_wrongly(secret, threshold, count):
        dealt.append(secret)
        shares = honest_split(secret, threshold, count)
        if len(dealt) > 2 or kind == "fingerprint":
            return shares
        wrong = honest_split(bytes(16), threshold, count)
        return [*wrong[:2], *shares[2:]] if kind == "one share" else wrong

    def fingerprint(secret):
        return honest_fingerprint(
            bytes(16) if kind == "fingerprint" and secret == dealt[0] else secret
        )

    monkeypatch.setattr(clients, "split", split_wrongly)
    monkeypatch.setattr(clients, "fingerprint", fingerprint)
    outcome = summed(vectors, SecureSum(0.6))
    if kind == "one share":
        assert outcome.total.tolist() == total_of(vectors, vectors)
        assert not outcome.named
        assert "one of the two sent a wrong one" in caplog.text
    else:
        assert f"whichever of them are taken: client {liar} named" in outcome.void
        assert outcome.named == {liar}
        assert outcome.total is None


def test_too_many_wrong_shares_name_nobody(monkeypatch):
    """Three of six lie where two shares are to spare: all secrets fail, and honest clients are not
    blamed. Without a share to spare one liar cannot be told either."""
    vectors = vectors_of(6)
    lying_holders(monkeypatch, {*[*vectors][:3]})
    for settings in (SecureSum(0.6), SecureSum(1.0)):
        outcome = summed(vectors, settings)
        assert "another secret than the one it advertised" in outcome.void
        assert outcome.total is None
        assert not outcome.named


def test_a_holder_that_lies_about_one_client_is_not_told_from_that_client(monkeypatch, caplog):
    vectors = vectors_of(6)
    first, _, third, *_ = vectors
    lying_holders(monkeypatch, {third}, lies_of=lambda id: id == first)
    outcome = summed(vectors, SecureSum(0.6))
    assert outcome.total.tolist() == total_of(vectors, vectors)
    assert not outcome.named
    assert caplog.text.count("one of the two sent a wrong one") == 1


@pytest.mark.parametrize(
    ("count", "size", "found"),
    [(9, 6, 2), (100, 67, 2), (21, 15, 2), (100, 99, 1), (100, 95, 1), (4, 4, 0)],
)
def test_a_few_wrong_shares_are_left_out_by_some_subset(count, size, found):
    tried = [{*some} for some in subsets(range(count), size)]
    assert all(len(some) == size for some in tried)
    assert len(tried) <= 1 + count + MAX_SUBSETS
    for wrong in range(1, found + 1):
        for liars in combinations(range(count), wrong):
            assert any(not some & {*liars} for some in tried), liars


def test_an_envelope_is_for_its_receiver_alone():
    assert open_envelope(bytes(32), seal(bytes(32), b"shares")) == b"shares"
    for key, envelope in ((bytes([1] * 32), seal(bytes(32), b"shares")), (bytes(32), bytes(22))):
        with pytest.raises(ProtocolError):
            open_envelope(key, envelope)


def test_a_client_gives_one_secret_of_each_neighbour_once():
    """What a server that is no longer honest asks for is refused: both secrets, a living client's
    mask key too few living clients, a second answer."""
    ids = [0, 1, 2, 3]
    server = SecureServer(SecureSum(0.75), ids, 1)
    group = group_of(server.settings, ids)
    lists = server.pass_on_keys({id: client.keys() for id, client in group.items()})
    boxes = server.pass_on_shares({id: client.shares(lists[id]) for id, client in group.items()})
    of_one = {name: tensor[[0, 0]] for name, tensor in Payload.from_bytes(boxes[0]).items()}
    with pytest.raises(ProtocolError, match=r"envelopes of \[1, 1\]"):
        group[0].take_shares(Payload(of_one).to_bytes())
    for id, client in group.items():
        client.take_shares(boxes[id])

    def request(living: list[int], dropped: list[int]) -> bytes:
        numbers = {"living": living, "dropped": dropped}
        return Payload(
            {name: torch.tensor(of, dtype=torch.int32) for name, of in numbers.items()}
        ).to_bytes()

    for living, dropped in ([0, 1, 2, 3], [3]), ([0, 1], [2, 3]), ([1, 2, 3], [0]), ([0, 1, 2], []):
        with pytest.raises(ProtocolError):
            group[0].unmask(request(living, dropped))
    group[0].unmask(request([0, 1, 2], [3]))
    with pytest.raises(ProtocolError):
        group[0].unmask(request([0, 1, 2], [3]))


def test_the_server_drops_who_sends_no_message_of_the_form(caplog):
    ids = [0, 1, 2, 3]
    server = SecureServer(SecureSum(0.75), ids, 2)
    group = group_of(server.settings, ids)
    messages = {id: client.keys() for id, client in group.items()} | {3: b"no payload"}
    lists = server.pass_on_keys(messages)
    assert sorted(lists) == [0, 1, 2]
    assert "client 3 drops out" in caplog.text
    server.pass_on_shares({id: group[id].shares(lists[id]) for id in lists})
    for id, wrong in (
        (0, {"masked": torch.zeros(3, dtype=torch.int64)}),
        (0, {"masked": torch.zeros(2)}),
        (0, {"other": torch.zeros(2, dtype=torch.int64)}),
        (3, {"masked": torch.zeros(2, dtype=torch.int64)}),
    ):
        with pytest.raises(ThreePartError):
            server.add_masked(id, Payload(wrong).to_bytes())
    assert not server.living


@pytest.mark.parametrize("which", ["envelope", "mask"])
def test_a_key_that_nobody_can_use_costs_its_client_alone_the_round(which):
    """With a public key of low order its neighbours would leave, and the server could not
    unmask."""
    ids = [*range(5)]
    server = SecureServer(SecureSum(0.6), ids, 2)
    keys = {id: client.keys() for id, client in group_of(server.settings, ids).items()}
    honest = dict(Payload.from_bytes(keys[4]).items())
    keys[4] = Payload({**honest, which: torch.zeros(32, dtype=torch.uint8)}).to_bytes()
    assert sorted(server.pass_on_keys(keys)) == [0, 1, 2, 3]


@pytest.mark.parametrize("neighbours", ["all", 2])
def test_a_client_shares_its_secrets_with_no_more_than_the_cohort_that_it_was_told_of(neighbours):
    """Of a smaller cohort t is smaller, and both secrets of a client come out, or a sum of few."""
    settings, ids = SecureSum(1.0, neighbours), [*range(5)]
    for told, k in ((2, 1), (4, 3), (5, 4), (6, 5)):
        group = group_of(settings, ids, told)
        lists = SecureServer(settings, ids, 1).pass_on_keys(
            {id: client.keys() for id, client in group.items()}
        )
        if len(Payload.from_bytes(lists[0]).tensor("ids")) > k:
            with pytest.raises(ProtocolError, match=f"client 0; it has at most {k} neighbours"):
                group[0].shares(lists[0])
        elif told == 6 and neighbours == "all":
            with pytest.raises(ProtocolError, match="6 clients reconstruct a secret"):
                group[0].shares(lists[0])
        else:
            group[0].shares(lists[0])


@pytest.mark.parametrize("unread_bit", [0, 0x80])
def test_masks_with_two_neighbours_are_never_the_same(unread_bit, caplog):
    """Two that have one key cancel. Of a key's 256 bits X25519 reads 255."""
    ids = [1, 2, 3, 4]
    group = group_of(DEFAULT, ids)
    keys = {id: client.keys() for id, client in group.items()}

    def copied(message: bytes, row) -> bytes:
        """A message whose mask keys have that of client 1 in one more place."""
        mask = Payload.from_bytes(message).tensor("mask").clone()
        mask[row] = Payload.from_bytes(keys[1]).tensor("mask")
        mask[row][..., -1] ^= unread_bit
        return Payload({**dict(Payload.from_bytes(message).items()), "mask": mask}).to_bytes()

    lists = SecureServer(DEFAULT, ids, 1).pass_on_keys(keys)
    with pytest.raises(
        ProtocolError,
        match="client 2; it has at most 3 neighbours, each with a mask key of its own",
    ):
        group[2].shares(copied(lists[2], 1))
    server = SecureServer(SecureSum(0.51), [*ids, 5, 6], 1)
    keys |= {id: client.keys() for id, client in group_of(DEFAULT, [5, 6]).items()}
    assert sorted(server.pass_on_keys(keys | {3: copied(keys[3], slice(None))})) == [2, 4, 5, 6]
    assert "clients 1, 3 drop out: they sent one public key" in caplog.text


def test_bytes_by_hand():
    """Seven clients with four neighbours each, of whom one drops out before it sends its vector."""
    vectors = vectors_of(7)
    gone = [*vectors][3]
    settings = SecureSum(0.6, neighbours=4)
    outcome = summed(vectors, settings, {gone: "masked"})
    ring = stream(1, "secure_ring", 2).permutation([*vectors]).tolist()
    of_gone = settings.graph(ring)[gone]
    list_ = (
        HEADER + entry("ids", 1, 4 * 4) + entry("envelope", 2, 4 * 32) + entry("mask", 2, 4 * 32)
    )
    box = HEADER + entry("ids", 1, 4 * 4) + entry("envelopes", 2, 4 * 48)
    keys = HEADER + entry("envelope", 1, 32) + entry("mask", 1, 32)
    shares = HEADER + entry("fingerprint", 1, 32) + entry("envelopes", 2, 4 * 48)
    masked = HEADER + entry("masked", 1, 8 * LENGTH)
    request = HEADER + entry("living", 1, 0) + entry("dropped", 1, 0) + 4 * 5
    answer = HEADER + entry("shares", 2, 5 * 16)
    traffic = outcome.traffic
    assert len(of_gone) == 4
    for id in vectors:
        stays = id != gone
        assert traffic.up[id] == keys + shares + stays * (masked + answer)
        assert traffic.down[id] == list_ + stays * (box + request)
    assert traffic.phases == {
        "keys": 7 * (keys + list_),
        "shares": 7 * shares + 6 * box,
        "masked": 6 * masked,
        "unmask": 6 * (request + answer),
    }


@pytest.mark.parametrize(("neighbours", "k"), [("all", 6), (2, 2)])
def test_the_page_says_what_a_client_sends(neighbours, k):
    settings = SecureSum(neighbours=neighbours)
    outcome = summed(vectors_of(7), settings)
    assert set(outcome.traffic.up.values()) == {8 * LENGTH + 64 * k + 282}
    assert set(outcome.traffic.down.values()) == {124 * k + 162}
    assert settings.client_bytes(LENGTH, 7) == (8 * LENGTH + 64 * k + 282, 124 * k + 162)


@pytest.mark.parametrize(("cohort", "k"), [(1000, 20), (1000, 50), (1000, 100), (100, 50)])
def test_the_page_says_what_a_thin_graph_risks(cohort, k):
    """The exposure by the hypergeometric distribution, and void rounds on the graphs that are
    drawn."""
    page = (ROOT / "docs/howto/secure_sum.md").read_text()
    start = f"| {cohort:,} | {k} | ".replace(",", " ")
    (row,) = [line for line in page.splitlines() if line.startswith(start) and " of " in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    settings = SecureSum(neighbours=k)
    least = settings.least_shares(cohort)
    assert cells[2] == f"{least} of {k + 1}"
    for share, said in zip((0.1, 0.2, 0.33), cells[-3:], strict=True):
        hostile = round(share * cohort)
        exposed = (cohort - hostile) * stats.hypergeom.sf(least - 1, cohort - 1, hostile, k)
        assert float(f"{exposed:.0e}") == pytest.approx(float(said), abs=1e-300)
    graph = settings.graph([*range(cohort)])
    holders = np.array([[id, *others] for id, others in graph.items()])
    draws = np.random.default_rng(0)
    for gone, cell in zip((0.05, 0.1, 0.15, 0.2), cells[3:7], strict=True):
        stays = (draws.permutation(cohort) >= gone * cohort for _ in range(200))
        void = np.mean([(stay[holders].sum(axis=1) < least).any() for stay in stays])
        said = float(cell.rstrip(" %")) / 100
        spread = math.sqrt(max(said * (1 - said), 0.005) / 200)  # 0 and 100 % are rounded
        assert void == pytest.approx(said, abs=4 * spread + 0.005)
