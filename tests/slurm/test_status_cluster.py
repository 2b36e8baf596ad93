"""`python -m slurm.status` beside a real job, with the accounting and without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import jobs
from tests.slurm.jobs import Job
from tests.slurm.lab import Lab, wait_for
from tests.standins import ROOT, make_clone


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("source") / "clone")


def status(job: Job) -> tuple[str, dict[str, Any]]:
    """What a person and what a program reads."""
    command = [sys.executable, "-m", "slurm.status", str(job.run), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=job.lab.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    text, _, document = done.stdout.rstrip("\n").rpartition("\n")
    return text, json.loads(document)


@pytest.mark.slow
def test_status_through_a_jobs_life(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=12")
    job.wait_update(2)
    text, document = status(job)
    (one,) = document["runs"]
    assert document["silent"] == []
    assert one["slurm"]["state"] == "RUNNING"
    assert (one["heard"], one["ranks"], one["updates"], one["doubts"]) == (2, 2, 12, [])
    assert f"job {job.id}: RUNNING" in text
    lab.run("scancel", job.id)
    job.end("CANCELLED")
    wait_for(lambda: "CANCELLED" in status(job)[0], "the cancelled state")


@pytest.mark.slow
def test_status_without_accounting(lab: Lab, clone: Path) -> None:
    """slurmdbd is down: what the controller remembers is enough, and what it has forgotten is said to be not known."""
    job = jobs.start(lab, clone)
    job.end("COMPLETED")
    lab.daemon_stop("slurmdbd")
    try:
        text, document = status(job)
        assert f"job {job.id}: COMPLETED" in text
        assert document["silent"] == []
        (job.run / "job").write_text("999999\n")
        text, document = status(job)
        assert "job 999999: not known" in text
        assert "end      complete" in text
        assert any(silence.startswith("sacct") for silence in document["silent"])
    finally:
        lab.daemon_start("slurmdbd")
        wait_for(lambda: lab.run("sacct", check=False).returncode == 0, "the accounting")
