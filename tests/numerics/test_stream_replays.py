"""Public faults of streaming: a run that learns nothing, a model that was not loaded, figures that mislead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.errors import UserError
from prefix_train import gradients, step, verify
from prefix_train.collate import Batch
from prefix_train.dist import Ranks
from prefix_train.evaluate import losses
from prefix_train.packing import Pack
from prefix_train.stream import engine, figures, walk
from prefix_train.stream.figures import Misleading, Row
from prefix_train.stream.store import Store
from prefix_train.tensors import digest
from tests import batches, streaming

COUNT = 6
GROUPS = [[0, 1, 2], [3], [4, 5]]
CAP = 4096
"""Positions that a pack may have."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Store]:
    made = streaming.built("qwen3_5_text", torch.bfloat16)
    return made, streaming.stored(made, tmp_path_factory.mktemp("hybrid") / "store", "nf4")


def trained(made: PreTrainedModel, store: Store) -> tuple[step.Stepper, str, str]:
    """Two updates; the adapters' hash before and after."""
    trainer = streaming.pair(made, store, streaming.options(torch.bfloat16), lr=1e-2).stream
    before = digest(dict(trainer.parameters))
    for number in range(2):
        step.update(trainer, number, 1e-2, batches.batches(batches.make(made, COUNT), GROUPS))
    return trainer, before, digest(dict(trainer.parameters))


def test_r63_every_adapter_learns(hybrid: tuple[PreTrainedModel, Store]) -> None:
    trainer, before, after = trained(*hybrid)
    assert trainer.coverage.waiting == []
    assert all(gradient.abs().sum() > 0 for gradient in streaming.gradient(trainer).values())
    assert before != after


def test_r63_fails_without_fix(hybrid: tuple[PreTrainedModel, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients end in copies of parameters: with the check the first update ends, without it nothing is learned."""

    def lost(self: walk.Walk, grads: Sequence[Tensor]) -> None:
        self.passages.clear()

    monkeypatch.setattr(walk.Walk, "down", lost)
    with pytest.raises(gradients.NothingLearned, match="lora_B"):
        trained(*hybrid)
    monkeypatch.setattr(gradients.Coverage, "check", lambda self, norms, images: None)
    _, before, after = trained(*hybrid)
    assert before == after


# What is measured is the model that was meant.


def without(store: Store, block: str, tensor: str) -> Store:
    """The store as if it had never had this tensor."""

    def rest(one: Any) -> Any:
        kept = tuple(stored for stored in one.tensors if stored.name != tensor)
        return replace(one, tensors=kept) if one.name == block else one

    return Store(store.folder, replace(store.manifest, blocks=tuple(map(rest, store.blocks))))


def loss_at_step_0(made: PreTrainedModel, store: Store) -> tuple[float, float]:
    """Mean loss of examples before any update: streamed, and by transformers' own model, each example alone."""
    examples = batches.make(made, COUNT)
    config = streaming.options(torch.float32, adapter={"dropout": 0.0})
    root = engine.Streamed(
        streaming.model.prepare(streaming.hollow(made, store), config),
        config,
        store,
        torch.device("cpu"),
        images=False,
        resident=0,
    )
    given: list[Pack] = [batches.pack(examples, group) for group in GROUPS]
    mine = losses(root, given, examples, Ranks(0, 1, torch.device("cpu"), None))
    theirs = [verify._standalone_loss(made, example).item() for example in examples]
    return sum(mine.values()) / COUNT, sum(theirs) / COUNT


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Store]:
    made = streaming.built("qwen3_5_text", torch.float32)
    return made.eval(), streaming.stored(made, tmp_path_factory.mktemp("plain") / "store", "plain")


def test_r67_the_loss_at_step_0_is_the_source_s(plain: tuple[PreTrainedModel, Store]) -> None:
    mine, theirs = loss_at_step_0(*plain)
    assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("block", "tensor", "named"),
    [
        ("block.1", "mlp.up_proj.weight", "missing keys: model.layers.1.mlp.up_proj.weight: the checkpoint lacks them"),
        ("final_norm", "weight", "missing keys: model.norm.weight"),
    ],
)
def test_r67_a_tensor_that_is_not_there_is_named(
    plain: tuple[PreTrainedModel, Store], block: str, tensor: str, named: str
) -> None:
    made, store = plain
    with pytest.raises(UserError, match=named):
        streaming.hollow(made, without(store, block, tensor))


def test_r67_tensors_that_nothing_asks_for_are_named(plain: tuple[PreTrainedModel, Store]) -> None:
    made, store = plain
    (found,) = [block for block in store.blocks if block.name == "final_norm"]
    other = replace(found, tensors=(replace(found.tensors[0], name="scale"),))
    blocks = tuple(other if block is found else block for block in store.blocks)
    with pytest.raises(UserError, match=r"missing keys: model\.norm\.weight"):
        streaming.hollow(made, Store(store.folder, replace(store.manifest, blocks=blocks)))
    more = replace(found, tensors=(*found.tensors, *other.tensors))
    blocks = tuple(more if block is found else block for block in store.blocks)
    with pytest.raises(UserError, match=r"unexpected keys: model\.norm\.scale: the model has no such tensors"):
        streaming.hollow(made, Store(store.folder, replace(store.manifest, blocks=blocks)))


def test_r67_fails_without_fix(plain: tuple[PreTrainedModel, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the audit a model that was half loaded is measured, and the loss at step 0 tells."""
    made, store = plain
    monkeypatch.setattr(engine, "_audit", lambda model, store: None)
    mine, theirs = loss_at_step_0(made, without(store, "final_norm", "weight"))
    assert mine != pytest.approx(theirs, rel=1e-2)


# Figures.


def given(made: PreTrainedModel) -> list[Batch]:
    return batches.batches(batches.make(made, COUNT), GROUPS)


def tokens_are_counted(hybrid: tuple[PreTrainedModel, Store]) -> None:
    made, store = hybrid
    config = streaming.options(torch.bfloat16, pack={"max_positions": CAP})
    both = streaming.pair(made, store, config)
    packs = given(made)
    found, _ = streaming.updated(both, packs)
    tokens = sum(batch.layout.total for batch in packs)
    assert tokens < 200
    assert figures.count(packs) == (tokens, found.logical, found.targets)
    assert found.positions == tokens


def test_r68_tokens_are_counted_from_tensors(hybrid: tuple[PreTrainedModel, Store]) -> None:
    tokens_are_counted(hybrid)


def row(name: str, positions: int, seconds: float, **more: Any) -> Row:
    """Of a machine that computes 1,000 positions a second and reads for 0.5 s."""
    bound = max(0.5, positions / 1000)
    return Row(
        name,
        positions,
        positions,
        10,
        seconds,
        5 * 10**8,
        bound,
        **{"budget_gib": 6.0, "peak_bytes": 5 << 30, "warm": True} | more,
    )


def flat_times_are_refused() -> None:
    honest = [row("512", 512, 0.6), row("4,096", 4096, 4.5)]
    assert figures.table(honest).count("\n") == 3
    with pytest.raises(
        Misleading, match=r"4,096: 0\.600 s for 4,096 positions, .* 4\.096 s at least: they were not all"
    ):
        figures.table([row("512", 512, 0.6), row("4,096", 4096, 0.6)])


def test_r68_a_time_that_does_not_grow_with_the_length_is_refused() -> None:
    flat_times_are_refused()


def test_r68_fails_without_fix(hybrid: tuple[PreTrainedModel, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the cap, tokens are not those of the tensors; and a table without a bound takes any time."""
    count = figures.count
    monkeypatch.setattr(figures, "count", lambda packs: (CAP * len(packs), *count(packs)[1:]))
    with pytest.raises(AssertionError):
        tokens_are_counted(hybrid)
    monkeypatch.setattr(figures, "POSSIBLE", 0.0)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        flat_times_are_refused()


def unequal_rows_are_refused() -> None:
    equal = [row("pack", 4096, 4.5), row("accumulation", 4096, 9.0)]
    assert figures.table(equal).count("| 6 |") == 2
    with pytest.raises(Misleading, match=r"budgets of 4, 6 GiB are no comparison"):
        figures.table([equal[0], row("smaller", 4096, 9.0, budget_gib=4.0)])
    with pytest.raises(Misleading, match="cold and warm"):
        figures.table([equal[0], row("first", 4096, 9.0, warm=False)])


def test_r69_unequal_budgets_are_not_put_in_one_table() -> None:
    unequal_rows_are_refused()


def test_r69_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that are taken for equal: the smaller one's row stands in the table and looks worse."""
    monkeypatch.setattr(figures, "sorted", lambda budgets: [max(budgets)], raising=False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        unequal_rows_are_refused()
    assert "| smaller |" in figures.table([row("pack", 4096, 4.5), row("smaller", 4096, 9.0, budget_gib=4.0)])
