"""Kernels compiled side by side: which are launched meanwhile (none), and what a search finds already compiled.

Triton's runtime is stood in for; the real one compiles only where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from prefix_train import compiling


class JITFunction:
    """Launches, or with `warmup` compiles, under the names of what it is given."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        (self.compiled if warmup else self.launched).append(kwargs)


class Candidate:
    def __init__(self, warps: int) -> None:
        self.warps = warps

    def all_kwargs(self) -> dict[str, Any]:
        return {"num_warps": self.warps}


class Autotuner:
    """Searches among its candidates at each run."""

    def __init__(self, *candidates: Candidate) -> None:
        self.fn, self.candidates = JITFunction(), list(candidates)
        self.nargs: dict[str, Any] = {"x": 1}
        self.base_fn = run_it

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Candidate]:
        return self.candidates

    def run(self, **kwargs: Any) -> None:
        for candidate in self.prune_configs(kwargs):
            self.fn.run(**kwargs, **self.nargs, **candidate.all_kwargs())


def run_it() -> None:
    """What the autotuner names."""


@contextmanager
def async_mode(pool: Any, ignore_errors: bool = False) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "triton": {"AsyncCompileMode": async_mode},
        "triton.runtime": {},
        "triton.runtime.autotuner": {"Autotuner": Autotuner},
        "triton.runtime.jit": {"JITFunction": JITFunction},
    }
    for name, held in modules.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)


def test_what_would_be_launched_is_compiled_only() -> None:
    kernel, run = JITFunction(), JITFunction.run
    with compiling.without_launching():
        kernel.run(grid=(1,), warmup=False, n=3)
    assert (kernel.compiled, kernel.launched) == ([{"n": 3}], [])
    assert JITFunction.run is run
    kernel.run(grid=(1,), warmup=False, n=4)
    assert kernel.launched == [{"n": 4}]


def test_what_is_not_pinned_is_not_compiled_ahead() -> None:
    searching, prune = Autotuner(Candidate(4), Candidate(8)), Autotuner.prune_configs
    with pytest.raises(compiling.WouldSearch, match="run_it is not pinned"), compiling.without_launching():
        searching.run(grid=(1,), warmup=False)
    assert Autotuner.prune_configs is prune
    assert searching.fn.compiled == []


def test_a_search_compiles_its_candidates_before_it_launches_them() -> None:
    searching = Autotuner(Candidate(4), Candidate(8))
    with compiling.candidates_side_by_side():
        searching.run(grid=(1,), warmup=False)
    assert searching.fn.compiled == searching.fn.launched == [{"x": 1, "num_warps": 4}, {"x": 1, "num_warps": 8}]


def test_ranks_of_a_node_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert compiling.workers() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compiling.workers() == 8
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert compiling.workers() == 1
