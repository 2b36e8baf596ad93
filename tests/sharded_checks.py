"""What two ranks must agree on, and faults that must not go unnoticed. Run by `tests.sharded_run`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from configs.schema import AdapterConfig, Config, DataConfig, MemoryConfig, ModelConfig, PackConfig, TrainConfig
from prefix_train import anatomy, blame, dist, evaluate, gradients, model, offload, shard, step
from prefix_train import feed as feeds
from prefix_train.data import Examples
from prefix_train.dist import Disagreement, Ranks
from prefix_train.plan import Cursor
from tests import batches, fixed_order, models

COUNT = 7

KERNELS = {"cpu": ModelConfig(), "cuda": fixed_order.KERNELS}
"""On a GPU what is checked is the sharding over NCCL, not the kernels."""

Check = Callable[[Ranks], None]


def alone_on(ranks: Ranks) -> Ranks:
    """The only rank, on the same device."""
    return Ranks(0, 1, ranks.device, None)


def trainer(ranks: Ranks, base: Any, dtype: torch.dtype, trainable: str, **given: Any) -> step.Stepper:
    """A stepper on these ranks; adapters are not zero, so that every tensor has a gradient."""
    config = Config(
        train=TrainConfig(trainable=trainable),  # type: ignore[arg-type]
        adapter=AdapterConfig(rank=2, dropout=given.get("dropout", 0.0)),
        memory=MemoryConfig(
            **{name: given[name] for name in ("recompute", "offload", "tile_rows", "keep_middle") if name in given}
        ),
        pack=PackConfig(max_positions=512),
        model=KERNELS[ranks.device.type],
    )
    prepared = model.prepare(base, config)
    with torch.no_grad():
        for name, parameter in anatomy.trainable(prepared).items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    root = model.Root(prepared, dtype, chunk_rows=3, images=given.get("images", False))
    if ranks.mesh is None:
        root.to(ranks.device)
    else:
        given.get("shard", shard.shard)(root, ranks.mesh)
    offload.attach(root, config, ranks.device)
    parameters = anatomy.trainable(prepared)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=0.0)
    vision = frozenset(name for name in parameters if ".visual." in name)
    coverage = gradients.Coverage(list(parameters), vision, warmup=9)
    return step.Stepper(root, parameters, optimizer, ranks, coverage, 5, given.get("clip", 0.0))


def whole(trainer: step.Stepper) -> dict[str, Tensor]:
    """Full gradients of the last update."""
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in trainer.parameters.items()
    }


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    assert mine.keys() == theirs.keys()
    total = torch.stack([each.double().norm() for each in theirs.values()]).norm()
    assert total > 0
    for name, each in theirs.items():
        assert mine[name].dtype == each.dtype
        error = (mine[name] - each).double().norm() / max(each.double().norm(), 1e-6 * total)
        assert error <= bound, f"{name}: {error:.1e}"


def both(ranks: Ranks, family: str, dtype: torch.dtype, trainable: str, groups: list[list[int]], **given: Any) -> Any:
    """One update on one rank, and the same on all ranks: (alone, results), (sharded, result)."""
    base = models.build(family, dtype)
    if given.get("tied"):
        base.config.tie_word_embeddings = True
        base.tie_weights()
        assert base.lm_head.weight is base.model.embed_tokens.weight
    examples = batches.make(base, COUNT, images=given.get("images", False))
    packs = batches.batches(examples, groups, dtype=torch.promote_types(dtype, torch.float32))
    alone = trainer(alone_on(ranks), copy.deepcopy(base), dtype, trainable, **given)
    sharded = trainer(ranks, base, dtype, trainable, **given)
    one = step.update(alone, 0, 0.0, packs)
    two = step.update(sharded, 0, 0.0, packs[ranks.rank :: ranks.world])
    return (alone, one), (sharded, two)


def same_update(family: str, dtype: torch.dtype, trainable: str, groups: list[list[int]], **given: Any) -> Check:
    def check(ranks: Ranks) -> None:
        (alone, one), (sharded, two) = both(ranks, family, dtype, trainable, groups, **given)
        bound = 1e-10 if dtype == torch.float64 else 1e-5
        assert abs(two.loss - one.loss) <= 1e-6 * abs(one.loss)
        assert abs(two.norm - one.norm) <= 1e-5 * one.norm
        assert (two.examples, two.targets, two.positions, two.logical, two.packs) == (
            (one.examples, one.targets, one.positions, one.logical, one.packs)
        )
        assert_close(whole(sharded), whole(alone), bound)
        masters = torch.promote_types(dtype, torch.float32)
        assert {parameter.dtype for parameter in sharded.parameters.values()} == {masters}

    return check


GROUPS = [[0, 1, 2], [3], [4, 5], [6]]
EMPTY_LATE = [[0, 1, 2, 3], [4, 5], [6], []]
EMPTY_RANK = [[0, 1, 2], [], [3, 4, 5, 6], []]
IMAGES_LEFT = [[0, 2, 4, 6], [], [1, 3, 5], []]


def three_updates(ranks: Ranks) -> None:
    base = models.build("qwen3_5", torch.float32)
    examples = batches.make(base, COUNT, images=True)
    pair = [
        trainer(each, copy.deepcopy(base), torch.float32, "all", images=True, clip=0.5)
        for each in (alone_on(ranks), ranks)
    ]
    for number in range(3):
        groups = batches.regroup(COUNT, 4, number)
        packs = batches.batches(examples, groups)
        one = step.update(pair[0], number, 1e-3, packs)
        two = step.update(pair[1], number, 1e-3, packs[ranks.rank :: 2])
        assert abs(two.loss - one.loss) <= 1e-5 * abs(one.loss)
    for name, parameter in pair[1].parameters.items():
        mine, theirs = parameter.full_tensor().detach(), pair[0].parameters[name].detach()  # type: ignore[attr-defined]
        assert (mine - theirs).norm() <= 1e-3 * theirs.norm(), name


def rank_without_image(ranks: Ranks) -> None:
    """Only rank 0 has images: rank 1 still runs tower and merger, and its own gradients do not change."""
    base = models.build("qwen3_5", torch.float32)
    examples = batches.make(base, COUNT, images=True)
    texts = batches.make(base, 2, seed=3)
    joined = [*examples, *texts]
    for trainable in ("all", "adapter"):
        packs = batches.batches(joined, [[0, 1, 2, 3, 4, 5, 6], [7, 8]])
        assert [batch.pixel_values is None for batch in packs] == [False, True]
        alone = trainer(alone_on(ranks), copy.deepcopy(base), torch.float32, trainable, images=True)
        sharded = trainer(ranks, copy.deepcopy(base), torch.float32, trainable, images=True)
        step.update(alone, 0, 0.0, packs)
        step.update(sharded, 0, 0.0, packs[ranks.rank :: 2])
        assert_close(whole(sharded), whole(alone), 1e-5)


def update_without_image(ranks: Ranks) -> None:
    """The run has images, this update none: nothing reaches the merger, and coverage does not ask for it yet."""
    base = models.build("qwen3_5", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), GROUPS)
    sharded = trainer(ranks, base, torch.float32, "adapter", images=True)
    step.update(sharded, 0, 0.0, packs[ranks.rank :: 2])
    found = {name: gradient for name, gradient in whole(sharded).items() if "merger" in name}
    assert found
    assert not any(gradient.any() for gradient in found.values())
    assert sharded.coverage.waiting == list(found)


def dropout_and_recomputation(ranks: Ranks) -> None:
    found = []
    for recompute in (False, True):
        base = models.build("qwen3_5_text", torch.float32)
        packs = batches.batches(batches.make(base, COUNT), GROUPS)
        sharded = trainer(ranks, base, torch.float32, "adapter", dropout=0.3, recompute=recompute, tile_rows=0)
        with fixed_order.in_a_fixed_order():
            step.update(sharded, 0, 0.0, packs[ranks.rank :: 2])
        found.append(whole(sharded))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def offloaded_inputs(ranks: Ranks) -> None:
    """Copies around gathers: gradients of sharded layers are equal, bit for bit, several packs in an update."""
    base = models.build("qwen3_5", torch.float32)
    packs = batches.batches(batches.make(base, COUNT, images=True), GROUPS)
    for trainable, dropout in (("all", 0.0), ("adapter", 0.3)):
        found = []
        for offloaded in ("none", "auto"):
            sharded = trainer(
                ranks, copy.deepcopy(base), torch.float32, trainable, images=True, dropout=dropout, offload=offloaded
            )
            with fixed_order.in_a_fixed_order():
                step.update(sharded, 0, 0.0, packs[ranks.rank :: 2])
            found.append(whole(sharded))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def halves_of_layers(ranks: Ranks) -> None:
    """Layers in two halves within their gathers: gradients are equal, bit for bit, wherever the middles wait."""
    base = models.build("qwen3_5", torch.float32)
    packs = batches.batches(batches.make(base, COUNT, images=True), GROUPS)
    for trainable, dropout in (("all", 0.0), ("adapter", 0.3)):
        found = []
        for middle, offloaded in (("none", "none"), ("2", "none"), ("auto", "auto")):
            given = {"dropout": dropout, "keep_middle": middle, "offload": offloaded}
            sharded = trainer(ranks, copy.deepcopy(base), torch.float32, trainable, images=True, **given)
            with fixed_order.in_a_fixed_order():
                step.update(sharded, 0, 0.0, packs[ranks.rank :: 2])
            found.append(whole(sharded))
        for other in found[1:]:
            assert all(torch.equal(found[0][name], other[name]) for name in found[0])


def loss_not_finite(ranks: Ranks) -> None:
    base = models.build("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), GROUPS)
    packs[3].targets.weights[0] = float("nan")
    sharded = trainer(ranks, base, torch.float32, "adapter")
    text = raised(blame.NotFinite, lambda: step.update(sharded, 4, 1.0, packs[ranks.rank :: 2]))
    assert text == "update 4 is not finite: rank 1, pack 1 with 6: the loss is nan", text


def gradient_not_finite(ranks: Ranks) -> None:
    """Reduced gradients are bad on all ranks; the rank, pack and tensor that they came from are found."""
    for trainable in ("adapter", "all"):
        base = models.build("llama", torch.float32)
        packs = batches.batches(batches.make(base, COUNT), GROUPS)
        sharded = trainer(ranks, base, torch.float32, trainable)
        bad = packs[3].layout.lengths

        def hook(module: Any, args: Any, kwargs: Any, output: Tensor, bad: Any = bad) -> None:
            if kwargs["layout"].lengths == bad and output.requires_grad:
                output.register_hook(lambda gradient: gradient * float("inf"))

        sharded.root.anatomy.layers[0].register_forward_hook(hook, with_kwargs=True)
        text = raised(blame.NotFinite, lambda: step.update(sharded, 4, 1.0, packs[ranks.rank :: 2]))  # noqa: B023
        assert text.startswith("update 4 is not finite: rank 1, pack 1 with 6: the gradient of "), text
        assert "layers.0." in text, text
        assert len(set(ranks.gather(text))) == 1


def mean_instead_of_sum(ranks: Ranks) -> None:
    """The fault: FSDP2's own reduction divides by the number of ranks."""

    def averaging(root: model.Root, mesh: Any) -> None:
        shard.shard(root, mesh)
        for module in (root, *root.anatomy.units):
            module.set_gradient_divide_factor(2.0)

    base = models.build("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), GROUPS)
    found = []
    for way in (shard.shard, averaging):
        sharded = trainer(ranks, copy.deepcopy(base), torch.float32, "all", shard=way)
        found.append(step.update(sharded, 0, 0.0, packs[ranks.rank :: 2]).norm)
    assert abs(found[1] / found[0] - 0.5) < 1e-5, found


def agreement(ranks: Ranks) -> None:
    assert ranks.any(ranks.rank == 1)
    assert not ranks.any(False)
    assert ranks.max(10 + ranks.rank) == 11
    assert ranks.sum(torch.tensor([1.0, ranks.rank], device=ranks.device)).tolist() == [2.0, 1.0]
    assert ranks.gather({"x": "ä" * (ranks.rank * 50)}) == [{"x": ""}, {"x": "ä" * 50}]
    ranks.require_same("the plan", "abc")
    text = raised(Disagreement, lambda: ranks.require_same("the plan", f"abc{ranks.rank}"))
    assert text == "ranks disagree on the plan: rank 0: abc0, rank 1: abc1"
    assert ranks.together(lambda: 5 + ranks.rank) == 5 + ranks.rank

    def mistake() -> None:
        if ranks.rank == 1:
            raise UserError("row 3 is bad")

    text = raised(UserError, lambda: ranks.together(mistake))
    assert text == ("rank 1: row 3 is bad", "row 3 is bad")[ranks.rank]


def evaluation(ranks: Ranks) -> None:
    """R15: ranks evaluate unequal packs, and train on unharmed."""
    base = models.build("qwen3_5", torch.float32)
    examples = batches.make(base, COUNT, images=True)
    given = {"images": True, "dropout": 0.3}
    alone = trainer(alone_on(ranks), copy.deepcopy(base), torch.float32, "adapter", **given)
    sharded = trainer(ranks, base, torch.float32, "adapter", **given)
    packs = [batches.pack(examples, group) for group in EMPTY_RANK]
    for each in (alone, sharded):
        each.root.eval()
    one = evaluate.losses(alone.root, packs, examples, dist.Ranks(0, 1, ranks.device, None))
    two = evaluate.losses(sharded.root, packs[ranks.rank :: 2], examples, ranks)
    shard.release(sharded.root)
    two = {index: loss for part in ranks.gather(list(two.items())) for index, loss in part}
    assert one.keys() == two.keys() == set(range(COUNT))
    assert all(abs(one[index] - two[index]) <= 1e-5 for index in one)
    assert anatomy.trainable(sharded.root.model).keys() == sharded.parameters.keys()
    for name, parameter in anatomy.trainable(sharded.root.model).items():
        assert parameter is sharded.parameters[name]


def heldout_example_stops_all(ranks: Ranks) -> None:
    """A held-out image that rank 1 alone cannot read: an error on both before the forward, and they train on."""
    examples = batches.make(base := models.build("qwen3_5", torch.float32), COUNT, images=True)
    run = trainer(ranks, base, torch.float32, "adapter", images=True)
    packs = [batches.pack(examples, group) for group in ([0, 1, 2], [3, 4, 5, 6])]
    bad = examples[3].images[-1]
    if ranks.rank == 1:
        for example in examples:
            for image in example.images:
                object.__setattr__(image, "store", Torn(bad.digest))
    text = raised(UserError, lambda: evaluate.losses(run.root, packs[ranks.rank :][:1], examples, ranks))
    assert "the image has changed" in text, text
    assert ranks.gather(ranks.rank) == [0, 1]


class Torn(batches.Pixels):
    """An image that one rank cannot read."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def load(self, path: Path, digest: str) -> Any:
        if digest == self.digest:
            raise UserError(f"{path}: the image has changed since the data was read; start again")
        return super().load(path, digest)


def data(ranks: Ranks, on_bad: str, torn: bool) -> tuple[feeds.Feed, list[Any]]:
    """A feed of 7 examples in two updates; with `torn` rank 1 cannot read the image that example 3 alone has."""
    base = models.build("qwen3_5", torch.float32)
    examples = batches.make(base, COUNT, images=True)
    config = Config(
        model=ModelConfig(build={"model_type": "qwen3_5"}),
        data=DataConfig(on_bad_example=on_bad),  # type: ignore[arg-type]
        pack=PackConfig(max_positions=90, min_shared=4, examples_per_update=COUNT),
        train=TrainConfig(updates=2),
    )
    made = feeds.Feed(config, examples, ranks)
    own = examples[3].images[-1]
    if torn and ranks.rank == 1:
        for example in examples:
            for image in example.images:
                object.__setattr__(image, "store", Torn(own.digest))
    return made, examples


def members_of(ready: feeds.Ready) -> list[int]:
    return [member for batch in ready.batches for member in batch.members]


def bad_example_stops_all(ranks: Ranks) -> None:
    """R23: the rank that meets it says so before the first collective of the update, and all stop."""
    made, _ = data(ranks, "stop", torn=True)

    def run() -> None:
        for ready in made.walk(Cursor()):
            ranks.gather(members_of(ready))

    text = raised(UserError, run)
    assert text.startswith("data.jsonl:4: "), text
    assert "the image has changed" in text, text
    assert len(set(ranks.gather(text))) == 1


def bad_example_is_skipped_by_all(ranks: Ranks) -> None:
    made, _ = data(ranks, "skip", torn=True)
    found = []
    for ready in made.walk(Cursor()):
        members = [member for part in ranks.gather(members_of(ready)) for member in part]
        weight = sum(float(batch.targets.weights.sum()) for batch in ready.batches)
        assert abs(sum(ranks.gather(weight)) - 1) < 1e-6
        assert len(set(map(len, ranks.gather(ready.skipped)))) == 1
        assert len({len(ready.batches)} | set(ranks.gather(len(ready.batches)))) == 1
        found.append((sorted(members), ready.skipped))
    whole_update = list(range(COUNT))
    without = [member for member in whole_update if member != 3]
    assert any(members == without and "data.jsonl:4" in skipped[0] for members, skipped in found), found
    assert all(members in (whole_update, without) for members, _ in found)


def rows_that_one_rank_cannot_read(ranks: Ranks) -> None:
    base = models.build("qwen3_5", torch.float32)
    examples = batches.make(base, COUNT, images=True)
    mine = Examples(examples) if ranks.rank == 0 else Examples([*examples[:2], *examples[3:]], ["data.jsonl:3: torn"])
    loaded = feeds.load_examples
    feeds.load_examples = lambda *_, **__: mine  # type: ignore[assignment]
    try:
        found = feeds.load_agreed(Path("data.jsonl"), None, Config(), ranks)  # type: ignore[arg-type]
    finally:
        feeds.load_examples = loaded
    assert [example.source for example in found] == [f"data.jsonl:{line}" for line in (1, 2, 4, 5, 6, 7)]
    assert found.skipped == ["data.jsonl:3: torn"]


def raised(kind: type[BaseException], work: Callable[[], Any]) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


CHECKS: dict[str, Check] = {
    "r14_float64_all": same_update("qwen3_5", torch.float64, "all", GROUPS, images=True),
    "r14_float64_adapter": same_update("qwen3_5", torch.float64, "adapter", GROUPS, images=True),
    "r14_float32_all": same_update("qwen3_5_moe_text", torch.float32, "all", GROUPS),
    "r14_bfloat16_all": same_update("qwen3_5", torch.bfloat16, "all", GROUPS, images=True),
    "r14_bfloat16_adapter": same_update("qwen3_5", torch.bfloat16, "adapter", GROUPS, images=True),
    "r14_tied_embeddings": same_update("qwen3", torch.bfloat16, "all", GROUPS, tied=True),
    "r14_without_recomputation": same_update("llama", torch.float32, "all", GROUPS, recompute=False),
    "r15_empty_pack": same_update("qwen3_5", torch.float32, "all", EMPTY_LATE, images=True),
    "r15_rank_with_empty_packs_alone": same_update("qwen3_5", torch.float32, "adapter", EMPTY_RANK, images=True),
    "r15_evaluation": evaluation,
    "rank_without_image": rank_without_image,
    "update_without_image": update_without_image,
    "three_updates": three_updates,
    "r29_dropout_and_recomputation": dropout_and_recomputation,
    "r17_offloaded_inputs": offloaded_inputs,
    "halves_of_layers": halves_of_layers,
    "halves_in_bfloat16": same_update("qwen3_5_text", torch.bfloat16, "all", GROUPS, keep_middle="auto"),
    "loss_not_finite": loss_not_finite,
    "gradient_not_finite": gradient_not_finite,
    "mean_instead_of_sum": mean_instead_of_sum,
    "agreement": agreement,
    "r23_bad_example_stops_all": bad_example_stops_all,
    "r23_heldout_example_stops_all": heldout_example_stops_all,
    "r23_bad_example_is_skipped_by_all": bad_example_is_skipped_by_all,
    "r23_rows_that_one_rank_cannot_read": rows_that_one_rank_cannot_read,
}


def no_blank_image(ranks: Ranks) -> None:
    """The fault: a rank whose pack has no image leaves the tower out."""
    base = models.build("qwen3_5", torch.float32)
    joined = [*batches.make(base, COUNT, images=True), *batches.make(base, 2, seed=3)]
    packs = batches.batches(joined, [[0, 1, 2, 3, 4, 5, 6], [7, 8]])
    sharded = trainer(ranks, base, torch.float32, "all", images=False)
    step.update(sharded, 0, 0.0, packs[ranks.rank :: 2])


def unequal_packs(ranks: Ranks) -> None:
    """The fault: a rank that has no pack left just stops."""
    base = models.build("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3], [4, 5, 6]])
    sharded = trainer(ranks, base, torch.float32, "all")
    step.update(sharded, 0, 0.0, packs[ranks.rank :: 2])


def skipped_by_one(ranks: Ranks) -> None:
    """The fault: the rank that meets a bad example goes on to the next update and says nothing."""
    made, _ = data(ranks, "skip", torn=True)
    base = models.build("qwen3_5", torch.float32)
    sharded = trainer(ranks, base, torch.float32, "adapter", images=True)
    for ready in made.plan.walk():
        own = made._make(ready.update)
        if isinstance(own, list):
            step.update(sharded, 0, 0.0, own)


def dies(ranks: Ranks) -> None:
    """The fault: a rank that leaves no traceback of its own."""
    if ranks.rank == 1:
        os.abort()


FAULTS: dict[str, Check] = {
    "no_blank_image": no_blank_image,
    "unequal_packs": unequal_packs,
    "skipped_by_one": skipped_by_one,
    "dies": dies,
}
