"""Convolution and delta rule of one sequence, token by token in float64: the truth for those over a forest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_train.layout import Layout
from tests import trees

CHANNELS, HEADS, VALUE_HEADS, KEY, VALUE = 20, 2, 4, 8, 6
RULE_NAMES = ("out", "query", "key", "value", "g", "beta")
CONV_NAMES = ("out", "x", "weight", "bias")


def draws(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def conv_inputs(layout: Layout, dtype: torch.dtype, width: int = 4, bias: bool = True) -> list[Tensor]:
    shapes = [(layout.total, CHANNELS), (CHANNELS, width), *[(CHANNELS,)] * bias]
    return [x.to(dtype).requires_grad_() for x in draws(layout.total, *shapes)]


def rule_inputs(layout: Layout, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value, g, beta. Slow decay (A = 0.05): a leak of the state does not fade away."""
    total = layout.total
    shapes = [(1, total, HEADS, KEY)] * 2 + [(1, total, VALUE_HEADS, VALUE)] + [(1, total, VALUE_HEADS)] * 2
    query, key, value, a, b = draws(layout.total, *shapes)
    wide = torch.promote_types(dtype, torch.float32)
    made = [query.to(dtype), key.to(dtype), value.to(dtype), (-0.05 * F.softplus(a)).to(wide), b.sigmoid().to(dtype)]
    return [x.requires_grad_() for x in made]


def with_gradients(out: Tensor, of: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, of, grad.to(out.dtype))]


def widened(of: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in of]


def conv_alone(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One sequence [n, C] with zeros before it."""
    padded = F.pad(x.t()[None], (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]))[0].t()


def rule_alone(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One sequence [n, H, ...], token by token."""
    return recurrence(query, key, value, g, beta, value.new_zeros(value.shape[1], key.shape[2], value.shape[2]))[0]


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    groups = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(groups, 1) for x in (query, key))
    out = []
    for q, k, v, decay, b in zip(query, key, value, g, beta, strict=True):
        state = state * decay.exp()[:, None, None]
        known = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, (v - known) * b[:, None])
        out.append(torch.einsum("hk,hkv->hv", q, state) * q.shape[-1] ** -0.5)
    return torch.stack(out), state


def conv_truth(layout: Layout, of: list[Tensor], grad: Tensor) -> list[Tensor]:
    wide = widened(of)
    weight, bias = wide[1], wide[2] if len(wide) > 2 else None
    return with_gradients(trees.standalone(layout, lambda x: conv_alone(x, weight, bias), wide[0]), wide, grad)


def rule_truth(layout: Layout, of: list[Tensor], grad: Tensor) -> list[Tensor]:
    wide = widened(of)
    return with_gradients(trees.standalone(layout, rule_alone, *(x[0] for x in wide))[None], wide, grad)
