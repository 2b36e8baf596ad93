"""Triton kernels compiled side by side: left alone Triton compiles one after the other, each at its first launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

MOST = 16
"""Compiles at a time. Most of a compile runs outside Python's lock."""


class WouldSearch(RuntimeError):
    """A kernel that is not pinned was reached where none may be launched."""


@contextmanager
def without_launching() -> Iterator[None]:
    """Within this context Triton compiles what would be launched and launches nothing; at its end all is compiled.

    What the kernels would have written stays as it was allocated, so only finite work may follow from it. Backward
    runs on the calling thread: what is compiled at the same time is told by thread. Raises WouldSearch where a kernel
    is not pinned: its candidates would all take no time.
    """
    from triton import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run, prune = JITFunction.run, Autotuner.prune_configs

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def refuse(self: Any, kwargs: Any) -> Any:
        raise WouldSearch(f"{self.base_fn.__name__} is not pinned: it cannot be compiled before it is launched")

    JITFunction.run, Autotuner.prune_configs = compile_only, refuse
    try:
        with ThreadPoolExecutor(workers()) as pool, AsyncCompileMode(pool):  # noqa: SIM117
            with torch.autograd.set_multithreading_enabled(False):
                yield
    finally:
        JITFunction.run, Autotuner.prune_configs = run, prune


@contextmanager
def candidates_side_by_side() -> Iterator[None]:
    """Within this context a search compiles its candidates side by side before it times them one after the other."""
    from triton import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def compile_all(self: Any, kwargs: Any) -> Any:
        candidates = prune(self, kwargs)
        given = {**self.nargs, **kwargs, "warmup": True}
        # A candidate that does not compile is told apart by the search itself.
        with ThreadPoolExecutor(workers()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for candidate in candidates:
                self.fn.run(**given, **candidate.all_kwargs())
        return candidates

    Autotuner.prune_configs = compile_all
    try:
        yield
    finally:
        Autotuner.prune_configs = prune


def workers() -> int:
    """Threads that compile: this rank's share of the node's processors, MOST at the most."""
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
