"""What a run that streams needs: the bytes that are alive against the plan's, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.schema import (
    AdapterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    PackConfig,
    StreamConfig,
    TrainConfig,
)
from prefix_train import budget, model, step
from prefix_train.budget import Shape
from prefix_train.collate import Batch
from prefix_train.stream import build, engine, frozen, head, planner, sources
from prefix_train.stream.engine import Streamed
from prefix_train.stream.places import Choice
from prefix_train.stream.store import Store
from tests import streaming
from tests.live_bytes import LiveBytes

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
}
HYBRID = {
    **MODEL,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Blocks of two sizes. The recurrence, in plain torch, needs the most."""
LENGTHS, PARENTS = [1792, 384, 384], [-1, 0, 0]
ROWS = 768


def options(folder: Path, sizes: dict[str, Any] = MODEL, **stream: Any) -> Config:
    return Config(
        engine="stream",
        cluster="debug",
        model=ModelConfig(build=sizes, dtype="bfloat16"),
        pack=PackConfig(max_positions=sum(LENGTHS)),
        adapter=AdapterConfig(rank=4),
        train=TrainConfig(loss_chunk_words=512, loss_chunk_rows=256),
        memory=MemoryConfig(tile_rows=2048),
        stream=StreamConfig(store=str(folder), **{"budget_gib": 1.0, "slots": 2, "resident_blocks": "1"} | stream),
    )


def make_store(folder: Path, weights: Literal["plain", "nf4"], sizes: dict[str, Any] = MODEL) -> Path:
    source = sources.open_source(ModelConfig(build=sizes, dtype="bfloat16"))
    build.build(source, folder / weights, Choice(weights, torch.bfloat16))
    return folder / weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"), "nf4")


def pack(number: int, lengths: Sequence[int] = LENGTHS, count: int = ROWS) -> Batch:
    return streaming.text_batch(lengths, PARENTS, count, 1000, number)


def counted(
    config: Config, packs: int, updates: int = 1, tree: tuple[list[int], list[int], int] = (LENGTHS, PARENTS, ROWS)
) -> tuple[LiveBytes, Streamed, planner.Plan]:
    """So many updates, the last one counted; from the second on the optimizer's moments are there.

    tree: lengths and parents of a pack's segments, and how many rows it predicts."""
    lengths, parents, rows = tree
    plan = planner.make(config, Shape.of(lengths, parents, rows))
    assert config.stream.store is not None
    store = Store.open(Path(config.stream.store))
    given = [streaming.text_batch(lengths, parents, rows, 1000, number) for number in range(packs)]
    with LiveBytes() as live:
        made, _ = engine.load(config.model, store)
        root = Streamed(
            model.prepare(made, config), config, store, torch.device("cpu"), images=False, resident=plan.resident
        )
        trainer = streaming._stepper(root, config, 1e-3)
        for number in range(updates):
            live.peak = 0
            step.update(trainer, number, 1e-3, given)
    return live, root, plan


@pytest.mark.parametrize("sizes", [MODEL, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize(("weights", "together", "updates"), [("nf4", 1, 2), ("nf4", 2, 1), ("plain", 1, 1)])
def test_r64_planned_memory_is_what_is_counted(
    weights: Literal["plain", "nf4"], together: int, updates: int, sizes: dict[str, Any], tmp_path: Path
) -> None:
    config = options(make_store(tmp_path, weights, sizes), sizes, packs_per_visit=together)
    live, root, plan = counted(config, together, updates)
    assert live.peak == pytest.approx(plan.needed, rel=0.05), live.largest
    weights = {term.name: term.bytes for term in plan.budget.terms}
    assert root.ring.held_bytes == weights["slots"] + weights["resident blocks"]
    assert root.head.ring.held_bytes == weights["tiles of the head"]


TREES = {
    "300 positions": ([300], [-1], 100),
    "a small tree": ([120, 60, 30, 30, 60], [-1, 0, 1, 1, 0], 100),
    "three depths": ([400, 200, 200, 100, 100], [-1, 0, 1, 2, 2], 300),
    "short branches": ([300, *[24] * 60], [-1, *[0] * 60], 600),
    "3,000 positions": ([1200, 600, 300, 300, 600], [-1, 0, 1, 1, 0], 900),
}


@pytest.mark.parametrize("sizes", [MODEL, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize(("weights", "resident", "dropout"), [("plain", 1, 0.0), ("nf4", 3, 0.1)])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_r64_planned_memory_is_what_is_counted_of_other_packs(
    tree: tuple[list[int], list[int], int],
    weights: Literal["plain", "nf4"],
    resident: int,
    dropout: float,
    sizes: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = options(make_store(tmp_path, weights, sizes), sizes, resident_blocks=str(resident))
    config = replace(
        config,
        pack=PackConfig(max_positions=sum(tree[0])),
        adapter=replace(config.adapter, dropout=dropout),
    )
    live, _, plan = counted(config, 1, updates=2, tree=tree)
    assert live.peak == pytest.approx(plan.needed, rel=0.05), live.largest


def test_inputs_on_the_host_are_planned_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PINNED_CHUNK", 1 << 20)
    config = replace(options(folder), memory=MemoryConfig(tile_rows=2048, offload="auto"))
    live, root, plan = counted(config, 1)
    on_host = plan.budget.total("host")
    assert root.offload is not None
    assert root.offload.pool.size == root.offload.pool.peak == on_host
    assert live.peak - on_host == pytest.approx(plan.needed, rel=0.05), live.largest


def test_r64_nothing_is_upcast(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    within, call = frozen.Frozen.within, head.Embedding.__call__

    def watched(self: frozen.Frozen, buffer: Tensor) -> Any:
        inner = within(self, buffer)
        inner.__enter__()
        seen.update(owner._parameters[name].dtype for owner, name, *_ in self._places)  # type: ignore[union-attr]
        inner.__exit__(None, None, None)
        return within(self, buffer)

    def rows(self: head.Embedding, ids: Tensor) -> Tensor:
        found = call(self, ids)
        seen.add(found.dtype)
        return found

    monkeypatch.setattr(frozen.Frozen, "within", watched)
    monkeypatch.setattr(head.Embedding, "__call__", rows)
    _, root, _ = counted(options(folder), 1)
    there = [parameter for parameter in root.model.parameters() if not parameter.requires_grad]
    assert seen | {parameter.dtype for parameter in there} == {torch.bfloat16}
    assert {parameter.dtype for parameter in root.model.parameters() if parameter.requires_grad} == {torch.float32}


def plant_upcast_embeddings(patch: pytest.MonkeyPatch) -> None:
    """Embedding rows come in float32: so does every layer's input."""
    call = head.Embedding.__call__
    patch.setattr(head.Embedding, "__call__", lambda self, ids: call(self, ids).float())


def plant_whole_head(patch: pytest.MonkeyPatch) -> None:
    """The head lies on the device, in float32."""
    init = engine.Streamed.__init__

    def planted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.whole_head = nn.Parameter(torch.zeros(MODEL["vocab_size"], MODEL["hidden_size"]), False)  # type: ignore[call-overload]

    patch.setattr(engine.Streamed, "__init__", planted)


def plant_block_dequantised(patch: pytest.MonkeyPatch) -> None:
    """All matrices of a block are there at once, in float32."""
    within = frozen.Frozen.within

    def planted(self: frozen.Frozen, buffer: Tensor) -> Any:
        self.all = [frozen.unpack(stored, buffer).float() for *_, stored in self._places]  # type: ignore[attr-defined]
        return within(self, buffer)

    patch.setattr(frozen.Frozen, "within", planted)


@pytest.mark.parametrize("plant", [plant_upcast_embeddings, plant_whole_head, plant_block_dequantised])
def test_r64_fails_without_fix(
    folder: Path, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    try:
        live, _, plan = counted(options(folder), 1)
    except (RuntimeError, ValueError) as error:  # the head has another dtype than what comes to it
        assert "hidden is torch.float32" in str(error) or "dtype" in str(error)  # noqa: PT017
        return
    assert live.peak > 1.05 * plan.needed


class Large(TorchDispatchMode):
    """Collects what operations made of more than a MiB: bytes, operation."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        if any(isinstance(one, frozen.Packed) for one in given):
            with self:
                return frozen.Packed.__torch_dispatch__(func, types, args, kwargs)
        found = func(*args, **kwargs)
        old = {one.untyped_storage()._cdata for one in given if isinstance(one, Tensor)}
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and not isinstance(one, frozen.Packed) and not one.is_meta:
                storage = one.untyped_storage()
                if storage._cdata not in old and storage.nbytes() > 1 << 20:
                    self.made.append((storage.nbytes(), str(func)))
        return found


def steady(folder: Path) -> list[tuple[int, str]]:
    """What the third of three updates made of more than a MiB; few positions, so that only weights are that large."""
    build_ = {**MODEL, "intermediate_size": 4096, "num_hidden_layers": 4}
    config = options(folder / "wide")
    config = replace(config, model=replace(config.model, build=build_), stream=replace(config.stream, slots=2))
    build.build(sources.open_source(config.model), folder / "wide", Choice("nf4", torch.bfloat16))
    store = Store.open(folder / "wide")
    made, _ = engine.load(config.model, store)
    root = Streamed(engine.prepare(made, config), config, store, torch.device("cpu"), images=False, resident=1)
    trainer = streaming._stepper(root, config, 1e-3)
    batch = pack(0, [40, 8, 8], 16)
    for number in range(2):
        step.update(trainer, number, 1e-3, [batch])
    with Large() as large:
        step.update(trainer, 2, 1e-3, [batch])
    return large.made


def test_updates_after_the_first_allocate_nothing_large(tmp_path: Path) -> None:
    """Slots, residents, tiles of the head and the dequantised matrix are made once: an allocator that has little room
    is not asked for large pieces again and again."""
    assert steady(tmp_path) == []


def test_matrices_of_their_own_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = frozen.Matrix.whole
    monkeypatch.setattr(frozen.Matrix, "whole", lambda self, product: whole(self, False))
    assert len(steady(tmp_path)) >= 4 * 3
