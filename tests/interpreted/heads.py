"""Norm, rotary embedding and gate of heads in one pass against the model's own modules: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from configs import compose
from configs.errors import UserError
from configs.schema import AdapterConfig, Config, ModelConfig, TrainConfig
from prefix_train import anatomy, bench_pack, dropout, heads, machine, model, patch, trial
from prefix_train.families import NotExact
from tests import batches, machines, models
from tests.head_oracle import SHAPES, all_ways, drawn, error, norm_of, ours, tables


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_the_models_own(shape: Any, dtype: torch.dtype) -> None:
    """No further from float64 than the model's own operations; in float16 the same bits, but for numbers next to a
    border that the order of additions moves, and but for two gradients that are rounded fewer times here: the gate's,
    and that of a weight. To bfloat16 the interpreter cuts off instead of rounding."""
    fast, slow, truth = all_ways(shape, dtype)
    size = shape[2]
    floor = {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 2e-2}[dtype]
    for mine, theirs, true in zip(fast, slow, truth, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert error(mine, true) <= max(1.02 * error(theirs, true), floor)
    if dtype == torch.float16:
        for mine, theirs in zip(fast[:4], slow[:4], strict=True):
            assert float((mine != theirs)[..., :size].double().mean()) < 0.005


def test_gradients_come_wherever_they_lie() -> None:
    """Saved tensors that come back as copies, and a gradient of the gate that was made elsewhere."""
    shape = SHAPES[2]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        fast, slow, _ = all_ways(shape, torch.float32)
    for mine, theirs in zip(fast, slow, strict=True):
        assert error(mine, theirs.double()) < 1e-6


def test_a_second_backward_is_refused() -> None:
    """The first one has written over what it would need."""
    x, module = drawn(5, 2, 128, seed=1, dtype=torch.float32).requires_grad_(), norm_of("plain", 64, torch.float32)
    out, gate = ours(x * 1, module, *tables(5, 64, torch.float32), True)
    assert gate is not None
    total = heads.gated(out * 1, gate).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        total.backward()


def test_what_is_not_supported_is_named() -> None:
    for x, rotary in (
        (torch.zeros(2, 1, 64, dtype=torch.float64), 64),
        (torch.zeros(2, 1, 264), 64),
        (torch.zeros(2, 1, 64), 66),
    ):
        with pytest.raises(UserError, match=r"float32 with heads of up to 256, not torch\.float"):
            ours(x, None, *tables(2, rotary, x.dtype), False)
    with pytest.raises(UserError, match=r"heads are torch\.float16, what they are multiplied by torch\.float32"):
        ours(torch.zeros(2, 1, 64, dtype=torch.float16), None, *tables(2, 64, torch.float32), False)


def update_of(family: str, how: str, trainable: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of one update over two packs, recomputed and in tiles. how: `model.heads`."""
    base = models.build(family, torch.float32).to(dtype)
    images = family in models.WITH_VISION
    packs = batches.batches(batches.make(base, 7, images=images), [[0, 1, 2, 3], [4, 5, 6]])
    config = Config(
        model=ModelConfig(heads=how),  # type: ignore[arg-type]
        train=TrainConfig(trainable=trainable),
        adapter=AdapterConfig(rank=2, dropout=0.3, targets=["q_proj", "k_proj", "o_proj"]),
    )
    prepared = model.prepare(base, config)
    root = model.Root(prepared, dtype, chunk_rows=64, images=images)
    learned = anatomy.trainable(prepared)
    for name, parameter in learned.items():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    losses = root.together(packs, ["a", "b"])
    sum(one.loss for one in losses).backward()  # type: ignore[union-attr]
    return {name: one.grad for name, one in learned.items() if one.grad is not None}


def worst(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    return max(error(found[name], truth[name].double()) for name in truth)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run here."""
    monkeypatch.setattr(heads, "require", lambda device: None)
    monkeypatch.setattr(machine, "settle", machines.with_heads)
    monkeypatch.setattr(dropout, "BLOCK", 4)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("family", "trainable"),
    [(family, "adapter") for family in models.FAMILIES if not family.startswith("olmo")]
    + [(family, "all") for family in ("llama", "qwen3", "qwen3_5")],
)
def test_a_model_learns_the_same(family: str, trainable: str) -> None:
    fast, slow = (update_of(family, how, trainable, torch.float32) for how in ("fused", "torch"))
    assert worst(fast, slow) < 2e-5


@pytest.mark.usefixtures("anywhere")
def test_a_wrong_sign_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: backward rotates onwards instead of back."""
    right, kernels = update_of("qwen3_5", "torch", "adapter", torch.float32), heads._kernels

    def wrong(grad: Tensor, x: Any, norm: Any, cos: Tensor, sin: Tensor, *rest: Any) -> Any:
        return kernels("rotate_back")(grad, x, norm, cos, -sin, *rest)

    monkeypatch.setattr(heads, "_kernels", lambda name: wrong if name == "rotate_back" else kernels(name))
    assert worst(update_of("qwen3_5", "fused", "adapter", torch.float32), right) > 0.01


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("family", ["olmo2", "olmo3", "olmo_hybrid"])
def test_a_family_that_does_otherwise_is_refused_by_name(family: str) -> None:
    with pytest.raises(NotExact, match=r"attn: model\.heads=fused does not compute what Olmo\w+Attention does: set"):
        patch.install(models.build(family), heads="fused")


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("geometry", "count"), [("qwen3.6-27b", 6), ("qwen3-32b", 4)])
def test_kernels_are_compiled_ahead(geometry: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is launched once for queries, and the first ones once more for keys."""
    launched, kernels = [], heads._kernels

    def noted(name: str) -> Any:
        launched.append(name)
        return kernels(name)

    monkeypatch.setattr(heads, "_kernels", noted)
    monkeypatch.setattr(trial, "LEAST", 9)
    config = compose.load(bench_pack.geometry_file(geometry), ["model.dtype=float32"])
    trial.heads_of_attention(config, torch.device("cpu"))
    assert launched.count("rotate") == launched.count("rotate_back") == 2
    assert len(launched) == count
