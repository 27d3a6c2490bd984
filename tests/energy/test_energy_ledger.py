"""The ledger of joules: never over, refused exactly when it must be, and known choices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from refusals import refused

from fl_lightning.energy import REFUSED, BatchedEnergyLedger, BHSPController, EnergyLedger
from fl_lightning.energy.budgets.ledger import UNITS_PER_JOULE

UNIT = 1 / UNITS_PER_JOULE
INF = math.inf


def draw(generator: np.random.Generator) -> dict:
    """A random sequence whose joules are whole units, so that plain integers say what is right."""
    groups, tokens = int(generator.integers(1, 7)), int(generator.integers(0, 9))
    costs = generator.integers(0, 1000, size=(groups, 3))
    missing = generator.random((groups, 3)) < 0.2
    missing[:, 2] &= ~missing[:, :2].all(1)
    fixed = int(generator.integers(0, 500))
    least = (fixed + int(np.where(missing, 10**9, costs).min(1).sum())) * tokens
    budget = max(
        0,
        least + int(generator.integers(-3, 4))
        if generator.random() < 0.3
        else int(least * generator.uniform(0.5, 3)),
    )
    theta = generator.normal(size=(tokens, groups, 3)) * 10.0 ** generator.integers(-3, 4)
    if generator.random() < 0.1:
        theta.flat[: len(theta.flat) // 2] = generator.choice([math.nan, INF, -INF])
    price = generator.choice([0.0, 1.0, 1e6, 1e12])
    return {
        "costs": costs,
        "missing": missing,
        "fixed": fixed,
        "least": least,
        "budget": budget,
        "theta": theta,
        "price": price,
    }


def joules(case: dict) -> torch.Tensor:
    return torch.from_numpy(np.where(case["missing"], INF, case["costs"] * UNIT))


@pytest.mark.slow
@pytest.mark.essential
def test_no_sequence_of_10_000_is_over_its_budget():
    generator = np.random.default_rng(0)
    seen = {"refused": 0, "clamped": 0, "free": 0}
    for _ in range(10_000):
        case = draw(generator)
        tokens = len(case["theta"])
        ledger = EnergyLedger(case["budget"] * UNIT, case["fixed"] * UNIT, joules(case), tokens)
        spent = 0
        for index, theta in enumerate(torch.from_numpy(case["theta"])):
            choices = ledger.decide(theta, case["price"])
            assert (choices is None) == (case["least"] > case["budget"]), (
                "refused at the start or never"
            )
            if choices is None:
                break
            chosen = (np.arange(len(choices)), choices.numpy())
            assert not case["missing"][chosen].any()
            spent += case["fixed"] + int(case["costs"][chosen].sum())
            still = case["least"] // max(tokens, 1) * (tokens - index - 1)
            assert spent + still <= case["budget"], "the invariant"
            assert ledger.spent == spent * UNIT
        assert ledger.refused == (tokens > 0 and case["least"] > case["budget"])
        seen["refused" if ledger.refused else "clamped" if ledger.clamped else "free"] += 1
    assert min(seen.values()) > 500, seen


def test_a_batch_is_its_sequences_one_by_one():
    generator = np.random.default_rng(1)
    costs = torch.from_numpy(generator.random((5, 3))).sort(-1).values
    budget, owed = torch.tensor([3.0, 9.0, 14.0, INF, 30.0]), torch.tensor([6, 6, 4, 6, 0])
    theta = torch.from_numpy(generator.normal(size=(7, 5, 5, 3)))
    together = BatchedEnergyLedger(budget, 0.1, costs, owed)
    alone = [EnergyLedger(float(e), 0.1, costs, int(n)) for e, n in zip(budget, owed, strict=True)]
    for step in theta:
        for one, choices, logits in zip(alone, together.decide(step, 0.3), step, strict=True):
            expected = one.decide(logits, 0.3)
            assert choices.tolist() == ([REFUSED] * 5 if expected is None else expected.tolist())
    for name in ("spent", "owed", "clamped", "refused"):
        assert getattr(together, name).tolist() == [getattr(one, name) for one in alone]
    assert any(one.clamped for one in alone)
    assert any(not one.refused for one in alone) is False  # a seventh token is owed to none


def test_sequences_that_have_ended_are_left_alone():
    ledger = BatchedEnergyLedger(
        torch.tensor([9.0, 9.0]), 1.0, torch.ones(2, 3), torch.tensor([3, 3])
    )
    choices = ledger.decide(torch.zeros(2, 2, 3), active=torch.tensor([True, False]))
    assert choices.tolist() == [[0, 0], [REFUSED, REFUSED]]
    assert (ledger.spent.tolist(), ledger.owed.tolist(), ledger.refused.any().item()) == (
        [3.0, 0.0],
        [2, 3],
        False,
    )


def test_without_limit_and_price_it_is_argmax():
    generator = np.random.default_rng(2)
    theta = torch.from_numpy(generator.normal(size=(50, 4, 3)))
    costs = torch.from_numpy(generator.random((4, 3)))
    ledger = EnergyLedger(INF, 1.0, costs, 50)
    assert torch.equal(torch.stack([ledger.decide(step) for step in theta]), theta.argmax(-1))
    assert ledger.clamped == 0
    counts = costs.unsqueeze(-1) * torch.arange(51)
    assert torch.equal(
        EnergyLedger(INF, 1.0, costs, 0).decide_prompt(theta, 0.0, 1.0, counts), theta.argmax(-1)
    )


TWO_TOKENS = torch.tensor([[[0.0, 2.0, 3.0]], [[0.0, 5.0, 9.0]]], dtype=torch.float64)
ONE_GROUP = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
"""High wins over int8 below (3 - 2) / (4 - 2) = 0.5 logits per joule for the first token and below
2 for the second; int8 over off below 2 and below 5."""


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (8.0, [2, 2]),  # lambda* = 0
        (7.0, [1, 2]),  # lambda* = 0.5: the first token goes to int8
        (6.0, [1, 2]),
        (5.0, [0, 1]),  # lambda* = 2: off for the first and int8 for the second, at once
        (3.0, [0, 1]),
        (2.0, [0, 0]),  # lambda* = 5
        (1.9, None),
    ],
)
def test_two_tokens_of_a_prompt_by_hand(budget, chosen):
    costs = ONE_GROUP.unsqueeze(-1) * torch.arange(3)
    choices = EnergyLedger(budget, 0.0, torch.zeros(1, 3), 0).decide_prompt(
        TWO_TOKENS, 0.0, 0.0, costs
    )
    assert (choices if choices is None else choices[:, 0].tolist()) == chosen


def test_two_tokens_decoded_by_hand():
    """Room of the first: 6.5 - 1 for the second's cheapest = 5.5, so high stays; the second has
    2.5."""
    ledger = EnergyLedger(6.5, 0.0, ONE_GROUP, 2)
    assert [ledger.decide(theta).tolist() for theta in TWO_TOKENS] == [[2], [1]]
    assert (ledger.spent, ledger.clamped, ledger.owed) == (6.0, 1, 0)
    priced = EnergyLedger(INF, 0.0, ONE_GROUP, 2)
    assert [priced.decide(theta, price=1.9).tolist() for theta in TWO_TOKENS] == [[1], [2]]
    assert [
        EnergyLedger(INF, 0.0, ONE_GROUP, 2).decide(theta, 2.1).item() for theta in TWO_TOKENS
    ] == [0, 1]


def knapsack(theta: np.ndarray, costs: np.ndarray, room: float) -> float:
    """The largest sum of theta over all choices that cost at most ``room``, by trying all of
    them."""
    groups = np.arange(len(theta))
    found = (np.array(choice) for choice in itertools.product(range(3), repeat=len(theta)))
    return max(theta[groups, c].sum() for c in found if costs[groups, c].sum() <= room)


def test_free_numbers_are_a_knapsack():
    """Everett (1963): what the ledger takes is the best of all choices that cost no more than it
    does, and its sum of theta is below the best for the whole room by less than one downgrade of
    one group."""
    generator = np.random.default_rng(3)
    for _ in range(30):
        controller, groups = BHSPController(7), np.arange(7)
        with torch.no_grad():
            controller.bias.copy_(torch.from_numpy(generator.normal(size=(7, 2))))
        theta = controller()[0, 0].detach()
        costs = torch.from_numpy(generator.integers(1, 50, size=(7, 3))).double().sort(-1).values
        room = float(costs.min(-1).values.sum()) * generator.uniform(1.0, 3.0)
        chosen = EnergyLedger(room, 0.0, costs, 1).decide(theta).numpy()
        value, cost = theta.numpy()[groups, chosen].sum(), costs.numpy()[groups, chosen].sum()
        assert value == pytest.approx(knapsack(theta.numpy(), costs.numpy(), cost), abs=1e-6)
        largest_step = float((theta.amax(-1) - theta.amin(-1)).max())
        assert knapsack(theta.numpy(), costs.numpy(), room) <= value + largest_step


def test_one_option_of_equal_cost_is_the_knapsack_exactly():
    """With {off, high} and joules that are the same for all of 12 groups, equality holds at every
    room."""
    theta = torch.zeros(12, 3, dtype=torch.float64)
    theta[:, 2] = torch.from_numpy(np.random.default_rng(4).normal(size=12))
    costs = torch.tensor([1.0, INF, 3.0], dtype=torch.float64).expand(12, 3)
    gains = theta[:, 2].clamp_min(0).sort(descending=True).values
    for room in range(12, 40):
        chosen = EnergyLedger(float(room), 0.0, costs, 1).decide(theta)
        best = max(
            sum(float(theta[g, 2]) for g in range(12) if bits >> g & 1)
            for bits in range(2**12)
            if 12 + 2 * bits.bit_count() <= room
        )
        assert float(theta.gather(1, chosen[:, None]).sum()) == pytest.approx(best)
        assert best == pytest.approx(float(gains[: (room - 12) // 2].sum()))


def test_choices_do_not_depend_on_later_tokens():
    generator = np.random.default_rng(5)
    theta = torch.from_numpy(generator.normal(size=(12, 4, 3)))
    costs = torch.from_numpy(generator.random((4, 3)))
    other = theta.clone()
    other[7:] = torch.from_numpy(generator.normal(size=(5, 4, 3)))
    budget = 12 * (0.1 + 1.6 * float(costs.min(-1).values.sum()))
    found = []
    for steps in (theta, other):
        ledger = EnergyLedger(budget, 0.1, costs, 12)
        found.append([ledger.decide(step, 0.1).tolist() for step in steps])
        assert ledger.clamped
    one, two = found
    assert one[:7] == two[:7]
    assert one[7:] != two[7:]


def test_prompts_keep_the_budget_and_leave_what_their_tokens_need():
    """Random costs a + b n with large a: what is charged is what the counts of the choices cost,
    recounted."""
    generator, clamped = np.random.default_rng(6), 0
    for _ in range(300):
        tokens, groups, owed = (
            int(generator.integers(1, 20)),
            int(generator.integers(1, 5)),
            int(generator.integers(0, 5)),
        )
        a, b = (
            torch.from_numpy(generator.integers(0, high, size=(groups, 3))) for high in (300, 40)
        )
        counts = torch.arange(tokens + 1)
        units = torch.where(counts > 0, a[..., None] + b[..., None] * counts, 0)
        single = torch.from_numpy(generator.integers(1, 50, size=(groups, 3)))
        least = (
            7
            + int(units[..., -1].min(-1).values.sum())
            + (3 + int(single.min(-1).values.sum())) * owed
        )
        budget = int(least * generator.uniform(0.9, 1.6))
        ledger = EnergyLedger(budget * UNIT, 3 * UNIT, single * UNIT, owed)
        theta = torch.from_numpy(generator.normal(size=(tokens, groups, 3)))
        choices = ledger.decide_prompt(theta, 0.0, 7 * UNIT, units * UNIT)
        assert (choices is None) == (least > budget)
        if choices is None:
            continue
        spent = 7 + sum(
            int(a[g, z] + b[g, z] * n)
            for g in range(groups)
            for z in range(3)
            if (n := int((choices[:, g] == z).sum()))
        )
        assert ledger.spent == spent * UNIT
        while ledger.owed:
            assert ledger.decide(theta[0]) is not None
        assert ledger.spent <= budget * UNIT
        clamped += ledger.clamped > 0
    assert clamped > 50


@pytest.mark.parametrize("price", [1e308, INF, math.nan])
def test_no_price_is_so_high_that_an_option_is_taken_that_is_not_there(price):
    """Joules of about a thousand: price x joules is more than float64 holds."""
    generator = np.random.default_rng(7)
    for _ in range(50):
        tokens, groups = int(generator.integers(1, 6)), int(generator.integers(1, 5))
        costs = torch.from_numpy(generator.integers(1, 1000, size=(groups, 3))).double()
        for row in costs:
            row[torch.from_numpy(generator.permutation(3)[: generator.integers(0, 3)])] = INF
        least = float(costs.min(-1).values.sum())
        budget = 3 * least * tokens * float(generator.uniform(1, 1.5))
        ledger = EnergyLedger(budget, 0.0, costs, tokens)
        theta = torch.from_numpy(generator.normal(size=(tokens, groups, 3)))
        prompt = ledger.decide_prompt(
            theta, price, 0.0, costs[..., None] * torch.arange(tokens + 1)
        )
        steps = [*prompt, *(ledger.decide(each, price) for each in theta)]
        spent = [float(costs.gather(-1, choices.unsqueeze(-1)).sum()) for choices in steps]
        assert ledger.spent == sum(spent) <= budget
        if price > 1:
            assert spent == [least] * len(steps)


def test_what_a_ledger_refuses():
    for budget, fixed, costs, owed in (
        (-1.0, 0.0, torch.ones(1, 3), 1),
        (math.nan, 0.0, torch.ones(1, 3), 1),
        (1.0, -1.0, torch.ones(1, 3), 1),
        (1.0, 0.0, torch.full((1, 3), INF), 1),
        (1.0, 0.0, torch.tensor([[1.0, math.nan, 1.0]]), 1),
        (1.0, 0.0, torch.ones(1, 3), -1),
        (1.0, 0.0, torch.full((1, 3), 1e6), 10),
        (1.0, 0.0, torch.full((2, 3), 5e6), 1),  # its units add up to a multiple of 2^64
        (1.0, 0.0, torch.full((4, 3), 5e6), 0),
    ):
        with refused("a ledger of"):
            EnergyLedger(budget, fixed, costs, owed)
