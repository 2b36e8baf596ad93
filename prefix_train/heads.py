"""What surrounds attention in each of its heads, in one pass each: norm and rotary embedding before, the gate behind.

    query, key = rotary(norm(projected))        output = attended * sigmoid(gate)

Query and gate are the halves of each head of one projection's output and are read where they lie. That output is all
that is kept of them: backward computes the norm's statistics and the gate again, and writes both gradients over what
they belong to, where the projection's backward reads them, with nothing to fill or to put together. So a graph has one
backward (a second one raises), and nobody else may want that output. Numbers are float32 within and rounded where the
model's own modules write a tensor. Kernels in Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from configs.errors import UserError
from prefix_train import fused, kernel_choice, machine
from prefix_train.families import NotExact, Parts
from prefix_train.kernel_choice import LARGEST_HEAD as LARGEST

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Kind(NamedTuple):
    """Of an attention module. gated: its query projection gives a gate beside each head's query. normed: queries and
    keys go through a norm of heads."""

    gated: bool
    normed: bool


KINDS = {
    **dict.fromkeys(("LlamaAttention", "MistralAttention", "MixtralAttention"), Kind(False, False)),
    **dict.fromkeys(("Qwen2Attention", "SmolLM3Attention"), Kind(False, False)),
    **dict.fromkeys(("Qwen3Attention", "Qwen3MoeAttention"), Kind(False, True)),
    **dict.fromkeys(("Qwen3VLTextAttention", "Qwen3VLMoeTextAttention"), Kind(False, True)),
    **dict.fromkeys(("Qwen3_5Attention", "Qwen3_5MoeAttention", "Qwen3NextAttention"), Kind(True, True)),
}
"""Attention whose forward is what `forward` computes. (OLMo's norms take all heads at once, its rotary float32.)"""

NORMS: tuple[Literal["zero_centred", "plain"], ...] = ("zero_centred", "plain")


class Norm(NamedTuple):
    """Of heads. kind: scales by 1 + weight, all in float32; or rounds before it scales by the weight."""

    weight: Tensor
    eps: float
    kind: Literal["zero_centred", "plain"]

    @classmethod
    def of(cls, module: Any) -> Norm:
        """A norm that `fused` knows."""
        eps = getattr(module, "variance_epsilon", None)
        kind = NORMS[type(module).__name__ not in fused.ZERO_CENTRED]
        return cls(module.weight, float(module.eps if eps is None else eps), kind)


def require(device: torch.device) -> None:
    """UserError where these kernels do not run on `device`."""
    kernel_choice.heads("fused", machine.model(DTYPES[0]), machine.of(device))


def kinds(parts: Parts) -> dict[str, Kind]:
    """Of each attention module by its name; NotExact names one that is computed in another way."""
    found = {}
    for name, module in parts.attention.items():
        kind = KINDS.get(parts.family.kind(module))
        norms = [module.q_norm, module.k_norm] if kind is not None and kind.normed else []
        if kind is None or any(type(norm).__name__ not in fused.ZERO_CENTRED | fused.PLAIN for norm in norms):
            what = type(module).__name__
            raise NotExact(f"{name}: model.heads=fused does not compute what {what} does: set model.heads=torch")
        found[name] = kind
    return found


def forward(
    module: Any,
    kind: Kind,
    hidden: Tensor,
    tables: tuple[Tensor, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """An attention module's own forward: hidden states [1, T, hidden] -> the same.

    tables: the rotary embedding's cos and sin, [1, T, R]. attend: query [1, Hq, T, D], key and value [1, Hk, T, D] ->
    [1, T, Hq, D].
    """
    size, count = module.head_dim, hidden.shape[1]
    query = module.q_proj(hidden).view(count, -1, size * (1 + kind.gated))
    key, value = (layer(hidden).view(count, -1, size) for layer in (module.k_proj, module.v_proj))
    gate: Tensor | None = None
    if getattr(module, "use_rope", True):  # SmolLM3 leaves some layers' heads as they are
        cos, sin = (table[0] for table in tables)
        of_query, of_key = (Norm.of(module.q_norm), Norm.of(module.k_norm)) if kind.normed else (None, None)
        query, gate = rotated(query, of_query, cos, sin, kind.gated)
        key, _ = rotated(key, of_key, cos, sin)
    # Not by index: the gradient of an index is a tensor of zeros with something in it.
    out = attend(*(one.transpose(0, 1)[None] for one in (query, key, value))).squeeze(0)
    del query, key, value
    opened = out.flatten(1) if gate is None else gated(out, gate)
    del out, gate
    made: Tensor = module.o_proj(opened[None])
    return made


def rotated(
    x: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor, with_gate: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Each head of x [T, H, D], or of the first halves of [T, H, 2D], through the norm and rotated, [T, H, D]; and the
    gate, those second halves, [T, H, D] where they lie.

    cos, sin: [T, R]; the first R elements of a head are rotated, R at most D. x may be written over in backward.
    UserError for what the kernels do not take.
    """
    _require(x, x.shape[2] // (1 + with_gate), cos, sin, *([] if norm is None else [norm.weight]))
    weight, how = (None, None) if norm is None else (norm.weight, norm)
    found: tuple[Tensor, Tensor | None] = _Rotated.apply(x, weight, cos, sin, how, with_gate)  # type: ignore[no-untyped-call]
    return found


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [T, H, D], as [T, H * D]. `gate` is written over in backward."""
    out: Tensor = _Gated.apply(x, gate)  # type: ignore[no-untyped-call]
    return out


class _Rotated(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, norm: Norm | None, with_gate: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.size, ctx.how = x.shape[2] // (1 + with_gate), None if norm is None else norm[1:]
        ctx.save_for_backward(x if with_gate or norm is not None else None, weight, cos, sin)
        out = _kernels("rotate")(x[..., : ctx.size], norm, cos, sin)
        return out, x.detach()[..., ctx.size :] if with_gate else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_gate: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        norm = None if weight is None else Norm(weight, *ctx.how)
        into = grad.new_empty(grad.shape) if x is None else x
        halves = into.detach().split(ctx.size, 2)
        if of_gate is not None and not _same_place(of_gate, halves[1]):
            halves[1].copy_(of_gate)
        heads = None if norm is None else halves[0]
        sums = _kernels("rotate_back")(_straight(grad), heads, norm, cos, sin, halves[0], ctx.needs_input_grad[1])
        if x is not None:
            torch.autograd.graph.increment_version(x)
        of_weight = None if sums is None else sums.to(weight.dtype)
        return into.detach() if ctx.needs_input_grad[0] else None, of_weight, None, None, None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        x = _straight(x)
        ctx.save_for_backward(x, gate)
        out: Tensor = _kernels("gate")(x, gate)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        of_x: Tensor = _kernels("gate_back")(_straight(grad), x, gate)
        return of_x, gate.detach()


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _straight(x: Tensor) -> Tensor:
    # Rows are read 16 bytes at a time.
    return x if x.stride(-1) == 1 else x.contiguous()


def _require(x: Tensor, size: int, cos: Tensor, sin: Tensor, *weights: Tensor) -> None:
    """Raise UserError, naming it, for what the kernels do not take."""
    rotary = cos.shape[1]
    if x.dtype not in DTYPES or size > LARGEST or rotary % 2 or not 0 < rotary <= size:
        named = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UserError(
            f"model.heads=fused takes {named} with heads of up to {LARGEST}, not {x.dtype} with heads of {size} of "
            f"which {rotary} are rotated: set model.heads=torch"
        )
    for one in (cos, sin, *weights):
        if one.dtype != x.dtype or one.stride(-1) != 1:
            raise UserError(f"model.heads=fused: heads are {x.dtype}, what they are multiplied by {one.dtype}")


def _kernels(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module("prefix_train.heads_triton"), name)
    return found
