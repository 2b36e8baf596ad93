"""Saving and resuming in one process: exact, strict, whole or not at all."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs import runfolder
from configs.schema import Config, TrainConfig
from prefix_train import checkpoint, tensors
from prefix_train.dist import Ranks
from prefix_train.tensors import TensorError
from tests import trained

CONFIG = Config()
ALONE = Ranks(0, 1, torch.device("cpu"), None)


def cursor(update: int) -> checkpoint.Cursor:
    return checkpoint.Cursor(update=update, epoch=0, done=update, plan="a" * 64)


class Life:
    """A model and its optimizer, as a process would hold them."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = trained.adapted(seed=seed)
        self.optimizer = trained.adamw(self.model)

    def train(self, updates: range) -> list[float]:
        return trained.train(self.model, self.optimizer, updates)

    def save(self, run: Path, update: int, config: Config = CONFIG) -> Path:
        return checkpoint.save(run, ALONE, trained.trainable(self.model), self.optimizer, cursor(update), config)

    def load(self, folder: Path, config: Config = CONFIG) -> checkpoint.Resumed:
        return checkpoint.load(folder, ALONE, trained.trainable(self.model), self.optimizer, config)


@pytest.fixture(scope="module")
def life() -> Life:
    """A model after two updates; tests that share it only save it."""
    life = Life()
    life.train(range(2))
    return life


def rewrite_manifest(folder: Path) -> None:
    """Make the manifest fit what lies there, as if a faulty writer had written it."""
    names = [checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.RANDOM, checkpoint.STATE]
    files = {n: {"bytes": (folder / n).stat().st_size, "sha256": tensors.sha256(folder / n)} for n in names}
    runfolder.write_json(folder / checkpoint.MANIFEST, {"files": files})


def test_resuming_gives_the_losses_of_the_unbroken_run(tmp_path: Path) -> None:
    first = Life()
    first.train(range(3))
    folder = first.save(tmp_path, 3)
    expected = first.train(range(3, 6))
    draws = (random.random(), np.random.rand(), np.random.standard_normal())
    random.seed(1)
    np.random.seed(1)
    second = Life(seed=7)
    assert checkpoint.latest(tmp_path) == folder
    resumed = second.load(folder)
    assert (resumed.cursor, resumed.changes) == (cursor(3), ())
    assert "same ranks, threads" in resumed.line
    assert second.train(range(3, 6)) == expected
    assert (random.random(), np.random.rand(), np.random.standard_normal()) == draws
    for name, tensor in trained.trainable(first.model).items():
        assert torch.equal(tensor, trained.trainable(second.model)[name]), name


def test_r10_exactly_what_is_trained_in_full_and_the_optimizer(tmp_path: Path) -> None:
    first = Life()
    first.train(range(2))
    folder = first.save(tmp_path, 2)
    wanted = trained.trainable(first.model)
    stored = load_file(folder / checkpoint.MODEL)
    assert {name: tuple(t.shape) for name, t in stored.items()} == {n: tuple(t.shape) for n, t in wanted.items()}
    assert any("merger" in name for name in stored)
    assert any("lora_A" in name for name in stored)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16 * sum(t.numel() for t in wanted.values()) + 65536
    expected = first.train(range(2, 3))
    second = Life(seed=3)
    second.load(folder)
    assert second.train(range(2, 3)) == expected


def lenient(path: Path, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The fault: what is not there is passed over."""
    stored = load_file(path)
    yield from ((name, stored[name]) for name in wanted if name in stored)


def test_r10_fails_without_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Life()
    first.train(range(2))
    folder = first.save(tmp_path, 2)
    expected = first.train(range(2, 3))
    save_file({}, folder / checkpoint.MODEL)
    rewrite_manifest(folder)
    second = Life(seed=3)
    with pytest.raises(TensorError, match="missing"):
        second.load(folder)
    monkeypatch.setattr(checkpoint, "read_tensors", lenient)
    second.load(folder)
    assert second.train(range(2, 3)) != expected


def without_merger(folder: Path) -> str:
    """Take one tensor of the merger out of the file; its name."""
    stored = load_file(folder / checkpoint.MODEL)
    name = next(name for name in stored if "merger" in name)
    stored["base_model.model.visual.merger.old_name"] = stored.pop(name)
    save_file(stored, folder / checkpoint.MODEL)
    rewrite_manifest(folder)
    return name


def test_r11_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    first = Life()
    first.train(range(2))
    folder = first.save(tmp_path, 2)
    second = Life(seed=3)
    before = trained.loss(second.model, 9).item()
    second.load(folder)
    assert trained.loss(second.model, 9).item() != before, "loading changes the output"
    name = without_merger(folder)
    assert checkpoint.latest(tmp_path) == folder
    with pytest.raises(TensorError) as caught:
        Life(seed=3).load(folder)
    assert f"missing {name}, unexpected base_model.model.visual.merger.old_name" in str(caught.value)
    assert str(folder / checkpoint.MODEL) in str(caught.value)


def test_r11_fails_without_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Life()
    first.train(range(2))
    folder = first.save(tmp_path, 2)
    name = without_merger(folder)
    monkeypatch.setattr(checkpoint, "read_tensors", lenient)
    second = Life(seed=3)
    second.load(folder)
    assert not torch.equal(trained.trainable(second.model)[name], trained.trainable(first.model)[name])


def test_shapes_are_compared(tmp_path: Path, life: Life) -> None:
    folder = life.save(tmp_path, 2)
    stored = load_file(folder / checkpoint.MODEL)
    name = next(name for name in stored if "lora_A" in name)
    stored[name] = stored[name][:2].clone()
    save_file(stored, folder / checkpoint.MODEL)
    with pytest.raises(TensorError, match=r"has shape \(2, 32\), the model's has \(4, 32\)"):
        Life().load(folder)


def test_a_parameter_that_never_had_a_gradient_keeps_no_state(tmp_path: Path) -> None:
    first = Life()
    trained.loss(first.model, 0, images=False).backward()
    first.optimizer.step()
    first.optimizer.zero_grad()
    folder = first.save(tmp_path, 1)
    expected = first.train(range(1, 4))
    second = Life(seed=5)
    second.train(range(2))
    second.load(folder)
    assert second.train(range(1, 4)) == expected


def test_only_text_json_and_safetensors(tmp_path: Path, life: Life) -> None:
    folder = life.save(tmp_path, 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "random.json",
        "state.json",
    ]
    for path in folder.glob("*.json"):
        json.loads(path.read_text())


def test_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / "checkpoints" / "update-000003.node.77.tmp").mkdir(parents=True)
    (tmp_path / "checkpoints" / "update-000004").write_text("no folder")
    assert checkpoint.latest(tmp_path) is None


def test_what_a_killed_save_left_is_passed_over_and_removed_later(tmp_path: Path, life: Life) -> None:
    folder = life.save(tmp_path, 2)
    partial = tmp_path / "checkpoints" / "update-000003.node.77.tmp"
    partial.mkdir()
    (partial / checkpoint.MODEL).write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == folder
    life.save(tmp_path, 4)
    assert not partial.exists()


def test_the_newest_are_kept_and_numbers_are_not_text(tmp_path: Path, life: Life) -> None:
    config = replace(CONFIG, train=TrainConfig(keep_checkpoints=2))
    for update in (1, 999_999, 1_000_000, 1_000_001):
        life.save(tmp_path, update, config)
    names = ["update-1000000", "update-1000001"]
    assert [path.name for path in checkpoint.complete(tmp_path)] == names
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names


def test_a_checkpoint_moved_elsewhere_is_read_and_its_target_stays(tmp_path: Path, life: Life) -> None:
    """A link from `checkpoints/` to another disk."""
    folder, elsewhere = life.save(tmp_path, 1), tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert checkpoint.latest(tmp_path) == folder
    newer = life.save(tmp_path, 2, replace(CONFIG, train=TrainConfig(keep_checkpoints=1)))
    assert list((tmp_path / "checkpoints").iterdir()) == [newer]
    checkpoint.verify(elsewhere)


@pytest.mark.parametrize("content", ["[" * 100_000, "null", '{"files": []}', None])
def test_a_manifest_that_is_none(tmp_path: Path, life: Life, content: str | None) -> None:
    manifest = life.save(tmp_path, 1) / checkpoint.MANIFEST
    manifest.unlink()
    if content is None:
        manifest.mkdir()
    else:
        manifest.write_text(content)
    with pytest.raises(TensorError, match=r"manifest.json is damaged .*; move .*update-000001 away"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize(
    "name", [checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.RANDOM, checkpoint.STATE, checkpoint.MANIFEST]
)
def test_damage_is_found_and_an_older_checkpoint_is_not_taken_instead(tmp_path: Path, life: Life, name: str) -> None:
    life.save(tmp_path, 1)
    folder = life.save(tmp_path, 2)
    whole = (folder / name).read_bytes()
    places = random.Random(0).sample(range(len(whole)), 20)
    kept = json.loads(whole) if name == checkpoint.MANIFEST else None
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << (place % 8)
        (folder / name).write_bytes(broken)
        if kept is not None and _json_or_none(broken) == kept:
            continue
        with pytest.raises(TensorError, match="update-000002"):
            checkpoint.latest(tmp_path)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:length])
        if kept is not None and _json_or_none(whole[:length]) == kept:
            continue
        with pytest.raises(TensorError, match=name):
            checkpoint.latest(tmp_path)
    (folder / name).unlink()
    with pytest.raises(TensorError, match=f"{name} is missing"):
        checkpoint.latest(tmp_path)
    (folder / name).write_bytes(whole)
    assert checkpoint.latest(tmp_path) == folder


def _json_or_none(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, life: Life) -> None:
    folder = life.save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(checkpoint.CheckpointError, match=r"update-000002 could not be written: .*File too large"):
            life.save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.latest(tmp_path) == folder
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]


def test_a_rank_of_an_earlier_life_does_not_rename(tmp_path: Path, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = life.save(tmp_path, 1)
    (tmp_path / runfolder.ATTEMPT).write_text("2")
    monkeypatch.setenv("PREFIX_TRAIN_ATTEMPT", "1")
    with pytest.raises(runfolder.StaleAttempt):
        life.save(tmp_path, 2)
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]


def test_saving_the_same_update_again(tmp_path: Path, life: Life) -> None:
    folder = life.save(tmp_path, 2)
    assert life.save(tmp_path, 2) == folder
    other = Life(seed=1)
    with pytest.raises(checkpoint.CheckpointError, match="update-000002 exists and holds another state"):
        other.save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == folder


def test_changes_are_named(tmp_path: Path, life: Life) -> None:
    folder = life.save(tmp_path, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        resumed = Life().load(folder, replace(CONFIG, train=TrainConfig(lr=0.5)))
    finally:
        torch.set_num_threads(threads)
    assert resumed.changes == (f"threads {threads} -> {threads + 1}", "train.lr 0.0002 -> 0.5")
    assert resumed.line == (
        f"resumed after update 2: threads {threads} -> {threads + 1}, train.lr 0.0002 -> 0.5: not bit-equal"
    )
    state = json.loads((folder / checkpoint.STATE).read_text())
    assert state["facts"]["ranks"] == 1
    assert state["facts"]["versions"]["torch"] == torch.__version__


def test_another_format_and_another_optimizer(tmp_path: Path, life: Life) -> None:
    folder = life.save(tmp_path, 2)
    fresh = Life()
    sgd = torch.optim.SGD(trained.trainable(fresh.model).values(), lr=0.1)
    with pytest.raises(checkpoint.CheckpointError, match="the optimizer was AdamW, it is SGD"):
        checkpoint.load(folder, ALONE, trained.trainable(fresh.model), sgd, CONFIG)
    state = json.loads((folder / checkpoint.STATE).read_text())
    runfolder.write_json(folder / checkpoint.STATE, {**state, "format": 99})
    with pytest.raises(checkpoint.CheckpointError, match="format 99; this version reads 1"):
        fresh.load(folder)


def test_what_must_not_be_saved(tmp_path: Path, life: Life) -> None:
    wanted = trained.trainable(life.model)

    def save(named: dict[str, Tensor], optimizer: torch.optim.Optimizer = life.optimizer) -> None:
        checkpoint.save(tmp_path, ALONE, named, optimizer, cursor(1), CONFIG)

    with pytest.raises(checkpoint.CheckpointError, match="nothing is trained"):
        save({})
    with pytest.raises(TensorError, match="_checkpoint_wrapped_module"):
        save({f"model._checkpoint_wrapped_module.{name}": tensor for name, tensor in wanted.items()})
    frozen = next(tensor for tensor in life.model.parameters() if not tensor.requires_grad)
    with pytest.raises(checkpoint.CheckpointError, match="requires_grad=False"):
        save({**wanted, "frozen": frozen})
    with pytest.raises(checkpoint.CheckpointError, match=r"torch\.bfloat16"):
        save({**wanted, "half": torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)})
    first = next(iter(wanted))
    with pytest.raises(checkpoint.CheckpointError, match="not the"):
        save({name: tensor for name, tensor in wanted.items() if name != first})
    assert not (tmp_path / "checkpoints").exists()
