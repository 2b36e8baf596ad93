"""`prefix-train compare` on a CPU with a tiny model: each program in a process of its own, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from configs.errors import UserError
from prefix_train.compare import case as cases
from prefix_train.compare import peft, table, worker
from prefix_train.compare.case import Case

CPU = torch.device("cpu")
ORACLE = Path(sys.prefix) / "oracle"
TINY = """
name: tiny-dense
cluster: local
model:
  dtype: float32
  build:
    model_type: qwen3
    num_hidden_layers: 4
    hidden_size: 64
    intermediate_size: 128  # bitsandbytes on a CPU errs by a fifth where rows are no multiple of 64 wide
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 16
    vocab_size: 1024
data:
  train: tests/data/tiny-geometry.yaml
pack:
  packs_per_update: 1
adapter:
  targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
train:
  updates: 1
slurm:
  tasks_per_node: 1
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("compare")
    (folder / "tiny dense.yaml").write_text(TINY)
    options = ("train.loss_chunk_words=256", "stream.resident_blocks=0", "stream.slots=2", "stream.readers=2")
    return Case(str(folder / "tiny dense.yaml"), 3, 40, 0.02, str(folder / "stores"), 1, options)


@pytest.mark.slow
def test_ours_and_peft_compute_the_same_gradients(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    found = table.compare([case], ["ours", "peft"], out, ORACLE)
    assert json.loads(out.read_text())["rows"] == found["rows"]
    ours, theirs = found["rows"]
    for row in (ours, theirs):
        assert "failed" not in row
        assert row["positions"] == 40
        assert row["median_s"] > 0
        assert row["memory"]["peak_gib"] > 0
        assert not row["budget_enforced"]
    assert theirs["versions"]["bitsandbytes"]
    assert ours["read_bytes"] > 0 == theirs["read_bytes"]
    apart = found["differences"]["3x40"]["peft"]
    assert 0 < apart["all"] < 1e-4
    assert apart["worst"] < 1e-3
    said = table.text(found)
    assert "| 3x40 | ours |" in said
    assert "| 3x40 | peft |" in said


def test_quantised_modules_hold_the_store_s_own_weights(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.syspath_prepend(str(ORACLE))
    import bitsandbytes.functional as library

    store = case.store()
    block, buffer = store.layers[0], store.bytes(store.layers[0])
    stored = block.by_name["mlp.up_proj.weight"]
    parts = {name: part.clone() for name, part in peft.parts_of(stored, buffer).items()}
    rows, columns = stored.shape
    made: Any = peft.quantised(nn.Linear(columns, rows, bias=False, device="meta"), stored, parts)
    right = dict(store.tensors(block))[f"{block.module}.{stored.name}"]
    found = library.dequantize_4bit(made.weight.data, made.weight.quant_state)
    assert torch.equal(found.view(rows, columns), right)


def test_a_program_that_is_not_there_is_named(case: Case, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--rival block-streamer: block_streamer is not installed; `pip install"):
        table.compare([case], ["block-streamer"], tmp_path / "found.json", tmp_path)
    with pytest.raises(UserError, match="--rival deepspeed: programs are ours, peft, block-streamer"):
        table.compare([case], ["deepspeed"], tmp_path / "found.json")
    assert not (tmp_path / "found.json").exists()


def test_what_runs_out_of_memory_says_at_which_allocation(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        notes = ()

        def __init__(self, *_: Any) -> None:
            weight = nn.Parameter(torch.zeros(2, 2))
            weight.grad = torch.ones(2, 2)
            self.parameters = {"0/q/A": weight}
            self.updates = 0

        def update(self) -> None:
            self.updates += 1
            if self.updates > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 594.00 MiB. See documentation x")

        def read_bytes(self) -> int:
            return 0

    monkeypatch.setattr(worker, "maker", lambda name: Full)
    row = worker.measure("peft", case, CPU, tmp_path / "g")
    assert row["failed"]["message"] == "CUDA out of memory. Tried to allocate 594.00 MiB."
    assert row["failed"]["during"] == "later updates"
    assert row["failed"]["where"][-1].endswith(" update")
    said = table.text({"rows": [row]})
    assert "| 3x40 | peft | out of memory |" in said
    assert "3x40 peft: out of memory: CUDA out of memory. Tried to allocate 594.00 MiB. in test_compare.py" in said


def test_an_adapter_without_gradient_is_a_failure(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle:
        notes = ()
        parameters = {"0/q/A": nn.Parameter(torch.zeros(2, 2))}  # noqa: RUF012

        def __init__(self, *_: Any) -> None: ...

        def update(self) -> None: ...

        def read_bytes(self) -> int:
            return 0

    monkeypatch.setattr(worker, "maker", lambda name: Idle)
    row = worker.measure("peft", case, CPU, tmp_path / "g")
    assert "1 of 1 adapter tensors have no gradient: 0/q/A" in row["failed"]["message"]


def test_gradients_are_put_side_by_side_by_name(tmp_path: Path) -> None:
    rows = [{"size": "3x40", "rival": name} for name in ("ours", "peft")]
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "3x40-ours.safetensors")
    save_file({"a": torch.ones(4), "b": torch.ones(4) * 1.5}, tmp_path / "3x40-peft.safetensors")
    found = table.differences(rows, tmp_path)["3x40"]["peft"]
    assert (found["worst"], found["worst_tensor"]) == (0.5, "b")
    assert found["all"] == pytest.approx(0.5 / 2**0.5)
    save_file({"a": torch.ones(4)}, tmp_path / "3x40-peft.safetensors")
    with pytest.raises(RuntimeError, match=r"peft trains other tensors: \['b'\]"):
        table.differences(rows, tmp_path)


def test_a_process_that_ends_without_a_word_is_a_row(case: Case, tmp_path: Path) -> None:
    broken = Path(tmp_path / "torch.py")
    broken.write_text("raise SystemExit('no torch here')")
    row = table.run("peft", case, tmp_path / "g", tmp_path)
    assert "exit status" in row["failed"]["message"]


def test_names_of_factors_are_one(case: Case) -> None:
    theirs = "layers.3.mlp.up_proj.lora_A"
    for name in (theirs, "base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight"):
        assert cases.factor(name) == "3/mlp.up_proj/A"
    assert cases.factor("model.layers.3.mlp.up_proj.weight") is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"budget_gib": 6.0}, "another --budget-gib: 6.0 there, 0.02 now"),
        ({"geometry": "qwen3-32b"}, "another --geometry: qwen3-32b there, .*tiny dense.yaml now"),
        ({"folder": "elsewhere"}, "another --stores: elsewhere there"),
        ({"warm": 9}, "another --warm: 9 there, 1 now"),
        ({"overrides": ()}, "another list of changes: none there, train.loss_chunk_words=256 stream"),
        ({"overrides": ("adapter.rank=4",)}, "another list of changes: adapter.rank=4 there"),
    ],
)
def test_rows_of_one_file_differ_in_size_alone(change: Any, what: str, case: Case, tmp_path: Path) -> None:
    out, other = tmp_path / "found.json", dataclasses.replace(case, layers=9, **change)
    row = {"rival": "ours", "size": other.name, "case": dataclasses.asdict(other)}
    written = json.dumps({"rows": [row], "gate": {}})
    out.write_text(written)
    with pytest.raises(UserError, match=f"{what}.*; give another file"):
        table.compare([case], ["ours"], out)
    assert out.read_text() == written


def test_rows_of_another_bench_are_no_rows_of_this(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    out.write_text(json.dumps({"rows": [{"row": "packed", "case": {"geometry": case.geometry}}], "gate": {}}))
    with pytest.raises(UserError, match="None there"):
        table.compare([case], ["ours"], out)


def test_what_is_not_run_again_stays_with_its_difference(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are 1 for ours and `other[size]` for the other program; none where that is 0."""
    other = {"3x40": 1.5, "2x20": 1.25}

    def run(name: str, case: Case, gradients: Path, packages: Path | None) -> dict[str, Any]:
        row = {"rival": name, "size": case.name, "case": json.loads(json.dumps(dataclasses.asdict(case)))}
        if not other[case.name]:
            return row | {"failed": {"message": "no room", "out_of_memory": True}}
        save_file({"a": torch.ones(4) * (1.0 if name == "ours" else other[case.name])}, gradients)
        return row | {"median_s": 1.0}

    def apart(found: dict[str, Any]) -> dict[str, float]:
        assert json.loads(out.read_text()) == found
        return {size: of["peft"]["all"] for size, of in found["differences"].items() if "peft" in of}

    monkeypatch.setattr(table, "run", run)
    monkeypatch.setattr(table, "require", lambda *_: None)
    monkeypatch.setattr(Case, "store", lambda self: None)
    out, small = tmp_path / "new" / "found.json", dataclasses.replace(case, layers=2, positions=20)
    table.compare([case], ["ours", "peft"], out)
    found = table.compare([small], ["ours", "peft"], out)
    assert apart(found) == {"3x40": 0.5, "2x20": 0.25}
    assert len(found["rows"]) == 4
    other["3x40"] = 3.0
    assert apart(table.compare([case], ["peft"], out)) == {"3x40": 0.5, "2x20": 0.25}  # ours has no gradients now
    assert apart(table.compare([case], ["ours", "peft"], out)) == {"3x40": 2.0, "2x20": 0.25}
    other["2x20"] = 0
    assert apart(table.compare([small], ["peft"], out)) == {"3x40": 2.0}
    assert [path.name for path in out.parent.iterdir()] == ["found.json"]


@pytest.mark.parametrize("size", ["4", "x5", "4x3", "0x64", "axb"])
def test_mistakes_are_named(size: str, case: Case) -> None:
    with pytest.raises(UserError, match="write LAYERSxPOSITIONS"):
        table.sizes([size], case)


def test_the_command_names_what_is_not_there(tmp_path: Path) -> None:
    from prefix_train.cli import app

    options = ["compare", "--stores", str(tmp_path), "--rival", "nothing", "--out", str(tmp_path / "o.json")]
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, UserError)


def test_block_streamer_is_put_together_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own engine runs on CUDA alone: what we put around it is tested with one that holds all blocks."""
    monkeypatch.syspath_prepend(str(ORACLE))
    import block_streamer
    from block_streamer import StreamedModel

    from prefix_train.compare.block_streamer import BlockStreamer
    from prefix_train.compare.ours import Ours

    with pytest.raises(ValueError, match="requires a CUDA execution device"):
        BlockStreamer(case, CPU)
    assert issubclass(StreamedModel, nn.Module)

    class Whole(nn.Module):
        def __init__(self, blocks: nn.ModuleList, device: str, prefetch_ahead: int, manifest: Any) -> None:
            super().__init__()
            self.blocks = blocks
            for block, spec in zip(blocks, manifest.blocks, strict=True):
                memory = torch.empty(spec.nbytes, dtype=torch.uint8)
                manifest.read_block(spec, memory)
                for name, tensor in manifest.materialize(spec, memory).items():
                    path, _, attribute = name.rpartition(".")
                    held = nn.Parameter(tensor, requires_grad=False)
                    block.get_submodule(path)._parameters[attribute] = held

        def forward(self, hidden: torch.Tensor, **more: Any) -> torch.Tensor:
            for block in self.blocks:
                hidden = block(hidden, **more)
            return hidden

        def stats(self) -> dict[str, int]:
            return {"transfer_bytes": 7}

    monkeypatch.setattr(block_streamer, "StreamedModel", Whole)
    theirs, ours = BlockStreamer(case, CPU), Ours(case, CPU)
    for one in (theirs, ours):
        one.update()
    mine, other = worker.kept(ours), worker.kept(theirs)
    assert mine.keys() == other.keys()
    for name, gradient in mine.items():
        assert (gradient - other[name]).norm() < 1e-3 * gradient.norm(), name
    assert theirs.read_bytes() == 7
