"""What clients keep stays with the rank that trained them, and changes no result."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import states_program
import torch
from ranked import result, started
from safetensors.torch import load_file
from states_program import KEEPING, ROUNDS, fit, fit_all

from fl_lightning.client import Client
from fl_lightning.distributed import collectives
from fl_lightning.engines import ClientTask, holders
from fl_lightning.engines.holders import fetch_states, preferred_rank, spread_states
from fl_lightning.engines.ranks import deal


def states_in(run: Path, round: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"round_{round:06d}" / "clients.safetensors")


def assert_same_states(one: Path, other: Path, round: int = ROUNDS) -> None:
    mine, theirs = states_in(one, round), states_in(other, round)
    assert mine.keys() == theirs.keys()
    assert mine
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.essential), 4])
def test_states_stay_with_their_ranks_and_results_are_those_of_one_process(
    tmp_path, imported_once, ranks
):
    """In a whole run, and where one process, several ranks and one process take turns."""
    for name in KEEPING:
        fit(name, tmp_path / "one")
        fit(name, tmp_path / "turns", 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=fit_all, args=(tmp_path, rank, ranks, port)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    check(tmp_path, ranks)


@pytest.fixture(scope="module")
def imported_once():
    """The ranks are forks of a process that has imported their program, which takes seconds."""
    multiprocessing.set_forkserver_preload(["states_program"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where that process looks for it
        forkserver.ensure_running()
        yield


def check(folder: Path, ranks: int) -> None:
    """Continue the runs of ``turns`` to their end, and compare all with those of one process."""
    for name in KEEPING:
        one, whole, turns = (folder / kind / name / "run" for kind in ("one", str(ranks), "turns"))
        fit(name, folder / "turns", ckpt_path=str(turns))
        for other in (whole, turns):
            assert result(other) == result(one), other
            assert_same_states(other, one)
        sizes: dict[str, int] = {}
        for key, tensor in states_in(one, ROUNDS).items():
            id = key.split("/")[0]
            sizes[id] = sizes.get(id, 0) + tensor.nbytes
        check_received(whole.parent, ranks, sizes)


def check_received(folder: Path, ranks: int, sizes: dict[str, int]) -> None:
    """Hold what each rank received against where the states were before and after each round."""
    of_ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    cohorts: dict[int, list[int]] = {}
    with (folder / "run" / "ledger.csv").open() as file:
        for row in csv.DictReader(file):
            cohorts.setdefault(int(row["round"]), []).append(int(row["client"]))
    before: dict[int, int] = {}
    moves = away = 0
    for number, rounds in enumerate(zip(*of_ranks, strict=True)):
        after = dict(rounds[0]["holders"])
        cohort = cohorts[number + 1]
        for rank, seen in enumerate(rounds):
            assert dict(seen["holders"]) == after, "every rank has the same table"
            assert seen["states"] == sorted(id for id in after if rank in (0, after[id]))
            assert dict(seen["seen"]) == {id: rank in (0, after[id]) for id in cohort}
            come = [id for id in cohort if after[id] == rank and before.get(id, rank) != rank]
            kept = come if rank else [id for id in cohort if after[id] != 0]
            assert seen["alone"] == sum(sizes[str(id)] for id in kept)
            moves += len(come)
            away += len(come) if rank else 0
        counts = np.bincount([after[id] for id in cohort], minlength=ranks)
        assert max(counts) - min(counts) <= 2
        before = after
    assert 0 < away <= moves < sum(map(len, cohorts.values())) / 4, "few states move, and some do"
    if folder.name == "LocalOnly":  # whose clients send a count
        assert max(seen["all"] for rounds in of_ranks for seen in rounds) < 20_000


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_that_loses_a_rank_leaves_all_states_of_its_last_round(tmp_path):
    program = started(tmp_path, program=states_program.__file__)
    _, errors = program.communicate()
    assert program.returncode == 1
    assert "was killed by SIGKILL" in errors
    fit("LocalOnly", tmp_path / "one", 4)
    run = tmp_path / "LocalOnly" / "run"
    last = max(int(path.name.split("_")[1]) for path in (run / "checkpoints").glob("round_*"))
    assert last in (3, 4), "rank 0 may have ended round 4"
    fit("LocalOnly", tmp_path / "short", last)
    assert_same_states(run, tmp_path / "short" / "LocalOnly" / "run", last)


def test_work_goes_where_the_state_is_as_long_as_it_is_balanced():
    assert deal([1, 1, 1, 1, 1, 1], 2, [0, 0, 0, 0, 0, 1]) == [[0, 1, 2], [3, 4, 5]]
    assert deal([1, 1, 1, 1], 2, [1, 0, 0, 1]) == [[1, 2], [0, 3]]
    assert deal([4, 1, 1, 1, 1], 2, [None] * 5) == deal([4, 1, 1, 1, 1], 2)
    draw = np.random.default_rng(0)
    for ranks in (2, 3, 8):
        for _ in range(50):
            works = draw.lognormal(3, 1, 30).tolist()
            wishes = [int(wish) if wish >= 0 else None for wish in draw.integers(-1, ranks, 30)]
            plain, shares = deal(works, ranks), deal(works, ranks, wishes)
            assert sorted(at for share in shares for at in share) == list(range(30))
            moved = [at for rank, share in enumerate(shares) for at in share if wishes[at] != rank]
            most, busiest = (
                max(sum(works[at] for at in share) for share in dealt) for dealt in (plain, shares)
            )
            bound = sum(works) / ranks + max((works[at] for at in moved), default=0)
            assert busiest <= max(most, bound) + 1e-9


def test_a_stack_goes_to_the_rank_with_most_of_its_states():
    tasks = [task(id) for id in range(5)]
    assert preferred_rank(tasks, {}) is None
    assert preferred_rank(tasks, {0: 2, 1: 1, 2: 1, 9: 2}) == 1
    assert preferred_rank(tasks, {0: 2, 1: 1}) == 1


def task(id: int) -> ClientTask:
    return ClientTask(Client(id, np.arange(5), np.arange(0)), 1, b"", torch.zeros(5), 1, 1)


def test_states_of_a_checkpoint_are_dealt_to_the_ranks(monkeypatch):
    dealt = []
    for rank in range(3):
        monkeypatch.setattr(holders, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(holders, "world_size", lambda: 3)
        states, table = {id: {"w": torch.tensor(id)} for id in (7, 1, 4, 9)}, {}
        spread_states(states, table)
        assert table == {1: 0, 4: 1, 7: 2, 9: 0}
        dealt.append(sorted(states))
    assert dealt == [[1, 4, 7, 9], [4], [7]]


def test_nothing_is_sent_where_no_state_moves(monkeypatch):
    monkeypatch.setattr(collectives, "gather_bytes", None)  # nobody asks the other ranks
    fetch_states([task(0), task(1), task(2)], {0: 1, 1: 0, 2: 2}, {0: 1, 1: 2})
