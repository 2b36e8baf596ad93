"""How a job ended, from what its ranks left: exit status and the line that says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import runfolder
from configs.errors import UserError
from prefix_train import heartbeat
from slurm import finish, life, verdict


def end(run: Path, number: int, **how: object) -> None:
    heartbeat.ended(run, number, 2, **how)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(life.VARIABLE, raising=False)
    return tmp_path


def test_r47_success_needs_the_result_and_status_zero(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(run, 0, status=0)
    end(run, 1, status=0)
    assert finish.conclude(run, 0)[:2] == (1, "failed: all ranks ended well, but there is no result.json")
    (run / "result.json").write_text("{}")
    assert finish.conclude(run, 0)[:2] == (0, f"complete; {run}/result.json")
    assert finish.conclude(run, 143).status == 143
    end(run, 1, status=3)
    assert finish.conclude(run, 0).status == 3


def test_r47_fails_without_fix(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file that every run has stands for the final result, ranks that made none have a complete run."""
    end(run, 0, status=0)
    end(run, 1, status=0)
    (run / runfolder.PLAN).write_text("{}")
    assert finish.conclude(run, 0).status != 0
    monkeypatch.setattr(runfolder, "RESULT", runfolder.PLAN)
    assert finish.conclude(run, 0)[:2] == (0, f"complete; {run}/{runfolder.PLAN}")


def test_status_is_that_of_the_rank_that_failed_first(run: Path) -> None:
    end(run, 1, signal=9)
    end(run, 0, error=RuntimeError("Connection closed\nby peer"))
    found = finish.conclude(run, 143)
    assert found.status == 137
    assert "rank 1 on" in found.line
    assert "SIGKILL" in found.line


def test_status_of_an_exception_and_of_a_mistake(run: Path) -> None:
    end(run, 0, error=UserError("data.train: bad"))
    found = finish.conclude(run, 0)
    assert found.status == 2
    assert found.line.endswith("data.train: bad")


def test_rank_without_a_word_and_ranks_of_an_earlier_life(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(run, 0, status=0)
    assert finish.conclude(run, 0).line == "failed: rank 1 left no word of how it ended"
    end(run, 1, status=7)
    (run / "attempt").write_text("1")
    (run / "result.json").write_text("{}")
    assert finish.conclude(run, 0).status == 1
    monkeypatch.setenv(life.VARIABLE, "1")
    end(run, 0, status=0)
    end(run, 1, status=0)
    assert finish.conclude(run, 0)[:2] == (0, f"complete; {run}/result.json")


def test_run_that_saved_and_stopped_is_neither_complete_nor_failed(run: Path) -> None:
    end(run, 0, status=runfolder.STOPPED)
    end(run, 1, status=runfolder.STOPPED)
    found = finish.conclude(run, 0)
    assert found.status == runfolder.STOPPED
    assert found.line == f"stopped as asked, with a checkpoint; to go on: python -m slurm.submit {run}"
    end(run, 1, signal=9)
    assert finish.conclude(run, 0).status == 137


def test_complete_says_how_well_it_answers(run: Path) -> None:
    end(run, 0, status=0)
    end(run, 1, status=0)
    (run / "result.json").write_text('{"accuracy": 0.97, "chance": 0.1}')
    assert finish.conclude(run, 0).line == f"complete: answered exactly 97.0% (chance 10%); {run}/result.json"


def test_interrupted_run_says_where_it_is_and_a_failure_stays_one(run: Path) -> None:
    killed = finish.Outcome(137, "failed: rank 0 was ended by SIGKILL", "died", (0,))
    assert finish.interrupted(run, killed, 0) is killed
    go_on = f"to go on: python -m slurm.submit {run}"
    assert finish.interrupted(run, killed, 2)[:2] == (
        130,
        f"interrupted before training; nothing is saved yet; {go_on}",
    )
    heartbeat.Heartbeat(run, 0, 1).phase("forward", 13)
    for name in ("update-000002", "update-000012", ".update-000013.tmp", "update-000014.tmp"):
        (run / "checkpoints" / name).mkdir(parents=True)
    assert finish.interrupted(run, killed, 15)[:2] == (143, f"interrupted in update 13; saved after update 12; {go_on}")
    full = finish.Outcome(1, "failed: rank 0 raised OSError: no space left", "raised")
    assert finish.interrupted(run, full, 2) is full


def test_hang_has_its_own_status(run: Path) -> None:
    end(run, 0, signal=9)
    for number, stuck in (("9", False), ("10", True)):
        found = verdict.Verdict(0, "missing_rank", stuck, (1,), f"rank 1 is stopped {number}")
        verdict.write(run / "hangs" / number, found, run)
    assert finish.conclude(run, 137)[:2] == (79, "stuck: rank 1 is stopped 10")
    verdict.write(run / "hangs" / "11", verdict.Verdict(0, "unknown", True, (), "no rank can be named"), run)
    assert finish.conclude(run, 137)[:2] == (79, "stuck: rank 1 is stopped 10")
    assert verdict.latest(run, 1) is None


def test_gate_has_its_own_status_and_names_the_reason(run: Path) -> None:
    folder = run / "preflight" / "0"
    folder.mkdir(parents=True)
    (folder / "report.txt").write_text("FAIL node3: import.torch\nmore\n")
    found = finish.act_failed(run, "gate", 1)
    assert found.status == 78
    assert "FAIL node3: import.torch" in found.line
    assert finish.act_failed(run, "plan", 2).status == 2
