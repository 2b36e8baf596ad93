"""What bounds a streamed update: its bytes through the same ring without computing, and its matrix products alone."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from prefix_train.bench_measure import seconds
from prefix_train.stream.engine import Streamed
from prefix_train.stream.schedule import walk
from prefix_train.stream.store import Store

PASSES = 2
"""Sequential copies of the blocks, after one that fills the slots; the faster is the bandwidth."""

LINK_BYTES = 256 << 20
"""Of one copy that shows what the link can do."""


def link(device: torch.device) -> float | None:
    """GB/s of one large copy from pinned memory, the best of five; none on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    return max(LINK_BYTES / seconds(lambda: _copy(target, source), device) for _ in range(5)) / 1e9


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def copies(root: Streamed, device: torch.device) -> list[float]:
    """GB/s of passes through the same ring, up and down as an update goes, in which nothing is computed."""
    blocks, ring, found = len(root.anatomy.layers), root.ring, []
    order = walk(blocks, root.lowest)

    def once() -> None:
        ring.begin(order, walk(blocks, None))
        for index in order:
            with ring.visit(index):
                pass

    once()
    for _ in range(PASSES):
        before = ring.figures.nbytes
        spent = seconds(once, device)
        found.append((ring.figures.nbytes - before) / spent / 1e9)
    return found


def matrices(store: Store, positions: int, device: torch.device) -> float:
    """FLOP/s of the matrix products of all blocks, by themselves, with so many rows: each matrix twice forward and once
    for the input's gradient, as an update takes them. Each shape is measured once, the best of three."""
    shapes = Counter(stored.shape for block in store.layers for stored in block.tensors if len(stored.shape) == 2)
    dtype, flops, spent = store.manifest.dtype, 0, 0.0
    for (rows, columns), count in shapes.items():
        weight = torch.randn(rows, columns, dtype=dtype, device=device)
        source = torch.randn(positions, columns, dtype=dtype, device=device)
        grad = torch.randn(positions, rows, dtype=dtype, device=device)
        one = 6 * positions * rows * columns
        again = max(1, min(20, int(2e12 // one))) if device.type == "cuda" else 1

        def products(weight: Tensor = weight, source: Tensor = source, grad: Tensor = grad, again: int = again) -> None:
            for _ in range(again):
                torch.mm(source, weight.t())
                torch.mm(source, weight.t())
                torch.mm(grad, weight)

        products()
        spent += count * min(seconds(products, device) for _ in range(3)) / again
        flops += count * one
    return flops / spent
