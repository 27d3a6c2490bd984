"""What is done about a SuperLink that lets nobody in, takes no run or goes away; without Flower."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_lightning.deploy.flower import (
    FIRST_LOOK_SECONDS,
    LAST_LOOK_SECONDS,
    fleet,
    launch,
    next_look,
)
from fl_lightning.errors import InputError, RunStopped


@pytest.fixture
def attempts(monkeypatch) -> list[str]:
    """What becomes of the attempts to connect, in order; a node that is let in has no work."""
    outcomes: list[str] = []

    @contextmanager
    def connect():
        if outcomes.pop(0) == "refused":
            fleet._refuse(305, "[code: 2004] Failed to activate SuperNode.")
        yield (7,)

    monkeypatch.setattr(fleet, "_connector", lambda *arguments: connect)
    monkeypatch.setattr(fleet, "_work", lambda *arguments: None)
    monkeypatch.setattr(fleet, "environment", lambda home: {})
    monkeypatch.setattr(fleet, "RECONNECT_SECONDS", 0.0)
    return outcomes


def serve(outcomes: list[str], home, key: str | None) -> None:
    settings = {"name": "n", "private_key": key, "goes_on": lambda: bool(outcomes)}
    fleet.serve("127.0.0.1:1", bytes.upper, home, **settings)


def test_a_node_with_a_key_waits_until_its_old_connection_has_ended(attempts, tmp_path, caplog):
    caplog.set_level("INFO")
    attempts += ["refused", "refused", "let in"]
    serve(attempts, tmp_path, "key")
    assert [line for line in caplog.messages if "again" in line] == [
        f"127.0.0.1:1: {fleet.NOT_YET} ([code: 2004] Failed to activate SuperNode. exit code 305 of Flower); trying again"
    ] * 2
    assert "node n is connected to 127.0.0.1:1 as SuperNode 7" in caplog.messages


def test_a_node_without_a_key_and_one_that_has_waited_long_enough_end(
    attempts, tmp_path, monkeypatch
):
    attempts += ["refused"] * 3
    with pytest.raises(
        RunStopped, match=r"2004\] Failed to activate SuperNode. exit code 305 of Flower"
    ):
        serve(attempts, tmp_path, None)
    monkeypatch.setattr(fleet, "LET_IN_SECONDS", -1.0)
    with pytest.raises(RunStopped):
        serve(attempts, tmp_path, "key")
    assert len(attempts) == 1


def test_a_node_that_was_connected_comes_back_however_often_it_is_refused(
    attempts, tmp_path, monkeypatch
):
    monkeypatch.setattr(fleet, "LET_IN_SECONDS", -1.0)
    attempts += ["let in", "refused", "refused", "let in"]
    serve(attempts, tmp_path, "key")
    assert not attempts


def test_a_signal_ends_a_node_that_is_connected(attempts, tmp_path, monkeypatch):
    def ended(*arguments: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(fleet, "_work", ended)
    attempts += ["let in", "let in"]
    with pytest.raises(SystemExit):
        serve(attempts, tmp_path, None)
    assert len(attempts) == 1


@pytest.mark.parametrize(
    ("begun", "error", "says"),
    [
        (None, InputError, "it did not take the run"),
        ("", RunStopped, "went away during the run.*then no round was begun"),
        (
            "/runs/mine",
            RunStopped,
            "went away during the run.*continue with --ckpt_path /runs/mine",
        ),
    ],
)
def test_a_superlink_that_went_away_is_told_from_one_that_took_no_run(
    begun, error, says, tmp_path, monkeypatch
):
    def show(words: list[str], folder: Path, home: Path) -> int:
        assert words[:3] == ["flwr", "run", str(tmp_path / "app")]
        if begun is not None:
            (tmp_path / "begun").write_text(begun)
        return 1

    monkeypatch.setattr(launch, "_show", show)
    with pytest.raises(error, match=says):
        launch.flwr_run(tmp_path, "127.0.0.1:1", None)


def test_looks_for_messages_become_rarer_the_longer_none_comes():
    assert next_look(0.0) == FIRST_LOOK_SECONDS
    assert next_look(5.0) == pytest.approx(0.5)
    assert next_look(3600.0) == LAST_LOOK_SECONDS
