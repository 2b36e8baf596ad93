"""Decoder layers whose norms and residual sums are computed in the same pass over memory, with
`model.elementwise=fused`.

    normed = norm(hidden)      middle = hidden + mixer(normed)      normed = norm(middle)      middle + mlp(normed)

The second line's sum and norm are one kernel, and in backward each norm's gradient is added to that of what it read.
Layers that are not these sums with these norms, and tensors for which no fused kernel runs, are computed as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from configs.errors import UserError
from prefix_train import fused, halves, norms, unit
from prefix_train.families import BEFORE, norms_of_halves


class Layer:
    """Replaces the forward of a layer whose halves these are. otherwise: where no fused kernel runs."""

    def __init__(
        self, mixer: halves.MixerHalf, feed_forward: halves.FeedForwardHalf, otherwise: Callable[..., Any]
    ) -> None:
        self.mixer, self.feed_forward, self.otherwise = mixer, feed_forward, otherwise

    def __call__(self, hidden: Tensor, **given: Any) -> Any:
        first, second = _norm(self.mixer), _norm(self.feed_forward)
        if not fused.one_kernel(hidden, first.elementwise):
            return self.otherwise(hidden, **given)
        hidden, normed = norms.beside(hidden, first.how)
        made = _made(self.mixer.module(hidden_states=normed, **given))
        middle, normed = norms.of_sum(hidden, made, second.how)
        return middle + _made(self.feed_forward.module(normed))


class Half:
    """Replaces the forward of a half of such a layer. otherwise: where no fused kernel runs."""

    def __init__(self, half: halves.Half, otherwise: Callable[..., Any]) -> None:
        self.half, self.otherwise = half, otherwise

    def __call__(self, hidden: Tensor, **given: Any) -> Any:
        norm = _norm(self.half)
        if not fused.one_kernel(hidden, norm.elementwise):
            return self.otherwise(hidden, **given)
        hidden, normed = norms.beside(hidden, norm.how)
        mixes = isinstance(self.half, halves.MixerHalf)
        made = self.half.module(hidden_states=normed, **given) if mixes else self.half.module(normed)
        return hidden + _made(made)


def install(layer: nn.Module, elementwise: str) -> None:
    """Where this layer is known to be those sums, and its norms to have fused kernels. After `tiles` has replaced the
    norms' forwards. UserError where it is not, and `elementwise` is `fused`."""

    def replace(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(module, halves.Half):
            return Half(module, forward) if _fits(module) else forward
        both = halves.of(module, forward) if norms_of_halves(forward) == BEFORE else ()
        if both and all(map(_fits, both)):
            return Layer(*both, forward)
        if elementwise == "fused":
            name = type(module).__name__
            raise UserError(f"model.elementwise=fused does not compute what {name} does: set model.elementwise=auto")
        return forward

    unit.compute_by(layer, replace)


def _fits(half: halves.Half) -> bool:
    norm = half.before.forward
    return isinstance(half.behind, nn.Identity) and isinstance(norm, fused.Norm) and not norm.gated


def _norm(half: halves.Half) -> fused.Norm:
    norm = half.before.forward
    assert isinstance(norm, fused.Norm)
    return norm


def _made(output: Any) -> Tensor:
    """What a module gave; attention gives its probabilities beside it, some experts their router's."""
    made: Tensor = output[0] if isinstance(output, tuple) else output
    return made
