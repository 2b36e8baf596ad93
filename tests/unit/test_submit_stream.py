"""What submitting says of a run that streams, before anything is made: its store, its model's, and its budget."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs import compose, console
from configs.errors import UserError
from configs.schema import Config, ModelConfig, StreamConfig
from prefix_train import cli, lengths
from prefix_train.stream import build, origin, sources
from prefix_train.stream.places import Choice
from slurm import planned, submit
from tests import models, streams
from tests.documents import ROOT
from tests.tiny_text import BUILD


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "plain"
    model = ModelConfig(build=BUILD, dtype="float32")
    build.build(sources.open_source(model), folder, Choice("plain", torch.float32))
    return folder


@pytest.fixture
def yaml(store: Path, tmp_path: Path) -> Path:
    """A configuration of a run that would stream from `store`."""
    (tmp_path / "train.jsonl").write_text("{}\n" * 64)
    path = tmp_path / "s.yaml"
    path.write_text(
        json.dumps(
            {
                "cluster": "local",
                "engine": "stream",
                "model": {"build": BUILD, "dtype": "float32"},
                "data": {"train": str(tmp_path / "train.jsonl")},
                "pack": {"max_positions": 96, "packs_per_update": 1},
                "train": {"updates": 2, "warmup_updates": 1},
                "stream": {"store": str(store), "budget_gib": 0.5},
                "run_root": str(tmp_path / "runs"),
                "slurm": {"tasks_per_node": 1},
            }
        )
    )
    return path


def indexed(config: Config) -> Config:
    """With a length index: a shared beginning of 50 tokens, then 2 for each example."""
    rows = [
        SimpleNamespace(source=f"train.jsonl:{i}", keys=np.r_[np.ones(50, int), -i, i], target=np.arange(52) > 50)
        for i in range(1, 65)
    ]
    lengths.write(lengths.index_path(config), lengths.build(config, rows))
    return config


def refused(yaml: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command ends, status 2; nothing is made."""
    before = sorted(yaml.parent.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        console.run(submit.app, [str(yaml), *arguments])
    assert ended.value.code == console.USER_MISTAKE
    assert sorted(yaml.parent.rglob("*")) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_store_that_is_not_there_is_said_at_once(
    yaml: Path, capsys: pytest.CaptureFixture[str], cluster: str, dry: list[str]
) -> None:
    line = refused(yaml, capsys, f"cluster={cluster}", "stream.store=nowhere", *dry)
    assert "nowhere is no store: it has no manifest.json; make one with `prefix-train stream build" in line


@pytest.mark.parametrize("known", [True, False], ids=["planned", "not planned"])
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_budget_that_cannot_do_is_said_at_once(
    yaml: Path, capsys: pytest.CaptureFixture[str], dry: list[str], known: bool
) -> None:
    if known:
        indexed(compose.load(yaml))
    line = refused(yaml, capsys, "stream.budget_gib=0.0001", *dry)
    assert "stream.budget_gib=0.0001 is too small: packs of up to" in line


def test_without_a_plan_only_what_never_fits_is_refused(yaml: Path) -> None:
    """It may be that no pack is as large as `pack.max_positions`."""
    assert "unknown" in planned.sketch(compose.load(yaml))
    huge = compose.load(yaml, ["pack.max_positions=4000000", "stream.budget_gib=0.01"])
    assert "unknown" in planned.sketch(huge)
    with pytest.raises(UserError, match="too small: packs of up to 4,000,000 positions"):
        planned.sketch(indexed(huge))


def test_a_store_of_another_model_is_said_at_once(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = json.dumps(BUILD | {"intermediate_size": 64})
    line = refused(yaml, capsys, f"model.build={other}", "--dry-run")
    assert "was made of another model: linear modules, numbers of parameters differ" in line
    assert "whose weights are not those of model.build" in refused(yaml, capsys, "model.seed=1", "--dry-run")
    assert "set model.dtype=float32" in refused(yaml, capsys, "model.dtype=bfloat16", "--dry-run")


def test_a_store_that_is_cut_off_or_lacks_a_file_is_said_at_once(
    yaml: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(store, tmp_path / "damaged")
    size = (damaged / "block.1.bin").stat().st_size
    streams.cut(damaged / "block.1.bin", size - 64)
    line = refused(yaml, capsys, f"stream.store={damaged}", "--dry-run")
    assert f"block.1.bin has {size - 64:,} bytes, {size:,} are expected" in line
    (damaged / "block.1.bin").unlink()
    assert "block.1.bin is not there" in refused(yaml, capsys, f"stream.store={damaged}", "--dry-run")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "format 2, and 1 is expected"),
        ({"source": {"kind": ["build"]}}, "source.kind is ['build']"),
        ({"config": {"model_type": "llama", "num_attention_heads": 0}}, "ZeroDivisionError"),
        ({"config": {"model_type": "qwen3_5", "text_config": ["x"]}}, "AttributeError"),
        ({"config": BUILD | {"num_hidden_layers": "two"}}, "num_hidden_layers is 'two'"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_named(
    yaml: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], named: str
) -> None:
    path = shutil.copytree(store, tmp_path / "damaged") / origin.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    line = refused(yaml, capsys, f"stream.store={path.parent}", "--dry-run")
    assert f"{path}" in line
    assert named in line
    assert line.endswith("; build the store again")


def test_what_can_run_is_not_refused_and_its_store_stands_in_the_configuration_by_its_whole_path(
    yaml: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(store.parent)
    indexed(compose.load(yaml))
    with pytest.raises(SystemExit) as ended:
        console.run(submit.app, [str(yaml), f"stream.store={store.name}", "--dry-run"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "MiB of tensors in each rank, predicted for the largest pack" in said
    assert "Python, torch and the data take more of the process" in said
    assert "pinned" not in said
    config = submit.resolve(compose.load(yaml, [f"stream.store={store.name}"]), store.parent)
    assert config.stream.store == str(store)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_store_of_every_family_is_known_again(tmp_path: Path, family: str) -> None:
    """What the manifest says of sizes is transformers' whole configuration, not the folder's few lines."""
    models.build(family).save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"))
    build.build(sources.open_source(model), tmp_path / "store", streams.BF16)
    origin.require(Config(model=model, engine="stream", stream=StreamConfig(store=str(tmp_path / "store"))))


def test_the_budget_of_another_models_store_is_an_error_and_of_none_says_what_was_assumed(
    yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.dumps(BUILD | {"intermediate_size": 64})
    with pytest.raises(SystemExit) as ended:
        console.run(cli.app, ["budget", str(yaml), f"model.build={other}"])
    assert ended.value.code == console.USER_MISTAKE
    assert "was made of another model" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        console.run(cli.app, ["budget", str(yaml), "stream.store=nowhere"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "there is no store in nowhere yet, NF4 assumed" in said
    assert "a store of unchanged weights (--weights float32) would need " in said


def test_this_is_answered_without_torch(yaml: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['submit', *sys.argv[1:]]\n"
        "try: runpy.run_module('slurm.submit', run_name='__main__')\n"
        "except SystemExit as end: sys.exit(bool(end.code) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(yaml), "--dry-run"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
