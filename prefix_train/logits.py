"""Cross-entropies of a chunk's logits and their gradient, in two passes over memory.

In plain torch a chunk's logits go through memory in float32 about ten times. A kernel reads them as the head's product
wrote them, for each row's normaliser, and once more for the gradient, which it leaves where they were: each entry is
computed in float32 and rounded once, as before.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def available(logits: Tensor) -> bool:
    """Do the kernels take these [rows, V]?"""
    on_gpu = logits.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return on_gpu and fits(logits)


def fits(logits: Tensor) -> bool:
    """As `available`, wherever they are."""
    return logits.dtype in DTYPES and logits.stride(1) == 1


def normalisers(logits: Tensor) -> Tensor:
    """Log-sum-exp of each row, [rows] in float32."""
    found: Tensor = _kernels().normalisers(logits)
    return found


def to_gradient(
    logits: Tensor, normaliser: Tensor, per_row: Tensor, starts: Tensor, words: Tensor, weights: Tensor
) -> None:
    """Turn [rows, V] into the gradient of the weighted sum of cross-entropies: probability x per_row, less each
    target's own weight at its word.

    normaliser, per_row: [rows], float32. starts: [rows + 1], where each row's targets begin in `words` and `weights`.
    """
    _kernels().to_gradient(logits, normaliser, per_row, starts, words, weights)


def _kernels() -> Any:
    return importlib.import_module("prefix_train.logits_triton")
