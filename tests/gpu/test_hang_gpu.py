"""A rank that is missing from a real NCCL collective under FSDP2: flight recorder, readings and verdict."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefix_train import heartbeat
from slurm import collect, flight, gpus, verdict
from slurm.collect import Scene
from slurm.evidence import Alarm
from tests.gpu import hang_rank
from tests.standins import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    variables = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **flight.environment(tmp_path / "nccl", 20001)}
    command = [sys.executable, hang_rank.__file__, str(tmp_path)]
    started = [subprocess.Popen([*command, str(rank)], env={**os.environ, **variables}) for rank in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_r30_a_rank_that_left_is_named(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    idle = gpus.read()
    computing = gpus.Computing()
    wait_for(lambda: [beat.completed >= 3 for beat in heartbeat.read(tmp_path)] == [True, True], 120)
    computing.take()
    wait_for((tmp_path / "left").exists, 120)
    time.sleep(5)
    scene = Scene(tmp_path, 0, heartbeat.read(tmp_path)[0].host, 0, (0, 1), 2.0, time.monotonic() - 60, True)
    node = collect.collect(Scene(**{**scene.__dict__, "computing": computing.readings}))
    for name, readings in (("idle", [one.gpu for one in idle]), ("computing", node.computing), ("hung", node.gpus[1])):
        print(name, *readings, sep="\n  ")
    waits, left = node.ranks
    print(*waits.collectives[-3:], *left.collectives[-3:], *waits.missing, *left.missing, sep="\n")
    assert (waits.collectives[-1].kind, waits.collectives[-1].state) == ("all_gather", "called")
    assert waits.collectives[-1].number > left.collectives[-1].number
    assert waits.collectives[-1].where.endswith(tuple(f"hang_rank.py:{line}" for line in range(1, 99)))
    assert waits.collectives[-1].phase == "forward"
    assert all(one.state == "done" for one in left.collectives)
    assert not any("flight recorder" in reason for reason in waits.missing)
    alarm = Alarm(0, node.host, 0, 40.0, 30.0, "update 41 has taken 40 s", node.time, node=0)
    found = verdict.judge([node], alarm, 2, [node.host])
    print(found.text())
    assert (found.kind, found.ranks) == ("missing_rank", (1,))
    assert "hang_rank.py" in found.sentence
