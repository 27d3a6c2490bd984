"""What ranks give arrives as it was, or they say who did not answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver

import pytest
from collectives_program import serve

from fl_lightning.distributed.frames import FRAME_BYTES, _frames


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """The ranks are forks of a process that has imported their program, which takes seconds."""
    multiprocessing.set_forkserver_preload(["collectives_program"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where that process looks for it
        forkserver.ensure_running()
        yield


def run(what: str, size: int, folder) -> tuple[list[int | None], list[str]]:
    """Exit codes of the ranks, and what they raised."""
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=serve, args=(rank, size, what, folder)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    raised = [folder / f"rank{rank}" for rank in range(size)]
    return [process.exitcode for process in processes], [
        path.read_text() if path.exists() else "" for path in raised
    ]


@pytest.mark.slow
@pytest.mark.essential
def test_what_ranks_give_arrives_as_it_was(tmp_path):
    assert run("exchange", 3, tmp_path) == ([0, 0, 0], ["", "", ""])


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("what", ["silent", "killed"])
def test_a_rank_that_does_not_answer_leaves_nobody_waiting(tmp_path, what):
    codes, (zero, _, two) = run(what, 3, tmp_path)
    assert what != "killed" or codes[1] == -signal.SIGKILL
    for message in (zero, two):
        assert message.startswith("RankLost: no answer from rank ")
        assert "a run needs all its processes" in message


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("disagree", "RuntimeError: ranks [1] have other tasks for this round than rank 0"),
        ("other_data", "InputError: rank 1 of 2; it has others there than rank 0: the public set;"),
        (
            "other_tokens",
            "InputError: rank 1 of 2; it has others there than rank 0: the tokens of the text;",
        ),
    ],
)
def test_ranks_that_disagree_all_say_so(what, says, tmp_path):
    _, messages = run(what, 2, tmp_path)
    assert all(message.startswith(says) for message in messages)


def test_frames_hold_whole_parts():
    assert _frames([]) == []
    assert _frames([0, 1, FRAME_BYTES - 1, 1, 3 * FRAME_BYTES, 0, 1]) == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part for frame in _frames([FRAME_BYTES // 3] * 100) for part in frame] == list(
        range(100)
    )
