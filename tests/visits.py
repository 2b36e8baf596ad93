"""What the visits of blocks cost the host, counted: operations of torch, and calls of Python functions, by part."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import AdapterConfig, Config, MemoryConfig, ModelConfig, PackConfig, StreamConfig, TrainConfig
from prefix_train import precision, step, unit
from prefix_train.stream import build, engine, frozen, graphs, nf4, ring, sources, walk
from prefix_train.stream.engine import Streamed
from prefix_train.stream.places import Choice
from prefix_train.stream.store import Store
from tests import streaming
from tests.streaming import text_batch

REST = "outside of visits"
PARTS: dict[str, list[tuple[Any, str]]] = {
    "schedule, reading, copying": [(ring.Ring, "_load"), (ring.Ring, "_settle"), (ring.Ring, "_now")],
    "slots, events": [(Streamed, "visit")],
    "dequantising": [(nf4, "dequantise")],
    "forward": [(walk.Walk, "_rise")],
    "recorded launches": [(graphs.Play, "up"), (graphs.Play, "down")],
    "binding parameters": [(frozen.Frozen, "within")],
    "copies of adapters": [(precision.Copies, "__enter__"), (precision.Copies, "__exit__")],
    "down, around it": [(walk.Walk, "_fall")],
    "recomputation": [(unit, "again")],
    "backward": [(torch.autograd, "backward")],
}
"""What belongs to a part, the innermost one counts; a context manager counts where it is entered and left."""

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}
HYBRID: dict[str, Any] = {
    **{name: size for name, size in MODEL.items() if name != "model_type"},
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"] * 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Its blocks' mixers are Gated DeltaNet."""

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_HYBRID = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *TARGETS[4:]]


@dataclass
class Counts:
    """By part. operations: of torch, views and allocations among them; views: those that only look at memory
    otherwise; calls: of functions, Python's and built-in ones, by the thread that computes."""

    operations: Counter[str] = field(default_factory=Counter)
    views: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def total(self, what: str) -> int:
        """Within visits."""
        counted: Counter[str] = getattr(self, what)
        return counted.total() - counted[REST]


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts, now: list[str]) -> None:
        super().__init__()
        self._counts, self._now = counts, now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(type(one) is frozen.Packed for one in args):
            with self:
                return frozen.Packed.__torch_dispatch__(func, types, args, kwargs)
        self._counts.operations[self._now[-1]] += 1
        self._counts.views[self._now[-1]] += func.is_view
        return func(*args, **(kwargs or {}))


class _Marked:
    """A context manager within a part where it is entered and left."""

    def __init__(self, inner: Any, part: str, now: list[str]) -> None:
        self._inner, self._part, self._now = inner, part, now

    def __enter__(self) -> Any:
        with _within(self._part, self._now):
            return self._inner.__enter__()

    def __exit__(self, *given: Any) -> Any:
        with _within(self._part, self._now):
            return self._inner.__exit__(*given)


@contextmanager
def _within(part: str, now: list[str]) -> Iterator[None]:
    now.append(part)
    try:
        yield
    finally:
        now.pop()


def _marking(inner: Callable[..., Any], part: str, now: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _within(part, now):
            found = inner(*args, **kwargs)
        return _Marked(found, part, now) if isinstance(found, AbstractContextManager) else found

    return call


@contextmanager
def _parts(now: list[str]) -> Iterator[None]:
    patches = [
        mock.patch.object(owner, name, _marking(getattr(owner, name), part, now))
        for part, places in PARTS.items()
        for owner, name in places
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def count(run: Callable[[], None]) -> Counts:
    """`run`, an update, twice: once for operations, once for calls. Its visits are those of `walk.Walk`."""
    counts, now = Counts(), [REST]
    with _parts(now):
        with _Operations(counts, now):
            run()

        def called(frame: Any, event: str, _: Any) -> None:
            if event in ("call", "c_call") and frame.f_code.co_filename != __file__:
                counts.calls[now[-1]] += 1

        sys.setprofile(called)
        try:
            run()
        finally:
            sys.setprofile(None)
    return counts


class Nothing:
    """Records launches, and repeats none: what is left is what the host does around one call."""

    def make_room(self) -> None:
        """See `graphs.Recorder`."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `graphs.Recorder`."""
        run()
        return lambda: None


def small(
    folder: Path,
    recorder: graphs.Recorder | None = None,
    build_of: dict[str, Any] = MODEL,
    targets: Sequence[str] = TARGETS,
    positions: int = 48,
    kernels: dict[str, Any] | None = None,
    **stream: Any,
) -> tuple[Callable[[], None], Streamed]:
    """An update of 48 positions through 16 blocks with hidden size 64, from an NF4 store; and the root.

    kernels: more of `model`'s options.
    """
    config = Config(
        engine="stream",
        model=ModelConfig(build=build_of, dtype="bfloat16", **(kernels or {})),
        pack=PackConfig(max_positions=positions),
        adapter=AdapterConfig(rank=4, targets=list(targets)),
        train=TrainConfig(loss_chunk_words=512, loss_chunk_rows=256),
        memory=MemoryConfig(tile_rows=2048),
        stream=StreamConfig(store=str(folder), **{"slots": 3, **stream}),
    )
    build.build(sources.open_source(config.model), folder, Choice("nf4", torch.bfloat16))
    store = Store.open(folder)
    made, _ = engine.load(config.model, store)
    prepared, device = engine.prepare(made, config), torch.device("cpu")
    root = Streamed(prepared, config, store, device, images=False, resident=0, recorder=recorder)
    trainer = streaming._stepper(root, config, 1e-3)
    batch = text_batch([positions], [-1], 16, build_of["vocab_size"])

    def run() -> None:
        step.update(trainer, 1, 1e-3, [batch])

    return run, root


def table(counts: Counts, visits: int) -> str:
    """Per visit."""
    lines = [f"{'part':28} operations   views   calls"]
    for part in (*PARTS, REST):
        found = (counts.operations[part], counts.views[part], counts.calls[part])
        lines.append(f"{part:28} " + " ".join(f"{number / visits:9.1f}" for number in found))
    totals = (counts.total("operations"), counts.total("views"), counts.total("calls"))
    return "\n".join([*lines, f"{'visits':28} " + " ".join(f"{number / visits:9.1f}" for number in totals)])
