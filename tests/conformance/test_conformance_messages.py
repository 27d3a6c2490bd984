"""A check that fails shows its rule, what was expected, what was seen, and the likely cause."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from fl_lightning.conformance import method_under_test, run_checks
from fl_lightning.conformance.checks_orders import deployed_from_the_server
from fl_lightning.conformance.checks_quadratic import known_optimum, learning, partial_participation
from fl_lightning.conformance.command import results_table
from fl_lightning.conformance.expectations import optimum
from fl_lightning.conformance.toy import CENTRES
from fl_lightning.conformance.verdicts import not_finite, show
from fl_lightning.methods import FedAvg
from fl_lightning.wire import Payload

BY_HAND = (3 * CENTRES[0] + CENTRES[1]) / 4


class Sums(FedAvg):
    """A FedAvg whose server does something else with the clients' mean and what it had before."""

    def change(self, start, mean):
        raise NotImplementedError

    def aggregate(self, uploads):
        start = self.server["weights"]
        super().aggregate(uploads)
        self.server["weights"] = self.change(start, self.server["weights"])


class BelowZero(FedAvg):
    """Its network has a variance below 0, as statistics of BatchNorm that a server extrapolates."""

    def deploy(self, client=None):
        network = super().deploy(client)
        for name, buffer in network.named_buffers():
            if name.endswith("running_var"):
                buffer.fill_(-1)
        return network


class Short(Sums):
    """Its steps shrink, so that it stops on the way."""

    def change(self, start, mean):
        return start + 0.8**self.round * (mean - start)


class Stays(Sums):
    def change(self, start, mean):
        return start


class Elsewhere(Sums):
    def change(self, start, mean):
        return mean + torch.arange(6.0)


class NearlyAlike(FedAvg):
    """It counts clients alike, and ends a little off the optimum for that, as rounding or a
    constant does."""

    def aggregate(self, uploads):
        every = [upload.tensor("weights") for upload in uploads.values()]
        self.server["weights"] = torch.stack(every).mean(0) + 3e-4


class Raises(FedAvg):
    """A slip in a hook that no check calls by itself."""

    def next_state(self, sums):
        assert sums is None


class Shorter(FedAvg):
    """All its uploads are rejected."""

    def upload(self, client):
        whole = super().upload(client)
        return Payload({**whole, "weights": whole.tensor("weights")[1:]})


def outcome_of(method, check):
    (outcome,) = run_checks(method_under_test(method), [check])
    assert outcome.verdict == "failed"
    return outcome


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        (Short, "% of the way: a step of the server is too short"),
        (Stays, "it has not moved"),
        (Elsewhere, "a term of the loss or a correction"),
        (NearlyAlike, "the optimum for equal weights: weigh clients by n_k"),
    ],
)
def test_where_it_should_have_ended_and_why_it_did_not(method, cause):
    outcome = outcome_of(method, known_optimum)
    seen, expected, why = outcome.detail.splitlines()
    assert seen.startswith("it ends at [")
    assert expected.startswith(f"expected: {show(BY_HAND)}, the optimum of the clients")
    assert why.startswith("likely cause: ")
    assert cause in why
    assert optimum((3, 1)).tolist() == pytest.approx(BY_HAND.tolist())


@pytest.mark.parametrize(
    ("method", "cause"),
    [(Stays, "it has not moved"), (NearlyAlike, "")],
)
def test_what_a_step_should_have_been(method, cause):
    outcome = outcome_of(method, partial_participation)
    assert "a step of lr 0.1 moved it by [" in outcome.detail
    assert "expected: [" in outcome.detail
    assert cause in outcome.detail


def test_nan_is_not_called_another_network():
    detail = outcome_of(BelowZero, deployed_from_the_server).detail
    assert "another network" not in detail
    assert re.search(
        r"answers with NaN or infinity: network\['.*running_var'\] is a variance below 0", detail
    )
    assert "expected: finite answers" in detail


def test_where_numbers_are_not_finite():
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert not_finite(server={"a": good}, network={"b.running_var": good}) == ""
    assert not_finite(server={"a": bad}, network={"b.running_var": -good, "c": good / 0}) == (
        "server['a'] has NaN, network['b.running_var'] is a variance below 0, network['c'] has infinity"
    )


def test_an_error_is_told_with_the_line_of_the_method_that_raised_it():
    line = Raises.next_state.__code__.co_firstlineno + 1
    where = f"(test_conformance_messages.py, line {line}, next_state)"
    detail = outcome_of(Raises, partial_participation).detail
    assert detail.startswith("AssertionError")
    assert detail.endswith(where)


def test_a_run_that_learns_nothing_says_why_and_names_no_file_that_is_gone(caplog):
    log = logging.getLogger("fl_lightning")
    before = log.level, log.propagate, [*log.handlers]
    detail = outcome_of(Shorter, learning).detail
    assert (
        "nothing was learned; round 1: upload of client 0 rejected: values of shape (5,)" in detail
    )
    assert "run.log" not in detail
    assert (log.level, log.propagate, log.handlers) == before
    assert not caplog.records


def test_the_table_shows_the_rule_of_a_check_that_failed():
    outcome = outcome_of(Stays, known_optimum)
    (cell,) = results_table("Stays", [outcome]).columns[2].cells
    lines = cell.replace("\\[", "[").splitlines()
    assert lines[0] == outcome.rule
    assert [line.partition(":")[0] for line in lines[1:]] == ["seen", "expected", "likely cause"]
