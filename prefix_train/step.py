"""One update: the file to read first.

An update is a number of packs, the same number on every rank. Each pack is one buffer in which shared prefixes stand
once; its loss is a weighted sum whose weights were fixed for the whole update beforehand. So the packs' gradients
just add up, over packs and over ranks, and the update is the one that training every example alone would have made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prefix_train import blame, gradients
from prefix_train.collate import Batch
from prefix_train.dist import Ranks
from prefix_train.model import Root


@dataclass(frozen=True)
class StepResult:
    """What one update did, over all ranks together.

    loss: the weighted sum that was minimised. norm: of the whole gradient, before the clip. lr: the one used.
    target_loss: sum of the cross-entropies of all examples' target tokens, example_loss: sum of each example's mean.
    packs (empty ones left out), examples, targets, positions, logical: counted from what ran.
    """

    loss: float
    norm: float
    lr: float
    target_loss: float
    example_loss: float
    packs: int
    examples: int
    targets: int
    positions: int
    logical: int


@dataclass(frozen=True)
class Stepper:
    """What stays the same from update to update. parameters: everything that is trained, by name."""

    root: Root
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    coverage: gradients.Coverage
    seed: int
    clip_norm: float
    name: Callable[[int], str] = str
    """What to call an example in an error, by its index."""
    phase: Callable[[str, int], None] = lambda name, pack: None
    """Told what begins: `forward`, `backward` (with the pack), `reduce`, `optimizer`."""

    def draw(self, number: int, pack: int) -> str:
        """Names (run, update, pack) for dropout's seeds."""
        return f"{self.seed}/{number}/{pack * self.ranks.world + self.ranks.rank}"


def update(stepper: Stepper, number: int, lr: float, batches: Sequence[Batch]) -> StepResult:
    """Train on `batches`, this rank's packs of update `number`, with learning rate `lr`.

    Every rank calls it with the same number of packs. Raises blame.NotFinite, naming rank, pack and examples, where a
    loss or gradient is not finite, and gradients.NothingLearned where a tensor that took part has no gradient;
    in both cases on all ranks, before any parameter has changed.
    """
    step = stepper
    step.optimizer.zero_grad()
    losses: list[Tensor] = []
    sums: list[Tensor] = []
    for first in range(0, len(batches), step.root.at_once):
        packs = [batch.to(step.ranks.device) for batch in batches[first : first + step.root.at_once]]
        step.phase("forward", first)
        outs = step.root.together(packs, [step.draw(number, first + place) for place in range(len(packs))])
        if not all(out.loss.requires_grad for out in outs):
            raise gradients.NothingLearned("the loss depends on no trainable tensor")
        step.phase("backward", first)
        torch.stack([out.loss for out in outs]).sum().backward()  # type: ignore[no-untyped-call]
        losses += [out.loss.detach() for out in outs]
        sums += [_sums(out.loss.detach(), out.each, batch) for out, batch in zip(outs, packs, strict=True)]

    step.phase("reduce", -1)
    norms = gradients.squared_norms(step.parameters)
    totals = step.ranks.sum(torch.cat([norms, torch.stack(sums).sum(0)])).tolist()
    squares, (loss, target_loss, example_loss, images, *counts) = totals[: len(norms)], totals[len(norms) :]
    norm = sum(squares) ** 0.5
    if not (norm < float("inf") and abs(loss) < float("inf")):
        raise blame.not_finite(step, number, batches, losses)
    step.coverage.check(squares, images > 0)

    step.phase("optimizer", -1)
    gradients.clip(step.parameters, norm, step.clip_norm)
    for group in step.optimizer.param_groups:
        group["lr"] = lr
    step.optimizer.step()
    return StepResult(loss, norm, lr, target_loss, example_loss, *map(int, counts))


def _sums(loss: Tensor, each: Tensor, batch: Batch) -> Tensor:
    """[9] float64 of one pack, to be summed over packs and ranks: what StepResult tells from `loss` on, and images."""
    targets = batch.targets
    entries = each.to(torch.float64)[targets.entry_target]
    lengths = entries.new_zeros(len(batch.members)).index_add(0, targets.entry_example, torch.ones_like(entries))
    counted = (
        batch.pixel_values is not None,
        bool(batch.members),
        len(batch.members),
        len(entries),
        batch.positions,
        batch.logical,
    )
    measured = [loss.to(torch.float64), entries.sum(), (entries / lengths[targets.entry_example]).sum()]
    return torch.cat([torch.stack(measured), torch.tensor(counted, dtype=torch.float64, device=loss.device)])


def learning_rate(number: int, updates: int, peak: float, warmup: int, schedule: str) -> float:
    """Of update `number` (from 0) of `updates`: a linear rise to `peak` over `warmup` updates, then the schedule."""
    if number < warmup:
        return peak * (number + 1) / warmup
    past = (number - warmup) / max(updates - warmup, 1)
    if schedule == "cosine":
        return peak * (1 + math.cos(past * math.pi)) / 2
    return peak * (1 - past) if schedule == "linear" else peak
