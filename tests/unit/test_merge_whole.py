"""A merged export that is interrupted, or for which there is no room or place: whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from configs.errors import UserError
from prefix_train.exports import shards
from prefix_train.exports.merge import Merging
from prefix_train.exports.run import export_run
from tests import streams
from tests.unit.test_merge import SMALL, path_run


def test_what_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = path_run(tmp_path, "qwen3")
    before = sorted(path.name for path in run.iterdir())
    original = shards.Shards.write

    def interrupted(self: shards.Shards, name: str, tensor: Tensor) -> None:
        if "layers.1" in name:
            raise KeyboardInterrupt
        original(self, name, tensor)

    monkeypatch.setattr(shards.Shards, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_run(run, merging=SMALL)
    assert sorted(path.name for path in run.iterdir()) == before


def test_an_earlier_export_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = path_run(tmp_path, "qwen3")
    done = export_run(run, merging=SMALL)
    before = streams.contents(done.folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match="No space left"):
            export_run(run, merging=SMALL)
    assert streams.contents(done.folder) == before
    export_run(run, merging=Merging())
    assert [path.name for path in done.folder.glob("model*")] == ["model.safetensors"]
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def full(*_: object) -> None:
    """A disk without room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("trainable", "which"), [("adapter", "merged"), ("adapter", "adapter"), ("all", "merged"), ("all", "weights")]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, trainable: str, which: str) -> None:
    """In a process that may write no file larger than 3,000 bytes."""
    run = path_run(tmp_path, "qwen3", trainable=trainable)
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from prefix_train.exports.merge import Merging; from prefix_train.exports.run import export_run\n"
        "from configs.errors import UserError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "try: export_run(Path(sys.argv[1]), merging=Merging(shard_bytes=20000) if sys.argv[2] == 'merged' else None)\n"
        "except UserError as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(run), which], capture_output=True, text=True, timeout=120, check=True
    )
    (said,) = ran.stdout.splitlines()
    assert said.startswith(f"{run / which} could not be written, and nothing was left of it: ")
    assert "File too large" in said
    assert [path.name for path in run.iterdir() if which in path.name] == []


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path) -> None:
    run = path_run(tmp_path, "qwen3")
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = os.uname().nodename
    left, alive = (run / f".merged.{host}.{pid}.tmp" for pid in (gone.pid, os.getppid()))
    for folder in (left, alive):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    export_run(run, merging=SMALL)
    assert not left.exists()
    assert alive.exists(), "another process is at work there"


def test_a_folder_with_anything_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = path_run(tmp_path, "qwen3")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("text")
    (tmp_path / "note").write_text("text")
    for place, words in (("thesis", "holds something that is no export"), ("note", "is a file")):
        with pytest.raises(UserError, match=words):
            export_run(run, tmp_path / place, SMALL)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == (tmp_path / "note").read_text() == "text"


def test_names_may_be_anything(tmp_path: Path) -> None:
    run = path_run(tmp_path, "qwen3")
    place = tmp_path / "a b'\"[x]*\n ü"
    assert export_run(run, place, SMALL).folder == place
    export_run(run, place, SMALL)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
