"""Sums over runs of rows: what a gather's backward needs, in a fixed order and never in less than float32."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_runs(rows: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each run of consecutive rows, added one row after the other.

    rows: [n, ...], summed in float32, or float64 where they are float64. lengths: [m] int64, adding up to n; a run of
    length 0 sums to 0. Returns [m, ...] in the dtype of the sum.
    """
    wide = rows.flatten(1).to(torch.promote_types(rows.dtype, torch.float32))
    sums = torch.segment_reduce(wide, "sum", lengths=lengths, unsafe=True, initial=0)
    return sums.view(lengths.numel(), *rows.shape[1:])
