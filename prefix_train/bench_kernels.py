"""Which kernels one run launched, how long each took, and when the device had nothing to compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

BESIDE = ("Memcpy HtoD", "Memcpy DtoH")
"""Copies that run beside computing."""


class Span(NamedTuple):
    """A kernel's time on the device, in microseconds."""

    name: str
    start: float
    end: float


def launched(run: Callable[[], None], device: torch.device, most: int = 60) -> dict[str, Any]:
    """Of one run: the kernels that take the most time of the device; launched_s, the time of all of them, copies to and
    from the host excepted; and what `idle` says."""
    if device.type != "cuda":
        return {"launched": []}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.end - span.start)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {
        "launched_s": sum(sum(spent) for name, spent in ordered if not name.startswith(BESIDE)) / 1e6,
        "launched": [
            {"kernel": name[:200], "calls": len(spent), "s": sum(spent) / 1e6} for name, spent in ordered[:most]
        ],
        **idle(spans),
    }


def idle(spans: Iterable[Span], least: float = 5.0, most: int = 20) -> dict[str, Any]:
    """When nothing was computed between the first kernel and the last.

    computing_s: at least one kernel ran. idle_s: none did. idle: whose beginning ended gaps of `least` microseconds or
    more, those that sum to the most first.
    """
    computing = sorted((span for span in spans if not span.name.startswith(BESIDE)), key=lambda span: span.start)
    if not computing:
        return {"computing_s": 0.0, "idle_s": 0.0, "idle": []}
    gaps: dict[str, list[float]] = defaultdict(list)
    first, until, nothing = computing[0].start, computing[0].start, 0.0
    for span in computing:
        gap = span.start - until
        nothing += max(0.0, gap)
        if gap >= least:
            gaps[span.name].append(gap)
        until = max(until, span.end)
    ordered = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:most]
    return {
        "computing_s": (until - first - nothing) / 1e6,
        "idle_s": nothing / 1e6,
        "idle": [{"before": name[:200], "gaps": len(found), "s": sum(found) / 1e6} for name, found in ordered],
    }
