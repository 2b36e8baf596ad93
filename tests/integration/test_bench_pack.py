"""`prefix-train bench pack` on a CPU with a tiny geometry: the gate, the rows, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import UserError
from prefix_train import attention, bench_gate, bench_pack, bench_rows
from prefix_train.bench_gate import gate
from prefix_train.bench_measure import Watch, measure
from prefix_train.bench_pack import Case, bench, continuations, geometry_file
from prefix_train.bench_rows import gated, ratios

CPU = torch.device("cpu")
TINY = str(Path(__file__).parents[1] / "data" / "tiny-geometry.yaml")
CASE = Case(TINY, 60, 3, 11, warm=1, alone=2, overrides=("memory.offload=auto",))


@pytest.fixture
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gate, "SHAPES", dict.fromkeys(bench_gate.SHAPES, (37, 3, 9)))
    monkeypatch.setattr(bench_gate, "SMALL", {"hidden_size": 32, "vocab_size": 1024})


@pytest.mark.usefixtures("few_examples")
def test_gate_holds_packs_against_transformers_own_model() -> None:
    found = gate(CASE.config(), CPU)
    assert found["passed"], found
    assert found["float32"]["examples"] == found["bfloat16"]["examples"] == 3
    assert "torch reference" in found["float32"]["kernels"]["standalone_deltanet"]
    json.dumps(found, allow_nan=False)


@pytest.mark.usefixtures("few_examples")
def test_gate_fails_where_continuations_do_not_read_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_merge", lambda *_: None)
    found = gate(CASE.config(), CPU)
    assert not found["passed"]
    assert "gradient" in found["float32"]["failed"]


def test_rows_are_whole_updates_of_the_same_examples(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[dict[str, Any]] = []
    packed = measure("packed", CASE, CPU, tell=lambda found: told.append(dict(found)))
    said = capfd.readouterr().err
    alone = measure("standalone", CASE, CPU)
    assert (packed["positions"], packed["examples"]) == (60 + 3 * 11, 3)
    assert (alone["positions"], alone["examples"]) == (2 * 71, 2)
    assert alone["all_s"] == pytest.approx(alone["median_s"] * 3 / 2)
    assert packed["hardware_flops"] > packed["model_flops"] > 0
    (ratio,) = ratios([{"row": "packed", **packed}, {"row": "standalone", **alone}])
    assert ratio["standalone"] == pytest.approx(alone["all_s"] / packed["median_s"])

    assert ["first_s" in part for part in told] == [False, True, True]
    assert ["median_s" in part for part in told] == [False, False, True]
    phases = list(packed["phases_s"])
    assert [phase for phase in phases if phase.startswith("first update")] == [
        f"first update, {name}" for name in ("forward", "backward", "reduce", "optimizer")
    ]
    assert phases[-2:] == ["warm update 1", "one more update, profiled"]
    assert all(f"packed: {phase} ... " in said for phase in phases)
    # A row alone pins what its own packs need.
    assert alone["memory"]["predicted_pinned_gib"] <= packed["memory"]["predicted_pinned_gib"]


def test_a_row_says_how_counted_masks_were_made() -> None:
    case = dataclasses.replace(CASE, overrides=("memory.offload=none", "adapter.masks=counted"))
    assert measure("packed", case, CPU)["kernels"]["adapter_masks"] == "written out"


def test_a_phase_is_said_before_it_is_done(capfd: pytest.CaptureFixture[str]) -> None:
    watch = Watch("packed", CPU)
    with watch.phase("pinning host memory"):
        assert capfd.readouterr().err == "packed: pinning host memory ..."
    assert capfd.readouterr().err.endswith(" s\n")
    watch.in_update("forward", 0)
    assert capfd.readouterr().err == ""  # only the first update's phases are waited for


def test_no_row_without_the_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(row: str, case: Case, told: Any = None) -> dict[str, Any]:
        asked.append(row)
        return {"passed": False}

    monkeypatch.setattr(bench_pack, "_in_a_process", answer)
    with pytest.raises(RuntimeError, match="no figure without the correctness gate"):
        bench(CASE, ("packed",), tmp_path / "out.json")
    assert asked == ["gate"]


def test_a_copy_of_the_gate_alone_holds_for_rows_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(row: str, case: Case, told: Any = None) -> dict[str, Any]:
        asked.append(row)
        return {"passed": True} if row == "gate" else {"case": {}, "median_s": 1.0, "model_tflops": 1.0}

    monkeypatch.setattr(bench_pack, "_in_a_process", answer)
    found = bench(CASE, ("gate",), tmp_path / "gate.json")
    assert found["rows"] == []
    assert bench_rows.text(found) == "the gate has passed"
    shutil.copy(tmp_path / "gate.json", tmp_path / "pack.json")
    assert len(bench(CASE, ("packed",), tmp_path / "pack.json")["rows"]) == 1
    assert asked == ["gate", "packed"]


def test_a_row_that_is_measured_again_replaces_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = iter([3.0, 2.0, 5.0])

    def answer(row: str, case: Case, told: Any = None) -> dict[str, Any]:
        if row == "gate":
            return {"passed": True}
        return {"case": {"prefix": case.prefix}, "median_s": next(times), "model_tflops": 1.0}

    monkeypatch.setattr(bench_pack, "_in_a_process", answer)
    out = tmp_path / "out.json"
    bench(CASE, ("packed",), out)
    bench(CASE, ("packed",), out)
    found = bench(dataclasses.replace(CASE, prefix=61), ("packed",), out)
    assert [(row["case"]["prefix"], row["median_s"]) for row in found["rows"]] == [(60, 2.0), (61, 5.0)]


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="neither a file nor one of qwen3"):
        geometry_file("qwen9")
    with pytest.raises(UserError, match="80x1000"):
        continuations("80*1000")
    assert continuations("80x1000") == (80, 1000)
    assert Case("qwen3.6-27b", 64000, 80, 1000, layers=4).config().model.build["num_hidden_layers"] == 4


@pytest.mark.parametrize("text", ['{"a": [1', "[1, 2]", '{"rows": 3, "gate": {}}', '{"gate": {"passed": true}}'])
def test_a_file_of_something_else_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setattr(bench_pack, "_in_a_process", lambda *_: pytest.fail("measured"))
    out = tmp_path / "out.json"
    out.write_text(text)
    with pytest.raises(UserError, match="give another file"):
        bench(CASE, ("packed",), out)
    assert out.read_text() == text


def test_no_place_and_no_gpu_are_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_pack, "_in_a_process", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        bench(CASE, ("packed",), tmp_path / "file" / "out.json")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="measured on a GPU"):
            bench(Case("qwen3.6-27b", 64000, 80, 1000), ("packed",), tmp_path / "out.json")


def test_a_gate_belongs_to_its_geometry_and_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(row: str, case: Case, told: Any = None) -> dict[str, Any]:
        asked.append(row)
        return {"passed": True, "case": {"overrides": case.overrides}, "median_s": 1.0, "model_tflops": 1.0}

    monkeypatch.setattr(bench_pack, "_in_a_process", answer)
    bench(CASE, ("packed",), tmp_path / "out.json")
    bench(CASE, ("flex",), tmp_path / "out.json")
    first = dataclasses.replace(CASE, overrides=("memory.offload=2",))
    bench(first, ("packed",), tmp_path / "out.json")
    assert asked == ["gate", "packed", "flex", "packed"]  # where inputs wait says nothing of kernels
    other = dataclasses.replace(CASE, overrides=("memory.tile_rows=0",))
    bench(other, ("packed",), tmp_path / "out.json")
    assert asked[4:] == ["gate", "packed"]


def test_what_a_gate_holds_for() -> None:
    mine = gated(TINY, CASE.config())
    assert mine == gated(TINY, dataclasses.replace(CASE, layers=2, prefix=9).config())
    for other in ("model.attention=dense", "memory.keep_middle=auto"):
        assert mine != gated(TINY, dataclasses.replace(CASE, overrides=(other,)).config())


WORKER = """
import json, sys
row, case = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps({"passed": True, "case": case, "first_s": 1.0}), flush=True)
if row == "flex":
    sys.exit(3)
print("a library's own line")
print(json.dumps({"passed": True, "case": case, "first_s": 1.0, "median_s": 2.0, "model_tflops": 1.0}))
"""


def test_a_row_that_is_cut_short_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "worker").write_text(f"#!{sys.executable}\nimport sys\nsys.argv[0:3] = ['worker']\n{WORKER}")
    (tmp_path / "worker").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "worker"))
    out = tmp_path / "out.json"
    with pytest.raises(RuntimeError, match="flex: the measuring process ended with status 3"):
        bench(CASE, ("flex", "packed"), out)
    found = json.loads(out.read_text())
    assert [(row["row"], row.get("partial")) for row in found["rows"]] == [("flex", True), ("packed", None)]
    assert found["rows"][0]["first_s"] == 1.0
    assert "flex" not in found["ratios"][0]
