"""Checkpoints and exports of two FSDP2 ranks: full tensors, exact resuming, other numbers of ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from configs import runfolder
from configs.schema import Config
from prefix_train import anatomy, checkpoint, export, tensors
from prefix_train.dist import Ranks
from tests import lives, models, trained

CONFIG = Config()
ALONE = Ranks(0, 1, torch.device("cpu"), None)
LORA_RANK = 3
"""Odd, so that two ranks hold unequal shards."""


def cursor(update: int) -> checkpoint.Cursor:
    return checkpoint.Cursor(update=update, epoch=0, done=update, plan="a" * 64)


class Life:
    """A model, sharded where there are ranks, and its optimizer."""

    def __init__(self, ranks: Ranks, seed: int = 0) -> None:
        torch.manual_seed(seed + 10 * ranks.rank)
        self.ranks = ranks
        self.model: nn.Module = trained.adapted(seed=seed, rank=LORA_RANK)
        if ranks.mesh is not None:
            for layer in anatomy.find(self.model).layers:
                fully_shard(layer, mesh=ranks.mesh)
            fully_shard(self.model, mesh=ranks.mesh)
        self.trainable = anatomy.trainable(self.model)
        self.optimizer = trained.adamw(self.model)

    def train(self, updates: range) -> list[float]:
        return trained.train(self.model, self.optimizer, updates)

    def save(self, run: Path, update: int) -> Path:
        return checkpoint.save(run, self.ranks, self.trainable, self.optimizer, cursor(update), CONFIG)

    def load(self, run: Path) -> checkpoint.Resumed:
        folder = checkpoint.latest(run)
        assert folder is not None
        return checkpoint.load(folder, self.ranks, self.trainable, self.optimizer, CONFIG)

    def digest(self) -> str:
        """Of the trained tensors, on rank 0."""
        full = tensors.full_tensors(self.trainable, keep=self.ranks.rank == 0)
        return tensors.digest(full)


FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def die_at_every_file_operation(rank: int, folder: Path) -> None:
    """Save update 4 again and again, each time killed one file operation later; notes what every death left."""
    life = Life(ALONE)
    for update in (1, 2, 3):
        life.save(folder / "before", update)
    left = []
    status = -signal.SIGKILL
    while status != 0:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "before", run)
        if (child := os.fork()) == 0:
            _die_at(run, len(left) + 1)
            life.save(run, 4)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        newest = checkpoint.latest(run)
        kept = [path.name for path in checkpoint.complete(run)]
        life.save(run, 5)
        after = sorted(path.name for path in (run / "checkpoints").iterdir())
        left.append([status, newest.name if newest else "none", kept, after])
    (folder / "left.json").write_text(json.dumps(left))


def _die_at(run: Path, operation: int) -> None:
    """SIGKILL for this process right before its `operation`-th file operation below `run`."""
    seen = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and str(arguments[0]).startswith(str(run)):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def work(rank: int, folder: Path) -> None:
    """What each of two ranks does; rank 0 writes what it found."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, torch.device("cpu"), init_device_mesh("cpu", (2,)))
    run = folder / "run"
    found: dict[str, Any] = {}

    first = Life(ranks)
    shapes = [p.to_local().shape[0] for p in first.trainable.values() if isinstance(p, DTensor)]
    found["rows"] = ranks.gather(shapes)
    first.train(range(3))
    first.save(run, 3)
    found["saved"] = first.digest()
    found["unbroken"] = ranks.gather(first.train(range(3, 6)))

    second = Life(ranks, seed=5)
    resumed = second.load(run)
    found["changes"] = list(resumed.changes)
    found["loaded"] = second.digest()
    found["resumed"] = ranks.gather(second.train(range(3, 6)))
    found["ends"] = [first.digest(), second.digest()]

    full = tensors.full_tensors(second.trainable, keep=rank == 0)
    if rank == 0:
        found["exported"] = export.export(second.model, None, full, folder / "adapter").digest
    with torch.no_grad():
        logits = second.model.eval()(**trained.inputs(0), use_cache=False).logits
        torch.save(logits, folder / f"logits{rank}.pt")

    alone = Life(ranks, seed=7)
    found["from_one"] = [list(alone.load(folder / "alone").changes), alone.digest()]

    found["full_disk"] = ranks.gather(_full_disk(second, run))
    found["stale"] = ranks.gather(_stale(second, run))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _full_disk(life: Life, run: Path) -> str:
    """What this rank is told where rank 0's disk is full."""
    original = checkpoint.write_tensors

    def full(path: Path, named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    checkpoint.write_tensors = full
    try:
        life.save(run, 6)
    except checkpoint.CheckpointError as error:
        return str(error)
    finally:
        checkpoint.write_tensors = original
    return ""


def _stale(life: Life, run: Path) -> str:
    """What this rank is told where the run has gone on to a later life."""
    if life.ranks.rank == 0:
        (run / runfolder.ATTEMPT).write_text("1")
    life.ranks.barrier()
    try:
        life.save(run, 6)
    except RuntimeError as error:
        return type(error).__name__
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks did `work`, after one process had left a checkpoint in `alone`."""
    folder = tmp_path_factory.mktemp("sharded")
    alone = Life(ALONE)
    alone.train(range(2))
    alone.save(folder / "alone", 2)
    (folder / "alone.txt").write_text(alone.digest())
    ranks = lives.start(work, 2, folder, environment={})
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())


def test_ranks_held_unequal_shards(found: dict[str, Any]) -> None:
    rows = found["rows"]
    assert rows[0] != rows[1]
    assert any(count == 1 for count in rows[1])


def test_resuming_with_the_same_ranks_is_bit_equal(found: dict[str, Any]) -> None:
    assert found["changes"] == []
    assert found["loaded"] == found["saved"]
    assert found["resumed"] == found["unbroken"]
    assert found["ends"][0] == found["ends"][1] != found["saved"]


def test_r10_two_ranks_save_full_shapes(folder: Path, found: dict[str, Any]) -> None:
    life = Life(ALONE, seed=3)
    resumed = life.load(folder / "run")
    assert resumed.changes == ("ranks 2 -> 1",)
    assert resumed.line == "resumed after update 3: ranks 2 -> 1: not bit-equal"
    assert life.digest() == found["saved"]
    for entry in ("exp_avg", "exp_avg_sq"):
        for parameter in life.trainable.values():
            assert life.optimizer.state[parameter][entry].shape == parameter.shape


def test_two_ranks_go_on_from_one(folder: Path, found: dict[str, Any]) -> None:
    changes, digest = found["from_one"]
    assert changes == ["ranks 1 -> 2"]
    assert digest == (folder / "alone.txt").read_text()


def test_the_gathered_adapter_loads_into_the_plain_model(folder: Path, found: dict[str, Any]) -> None:
    assert found["exported"] == found["ends"][1]
    model = PeftModel.from_pretrained(models.build("qwen3_5"), folder / "adapter").eval()
    with torch.no_grad():
        given = model(**trained.inputs(0), use_cache=False).logits
    for rank in (0, 1):
        wanted = torch.load(folder / f"logits{rank}.pt", weights_only=True)
        assert (given - wanted).abs().max() <= 1e-5


def test_every_rank_hears_that_rank_0_could_not_write(folder: Path, found: dict[str, Any]) -> None:
    first, second = found["full_disk"]
    assert "update-000006 could not be written" in first
    assert "No space left on device" in first
    assert "update-000003 is intact" in first
    assert second == first  # whichever rank's word comes first says why
    assert found["stale"] == ["StaleAttempt", "CheckpointError"]
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["update-000003"]


def test_killed_at_any_file_operation_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    (process,) = lives.start(die_at_every_file_operation, 1, tmp_path, environment={})
    process.join(120)
    assert process.exitcode == 0
    left = json.loads((tmp_path / "left.json").read_text())
    assert [status for status, *_ in left] == [-signal.SIGKILL] * (len(left) - 1) + [0]
    newest = [name for _, name, *_ in left]
    assert newest == sorted(newest)
    assert set(newest) == {"update-000003", "update-000004"}
    assert newest.count("update-000003") > 10, "most of a save is writing aside"
    assert newest.count("update-000004") > 3, "then older ones are dropped"
    for _, name, kept, after in left:
        assert kept[-1] == name
        assert len(kept) >= CONFIG.train.keep_checkpoints
        assert after == [kept[-1], "update-000005"]
