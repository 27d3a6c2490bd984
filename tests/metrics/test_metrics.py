import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassCalibrationError

from fl_lightning.evaluation import _of_clients
from fl_lightning.metrics import (
    auc_accuracy,
    brier_score,
    calibration_bins,
    client_spread,
    expected_calibration_error,
    final_summary,
)
from fl_lightning.tasks import Classification


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("classes", "bins"), [(2, 15), (10, 15), (100, 10), (10, 1)])
def test_ece_is_that_of_torchmetrics_to_the_last_bit(seed: int, classes: int, bins: int) -> None:
    """Whatever the probabilities come in; sharp ones, of which some are exactly 1, have a bin of
    their own."""
    generator = torch.Generator().manual_seed(seed)
    probs = (30 * torch.randn(500, classes, generator=generator)).softmax(1)
    target = torch.randint(classes, (500,), generator=generator)
    metric = MulticlassCalibrationError(num_classes=classes, n_bins=bins, norm="l1")
    for part in range(0, 500, 64):
        metric.update(probs[part : part + 64], target[part : part + 64])
    found = {expected_calibration_error(given, target, bins) for given in (probs, probs.numpy())}
    assert found == {metric.compute().item()}
    drawn = calibration_bins(probs, target, bins)
    assert drawn.counts.sum() == 500
    assert drawn.counts[-1] == (probs.max(1).values == 1).sum() > 0
    gaps = torch.from_numpy(abs(drawn.accuracy - drawn.confidence) * drawn.counts)
    assert gaps.double().sum().item() / 500 == pytest.approx(metric.compute().item(), abs=1e-6)


def test_ece_by_hand() -> None:
    probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
    # Two bins: all four above 0.5, mean confidence 0.75, two of four correct.
    assert expected_calibration_error(probs, [0, 1, 1, 1], bins=2) == pytest.approx(0.25)
    # Ten bins: 0.9 right, 0.8 wrong, 0.7 right, 0.6 wrong, each alone: (0.1 + 0.8 + 0.3 + 0.6) / 4.
    assert expected_calibration_error(probs, [0, 1, 1, 1], bins=10) == pytest.approx(0.45)


def test_ece_of_confidences_on_an_edge() -> None:
    """Bins are closed below and open above: 0.6 and 0.7 are both in [0.6, 0.8), so |0.5 - 0.65|."""
    assert expected_calibration_error([[0.6, 0.4], [0.7, 0.3]], [0, 1], bins=5) == pytest.approx(
        0.15
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_are_closed_below_and_open_above(dtype: torch.dtype) -> None:
    """A confidence on an edge belongs to the bin above it, in either precision, and 1 to a bin of
    its own."""
    confidence = torch.tensor([0.5, 0.75, 1.0], dtype=dtype)
    bins = calibration_bins(
        torch.stack([confidence, 1 - confidence], 1), torch.zeros(3, dtype=torch.long), bins=4
    )
    assert bins.counts.tolist() == [0, 0, 1, 1, 1]
    assert bins.confidence[2:].tolist() == [0.5, 0.75, 1.0]


def test_brier_by_hand() -> None:
    assert brier_score([[0.7, 0.2, 0.1]], [0]) == pytest.approx(0.09 + 0.04 + 0.01)
    assert brier_score(np.array([[0.0, 1.0]]), np.array([0])) == 2.0


@pytest.mark.parametrize(
    ("probs", "target", "bins"),
    [
        ([], [], 15),
        (torch.empty(0, 10), torch.empty(0, dtype=torch.long), 15),
        ([[2.0, -1.0]], [0], 15),  # logits
        ([[0.6, 0.6]], [0], 15),
        ([[float("nan"), 0.5]], [0], 15),
        ([[0.5, 0.5]], [2], 15),
        ([[0.5, 0.5]], [0.5], 15),
        ([[0.5, 0.5]], [0, 1], 15),
        ([0.5, 0.5], [0, 1], 15),
        ([[0.5, 0.5]], [0], 0),
    ],
)
def test_calibration_refuses(probs: list, target: list, bins: int) -> None:
    with pytest.raises(ValueError, match=r".*; .*; "):  # what was given; the rule; what to write
        expected_calibration_error(probs, target, bins)


def test_auc_bridges_rounds_without_evaluation() -> None:
    assert auc_accuracy([0.2, 0.4, 0.8]) == pytest.approx(30 + 60)
    assert auc_accuracy([0.2, 0.8], rounds=[1, 3]) == pytest.approx(2 * 50)
    assert auc_accuracy([0.5]) == 0.0
    for accuracies, rounds in (([50.0, 60.0], None), ([0.5, 0.6], [2, 1]), ([0.5, 0.6], [1])):
        with pytest.raises(ValueError, match=r".*; .*; "):
            auc_accuracy(accuracies, rounds)


def test_client_spread_weighs_clients_equally() -> None:
    accuracies = np.linspace(0, 1, 21)
    spread = client_spread(np.random.default_rng(0).permutation(accuracies))
    assert spread["val/accuracy"] == pytest.approx(0.5)
    assert spread["val/accuracy_std"] == pytest.approx(accuracies.std())
    assert spread["val/accuracy_worst_decile"] == pytest.approx(0.05)  # three of 21: 0, 0.05, 0.1
    assert client_spread([]) == {}
    assert all(map(np.isnan, client_spread([*accuracies, np.nan]).values()))  # of a broken model


def test_the_corrected_spread_is_that_of_the_clients_and_not_of_their_few_examples() -> None:
    """The accuracies of 100 clients vary by 0.1, or not at all, and are seen through 5 to 40
    examples."""
    draws = np.random.default_rng(0)
    found: dict[float, list[dict[str, float]]] = {0.0: [], 0.1: []}
    for true_std, spreads in found.items():
        for _ in range(200):
            # one in ten has fewer than 5, which say nothing of a client
            n = draws.integers(1, 41, 100)
            p = np.clip(draws.normal(0.7, true_std, 100), 0, 1)
            spreads.append(client_spread(draws.binomial(n, p) / n, n))
    corrected, plain = (
        {
            true: np.array([one[f"val/accuracy_std{suffix}"] for one in spreads])
            for true, spreads in found.items()
        }
        for suffix in ("_corrected", "")
    )
    variance = {true: np.mean(values**2) for true, values in corrected.items()}
    assert np.sqrt(variance[0.1]) == pytest.approx(0.1, abs=0.01)
    assert np.median(corrected[0.0]) < 0.03 < 0.12 < np.median(plain[0.0])
    # half of the estimates of a variance of 0 lie below it
    assert (corrected[0.0] == 0).mean() > 0.3


def test_clients_with_few_examples_have_no_spread() -> None:
    """82 clients with one example each: the plain figure is sqrt(p (1 - p)), and nothing else is
    given."""
    hits = np.r_[np.ones(72), np.zeros(10)]
    spread = client_spread(hits, np.ones(82, int))
    p = 72 / 82
    assert spread["val/accuracy_std"] == pytest.approx(np.sqrt(p * (1 - p)))
    assert spread["val/clients_min5"] == 0
    assert not [name for name in spread if name.endswith(("_corrected", "decile_min5"))]
    two = client_spread([*hits, 0.8, 0.4], [*np.ones(82, int), 5, 10])
    assert (two["val/clients_min5"], two["val/accuracy_worst_decile_min5"]) == (2, 0.4)


def test_final_summary() -> None:
    history = [{"round": r} for r in range(1, 8)]
    for row, accuracy in zip(history[1:], (0.1, 0.2, 0.6, 0.4, 0.5, 0.3), strict=True):
        row |= {"test/accuracy": accuracy, "val/accuracy": min(accuracy, 0.5)}
    assert final_summary(history) == pytest.approx(
        {
            "final/accuracy": 0.3,
            "final/last5_accuracy": 0.4,
            "final/auc_accuracy": 15 + 40 + 50 + 45 + 40,
            "final/best_val_round": 4,  # the first of the two at 0.5
            "final/best_val_accuracy": 0.5,
            "final/last5_val_accuracy": (0.2 + 0.5 + 0.4 + 0.5 + 0.3) / 5,
        }
    )
    assert final_summary([{"round": 1}]) == {}
    one = final_summary(
        [{"round": 1}, {"round": 2, "test/mse": 3.0}], "mse", higher_is_better=False, is_share=False
    )
    assert one == {"final/mse": 3.0, "final/last5_mse": 3.0}, "a single evaluation has no area"


def test_a_client_without_a_row_of_a_metric_has_no_value_of_it():
    rows = {
        "accuracy": np.array([[0.0, 1, 2], [2, 3, 4]]),
        "loss": np.array([[2.0, 6, 2], [0, 1, 1], [1, 3, 2], [0, 3, 1]]),
    }
    found = _of_clients(Classification(), rows)
    assert found == {"accuracy": {0: 0.5, 2: 0.75}, "loss": {0: 2.0, 1: 1.5, 2: 3.0}}
