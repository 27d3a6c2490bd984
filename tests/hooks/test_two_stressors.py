"""Two stressors of one class hit apart, and the first as it does alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from ten import make
from toy import ready, run

from callbacks import ByzantineClients, LabelNoise, NewTasks, SecureDropout, StragglerDropout
from fl_lightning.aggregation.masked import _phase_of_leaving
from fl_lightning.client import Assignment, Client
from fl_lightning.conformance.toy import images
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter, RoundRecord
from fl_lightning.sampling import PowerOfChoice, Uniform
from fl_lightning.tasks import Classification

CLIENTS = 400


def context(*callbacks) -> SimpleNamespace:
    sizes = np.full(CLIENTS, 10)
    data = SimpleNamespace(task=Classification(), num_classes=10, sizes=sizes)
    return SimpleNamespace(seed=1, max_rounds=9, callbacks=callbacks, data=data)


def client(id: int) -> Client:
    return Client(id, train=np.arange(10), val=np.empty(0, np.int64))


def dropped(*callbacks: StragglerDropout) -> set[int]:
    cohort = [Assignment(client(id)) for id in range(CLIENTS)]
    for one in callbacks:
        cohort = one.change_cohort(cohort, round=1, context=context(*callbacks))
    return {a.client.id for a in cohort if not a.returns}


def test_stragglers_of_two_are_independent():
    before, after = StragglerDropout(0.3), StragglerDropout(0.3, mode="after")
    first, both = dropped(before), dropped(before, after)
    assert first == dropped(after) < both  # the first alone is as it was
    assert abs(len(both) / CLIENTS - 0.51) < 0.08  # 1 - 0.7^2, and not 0.3


@pytest.mark.parametrize(("second", "first_of_its_kind"), [("masked", False), ("keys", True)])
def test_dropouts_of_a_secure_sum_are_independent(second, first_of_its_kind):
    """Those of another phase draw apart already, so that they are as they are alone."""
    masked, other = SecureDropout(0.3), SecureDropout(0.3, phase=second)
    both = dropped(masked, other)
    assert dropped(masked) < both
    assert abs(len(both) / CLIENTS - 0.51) < 0.08
    assert (dropped(other) <= both) is True
    alone = dropped(SecureDropout(0.3, phase=second))
    assert (alone == both - (dropped(masked) - alone)) is first_of_its_kind


def test_who_drops_before_training_leaves_a_secure_sum_before_its_keys():
    """Whichever of the two stressors comes first."""
    straggles, leaves = StragglerDropout(1.0), SecureDropout(1.0, phase="unmask")
    for order in ([straggles, leaves], [leaves, straggles]):
        cohort = [Assignment(client(0))]
        for one in order:
            cohort = one.change_cohort(cohort, round=1, context=context(*order))
        assert _phase_of_leaving(cohort[0], SimpleNamespace(status="dropped")) == "keys"
    (alone,) = leaves.change_cohort([Assignment(client(0))], round=1, context=context(leaves))
    assert _phase_of_leaving(alone, SimpleNamespace(status="lost")) == "unmask"


def test_two_changes_that_are_recovered_from_at_once_end_no_run():
    pair = [NewTasks(0, arrives=2), NewTasks(1, arrives=3)]
    for one in pair:
        one.changed = one.arrives
    record = RoundRecord(5, {"router/purity": 1.0})
    for one in pair:
        with record.written_by(one):
            one.on_round_end(record, context(*pair))
    assert record.metrics["tasks/rounds_to_recover"] == 4
    assert [one.changed for one in pair] == [0, 0]


class Pure(Meter):
    """Finds that every group has an expert of its own in round 4."""

    def on_round_end(self, record, context):
        record.metrics["router/purity"] = float(record.round == 4)


def test_a_change_is_recovered_from_after_the_run_was_continued(tmp_path):
    def fit(rounds: int, **settings):
        callbacks = [Pure(), NewTasks(group=1, arrives=2)]
        return run(
            make("FedAvg"), images(), tmp_path, max_rounds=rounds, callbacks=callbacks, **settings
        )

    again = fit(4, ckpt_path=str(fit(2).run_dir), allow_changed=True)
    assert again.progress.history[-1]["tasks/rounds_to_recover"] == 3


def flipped(*callbacks: LabelNoise) -> np.ndarray:
    """How many labels of each client are wrong in round 1."""
    given, wrong = context(*callbacks), []
    for id in range(CLIENTS):
        labels = torch.arange(10)
        for one in callbacks:
            labels = one.change_labels(labels, client=client(id), round=1, context=given)
        wrong.append(int((labels != torch.arange(10)).sum()))
    return np.array(wrong)


def test_noise_of_two_hits_other_clients_and_other_labels():
    one, two = (LabelNoise(round=1, clients=0.5, labels=0.5) for _ in range(2))
    once = flipped(one)
    twice = flipped(LabelNoise(round=1, clients=0.5, labels=0.5), two)
    assert (once > 0).sum() == CLIENTS / 2
    assert abs((twice > 0).mean() - 0.75) < 0.08
    assert twice.sum() > 1.6 * once.sum()


def test_attackers_of_two_are_others():
    one, two = ByzantineClients(0.2), ByzantineClients(0.2, attack="noise")
    given = context(one, two)
    shared = one.attackers(given) & two.attackers(given)
    assert len(one.attackers(given)) == len(two.attackers(given)) == CLIENTS / 5
    assert len(shared) < CLIENTS / 10  # 16 are expected
    assert one.attackers(given) == ByzantineClients(0.2).attackers(context())


def test_a_class_arrives_where_data_have_no_other_groups():
    data = ready()
    mostly = data.group_counts().argmax(1)
    given = SimpleNamespace(seed=0, max_rounds=5, data=data, callbacks=(), sampler=Uniform())
    arrives = NewTasks(group=1, arrives=3, leaves=4)
    arrives.on_check(given)
    cohort = [Assignment(data.client(id)) for id in range(data.num_clients)]
    for round in range(1, 7):
        found = arrives.change_cohort(cohort, round=round, context=given)
        there = 3 <= round <= 4
        assert [a.trains for a in found] == [there or group != 1 for group in mostly]
    with pytest.raises(InputError, match="the groups of these data are 0, 1"):
        NewTasks(group="rose", arrives=3).on_check(given)
    data.__class__ = type("Named", (type(data),), {"group_names": ["2", "1", "0", *"abcdefg"]})
    for group, place in ((2, 0), ("2", 0), (0, 2), (1, 1), (4, 4), ("4", 4), ("e", 7)):
        away = NewTasks(group=group, arrives=2).change_cohort(cohort, round=1, context=given)
        assert [a.trains for a in away] == [one != place for one in mostly], group
    given.sampler = PowerOfChoice(4)
    with refused("NewTasks with --trainer.sampler PowerOfChoice", "leave one of them out"):
        arrives.on_check(given)
