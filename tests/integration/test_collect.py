"""slurm/collect.py beside real processes: what a node's evidence holds, whatever state its ranks are in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import runfolder
from prefix_train import heartbeat
from slurm import collect, evidence, flight, stacks
from slurm.collect import Scene
from slurm.evidence import Collective, Node, Process, Rank
from tests.standins import wait_for
from tests.unit.test_evidence import answer_the_pipe, program

ROOT = Path(__file__).parents[2]

RANK = """
import ctypes, os, subprocess, sys, threading, time
from pathlib import Path

from prefix_train import heartbeat
from slurm import rank as slurm_rank

run, rank, world, what = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
slurm_rank.allow_watching(run, rank)
beat = heartbeat.Heartbeat(run, rank, world)
beat.phase("forward", 1)
beat.phase("forward", 2)


def wait_in_the_kernel():
    data = open(run / "rank.py")
    ctypes.CDLL(None).vfork()  # the parent waits in the kernel until the child ends, and no signal reaches it
    time.sleep(120)


def collectives():
    import torch
    import torch.distributed as dist
    from prefix_train.recorder import Recorder

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{run}/meet", rank=rank, world_size=world)
    with Recorder(run, rank, lambda: beat.standing):
        for update in range(1, 4):
            beat.phase("forward", update, 0)
            dist.all_reduce(torch.ones(2, 3))
        if rank == world - 1:
            leave()
        dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))


def leave():
    (run / "left").touch()
    time.sleep(120)


if what == "kernel":
    wait_in_the_kernel()
elif what == "collectives":
    collectives()
elif what == "children":
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(120)
else:
    time.sleep(120)
"""


class Ranks:
    """Stand-in ranks of one run folder, all on this node."""

    def __init__(self, run: Path) -> None:
        self.run, self.processes = run, list[subprocess.Popen[bytes]]()
        (run / "rank.py").write_text(textwrap.dedent(RANK))

    def start(self, *whats: str, **variables: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        for rank, what in enumerate(whats):
            command = [sys.executable, self.run / "rank.py", self.run, str(rank), str(len(whats)), what]
            self.processes.append(subprocess.Popen(command, env=env, process_group=0))
        wait_for(lambda: [beat.update for beat in heartbeat.read(self.run)] == [2] * len(whats), 60)

    def collect(self, **options: object) -> Node:
        beats = heartbeat.read(self.run)
        scene = Scene(self.run, 0, beats[0].host, 0, tuple(range(len(beats))), 0.5, time.monotonic() - 60)
        return collect.collect(Scene(**{**scene.__dict__, **options}))  # type: ignore[arg-type]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = Ranks(tmp_path)
    yield found
    for process in found.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def functions(rank: Rank) -> list[set[str]]:
    """Names of the functions of all frames, per round."""
    threads = [seen.stack.threads if seen.stack else () for seen in rank.rounds]
    return [{frame.name for thread in found for frame in thread.frames} for found in threads]


def test_ranks_in_a_collective_and_elsewhere(ranks: Ranks) -> None:
    ranks.start("collectives", "collectives")
    wait_for((ranks.run / "left").exists, 60)
    wait_for(lambda: ranks.collect(gap_s=0.1).ranks[0].collectives[-1].kind == "all_gather", 30)
    node = ranks.collect()
    waits, left = node.ranks
    assert [(one.number, one.kind, one.state) for one in waits.collectives] == [
        *((number, "all_reduce", "done") for number in range(3)),
        (3, "all_gather", "called"),
    ]
    last = waits.collectives[-1]
    assert (last.sizes, last.dtype, last.phase, last.update, last.pack) == (((4,),), "float32", "forward", 3, 0)
    assert last.where.startswith(f"{ranks.run}/rank.py:")
    assert last.started < node.clock
    assert [one.state for one in left.collectives] == ["done"] * 3
    assert all("collectives" in found for found in functions(waits))
    assert all("leave" in found for found in functions(left))
    assert not waits.missing
    assert 0.4 < node.gap_s < 60
    evidence.write(ranks.run / "hangs" / "1", node, ranks.run)
    assert evidence.read(ranks.run / "hangs" / "1") == (node,)


def test_a_killed_ranks_last_collectives_and_end_are_there(ranks: Ranks) -> None:
    ranks.start("collectives", "collectives")
    wait_for((ranks.run / "left").exists, 60)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    ranks.processes[1].wait()
    heartbeat.ended(ranks.run, 1, 2, signal=signal.SIGKILL, pid=ranks.processes[1].pid)
    _, dead = ranks.collect().ranks
    assert dead.end is not None
    assert dead.end.signal == "SIGKILL"
    assert [one.state for one in dead.collectives] == ["done"] * 3
    assert [seen.process.state for seen in dead.rounds if seen.process] == ["", ""]
    assert [seen.stack for seen in dead.rounds] == [None, None]


def test_a_rank_that_waits_in_the_kernel_shows_its_files(ranks: Ranks) -> None:
    ranks.start("kernel")
    wait_for(lambda: stacks.proc_state(ranks.processes[0].pid) == "D")
    begin = time.monotonic()
    (rank,) = ranks.collect().ranks
    assert time.monotonic() - begin < 60
    for seen in rank.rounds:
        assert seen.process is not None
        assert seen.process.state == "D"
        assert seen.process.wchan
        files = [file.rpartition(" [") for file in seen.process.blocked_files]
        kind = next(kind for name, _, kind in files if name == f"{ranks.run}/rank.py")
        assert kind in {"ext4]", "overlay]", "xfs]", "tmpfs]", "btrfs]"}
        assert seen.stack is not None
        assert seen.stack.state == "D"
    assert all("wait_in_the_kernel" in found for found in functions(rank))


def test_a_stopped_rank_and_one_with_a_busy_child(ranks: Ranks) -> None:
    ranks.start("sleep", "children")
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    wait_for(lambda: stacks.proc_state(ranks.processes[0].pid) == "T")
    stopped, parent = ranks.collect().ranks
    assert [seen.stack.stopped for seen in stopped.rounds if seen.stack] == [True, True]
    (before,), (after,) = (seen.children for seen in parent.rounds)
    assert before.pid == after.pid
    assert after.cpu_s > before.cpu_s


def test_where_tracing_and_symbols_are_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    ranks.start("sleep")
    (rank,) = ranks.collect().ranks
    assert [seen.stack.method for seen in rank.rounds if seen.stack] == ["faulthandler"] * 2
    before, after = (seen.process for seen in rank.rounds)
    assert before is not None
    assert after is not None
    assert after.written_bytes == before.written_bytes, "what the looking made it write does not count as its own"


def test_looking_that_hangs_costs_its_deadline_only(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "ROUND_S", 0.5)
    monkeypatch.setattr(stacks, "sample", lambda pid, answer: time.sleep(600))
    ranks.start("sleep")
    program(ranks.run, "nvidia-smi", "sleep 600", monkeypatch)
    begin = time.monotonic()
    node = ranks.collect(gpus=True)
    assert time.monotonic() - begin < 60
    (rank,) = node.ranks
    assert any(note.startswith("stacks: no answer in ") for note in rank.missing)
    assert any(note.startswith("GPU readings: no answer in ") for note in node.missing)
    assert "ring of collectives: there is none" in rank.missing
    assert [seen.process.state for seen in rank.rounds if seen.process] == ["S", "S"]


def test_gpus_and_the_flight_recorder(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"index": "1", "uuid": "GPU-bb", "utilization.gpu": "0", "power.draw": "119", "clocks.sm": "1980"}
    program(ranks.run, "nvidia-smi", "echo 0, GPU-aa, 9, 0, 90, 300; echo 1, GPU-bb, 100, 0, 130, 1980", monkeypatch)
    variables = flight.environment(ranks.run / "nccl", 20001)
    thread = answer_the_pipe(variables, 0)
    ranks.start("sleep", CUDA_VISIBLE_DEVICES="1", **variables)
    host = heartbeat.read(ranks.run)[0].host
    findings = [{"check": "device.gpus", "facts": {"gpus": [gpu]}}]
    runfolder.write_json(ranks.run / "preflight" / "0" / f"{host}.json", {"findings": findings})
    node = ranks.collect(gpus=True)
    thread.join()
    assert [[one.power_w for one in reading] for reading in node.gpus] == [[130.0], [130.0]]
    assert [one.power_w for one in node.idle] == [119.0]
    assert [one.state for one in node.ranks[0].collectives] == ["done", "called"]


def test_a_dump_is_asked_for_once_all_bytes_are_counted(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that writes its dump would else look like one that moves, which is left alone."""
    order: list[str] = []
    look = collect.processes.look

    def counted(pid: int) -> Process:
        order.append("count")
        return look(pid)

    def asked(*_: object) -> tuple[Collective, ...]:
        order.append("ask")
        return ()

    monkeypatch.setattr(collect.processes, "look", counted)
    monkeypatch.setattr(flight, "ask", asked)
    ranks.start("sleep")
    ranks.collect(gpus=True)
    assert order == ["count", "count", "ask"]


def test_ranks_that_gave_no_heartbeat_or_are_elsewhere(ranks: Ranks) -> None:
    ranks.start("sleep", "sleep")
    node = ranks.collect(ranks=(0, 1, 2))
    assert "no heartbeat" in node.ranks[2].missing
    node = ranks.collect(host="elsewhere")
    assert all("not on elsewhere" in rank.missing[0] for rank in node.ranks)


def test_what_slurm_says(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.start("sleep")
    assert ranks.collect().scheduler == ""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    program(ranks.run, "squeue", "echo '77|RUNNING|None'", monkeypatch)
    program(ranks.run, "sinfo", "echo 'node node1: allocated (none)'", monkeypatch)
    assert ranks.collect().scheduler == "job 77: RUNNING (None); node node1: allocated (none)"
    program(ranks.run, "squeue", "echo slurm_load_jobs error: Unable to contact >&2; exit 1", monkeypatch)
    program(ranks.run, "sacct", "exit 1", monkeypatch)
    assert "Unable to contact" in ranks.collect().scheduler
