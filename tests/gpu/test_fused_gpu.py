"""Liger's kernels and ours against transformers' own operations on CUDA: outputs and every gradient."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from prefix_train import frozen, fused, heads, pieces
from prefix_train.attention import tree_attention
from prefix_train.dropout import SeededDropout, counted_masks
from prefix_train.layout import Layout
from tests import head_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"),
]


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj, self.act_fn = nn.Linear(inner, hidden, bias=False), ACT2FN["silu"]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def gradients(module: nn.Module, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    inputs = [one.detach().clone().requires_grad_() for one in inputs]
    out = module(*(one * 1 for one in inputs))
    found = torch.autograd.grad((out.double() * weight).sum(), [*inputs, *module.parameters()])
    return [out.detach(), *found]


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def compare(module: nn.Module, inputs: list[Tensor], wrap: Any) -> None:
    """In float32 to rounding; in bfloat16 no further from float64 than 1.2 times the module's own operations."""
    weight = torch.randn(inputs[0].shape, dtype=torch.float64, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        cast = [one.to(dtype) for one in inputs]
        own = copy.deepcopy(module).to(dtype)
        other = copy.deepcopy(own)
        other.forward = wrap(other, "liger", other.forward)
        truth = gradients(copy.deepcopy(own).double(), [one.double() for one in cast], weight)
        mine, theirs = gradients(other, cast, weight), gradients(own, cast, weight)
        for fast, slow, true in zip(mine, theirs, truth, strict=True):
            floor = 2e-6 if dtype == torch.float32 else 1e-3
            assert error(fast, true) <= max(1.2 * error(slow, true), floor)


@pytest.mark.parametrize("shape", [(1, 333, 5120), (1, 65, 24, 256), (777, 128)])
@pytest.mark.parametrize("kind", [Qwen3_5RMSNorm, LlamaRMSNorm])
def test_norms(shape: tuple[int, ...], kind: Any) -> None:
    torch.manual_seed(1)
    module = kind(shape[-1], eps=1e-6).cuda()
    nn.init.normal_(module.weight, 0.3)
    compare(module, [torch.randn(shape, device="cuda")], fused.Norm)


def test_gated_norm() -> None:
    torch.manual_seed(2)
    module = Qwen3_5RMSNormGated(128, eps=1e-6).cuda()
    nn.init.normal_(module.weight, 1.0, 0.1)
    compare(module, [torch.randn(4097, 128, device="cuda") for _ in range(2)], fused.Norm)


@pytest.mark.parametrize("inner", [1408, 17408, 1000])
def test_feed_forward(inner: int) -> None:
    torch.manual_seed(3)
    compare(Block(512, inner).cuda(), [torch.randn(1, 517, 512, device="cuda")], fused.FeedForward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_feed_forward(dtype: torch.dtype) -> None:
    """Tiles with adapters on all three, backward written out, against the module's own operations in float64."""
    torch.manual_seed(4)
    config = LoraConfig(r=8, lora_dropout=0.1, target_modules=["gate_proj", "up_proj", "down_proj"])
    made: Any = get_peft_model(Block(512, 1408), config).base_model.model  # type: ignore[arg-type]
    for name, module in made.named_modules():
        if hasattr(module, "lora_dropout"):
            nn.init.normal_(module.lora_B["default"].weight, 0.0, 0.05)
            module.lora_dropout["default"] = SeededDropout(0.0, name)
    own, x = made.cuda().to(dtype), torch.randn(1, 5000, 512, device="cuda", dtype=dtype)
    weight = torch.randn(x.shape, dtype=torch.float64, device="cuda")
    found = []
    for kind in ("truth", "own", "mine"):
        block = copy.deepcopy(own).double() if kind == "truth" else copy.deepcopy(own)
        forward = frozen.FeedForward(block, 2048, "liger", block.forward) if kind == "mine" else block
        given = x.to(block.gate_proj.base_layer.weight.dtype).requires_grad_()
        out = forward(given * 1)
        learned = [one for one in block.parameters() if one.requires_grad]
        found.append([out.detach(), *torch.autograd.grad((out.double() * weight).sum(), [given, *learned])])
    for true, slow, fast in zip(*found, strict=True):
        floor = 2e-6 if dtype == torch.float32 else 1e-3
        assert error(fast, true) <= max(1.2 * error(slow, true), floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_in_registers(dtype: torch.dtype) -> None:
    """An adapter's products with masks that are drawn in registers, against the same masks written out in float64."""
    pytest.importorskip("triton")
    torch.manual_seed(5)
    config = LoraConfig(r=8, lora_dropout=0.1, target_modules=["gate_proj", "up_proj", "down_proj"])
    made: Any = get_peft_model(Block(512, 1408), config).base_model.model  # type: ignore[arg-type]
    for name, module in made.named_modules():
        if hasattr(module, "lora_dropout"):
            nn.init.normal_(module.lora_B["default"].weight, 0.0, 0.05)
            module.lora_dropout["default"] = SeededDropout(0.1, name, counted=True)
            module.lora_dropout["default"].draw = "1/2/3"
    own, x = made.cuda().to(dtype), torch.randn(1, 5000, 512, device="cuda", dtype=dtype)
    weight = torch.randn(x.shape, dtype=torch.float64, device="cuda")
    found = []
    for kind in ("truth", "own", "mine"):
        block = copy.deepcopy(own).double() if kind == "truth" else copy.deepcopy(own)
        forward = frozen.FeedForward(block, 2048, "liger", block.forward) if kind == "mine" else block
        given = x.to(block.gate_proj.base_layer.weight.dtype).requires_grad_()
        out = forward(given * 1)
        learned = [one for one in block.parameters() if one.requires_grad]
        found.append([out.detach(), *torch.autograd.grad((out.double() * weight).sum(), [given, *learned])])
        assert counted_masks(block) == ("in registers" if kind == "mine" else "written out")
    for true, slow, fast in zip(*found, strict=True):
        floor = 2e-6 if dtype == torch.float32 else 1e-3
        assert error(fast, true) <= max(1.2 * error(slow, true), floor)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("shape", head_oracle.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_heads(shape: Any, dtype: torch.dtype) -> None:
    """Norm, rotary embedding and gate of heads: in 16 bits the model's own bits, but where the order of additions moves
    a number over a border; the gate's gradient and a weight's are rounded fewer times."""
    fast, slow, truth = head_oracle.all_ways(shape, dtype)
    for mine, theirs, true in zip(fast, slow, truth, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        floor = 2e-6 if dtype == torch.float32 else 1e-3
        more = 1.02 if mine.numel() > 1000 else 1.5  # of few numbers one rounding more or less shows
        assert head_oracle.error(mine, true) <= max(more * head_oracle.error(theirs, true), floor)
    if dtype != torch.float32:
        for mine, theirs in zip(fast[:4], slow[:4], strict=True):
            assert float((mine != theirs)[..., : shape[2]].double().mean()) < 0.005


FIRST_FAR = 2**31 // (23 * 256) + 1
"""Rows from which on the last of 24 heads of 256, each with its tokens together, begins over 2^31 elements away."""


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("count", [212_000, FIRST_FAR + 1000])
def test_heads_of_more_than_two_to_the_31_elements(count: int) -> None:
    """24 heads of query and gate: the last rows, of which the last head's lie farthest, have what they have by
    themselves. The longer one takes about 59 GiB: 160 KiB a row, of which inputs are 48, copies and what they give 112.
    """
    assert FIRST_FAR == 364_723
    size, last = 256, 1000
    needed = 172_032 * count
    if torch.cuda.get_device_properties(0).total_memory < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of a GPU")
    x = torch.randn(count, 24, 2 * size, dtype=torch.bfloat16)
    cos, sin = torch.rand(2, count, 64, dtype=torch.bfloat16)
    norm = heads.Norm(torch.rand(size, dtype=torch.bfloat16), 1e-6, "zero_centred")
    other, grad = torch.randn(2, count, 24, size, dtype=torch.bfloat16)

    def of(rows: slice) -> list[Tensor]:
        leaf, through = x[rows].clone().requires_grad_(), other[rows].clone().requires_grad_()
        out, gate = heads.rotated(leaf * 1, norm, cos[rows], sin[rows], True)
        assert gate is not None
        opened = heads.gated(through, gate)
        grads = torch.autograd.grad([out, opened], [leaf, through], [grad[rows], grad[rows].flatten(1)])
        return [one.detach()[-last:].clone() for one in (out, opened, *grads)]

    whole = of(slice(None))
    torch.cuda.empty_cache()
    assert all(map(torch.equal, whole, of(slice(count - last, None))))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kernels", ["merged", "joined"])
def test_heads_of_keys_that_several_heads_of_queries_read(
    kernels: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN gets keys and values once for each query head, or as they are."""
    torch.manual_seed(6)
    monkeypatch.setattr(pieces, "GROUPED", native)
    with torch.device("cpu"):
        layout = Layout.from_tree([333, 70, 1, 129, 65, 65, 2], [-1, 0, 1, 0, 3, 3, 0])
    layout = layout.to(torch.device("cuda"))
    of = [torch.randn(1, layout.total, count, 256, dtype=torch.bfloat16).transpose(1, 2) for count in (24, 4, 4)]
    grad = torch.randn(1, layout.total, 24, 256, dtype=torch.bfloat16)
    found = []
    for how, dtype in ((kernels, torch.bfloat16), ("dense", torch.float64)):
        given = [x.detach().to(dtype).requires_grad_() for x in of]
        out = tree_attention(*given, layout, 0.06, how)
        found.append([out.detach(), *torch.autograd.grad(out, given, grad.to(dtype))])
    for mine, true in zip(*found, strict=True):
        assert error(mine, true) < 1e-2
