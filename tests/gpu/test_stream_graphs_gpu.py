"""Launches of blocks as CUDA graphs: ordinary gradients, no memory that grows, nothing that waits, one call a visit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before cuBLAS is first used: its deterministic workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor

from configs import compose
from configs.schema import Config
from prefix_train.bench_pack import geometry_file
from prefix_train.step import Stepper
from prefix_train.stream import bench, bench_gate, build, graphs, random_store, ring
from prefix_train.stream.bench import Case
from prefix_train.stream.engine import Streamed
from prefix_train.stream.places import Choice
from tests.small_geometry import geometry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
]

CUDA = torch.device("cuda", 0)
PAUSE = 20_000_000
"""Cycles, about ten milliseconds: longer than a small block computes."""

HYBRID = """
    model_type: qwen3_5_text
    linear_num_key_heads: 4
    linear_num_value_heads: 8
    linear_key_head_dim: 128
    linear_value_head_dim: 128"""


@pytest.fixture
def in_a_fixed_order() -> Iterator[None]:
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(was, warn_only=warned)


@dataclass
class Made:
    """A trainer that streams a small model."""

    config: Config
    trainer: Stepper

    @property
    def root(self) -> Streamed:
        assert isinstance(self.trainer.root, Streamed)
        return self.trainer.root

    @property
    def graphs(self) -> graphs.Graphs:
        assert self.root.graphs is not None
        return self.root.graphs

    def gradients(self, updates: int) -> list[dict[str, Tensor]]:
        """What each of so many equal updates leaves."""
        packs = bench_gate._packs(self.config)
        return [bench_gate.gradient_of(self.trainer, packs) for _ in range(updates)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Made]]:
    """Makes a trainer; how: `stream.graphs`."""
    monkeypatch.setattr(bench_gate, "SMALL", {"vocab_size": 8192})
    roots: list[Streamed] = []

    def one(how: str, hybrid: bool = False, **sizes: Any) -> Made:
        name = geometry(tmp_path, **sizes)
        if hybrid:
            Path(name).write_text(Path(name).read_text().replace("\n    model_type: qwen3", HYBRID))
        config = Case(name, str(tmp_path / "store")).config((f"stream.graphs={how}",))
        small, base, store = bench_gate._small(config, tmp_path / f"store-{how}")
        found = Made(small, bench_gate._streamed(base, store, small, CUDA))
        roots.append(found.root)
        return found

    yield one
    for root in roots:
        root.source.close()


@contextmanager
def strictly() -> Iterator[None]:
    """Waiting for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def late_copies(patch: pytest.MonkeyPatch) -> None:
    """Each piece comes late."""
    move = ring._Lane.move

    def late(self: Any, *given: Any) -> Any:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(PAUSE)  # type: ignore[no-untyped-call]
        return move(self, *given)

    patch.setattr(ring._Lane, "move", late)


def late_computing(patch: pytest.MonkeyPatch) -> None:
    """Launches are repeated some time after copies could be made."""
    repeat = graphs.Case.repeat

    def late(self: graphs.Case, *given: Any) -> None:
        torch.cuda._sleep(PAUSE)  # type: ignore[no-untyped-call]
        repeat(self, *given)

    patch.setattr(graphs.Case, "repeat", late)


@pytest.mark.parametrize("late", [None, late_copies, late_computing], ids=["in time", "copies", "computing"])
def test_gradients_are_the_ordinary_ones_to_the_bit(
    late: Callable[[pytest.MonkeyPatch], None] | None,
    in_a_fixed_order: None,
    make: Callable[..., Made],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain torch's kernels, which add up in a fixed order: passes are ordinary, recorded, and repeated twice."""
    ordinary, recorded = (make(how, attention="dense", elementwise="torch") for how in ("off", "on"))
    (right,) = ordinary.gradients(1)
    if late is not None:
        late(monkeypatch)
    for number, found in enumerate(recorded.gradients(4)):
        unlike = [name for name, tensor in right.items() if not torch.equal(tensor, found[name])]
        assert unlike == [], f"update {number}"
    assert recorded.graphs.count > 0


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_with_the_kernels_of_a_run(hybrid: bool, make: Callable[..., Made]) -> None:
    """cuDNN's attention, Liger's and flash-linear-attention's kernels: within what ordinary updates differ by."""
    if hybrid:
        pytest.importorskip("fla")
    ordinary, recorded = (make(how, hybrid, head=128, width=1024) for how in ("off", "on"))
    first, *others = ordinary.gradients(4)
    noise = max(bench_gate.difference(first, other) for other in others)
    worst = max(bench_gate.difference(first, found) for found in recorded.gradients(4))
    assert worst <= 2 * noise, (worst, noise)


def test_nothing_grows_and_nothing_waits(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = make("on", head=128, width=1024)
    recorded.gradients(3)
    before = recorded.graphs.count, torch.cuda.memory_reserved(CUDA), torch.cuda.memory_allocated(CUDA)
    repeat = graphs.Case.repeat

    def strict(self: graphs.Case, *given: Any) -> None:
        with strictly():
            repeat(self, *given)

    monkeypatch.setattr(graphs.Case, "repeat", strict)
    recorded.gradients(4)
    after = recorded.graphs.count, torch.cuda.memory_reserved(CUDA), torch.cuda.memory_allocated(CUDA)
    assert before == after


def test_one_launch_for_each_pack_and_visit(make: Callable[..., Made]) -> None:
    recorded = make("on", head=128, width=1024)
    recorded.gradients(3)
    figures = recorded.root.ring.figures
    visits = figures.visits
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        recorded.gradients(1)
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in profile.key_averages()}
    print({name: count for name, count in calls.items() if name.startswith("cuda")})
    assert calls["cudaGraphLaunch"] == (figures.visits - visits) * (1 + bench_gate.ALONE)


@pytest.mark.parametrize("host", ["files", "pinned"])
def test_no_more_memory_than_planned(host: str, tmp_path: Path) -> None:
    """A model of 8 blocks, of which 2 stay: the plan, the allocator, the driver, and the row's own gate."""
    name = geometry(tmp_path, layers=8, width=2048, inner=8192, head=128)
    store, choice = tmp_path / "store", Choice("nf4", torch.bfloat16)
    build.build(random_store.generate(compose.load(geometry_file(name)).model, choice, 0), store, choice)
    overrides = (
        *(f"stream.host={host}", "stream.readers=4", "stream.slots=2", "stream.resident_blocks=2"),
        *("stream.graphs=on", "stream.graph_layouts=1"),
    )
    case = Case(name, str(store), budget_gib=2.4, warm=2, overrides=overrides)
    *_, found = bench._process(["4096"], case, float("inf"))  # of its own: what this one holds is not the row's
    assert "failed" not in found, found["failed"]
    print({name: found[name] for name in ("memory", "plan", "graphs", "median_s", "bound", "ratio", "parts")})
    assert found["graphs"]["passed"]
    assert found["memory"]["driver_gib"] <= found["plan"]["budget_gib"]
