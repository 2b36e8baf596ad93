"""Norms and gated activations in one kernel each, through Liger, where the tensors are on CUDA and that was chosen.

Elsewhere the module's own forward runs, tile by tile. `kernel_choice` has what `model.elementwise` means where.
Liger's kernels search for nothing, so there is nothing to pin. With `fused` norms are computed by `norms`, what they
read or scale beside them in the same kernel.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from prefix_train import norms

ZERO_CENTRED = frozenset({"Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm"})
"""Norms that scale by 1 + weight, all in float32."""
PLAIN = frozenset({
    *("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "SmolLM3RMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"),
    *("Qwen3MoeRMSNorm", "Qwen3VLTextRMSNorm", "Qwen3VLMoeTextRMSNorm"),
})  # fmt: skip
"""Norms that round to the input's dtype before they scale by the weight. (OLMo's round afterwards: they have none.)"""
GATED = frozenset({"Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated", "Qwen3NextRMSNormGated"})
"""Plain norms times silu(gate)."""

ROW, LEAST = 4096, 256
"""Elements of a row that an element-wise kernel is given, and fewest for which rows are made anew."""

WITH_LIGER = ("liger", "fused")
"""What `model.elementwise` is where kernels of this module run; `fused` has Liger's gated activation."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Norm:
    """Replaces the forward of a norm of a class that is known here. otherwise: where no fused kernel runs."""

    def __init__(self, module: Any, elementwise: str, otherwise: Callable[..., Tensor]) -> None:
        self.module = module
        self.elementwise, self.otherwise = elementwise, otherwise
        name = type(module).__name__
        self.offset, self.mode = (1.0, "gemma") if name in ZERO_CENTRED else (0.0, "llama")
        self.gated = name in GATED
        eps = getattr(module, "variance_epsilon", None)
        self.eps = float(module.eps if eps is None else eps)

    @property
    def how(self) -> norms.Norm:
        """What it computes, with the weight that the module holds at this moment."""
        return norms.Norm(self.module.weight, self.eps, self.mode == "gemma")

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.gated and one_kernel(inputs[0], self.elementwise):
            return norms.gated([inputs[0]], inputs[1], self.how)
        if not runs(inputs[0], self.elementwise):
            return self.otherwise(*inputs)
        norm: Any = _liger("rms_norm", "LigerRMSNormFunction")
        out: Tensor = norm.apply(inputs[0], self.module.weight, self.eps, self.offset, self.mode, False)
        return silu_mul(inputs[1], out) if self.gated else out


def gated_norm(module: nn.Module, parts: Sequence[Tensor], gate: Tensor) -> Tensor:
    """A gated norm of heads whose input's positions are in parts, [1, n, heads, D] each. gate: [1, T, heads, D].
    Returns as many elements as the gate has."""
    norm = module.forward
    if len(parts) > 1 and isinstance(norm, Norm) and norm.gated and one_kernel(parts[0], norm.elementwise):
        return norms.gated(parts, gate, norm.how)
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
    out: Tensor = module(*(one.reshape(-1, gate.shape[-1]) for one in (whole, gate)))
    return out


class FeedForward:
    """Replaces the inner forward of a gated feed-forward with SiLU."""

    def __init__(self, block: nn.Module, elementwise: str, otherwise: Callable[..., Tensor]) -> None:
        self.block: Any = block
        self.elementwise, self.otherwise = elementwise, otherwise

    def __call__(self, inputs: Tensor) -> Tensor:
        if not runs(inputs, self.elementwise):
            return self.otherwise(inputs)
        out: Tensor = self.block.down_proj(silu_mul(self.block.gate_proj(inputs), self.block.up_proj(inputs)))
        return out


def knows_norm(module: nn.Module) -> bool:
    """Is there a fused kernel for this norm?"""
    return type(module).__name__ in ZERO_CENTRED | PLAIN | GATED


def knows_activation(block: Any) -> bool:
    """Is the gated feed-forward's activation SiLU?"""
    return isinstance(block.act_fn, nn.SiLU) or type(block.act_fn).__name__ == "SiLUActivation"


def runs(inputs: Tensor, elementwise: str) -> bool:
    """Do fused kernels compute these inputs?"""
    return inputs.is_cuda and inputs.dtype in DTYPES and elementwise in WITH_LIGER


def one_kernel(inputs: Tensor, elementwise: str) -> bool:
    """Does a norm's kernel compute what these inputs are read or scaled beside, too?"""
    return runs(inputs, elementwise) and elementwise == "fused"


def silu_mul(gate: Tensor, other: Tensor) -> Tensor:
    """silu(gate) * other, by Liger. Backward writes over both: nothing else may have saved them."""
    out: Tensor = _SiluMul.apply(gate, other)  # type: ignore[no-untyped-call]
    return out


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, other: Tensor) -> Tensor:
        gate, other = gate.contiguous(), other.contiguous()
        ctx.save_for_backward(gate, other)
        return _swiglu(gate, other)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


def activate(gate: Tensor, other: Tensor, elementwise: str) -> Tensor:
    """silu(gate) * other, without a graph."""
    return _swiglu(gate, other) if runs(gate, elementwise) else F.silu(gate) * other


def activate_backward(grad: Tensor, gate: Tensor, other: Tensor, elementwise: str) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `other`, which may be written over. All are contiguous."""
    if runs(gate, elementwise):
        return _swiglu_backward(grad, gate, other)
    of_gate: Tensor = torch.ops.aten.silu_backward(grad * other, gate)
    return of_gate, grad * F.silu(gate)


def _swiglu(gate: Tensor, other: Tensor) -> Tensor:
    out: Tensor = _liger("swiglu", "swiglu_forward")(_flat(gate), _flat(other))[2]
    return out.view(gate.shape)


def _swiglu_backward(grad: Tensor, gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    of_gate, of_other = _liger("swiglu", "swiglu_backward")(_flat(gate), _flat(other), _flat(grad))
    return of_gate.view(gate.shape), of_other.view(other.shape)


def _flat(x: Tensor) -> Tensor:
    """Rows of another width: Liger's kernels take a row each, as wide as the next power of two. Feed-forward rows leave
    much of that empty, rows of a head are too short."""
    width = math.gcd(x.numel(), ROW)
    return x.view(-1, width) if width >= LEAST else x


def _liger(module: str, function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
    return found
