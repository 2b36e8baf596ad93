"""The whole way of the product, from rows and PNG files to gradients and updates, against each example alone.

The product: rendered, grouped by the plan, collated, recomputed, updated by `step.update`. The oracle: transformers'
processor and classes, one example at a time, and torch's own optimizer.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema import AdapterConfig, Config, MemoryConfig, PackConfig, TrainConfig
from prefix_train import anatomy, evaluate, gradients, model, step
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.packing import Pack
from prefix_train.plan import Plan, Update, plan_epoch, plan_run
from prefix_train.render import Example
from prefix_train.tree import build_forest
from tests import conversations, oracle
from tests.conversations import Images

Weighting = Literal["example", "token"]
MIN_SHARED = 4
IN_FLOAT64, IN_FLOAT32 = (1e-10, 1e-10), (5e-6, 5e-5)
"""Bounds, relative: of losses, of each gradient tensor."""

GROUPINGS = [
    PackConfig(max_positions=4096, min_shared=MIN_SHARED, examples_per_update=64),
    PackConfig(max_positions=170, min_shared=MIN_SHARED, examples_per_update=64),
    PackConfig(max_positions=140, min_shared=MIN_SHARED, packs_per_update=3),
    PackConfig(max_positions=200, min_shared=MIN_SHARED, packs_per_update=2),
    PackConfig(max_positions=190, min_shared=MIN_SHARED, packs_per_update=1),
    PackConfig(max_positions=4096, min_shared=MIN_SHARED, examples_per_update=5, mode="standalone"),
]


@dataclass
class Case:
    """A model to train, examples of the product, and what the oracle says of each alone.

    losses: mean over its targets. gradients: of that mean, by the names of the model under PEFT.
    """

    base: PreTrainedModel
    adapted: nn.Module
    config: Config
    examples: list[Example]
    alone: list[oracle.Example]
    losses: list[float]
    gradients: list[dict[str, Tensor]]

    def truth(self, members: Sequence[int], weighting: Weighting) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of an update with these members."""
        counts = [len(self.alone[member].targets) for member in members]
        shares = [1 / len(members) if weighting == "example" else count / sum(counts) for count in counts]
        loss = sum(share * self.losses[member] for share, member in zip(shares, members, strict=True))
        names = {name for member in members for name in self.gradients[member]}
        total = {}
        for name in names:
            parts = [
                share * self.gradients[member][name].double()
                for share, member in zip(shares, members, strict=True)
                if name in self.gradients[member]
            ]
            total[name] = torch.stack(parts).sum(0)
        return loss, total


def make(
    folder: Path, family: str, images: Images, dtype: torch.dtype, trainable: Literal["all", "adapter"] = "all"
) -> Case:
    """The oracle runs here, on a model that nothing of ours has touched but what PEFT was asked for."""
    base, processor = conversations.build(family, dtype)
    rows = conversations.rows(images, folder)
    if family != "qwen3_5":
        rows = conversations.texts(rows)
    config = Config(
        train=TrainConfig(trainable=trainable), adapter=AdapterConfig(rank=2), memory=MemoryConfig(recompute=True)
    )
    adapted = model.adapt(base, config)
    with torch.no_grad():
        for name, parameter in anatomy.trainable(adapted).items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    case = Case(
        base,
        adapted,
        config,
        conversations.product(rows, folder, base, processor),
        conversations.alone(rows, folder, processor),
        [],
        [],
    )
    prefix = "" if adapted is base else "base_model.model."
    for example in case.alone:
        result = oracle.run(base, [example], getattr(base.config, "image_token_id", None))
        case.losses.append(float(result.loss))
        case.gradients.append({prefix + name: gradient for name, gradient in result.gradients.items()})
    return case


def trainer(case: Case, lr: float = 0.0, clip_norm: float = 0.0) -> step.Stepper:
    """What trains `case.adapted`, which is patched by this."""
    model.make_ready(case.adapted, case.config)
    dtype = next(case.base.parameters()).dtype
    images = any(example.images for example in case.examples)
    root = model.Root(case.adapted.train(), dtype, chunk_rows=7, images=images)
    parameters = anatomy.trainable(case.adapted)
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    vision = frozenset(name for name in parameters if ".visual." in name)
    coverage = gradients.Coverage(list(parameters), vision, warmup=1 << 30)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    return step.Stepper(root, parameters, optimizer, ranks, coverage, seed=5, clip_norm=clip_norm)


def planned(case: Case, pack: PackConfig, seed: int) -> Plan:
    forest = build_forest([example.keys for example in case.examples], MIN_SHARED)
    return plan_epoch(forest.lengths, forest, pack, ranks=1, seed=seed, epoch=0)


def batches_of(case: Case, update: Update, weighting: Weighting) -> list[Batch]:
    counts = [int(case.examples[member].target.sum()) for pack in update[0] for member in pack.members]
    weights = entry_weights(weighting, counts)
    dtype = next(case.base.parameters()).dtype
    return [collate(pack, case.examples, weights, dtype) for pack in update[0]]


def members_of(update: Update) -> list[int]:
    return list(chain.from_iterable(pack.members for rank in update for pack in rank))


def taken(run: step.Stepper) -> dict[str, Tensor]:
    """The gradients that the last update left."""
    return {name: parameter.grad for name, parameter in run.parameters.items() if parameter.grad is not None}


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    """Each gradient tensor; one below 1e-6 of all gradients' norm is held against that."""
    whole = torch.stack([each.norm() for each in theirs.values()]).norm()
    worst = {}
    for name, gradient in mine.items():
        other = theirs.get(name, torch.zeros_like(gradient, dtype=torch.float64))
        worst[name] = float((gradient.double() - other).norm() / max(other.norm(), 1e-6 * whole))
    assert theirs.keys() <= mine.keys()
    name = max(worst, key=worst.__getitem__)
    assert worst[name] <= bound, f"gradient of {name}: {worst[name]:.1e}"


def check(case: Case, groupings: Sequence[PackConfig], weightings: Sequence[Weighting], bounds: Any) -> None:
    """Every update of these plans has the loss, the losses of each example and the gradients that the oracle has."""
    run, (loss_bound, gradient_bound) = trainer(case), bounds
    for seed, (pack, weighting) in enumerate((pack, weighting) for pack in groupings for weighting in weightings):
        plan = planned(case, pack, seed)
        for update in plan.updates:
            batches = batches_of(case, update, weighting)
            result = step.update(run, seed, 0.0, batches)
            loss, truth = case.truth(members_of(update), weighting)
            assert abs(result.loss - loss) <= loss_bound * abs(loss)
            assert_same(taken(run), truth, gradient_bound)
        for batch in batches:
            found = evaluate.example_losses(run.root(batch).each, batch)
            for member, value in found.items():
                assert abs(value - case.losses[member]) <= loss_bound * case.losses[member]


@pytest.mark.parametrize("images", ["neither", "prefix", "item", "both"])
def test_images_everywhere_in_float64(tmp_path: Path, images: Images, wide: None) -> None:
    check(make(tmp_path, "qwen3_5", images, torch.float64), GROUPINGS[::2], ["example", "token"], IN_FLOAT64)


@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen3_5_moe_text"])
def test_any_grouping_in_float64(tmp_path: Path, family: str, wide: None) -> None:
    check(
        make(tmp_path, family, "both" if family == "qwen3_5" else "neither", torch.float64),
        GROUPINGS,
        ["example"],
        IN_FLOAT64,
    )


@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen3_5_moe_text"])
def test_any_grouping_against_stock_float32(tmp_path: Path, family: str) -> None:
    check(
        make(tmp_path, family, "both" if family == "qwen3_5" else "neither", torch.float32),
        GROUPINGS,
        ["token"],
        IN_FLOAT32,
    )


@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen3_5_moe_text"])
def test_adapters_in_float64(tmp_path: Path, family: str, wide: None) -> None:
    case = make(tmp_path, family, "both" if family == "qwen3_5" else "neither", torch.float64, "adapter")
    check(case, GROUPINGS[:3], ["example", "token"], IN_FLOAT64)


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_twenty_updates_in_float64(tmp_path: Path, family: str, wide: None) -> None:
    """Packs, one example per buffer, and the oracle with torch's own AdamW: all three stay together."""
    case = make(tmp_path, family, "both" if family == "qwen3_5" else "neither", torch.float64)
    other = replace(case, adapted=copy.deepcopy(case.adapted))
    alone, image_token = copy.deepcopy(case.base), getattr(case.base.config, "image_token_id", None)
    start = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
    runs = [trainer(each, clip_norm=0.5) for each in (case, other)]
    optimizer = torch.optim.AdamW(alone.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    plans = [updates_of(case, mode) for mode in ("shared", "standalone")]
    for number, updates in enumerate(zip(*plans, strict=True)):
        lr, members = step.learning_rate(number, 20, 1e-3, 5, "cosine"), members_of(updates[0])
        assert sorted(members) == sorted(members_of(updates[1]))
        results = [
            step.update(run, number, lr, batches_of(case, update, "example"))
            for run, update in zip(runs, updates, strict=True)
        ]
        truth = oracle.run(alone, weighted(case, members), image_token)
        norm = float(torch.stack([gradient.norm() for gradient in truth.gradients.values()]).norm())
        for name, parameter in alone.named_parameters():
            # A tower that no image of the update went through has a gradient of zero, not none: AdamW's averages go on.
            parameter.grad = truth.gradients.get(name, torch.zeros_like(parameter)) * min(1.0, 0.5 / norm)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for result in results:
            assert result.loss == pytest.approx(float(truth.loss), rel=1e-9)
            assert result.norm == pytest.approx(norm, rel=1e-8)
    assert number == 19
    # AdamW divides by the gradient's size: where that is tiny, rounding is a fraction of a step of 1e-3.
    for name, parameter in alone.named_parameters():
        moved = (parameter - start[name]).norm()
        assert moved > 0
        for run in runs:
            assert (run.parameters[name] - parameter).norm() <= 1e-6 * moved, name


def updates_of(case: Case, mode: Literal["shared", "standalone"]) -> list[Update]:
    """The first 20 updates of a run with four examples an update."""
    forest = build_forest([example.keys for example in case.examples], MIN_SHARED)
    pack = PackConfig(max_positions=260, min_shared=MIN_SHARED, examples_per_update=4, mode=mode)
    run = plan_run(forest.lengths, forest, pack, 1, seed=3, updates=20)
    return [each.update for each in run.walk()]


def weighted(case: Case, members: Sequence[int]) -> list[oracle.Example]:
    """These examples for an update of the oracle, weighted alike."""
    examples = [case.alone[member] for member in members]
    return [replace(example, weights=example.weights / len(members)) for example in examples]


def test_the_examples_are_what_the_proof_needs(tmp_path: Path) -> None:
    """Proper prefixes, equal examples, targets that start a segment, packs of an update, images at every place."""
    case = make(tmp_path, "qwen3_5", "both", torch.float32)
    ids = [example.ids.tolist() for example in case.examples]
    assert any(a != b and b[: len(a)] == a for a in ids for b in ids)
    assert any(a == b for a, b in itertools.combinations(ids, 2))
    for example, alone in zip(case.examples, case.alone, strict=True):
        assert example.ids.tolist() == alone.ids.tolist()
        assert np.flatnonzero(example.target).tolist() == alone.targets.tolist()
    updates = [update for seed, pack in enumerate(GROUPINGS) for update in planned(case, pack, seed).updates]
    assert {len(update[0]) for update in updates} >= {1, 2, 3}
    packs = [pack for update in updates for pack in update[0]]
    assert len({frozenset(pack.members) for pack in packs}) > 20
    assert max(len(path) for pack in packs for path in pack.paths) >= 4
    assert any(starts_with_a_target(case, pack) for pack in packs)
    whole = collate(max(packs, key=lambda pack: len(pack.members)), case.examples, entry_weights("example", [1]))
    images = [len(example.images) for example in case.examples]
    assert max(images) == 2
    assert len(whole.grids) < sum(images)


def starts_with_a_target(case: Case, pack: Pack) -> bool:
    """Has the pack a segment other than a root that begins with a target of a member below it?"""
    return any(
        case.examples[member].target[sum(pack.lengths[above] for above in path[:depth])]
        for member, path in zip(pack.members, pack.paths, strict=True)
        for depth in range(1, len(path))
    )


FAULTS = {
    "the row before in the buffer predicts": ("prefix_train.collate.prediction_rows", lambda place, at: place[at] - 1),
    "positions count the buffer": (
        "prefix_train.collate.position_ids",
        lambda pieces: torch.arange(sum(end - start for _, start, end in pieces)).expand(3, 1, -1),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str, wide: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(tmp_path, "qwen3_5", "both", torch.float64)
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        check(case, GROUPINGS[:1], ["example"], (1e-3, 1e-3))
