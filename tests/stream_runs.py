"""Whole runs of one rank in this process, by either engine, and what they computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs import compose, runfolder
from configs.schema import Config, StreamConfig
from prefix_train import report, train


def resident(config: Config) -> Config:
    return replace(config, engine="sharded", stream=StreamConfig())


def life(folder: Path, config: Config, patch: pytest.MonkeyPatch, attempt: int = 0, stop_after: int = 0) -> int:
    """One life of the run in `folder`, in this process. stop_after: it is asked to stop in that update."""
    if not folder.exists():
        (folder / runfolder.LOGS).mkdir(parents=True)
        runfolder.write_text(folder / runfolder.CONFIG, compose.to_yaml(config))
    runfolder.write_text(folder / runfolder.ATTEMPT, str(attempt))

    class Stop:
        def __init__(self) -> None:
            self.count = 0

        @property
        def asked(self) -> bool:
            self.count += 1
            return self.count == stop_after

    patch.setenv("PREFIX_TRAIN_ATTEMPT", str(attempt))
    patch.setenv("WORLD_SIZE", "1")
    patch.setattr(train, "StopRequest", Stop)
    return train.main(folder)


SAME = ("update", "loss", "target_loss", "grad_norm", "heldout_loss", "positions", "lr")


def computed(run: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in SAME if name in line} for line in report.read_metrics(run)]


def results(run: Path) -> dict[str, Any]:
    found = runfolder.read_json(run / runfolder.RESULT)
    return {name: found[name] for name in ("hash_before", "hash_after", "heldout_loss", "positions", "tensors")}
