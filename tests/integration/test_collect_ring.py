"""prefix_train/recorder.py in real ranks: what is left of their last collectives when they hang, die or differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefix_train import ring
from prefix_train.ring import Record
from tests.standins import wait_for

ROOT = Path(__file__).parents[2]

RANK = """
import ctypes, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from prefix_train.recorder import Recorder

what, run, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{run}/meet", rank=rank, world_size=2)
with Recorder(run, rank, lambda: ("backward", 5, 2)):
    dist.all_reduce(torch.ones(2, 3))
    (run / f"ready{rank}").touch()
    if what == "sharded":
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        model[0].weight.full_tensor()
        (run / f"sharded{rank}").touch()
        ctypes.CDLL(None).sleep(120)
    if rank == 1 and what == "lock":
        ctypes.PyDLL(None).sleep(120)
    if rank == 1 and what == "sizes":
        dist.all_reduce(torch.ones(1))
    if rank == 1 and what == "dies":
        os._exit(3)
    dist.all_reduce(torch.ones(5000))
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of this test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Callable[[str], list[subprocess.Popen[bytes]]]]:
    """Starts two ranks that have one collective behind them."""
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))

    def start(what: str) -> list[subprocess.Popen[bytes]]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        for rank in range(2):
            command = [sys.executable, tmp_path / "rank.py", what, tmp_path, str(rank)]
            started.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
        wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), 60)
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def records(run: Path, rank: int = 0) -> tuple[Record, ...]:
    return ring.read(ring.path_of(run, rank, 0)).records


def last(run: Path, rank: int) -> Record:
    return records(run, rank)[-1]


def test_a_rank_that_holds_the_interpreter_lock_is_read_from_outside_also_when_it_is_killed(
    tmp_path: Path, two
) -> None:
    processes = two("lock")
    wait_for(lambda: last(tmp_path, 0).number == 1)
    assert (last(tmp_path, 0).state, last(tmp_path, 0).sizes) == (ring.CALLED, "5000")
    assert (last(tmp_path, 1).number, last(tmp_path, 1).state) == (0, ring.DONE)
    assert (last(tmp_path, 1).phase, last(tmp_path, 1).update, last(tmp_path, 1).pack) == ("backward", 5, 2)
    before = records(tmp_path, 1)
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    assert records(tmp_path, 1) == before
    assert ring.read(ring.path_of(tmp_path, 1, 0)).pid == processes[1].pid


def test_collectives_of_sharded_modules_are_seen_with_the_callers_line(tmp_path: Path, two) -> None:
    two("sharded")
    wait_for(lambda: all((tmp_path / f"sharded{rank}").exists() for rank in range(2)), 60)
    seen = [records(tmp_path, rank)[1:] for rank in range(2)]
    kinds = [record.kind for record in seen[0]]
    assert kinds == [record.kind for record in seen[1]]
    assert kinds == [*["all_gather"] * (len(kinds) - 3), *["reduce_scatter"] * 2, "all_gather"]
    assert all(record.where.startswith(f"{tmp_path}/rank.py:") for rank in seen for record in rank)
    assert all(record.state == ring.DONE for rank in seen for record in rank)


def test_another_ranks_death_is_an_error_of_the_collective(tmp_path: Path, two) -> None:
    processes = two("dies")
    processes[0].wait(60)
    assert (last(tmp_path, 0).number, last(tmp_path, 0).state) == (1, ring.RAISED)


def test_sizes_that_differ_are_on_record_after_the_abort(tmp_path: Path, two) -> None:
    """gloo ends the rank with the smaller tensor by SIGABRT, in a thread that runs no Python."""
    processes = two("sizes")
    wait_for(lambda: any(process.poll() is not None for process in processes), 60)
    assert {last(tmp_path, rank).sizes for rank in range(2)} == {"1", "5000"}
