"""A pretrained model under a memory budget that its weights do not fit: it learns as it does where they fit."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

from configs import compose, runfolder
from prefix_train import report
from prefix_train.budget import GIB
from prefix_train.stream import build, planner, sources
from prefix_train.stream.places import Choice
from tests.integration.test_smollm2 import loss_before
from tests.stream_runs import computed, life, resident, results

REPOSITORY = Path(__file__).resolve().parents[2]
FEW = (
    *("train.epochs=null", "train.updates=2", "train.schedule=constant", "train.warmup_updates=1"),
    *("slurm.tasks_per_node=1", "pack.packs_per_update=1", "pack.max_positions=720", "evaluate.examples=2"),
    *("evaluate.generate=false", "evaluate.every=1", "verify.examples=0", "memory.recompute=true"),
    *("memory.tile_rows=2048", "train.loss_chunk_words=8192", "train.loss_chunk_rows=256", "train.save_every=0"),
)


@pytest.mark.slow
def test_smollm2_learns_under_a_budget_smaller_than_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose.load(REPOSITORY / "configs" / "smollm2-135m.yaml", FEW)
    made = build.build(sources.open_source(config.model), tmp_path / "store", Choice("plain", torch.float32))
    stream = [f"stream.store={made.folder}", "stream.budget_gib=0.25", "stream.slots=2"]
    config = compose.with_changes(config, ["engine=stream", *stream])

    weights = sum(stored.elements * 4 for block in made.blocks for stored in block.tensors)
    plan = planner.make(config)
    assert plan.fits
    assert plan.limit < 0.55 * weights
    assert plan.limit == int(0.25 * GIB)

    assert life(tmp_path / "stream", config, monkeypatch) == 0
    assert life(tmp_path / "resident", resident(config), monkeypatch) == 0
    assert computed(tmp_path / "stream") == computed(tmp_path / "resident")
    assert results(tmp_path / "stream") == results(tmp_path / "resident")

    lines = report.read_metrics(tmp_path / "stream")
    heldout = [line["heldout_loss"] for line in lines if "heldout_loss" in line]
    assert len(heldout) == 2
    before = loss_before(resident(config))
    assert heldout[-1] < heldout[0] < before, (heldout, before)
    assert fmean(line["stream_bytes"] for line in lines if "loss" in line) > 0.4 * weights
    assert (tmp_path / "stream" / runfolder.ADAPTER / "adapter_model.safetensors").is_file()
