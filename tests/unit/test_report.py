"""Metrics that survive a resume, progress in two forms."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs import runfolder
from prefix_train import report

DONE = report.Update(
    update=1,
    epoch=0.5,
    loss=0.75,
    target_loss=6.0,
    example_loss=1.5,
    lr=1e-3,
    grad_norm=2.0,
    packs=2,
    examples=2,
    targets=12,
    positions=100,
    logical_tokens=700,
    seconds=0.5,
    memory_bytes=2**30,
)


def update(number: int, **changes: Any) -> report.Update:
    return replace(DONE, update=number, **{"loss": 1.0 / number, **changes})


def reporter(run: Path, resumed: int = 0, stream: io.StringIO | None = None, **options: Any) -> report.Reporter:
    return report.Reporter(run, 0, 5, resumed, stream=stream or io.StringIO(), **options)


def numbers(run: Path) -> list[int]:
    return [line["update"] for line in report.read_metrics(run)]


def test_figures_are_means_and_rates() -> None:
    line = report.figures(DONE)
    assert (line["loss_per_target"], line["loss_per_example"]) == (0.5, 0.75)
    assert (line["positions_per_s"], line["logical_tokens_per_s"]) == (200, 1400)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "target_loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"update 1: {name.replace('target_loss', 'loss_per_target')} is (nan|inf)"):
        report.figures(replace(DONE, **{name: value}))


def test_a_resumed_run_has_the_metrics_of_an_unbroken_one(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    with reporter(unbroken) as told:
        for number in range(1, 6):
            told.updated(update(number))
            if number == 2:
                told.evaluated(2, {"loss": 0.25})
    with reporter(broken) as told:
        for number in range(1, 5):
            told.updated(update(number))
            if number == 2:
                told.evaluated(2, {"loss": 0.25})
    with (broken / runfolder.METRICS).open("a") as stream:
        stream.write('{"update": 5, "lo')
    with reporter(broken, resumed=2) as told:
        assert numbers(broken) == [1, 2, 2]
        for number in range(3, 6):
            told.updated(update(number))
    assert (broken / runfolder.METRICS).read_bytes() == (unbroken / runfolder.METRICS).read_bytes()


def test_a_run_without_checkpoint_begins_again(tmp_path: Path) -> None:
    with reporter(tmp_path) as told:
        told.updated(update(1))
    with reporter(tmp_path):
        assert numbers(tmp_path) == []


@pytest.mark.parametrize("kept", [[1, 3], [1, 1, 2, 3], [2, 3], [1, 2], []])
def test_metrics_with_a_gap_are_refused(tmp_path: Path, kept: list[int]) -> None:
    text = "".join(json.dumps({"update": number, "loss": 1.0}) + "\n" for number in kept)
    runfolder.write_text(tmp_path / runfolder.METRICS, text)
    wrong = {(1, 3): 2, (1, 1, 2, 3): 2, (2, 3): 1, (1, 2): 3, (): 1}[tuple(kept)]
    with pytest.raises(ValueError, match=f"update {wrong} of 3 that the checkpoint holds is missing or double"):
        report.MetricsFile(tmp_path, 3)
    assert (tmp_path / runfolder.METRICS).read_text() == text


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    runfolder.write_text(tmp_path / runfolder.METRICS, '{"update": 1}\n{"update"\n{"update": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        report.read_metrics(tmp_path)
    runfolder.write_text(tmp_path / runfolder.METRICS, '{"update": true}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: an object with an update"):
        report.read_metrics(tmp_path)


def test_an_earlier_life_adds_nothing(tmp_path: Path) -> None:
    metrics = report.MetricsFile(tmp_path, 0)
    (tmp_path / runfolder.ATTEMPT).write_text("1")
    with pytest.raises(runfolder.StaleAttempt):
        metrics.append({"update": 1, "loss": 1.0})
    assert numbers(tmp_path) == []


def test_losses_are_written_to_the_bit(tmp_path: Path) -> None:
    loss = 0.1 + 2**-54
    with reporter(tmp_path) as told:
        told.updated(update(1, loss=loss))
    assert report.read_metrics(tmp_path)[0]["loss"] == loss


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with report.Reporter(tmp_path, 1, 5) as told:
        told.updated(update(1))
        told.evaluated(1, {"loss": 1.0})
        told.say("hello")
        assert told.finish() == {}
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_tensorboard_files(tmp_path: Path) -> None:
    with reporter(tmp_path) as told:
        told.updated(update(1))
        told.updated(update(2))
    # TensorBoard orders a run's files by name, which begins with the second they were made in.
    time.sleep(1.1)
    with reporter(tmp_path, resumed=1) as told:
        told.updated(update(2, loss=0.125))
    board = EventAccumulator(str(tmp_path / runfolder.TENSORBOARD))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1.0), (2, 0.125)]


def test_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    with reporter(tmp_path, stream=stream, every_s=3600) as told:
        for number in range(1, 6):
            told.updated(update(number))
        told.evaluated(5, {"loss": 0.5})
        done = told.finish()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["update 1/5", "update 5/5"]
    assert "loss 1.0000  lr 1.00e-03  grad 2  200 positions/s  1,400 logical tokens/s  1.00 GiB" in lines[0]
    assert lines[2] == "update 5: heldout_loss 0.5"
    assert lines[3].startswith(
        "5 updates in 0:00:02: loss 1.0000 -> 0.2000; 500 positions for 3,500 logical tokens (7.0"
    )
    assert str(tmp_path / "metrics.jsonl") in lines[4]
    assert (done["updates"], done["positions"], done["loss_first"], done["loss_last"]) == (5, 500, 1.0, 0.2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with reporter(tmp_path, stream=stream) as told:
        told.updated(update(1))
        told.say("[not markup]")
        told.updated(update(5))
    assert "[not markup]" in stream.getvalue()
    *_, last = stream.getvalue().split("update ")
    assert "5/5" in last, "all of it fits 80 columns"
    assert "loss 0.2000 1,400 logical tokens/s" in last
    assert "0:00:00" in last


def test_memory_is_this_process_and_not_the_one_that_started_it() -> None:
    code = """
import subprocess, sys, torch
from prefix_train.report import memory_bytes
before = memory_bytes(torch.device("cpu"))
print(before, flush=True)
if len(sys.argv) == 1:
    big = torch.ones(2**27)
    print(memory_bytes(torch.device("cpu")) - before, flush=True)
    subprocess.run([sys.executable, "-c", sys.argv[0], "child"], check=True)
"""
    code = code.replace("sys.argv[0]", "open('/proc/self/cmdline').read().split(chr(0))[2]")
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    own, grown, child = map(int, printed.split())
    assert 0.9 * 2**29 < grown < 1.2 * 2**29
    assert child < 1.2 * own
