"""The gate on a real cluster: nodes one by one, then their ranks together, and the job's last word."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from configs import runfolder
from prefix_train import heartbeat
from tests.slurm import jobs
from tests.slurm.jobs import Job
from tests.slurm.lab import Lab, wait_for
from tests.standins import ROOT, make_clone

SHORT = ("preflight.deadline_s=60", "preflight.start_s=20", "preflight.collective_deadline_s=90")
TINY = (*SHORT, "watch.first_update_s=120", "train.updates=2", "evaluate.every=0", "verify.examples=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("source") / "clone")


def plant(lab: Lab, folder: Path, code: str) -> str:
    """Code that every Python program of node2 runs first; the setup line that has them find it."""
    module = folder / "sitecustomize.py"
    module.write_text(f"import os, sys, time\nIN = ' '.join(sys.orig_argv)\n{code}\n")
    lab.inside("mkdir", "-p", "/var/tmp/planted", node="node2")
    lab.inside("cp", module, "/var/tmp/planted/sitecustomize.py", node="node2")
    return "slurm.setup=['export PYTHONPATH=/var/tmp/planted']"


def said(job: Job) -> str:
    """The very last line of the job's log, once nothing of the job is left to write more."""
    job.wait(lambda: job.lab.state(job.id) not in ("COMPLETING", "RUNNING"), "the job's end", 60)
    time.sleep(1)
    return (job.run / "logs" / f"job-{job.id}.log").read_text().splitlines()[-1]


def never_trained(job: Job) -> bool:
    return heartbeat.read(job.run) == [] and not list((job.run / "submitit").glob("*_log.out"))


def report(job: Job) -> dict[str, object]:
    document: dict[str, object] = runfolder.read_json(job.run / "preflight" / "0" / "report.json")
    return document


@pytest.mark.slow
def test_nodes_pass_then_ranks_pass_then_training_runs(lab: Lab, folder: Path) -> None:
    job = jobs.start_real(lab, folder, *TINY, ranks=2)
    job.end("COMPLETED")
    assert said(job).startswith("complete")
    assert report(job)["passed"]
    text = (job.run / "preflight" / "0" / "report.txt").read_text()
    assert "4 ranks on 2 node(s): right values over gloo, pairs of nodes reach" in text
    answers = [runfolder.read_json(job.run / f"preflight/0/ranks/rank{rank}.json") for rank in range(4)]
    assert [answer["node"] for answer in answers] == ["node1", "node1", "node2", "node2"]
    assert all(answer["steps"][-1] == {"stage": "done"} for answer in answers)
    assert job.log.count("PASS: 2 node(s)") == 1


@pytest.mark.slow
def test_rank_that_never_joins_is_named_its_peers_are_not_and_training_never_starts(
    lab: Lab, folder: Path, tmp_path: Path
) -> None:
    code = "if 'preflight collectives' in IN and os.environ['SLURM_LOCALID'] == '1': time.sleep(900)"
    job = jobs.start_real(lab, folder, *TINY, plant(lab, tmp_path, code), "slurm.nodelist=node[1-2]", ranks=2)
    job.end("FAILED")
    assert job.status == 78
    assert never_trained(job)
    assert report(job)["bad_nodes"] == ["node2"]
    last = said(job)
    assert last.startswith("failed: preflight: FAIL node2: silent: collective.join: rank 3 never joined")
    assert "3 of 4 ranks waited for it" in last
    assert "training did not start" in last
    drain = next(line for line in job.log.splitlines() if line.startswith("scontrol update NodeName=node2"))
    assert drain in (job.run / "preflight" / "0" / "report.txt").read_text().splitlines()
    lab.run("bash", "-c", drain)
    node = lab.run("scontrol", "show", "node", "node2").stdout
    assert "DRAIN" in node
    assert "Reason=collective.join: rank 3 never joined the collectives" in node


@contextmanager
def wedged(lab: Lab) -> Iterator[None]:
    """slurmd of node2 answers, but no step ever starts there: what slurmd starts for it hangs, as on a dead disk."""
    program = shutil.which("slurmstepd")
    lab.inside(
        "sh", "-c", "printf '#!/bin/sh\\nexec sleep 987\\n' >/var/tmp/stepd; chmod +x /var/tmp/stepd", node="node2"
    )
    lab.inside("mount", "--bind", "/var/tmp/stepd", program, node="node2")
    try:
        yield
    finally:
        lab.inside("umount", program, node="node2")
        for pid in lab.processes("node2", "sleep 987"):
            lab.inside("kill", "-9", pid, node="node2")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "never starts"])
def test_node_silent_in_preflight_is_named_in_time(lab: Lab, folder: Path, tmp_path: Path, how: str) -> None:
    """Its check hangs, or there is no check because its step does not start."""
    setup = plant(lab, tmp_path, f"if {how == 'hangs'} and 'preflight run' in IN: time.sleep(900)")
    with wedged(lab) if how == "never starts" else nullcontext():
        job = jobs.start_real(lab, folder, *TINY, setup, "slurm.nodelist=node[1-2]", ranks=2)
        lab.wait_state(job.id, "RUNNING")
        began = time.monotonic()
        job.wait(lambda: "training did not start" in job.log, "the gate's word", 240)
        assert time.monotonic() - began < 200
    job.end("FAILED")
    assert job.status == 78
    assert report(job)["bad_nodes"] == ["node2"]
    assert said(job).startswith("failed: preflight: FAIL node2: silent: node.answer: gave no answer in time")
    assert never_trained(job)
    assert len(job.lives) == 1


@pytest.mark.slow
def test_the_last_line_of_the_log_says_how_the_job_ended(lab: Lab, clone: Path) -> None:
    """After a rank that failed the watchers fail too, and srun tells of them late: elsewhere."""
    failed = jobs.start(lab, clone, "model.build.do=raise", ranks=2)
    complete = jobs.start(lab, clone, ranks=2)
    failed.end("FAILED")
    complete.end("COMPLETED")
    assert said(failed).startswith("failed: rank 1 on node1 raised RuntimeError in update 2")
    assert said(complete).startswith("complete: answered exactly 93.0%")
    assert "slurm.watch" not in failed.log
    watchers = (failed.run / "logs" / f"watch-{failed.id}.log").read_text()
    assert "srun: error: node1" in watchers


@pytest.mark.slow
def test_run_whose_job_is_in_the_queue_is_not_submitted_again(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "slurm.extra.hold=")
    command = [sys.executable, "-m", "slurm.submit", "--json", str(job.run)]

    def again() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=60)

    wait_for(lambda: lab.state(job.id) == "PENDING", "the held job")
    done = again()
    assert done.returncode == 2
    assert f"its job {job.id} is PENDING" in done.stderr
    assert f"scancel {job.id}" in done.stderr
    lab.run("scancel", job.id)
    wait_for(lambda: lab.state(job.id) == "CANCELLED", "the cancelled job")
    done = again()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["job"] != job.id
