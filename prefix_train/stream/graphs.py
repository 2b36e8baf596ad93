"""A block's launches, recorded once and then repeated by one call: its way up, and its way down.

Blocks that are alike launch the same kernels over the same layout, and in the same slot at the same addresses; what is
a block's or a pack's own is copied to memory that stays where it is (`fixed`). What comes a first time is computed
ordinarily, which makes its kernels ready (compiled, tuned, planned); when it comes a second time it is recorded, and
from then on repeated. So a layout's first pass records what its slots launch, and its second what residents do. The
same kernels on the same bits: nothing changes but the host's work.

A recording belongs to a kind of block, a slot, a layout and a direction. Recordings share one pool of memory, for they
are repeated one after the other and leave nothing in it. Rules for what is recorded (torch's notes on CUDA graphs): it
does not wait for the device, has no graph of autograd that began outside, and copies its results out of the pool.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from configs.errors import UserError
from configs.schema import Config
from prefix_train import unit
from prefix_train.layout import Layout
from prefix_train.patch import Handle
from prefix_train.stream.fixed import Adapters, Call, Kind, Masks, States, structure
from prefix_train.stream.frozen import Frozen
from prefix_train.stream.manifest import BlockFile

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Recorder(Protocol):
    """Takes down what a function launches."""

    def make_room(self) -> None:
        """More memory than before may be wanted while something is recorded."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats the launches of `run`, which need not have happened when this returns."""


class CudaRecorder:
    """By CUDA graphs, in a pool of memory of their own.

    Other threads go on copying meanwhile: only what this thread does is held to the rules of recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with warnings.catch_warnings(record=True):  # that it is empty
            self._anchor = self._record(lambda: None)  # torch gives up a pool that no recording has

    def make_room(self) -> None:
        """See Recorder. Waits for the device: while it records, torch's allocator takes back nothing of what it has."""
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See Recorder."""
        return self._record(run).replay

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), nothing_remembered():
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """FLA keeps the tables of the last few packs, and lets them go: a recording makes its own, in its own memory."""
    utils: Any = sys.modules.get("fla.utils")
    if utils is None:
        yield
        return
    before = utils.FLA_DISABLE_TENSOR_CACHE
    utils.FLA_DISABLE_TENSOR_CACHE = True
    try:
        yield
    finally:
        utils.FLA_DISABLE_TENSOR_CACHE = before


Key = tuple[Kind, int, bool | None]
"""A kind of block, the address of its bytes, and the way: up (none), down, and whether to the input's gradient too."""


@dataclass(frozen=True)
class Block:
    """A decoder layer, and what it shares with its like."""

    index: int
    layer: nn.Module
    frozen: Frozen
    adapters: Adapters
    masks: Masks
    kind: Kind


class Case:
    """One layout's recordings. calls: what each kind of block is given besides hidden states."""

    def __init__(self, layout: Layout, calls: dict[Kind, Call], states: States, handle: Handle) -> None:
        self.layout, self.calls, self._handle = layout, calls, handle
        self.hidden, self.out, self.grad = states.of(layout.total)
        self._come: set[Key] = set()
        self._recorded: dict[Key, Callable[[], None]] = {}

    @property
    def count(self) -> int:
        """Recordings so far."""
        return len(self._recorded)

    def comes(self, key: Key) -> bool:
        """It comes: has it come before?"""
        before = key in self._come
        self._come.add(key)
        return before

    def repeat(self, key: Key, run: Callable[[], None], graphs: Graphs) -> None:
        """What `run` does, recorded by `graphs` where that has not been done."""
        if key not in self._recorded:
            kind, _, way = key
            if not any(kind is other and way is its for other, _, its in self._recorded):
                graphs.recorder.make_room()
            self._recorded[key] = graphs.record(run)
        self._recorded[key]()

    def rise(self, block: Block, memory: Tensor) -> None:
        """`hidden` through a block to `out`."""
        call = self.calls[block.kind]
        with self._its_own(block, memory, block.kind.weights.parts), torch.no_grad():
            self.out.copy_(unit.bare(block.layer, self.hidden, *call.args, **call.kwargs))
        self._handle.check_reached(self.layout, block.index)

    def fall(self, block: Block, memory: Tensor, wanted: bool) -> None:
        """A block once more, and from `grad` to its adapters' gradients; if `wanted`, to that of `hidden` in `out`."""
        call = self.calls[block.kind]
        source = self.hidden.detach().requires_grad_(wanted)
        weights = [part.detach().requires_grad_() for part in block.kind.weights.parts]
        with self._its_own(block, memory, weights):
            with torch.enable_grad():
                out = unit.bare(block.layer, source, *call.args, recomputing=True, **call.kwargs)
            found = torch.autograd.grad(out, [*weights, source] if wanted else weights, self.grad)
        if weights:
            torch._foreach_copy_(block.kind.grads.parts, list(found[: len(weights)]))
        if wanted:
            self.out.copy_(found[-1])

    @contextmanager
    def _its_own(self, block: Block, memory: Tensor, weights: Sequence[Tensor]) -> Iterator[None]:
        """The block reads what lies in `memory`, `weights` for its adapters', and seeds of masks where they stay."""
        with (
            block.frozen.within(memory),
            block.adapters.reading(weights),
            block.masks.finding(block.kind.each_seed),
        ):
            yield


class Play:
    """One pack's pass. leaves: what blocks of each kind are given, its parts in a row. seeds: of each block's masks."""

    def __init__(self, graphs: Graphs, case: Case, leaves: dict[Kind, list[Any]], seeds: Sequence[Tensor]) -> None:
        self._graphs, self._case, self._leaves, self._seeds = graphs, case, leaves, seeds

    def ready(self, index: int, memory: Tensor, wanted: bool | None = None) -> bool:
        """Is it not the first time that block `index` or its like goes this way in this memory? Asked once a visit.

        wanted: none on the way up; on the way down, whether the gradient of the block's input is.
        """
        return self._case.comes((self._graphs.blocks[index].kind, memory.data_ptr(), wanted))

    def up(self, index: int, memory: Tensor, hidden: Tensor) -> Tensor:
        """Hidden states, [1, T, D], through block `index`, whose bytes are in `memory`."""
        case, block = self._case, self._begin(index, hidden)
        case.repeat((block.kind, memory.data_ptr(), None), partial(case.rise, block, memory), self._graphs)
        return case.out.clone()

    def down(self, index: int, memory: Tensor, hidden: Tensor, grad: Tensor, wanted: bool) -> Tensor | None:
        """The gradient of the block's input `hidden` where it is `wanted`; those of its adapters are added to them."""
        case, block = self._case, self._begin(index, hidden)
        case.grad.copy_(grad)
        run = partial(case.fall, block, memory, wanted)
        case.repeat((block.kind, memory.data_ptr(), wanted), run, self._graphs)
        block.adapters.add(block.kind.grads)
        return case.out.clone() if wanted else None

    def _begin(self, index: int, hidden: Tensor) -> Block:
        """Everything is where the launches will read it."""
        block = self._graphs.blocks[index]
        self._case.calls[block.kind].fill(self._leaves[block.kind])
        self._case.hidden.copy_(hidden)
        block.kind.take(block.adapters, self._seeds[index])
        return block

    def release(self) -> None:
        """Keep nothing of the pack."""
        for call in self._case.calls.values():
            call.release()
        self._leaves = {}


class Graphs:
    """The recordings of a model's blocks.

    states: for the largest pack. layouts: of how many recordings are kept, those that came last. made: recordings ever
    made, also those that were given up since.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        handle: Handle,
        states: States,
        layouts: int,
        recorder: Recorder,
    ) -> None:
        self.blocks, self.recorder, self._handle, self.states = blocks, recorder, handle, states
        self._layouts = layouts
        self._cases: dict[tuple[Any, ...], Case] = {}
        self.made = 0

    @property
    def count(self) -> int:
        """Recordings that are kept."""
        return sum(case.count for case in self._cases.values())

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """One more recording."""
        self.made += 1
        return self.recorder.record(run)

    def enter(self, layout: Layout, calls: Sequence[Arguments]) -> Play:
        """A pack's pass begins. calls: what each block is given besides hidden states."""
        given = self._by_kind(calls)
        flat: dict[Kind, tuple[list[Any], TreeSpec]] = {kind: tree_flatten(call) for kind, call in given.items()}
        leaves = {kind: found for kind, (found, _) in flat.items()}
        shapes = tuple(_shape(leaf) for found in leaves.values() for leaf in found)
        key = (layout.lengths, layout.parents, layout.width, shapes)
        case = self._cases.pop(key, None)
        if case is None:
            fixed = {kind: Call(found, spec) for kind, (found, spec) in flat.items()}
            case = Case(layout, fixed, self.states, self._handle)
        self._cases[key] = case
        while len(self._cases) > self._layouts:
            del self._cases[next(iter(self._cases))]  # what is under way is freed when it is over
        return Play(self, case, leaves, self._draw(layout))

    def _draw(self, layout: Layout) -> Sequence[Tensor]:
        """Seeds of each block's masks, int64, all of them sent to the device at once."""
        seeds = [block.masks.seeds(layout.draw) for block in self.blocks]
        whole = torch.tensor([seed for some in seeds for seed in some], dtype=torch.int64)
        return torch.split(whole.to(self.states.device, non_blocking=True), [len(some) for some in seeds])

    def _by_kind(self, calls: Sequence[Arguments]) -> dict[Kind, Arguments]:
        """What blocks of each kind are given. Raises RuntimeError where two of them are not given the same."""
        found: dict[Kind, Arguments] = {}
        for block, (args, kwargs) in zip(self.blocks, calls, strict=True):
            like_args, like_kwargs = found.setdefault(block.kind, (args, kwargs))
            same = len(args) == len(like_args) and kwargs.keys() == like_kwargs.keys()
            same = same and all(mine is other for mine, other in zip(args, like_args, strict=True))
            if not same or any(kwargs[name] is not value for name, value in like_kwargs.items()):
                raise RuntimeError(f"block {block.index} is given something else than blocks that are like it")
        return found


def _shape(leaf: Any) -> Any:
    """What must be the same for a recording to serve again; layouts are compared by themselves."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return None if isinstance(leaf, Layout) else leaf


def make(
    config: Config,
    layers: Sequence[nn.Module],
    files: Sequence[BlockFile],
    frozen: Sequence[Frozen],
    handle: Handle,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    recorder: Recorder | None = None,
) -> Graphs | None:
    """As `stream.graphs` says. recorder: by default CUDA graphs. UserError where it is `on` and there can be none."""
    asked = config.stream.graphs
    if asked == "off":
        return None
    if reason := _hinders(config, layers, device, recorder):
        if asked == "on":
            raise UserError(f"stream.graphs=on: {reason}; set stream.graphs=auto or off")
        return None
    kinds: dict[tuple[Any, ...], Kind] = {}
    blocks = []
    for index, (layer, file, its) in enumerate(zip(layers, files, frozen, strict=True)):
        adapters, masks, like = Adapters(layer), Masks(layer), structure(layer, file)
        if like not in kinds:
            kinds[like] = Kind(adapters, masks, dtype, device)
        blocks.append(Block(index, layer, its, adapters, masks, kinds[like]))
    states = States(config.pack.max_positions, width, dtype, device)
    return Graphs(blocks, handle, states, config.stream.graph_layouts, recorder or CudaRecorder(device))


def _hinders(
    config: Config, layers: Sequence[nn.Module], device: torch.device, recorder: Recorder | None
) -> str | None:
    """Why launches cannot be recorded."""
    adapter = config.adapter
    if adapter.dropout and adapter.masks != "counted":
        return f"adapter.dropout={adapter.dropout:g} draws its masks on the host: set adapter.masks=counted"
    if any(type(module).__name__.endswith("Experts") for layer in layers for module in layer.modules()):
        return "which experts compute what is known when it is computed, and a recording does the same again"
    if device.type != "cuda" and recorder is None:
        return f"launches are recorded on CUDA, not on {device.type}"
    return None
