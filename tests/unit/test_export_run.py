"""What an export says where it cannot read what it is made of: that, and not that it could not write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.schema import ModelConfig
from prefix_train.exports.merge import Merging
from prefix_train.exports.run import check_export, export_run
from prefix_train.stream import origin
from tests import exported


def run_of(tmp_path: Path, trainable: str = "adapter") -> Path:
    source = exported.model_folder(tmp_path / "source", "qwen3")
    return exported.run_of(tmp_path / "run", ModelConfig(path=str(source), dtype="float32"), "", trainable)


def refused(run: Path, merging: Merging | None, words: str) -> None:
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError, match=words) as found:
        export_run(run, merging=merging)
    assert "written" not in str(found.value)
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("merging", [None, Merging()])
@pytest.mark.parametrize("trainable", ["adapter", "all"])
def test_a_model_that_is_gone(tmp_path: Path, merging: Merging | None, trainable: str) -> None:
    run = run_of(tmp_path, trainable)
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    refused(run, merging, "source does not exist; write model.path=PATH")
    with pytest.raises(UserError, match="source does not exist"):
        check_export(run / "adapter", run, 1)


def test_weights_that_transformers_does_not_find(tmp_path: Path) -> None:
    run = run_of(tmp_path, "all")
    for path in (tmp_path / "source").glob("model*"):
        path.unlink()
    refused(run, None, r"source/model.safetensors does not exist: .*source is no complete model in safetensors format$")


def test_weights_that_the_disk_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the folder of a merged model is made, a read error is still one."""
    run = run_of(tmp_path)

    def broken(files: object) -> str:
        raise OSError(5, os.strerror(5), "source/model.safetensors")

    monkeypatch.setattr(origin, "fingerprint", broken)
    refused(run, Merging(), "could not be read: .*Input/output error: 'source/model.safetensors'")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (tmp_path / "file").write_text("text")
    for merging in (None, Merging()):
        with pytest.raises(UserError, match=r"file/adapter could not be written, and nothing was left of it: .*Errno"):
            export_run(run, tmp_path / "file" / "adapter", merging)
