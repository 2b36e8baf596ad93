"""Norm, rotary embedding and gate of heads as transformers has them, and as `heads` has them, in any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as rotate_first

from prefix_train import heads
from prefix_train.heads import Norm

NORMS = {"zero_centred": Qwen3_5RMSNorm, "plain": Qwen3RMSNorm}

SHAPES = [
    (1, 4, 64, 64, "plain", False),
    (33, 3, 64, 32, "zero_centred", True),
    (17, 6, 256, 64, "zero_centred", True),
    (18, 1, 256, 64, "zero_centred", False),
    (1, 1, 256, 256, "plain", True),
    (35, 2, 128, 128, None, False),
    (5, 2, 80, 80, "plain", False),
    (19, 2, 40, 24, "zero_centred", True),
    (16, 2, 64, 32, None, True),
]
"""Tokens, heads, elements of a head, rotated ones, norm, gate beside each head."""


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same numbers wherever tensors are made."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return made.to(torch.get_default_device(), dtype)


def tables(tokens: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Halves differ: none may stand for the other."""
    angles = drawn(tokens, rotary, seed=8, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def norm_of(name: str | None, size: int, dtype: torch.dtype) -> Any:
    if name is None:
        return None
    module = NORMS[name](size, eps=1e-6).to(dtype)
    module.weight.data = drawn(size, seed=7, dtype=dtype) * 0.3 + (name == "plain")
    return module


def own(x: Tensor, module: Any, cos: Tensor, sin: Tensor, with_gate: bool) -> tuple[Tensor, Tensor | None]:
    """As transformers has it."""
    size = x.shape[2] // (1 + with_gate)
    head, gate = x[..., :size], x[..., size:] if with_gate else None
    head = (head if module is None else module(head)).transpose(0, 1)[None]
    rotate = rotate_whole if cos.shape[1] == size else rotate_first
    return rotate(head, head, cos[None], sin[None])[0][0].transpose(0, 1), gate


def ours(x: Tensor, module: Any, cos: Tensor, sin: Tensor, with_gate: bool) -> tuple[Tensor, Tensor | None]:
    return heads.rotated(x, None if module is None else Norm.of(module), cos, sin, with_gate)


def through(how: Any, x: Tensor, module: Any, rotary: int, with_gate: bool) -> list[Tensor]:
    """Heads, what the gate lets through of something else, and the gradients of x, of that and of the norm's weight."""
    tokens, count, width = x.shape
    size, dtype = width // (1 + with_gate), x.dtype
    other = drawn(tokens, count, size, seed=2, dtype=torch.float16).to(dtype)
    of = [x.clone().requires_grad_(), other.requires_grad_()]
    out, gate = how(of[0] * 1, module, *(one.to(dtype) for one in tables(tokens, rotary, torch.float16)), with_gate)
    assert out.shape == (tokens, count, size)
    opened = of[1].flatten(1)
    if gate is not None:
        opened = opened * torch.sigmoid(gate.reshape(tokens, -1)) if how is own else heads.gated(of[1], gate)
    grads = [drawn(*one.shape, seed=3 + n, dtype=torch.float16).to(dtype) for n, one in enumerate((out, opened))]
    learned = of if module is None else [*of, module.weight]
    return [out.detach(), opened.detach(), *torch.autograd.grad([out, opened], learned, grads)]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-30))


def all_ways(shape: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Ours, the model's own, and its own in float64 with the same numbers."""
    tokens, count, size, rotary, name, with_gate = shape
    x = drawn(tokens, count, size * (1 + with_gate), seed=1, dtype=torch.float32).to(dtype)
    module = norm_of(name, size, dtype)
    slow, fast = (through(how, x, module, rotary, with_gate) for how in (own, ours))
    wide = None if module is None else norm_of(name, size, dtype).double()
    return fast, slow, wider(x, wide, rotary, with_gate)


def wider(x: Tensor, module: Any, rotary: int, with_gate: bool) -> list[Tensor]:
    """Every number in float64, the norm's too: transformers' takes float32 in it."""
    if module is not None:
        plain, eps = isinstance(module, Qwen3RMSNorm), Norm.of(module).eps
        weight = module.weight.detach().requires_grad_()

        class Wide:
            def __init__(self) -> None:
                self.weight = weight

            def __call__(self, one: Tensor) -> Tensor:
                return one * torch.rsqrt(one.pow(2).mean(-1, keepdim=True) + eps) * (weight if plain else 1 + weight)

        module = Wide()
    return through(own, x.double(), module, rotary, with_gate)
