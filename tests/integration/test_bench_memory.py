"""Two updates and the save, moment by moment, on a CPU; with a stand-in for the device's allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from prefix_train import bench_memory, budget
from prefix_train.bench_memory import Peaks, record
from prefix_train.bench_pack import Case
from prefix_train.cli import app

CPU = torch.device("cpu")
TINY = str(Path(__file__).parents[1] / "data" / "tiny-geometry.yaml")
CASE = Case(TINY, 60, 3, 11, overrides=("memory.offload=auto",))
PHASES = ["forward", "backward", "reduce", "optimizer"]


class Allocator:
    """Has, in GiB, so much at each moment: as given, then nothing more."""

    def __init__(self, predicted: float, share: float) -> None:
        self.most = predicted * share
        self.asked = 0

    def bytes(self, peaks: Peaks) -> tuple[int, int, int]:
        self.asked += 1
        during = self.most if "backward" in str(peaks._moment) else self.most / 2
        return int(budget.GIB * self.most / 4), int(budget.GIB * during), int(budget.GIB * self.most)


def recorded(monkeypatch: pytest.MonkeyPatch, share: float) -> dict[str, Any]:
    predicted = record(CASE, CPU)["predicted"]["predicted_peak_gib"]
    allocator = Allocator(predicted, share)
    monkeypatch.setattr(Peaks, "_bytes", lambda self: allocator.bytes(self))
    told: list[dict[str, Any]] = []
    found = record(CASE, CPU, tell=lambda one: told.append(json.loads(json.dumps(one))))
    assert allocator.asked
    assert [len(one["moments"]) for one in told] == [4, 8, 9]
    return found


def test_both_updates_and_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, 1.03)
    names = [one["moment"] for one in found["moments"]]
    assert names == [f"update {number}, {phase}" for number in (1, 2) for phase in PHASES] + ["save"]
    assert found["off"] == pytest.approx(0.03, abs=1e-6)
    assert found["passed"]
    assert found["pinned_gib"] > 0
    assert "update 2, optimizer" in bench_memory.text(found)
    assert "+3.0%, within 5%" in bench_memory.text(found)


def test_a_prediction_that_is_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, 0.9)
    assert not found["passed"]
    assert "NOT within" in bench_memory.text(found)


def test_nothing_is_judged_without_an_allocator() -> None:
    found = record(CASE, CPU)
    assert found["peak_gib"] == 0
    assert "passed" not in found


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    arguments = ["bench", "memory", "--geometry", TINY, "--prefix", "60", "--continuations", "3x11", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "memory.offload=auto"])
    assert done.exit_code == 0, done.output
    assert "update 2, backward" in done.output
    assert len(json.loads(out.read_text())["moments"]) == 9
