"""`prefix-train bench stream` on a CPU with a tiny geometry: the gate, the rows, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs import compose
from configs.errors import UserError
from prefix_train.bench_pack import geometry_file
from prefix_train.stream import (
    bench,
    bench_bound,
    bench_gate,
    bench_parts,
    bench_row,
    build,
    fixed,
    frozen,
    graphs,
    random_store,
)
from prefix_train.stream.bench import Case, parse, ratios, text
from prefix_train.stream.figures import Misleading
from prefix_train.stream.places import Choice
from tests import tape

CPU = torch.device("cpu")
TINY = str(Path(__file__).parents[1] / "data" / "tiny-geometry.yaml")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("bench") / "a store"
    source = random_store.generate(compose.load(geometry_file(TINY)).model, Choice("nf4", torch.bfloat16), 0)
    build.build(source, folder, Choice("nf4", torch.bfloat16))
    options = ("train.loss_chunk_words=256", "stream.resident_blocks=1", "stream.slots=2", "stream.readers=2")
    return Case(TINY, str(folder), 0.02, 60, 3, 11, alone=2, warm=1, overrides=options)


@pytest.fixture
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gate, "SHAPE", (37, 3, 9))
    monkeypatch.setattr(bench_gate, "SMALL", {"hidden_size": 64, "vocab_size": 1024})


@pytest.mark.usefixtures("few_examples")
def test_gate_holds_streamed_gradients_against_resident_ones(case: Case, tmp_path: Path) -> None:
    found = bench_gate.gate(case.config(()), CPU, tmp_path / "store")
    assert found["passed"], found
    assert found["equal"] == found["tensors"] > 0
    assert found["gradient"] == found["resident_noise"] == 0.0
    json.dumps(found, allow_nan=False)


@pytest.mark.usefixtures("few_examples")
def test_gate_fails_where_a_block_is_read_wrong(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = frozen.Matrix.whole

    def wrong(self: frozen.Matrix, product: bool) -> Tensor:
        found = whole(self, product)
        return found.roll(1, 0) if self.stored.name.endswith("gate_proj.weight") else found

    monkeypatch.setattr(frozen.Matrix, "whole", wrong)
    assert not bench_gate.gate(case.config(()), CPU, tmp_path / "store")["passed"]


@pytest.fixture(scope="module")
def rows(case: Case) -> dict[str, dict[str, Any]]:
    made = {}
    for name in ("pack", "accumulated", "64@stream.resident_blocks=0"):
        told: list[dict[str, Any]] = []
        made[name] = {"row": name, **bench_row.measure(name, case, CPU, told.append)}
        assert len(told) >= 3
        json.dumps(made[name], allow_nan=False)
    return made


def test_rows_are_whole_updates_counted_from_tensors(rows: dict[str, dict[str, Any]]) -> None:
    pack, alone, one = rows.values()
    assert (pack["positions"], pack["logical"]) == (60 + 3 * 11, 3 * 71)
    assert (alone["positions"], alone["logical"]) == (2 * 71, 2 * 71)
    assert alone["all_s"] == pytest.approx(alone["median_s"] * 3 / 2)
    assert (one["positions"], one["targets"]) == (64, 31)
    assert [row["plan"]["resident_blocks"] for row in rows.values()] == [1, 1, 0]
    for row in rows.values():
        assert "failed" not in row
        assert row["blocks_covered"] == row["blocks"] == 4
        assert row["adapters"]["before"] != row["adapters"]["after"]
        assert row["page_cache"]["warm"] == 1.0
        assert row["ratio"] == pytest.approx(row["median_s"] / row["bound"]["s"])
        assert row["read_bytes"] > 0
        assert len(row["copies_gb_s"]) == bench_bound.PASSES
        assert row["parts"]["computing_s"] > 0
        assert row["allocator"] == {}
    assert one["read_bytes"] > pack["read_bytes"]  # one block less stays


def test_less_than_the_plan_is_refused_before_the_first_step(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        assert row["refused"]["budget_gib"] == pytest.approx(0.9 * row["plan"]["needed_gib"])
        assert "is too small: packs of up to" in row["refused"]["message"]


def test_a_plan_that_is_not_refused_fails_the_row(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_row, "REFUSED", 1.1)
    with pytest.raises(RuntimeError, match="was taken"):
        bench_row.measure("pack", case, CPU)


def test_what_all_stays_is_no_row(case: Case) -> None:
    with pytest.raises(UserError, match="nothing streams"):
        bench_row.measure("64@stream.resident_blocks=2", case, CPU)


def test_both_gains_are_told_apart_and_impossible_times_refused(rows: dict[str, dict[str, Any]]) -> None:
    found = list(rows.values())
    (ratio,) = ratios(found).values()
    assert ratio == pytest.approx(rows["accumulated"]["all_s"] / rows["pack"]["all_s"])
    said = text({"rows": found, "ratios": ratios(found)})
    assert "| pack |" in said
    assert "pack: without copies" in said
    assert f"accumulation of all examples of pack takes {ratio:.2f} times the pack" in said
    late = {**rows["pack"], "row": "8192", "positions": 8192, "bound": {**rows["pack"]["bound"], "s": 99.0}}
    with pytest.raises(Misleading, match=r"8192: .* they were not all computed"):
        text({"rows": [*found, late]})


def test_a_row_that_learned_nothing_says_so(rows: dict[str, dict[str, Any]]) -> None:
    pack = rows["pack"]
    peak = {"allocated_gib": pack["plan"]["needed_gib"] * 2, "driver_gib": 7.0}
    wrong = {**pack, "adapters": dict.fromkeys(("before", "after"), "x"), "blocks_covered": 3, "memory": peak}
    said = bench_row.faults(wrong)
    assert [line.split(",")[0] for line in said] == [
        "the adapters did not change",
        "1 block without a gradient",
        "the driver reads 7.00 GiB",
        f"{peak['allocated_gib']:.2f} GiB were allocated at the peak",
    ]
    assert bench_row.faults(pack) == []


RECORDED = "64@stream.graphs=auto,stream.graph_layouts=1,adapter.dropout=0.0"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> tape.Recorder:
    """Launches are recorded on the CPU too."""
    made, make = tape.Recorder(), graphs.make
    monkeypatch.setattr(graphs, "make", lambda *given: make(*given[:-1], made))
    return made


def test_a_row_by_recorded_launches_has_its_own_gate(case: Case, recorder: tape.Recorder) -> None:
    row = bench_row.measure(RECORDED, case, CPU)
    assert "failed" not in row
    assert row["graphs"] == {"recordings": len(recorder.tapes), "gradient": 0.0, "noise": 0.0, "passed": True}
    assert recorder.plays >= 8 * (2 + row["case"]["warm"])
    json.dumps(row, allow_nan=False)


def test_a_row_whose_recorded_launches_are_wrong_fails(
    case: Case, recorder: tape.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = fixed.Adapters.add

    def twice(self: fixed.Adapters, found: fixed.Flat) -> None:
        add(self, found)
        add(self, found)

    monkeypatch.setattr(fixed.Adapters, "add", twice)
    row = bench_row.measure(RECORDED, case, CPU)
    assert any("gradients of recorded launches are" in said for said in row["failed"])


def test_a_row_stands_whose_parts_cannot_be_told(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(bench_parts, "measure", broken)
    row = {"row": "pack", **bench_row.measure("pack", case, CPU)}
    assert "failed" not in row
    assert "pack: its parts could not be measured: RuntimeError: no profiler here" in text({"rows": [row]})


WORKER = """
import json, sys, time
told = json.loads(sys.argv[1])
for row in told["rows"]:
    print(json.dumps({"row": row, "partial": True, "first_s": 1.0}), flush=True)
    if row == "128":
        time.sleep(60)
    if row == "512":
        sys.exit(3)
    if row == "256":
        print(json.dumps({"row": row, "partial": True, "failed": ["OutOfMemoryError: no"]}), flush=True)
        continue
    print("a library's own line")
    print(json.dumps({"row": row, "passed": True, "all_s": 1.0}), flush=True)
"""


def test_no_row_stops_another_one(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker").write_text(f"#!{sys.executable}\nimport sys\nsys.argv[0:3] = ['worker']\n{WORKER}")
    (tmp_path / "worker").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "worker"))
    monkeypatch.setattr(bench, "STARTING_S", 1.0)
    monkeypatch.setattr(bench, "ENDING_S", 0.1)
    monkeypatch.setattr(bench, "text", lambda found: "")
    out = tmp_path / "out.json"
    with pytest.raises(RuntimeError) as caught:
        bench.bench(replace(case, seconds=2.0), ("512", "256", "128", "pack"), out)
    assert [said.partition(":")[0] for said in str(caught.value).split("; ")] == ["512", "256", "128"]
    found = json.loads(out.read_text())
    state = {row["row"]: row.get("partial", False) for row in found["rows"]}
    assert state == {"512": True, "256": True, "128": True, "pack": False, "256@stream.resident_blocks=0": False}
    assert found["gate"]["passed"]
    assert found["not_run"] == []


def test_no_row_without_the_gate(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_process", lambda rows, *_: iter([{"row": rows[0], "passed": False}]))
    with pytest.raises(RuntimeError, match="no figure without the correctness gate"):
        bench.bench(case, ("pack",), tmp_path / "out.json")


def test_the_gate_alone(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(rows: list[str], *_: Any) -> Any:
        asked.extend(rows)
        return iter([{"row": row, "passed": True} for row in rows])

    monkeypatch.setattr(bench, "_process", answer)
    for _ in range(2):
        found = bench.bench(case, ("gate",), tmp_path / "out.json")
    assert (asked, found["rows"]) == (["gate"], [])


def test_rows_of_another_budget_go_to_another_file(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"rows": [{"row": "64", "case": asdict(replace(case, budget_gib=3.0))}], "gate": {}}))
    with pytest.raises(UserError, match="another budget_gib: give another file"):
        bench.bench(case, ("64",), out)


@pytest.mark.parametrize("row", ["packed", "3", "-5", "1024@pinned", "pack@"])
def test_mistakes_are_named(row: str) -> None:
    with pytest.raises(UserError, match="write a number of positions"):
        parse(row)


@pytest.mark.slow
def test_all_of_it_in_its_own_processes(case: Case, tmp_path: Path) -> None:
    """The gate as on a GPU, then rows from files and from what is pinned there."""
    rows = ("pack", "accumulated", "64", "pack@stream.host=pinned", "accumulated@stream.host=pinned")
    found = bench.bench(case, rows, tmp_path / "out.json")
    assert found["gate"]["passed"]
    assert found["gate"]["equal"] == found["gate"]["tensors"]
    assert [row["row"] for row in found["rows"]] == list(rows)
    assert set(found["ratios"]) == {"pack", "pack@stream.host=pinned"}
    assert found["not_run"] == []
    said = text(found)
    assert said.count("without copies") == len(rows)
    assert said.count("block-major accumulation of all examples of pack") == 2
