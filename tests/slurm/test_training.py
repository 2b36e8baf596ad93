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


def plant(lab: Lab, folder: Path) -> str:
    """Another version of a package on node2's own disk; the setup line that puts the place on every node's path."""
    module = folder / "__init__.py"
    module.write_text('__version__ = "0.1.0"\n')
    lab.inside("mkdir", "-p", "/var/tmp/planted/peft", node="node2")
    lab.inside("cp", module, "/var/tmp/planted/peft/__init__.py", node="node2")
    return "export PYTHONPATH=/var/tmp/planted"


@pytest.mark.slow
def test_training_on_two_nodes_of_two_ranks(lab: Lab, folder: Path) -> None:
    job = jobs.start_real(lab, folder, *SLOW_START, ranks=2)
    job.end("COMPLETED")
    assert job.status == 0
    assert job.last_line.startswith("complete")
    result = runfolder.read_json(job.run / runfolder.RESULT)
    assert result["ranks"] == 4
    assert result["verify"]["passed"]
    assert list(jobs.losses(job.run)) == list(range(1, 21))
    report = (job.run / "preflight" / "0" / "report.txt").read_text()
    assert report.startswith("PASS: 2 node(s)")


def test_r42_gate_stops_the_job_before_training_and_names_node_and_reason(
    lab: Lab, folder: Path, tmp_path: Path
) -> None:
    job = jobs.start_real(lab, folder, f"slurm.setup=['{plant(lab, tmp_path)}']")
    job.end("FAILED")
    assert job.status == 78
    assert job.last_line.startswith("failed: preflight: FAIL node2: fail: import.peft: peft")
    assert "0.1.0" in job.last_line
    assert "training did not start" in job.last_line
    report = (job.run / "preflight" / "0" / "report.txt").read_text().splitlines()
    assert report[0] in job.last_line
    assert not list((job.run / runfolder.HEARTBEAT).iterdir())
    assert not list((job.run / "submitit").glob("*_log.out"))


@pytest.mark.slow
def test_unfit_node_is_left_out_once_where_that_is_asked_for(lab: Lab, folder: Path, tmp_path: Path) -> None:
    job = jobs.start_real(
        lab,
        folder,
        *SLOW_START,
        f"slurm.setup=['{plant(lab, tmp_path)}']",
        "preflight.on_bad_node=exclude",
        "train.updates=2",
    )
    job.end("COMPLETED")
    first, second = job.lives
    assert (first.cause, first.nodes, first.excluded) == ("gate", ("node1", "node2"), ("node2",))
    assert (second.cause, len(second.nodes)) == ("complete", 2)
    assert "node2" not in second.nodes
    assert "begins again once, without node2" in job.log


@pytest.mark.slow
def test_stopped_in_the_middle_and_begun_again_it_has_the_losses_of_an_unbroken_run(lab: Lab, folder: Path) -> None:
    """The warning before the time limit, sent by hand: here the run goes on to its end."""
    common = (*SLOW_START, "preflight.enabled=false", "train.updates=40")
    broken = jobs.start_real(lab, folder, *common)
    unbroken = jobs.start_real(lab, folder, *common, "slurm.exclude=node1")
    broken.wait_update(5)
    lab.run("scancel", "--signal=USR2", broken.id)
    for job in (broken, unbroken):
        job.end("COMPLETED")
    first, second = broken.lives
    assert first.cause == "stopped"
    assert 5 <= first.update < 40
    assert second.cause == "complete"
    assert len(unbroken.lives) == 1
    assert jobs.losses(broken.run) == jobs.losses(unbroken.run)
    hashes = [runfolder.read_json(job.run / runfolder.RESULT)["hash_after"] for job in (broken, unbroken)]
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_time_limit_has_the_job_saved_and_begun_again_with_the_same_losses(lab: Lab, folder: Path) -> None:
    """Slurm's own warning, half a minute to a minute and a half after the start; a job without a limit beside it."""
    common = (*SLOW_START, "preflight.enabled=false", "train.updates=20000", "evaluate.every=0")
    limited = jobs.start_real(lab, folder, *common, "slurm.time=2", "slurm.signal_delay_s=30")
    unbroken = jobs.start_real(lab, folder, *common, "slurm.time=60", "slurm.exclude=node1")
    limited.wait_life(1)
    first = limited.lives[0]
    assert first.cause == "stopped"
    assert first.update > 5
    assert "stopped as asked, with a checkpoint; begins again from update" in limited.log
    assert "CANCELLED AT" not in limited.log.partition("stopped as asked")[0]
    last = first.update + 20
    limited.wait_update(last, attempt=1)
    unbroken.wait_update(last)
    for job in (limited, unbroken):
        lab.run("scancel", job.id)
        job.end("CANCELLED")
    losses, expected = jobs.losses(limited.run), jobs.losses(unbroken.run)
    assert [losses[update] for update in range(1, last)] == [expected[update] for update in range(1, last)]
