"""Where the time of a streamed update goes: copies, dequantising, products, the rest, and launching it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from prefix_train import blame, gradients
from prefix_train.bench_measure import seconds
from prefix_train.stream.engine import Streamed

KINDS = {
    "copies": ("Memcpy HtoD", "Memcpy DtoH"),
    "dequantising": ("nf4_dequantise",),
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "chunk_", "causal_conv"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
}
"""Parts of kernels' names, the first kind that fits counts; what fits none is `other`."""

CALLS = (
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "Synchronize",
    "cuMemMap",
    "cuMemCreate",
    "cuMemUnmap",
    "cuMemSetAcc",
)
"""Parts of names of calls for which the host stands still."""

COUNTS = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_sync_all_streams", "segment.all.current")
"""What torch's allocator counts and a steady state leaves as it is."""

MOST = 25
"""Kernels and calls that are listed by name."""


def measure(root: Streamed, run: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Parts of one update, in seconds. computing_s: of an update for which nothing is copied. On CUDA also what a
    profile of one more says (see `of_profile`).

    Where an update without copies is not near shorter, copies are hidden; where it takes longer than its kernels
    (`kernels_s`), the host cannot launch them as fast as the device computes them.
    """

    def once() -> None:
        with suppress(blame.NotFinite, gradients.NothingLearned):  # of blocks that are not where they should be
            run()

    with standing_still(root):
        found: dict[str, Any] = {"computing_s": min(seconds(once, device) for _ in range(2))}
    once()  # slots hold their own blocks again
    if device.type != "cuda":
        return found
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    return found | of_profile(profile.key_averages())


def of_profile(events: Any) -> dict[str, Any]:
    """kernels_s: of the device, copies apart, and by kind; launches: how many kernels. calls: of CALLS."""
    spent = dict.fromkeys([*KINDS, "other"], 0.0)
    launches, kernels, calls = 0, list[dict[str, Any]](), list[dict[str, Any]]()
    for event in events:
        name, count = event.key, event.count
        if event.self_device_time_total > 0:
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
            spent[kind] += event.self_device_time_total / 1e6
            launches += 0 if kind == "copies" else count
            kernels.append({"kernel": name[:120], "calls": count, "s": event.self_device_time_total / 1e6})
        elif any(part in name for part in CALLS):
            calls.append({"call": name, "calls": count, "s": event.self_cpu_time_total / 1e6})
    kernels.sort(key=lambda one: -one["s"])
    calls.sort(key=lambda one: -one["s"])
    return {
        "kernels_s": sum(seconds for kind, seconds in spent.items() if kind != "copies"),
        "kinds_s": spent,
        "launches": launches,
        "kernels": kernels[:MOST],
        "calls": calls[:MOST],
    }


@contextmanager
def standing_still(root: Streamed) -> Iterator[None]:
    """Nothing is copied to the device: blocks are computed with what is in their slots already, whatever it is.

    What comes of such an update means nothing.
    """
    bring = root.source.bring
    root.source.bring = lambda *_: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        root.source.bring = bring  # type: ignore[method-assign]


def allocator(device: torch.device) -> dict[str, int]:
    """COUNTS of torch's allocator so far; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: int(stats.get(name, 0)) for name in COUNTS}


def changed(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted between two readings."""
    return {name: after[name] - before[name] for name in after}
