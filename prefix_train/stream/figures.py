"""Figures of streaming that can be put beside each other: counted from what ran, at one budget, and possible at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefix_train.collate import Batch

POSSIBLE = 0.95
"""A row whose time is below this share of its own bound did not do what it says: rates are not off by more."""


class Misleading(ValueError):
    """Rows that must not stand in one table, or a row that cannot be true: which, and why."""


@dataclass(frozen=True)
class Row:
    """One way of making one update. positions, logical, targets: tokens, counted from its tensors. nbytes: read.

    bound_s: the least time, max(bytes / bandwidth, FLOPs / rate), with both measured in the same visit. budget_gib: of
    device memory; peak_bytes: used of it. warm: were the store's pages in memory before?
    """

    name: str
    positions: int
    logical: int
    targets: int
    seconds: float
    nbytes: int
    bound_s: float
    budget_gib: float
    peak_bytes: int
    warm: bool

    @property
    def overlap(self) -> float:
        """Share of the bound in the time."""
        return self.bound_s / self.seconds


def count(batches: Sequence[Batch]) -> tuple[int, int, int]:
    """Positions, logical tokens and (example, target token) pairs of packs: from tensors, never from a cap."""
    positions = sum(batch.input_ids.numel() for batch in batches if batch.members)
    targets = sum(batch.targets.entry_target.numel() for batch in batches)
    return positions, sum(batch.logical for batch in batches), targets


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown. Raises Misleading for unequal budgets, cold beside warm rows, and times below the bound."""
    budgets = sorted({row.budget_gib for row in rows})
    if len(budgets) > 1:
        listed = ", ".join(f"{budget:g}" for budget in budgets)
        raise Misleading(f"rows with budgets of {listed} GiB are no comparison: give all the same")
    if len({row.warm for row in rows}) > 1:
        raise Misleading("cold and warm rows are no comparison: report them apart")
    for row in rows:
        if row.seconds < POSSIBLE * row.bound_s:
            raise Misleading(
                f"{row.name}: {row.seconds:.3f} s for {row.positions:,} positions, but reading and computing takes "
                f"{row.bound_s:.3f} s at least: they were not all computed"
            )
    lines = [
        "| | positions/s | logical tokens/s | target tokens/s | s | GB read | GB/s | share of the bound | peak GiB | "
        "budget GiB | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        each = (row.positions, row.logical, row.targets)
        rates = " | ".join(f"{tokens / row.seconds:,.1f}" for tokens in each)
        lines.append(
            f"| {row.name} | {rates} | {row.seconds:.2f} | {row.nbytes / 1e9:.2f} | "
            f"{row.nbytes / row.seconds / 1e9:.2f} | {row.overlap:.0%} | {row.peak_bytes / (1 << 30):.2f} | "
            f"{row.budget_gib:g} | {'warm' if row.warm else 'cold'} |"
        )
    return "\n".join(lines)
