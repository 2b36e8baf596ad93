"""The product itself on a real cluster: preflight, judge, ranks that train, and what Slurm does to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import runfolder
from tests.slurm import jobs
from tests.slurm.lab import Lab

SLOW_START = ("watch.first_update_s=120",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def plant(folder: Path) -> str:
    """Another version of a package; the setup line that puts it on the path of node2 alone."""
    (folder / "peft").mkdir(parents=True, exist_ok=True)
    (folder / "peft" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    return f"[ $(hostname) != node2 ] || export PYTHONPATH={folder}"


@pytest.mark.slow
def test_training_on_two_nodes_of_two_ranks(lab: Lab, folder: Path) -> None:
    job = jobs.start_real(lab, folder, *SLOW_START, ranks=2)
    job.end("COMPLETED")
    assert (job.status, job.last_line) == (0, "complete")
    result = runfolder.read_json(job.run / runfolder.RESULT)
    assert result["ranks"] == 4
    assert result["verify"]["passed"]
    assert list(jobs.losses(job.run)) == list(range(1, 21))
    report = (job.run / "preflight" / "0" / "report.txt").read_text()
    assert report.startswith("PASS: 2 node(s)")
