"""What an update could take at best, and what the driver says of the budget."""

from __future__ import annotations

import os

import pytest
import torch

from configs.errors import UserError
from prefix_train.budget import GIB
from prefix_train.stream import engine, readings
from prefix_train.stream.pace import Pace

GPU = torch.device("cuda", 0)


def test_the_least_time_is_the_longer_of_reading_and_computing() -> None:
    pace = Pace(bytes_per_s=20e9, flops_per_s=500e12, flops=180 * 10**9)
    assert pace.least_s(30 * 10**9, 1024) == pytest.approx(1.5)
    assert pace.least_s(30 * 10**9, 8192) == pytest.approx(180e9 * 8192 / 500e12)
    assert Pace(0.0, 500e12, 180 * 10**9).least_s(10**9, 1000) == pytest.approx(0.36)  # all blocks stay


def test_more_than_the_budget_by_the_driver_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "of_process", lambda device: int(6.11 * GIB))
    with pytest.raises(UserError, match=r"stream.budget_gib is 6, .* uses 6.11 GiB .* lower stream.budget_gib by 0.11"):
        engine.within(6 * GIB, GPU)
    assert engine.within(int(6.2 * GIB), GPU) == {"stream_driver_bytes": int(6.11 * GIB)}


def test_a_driver_that_does_not_tell_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(device: torch.device) -> int:
        raise readings.NoReading("nvidia-smi: no such file")

    monkeypatch.setattr(readings, "of_process", none)
    assert engine.within(GIB, GPU) == {}
    assert "the driver does not say what this process uses: nvidia-smi: no such file" in capsys.readouterr().out


def test_this_process_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = str(os.getpid())
    monkeypatch.setattr(readings, "_ask", lambda query, gpu: [["1", "9000"], [mine, "512"], ["2", "[N/A]"]])
    assert readings.of_process(GPU) == 512 << 20
    monkeypatch.setattr(readings, "_ask", lambda query, gpu: [["77", "640"]])  # its id is another in a container
    assert readings.of_process(GPU) == 640 << 20
    monkeypatch.setattr(readings, "_ask", lambda query, gpu: [["1", "9000"], ["2", "100"]])
    with pytest.raises(readings.NoReading, match="lists 2 processes on GPU 0, and not this one"):
        readings.of_process(GPU)
