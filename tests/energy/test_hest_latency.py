"""The benchmark of the latency of answers under a budget, on a toy."""

from __future__ import annotations

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
        found = hest_latency.main(["--quick", "true", "--budget", "0.5", *flags])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert list(found) == ["hest", "tabs", "none", "merged"]
    for one in found.values():
        assert len(one.seconds) == 3
        assert all(1 <= tokens <= 4 for tokens in one.tokens)
        assert flags or one.tokens == [4] * 3
        assert all(0 < layers < network for layers, network in one.spent)
    assert "hest / tabs: p99 " in printed
    assert "| merged | 3 | " in printed
    if not flags:  # of the same lengths; one table has both, and its rest is the same for both
        rests = [
            [network - layers for layers, network in found[name].spent] for name in ("hest", "tabs")
        ]
        assert rests[0] == pytest.approx(rests[1])
        assert all(
            mine[0] < theirs[0]
            for mine, theirs in zip(found["hest"].spent, found["tabs"].spent, strict=True)
        )


def test_a_block_within_a_block_keeps_narrow_weights():
    network = LlamaTiny(259)
    first = add_switches(network)[0]
    with narrow_kept(network):
        with narrow_kept(network):
            kept = first.narrow_weight("int8")
        assert first.narrow_weight("int8") is kept
    assert first.narrow_weight("int8") is not kept
