"""Adding up in a fixed order on CUDA, where equality is asked for to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs.schema import ModelConfig

KERNELS = ModelConfig(attention="dense", deltanet="reference", elementwise="torch", heads="torch")
"""Plain torch, which adds up in a fixed order where it is told to."""

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Before cuBLAS is first used: its deterministic workspace."""


@contextmanager
def in_a_fixed_order() -> Iterator[None]:
    """Warnings only: a running sum over whole rows has one order, but torch does not vouch for it."""
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
