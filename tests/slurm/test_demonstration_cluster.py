"""The whole demonstration as a job of two nodes with two ranks each, to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import runfolder
from tests.slurm.jobs import Job
from tests.slurm.lab import Lab
from tests.standins import ROOT

FOUR_RANKS = ("slurm.nodes=2", "slurm.tasks_per_node=2", "pack.packs_per_update=4", "slurm.mem=5500M")
PATIENT = ("slurm.time=1:00:00", "watch.floor_s=120", "watch.first_update_s=300", "preflight.min_free_memory_gib=1")


@pytest.mark.slow
def test_the_demonstration_on_two_nodes_learns_to_read_digits(lab: Lab, tmp_path: Path) -> None:
    """The same 100 updates as on one machine; each has a pack for each of four ranks, so the data is seen twice as
    often."""
    data = tmp_path / "digits"
    own = (f"run_root={tmp_path}/runs", f"data.train={data}/train.jsonl", f"data.heldout={data}/heldout.jsonl")
    command = [sys.executable, "-m", "slurm.submit", "configs/digits.yaml", "cluster=slurm", "--json"]
    place = {name: lab.environment[name] for name in ("PATH", "SLURM_CONF")}
    environment = {name: text for name, text in os.environ.items() if name != "PREFIX_TRAIN_ATTEMPT"} | place
    submitted = subprocess.run(
        [*command, *FOUR_RANKS, *PATIENT, *own], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert submitted.returncode == 0, submitted.stderr
    document = json.loads(submitted.stdout.splitlines()[-1])
    job = Job(lab, document["job"], Path(document["run"]))
    job.end("COMPLETED", seconds=2400)
    assert job.status == 0
    assert job.last_line.startswith("complete: answered exactly")

    result = runfolder.read_json(job.run / runfolder.RESULT)
    print(f"accuracy {result['accuracy']:.3f} after {result['updates']} updates on {result['ranks']} ranks")
    assert result["accuracy"] >= 0.9
    assert result["ranks"] == 4
    assert result["updates"] == 100
    assert result["verify"]["passed"]
    report = (job.run / runfolder.PREFLIGHT / "0" / "report.txt").read_text()
    assert report.startswith("PASS: 2 node(s)")
    assert "4 ranks on 2 node(s): right values over gloo" in report
