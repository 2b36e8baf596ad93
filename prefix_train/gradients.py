"""Gradients of a whole update: their norms over all ranks, the clip, and the check that everything really trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from configs.wording import counted
from prefix_train.tensors import local


class NothingLearned(RuntimeError):
    """Trainable tensors that took part in an update have no gradient: which, and since when."""


def squared_norms(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """[K] float64: squared norm of the part of each parameter's gradient that this rank holds; 0 without gradient."""
    device = next(iter(parameters.values())).device
    norms = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    places = [place for place, parameter in enumerate(parameters.values()) if parameter.grad is not None]
    found = [local(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]
    if found:
        norms[places] = torch.stack(torch._foreach_norm(found, 2)).to(torch.float64).square()
    return norms


def clip(parameters: Mapping[str, nn.Parameter], norm: float, most: float) -> None:
    """Scale all gradients down so that their global norm, now `norm`, is at most `most`; 0 leaves them."""
    if 0 < most < norm:
        torch._foreach_mul_(
            [local(parameter.grad) for parameter in parameters.values() if parameter.grad is not None], most / norm
        )


class Coverage:
    """Which trainable tensors have had a non-zero gradient, and which should have.

    A tensor of the vision tower or merger takes part from the first image on, an expert from the first token that is
    routed to it, lora_A from the second update on (in the first one its lora_B is zero). vision: names of the
    tensors that only images reach.
    """

    def __init__(self, names: list[str], vision: frozenset[str], warmup: int) -> None:
        self._names, self._vision, self._warmup = names, vision, max(warmup, 2)
        self._waiting = set(names)
        self._updates = 0
        self._images = False

    @property
    def covered(self) -> int:
        """Tensors that have had a gradient."""
        return len(self._names) - len(self._waiting)

    @property
    def waiting(self) -> list[str]:
        """Tensors that have had none, in the model's order."""
        return [name for name in self._names if name in self._waiting]

    def check(self, norms: list[float], images: bool) -> None:
        """Take in one update: the norm of each tensor's gradient, in the order of the names, and whether any rank had
        an image. Raises NothingLearned naming every tensor that took part, should have a gradient by now and has none.
        """
        self._updates += 1
        self._images |= images
        self._waiting -= {name for name, norm in zip(self._names, norms, strict=True) if norm > 0}
        if missing := [name for name in self.waiting if self._is_due(name)]:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise NothingLearned(
                f"{len(missing)} of {len(self._names)} trainable tensors have had no gradient "
                f"after {counted(self._updates, 'update')}: {shown}"
            )

    def _is_due(self, name: str) -> bool:
        if name in self._vision and not self._images:
            return False
        if self._updates >= self._warmup:
            return True
        return ".experts." not in name and (".lora_A." not in name or self._updates > 1)
