"""Secure sums: what one client adds is masked, and the sum is the plain one bit for bit."""

from __future__ import annotations

import pytest
from averaged import digits, sent
from refusals import refused

from fl_lightning.aggregation.averages import CoordinateMedian, NormClipping
from fl_lightning.aggregation.exact_sum import ExactSum
from fl_lightning.aggregation.server import examples_in
from fl_lightning.aggregation.sum_form import integers_of
from fl_lightning.errors import MisuseError
from fl_lightning.methods import AQFL, FedAvg, FedMPQ, FedMPQKD, FedNTD, FedPQ, FedProx, QFedAvg
from fl_lightning.wire import Payload


@pytest.mark.parametrize(
    "method",
    [
        *(
            FedAvg(),
            FedAvg(average=NormClipping(0.01)),
            FedProx(),
            FedNTD(),
            QFedAvg(),
            AQFL(),
            FedPQ(),
        ),
        *(FedMPQ(bits=[2, 3, 4.5, 8]), FedMPQKD()),
    ],
    ids=lambda method: f"{type(method).__name__}-{type(method.average).__name__}",
)
def test_what_one_client_adds_in_integers_adds_up_to_the_sums(method):
    answers = {id: Payload.from_bytes(upload) for id, upload in sent(method, digits()).items()}
    examples = {id: examples_in(upload) for id, upload in answers.items()}
    sums = method.add_up(answers, examples)
    totals: dict[str, ExactSum] = {}
    for id, upload in answers.items():
        addends = method.addends(upload, id, examples[id])
        for name, integers in integers_of(addends, method.average, method.cohort).items():
            total = totals.setdefault(name, ExactSum(len(integers), method.cohort))
            total.integers += integers
    assert set(totals) == set(sums)
    for name, total in totals.items():
        assert total.total().tolist() == sums.total(name).tolist()


def test_there_are_no_integers_of_an_order_statistic():
    method = FedAvg(average=CoordinateMedian())
    answers = sent(method, digits())
    addends = method.addends(Payload.from_bytes(answers[0]), 0, 1)
    with refused("integers of a CoordinateMedian", kind=MisuseError):
        integers_of(addends, method.average, 4)
