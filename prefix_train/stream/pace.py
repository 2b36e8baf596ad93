"""The least time in which an update could be made: what it reads over the ring's own rate, its products over theirs.

Both rates are measured once, before the first update, so that each update's line can say what share of that it reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_train.stream.ring import Ring
from prefix_train.stream.store import Store

BLOCKS = 6
"""Blocks that are read for it, after those that fill the slots."""

ROWS = 2048
"""Rows of the products, at most; a CPU's are told by few."""

OPERATIONS = 2e12, 2e9
"""Of one timing, about, on CUDA and on a CPU."""


@dataclass(frozen=True)
class Pace:
    """bytes_per_s: of blocks brought to the device while nothing is computed; 0 where all of them stay. flops_per_s: of
    products with the largest matrix of a block. flops: of an update's products per position."""

    bytes_per_s: float
    flops_per_s: float
    flops: int

    def least_s(self, nbytes: int, positions: int) -> float:
        """Of an update that reads so much and computes so many positions, attention not counted."""
        reading = nbytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return max(reading, positions * self.flops / self.flops_per_s)


def measure(ring: Ring, store: Store, lowest: int, positions: int, memory: Tensor) -> Pace:
    """lowest: block down to which backward goes. positions: of the largest pack. memory: on the device, for a weight of
    any values."""
    matrices = [sum(stored.elements for stored in block.tensors if len(stored.shape) == 2) for block in store.layers]
    rates = reading(ring), products(store, positions, memory)
    return Pace(*rates, 2 * sum(matrices) + 4 * sum(matrices[lowest:]))


def reading(ring: Ring) -> float:
    """Bytes per second of BLOCKS blocks; 0.0 where no more pass through than there are slots for."""
    order = ring.passing[: BLOCKS + len(ring.slots)]
    first, then = order[: len(ring.slots)], order[len(ring.slots) :]

    def visit(places: list[int]) -> None:
        for place in places:
            with ring.visit(place):
                pass

    ring.begin(order)
    visit(first)
    spent = _timed(lambda: visit(then), ring.device)
    return sum(ring.units[place].nbytes for place in then) / spent


def products(store: Store, positions: int, memory: Tensor) -> float:
    """FLOP/s of products with a matrix as large as the largest of a block that fits `memory`, the best of three."""
    shapes = {stored.shape for block in store.layers for stored in block.tensors if len(stored.shape) == 2}
    dtype, device = store.manifest.dtype, memory.device
    space = memory.view(-1).view(torch.uint8)
    space = space[: space.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    rows, columns = max(
        (shape for shape in shapes if shape[0] * shape[1] <= space.numel()), key=lambda shape: shape[0] * shape[1]
    )
    weight = space[: rows * columns].view(rows, columns)
    count = min(positions, ROWS if device.type == "cuda" else 64)
    draw = torch.Generator(device).manual_seed(1)  # of its own: a run's other draws do not shift
    source = torch.randn(count, columns, dtype=dtype, device=device, generator=draw)
    out = torch.empty(count, rows, dtype=dtype, device=device)
    one = 2 * count * rows * columns
    again = max(1, min(20, int(OPERATIONS[device.type != "cuda"] // one)))

    def multiply() -> None:
        for _ in range(again):
            torch.mm(source, weight.t(), out=out)

    multiply()
    return again * one / min(_timed(multiply, device) for _ in range(3))


def _timed(run: Callable[[], None], device: torch.device) -> float:
    before = _now(device)
    run()
    return _now(device) - before


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
