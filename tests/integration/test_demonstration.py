"""The whole demonstration, as `make demo` runs it: it must have learned, and equal transformers' own model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from configs import runfolder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demonstration_learns_to_read_digits(tmp_path: Path) -> None:
    data = tmp_path / "digits"
    overrides = [
        f"run_root={tmp_path / 'runs'}",
        f"data.train={data}/train.jsonl",
        f"data.heldout={data}/heldout.jsonl",
    ]
    program = [sys.executable, "-m", "slurm.submit", "configs/digits.yaml", "cluster=local", *overrides]
    ran = subprocess.run(program, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=1800)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])

    assert result["accuracy"] >= 0.9
    assert result["chance"] == 0.1
    assert result["verify"]["passed"]
    assert result["verify"]["examples"] == 64
    assert result["hash_before"] != result["hash_after"]
    assert result["tensors"]["trained"] == result["tensors"]["covered"] > 100
    assert result["logical_tokens"] > 20 * result["positions"]

    run = Path(result["run"])
    assert len((run / runfolder.METRICS).read_text().splitlines()) >= result["updates"] >= 100
    assert list((run / runfolder.TENSORBOARD).glob("events*"))
    assert (run / runfolder.PREFLIGHT / "0" / "report.txt").read_text().startswith("PASS")
    with safe_open(next(Path(result["export"]).glob("*.safetensors")), "pt") as weights:
        assert len(list(weights.keys())) >= result["tensors"]["trained"]
