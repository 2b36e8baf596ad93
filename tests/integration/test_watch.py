"""slurm/watch.py beside real processes: what is stuck is seen, named and ended; what is only slow is left alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from configs.errors import UserError
from configs.runfolder import StaleAttempt
from configs.schema import WatchConfig
from prefix_train import heartbeat
from slurm import alarms, collect, deadlines, evidence, stacks, verdict, watch
from slurm.evidence import Alarm, Node
from slurm.watch import Watcher
from tests.standins import make_clone, run_folder, submit, wait_for

ROOT = Path(__file__).parents[2]

WATCH = WatchConfig(poll_s=0.1, floor_s=1.0, factor=2.0, sample_gap_s=0.5, first_update_s=60)

RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path

from prefix_train import heartbeat
from slurm import rank as slurm_rank

run, rank, world, what = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
slurm_rank.end_with_parent()
slurm_rank.allow_watching(run, rank)
beat = heartbeat.Heartbeat(run, rank, world)


def hold_lock():
    ctypes.PyDLL(None).sleep(120)


def gather():
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[5], RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    for update in range(1, 6):
        beat.phase("forward", update)
        time.sleep(0.05)
        dist.all_reduce(torch.ones(3))
    beat.phase("forward", 6)
    if rank == 1:
        skip_it()
    dist.all_reduce(torch.ones(3))


def skip_it():
    time.sleep(120)


def updates():
    for update in range(1, 6):
        beat.phase("forward", update)
        time.sleep(0.05)
    beat.phase("forward", 6)


if what == "gather":
    gather()
elif what == "lock":
    updates()
    hold_lock()
elif what == "sleep":
    updates()
    time.sleep(120)
elif what == "slow first update":
    beat.phase("forward", 1)
    time.sleep(4)
elif what == "slow save":
    updates()
    beat.phase("save", 6)
    time.sleep(4)
elif what == "moves":
    updates()
    def deeper(depth):
        time.sleep(0.1)
        deeper(depth + 1)
    deeper(0)
elif what == "autotune":
    updates()
    sys.path.insert(0, str(run / "triton" / "runtime"))
    import autotuner
    autotuner.run(time.monotonic() + 12)
elif what == "stalls":
    for update in range(1, 8):
        beat.phase("forward", update)
        time.sleep(1.6)
elif what == "raise":
    updates()
    heartbeat.ended(run, rank, world, error=ValueError("planted"))
    sys.exit(1)
beat.phase("done")
heartbeat.ended(run, rank, world, status=0)
"""


WAIT_IN_C = """
import ctypes, pathlib, signal, sys
signal.signal(signal.SIGUSR2, lambda *_: pathlib.Path(sys.argv[1], "saved").touch())
pathlib.Path(sys.argv[1], "ready").touch()
lock = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)  # waits for ever; signals do not interrupt it
"""


class Ranks:
    """Stand-in ranks of one run folder."""

    def __init__(self, run: Path) -> None:
        self.run, self.processes = run, list[subprocess.Popen[bytes]]()
        (run / "rank.py").write_text(textwrap.dedent(RANK))
        (run / "logs").mkdir()

    def start(self, *whats: str) -> None:
        port = str(20000 + os.getpid() % 10000)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for rank, what in enumerate(whats):
            command = [sys.executable, self.run / "rank.py", self.run, str(rank), str(len(whats)), what, port]
            self.processes.append(subprocess.Popen(command, env=env))

    def beat(self, rank: int) -> heartbeat.Beat | None:
        return next((beat for beat in heartbeat.read(self.run) if beat.rank == rank), None)

    def wait_for_update(self, number: int) -> None:
        everyone = range(len(self.processes))
        wait_for(lambda: all((beat := self.beat(rank)) and beat.update == number for rank in everyone), 60)

    def watcher(self, options: WatchConfig = WATCH) -> Watcher:
        return Watcher(self.run, options, range(len(self.processes)), attempt=0)

    def alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def assert_hang(ranks: Ranks, culprit: int | None, kind: str, *says: str) -> None:
    """One verdict, evidence of every rank in both rounds, and all ranks ended."""
    folder = ranks.run / "hangs" / "1"
    first_line = (folder / "verdict.txt").read_text().splitlines()[0]
    for words in says:
        assert words in first_line
    document = json.loads((folder / "verdict.json").read_text())
    assert (document["kind"], document["ends"]) == (kind, True)
    assert document["ranks"] == ([] if culprit is None else [culprit])
    assert "update 6 has taken" in json.loads((folder / "alarm.json").read_text())["sentence"]
    for rank in range(len(ranks.processes)):
        evidence = (folder / f"rank{rank}.txt").read_text()
        assert evidence.startswith("== first sample, ")
        assert re.search(rf"== second sample, \d+\.\d s later: rank {rank}, phase forward", evidence)
    wait_for(lambda: not ranks.alive())
    assert verdict.latest(ranks.run, 0) == first_line


def test_stopped_rank_is_named_with_its_frame(ranks: Ranks) -> None:
    ranks.start("sleep", "sleep")
    ranks.wait_for_update(6)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    assert ranks.watcher().watch_all() == watch.HUNG
    assert_hang(ranks, 1, "missing_rank", "rank 1 on ", " is stopped by a signal or a debugger in <module> (rank.py:")
    assert "frames by py-spy" in (ranks.run / "hangs" / "1" / "rank1.txt").read_text()
    assert "do_signal_stop" in (ranks.run / "hangs" / "1" / "rank1.txt").read_text()


def test_rank_that_holds_the_interpreter_lock_in_c_is_named(ranks: Ranks) -> None:
    ranks.start("sleep", "lock")
    ranks.wait_for_update(6)
    assert ranks.watcher().watch_all() == watch.HUNG
    assert_hang(ranks, 1, "gil_held", "holds the interpreter lock", "in hold_lock (rank.py:")
    evidence = (ranks.run / "hangs" / "1" / "rank1.txt").read_text()
    assert "C  sleep" in evidence
    assert "holds the interpreter lock" in evidence


def test_rank_that_waits_in_a_collective_is_never_the_culprit(ranks: Ranks) -> None:
    ranks.start("gather", "gather")
    ranks.wait_for_update(6)
    assert ranks.watcher().watch_all() == watch.HUNG
    waits = "1 rank waits in all_reduce (rank.py:"
    assert_hang(ranks, 1, "missing_rank", "rank 1 on ", " is in skip_it (rank.py:", waits)


def test_where_nobody_can_be_named_nobody_is(ranks: Ranks) -> None:
    ranks.start("sleep", "sleep")
    ranks.wait_for_update(6)
    assert ranks.watcher().watch_all() == watch.HUNG
    assert_hang(ranks, None, "unknown", "cannot tell: ")


@pytest.mark.parametrize("what", ["slow first update", "slow save"])
def test_r46_slow_phases_have_their_own_deadlines(ranks: Ranks, what: str) -> None:
    ranks.start(what, what)
    assert ranks.watcher().watch_all() == 0
    assert not (ranks.run / "hangs").exists()


@pytest.mark.parametrize("what", ["slow first update", "slow save"])
def test_r46_fails_without_fix(ranks: Ranks, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One deadline for all phases takes a slow checkpoint and a compiling first update for a hang."""
    monkeypatch.setattr("slurm.deadlines.deadline", lambda beat, options, durations: options.floor_s)
    ranks.start(what, what)
    assert ranks.watcher().watch_all() == watch.HUNG


def test_rank_that_moves_is_left_alone(ranks: Ranks) -> None:
    ranks.start("moves", "sleep")
    ranks.wait_for_update(6)
    watcher = ranks.watcher()
    wait_for(lambda: watcher.poll() or (ranks.run / "hangs" / "1" / "verdict.txt").exists())
    first_line = (ranks.run / "hangs" / "1" / "verdict.txt").read_text().splitlines()[0]
    assert first_line.startswith("not a hang yet: rank 0 on ")
    assert ranks.alive() == [0, 1]
    assert verdict.latest(ranks.run, 0) is None
    assert watcher.patience == 2


AUTOTUNER = """
import time
def run(until):
    while time.monotonic() < until:
        pass
"""


def start_autotuning(ranks: Ranks) -> None:
    """A rank that searches kernels in a warm update, where the others wait for it."""
    path = ranks.run / "triton" / "runtime" / "autotuner.py"
    path.parent.mkdir(parents=True)
    path.write_text(AUTOTUNER)
    ranks.start("autotune")
    ranks.wait_for_update(6)


def test_r40_autotuning_is_left_alone(ranks: Ranks) -> None:
    start_autotuning(ranks)
    assert ranks.watcher().watch_all() == 0
    said = [(folder / "verdict.txt").read_text() for folder in verdict.folders(ranks.run)]
    assert said
    assert all(one.startswith("not a hang: autotuning: rank 0 on ") for one in said)


def test_r40_fails_without_fix(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time alone decides, a good run is ended."""
    always = verdict.Verdict(0, "unknown", True, (), "late")
    monkeypatch.setattr(alarms, "conclude", lambda *_: always)
    start_autotuning(ranks)
    assert ranks.watcher().watch_all() == watch.HUNG


def test_r32_updates_that_stall_and_go_on_are_left_alone(ranks: Ranks) -> None:
    """Every update stalls, longer than the floor: that is what is usual in this run."""
    ranks.start("stalls", "stalls")
    assert ranks.watcher().watch_all() == 0
    assert not (ranks.run / "hangs").exists()


def test_r32_fails_without_fix(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same deadline for every run, and no second look, end one that is slow, not dead."""
    monkeypatch.setattr(alarms, "conclude", lambda *_: verdict.Verdict(0, "unknown", True, (), "late"))
    monkeypatch.setattr("slurm.deadlines.deadline", lambda beat, options, durations: options.floor_s)
    ranks.start("stalls", "stalls")
    assert ranks.watcher().watch_all() == watch.HUNG


def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)


def refusing_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[stacks.Thread, ...]:
        error = b"Error: Failed to suspend process\n\nCaused by:\n    EPERM: Operation not permitted"
        raise subprocess.CalledProcessError(1, "py-spy", stderr=error)

    monkeypatch.setattr(stacks, "_py_spy", refuse)


@pytest.mark.parametrize("hide", [without_py_spy, refusing_py_spy])
def test_where_tracing_is_refused_the_rank_answers_itself(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, hide: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Also one that holds the lock or waits in C: faulthandler's handler is C and needs no lock."""
    hide(monkeypatch)
    ranks.start("sleep", "lock")
    ranks.wait_for_update(6)
    assert ranks.watcher().watch_all() == watch.HUNG
    for rank, function in enumerate(("<module>", "hold_lock")):
        evidence = (ranks.run / "hangs" / "1" / f"rank{rank}.txt").read_text()
        assert "frames by faulthandler" in evidence
        assert function in evidence
        assert "py-spy is not installed" in evidence or "EPERM: Operation not permitted" in evidence


def test_stopped_rank_without_tracing_shows_what_the_kernel_says(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    without_py_spy(monkeypatch)
    ranks.start("sleep", "sleep")
    ranks.wait_for_update(6)
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    assert ranks.watcher().watch_all() == watch.HUNG
    assert_hang(ranks, 0, "missing_rank", "rank 0 on ", " is stopped by a signal")
    evidence = (ranks.run / "hangs" / "1" / "rank0.txt").read_text()
    assert "a stopped process answers no signal" in evidence


def test_others_are_ended_when_one_ends_badly(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 0.3)
    ranks.start("sleep", "raise")
    assert ranks.watcher().watch_all() == watch.RANK_ENDED
    wait_for(lambda: not ranks.alive())
    assert [end.exception for end in heartbeat.read_ends(ranks.run)] == ["ValueError"]
    assert not (ranks.run / "hangs").exists()
    (seen,) = evidence.read(evidence.of_end(ranks.run, 0))
    waiting, raised = seen.ranks
    assert raised.end is not None
    assert raised.end.message == "planted"
    assert all(one.stack is not None and one.stack.threads for one in waiting.rounds)


def test_rank_killed_with_its_parent_is_written_down(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 0.1)
    monkeypatch.setattr(watch, "SETTLE_S", 0.3)
    ranks.start("sleep", "sleep")
    ranks.wait_for_update(6)
    ranks.processes[1].kill()
    ranks.processes[1].wait()
    assert ranks.watcher().watch_all() == watch.RANK_ENDED
    (end,) = heartbeat.read_ends(ranks.run)
    assert (end.rank, end.signal, end.update, end.pid) == (1, "SIGKILL", 6, ranks.processes[1].pid)


def test_rank_that_never_speaks(ranks: Ranks) -> None:
    ranks.start("sleep")
    watcher = Watcher(ranks.run, WatchConfig(poll_s=0.1, load_s=0.5), range(2), attempt=0)
    ranks.wait_for_update(6)
    assert watcher.watch_all() == watch.HUNG
    assert (ranks.run / "hangs" / "1" / "verdict.txt").read_text().startswith("rank 1 gave no heartbeat in")
    wait_for(lambda: not ranks.alive())


def node_watchers(ranks: Ranks) -> list[Watcher]:
    """A watcher for each rank, as if each were a node of its own."""
    return [Watcher(ranks.run, WATCH, [node], attempt=0, node=node) for node in range(len(ranks.processes))]


def watch_in_threads(watchers: list[Watcher]) -> list[Future[int]]:
    pool = ThreadPoolExecutor(len(watchers))
    return [pool.submit(watcher.watch_all) for watcher in watchers]


def test_watchers_of_several_nodes_take_one_set_of_evidence(ranks: Ranks) -> None:
    ranks.start("gather", "gather")
    ranks.wait_for_update(6)
    ended = watch_in_threads(node_watchers(ranks))
    assert [one.result(60) for one in ended] == [watch.HUNG] * 2
    assert [path.name for path in (ranks.run / "hangs").iterdir()] == ["1"]
    assert_hang(ranks, 1, "missing_rank", " is in skip_it (rank.py:", "2 of 2 ranks answered")
    nodes = evidence.read(ranks.run / "hangs" / "1")
    assert [[rank.rank for rank in node.ranks] for node in nodes] == [[0], [1]]


def test_a_verdict_is_reached_when_the_watcher_that_noticed_is_gone(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "WAIT_S", 2.0)
    ranks.start("sleep", "lock")
    ranks.wait_for_update(6)
    alarm = Alarm(0, "elsewhere", 0, 5.0, 1.0, "update 6 has taken 5 s", time.time(), node=0)
    assert alarms.raise_one(ranks.run, alarm) == ranks.run / "hangs" / "1"
    (ended,) = watch_in_threads(node_watchers(ranks)[1:])
    assert ended.result(60) == watch.HUNG
    found = verdict.load(ranks.run / "hangs" / "1")
    assert found is not None
    assert (found.kind, found.ranks) == ("gil_held", (1,))
    assert any("rank 0: no evidence from its node" in reason for reason in found.missing)


def test_a_node_that_gives_nothing_is_waited_for_from_the_alarm_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this node's own looking takes does not come on top."""
    look = collect.collect

    def slow(scene: collect.Scene) -> Node:
        time.sleep(6)
        return look(scene)

    monkeypatch.setattr(collect, "collect", slow)
    monkeypatch.setattr(alarms, "WAIT_S", 8.0)
    ranks.start("lock", "sleep")
    ranks.wait_for_update(6)
    (ended,) = watch_in_threads(node_watchers(ranks)[:1])
    assert ended.result(60) == watch.HUNG
    folder = ranks.run / "hangs" / "1"
    alarm = evidence.read_alarm(folder)
    assert alarm is not None
    took = (folder / verdict.JSON).stat().st_mtime - alarm.time
    assert 8 <= took < 13, "own looking and the whole wait would be 14 s at least"
    found = verdict.load(folder)
    assert found is not None
    assert any("rank 1: no evidence from its node" in reason for reason in found.missing)


def test_asking_how_a_job_stands_ends_nothing(ranks: Ranks) -> None:
    ranks.start("lock", "sleep")
    ranks.wait_for_update(6)
    watcher = ranks.watcher(dataclasses.replace(WATCH, floor_s=600))
    (ended,) = watch_in_threads([watcher])
    folder = watch.look_now(ranks.run)
    found = verdict.load(folder)
    assert found is not None
    assert (folder.name, found.kind, found.ranks, found.ends) == ("1", "gil_held", (0,), False)
    assert ranks.alive() == [0, 1]
    assert not ended.done()
    assert verdict.latest(ranks.run, 0) is None
    assert watch.look_now(ranks.run).name == "2"
    for process in ranks.processes:
        process.kill()
        process.wait()
    assert ended.result(60) == watch.RANK_ENDED


def test_asking_of_a_job_that_does_not_run(ranks: Ranks) -> None:
    with pytest.raises(UserError, match="no watcher of this run answered"):
        alarms.look_now(ranks.run, answer_s=0.5)
    assert list((ranks.run / "hangs").iterdir()) == []


@pytest.mark.parametrize("fixed", [True, False])
def test_a_watcher_that_was_not_let_run_accuses_nobody(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    monkeypatch.setattr(deadlines, "LAG_S", 0.1 if fixed else 99.0)
    ranks.start("sleep")
    ranks.wait_for_update(6)
    watcher = ranks.watcher()
    for _ in range(6):
        assert watcher.poll() is None or not fixed
        time.sleep(0.5)
    assert (ranks.run / "hangs").exists() != fixed
    if fixed:  # once it is let run it does
        assert watcher.watch_all() == watch.HUNG


def unsaved(ranks: Ranks, within_s: float) -> Watcher:
    """Ranks that were asked to save and do not hear it, long before any deadline, and their watcher, who heard it."""
    ranks.start("sleep", "lock")
    ranks.wait_for_update(6)
    options = dataclasses.replace(WATCH, floor_s=600)
    watcher = Watcher(ranks.run, options, range(2), attempt=0, save_within_s=within_s)
    watcher.hear(signal.SIGUSR2, None)
    return watcher


def test_ranks_that_are_asked_to_save_and_do_not_are_ended(ranks: Ranks) -> None:
    watcher = unsaved(ranks, 0.5)
    assert watcher.poll() is None, "they are given their time"
    assert watcher.watch_all() == watch.HUNG
    wait_for(lambda: not ranks.alive())
    said = verdict.latest(ranks.run, 0)
    assert said is not None
    assert "asked to save 0 s ago, rank 0 is still in phase forward of update 6" in said


def test_ranks_that_do_not_save_run_on_without_fix(ranks: Ranks) -> None:
    """Neither a deadline nor an end is there to act on."""
    watcher = unsaved(ranks, math.inf)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert watcher.poll() is None
        time.sleep(0.1)
    assert ranks.alive() == [0, 1]


def test_r44_a_process_beside_the_ranks_acts(ranks: Ranks) -> None:
    """USR2's handler cannot run while the rank waits in C; the watcher needs no handler."""
    ranks.start("lock", "lock")
    ranks.wait_for_update(6)
    os.kill(ranks.processes[0].pid, signal.SIGUSR1)  # faulthandler's, in C: answers, and changes nothing
    assert ranks.watcher().watch_all() == watch.HUNG
    wait_for(lambda: not ranks.alive())


def test_r44_fails_without_fix(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAIT_IN_C, tmp_path])
    try:
        wait_for((tmp_path / "ready").exists)
        process.send_signal(signal.SIGUSR2)
        time.sleep(1)
        assert not (tmp_path / "saved").exists()
    finally:
        process.kill()
        process.wait()


def test_watcher_of_an_earlier_life_stops(ranks: Ranks) -> None:
    ranks.start("sleep")
    (ranks.run / "attempt").write_text("1")
    with pytest.raises(StaleAttempt):
        ranks.watcher().watch_all()


def test_pid_that_belongs_to_somebody_else_is_not_touched(tmp_path: Path) -> None:
    heartbeat.Heartbeat(tmp_path, 0, 1)
    (beat,) = heartbeat.read(tmp_path)
    assert watch.is_alive(beat)
    before = psutil.Process().create_time() - 10
    assert not watch.is_alive(dataclasses.replace(beat, time=before))


def test_ranks_of_a_local_run_do_not_start_without_a_watcher(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    first, then = "from __future__ import annotations\n", 'if __name__ == "__main__":\n    raise SystemExit(1)\n'
    path = clone / "slurm" / "watch.py"
    path.write_text(path.read_text().replace(first, first + then))
    done = submit(clone, "watch.start_s=2")
    assert done.returncode == 1
    assert re.fullmatch(r"failed: rank \d on \S+ was not started: no watcher .*", done.stderr.splitlines()[-1])
    assert not (run_folder(clone / "runs") / "seen").exists()
