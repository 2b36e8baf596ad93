"""Inputs of decoder layers, and what else they keep, wait in pinned host memory between forward and backward.

A layer that is recomputed keeps its input alone, or its middle besides. Each is copied to the host while the layer
computes; in backward it is brought back while what comes after it does its own. The memory is one pool of equal chunks,
allocated once: torch's pinned allocator rounds a request up to a power of two and keeps it, so packs of many sizes
would each leave their own behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import budget, shelf, unit
from prefix_train.copies import Copier, Copy, copier_for
from prefix_train.dist import Ranks
from prefix_train.model import Root
from prefix_train.pinned import Pinned


@dataclass(frozen=True)
class Figures:
    """What offloading did. copied: bytes, both ways together. copying_s: of all copies, stalled_s: in which computing
    stood still for one; both 0 where no stream runs beside computing. pinned_peak: most bytes that the pool had in use.
    """

    copied: int
    copying_s: float
    stalled_s: float
    pinned_peak: int

    @property
    def hidden(self) -> float | None:
        """Share of the copying that no computing waited for; None where nothing was timed."""
        return 1 - self.stalled_s / self.copying_s if self.copying_s else None


class Pool:
    """`size` bytes of host memory in chunks of `budget.PINNED_CHUNK`. peak: most bytes that were in use at a time."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self.peak, self._chunk = size, 0, budget.PINNED_CHUNK
        self._memory = Pinned(size, self._chunk) if pinned and size else None
        memory = torch.empty(size, dtype=torch.uint8) if self._memory is None else self._memory.tensor
        self._free = list(torch.split(memory, self._chunk)) if size else []

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self.size - len(self._free) * self._chunk

    def take(self, size: int) -> list[Tensor]:
        """Chunks for `size` bytes. Raises RuntimeError where so many are not free."""
        count = -(-size // self._chunk)
        if count > len(self._free):
            raise RuntimeError(
                f"memory.offload: {size:,} bytes do not fit, {self.used:,} of {self.size:,} pinned ones are in use: "
                "the pool holds one pack of pack.max_positions between its forward and backward"
            )
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        self.peak = max(self.peak, self.used)
        return taken

    def give(self, chunks: Sequence[Tensor]) -> None:
        """Put chunks back. What is still copied out of or into them goes before what is copied into them next."""
        self._free.extend(chunks)


class Kept:
    """A layer's input that stays where it is. before: what was kept before it, of the same pack, and is wanted next."""

    beside: Sequence[Stored] = ()

    def __init__(self, source: Tensor, before: Stored | None) -> None:
        self._source, self._version = source, source._version
        self.before = weakref.ref(before) if before is not None else None

    def tensor(self) -> Tensor:
        """The input."""
        _require_unchanged(self._source, self._version)
        return self._source


class Stored:
    """A layer's input or middle on the host, whose chunks go back to the pool when nothing needs it any more.

    beside: what else of this layer waits there, wanted a while after the input.
    """

    def __init__(self, offload: Offload, source: Tensor, before: Stored | None) -> None:
        self._offload = offload
        self._shape, self._dtype, self._device = source.shape, source.dtype, source.device
        self.before = weakref.ref(before) if before is not None else None
        self.beside: list[Stored] = []
        self._on_its_way: tuple[Tensor, Copy] | None = None
        self._chunks: list[Tensor] = []
        self._chunks = offload.pool.take(source.nbytes)

    def store(self, source: Tensor) -> Copy:
        """Begin to copy it to the host."""
        pieces = _bytes_of(source)
        self._offload.copied += source.nbytes
        return Copy(self._offload.copier, "out", self._parts(pieces), pieces)

    def fetch(self) -> None:
        """Begin to bring it back, where that has not begun."""
        if self._on_its_way is None:
            target = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            pieces = _bytes_of(target)
            self._offload.copied += target.nbytes
            self._on_its_way = target, Copy(self._offload.copier, "back", pieces, self._parts(pieces))

    def tensor(self) -> Tensor:
        """The input, back on its device."""
        self.fetch()
        assert self._on_its_way is not None
        (target, copy), self._on_its_way = self._on_its_way, None
        copy.finish()
        return target

    def _parts(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [chunk[: len(piece)] for chunk, piece in zip(self._chunks, pieces, strict=True)]

    def __del__(self) -> None:
        self._on_its_way = None  # waits for what comes into memory that is given away here
        self._offload.pool.give(self._chunks)


class Inputs:
    """Inputs of one pack's layers, for somebody who runs these one by one: the first of them wait on the host.

    offload: none where all stay where they are.
    """

    def __init__(self, offload: Offload | None) -> None:
        self._offload = offload
        self._kept: list[Tensor | Stored] = []
        self._under_way: _UnderWay | None = None

    def push(self, hidden: Tensor) -> None:
        """The next layer's, before it is computed."""
        self.settle()
        if self._offload is None or len(self._kept) >= self._offload.count:
            self._kept.append(hidden)
            return
        stored = Stored(self._offload, hidden, None)
        self._under_way = _UnderWay(stored.store(hidden), hidden, hidden._version)
        self._kept.append(stored)

    def pop(self) -> Tensor:
        """The last one that is there; the one before it begins to come back."""
        self.settle()
        last = self._kept.pop()
        found = last.tensor() if isinstance(last, Stored) else last
        if self._kept and isinstance(before := self._kept[-1], Stored):
            before.fetch()
        return found

    def settle(self) -> None:
        """The last layer was computed: before its input's memory is used again, it must be on the host."""
        if self._under_way is not None:
            copy, source, version = self._under_way
            self._under_way = None
            copy.finish()
            _require_unchanged(source, version)


class _UnderWay(NamedTuple):
    copy: Copy
    source: Tensor
    version: int


class Offload:
    """Lets the inputs of the first `count` layers wait in `pool`. middles: how many of these layers' middles wait there
    too. copied: bytes so far, both ways."""

    def __init__(self, count: int, pool: Pool, copier: Copier) -> None:
        self.count, self.pool, self.copier = count, pool, copier
        self.middles = self.copied = 0
        self._last: weakref.ref[Stored] | None = None
        self._under_way: list[_UnderWay] = []

    def figures(self) -> Figures:
        """Of all that was done since this was last asked."""
        copied, self.copied = self.copied, 0
        return Figures(copied, *self.copier.spent(), self.pool.peak)

    @contextmanager
    def layer(self, index: int, hidden: Tensor) -> Iterator[None]:
        """Around the checkpoint of layer `index`, from 0 to `count`, or of its first half, whose input is `hidden`,
        [1, T, D].

        Raises RuntimeError where the pool is full, where an input was written to before it was copied, and where the
        checkpoint does not save its input through autograd.
        """
        self._settle()
        before = self._last() if self._last is not None and index > 0 else None
        waiting = Kept(hidden.detach(), before) if index == self.count else self._stored(hidden, before)
        with _saved_as(waiting, hidden, f"layer {index}: its input"):
            yield

    @contextmanager
    def middle(self, index: int, hidden: Tensor) -> Iterator[None]:
        """Around the checkpoint of the second half of layer `index`, below `count`. Raises RuntimeError as `layer`.

        What this layer's first half let go may still leave: it has the second half's time too.
        """
        assert self._last is not None
        with _saved_as(self._stored(hidden, self._last()), hidden, f"layer {index}: its middle"):
            yield

    def _stored(self, hidden: Tensor, before: Stored | None) -> Stored:
        source = hidden.detach().contiguous()
        stored = Stored(self, source, before)
        self._under_way.append(_UnderWay(stored.store(source), source, source._version))
        self._last = weakref.ref(stored)
        return stored

    def wait(self, source: Tensor) -> shelf.Waiting:
        """Let `source`, contiguous, that the layer of the present `layer` has computed, wait on the host too."""
        stored = Stored(self, source, None)
        self._under_way.append(_UnderWay(stored.store(source), source, source._version))
        if self._last is not None and (of_layer := self._last()) is not None:
            of_layer.beside.append(stored)
        return stored.tensor

    def _settle(self) -> None:
        """The layer before has computed: what leaves it must be on the host before its memory is used again."""
        while self._under_way:
            copy, source, version = self._under_way.pop(0)
            copy.finish()
            _require_unchanged(source, version)


@contextmanager
def _saved_as(waiting: Kept | Stored, hidden: Tensor, what: str) -> Iterator[None]:
    """Autograd saves `waiting` in place of `hidden`."""
    packed = []
    mine = weakref.ref(hidden)  # autograd keeps `pack`, which must not keep the tensor

    def pack(saved: Tensor) -> Tensor | Kept | Stored:
        if saved is not mine():
            return saved
        packed.append(True)
        return waiting

    with saved_tensors_hooks(pack, _unpack):
        yield
    if not packed:
        raise RuntimeError(f"{what} was not saved through autograd, so it can't be offloaded")


def attach(root: Root, config: Config, device: torch.device, copier: Copier | None = None) -> Offload | None:
    """Let the inputs of as many layers of `root` as `memory.offload` says wait on the host; None where none do. Their
    middles and what their attention has computed wait there too, in layers that keep them.

    Never the last layer's: backward begins with it. root: on its device, sharded if it will be. The pool holds a pack
    of `pack.max_positions`. copier: by default that of `device`. Raises UserError where the host lacks the memory.
    """
    width = root.anatomy.base.get_input_embeddings().embedding_dim
    layers = root.anatomy.layers
    away = layers[: _count(config, len(layers))]
    keeping: list[Any] = [layer for layer in away if unit.keeps_attention(layer)]
    middles = {index: layer for index, layer in enumerate(away) if unit.keeps_middle(layer)}
    widths = [width] * len(middles) + [layer.self_attn.o_proj.in_features for layer in keeping]
    most, itemsize = config.pack.max_positions, root.dtype.itemsize
    kept = sum(budget.pinned_bytes(1, most, width, itemsize=itemsize) for width in widths)
    offload = make(config, len(layers), width, root.dtype, device, copier, more=kept)
    if offload is not None:
        offload.middles = len(middles)
        for index, layer in enumerate(layers[: offload.count + 1]):
            unit.around_recomputed(layer, partial(offload.layer, index))
        for index, layer in middles.items():
            unit.around_middle(layer, partial(offload.middle, index))
        for layer in keeping:
            unit.let_kept_wait(layer, offload.wait)
    return offload


def _count(config: Config, layers: int) -> int:
    return max(0, budget.offloaded_layers(config.memory.offload, layers))


def make(
    config: Config,
    layers: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    copier: Copier | None = None,
    packs: int = 1,
    more: int = 0,
) -> Offload | None:
    """What `attach` attaches, for inputs of so many packs at a time; None where none wait on the host.

    more: bytes of the pool beyond these.
    """
    count = _count(config, layers)
    if count < 1:
        return None
    copier = copier or copier_for(device)
    size = more + packs * budget.pinned_bytes(count, config.pack.max_positions, width, itemsize=dtype.itemsize)
    try:
        pool = Pool(size, copier.pinned)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"memory.offload={config.memory.offload}: {size / budget.GIB:.1f} GiB of pinned memory for each rank are "
            f"not to be had ({str(error).splitlines()[0]}): give fewer layers, or lower pack.max_positions"
        ) from error
    return Offload(count, pool, copier)


def describe(offload: Offload) -> str:
    """What was set up, in one line."""
    chunks = offload.pool.size // budget.PINNED_CHUNK
    more = f" and middles of {offload.middles}" if offload.middles else ""
    return (
        f"offload: inputs of {counted(offload.count, 'layer')}{more} wait in {offload.pool.size / budget.GIB:.2f} GiB "
        f"per rank, {counted(chunks, 'chunk')} of {budget.PINNED_CHUNK / (1 << 20):g} MiB"
    )


def metrics(offload: Offload, ranks: Ranks) -> dict[str, float]:
    """What an update's line of metrics.jsonl tells; every rank calls it, after the update.

    offload_bytes: copied by all ranks, both ways. offload_pinned_bytes: most in use so far, on the rank that used most.
    offload_hidden: share of the time of copying that no computing waited for, where there are streams.
    """
    done = offload.figures()
    spent = torch.tensor([done.copied, done.copying_s, done.stalled_s], dtype=torch.float64, device=ranks.device)
    copied, copying, stalled = ranks.sum(spent).tolist()
    line = {"offload_bytes": int(copied), "offload_pinned_bytes": ranks.max(done.pinned_peak)}
    return line | ({"offload_hidden": 1 - stalled / copying} if copying else {})


def _unpack(saved: Tensor | Kept | Stored) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    found = saved.tensor()
    for more in saved.beside:
        more.fetch()
    if saved.before is not None and (before := saved.before()) is not None:
        before.fetch()
    return found


def _bytes_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """A contiguous tensor's memory, in pieces that each fit a chunk."""
    return torch.split(tensor.view(-1).view(torch.uint8), budget.PINNED_CHUNK)


def _require_unchanged(source: Tensor, version: int) -> None:
    if source._version != version:
        raise RuntimeError("memory.offload: a layer's input was written to in place after the layer had begun")
