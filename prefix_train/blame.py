"""Which rank, pack and examples a loss or gradient came from that is not finite.

Gradients are summed over ranks layer by layer, so the sum no longer tells where it came from. The update is therefore
run once more, with the same masks, and each rank looks at its own gradients before they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prefix_train import anatomy
from prefix_train.collate import Batch

if TYPE_CHECKING:
    from prefix_train.model import Root
    from prefix_train.step import Stepper


class NotFinite(RuntimeError):
    """A loss or gradient is NaN or infinite: of which rank, pack and examples."""


def not_finite(step: Stepper, number: int, batches: Sequence[Batch], losses: Sequence[Tensor]) -> NotFinite:
    """The error for update `number`; every rank calls it and gets the same text."""
    mine = [
        _finding(step, number, pack, batch, f"the loss is {loss.item()}")
        for pack, (batch, loss) in enumerate(zip(batches, losses, strict=True))
        if not loss.isfinite()
    ]
    found = [line for lines in step.ranks.gather(mine) for line in lines]
    if not found:
        found = [line for lines in step.ranks.gather(_bad_gradients(step, number, batches)) for line in lines]
    where = "; ".join(found) or "running it again gave finite gradients on every rank: the hardware may be at fault"
    return NotFinite(f"update {number} is not finite: {where}")


def _bad_gradients(step: Stepper, number: int, batches: Sequence[Batch]) -> list[str]:
    findings = []
    for pack, batch in enumerate(batches):
        step.optimizer.zero_grad()
        bad: dict[str, Tensor] = {}
        with _watching(step.root, bad):
            step.root(batch.to(step.ranks.device), draw=step.draw(number, pack)).loss.backward()
        names = [name for name, flag in bad.items() if flag]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            findings.append(_finding(step, number, pack, batch, f"the gradient of {names[0]}{more} is not"))
    return findings


@contextmanager
def _watching(root: Root, bad: dict[str, Tensor]) -> Iterator[None]:
    """Note in `bad`, by parameter, whether a gradient that this rank computes has something that is not finite.

    Sharded parameters exist in full only within their unit's forward: that is where they are hooked.
    """
    handles: list[Any] = []

    def watch(_: nn.Module, __: Any, module: nn.Module, prefix: str) -> None:
        for name, parameter in module.named_parameters(prefix):
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                handles.append(parameter.register_hook(partial(_note, bad, name)))  # type: ignore[no-untyped-call]

    handles.append(root.register_forward_pre_hook(partial(watch, module=root.model, prefix="")))
    for unit in root.anatomy.units:
        name = anatomy.name_of(unit, root.model)
        handles.append(unit.register_forward_pre_hook(partial(watch, module=unit, prefix=name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(bad: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    bad[name] = bad.get(name, torch.zeros((), dtype=torch.bool, device=gradient.device)) | ~gradient.isfinite().all()


def _finding(step: Stepper, number: int, pack: int, batch: Batch, what: str) -> str:
    shown = ", ".join(step.name(member) for member in batch.members[:5])
    more = f" and {len(batch.members) - 5} more" if len(batch.members) > 5 else ""
    return f"rank {step.ranks.rank}, pack {pack} with {shown}{more}: {what}"
