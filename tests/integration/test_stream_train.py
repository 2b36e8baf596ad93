"""Whole runs of the streaming engine: to the last bit those of the resident one, also when they are stopped between."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    MemoryConfig,
    ModelConfig,
    PackConfig,
    SlurmConfig,
    StreamConfig,
    TrainConfig,
)
from prefix_train import checkpoint, engines, model, report
from prefix_train.stream import build, engine, sources
from prefix_train.stream.places import Choice
from tests import additions
from tests.stream_runs import computed, life, resident, results
from tests.tiny_text import BUILD

UPDATES = 4
MODEL = {
    **BUILD,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chat rows under one instruction, train and held-out."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 24), ("heldout", 6)):
        additions.write(folder / f"{name}.jsonl", count)
    return folder


def make_store(folder: Path, weights: Literal["plain", "nf4"]) -> Path:
    config = ModelConfig(build=MODEL, dtype="float32")
    build.build(sources.open_source(config), folder / weights, Choice(weights, torch.float32))
    return folder / weights


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    return {"plain": make_store(folder, "plain"), "nf4": make_store(folder, "nf4")}


def options(data: Path, store: Path, **stream: Any) -> Config:
    return Config(
        name="stream",
        cluster="local",
        engine="stream",
        model=ModelConfig(build=MODEL, dtype="float32"),
        data=DataConfig(train=str(data / "train.jsonl"), heldout=str(data / "heldout.jsonl")),
        pack=PackConfig(max_positions=128, packs_per_update=2),
        adapter=AdapterConfig(rank=4, dropout=0.1, targets=["q_proj", "down_proj"]),
        train=TrainConfig(updates=UPDATES, lr=5e-3, warmup_updates=2, save_every=0, loss_chunk_words=256),
        evaluate=EvaluateConfig(every=2, generate=False),
        stream=StreamConfig(store=str(store), **{"budget_gib": 1.0, "slots": 2, "resident_blocks": "0"} | stream),
        slurm=SlurmConfig(tasks_per_node=1),
    )


@pytest.mark.parametrize("weights", ["plain", "nf4"])
@pytest.mark.parametrize("stream", [{}, {"packs_per_visit": 2, "resident_blocks": "1"}], ids=["packs", "block-major"])
def test_a_run_is_the_resident_engines_to_the_last_bit(
    data: Path,
    stores: dict[str, Path],
    weights: str,
    stream: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(options(data, stores[weights], **stream), memory=MemoryConfig(offload="2"))
    assert life(tmp_path / "stream", config, monkeypatch) == 0
    said = capsys.readouterr().err
    store = engines.open_store(config)
    monkeypatch.setattr(engines, "load", lambda config, whole=False: engine.load(config.model, store, whole=True))
    assert life(tmp_path / "resident", resident(config), monkeypatch) == 0
    assert computed(tmp_path / "stream") == computed(tmp_path / "resident")
    assert results(tmp_path / "stream") == results(tmp_path / "resident")
    lines = [line for line in report.read_metrics(tmp_path / "stream") if "loss" in line]
    at_once = stream.get("packs_per_visit", 1)
    assert lines[0]["stream_visits"] == 2 // at_once * (5 + 5)
    for line in lines:
        assert line["stream_bytes"] > 0
        assert line["stream_share"] == pytest.approx(line["stream_bound_s"] / line["seconds"])
        assert line["stream_bound_s"] > 0
    assert f"{lines[0]['stream_blocks']} blocks read" in said
    assert "% of the bound" in said


def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(
    data: Path, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = options(data, stores["nf4"])
    assert life(tmp_path / "whole", config, monkeypatch) == 0
    assert life(tmp_path / "run", config, monkeypatch, 0, stop_after=2) == runfolder.STOPPED
    folder = checkpoint.latest(tmp_path / "run")
    assert folder is not None
    assert folder.name == "update-000002"
    assert life(tmp_path / "run", config, monkeypatch, 1) == 0
    assert computed(tmp_path / "run") == computed(tmp_path / "whole")
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_a_budget_that_is_too_small_is_refused_before_anything_is_trained(
    data: Path,
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = options(data, stores["nf4"], budget_gib=0.0005)
    with pytest.raises(UserError, match=r"budget_gib=0.0005 is too small: packs of up to .* what would fit: ") as found:
        life(tmp_path / "run", config, monkeypatch)
    assert "\n" not in str(found.value)
    told = capsys.readouterr().out
    assert "TOO SMALL" in told
    assert "dequantised matrix" in told
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert report.read_metrics(tmp_path / "run") == []


def test_what_the_refusal_says_would_fit_does(data: Path, stores: dict[str, Path]) -> None:
    from prefix_train.stream import planner

    config = options(data, stores["nf4"], budget_gib=0.003)
    config = replace(config, pack=replace(config.pack, max_positions=4096))
    plan = planner.make(config)
    assert not plan.fits
    advice = plan.would_fit()
    assert any(line.startswith("pack.max_positions=") for line in advice)
    for line in advice:
        assert planner.make(compose.with_changes(config, line.split())).fits, line


def test_a_store_of_another_model_is_refused(
    data: Path, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = options(data, stores["nf4"])
    other = {**MODEL, "intermediate_size": 64}
    config = replace(config, model=replace(config.model, build=other))
    with pytest.raises(UserError, match=r"was made of another model: intermediate_size differ"):
        life(tmp_path / "run", config, monkeypatch)
    other_weights = replace(options(data, stores["nf4"]), model=replace(config.model, build=MODEL, seed=1))
    with pytest.raises(UserError, match=r"weights are not those of model\.build"):
        life(tmp_path / "weights", other_weights, monkeypatch)
    other_dtype = replace(options(data, stores["nf4"]), model=ModelConfig(build=MODEL))
    with pytest.raises(UserError, match=r"is read in float32: set model\.dtype=float32"):
        life(tmp_path / "dtype", other_dtype, monkeypatch)


def test_a_flipped_bit_stops_a_run_before_its_first_update(
    data: Path, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "store"
    shutil.copytree(stores["plain"], damaged)
    block = engines.open_store(options(data, damaged)).by_name["block.3"]
    stored, _, part = list(block.parts)[-1]
    path = damaged / block.file
    content = bytearray(path.read_bytes())
    content[part.offset + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"block\.3: .*{stored.name}.*: expected sha256 .*, found ") as found:
        life(tmp_path / "run", options(data, damaged), monkeypatch)
    assert "\n" not in str(found.value)
    assert report.read_metrics(tmp_path / "run") == []
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert life(tmp_path / "unchecked", options(data, damaged, check="size"), monkeypatch) == 0
    with pytest.raises(UserError, match=r"block\.3: .*: expected sha256 "):
        engines.load(options(data, damaged), whole=True)


def test_a_run_says_that_its_store_is_whole(
    data: Path,
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(options(data, stores["plain"]), train=TrainConfig(updates=1, save_every=0, warmup_updates=0))
    assert life(tmp_path / "run", config, monkeypatch) == 0
    assert re.search(r"store: 8 files, 0\.00 GB, every byte as it was written; read in", capsys.readouterr().err)


def test_the_export_is_loaded_by_peft(
    data: Path, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    config = replace(options(data, stores["plain"]), train=TrainConfig(updates=1, save_every=0, warmup_updates=0))
    assert life(tmp_path / "run", config, monkeypatch) == 0
    base, _ = model.load(config.model)
    PeftModel.from_pretrained(base, tmp_path / "run" / runfolder.ADAPTER)
