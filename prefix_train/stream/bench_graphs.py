"""A row whose launches are recorded: its own gate, at its own size. Without it no figure of that row stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from prefix_train.stream.bench_gate import difference
from prefix_train.stream.engine import Streamed

TIMES = 2
"""How many times what ordinary updates differ by is allowed; as in the gate, for there are few of them."""


def compare(root: Streamed, run: Callable[[], None], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Gradients of an update by recorded launches and of three ordinary ones. run: an update that changes nothing,
    whose layouts have passed before.

    recordings: how many there are. gradient: the worst tensor's relative difference to an ordinary update. noise: what
    ordinary ones differ by. passed: the first is no more than TIMES the second.
    """
    graphs = root.graphs
    assert graphs is not None
    run()  # what has not been recorded is recorded
    mine = _after(run, parameters)
    root.graphs = None
    try:
        ordinary, *others = (_after(run, parameters) for _ in range(3))
    finally:
        root.graphs = graphs
    found, noise = difference(ordinary, mine), max(difference(ordinary, other) for other in others)
    return {"recordings": graphs.count, "gradient": found, "noise": noise, "passed": found <= TIMES * noise}


def _after(run: Callable[[], None], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Gradients that an update leaves, on the host: the device's memory is planned."""
    run()
    return {name: parameter.grad.cpu().clone() for name, parameter in parameters.items() if parameter.grad is not None}
