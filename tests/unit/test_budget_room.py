"""What `prefix-train budget` compares with: what was said, this machine's GPU or memory, or an assumption that it says;
and packs of other sizes than were planned."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from configs.schema import Config, ModelConfig, SlurmConfig
from prefix_train import budget_choices, budget_room, cli, smi
from prefix_train.budget import GIB, UNPLANNED, predict
from tests import chats
from tests.chats import row
from tests.tiny_vision import BUILD

ON_GPUS = Config(slurm=SlurmConfig(gpus_per_node=2))


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A machine whose nvidia-smi does this."""
    program = folder / "bin" / smi.SMI
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_what_was_said_counts_also_on_a_cpu() -> None:
    for config in (Config(), ON_GPUS):
        room = budget_room.find(config, 0.03, 2)
        assert (room.gpu, room.host, room.each) == (30_000_000, 2 * 10**9, "GPU")
        assert room.said == "a GPU of 0.03 GB (--gpu-gb)"


def test_the_smallest_gpu_that_is_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, "printf '40960\\n81920\\n'")
    room = budget_room.find(ON_GPUS, None, None)
    assert room.gpu == 40_960 << 20
    assert room.said == "a GPU of 42.95 GB (this machine's; --gpu-gb: another)"


@pytest.mark.parametrize("body", ["exit 9", "echo '[Unknown Error]'", "sleep 60"])
def test_without_a_gpu_that_answers_80_gb_are_assumed_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    driver(tmp_path, monkeypatch, body)
    monkeypatch.setattr(smi, "DEADLINE_S", 0.5)
    room = budget_room.find(ON_GPUS, None, None)
    assert (room.gpu, room.each) == (80 * 10**9, "GPU")
    assert "(assumed, none is here; --gpu-gb: another)" in room.said


def test_ranks_on_a_cpu_have_equal_parts_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, "echo 81920")
    config = Config(slurm=SlurmConfig(tasks_per_node=4))
    room = budget_room.find(config, None, None)
    assert room.gpu == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    assert room.each == "rank"
    assert "this machine's memory for 4 ranks" in room.said
    assert "for 1 rank;" in budget_room.find(replace(config, cluster="debug"), None, None).said


def test_a_small_machine_holds_small_ranks_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA takes is kept free of a GPU alone: four such parts would be all of these 16 GB."""
    pages = 16 * 10**9 // os.sysconf("SC_PAGE_SIZE")
    there = {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": os.sysconf("SC_PAGE_SIZE")}
    monkeypatch.setattr(os, "sysconf", there.__getitem__)
    config = Config(model=ModelConfig(build=BUILD), slurm=SlurmConfig(tasks_per_node=4))
    found, room = predict(config), budget_room.find(config, None, None)
    assert found.total("gpu") < GIB
    verdict = budget_choices.judge(config, found, [], room)
    assert verdict.fits
    assert verdict.largest > config.pack.max_positions
    *_, fits, _ = budget_choices.describe([], found, room, verdict).splitlines()
    assert fits.endswith(" needed and 512 MiB kept free of 4 GB (this machine's memory for 4 ranks; --gpu-gb: a GPU's)")
    assert budget_choices.summary([], room, verdict)["gpu_bytes_kept_free"] == GIB // 2
    assert budget_room.find(config, 80, None).reserve == budget_room.find(ON_GPUS, None, None).reserve == 4 * GIB


def budget(capsys: pytest.CaptureFixture[str], config: Path, *changes: str) -> tuple[str, dict[str, Any]]:
    cli.budget_command(config, list(changes), as_json=True)
    text, _, document = capsys.readouterr().out.strip().rpartition("\n")
    return text, json.loads(document)


def test_packs_of_other_sizes_are_tried_without_another_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats.write(tmp_path / "d.jsonl", [row(f"Which is {n}?", system="Look twice. " * 20) for n in range(90)])
    config = {
        "run_root": str(tmp_path / "runs"),
        "cluster": "local",
        "model": {"build": dict(BUILD)},
        "data": {"train": str(tmp_path / "d.jsonl")},
        "pack": {"max_positions": 400, "packs_per_update": 2},
        "train": {"epochs": 1},
    }
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(config))
    text, found = budget(capsys, path)
    assert text.startswith(f"{UNPLANNED}\na pack of 400 positions: 1 segment, ")
    assert (found["planned"], found["shape"]["segments"]) == (False, 1)
    cli.plan_command(path)
    capsys.readouterr()
    sizes = {}
    for size in (400, 800, 1 << 16):
        text, found = budget(capsys, path, f"pack.max_positions={size}")
        assert found["planned"]
        sizes[size] = found["shape"]["positions"]
        assert sizes[size] <= size
        assert text.splitlines()[-2].startswith("fits: ")
        assert found["largest_pack"] > size
    assert sizes[400] < sizes[800]
    assert budget(capsys, path)[1]["shape"]["positions"] == sizes[400]
    cli.plan_command(path, ["pack.max_positions=800"])
    capsys.readouterr()
    assert budget(capsys, path)[1]["shape"]["positions"] == sizes[400], "a plan of one size breaks no other"
    with pytest.raises(UserError, match=r"d\.jsonl:\d+ has \d+ tokens, and 20 are accepted: raise pack\.max_positions"):
        budget(capsys, path, "pack.max_positions=20")
