"""The update against each example alone: whatever the packs, with recomputation, dropout and float32 masters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from configs.errors import UserError
from configs.schema import AdapterConfig, Config, MemoryConfig, TrainConfig
from prefix_train import anatomy, blame, gradients, model, step, unit
from prefix_train.collate import Batch
from prefix_train.dist import Ranks
from prefix_train.dropout import SeededDropout
from prefix_train.embedding import embed
from prefix_train.render import Example
from tests import batches, models, oracle

ALONE = Ranks(0, 1, torch.device("cpu"), None)
COUNT = 7
"""Examples of an update."""

Weighting = Literal["example", "token"]


def built(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Drawn outside the float64 mode, which would draw other numbers."""
    torch.set_default_dtype(torch.float32)
    try:
        return models.build(family, dtype)
    finally:
        torch.set_default_dtype(dtype if dtype == torch.float64 else torch.float32)


def options(
    trainable: Literal["all", "adapter"] = "all", recompute: bool = True, dropout: float = 0.0, tile_rows: int = 16384
) -> Config:
    adapter = AdapterConfig(rank=2, dropout=dropout)
    return Config(
        train=TrainConfig(trainable=trainable),
        adapter=adapter,
        memory=MemoryConfig(recompute=recompute, offload="none", tile_rows=tile_rows),
    )


def stepper(
    base: PreTrainedModel,
    config: Config,
    dtype: torch.dtype = torch.float64,
    images: bool = False,
    lr: float = 0.0,
    clip_norm: float = 0.0,
) -> step.Stepper:
    prepared = model.prepare(base, config)
    root = model.Root(prepared, dtype, chunk_rows=3, images=images)
    parameters = anatomy.trainable(prepared)
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)
    vision = frozenset(name for name in parameters if ".visual." in name)
    coverage = gradients.Coverage(list(parameters), vision, warmup=3)
    return step.Stepper(root, parameters, optimizer, ALONE, coverage, seed=5, clip_norm=clip_norm)


def taken(stepper: step.Stepper) -> dict[str, Tensor]:
    """The gradients that the last update left, by name."""
    return {name: parameter.grad.clone() for name, parameter in stepper.parameters.items()}


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest relative difference of a gradient tensor; one below 1e-6 of all gradients' norm is held against that."""
    assert mine.keys() == theirs.keys()
    whole = torch.stack([each.double().norm() for each in theirs.values()]).norm()
    return max(
        float((mine[name] - each).double().norm() / max(each.double().norm(), 1e-6 * whole))
        for name, each in theirs.items()
    )


def groupings(count: int) -> list[list[list[int]]]:
    """All in one pack, each alone, and random ones, empty packs among them."""
    return [
        [list(range(count))],
        [[member] for member in range(count)],
        *(batches.regroup(count, packs, seed) for seed, packs in enumerate((2, 3, 5, 9))),
    ]


# The update is that of the examples alone.


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
@pytest.mark.parametrize("weighting", ["example", "token"])
def test_r14_any_grouping_gives_the_gradients_of_each_example_alone(
    family: str, weighting: Weighting, wide: None
) -> None:
    base = built(family)
    images = family in models.WITH_VISION
    examples = batches.make(base, COUNT, images=images)
    alone = oracle.run(base, batches.alone(examples, weighting), models.IMAGE)
    trainer = stepper(base, options(), images=images)
    chosen = groupings(COUNT) if family in ("qwen3_5", "qwen3_vl") else groupings(COUNT)[::3]
    for groups in chosen:
        result = step.update(trainer, 0, 0.0, batches.batches(examples, groups, weighting, torch.float64))
        assert abs(result.loss - alone.loss) <= 1e-10 * abs(alone.loss)
        assert difference(taken(trainer), alone.gradients) <= 1e-10
        assert result.norm == pytest.approx(float(torch.stack([g.norm() for g in alone.gradients.values()]).norm()))
        assert (result.examples, result.packs) == (COUNT, sum(bool(group) for group in groups))
        assert result.targets == sum(int(example.target.sum()) for example in examples)
        assert result.logical == sum(len(example.ids) for example in examples)
        means = [float(losses.mean()) for losses in alone.losses]
        assert result.example_loss == pytest.approx(sum(means), rel=1e-9)
        assert result.target_loss == pytest.approx(float(torch.cat(alone.losses).sum()), rel=1e-9)


def test_r14_fails_without_fix(wide: None) -> None:
    """The fault: each pack's loss is a mean over its own examples, and packs are averaged."""
    base = built("llama")
    examples = batches.make(base, COUNT)
    trainer = stepper(base, options())
    step.update(trainer, 0, 0.0, batches.batches(examples, [list(range(COUNT))], "token", torch.float64))
    right = taken(trainer)
    groups = [[0], [1, 2, 3, 4, 5, 6]]
    own = [batches.batches(examples, [group], "token", torch.float64)[0] for group in groups]
    for batch in own:
        batch.targets.weights /= len(groups)
    step.update(trainer, 1, 0.0, own)
    assert difference(taken(trainer), right) > 0.1


def test_r13_every_pack_of_an_update_counts(wide: None) -> None:
    base = built("qwen3_5_text")
    examples = batches.make(base, COUNT)
    trainer = stepper(base, options("adapter"))
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    step.update(trainer, 0, 0.0, batches.batches(examples, [list(range(COUNT))], dtype=torch.float64))
    together = taken(trainer)
    packs = batches.batches(examples, [[0, 1], [2, 3, 4], [5, 6]], dtype=torch.float64)
    step.update(trainer, 1, 0.0, packs)
    assert difference(taken(trainer), together) <= 1e-10


def test_r13_fails_without_fix(wide: None) -> None:
    """The fault: gradients are cleared before each pack instead of before each update."""
    base = built("llama")
    examples = batches.make(base, COUNT)
    trainer = stepper(base, options())
    step.update(trainer, 0, 0.0, batches.batches(examples, [list(range(COUNT))], dtype=torch.float64))
    together = taken(trainer)
    trainer.root.register_forward_pre_hook(lambda *_: trainer.optimizer.zero_grad())
    packs = batches.batches(examples, [[0, 1], [2, 3, 4], [5, 6]], dtype=torch.float64)
    step.update(trainer, 1, 0.0, packs)
    assert difference(taken(trainer), together) > 0.1


@pytest.mark.parametrize("trainable", ["all", "adapter"])
def test_twenty_updates_of_packs_are_those_of_examples_alone(trainable: Literal["all", "adapter"], wide: None) -> None:
    base = built("qwen3_5")
    examples = batches.make(base, 2 * COUNT, images=True)
    packed = stepper(copy.deepcopy(base), options(trainable), images=True, lr=1.0, clip_norm=0.5)
    alone = stepper(base, options(trainable), images=True, lr=1.0, clip_norm=0.5)
    before = {name: parameter.detach().clone() for name, parameter in alone.parameters.items()}
    for number in range(20):
        members = [(number * 3 + place) % (2 * COUNT) for place in range(4)]
        lr = step.learning_rate(number, 20, 1e-3, 5, "cosine")
        one = step.update(packed, number, lr, batches.batches(examples, [members], dtype=torch.float64))
        each = [[member] for member in members]
        other = step.update(alone, number, lr, batches.batches(examples, each, dtype=torch.float64))
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.positions < other.positions
    # AdamW divides by the gradient's size: where that is tiny, rounding is a fraction of a step of 1e-3.
    for name, parameter in alone.parameters.items():
        moved = (parameter - before[name]).norm()
        assert moved > 0
        assert (packed.parameters[name] - parameter).norm() <= 1e-6 * moved, name


# Recomputation and dropout.


def run_with(base: PreTrainedModel, config: Config, packs: Sequence[Batch], number: int = 0) -> dict[str, Tensor]:
    trainer = stepper(base, config, torch.float32)
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    step.update(trainer, number, 0.0, packs)
    return taken(trainer)


def test_r29_dropout_is_the_same_in_recomputation() -> None:
    base = built("qwen3_5_text", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3, 4, 5, 6]])
    kept = run_with(copy.deepcopy(base), options("adapter", recompute=False, dropout=0.3), packs)
    torch.rand(3)
    recomputed = run_with(copy.deepcopy(base), options("adapter", dropout=0.3, tile_rows=0), packs)
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)
    again = run_with(copy.deepcopy(base), options("adapter", recompute=True, dropout=0.3), packs, number=1)
    assert difference(again, kept) > 0.1
    without = run_with(copy.deepcopy(base), options("adapter", recompute=True), packs)
    assert difference(without, kept) > 0.1


def test_r29_holds_when_backwards_run_after_all_forwards() -> None:
    """The draw travels with the layout: the recomputation of a pack finds its own, whatever ran in between."""
    base = built("qwen3_5_text", torch.float32)
    first, second = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3, 4, 5, 6]])
    found = []
    for order in ("one by one", "forwards first"):
        trainer = stepper(copy.deepcopy(base), options("adapter", dropout=0.3), torch.float32)
        with torch.no_grad():
            for name, parameter in trainer.parameters.items():
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
        if order == "one by one":
            trainer.root(first, draw="a").loss.backward()
            trainer.root(second, draw="b").loss.backward()
        else:
            losses = [trainer.root(first, draw="a").loss, trainer.root(second, draw="b").loss]
            for loss in losses:
                loss.backward()
        found.append(taken(trainer))
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])


def test_r29_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: masks from the running generator, whose state recomputation does not restore."""
    base = built("qwen3_5_text", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3, 4, 5, 6]])
    monkeypatch.setattr(
        SeededDropout, "forward", lambda self, inputs: nn.functional.dropout(inputs, self.p, self.training)
    )
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        found.append(run_with(copy.deepcopy(base), options("adapter", recompute, dropout=0.3), packs))
    assert difference(found[1], found[0]) > 0.3


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_recomputation_changes_no_bit(family: str) -> None:
    base = built(family, torch.float32)
    examples = batches.make(base, COUNT, images=family in models.WITH_VISION)
    packs = batches.batches(examples, [[0, 1, 2], [3, 4, 5, 6]])
    found = [run_with(copy.deepcopy(base), options("all", on, tile_rows=0), packs) for on in (False, True)]
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])


def count_runs(trainer: step.Stepper, packs: Sequence[Batch]) -> int:
    """How often one update runs a layer's feed-forward block, per pack."""
    runs = []
    handle = trainer.root.anatomy.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    step.update(trainer, 0, 0.0, packs)
    handle.remove()
    return len(runs) // len(packs)


def test_r22_two_recompute_paths_are_refused() -> None:
    base = built("llama", torch.float32)
    base.activation_checkpointing_enable()
    with pytest.raises(UserError, match="two recompute paths"):
        model.prepare(base, options("adapter"))
    wrapped = built("llama", torch.float32)
    wrapped.model.layers[1].mlp = checkpoint_wrapper(wrapped.model.layers[1].mlp)
    with pytest.raises(UserError, match=r"model.layers.1.mlp is in a checkpoint wrapper"):
        model.make_ready(wrapped.eval(), options())
    late = built("llama", torch.float32)
    prepared = model.prepare(late, options("adapter"))
    late.activation_checkpointing_enable()
    with pytest.raises(UserError, match="two recompute paths"):
        model.Root(prepared, torch.float32, 3, images=False)


def test_r22_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal a layer is computed a third time: the two paths recompute each other."""
    monkeypatch.setattr(unit, "refuse_other_recomputation", lambda _: None)
    found = []
    for twice in (False, True):
        base = built("llama", torch.float32)
        if twice:
            base.activation_checkpointing_enable({"use_reentrant": True})
        packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3, 4, 5, 6]])
        found.append(count_runs(stepper(base, options(tile_rows=0), torch.float32), packs))
    assert found == [2, 3]


def test_r20_an_update_under_autocast_is_refused() -> None:
    """What it does otherwise: `test_families`."""
    base = built("llama", torch.bfloat16)
    packs = batches.batches(batches.make(base, COUNT), [list(range(COUNT))])
    trainer = stepper(base, options("adapter"), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="autocast"):
        step.update(trainer, 0, 0.0, packs)


# What is trained really trains.


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "qwen3_5"])
def test_r12_adapters_get_gradients_under_recomputation_with_frozen_embeddings(family: str) -> None:
    base = built(family, torch.float32)
    examples = batches.make(base, COUNT, images=family in models.WITH_VISION)
    packs = batches.batches(examples, [[0, 1, 2], [3, 4, 5, 6]])
    trainer = stepper(base, options("adapter"), torch.float32, lr=1e-2)
    for number in range(3):
        step.update(trainer, number, 1e-2, packs)
        assert not any("lora_B" in name for name in trainer.coverage.waiting)
    assert trainer.coverage.waiting == []
    assert not anatomy.find(base).base.get_input_embeddings().weight.requires_grad


def plant_reentrant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a recomputation that only notices inputs that require gradients."""

    def reentrant(run: Callable[..., Any], *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        kwargs.pop("preserve_rng_state")
        return checkpoint(partial(run, **kwargs), *args, use_reentrant=True)

    monkeypatch.setattr(unit, "checkpoint", reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_r12_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_reentrant(monkeypatch)
    base = built("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [list(range(COUNT))])
    with pytest.raises(gradients.NothingLearned, match="depends on no trainable tensor"):
        step.update(stepper(base, options("adapter"), torch.float32), 0, 0.0, packs)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_r21_a_zero_gradient_is_an_error_in_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers train nothing, the loss is as plausible as ever: named in the first update."""
    base = built("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [list(range(COUNT))])
    trainer = stepper(base, options("adapter"), torch.float32)
    layer = trainer.root.anatomy.layers[0]
    layer.register_forward_hook(lambda module, inputs, output: output.detach().requires_grad_())
    with pytest.raises(gradients.NothingLearned, match=r"5 of 20 .* after 1 update: .*layers\.0\..*lora_B"):
        step.update(trainer, 0, 0.0, packs)
    monkeypatch.setattr(gradients.Coverage, "_is_due", lambda *_: False)
    assert step.update(trainer, 0, 0.0, packs).loss == pytest.approx(step.update(trainer, 1, 0.0, packs).loss)


def test_r21_a_gradient_of_exactly_zero_stops_the_run() -> None:
    base = built("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [list(range(COUNT))])
    trainer = stepper(base, options("adapter"), torch.float32)
    for parameter in trainer.parameters.values():
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(gradients.NothingLearned, match="10 of 20"):
        step.update(trainer, 0, 0.0, packs)


def test_coverage_waits_for_images_and_for_lora_b() -> None:
    names = ["a.lora_A.x", "a.lora_B.x", "visual.merger.w", "mlp.experts.3.w"]
    coverage = gradients.Coverage(names, frozenset({"visual.merger.w"}), warmup=4)
    coverage.check([0.0, 1.0, 0.0, 0.0], images=False)
    coverage.check([1.0, 0.0, 0.0, 0.0], images=False)
    assert coverage.waiting == ["visual.merger.w", "mlp.experts.3.w"]
    with pytest.raises(gradients.NothingLearned, match=r"1 of 4 .* after 3 updates: visual.merger.w"):
        coverage.check([1.0, 1.0, 0.0, 0.0], images=True)
    with pytest.raises(gradients.NothingLearned, match=r"1 of 4 .* after 4 updates: mlp.experts.3.w"):
        coverage.check([1.0, 1.0, 1.0, 0.0], images=False)
    late = gradients.Coverage(names[:2], frozenset(), warmup=9)
    late.check([0.0, 1.0], images=False)
    with pytest.raises(gradients.NothingLearned, match="lora_A"):
        late.check([0.0, 1.0], images=False)


# What is not finite is named.


def test_a_loss_that_is_not_finite_is_named() -> None:
    base = built("llama", torch.float32)
    examples = batches.make(base, COUNT)
    packs = batches.batches(examples, [[0, 1, 2], [3, 4], [5, 6]])
    packs[1].targets.weights[0] = float("inf")
    trainer = stepper(base, options(), torch.float32, lr=1.0)
    before = [parameter.detach().clone() for parameter in trainer.parameters.values()]
    with pytest.raises(blame.NotFinite, match=r"update 7 .*: rank 0, pack 1 with 4, 3: the loss is inf"):
        step.update(trainer, 7, 1.0, packs)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.parameters.values(), strict=True))


def poison(trainer: step.Stepper, pack: Batch) -> None:
    """Let the gradient of `pack` overflow in the first layer, and only there."""
    layer = trainer.root.anatomy.layers[0]

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        if kwargs["layout"] is pack.layout and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    layer.register_forward_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("trainable", ["all", "adapter"])
def test_a_gradient_that_is_not_finite_is_named(trainable: Literal["all", "adapter"]) -> None:
    base = built("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3, 4], [5, 6]])
    trainer = stepper(base, options(trainable), torch.float32, lr=1.0)
    poison(trainer, packs[2])
    with pytest.raises(
        blame.NotFinite, match=r"rank 0, pack 2 with 6, 5: the gradient of (base_model.model.)?model.layers\.0.* is not"
    ):
        step.update(trainer, 0, 1.0, packs)


# Precision, clip, learning rate.


def test_adapters_compute_in_bfloat16_from_float32_masters() -> None:
    """PEFT casts an adapter's input to the adapter's dtype; here both are bfloat16 while the masters stay float32."""
    base = built("qwen3_5", torch.bfloat16)
    packs = batches.batches(batches.make(base, COUNT, images=True), [list(range(COUNT))])
    trainer = stepper(base, options("adapter"), torch.bfloat16, images=True)
    seen = set[torch.dtype]()
    for name, module in trainer.root.named_modules():
        if "lora_" in name or "merger" in name:
            module.register_forward_pre_hook(
                lambda _, inputs: seen.update(part.dtype for part in inputs if isinstance(part, Tensor))
            )
    step.update(trainer, 0, 0.0, packs)
    assert seen == {torch.bfloat16}
    for parameter in trainer.parameters.values():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert isinstance(parameter, nn.Parameter)


def test_adapters_would_compute_in_float32_without_copies() -> None:
    base = built("llama", torch.bfloat16)
    packs = batches.batches(batches.make(base, COUNT), [list(range(COUNT))])
    trainer = stepper(base, options("adapter"), torch.bfloat16)
    unit.leave_precision_to_sharding(trainer.root.anatomy)
    seen = set[torch.dtype]()
    for name, module in trainer.root.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    step.update(trainer, 0, 0.0, packs)
    assert seen == {torch.float32}


def test_whole_model_in_bfloat16_from_float32_masters() -> None:
    """Copies round what the masters hold; gradients add up over packs in float32."""
    base = built("qwen3_5_text", torch.bfloat16)
    examples = batches.make(base, COUNT)
    trainer = stepper(base, options("all"), torch.bfloat16)
    step.update(trainer, 0, 0.0, batches.batches(examples, [list(range(COUNT))]))
    together = taken(trainer)
    step.update(trainer, 1, 0.0, batches.batches(examples, [[0, 1, 2, 3], [4, 5, 6]]))
    assert {gradient.dtype for gradient in together.values()} == {torch.float32}
    assert difference(taken(trainer), together) < 0.1
    assert next(iter(trainer.parameters.values())).dtype == torch.float32


def test_a_trained_embedding_adds_up_in_float32() -> None:
    """2,000 occurrences of two tokens: torch's own sum in bfloat16 is more than half off."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 16, generator=draw)
    ids = torch.randint(0, 2, (1, 4000), generator=draw)
    ids[0, :5] = 7
    factor = torch.rand(1, 4000, 16, generator=draw) + 0.5
    table = nn.Embedding(9, 16, padding_idx=7, _weight=weight)
    (table(ids) * factor).sum().backward()
    for dtype, bound in ((torch.bfloat16, 0.005), (torch.float32, 1e-6), (torch.float64, 1e-6)):
        other = nn.Embedding(9, 16, padding_idx=7, _weight=weight.to(dtype))
        looked_up = embed(other, ids)
        assert torch.equal(looked_up, other(ids))
        (looked_up.to(factor.dtype) * factor).sum().backward()
        assert other.weight.grad.dtype == dtype
        assert (other.weight.grad - table.weight.grad).norm() <= bound * table.weight.grad.norm()
        if dtype == torch.bfloat16:
            own = other.weight.grad.clone()
            other.weight.grad = None
            (other(ids).float() * factor).sum().backward()
            assert (other.weight.grad - table.weight.grad).norm() > 0.3 * table.weight.grad.norm()
            assert not own[7].any()


def test_the_clip_scales_the_whole_gradient() -> None:
    base = built("llama", torch.float32)
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3, 4, 5, 6]])
    free = stepper(copy.deepcopy(base), options(), torch.float32)
    norm = step.update(free, 0, 0.0, packs).norm
    clipped = stepper(base, options(), torch.float32, clip_norm=norm / 4)
    assert step.update(clipped, 0, 0.0, packs).norm == pytest.approx(norm)
    for name, gradient in taken(clipped).items():
        torch.testing.assert_close(gradient, taken(free)[name] / 4)


def test_learning_rate() -> None:
    rates = [step.learning_rate(number, 10, 2.0, 4, "constant") for number in range(10)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    linear = [step.learning_rate(number, 10, 2.0, 4, "linear") for number in range(4, 10)]
    assert linear == pytest.approx([2.0, 2 * 5 / 6, 2 * 4 / 6, 2 * 3 / 6, 2 * 2 / 6, 2 / 6])
    cosine = [step.learning_rate(number, 10, 2.0, 4, "cosine") for number in range(4, 10)]
    assert cosine[0] == 2.0
    assert cosine[3] == pytest.approx(1.0)
    assert all(left > right > 0 for left, right in itertools.pairwise(cosine))
    assert step.learning_rate(0, 1, 2.0, 0, "cosine") == 2.0


def test_examples_are_made_as_meant() -> None:
    """The helper's examples share, branch and hold images in prefix and item, or these tests would show little."""
    base = built("qwen3_5", torch.float32)
    examples: list[Example] = batches.make(base, COUNT, images=True)
    one = batches.pack(examples, list(range(COUNT)))
    assert max(len(path) for path in one.paths) == 3
    assert one.positions < 0.75 * one.logical
    (batch,) = batches.batches(examples, [list(range(COUNT))])
    assert len(batch.grids) == 4
    assert sum(len(example.images) for example in examples) == 7
