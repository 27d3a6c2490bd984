"""Averages that look at whole updates: known answers, what others got wrong, and their state in a
run."""

from __future__ import annotations

import logging
import math
import statistics

import pytest
import torch
from golden_cases import average_alone, cases_of, differences
from lightning.fabric import Fabric
from torch import Tensor
from toy import CENTRES, Points, on_points, run, run_for_nothing, sgd

from fl_lightning.aggregation import averages, robust
from fl_lightning.aggregation.average import NoAverageError
from fl_lightning.conformance.bench import build_method
from fl_lightning.conformance.watch import RunRecorder
from fl_lightning.data import IID, FederatedImages
from fl_lightning.engines.root_set import prepare_guides
from fl_lightning.errors import InputError
from fl_lightning.hooks import Stressor
from fl_lightning.methods import (
    Bulyan,
    CenteredClipping,
    CoordinateMedian,
    FedAvg,
    FedKD,
    FedMPQ,
    FedPer,
    FLTrust,
    GeometricMedian,
    Krum,
    MultiKrum,
    Oracle,
    QFedAvg,
    WeightedMean,
)
from fl_lightning.models import SmallCNN

ALL = [
    Krum(2),
    MultiKrum(2, 3),
    Bulyan(2),
    GeometricMedian(),
    CenteredClipping(0.5, 2),
    FLTrust(1),
]
of_all = pytest.mark.parametrize("average", ALL, ids=lambda average: type(average).__name__)


def average_of(average, rows, shares=None, start=None) -> Tensor:
    """What it makes of the rows, guided by their mean where it goes by an update."""
    shares = shares or [1 / len(rows)] * len(rows)
    start = torch.zeros(len(rows[0])) if start is None else start
    if average.guide:
        return average.guided(
            rows, shares, start, (torch.stack(rows).double().mean(dim=0) - start).float()
        )
    return average(rows, shares, start)


def spread_rows(count=11, size=101) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) + 1 for _ in range(count)]


# Known answers


def on_a_line(*places: float) -> list[Tensor]:
    return [torch.tensor([3.0, 4.0]) * place for place in places]


@pytest.mark.parametrize(
    ("places", "shares", "median"),
    [
        ((0, 1, 5, 7, 30), (0.2,) * 5, 5),
        ((0, 1, 5, 7, 30), (0.1, 0.1, 0.1, 0.55, 0.15), 7),
        ((-4, 2, 9), (0.6, 0.3, 0.1), -4),
    ],
)
def test_the_geometric_median_of_points_on_a_line_is_their_weighted_median(places, shares, median):
    found = average_of(
        GeometricMedian(iterations=500, tolerance=0), on_a_line(*places), list(shares)
    )
    torch.testing.assert_close(found, on_a_line(median)[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "average", [Krum(1), MultiKrum(1, 3), Bulyan(1), GeometricMedian(iterations=50)]
)
@pytest.mark.parametrize("odd_one", range(7))
def test_of_equal_uploads_and_one_other_the_equal_ones_win(average, odd_one):
    rows = [torch.tensor([1.0, -2.0, 0.5])] * 7
    rows[odd_one] = torch.tensor([900.0, 900.0, -900.0])
    torch.testing.assert_close(
        average_of(average, rows), torch.tensor([1.0, -2.0, 0.5]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "neutral",
    [
        MultiKrum(f=0, select=11),
        CenteredClipping(tau=math.inf),
        GeometricMedian(nu=math.inf),
        GeometricMedian(iterations=0),
    ],
)
def test_neutral_settings_are_the_mean_in_which_all_weigh_the_same(neutral):
    rows, shares = spread_rows(), [1 / 11] * 11
    expected = WeightedMean()(rows, shares, torch.zeros(101))
    torch.testing.assert_close(average_of(neutral, rows, shares), expected, atol=1e-7, rtol=0)
    assert torch.equal(average_of(MultiKrum(0, 11), rows), robust.plain_mean(rows))
    assert torch.equal(average_of(CenteredClipping(math.inf), rows), robust.plain_mean(rows))


def test_n_k_plays_no_part_but_in_the_geometric_median():
    rows, lying = spread_rows(), [0.9, *[0.01] * 10]
    for average in ALL:
        same = torch.equal(average_of(average, rows, lying), average_of(average, rows))
        assert same == (not isinstance(average, GeometricMedian))


def test_bulyan_by_hand():
    """f 1, m 7: five are chosen, three values next to their median are kept."""
    rows = [torch.tensor([value]) for value in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 100.0)]
    chosen = Bulyan(1).chosen(robust.squared_distances(rows))
    # of 7 with four neighbours 2 and 3 tie at 10; of 6 with three 3 has 9; of 5 with two 1 and 4
    # tie at 10; of 4 with one 4 and 5 tie at 1; of 3 with one neighbour, not none, 0 and 5 tie at
    # 25
    assert chosen == [2, 3, 1, 4, 0]
    assert average_of(Bulyan(1), rows).tolist() == [2.0]


def test_the_median_of_an_even_number_is_between_the_middle_two():
    """f 1, m 8: of six chosen values the four nearest to their median 2.5."""
    rows = [torch.tensor([value]) for value in (0.0, 0.9, 2.0, 3.0, 3.1, 3.2, 50.0, 5000.0)]
    assert sorted(Bulyan(1).chosen(robust.squared_distances(rows))) == [0, 1, 2, 3, 4, 5]
    assert float(average_of(Bulyan(1), rows)) == pytest.approx((2.0 + 3.0 + 3.1 + 3.2) / 4)
    # torch.median takes the lower one of the middle two
    assert float(average_of(wrong_bulyan_lower_median()(1), rows)) == pytest.approx(
        (2 + 3 + 0.9 + 3.1) / 4
    )


def test_centered_clipping_by_hand():
    """v (0.6, 0.8) after the first round, towards which the next one draws."""
    far, near = torch.tensor([30.0, 40.0]), torch.tensor([0.0, 0.0])
    clipping = CenteredClipping(tau=2.0)
    first = clipping([far, near], [0.5, 0.5], torch.zeros(2))
    assert first.tolist() == pytest.approx([0.6, 0.8])
    start = torch.tensor([10.0, 10.0])
    second = clipping.guided([start + far, start], [0.5, 0.5], start, first)
    # v + ((far - v) 2 / 49 + (0 - v)) / 2 = 0.5 v + (3, 4) / 5
    assert (second - start).tolist() == pytest.approx([0.9, 1.2], abs=1e-5)


def test_fltrust_by_hand():
    start, root = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0])
    rows = [
        start + torch.tensor(update) for update in ([5.0, 0.0], [3.0, 4.0], [-9.0, 0.0], [0.0, 0.0])
    ]
    found = FLTrust(1).guided(rows, [0.25] * 4, start, root)
    # trust 1, 0.6, 0, 0; updates as long as the root's: (2, 0), (1.2, 1.6)
    assert (found - start).tolist() == pytest.approx([(2 + 0.6 * 1.2) / 1.6, 0.6 * 1.6 / 1.6])
    origin, least = torch.zeros(2), torch.tensor([3e-9, 4.0])  # alone, and hardly trusted at all
    found_alone = FLTrust(1).guided([least], [1.0], origin, root)
    assert found_alone.tolist() == pytest.approx([1.5e-9, 2.0], abs=1e-6)
    for nothing in (torch.zeros(2), torch.tensor([0.0, -1.0])):
        with pytest.raises(NoAverageError, match="root set"):
            FLTrust(1).guided(rows[::3], [0.5] * 2, start, nothing)


# Order, blocks, precision


@of_all
def test_neither_order_of_clients_nor_size_of_blocks_matters(average, monkeypatch):
    rows, start = spread_rows(), torch.full((101,), 0.5)
    shares = [k / 66 for k in range(1, 12)]
    expected = average_of(average, rows, shares, start)
    for seed in range(5):
        order = torch.randperm(11, generator=torch.Generator().manual_seed(seed)).tolist()
        permuted = average_of(average, [rows[k] for k in order], [shares[k] for k in order], start)
        torch.testing.assert_close(permuted, expected, atol=2e-7, rtol=0)
        if isinstance(average, (Krum, MultiKrum, Bulyan)):
            assert torch.equal(permuted, expected)
    monkeypatch.setattr(averages, "MAX_ORDERED_VALUES", 50)
    torch.testing.assert_close(
        average_of(average, rows, shares, start), expected, atol=2e-7, rtol=0
    )
    assert expected.dtype == torch.float32


def test_ties_go_to_the_smaller_id():
    rows = [torch.tensor([float(value)]) for value in (0, 1, 2, 3, 4)]
    assert average_of(Krum(1), rows).tolist() == [1.0]  # s is 2 for 1, 2 and 3
    assert average_of(MultiKrum(1, 2), rows).tolist() == [1.5]


def gram(vectors) -> Tensor:
    """||a||^2 + ||b||^2 - 2 a b."""
    rows = torch.stack(list(vectors))
    squares = rows.square().sum(dim=1)
    return squares[:, None] + squares - 2 * rows @ rows.T


SHIFTS = (8, -3, 2, 0, -2, 9)


def close_models() -> list[Tensor]:
    """Six models that differ in the last bits of float32 from one of norm 1000; the fourth is in
    the middle."""
    base = torch.full((1000,), 1000 / math.sqrt(1000))
    step = 2.0**-19
    assert float(base[0] + step) != float(base[0])
    return [base + step * shift for shift in SHIFTS]


def test_distances_of_close_models_are_exact_where_the_gram_matrix_cancels():
    rows = close_models()
    steps = (torch.stack(rows).double() - rows[3].double())[:, 0] / 2.0**-19
    expected = 1000 * 2.0**-38 * (steps[:, None] - steps).square()
    found = robust.squared_distances(rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert average_of(Krum(1), rows).equal(rows[3])
    off = (gram([row.double() for row in rows]) - expected).abs().max() / expected.max()
    assert off > 0.01  # in float64 too
    assert (gram(rows) - expected).abs().max() > 1000 * expected.max()


# What others got wrong is seen in the golden files


@pytest.mark.parametrize(("clients", "kept"), [(4, 4), (5, 3), (6, 2), (7, 3), (9, 1)])
def test_the_nearest_to_the_median_are_those_of_a_look_at_each(clients, kept):
    """With many equal values and equal distances, which go to the smaller row."""
    rows = torch.randint(-3, 4, (clients, 300), generator=torch.manual_seed(clients)).double()
    found = robust.around_median(rows, kept).tolist()
    for column, mean in zip(rows.T.tolist(), found, strict=True):
        middle = statistics.median(column)
        nearest = sorted(range(clients), key=lambda row: (abs(column[row] - middle), row))[:kept]
        assert mean == pytest.approx(statistics.fmean(column[row] for row in nearest), abs=1e-12)


def wrong_bulyan_once() -> type:
    """Flower: the best m - 2f of one scoring."""

    class Once(Bulyan):
        def chosen(self, distances):
            return robust.ranked(distances, self.f)[: len(distances) - 2 * self.f]

    return Once


def wrong_bulyan_lower_median() -> type:
    """torch.median takes the lower one of the middle two."""

    class Lower(Bulyan):
        def __call__(self, vectors, shares, start):
            rows = torch.stack([vectors[k] for k in self.chosen(robust.squared_distances(vectors))])
            nearest = (rows - rows.median(dim=0).values).abs().sort(dim=0, stable=True).indices
            return rows.gather(0, nearest[: len(vectors) - 4 * self.f]).mean(dim=0)

    return Lower


def wrong_sum() -> type:
    """epfml: the sum of the k best."""

    class Added(MultiKrum):
        def __call__(self, vectors, shares, start):
            return super().__call__(vectors, shares, start) * min(self.select, len(vectors))

    return Added


def wrong_weiszfeld() -> type:
    """epfml: from 0, with nu 0.1."""

    class FromZero(GeometricMedian):
        def __call__(self, vectors, shares, start):
            z = start.double()
            for _ in range(self.iterations):
                weights = [
                    p / max(0.1, float((v - z).norm()))
                    for p, v in zip(shares, vectors, strict=True)
                ]
                z = sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights)
            return z.float()

    return FromZero


def wrong_clipping() -> type:
    """v is forgotten within the round: one step in place of `iterations`."""

    class OneStep(CenteredClipping):
        def guided(self, vectors, shares, start, guide):
            return CenteredClipping(self.tau, 1).guided(vectors, shares, start, guide)

    return OneStep


def wrong_trust() -> type:
    """Negative cosines count."""

    class Signed(FLTrust):
        def guided(self, vectors, shares, start, guide):
            cosines = [float(torch.cosine_similarity(v - start, guide, dim=0)) for v in vectors]
            lengths = [float(guide.norm() / (v - start).norm()) for v in vectors]
            total = sum(
                c * length * (v - start)
                for c, length, v in zip(cosines, lengths, vectors, strict=True)
            )
            return start + total / sum(cosines)

    return Signed


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Bulyan", wrong_bulyan_once),
        ("MultiKrum", wrong_sum),
        ("GeometricMedian", wrong_weiszfeld),
        ("CenteredClipping", wrong_clipping),
        ("FLTrust", wrong_trust),
    ],
)
def test_a_planted_fault_differs_from_the_golden_file(name, wrong):
    cases = [case for case in cases_of(name) if "updates" in case]
    assert not any(differences(case["result"], average_alone(name, case)) for case in cases)
    assert any(differences(case["result"], average_alone(name, case, wrong())) for case in cases)


def test_squares_of_squared_distances_choose_another():
    """epfml: with two neighbours 1.2 and 1.2 away, or 0.1 and 1.6, the latter have the smaller sum
    of squares, and the larger one of fourth powers."""
    rows = [torch.tensor([place]) for place in (-1.2, 0.0, 1.2, 100.0, 100.1, 98.4)]
    distances = robust.squared_distances(rows)
    assert robust.ranked(distances, 2)[0] == 3
    assert robust.ranked(distances.square(), 2)[0] == 1


def test_distances_that_cancel_choose_others():
    base = 10 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    base = (base * 2**17).round() / 2**17  # so that steps of 2^-17 are exact
    models = [base + 2.0**-17 * shift for shift in SHIFTS]
    chosen: dict = {robust.squared_distances: [], gram: []}
    for first in range(6):
        rows = models[first:] + models[:first]
        for distances, found in chosen.items():
            found.append((robust.ranked(distances(rows).double(), 1)[0] + first) % 6)
    assert chosen[robust.squared_distances] == [3] * 6
    assert chosen[gram] != [3] * 6


# In runs

SEVEN = (2,) * 7


class Lost(Stressor):
    """The uploads of some clients do not arrive."""

    def __init__(self, clients):
        self.clients = clients

    def change_upload(self, upload, *, client, **_):
        return None if client.id in self.clients else upload


@pytest.mark.parametrize(
    ("average", "least"),
    [(Krum(3), 9), (MultiKrum(3, 2), 9), (Bulyan(2), 11)],
    ids=["Krum", "Multi", "Bulyan"],
)
def test_too_few_uploads_change_nothing_and_are_told_once(average, least, tmp_path, caplog):
    method, data = on_points(FedAvg(average=average)), Points(SEVEN, labels=(0,) * 7)
    with pytest.raises(InputError, match=rf"a round has 7 uploads; it needs {least}; raise --tra"):
        run(method, data, tmp_path, max_rounds=3)
    method, data = on_points(FedAvg(average=average)), Points((2,) * least, labels=(0,) * least)
    lost = Lost(range(7, least))
    with caplog.at_level(logging.WARNING, "fl_lightning"):
        trainer = run_for_nothing(method, data, tmp_path, max_rounds=3, callbacks=[lost])
    told = [record.message for record in caplog.records if "too few" in record.message]
    assert told == [
        f"round 1: 7 uploads are too few for {type(average).__name__}, which needs {least}; "
        "such a round changes nothing (this is said once)"
    ]
    assert all(row["clients/trained"] == 0 for row in trainer.progress.history)
    untrained = on_points(FedAvg())
    build_method(untrained, data, method.seed)
    assert torch.equal(method.server["weights"], untrained.server["weights"])


@pytest.mark.parametrize(
    "average", [Krum(1), MultiKrum(1, 2), Bulyan(1), GeometricMedian(), CenteredClipping(0.5)]
)
def test_they_reach_the_optimum_of_honest_clients(average, tmp_path):
    method = on_points(FedAvg(average=average))
    run(method, Points(SEVEN, labels=(0,) * 7), tmp_path, max_rounds=12, local_epochs=12)
    torch.testing.assert_close(method.server["weights"], CENTRES[0], rtol=0, atol=1e-2)


def digits(**settings) -> FederatedImages:
    return FederatedImages(dataset="digits", num_clients=8, partition=IID(), **settings)


def fit(average, folder, rounds, **settings):
    method = FedAvg(optimizer=sgd(0.05), average=average)
    run(
        method,
        digits(public_examples=64),
        folder,
        max_rounds=rounds,
        participation=0.75,
        **settings,
    )
    return method


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "average", [CenteredClipping(0.2), FLTrust(3)], ids=["CenteredClipping", "FLTrust"]
)
def test_what_guides_an_average_survives_a_resume(average, tmp_path):
    whole = fit(average, tmp_path / "whole", 3)
    fit(average, tmp_path / "parts", 2)
    parts = fit(average, tmp_path / "parts", 3, auto_resume=True)
    assert whole.server.keys() == parts.server.keys()
    for name, tensor in whole.server.items():
        assert torch.equal(tensor, parts.server[name]), name
    assert ("last_update/weights" in whole.server) == isinstance(average, CenteredClipping)


def test_v_is_kept_between_rounds(tmp_path):
    method = fit(CenteredClipping(0.2), tmp_path / "kept", 2)
    forgetful = type("Forgetful", (CenteredClipping,), {"guide": ""})(0.2)
    other = fit(forgetful, tmp_path / "forgotten", 2)
    assert not torch.equal(method.server["weights"], other.server["weights"])


@pytest.mark.parametrize(
    ("kind", "public", "rule"),
    [
        (FedAvg, {}, "labelled examples of its own"),
        (FedMPQ, {"public_examples": 20}, "compares its own update"),
        (FedPer, {"public_examples": 20}, "a part that never learns beside it"),
    ],
)
def test_a_root_set_is_asked_for(kind, public, rule, tmp_path):
    method = kind(optimizer=sgd(0.05), average=FLTrust(1))
    with pytest.raises(InputError, match=rule):
        run(method, digits(**public), tmp_path, max_rounds=1)


def test_no_client_holds_an_example_of_the_root_set():
    data = digits(public_examples=64)
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    method = FedAvg(optimizer=sgd(0.05), average=FLTrust(2))
    method.build(data)
    prepare_guides(Fabric(accelerator="cpu", devices=1), method, data)
    held = {int(k) for id in range(8) for k in (*data.client(id).train, *data.client(id).val)}
    assert not held & {*data.public.tolist()}
    assert method.guides()["weights"].norm() > 0
    assert torch.equal(method.guides()["weights"], method.guides()["weights"])


@pytest.mark.parametrize("average", [CenteredClipping(1.0), FLTrust(1)])
def test_guided_averages_are_of_weights(average, tmp_path):
    with pytest.raises(InputError, match="averages something else"):
        run(FedKD(average=average), digits(public_examples=64), tmp_path, max_rounds=1)


@pytest.mark.parametrize("average", [CoordinateMedian(), GeometricMedian(), CenteredClipping(0.2)])
def test_each_group_of_the_oracle_has_an_average_of_its_own(average, tmp_path):
    data = FederatedImages(dataset="digits", num_clients=8, partition=IID())
    method = Oracle(optimizer=sgd(0.05), average=average)
    run(method, data, tmp_path, max_rounds=2)
    groups = len(method.server["groups"])
    kept = [name for name in method.server if name.startswith("last_update/")]
    assert len(kept) == (groups if average.guide else 0)
    assert torch.isfinite(method.server["groups"]).all()


@pytest.mark.parametrize("average", [CenteredClipping(0.2), FLTrust(12)])
def test_statistics_stay_between_those_of_the_clients(average, tmp_path):
    """Carried on by the last update, or made as long as that of a root set that takes more steps, a
    running variance would be further than any client's, and be negative one day."""
    network = lambda classes: SmallCNN(classes, norm="batch", width=4)  # noqa: E731
    method, seen = FedAvg(network=network, optimizer=sgd(0.05), average=average), RunRecorder()
    run(method, digits(public_examples=64), tmp_path, max_rounds=2, callbacks=[seen])
    P, after = method.trained_values, [seen.servers[1]["weights"], method.server["weights"]]
    for round, weights in enumerate(after, start=1):
        rows = torch.stack([method.decode(upload) for upload in seen.uploads_of(round).values()])
        assert ((rows.amin(0) <= weights) & (weights <= rows.amax(0)))[P:].all()
        assert torch.equal(weights[P:], CoordinateMedian()([*rows[:, P:]], [], weights[P:]))
    guide = method.guides()["weights"]
    assert len(guide) == P < method.layout.size
    start, rows = after[0][:P], [*rows[:, :P]]
    if isinstance(average, CenteredClipping):
        last = seen.servers[1]["last_update/weights"][:P]
        assert torch.equal(after[1][:P], average.guided(rows, [], start, last))
        assert any(float((row - start - last).norm()) > average.tau for row in rows)


@of_all
def test_secure_sums_have_no_single_vectors(average, tmp_path):
    pytest.importorskip("cryptography")
    from fl_lightning.privacy.secure import SecureSum

    with pytest.raises(InputError, match="single vectors"):
        run(
            FedAvg(average=average),
            digits(public_examples=64),
            tmp_path,
            max_rounds=1,
            secure_sum=SecureSum(threshold=0.6),
        )


@pytest.mark.quick("average1")
@pytest.mark.parametrize("average", [Krum(1), GeometricMedian(), CenteredClipping(0.5), FLTrust(2)])
def test_codes_are_averaged_as_what_they_decode_to(average, tmp_path):
    method, seen = QFedAvg(optimizer=sgd(0.05), average=average), RunRecorder()
    run(method, digits(public_examples=64), tmp_path, max_rounds=2, callbacks=[seen])
    found, uploads, method.server = method.server["weights"], seen.uploads_of(2), seen.servers[1]
    start = method.server["weights"]
    rows = [method.decode(upload) for upload in uploads.values()]
    examples = [int(upload.tensor("examples")) for upload in uploads.values()]
    shares = [n / sum(examples) for n in examples]
    if average.guide:
        expected = average.guided(rows, shares, start, method.guides()["weights"])
    else:
        expected = average(rows, shares, start)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    assert float((found - start).norm()) > 1e-3
