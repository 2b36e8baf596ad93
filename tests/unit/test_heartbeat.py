"""One file per rank: phases, durations, ends, and what a reader refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs import runfolder
from configs.errors import UserError
from prefix_train import heartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, set by the test."""
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def only(run: Path) -> heartbeat.Beat:
    (beat,) = heartbeat.read(run)
    return beat


def test_a_beat_says_who_where_and_since_when(tmp_path: Path, clock: list[float]) -> None:
    beats = heartbeat.Heartbeat(tmp_path, 1, 2)
    assert only(tmp_path).phase == "load"
    clock[0] = 103.5
    beats.beat()
    beat = only(tmp_path)
    assert (beat.rank, beat.world, beat.attempt, beat.pid) == (1, 2, 0, os.getpid())
    assert (beat.since_clock, beat.clock, beat.update_clock) == (100.0, 103.5, None)
    assert abs(beat.time - time.time()) < 60


def test_the_first_update_is_one_phase_and_later_ones_are_timed(tmp_path: Path, clock: list[float]) -> None:
    beats = heartbeat.Heartbeat(tmp_path, 0, 1)
    beats.phase("forward", 1, pack=0)
    clock[0] += 50
    beats.phase("backward", 1, pack=0)
    beat = only(tmp_path)
    assert (beat.phase, beat.part, beat.pack, beat.since_clock, beat.completed) == (
        "first_update",
        "backward",
        0,
        100,
        0,
    )
    beats.phase("forward", 2)
    clock[0] += 3
    beats.phase("optimizer", 2)
    beat = only(tmp_path)
    assert (beat.phase, beat.part, beat.since_clock, beat.update_clock) == ("optimizer", "optimizer", 153, 150)
    clock[0] += 1
    beats.phase("save", 2)
    assert only(tmp_path).update_clock is None
    clock[0] += 1000
    beats.phase("forward", 3)
    clock[0] += 2
    beats.phase("done")
    beat = only(tmp_path)
    assert beat.durations == (4, 2), "neither the first update nor a save counts as an update"
    assert (beat.completed, beat.phase, beat.update) == (3, "done", 3)


def test_a_named_first_update_and_compiling(tmp_path: Path, clock: list[float]) -> None:
    beats = heartbeat.Heartbeat(tmp_path, 0, 1)
    beats.phase("compile")
    beat = only(tmp_path)
    assert (beat.phase, beat.update, beat.completed, beat.update_clock) == ("compile", 0, 0, None)
    beats.phase("load")
    beat = only(tmp_path)
    assert (beat.phase, beat.completed, beat.durations) == ("load", 0, ()), "compiling ahead is no update"
    beats.phase("first_update", 1)
    assert only(tmp_path).phase == "first_update"
    beats.phase("forward", 2)
    assert only(tmp_path).phase == "forward"


def test_durations_are_bounded(tmp_path: Path, clock: list[float]) -> None:
    beats = heartbeat.Heartbeat(tmp_path, 0, 1)
    for update in range(1, heartbeat.KEPT_DURATIONS + 10):
        beats.phase("forward", update)
        clock[0] += update
    assert len(only(tmp_path).durations) <= heartbeat.KEPT_DURATIONS


def test_unknown_phase(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no phase 'forwrd'"):
        heartbeat.Heartbeat(tmp_path, 0, 1).phase("forwrd", 1)


def test_a_beat_is_cheap(tmp_path: Path) -> None:
    beats = heartbeat.Heartbeat(tmp_path, 0, 1)
    for update in range(200):
        beats.phase("forward", update)
    best = min(_seconds(beats, update) for update in range(200, 300))
    assert best < 1e-3, f"{best * 1e3:.2f} ms"


def _seconds(beats: heartbeat.Heartbeat, update: int) -> float:
    begin = time.perf_counter()
    beats.phase("forward", update)
    return time.perf_counter() - begin


def test_no_torch() -> None:
    code = "import sys, prefix_train.heartbeat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_are_read_in_order_and_partial_files_are_not_read(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        heartbeat.Heartbeat(tmp_path, rank, 11)
    (tmp_path / "heartbeat" / ".rank3.json.node.1.tmp").write_text("{")
    assert [beat.rank for beat in heartbeat.read(tmp_path)] == [0, 2, 10]
    assert heartbeat.read(tmp_path / "elsewhere") == []


def test_a_rank_of_an_earlier_life_leaves_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = heartbeat.Heartbeat(tmp_path, 0, 1)
    (tmp_path / runfolder.ATTEMPT).write_text("1")
    monkeypatch.setenv("PREFIX_TRAIN_ATTEMPT", "1")
    heartbeat.Heartbeat(tmp_path, 0, 1).phase("evaluate", 7)
    monkeypatch.delenv("PREFIX_TRAIN_ATTEMPT")
    with pytest.raises(runfolder.StaleAttempt):
        beats.phase("forward", 8)
    with pytest.raises(runfolder.StaleAttempt):
        heartbeat.ended(tmp_path, 0, 1)
    assert (only(tmp_path).attempt, only(tmp_path).update) == (1, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: "", "not JSON"),
        (lambda value: "[]", "an object is expected, not list"),
        (lambda value: json.dumps({**value, "update": "7"}), "update is '7'"),
        (lambda value: json.dumps({**value, "update": True}), "update is True"),
        (lambda value: json.dumps({**value, "durations": [1, "2"]}), r"durations is \[1, '2'\]"),
        (lambda value: json.dumps({**value, "pid": None}), "pid is None"),
        (lambda value: json.dumps({**value, "extra": 1}), "unknown extra"),
        (lambda value: json.dumps({k: v for k, v in value.items() if k != "clock"}), "without clock"),
    ],
)
def test_what_is_no_beat_is_named(tmp_path: Path, change, message: str) -> None:
    heartbeat.Heartbeat(tmp_path, 0, 1)
    path = tmp_path / "heartbeat" / "rank0.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(heartbeat.BadRecord, match=message) as caught:
        heartbeat.read(tmp_path)
    assert str(path) in str(caught.value)


def test_an_exception_is_recorded_with_its_line(tmp_path: Path) -> None:
    beats = heartbeat.Heartbeat(tmp_path, 3, 4)
    beats.phase("backward", 12)
    try:
        raise UserError("train.jsonl:7: no messages")
    except UserError as error:
        heartbeat.ended(tmp_path, 3, 4, error=error)
        line = error.__traceback__.tb_lineno
    (end,) = heartbeat.read_ends(tmp_path)
    assert (end.rank, end.status, end.signal, end.phase, end.update) == (3, 2, None, "first_update", 12)
    assert (end.exception, end.message) == ("configs.errors.UserError", "train.jsonl:7: no messages")
    assert end.where == f"{__file__}:{line}"
    assert end.frames[-1].endswith("test_an_exception_is_recorded_with_its_line")


def test_a_signal_is_recorded_by_a_watcher(tmp_path: Path) -> None:
    end = heartbeat.ended(tmp_path, 0, 2, signal=signal.SIGKILL, host="node7", pid=4242)
    assert (end.signal, end.status, end.host, end.pid, end.phase) == ("SIGKILL", None, "node7", 4242, None)
    assert heartbeat.read_ends(tmp_path) == [end]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (UserError("x"), 2),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 1),
        (SystemExit(), 0),
        (SystemExit(78), 78),
        (SystemExit("text"), 1),
    ],
)
def test_exit_status(error: BaseException | None, status: int) -> None:
    assert heartbeat.exit_status(error) == status
