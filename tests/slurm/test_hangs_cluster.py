"""Faults planted into the real trainer on a real cluster, from the fault to what follows of it, with the times between.

The fault is planted from outside, by a sitecustomize.py on the path of the job's first life. The times that are printed
run from the culprit's last heartbeat, or its end, to the alarm and to the verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs import runfolder
from slurm import diagnose, evidence, life, verdict
from tests.slurm import jobs
from tests.slurm.jobs import Job
from tests.slurm.lab import Lab
from tests.standins import ROOT, make_clone

pytestmark = pytest.mark.slow

OPTIONS = ("watch.floor_s=8", "watch.first_update_s=120", "watch.sample_gap_s=1", "preflight.enabled=false",
           "train.updates=12", "verify.examples=0", "evaluate.every=0")  # fmt: skip
PLANT = """
import os, sys

if "slurm.rank" in sys.orig_argv and os.environ.get("PREFIX_TRAIN_ATTEMPT") == "0":
    if os.environ.get("RANK") == os.environ["HANGS_RANK"]:
        from pathlib import Path

        import hangs_faults

        hangs_faults.strike(os.environ["HANGS_FAULT"], Path(sys.orig_argv[-1]))
"""


@dataclass(frozen=True)
class Fault:
    """A fault of rank 1, which runs on the job's second node; how the first life ends, and what follows."""

    name: str
    kind: str
    cause: str
    again: bool
    nodes: int = 2


FAULTS = [
    Fault("sleep in backward", "missing_rank", "hang", True),
    Fault("one pack less", "missing_rank", "hang", True, nodes=3),  # of two ranks nobody can say which is wrong
    Fault("lock in a thread", "gil_held", "hang", True),
    Fault("kernel in forward", "io_blocked", "hang", True),
    Fault("data sleeps", "data_starved", "hang", True),
    Fault("killed", "rank_died", "died", True),
    Fault("other size", "size_mismatch", "died", True, nodes=3),
    Fault("raise in backward", "rank_raised", "raised", False),
]


@pytest.fixture
def plants(tmp_path: Path) -> Path:
    (tmp_path / "hangs_faults.py").write_text((ROOT / "tests" / "hangs" / "faults.py").read_text())
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_from_a_planted_fault_to_what_follows(
    lab: Lab, plants: Path, tmp_path: Path, fault: Fault, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = f'slurm.setup=["export PYTHONPATH={plants} HANGS_RANK=1 HANGS_FAULT=\\"{fault.name}\\""]'
    job = jobs.start_real(lab, tmp_path, *OPTIONS, setup, f"pack.packs_per_update={2 * fault.nodes}", nodes=fault.nodes)
    job.end("COMPLETED" if fault.again else "FAILED", 280)
    first, *later = job.lives
    found, times = said(job, fault)
    with capsys.disabled():
        print(f"\n{fault.name}: {times}\n  {found.sentence}")
    assert (found.kind, found.ranks) == (fault.kind, (1,)), found.text()
    assert (first.cause, first.update >= 6) == (fault.cause, True), job.log
    assert (f"SIGABRT in update {first.update}; {found.sentence}" in job.log) == (fault.kind == "size_mismatch"), (
        job.log
    )
    if fault.again:
        assert first.excluded == (first.nodes[1],)
        assert [one.cause for one in later] == ["complete"]
        assert first.nodes[1] not in later[0].nodes
    else:
        assert not later
        assert "begins again" not in job.log


def test_looking_at_a_live_job_ends_nothing(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("model.build.do=slow", "train.updates=60", "watch.sample_gap_s=3")  # long enough to see an update go by
    job = jobs.start(lab, make_clone(tmp_path / "clone"), *options)
    job.wait_update(3)
    command = [sys.executable, "-m", "slurm.diagnose", str(job.run), "--now", "--json"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=150)
    with capsys.disabled():
        print(f"\n--now answered in {time.monotonic() - began:.1f} s")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    found = document["verdict"]
    assert (document["hang"], found["kind"], found["ranks"], found["ends"]) == (1, "slow_alive", [], False), done.stdout
    assert found["sentence"].startswith("not a hang: rank ")
    assert "2 of 2 ranks answered" in found["sentence"]
    assert {node.host for node in evidence.read(job.run / runfolder.HANGS / "1")} == {*job.lives[0].nodes}
    job.wait_update(life.reached(job.run, 0) + 3)
    job.end("COMPLETED")
    assert [one.cause for one in job.lives] == ["complete"]


def said(job: Job, fault: Fault) -> tuple[verdict.Verdict, str]:
    """What is said of the first life, and how long it took."""
    folder = job.run / runfolder.HANGS / "1"
    if folder.exists():
        nodes, alarm = evidence.read(folder), evidence.read_alarm(folder)
        assert alarm is not None
        beats = [
            seen.beat for node in nodes for rank in node.ranks if rank.rank == 1 for seen in rank.rounds if seen.beat
        ]
        judged = (folder / verdict.JSON).stat().st_mtime
        times = f"noticed after {alarm.time - beats[0].time:.1f} s, verdict {judged - alarm.time:.1f} s later"
        found = diagnose.judge_folder(job.run, folder)
    else:
        end = evidence.of_end(job.run, 0)
        nodes = evidence.read(end)
        began = next(rank.end.time for node in nodes for rank in node.ranks if rank.rank == 1 and rank.end)
        times = f"looked at {min(node.time for node in nodes) - began:.1f} s after the rank's end"
        found = diagnose.of_life(job.run, 0)
    assert found is not None
    return found, times
