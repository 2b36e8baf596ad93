"""`prefix-train export` and `check` on a real disk without room, whichever file it is that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.schema import ModelConfig
from prefix_train.exports.run import export_run
from tests import exported, full_disk

KIB = 1024


def refused(found: list[dict[str, Any]]) -> list[str]:
    """The one line of each time but the last, which ended well."""
    *times, last = found
    assert last["status"] == 0, last["printed"]
    lines = []
    for one in times:
        assert one["status"] == 2, one["printed"]
        assert "Traceback" not in one["printed"]
        (line,) = [line for line in one["printed"].splitlines() if line.startswith("error: ")]
        lines.append(line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("merged", [(), ("--merged",)])
@pytest.mark.parametrize("trainable", ["adapter", "all"])
def test_an_export_is_one_line_and_leaves_nothing(tmp_path: Path, trainable: str, merged: tuple[str, ...]) -> None:
    """The weights are the first that do not fit; of a whole model then its configuration, tokenizer and template."""
    source, disk = exported.model_folder(tmp_path / "source"), tmp_path / "disk"
    run = exported.run_of(tmp_path / "run", ModelConfig(path=str(source), dtype="float32"), "", trainable)
    found = full_disk.times(disk, range(8 * KIB, 400 * KIB, 12 * KIB), "export", run, "--out", disk / "out", *merged)
    assert [one["left"] for one in found] == [[]] * (len(found) - 1) + [["out"]]
    lines = refused(found)
    assert len(lines) >= (12 if merged or trainable == "all" else 1)
    said = f"error: {disk / 'out'} could not be written, and nothing was left of it: [Errno 28] No space left on device"
    assert {line[: len(said)] for line in lines} == {said}


@pytest.mark.slow
def test_a_check_is_one_line_and_no_verdict_on_the_export(tmp_path: Path) -> None:
    """First there is no room for the examples, then for what the process of others' code alone makes of them."""
    model = ModelConfig(path=str(exported.text_folder(tmp_path / "source")), dtype="float32")
    run = exported.run_of(tmp_path / "run", model, data=exported.heldout(tmp_path / "data.jsonl"))
    folder, disk = export_run(run).folder, tmp_path / "disk"
    found = full_disk.times(disk, [4 * KIB, 64 * KIB, 1024 * KIB], "check", folder, "--examples", "3")
    assert [one["left"] for one in found] == [[]] * 3
    here, there = refused(found)
    for line in (here, there):
        assert line.startswith(f"error: {disk}/")
        assert line.endswith("; name another folder for such files: TMPDIR=FOLDER")
    assert "could not be written: [Errno 28] No space left on device" in here
    assert "could not be written: Error while serializing: I/O error: No space left on device" in there
