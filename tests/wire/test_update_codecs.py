"""QSGD and product quantisation: what they keep, what they lose, what they refuse. References share
no code with the package."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from averaged import digits, entry, sent
from torch import nn
from toy import Points, run, sgd

from fl_lightning.aggregation.receiving import check_upload
from fl_lightning.methods import FedPQ, QFedAvg
from fl_lightning.quantization import product, qsgd
from fl_lightning.wire import Codes, Payload, PayloadError


@pytest.mark.slow
@pytest.mark.essential
def test_qsgd_is_unbiased():
    values = torch.tensor([0.7, -0.31, 0.0, 1.0, -0.05, 0.2])
    noise = np.random.default_rng(0)
    for bits, bucket in ((2, None), (4, None), (4, 4)):
        draws = torch.stack(
            [
                qsgd.decode(*qsgd.encode(values, bits, noise, bucket), bits, bucket)
                for _ in range(4000)
            ]
        )
        deviation = (draws.mean(0) - values).abs() / (draws.std(0) / 4000**0.5 + 1e-7)
        assert deviation.max() < 5
        assert (draws[:, 3] == 1.0).all()  # the largest is on the grid


def test_the_norm_decides_the_noise():
    """METHODS.md 3: 36 864 Gaussian weights at 4 bits: 21 x the signal's energy with the L2 norm of
    the layer, 0.06 x with L-infinity."""
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(36864, dtype=np.float32))
    coded = qsgd.decode(*qsgd.encode(values, 4, np.random.default_rng(1)), 4)
    relative = lambda error: float(error.square().sum() / values.square().sum())  # noqa: E731
    assert relative(coded - values) == pytest.approx(0.06, abs=0.01)
    step = values.norm() / 7  # by hand, QSGD's own norm
    share = values.abs() / step
    assert float((step**2 * share * (1 - share)).sum() / values.square().sum()) == pytest.approx(
        21, abs=1.5
    )
    buckets = qsgd.decode(*qsgd.encode(values, 4, np.random.default_rng(1), 512), 4, 512)
    assert relative(buckets - values) < 0.8 * relative(coded - values)


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("bucket", [None, 1, 4, 512])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 1027])
def test_qsgd_decodes_to_the_last_bit_as_its_formula_says(bits, bucket, size):
    """norm / s * sign * level in float32, for every code; minus zero, an infinite norm and none
    included."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (size,), generator=generator, dtype=torch.int32)
    norms = torch.rand(qsgd.num_buckets(size, bucket), generator=generator) * 3
    norms[-1] = [0.0, float("inf"), 0.7][size % 3]
    s = np.float32(2 ** (bits - 1) - 1)
    level = (codes.numpy() % 2 ** (bits - 1)).astype(np.float32)
    signed = np.where(codes.numpy() >= 2 ** (bits - 1), -level, level)
    with np.errstate(invalid="ignore"):
        expected = signed * (norms.numpy() / s)[np.arange(size) // (bucket or max(size, 1))]
    assert qsgd.decode(codes, norms, bits, bucket).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("bucket", [None, 1, 4])
@pytest.mark.parametrize("values", [[], [0.0, 0.0, 0.0], [1e-45, -1e-45], [3e38, -3e38], [-1.0]])
def test_qsgd_of_zeros_of_nothing_and_of_extremes(values, bucket):
    values = torch.tensor(values)
    codes, norms = qsgd.encode(values, 4, np.random.default_rng(0), bucket)
    assert len(norms) == qsgd.num_buckets(len(values), bucket)
    decoded = qsgd.decode(codes, norms, 4, bucket)
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, values, rtol=1e-6, atol=1e-44)
    if not values.any():
        assert not codes.any()


def test_bad_codes_of_updates_are_refused():
    method, data = QFedAvg(optimizer=sgd()), digits()
    upload = Payload.from_bytes(sent(method, data, order=(0,))[0])
    check_upload(method, upload, data.client(0), ())
    codes, norms = upload.codes("codes"), upload.tensor("norms")
    for change in (
        {"codes": Codes(codes.values, 5)},
        {"codes": Codes(codes.values[1:], 4)},
        {"norms": norms[1:]},
        {"norms": -norms},
    ):
        with pytest.raises(PayloadError, match=r"norms|codes"):
            check_upload(method, Payload({**upload, **change}), data.client(0), ())
    rest = {name: value for name, value in upload.items() if name != "rest"}
    with pytest.raises(PayloadError):
        check_upload(method, Payload(rest), data.client(0), ())

    method = FedPQ(optimizer=sgd(), iterations=1)
    upload = Payload.from_bytes(sent(method, data, order=(0,))[0])
    check_upload(method, upload, data.client(0), ())
    for change in (
        {"c1": upload.tensor("c1")[:9]},
        {"c1": torch.zeros(256, 3)},
        {"i1": Codes(upload.codes("i1").values[1:], 8)},
    ):
        with pytest.raises(PayloadError, match=r"its codebook has|of shape"):
            check_upload(method, Payload({**upload, **change}), data.client(0), ())


def wide_network(num_classes: int) -> nn.Module:
    """64 weights, all zero, returned as they are."""
    layer = nn.Linear(1, 64, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


class Blocks:
    """Client k's centre is the k-th row of three, each of which repeats one pair of values for 16
    weights."""

    logits = False
    centres = torch.tensor(
        [[1.0, 2.0, -1.0, 0.5, 0.0, 3.0, 1.0, 1.0], [0.0, -2.0, 4.0, 4.0, 1.0, 1.0, 2.0, -3.0]]
    ).view(2, 4, 2)

    def task_loss(self, outputs, target):
        return (outputs - self.centres.repeat_interleave(8, dim=1).flatten(1)[target]).square().sum(
            dim=1
        ).mean() / 2


def test_few_different_sub_vectors_travel_exactly(tmp_path):
    """Updates with 4 different pairs where a codebook has 8: FedPQ ends where FedAvg does, at the
    weighted mean of the centres."""
    method = type("Toy", (Blocks, FedPQ), {})(network=wide_network, optimizer=sgd(0.5))
    trainer = run(method, Points((3, 1)), tmp_path, max_rounds=10)
    target = (
        (0.75 * Blocks.centres[0] + 0.25 * Blocks.centres[1]).repeat_interleave(8, dim=0).flatten()
    )
    torch.testing.assert_close(method.server["weights"], target, rtol=0, atol=1e-5)
    assert method.coded.size == 64
    rows = [
        line.split(",") for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]
    # four centroids: two bits an index
    coded = entry("i0", 1, 32 * 2 // 8) + entry("c0", 2, 4 * 4 * 2)
    assert {int(row[4]) for row in rows} == {
        19 + entry("examples", 0, 4) + coded + entry("rest", 1, 0)
    }


def test_kmeans_on_well_separated_clusters():
    """Three clusters of unequal size: their means, from a point of each, whatever the order; and
    whatever the seeds three clusters, each at the mean of its points."""
    noise = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [100.0, 0.0], [0.0, 1000.0]], np.float32)
    truth = np.repeat([0, 1, 2], [500, 40, 4])
    points = centres[truth] + noise.standard_normal((544, 2)).astype(np.float32)
    means = np.array([points[truth == k].mean(axis=0) for k in range(3)])
    one_of_each = SimpleNamespace(choice=lambda *_, **__: np.array([3, 510, 541]))
    index, codebook = product.kmeans(points, 3, 50, one_of_each)
    np.testing.assert_array_equal(index, truth)
    np.testing.assert_allclose(codebook, means, rtol=1e-4, atol=1e-4)
    for seed in range(20):
        index, codebook = product.kmeans(points, 3, 50, np.random.default_rng(seed))
        assert len(np.unique(index)) == 3
        for k in range(3):
            np.testing.assert_allclose(
                codebook[k], points[index == k].mean(axis=0), rtol=1e-4, atol=1e-4
            )


def test_empty_clusters_split_the_one_with_the_largest_error():
    points = np.array([[0.0], [0.1], [10.0], [20.0], [21.0]], np.float32)
    codebook = np.array([[0.0], [500.0], [15.0], [600.0]], np.float32)
    index, error = product.nearest(points, codebook)
    assert index.tolist() == [0, 0, 2, 2, 2]
    moved = product._move_centroids(points, index, error, codebook)
    assert moved[:, 0] == pytest.approx([0.05, 21.0, 17.0, 0.1])


def test_at_most_k_different_points_are_kept_exactly():
    noise = np.random.default_rng(0)
    for different, k in ((1, 4), (7, 8), (256, 256)):
        patterns = noise.standard_normal((different, 2)).astype(np.float32)
        points = patterns[noise.integers(different, size=3000)]
        index, codebook = product.kmeans(points, k, 1, noise)
        assert len(codebook) <= k
        np.testing.assert_array_equal(codebook[index], points)


def test_product_quantisation_of_a_gaussian_layer():
    """d 2, K 256, 4 bits a weight: the distortion of a good codebook at 8 bits a pair is about 1 %
    of the energy, QSGD's 6 %."""
    noise = np.random.default_rng(0)
    points = product.split(noise.standard_normal(18432).astype(np.float32), 2)
    index, codebook = product.kmeans(points, 256, 20, noise)
    assert ((codebook[index] - points) ** 2).sum() / (points**2).sum() < 0.012


def test_split_fills_up_and_knows_one_zero():
    assert product.split(np.array([1.0, 2.0, 3.0]), 2).tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert not np.signbit(product.split(np.array([-0.0, 1.0]), 2)).any()
    assert product.split(np.empty(0), 2).shape == (0, 2)
