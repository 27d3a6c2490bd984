"""The benchmark of the latency of answers under a budget, on a toy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from places import BENCHMARKS

from fl_lightning.energy.switched import add_switches, narrow_kept
from fl_lightning.models import LlamaTiny


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("flags", [[], ["--stop_at_eos"]])
def test_all_contenders_answer_the_same_prompts_in_turn(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    import hest_latency

    threads = torch.get_num_threads()
    try:
        found = hest_latency.main(["--quick", "true", "--budget", "0.8", *flags])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert list(found) == ["ladder", "step", "tabs", "all_on", "plain"]
    for one in found.values():
        assert len(one.seconds) == 3
        assert all(1 <= tokens <= 4 for tokens in one.tokens)
        assert flags or one.tokens == [4] * 3
    assert "ladder / step: p99 " in printed
    assert "| plain | 3 | 0 | " in printed
    if not flags:  # of the same lengths
        assert found["all_on"].spent == pytest.approx(found["plain"].spent)
        for name in ("ladder", "step", "tabs"):
            shares = np.divide(found[name].spent, found["plain"].spent)
            assert (shares > 0).all()
            assert (shares <= 0.8).all()


def test_a_block_within_a_block_keeps_narrow_weights():
    network = LlamaTiny(259)
    first = add_switches(network)[0]
    with narrow_kept(network):
        with narrow_kept(network):
            kept = first.narrow_weight("int8")
        assert first.narrow_weight("int8") is kept
    assert first.narrow_weight("int8") is not kept
