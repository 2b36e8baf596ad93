"""A decoder layer as two residual sums, each of which can be computed again by itself.

    middle = hidden + mixer(norm(hidden))        output = middle + feed_forward(norm(middle))

Some layers have each norm behind what it stands before here. `families` names those that are these two sums and nothing
else; tests/numerics/test_keep_middle.py holds each of them against its own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from configs.errors import UserError
from prefix_train.families import Norms, norms_of_halves

MIXERS = ("self_attn", "linear_attn")
PRODUCTS = ("o_proj", "out_proj")
"""What a layer calls its token mixer, and a mixer its last linear module."""


class Half(nn.Module):
    """hidden + behind(module(before(hidden))), [1, T, D]. The modules stay the layer's own: no model holds a half."""

    def __init__(self, layer: nn.Module, module: nn.Module, norms: Norms) -> None:
        super().__init__()
        self.module = module
        self.before, self.behind = (nn.Identity() if name is None else layer.get_submodule(name) for name in norms)

    def _sum(self, hidden: Tensor, made: Tensor | tuple[Tensor, Any]) -> Tensor:
        """made: what the module gave; attention gives its probabilities beside it, some experts their router's."""
        added: Tensor = self.behind(made[0] if isinstance(made, tuple) else made)
        return hidden + added


class MixerHalf(Half):
    """The first sum, with the layer's token mixer."""

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        """given: what the layer was, for its mixer."""
        return self._sum(hidden, self.module(hidden_states=self.before(hidden), **given))

    @property
    def unread(self) -> nn.Module | None:
        """The linear module whose product nothing but the sum reads; none where a norm reads it."""
        if not isinstance(self.behind, nn.Identity):
            return None
        (found,) = (child for name, child in self.module.named_children() if name in PRODUCTS)
        return found


class FeedForwardHalf(Half):
    """The second sum, with the layer's feed-forward, which is given hidden states alone."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return self._sum(hidden, self.module(self.before(hidden)))


def of(layer: nn.Module, forward: Callable[..., Any]) -> tuple[MixerHalf, FeedForwardHalf]:
    """The halves of `layer`, whose own `forward` is given. UserError, naming the class, where it is not known."""
    norms = norms_of_halves(forward)
    if norms is None:
        raise UserError(
            f"memory.keep_middle: {type(layer).__name__} is not known to be two residual sums, so it has no middle "
            "that could be kept: set memory.keep_middle=none"
        )
    (mixer,) = (child for name, child in layer.named_children() if name in MIXERS)
    return MixerHalf(layer, mixer, norms[0]), FeedForwardHalf(layer, layer.get_submodule("mlp"), norms[1])
