"""Trackers in a run of two ranks: rank 0 alone tells them, and what stops it stops both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from configs import runfolder
from configs.errors import UserError
from configs.schema import Config, ReportConfig
from prefix_train import dist
from prefix_train.report import Reporter
from tests import lives
from tests.unit.test_report import update

REFUSED = 2


def life(rank: int, run: Path, config: Config) -> None:
    """Two updates of nothing, told to the trackers."""
    with dist.joined(60) as ranks:
        try:
            reporter = ranks.together(lambda: Reporter(run, rank, 2, 0, config))
        except UserError as error:
            (run / f"rank{rank}.txt").write_text(str(error))
            raise SystemExit(REFUSED) from error
        with reporter:
            for number in (1, 2):
                ranks.barrier()
                reporter.updated(update(number))
            reporter.finish()


def statuses(run: Path, tracker: str) -> list[int | None]:
    run.mkdir()
    config = replace(Config(name="demo"), report=ReportConfig(trackers=[tracker], offline=tracker == "mlflow"))
    ranks = lives.start(life, 2, run, config, environment={})
    for rank in ranks:
        rank.join(120)
    found = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return found


def test_rank_0_alone_tells_a_tracker(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    assert statuses(tmp_path / "run", "mlflow") == [0, 0]
    found = runfolder.read_json(tmp_path / "run" / runfolder.TRACKERS)["mlflow"]
    assert (found["taken"], found["failed"]) == (2, 0)


def test_a_missing_package_ends_both_ranks(tmp_path: Path) -> None:
    assert statuses(tmp_path / "run", "aim") == [REFUSED, REFUSED]
    texts = [(tmp_path / "run" / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert "pip install aim" in texts[0]
    assert texts[1] == f"rank 0: {texts[0]}"
