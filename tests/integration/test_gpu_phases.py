"""What is measured on GPUs runs on a CPU at tiny sizes: gates, figures, and what is left out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefix_train import attention
from prefix_train.bench_pack import Case
from tests.bench import gpu_pieces, gpu_rivals, gpu_sharded

TINY = str(Path(__file__).parents[1] / "data" / "tiny-geometry.yaml")


def run(module: Any, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench", str(out), *arguments])
        status = module.main()
    return status, json.loads(out.read_text())


def test_parts_of_a_layer(tmp_path: Path) -> None:
    status, found = run(gpu_pieces, tmp_path / "out.json", "--tiny")
    assert status == 0
    assert found.keys() == gpu_pieces.PARTS.keys()
    assert all(part["passed"] for name in found for key, part in found[name].items() if key.startswith("gate"))
    for name in ("star, merged", "many, merged"):
        assert found["attention"][name]["median_s"] > found["attention"][name]["forward_s"] > 0
    assert found["adapter"]["counted"]["median_s"] > 0


def test_no_figure_without_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_merge", lambda *_: None)
    status, found = run(gpu_pieces, tmp_path / "out.json", "--tiny", "--only", "attention")
    assert status == 1
    assert not found["attention"]["gate, merged"]["passed"]
    assert "star, merged" not in found["attention"]
    assert "star, dense" in found["attention"]


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    _, found = run(gpu_pieces, tmp_path / "out.json", "--tiny", "--only", "recurrence", "--seconds", "0")
    assert found["recurrence"]["star"] == {"left_out": "no time"}


def test_rivals(tmp_path: Path) -> None:
    status, found = run(gpu_rivals, tmp_path / "out.json", "--tiny", "--geometry", TINY)
    assert status == 0
    assert found["layer"]["gate, ours"]["passed"]
    assert found["layer"]["ours"]["median_s"] > 0
    assert {"transformers", "ours, packed", "ours, standalone"} <= found["standalone"].keys()


def test_other_gradients_are_no_gate(tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(4)}
    save_file(tensors, one)
    for change, passed in ((0.0, True), (1e-7, True), (1e-3, False)):
        save_file({**tensors, "b": tensors["b"] * (1 + change)}, two)
        assert gpu_sharded.compare(one, two)["passed"] == passed
    save_file({"a": tensors["a"] / 2, "b": tensors["b"] / 2}, two)  # a mean over ranks instead of the sum
    assert gpu_sharded.compare(one, two)["worst"] == pytest.approx(0.5)


@pytest.mark.slow
def test_one_pack_on_each_rank_and_on_with_fewer(tmp_path: Path) -> None:
    case = Case(TINY, 60, 3, 11, layers=4, warm=1, overrides=("memory.offload=auto",))
    began = time.monotonic()
    also = {2: ("memory.offload=none",)}
    found = gpu_sharded.Bench(case, (37, 3, 9), tmp_path / "out.json", 200.0, (1, 2), also).measure()
    assert found["gate"]["2"]["passed"], found
    assert found["resume"]["1"]["passed"], found
    assert "ranks 2 -> 1" in found["resume on 1"]["ranks"][0]["resumed"]
    assert [rank["positions"] for rank in found["speed on 2"]["ranks"]] == [93, 93]
    assert found["per_gpu_over_1"].keys() == {"2"}
    assert found["per_gpu_over_1"]["2"] > 0
    assert (tmp_path / "out.md").read_text().count("\n| ") == 3
    assert time.monotonic() - began < 200
    assert json.loads((tmp_path / "out.json").read_text()) == found
