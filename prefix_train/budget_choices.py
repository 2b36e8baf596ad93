"""What each adapter target and each option would change in a budget, and the largest pack that fits. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from configs import rules
from configs.schema import Config, MemoryConfig
from prefix_train.budget import GIB, Budget, Shape, amount, predict, unit_of

RESERVE = 4 * GIB
"""Of a GPU, kept free for what no term covers: the CUDA context, NCCL's and cuBLAS's buffers, fragmentation."""

RESERVE_OF_RANK = GIB // 2
"""Of a rank's part of a machine without a GPU: so much a process takes once torch and transformers are imported."""


@dataclass(frozen=True)
class Choice:
    """A change of one option. gpu_bytes, host_bytes: what it adds on each GPU, and pinned on each node. flops: factor
    on the FLOPs that are computed."""

    change: str
    gpu_bytes: int
    host_bytes: int
    flops: float


@dataclass(frozen=True)
class Room:
    """What there is for a pack. gpu: bytes of a GPU, or of each rank's part of a machine without one. host: bytes that
    a node can pin; none: not limited. each: what has `gpu`. said: how much that is and what says so. reserve: bytes of
    `gpu` that are kept free."""

    gpu: int
    host: int | None
    each: Literal["GPU", "rank"]
    said: str
    reserve: int = RESERVE


@dataclass(frozen=True)
class Verdict:
    """Whether a pack fits. largest: positions of the largest that does; 0: none. Where it does not fit: needs: bytes
    that would hold it; changes: those of one option with which it fits."""

    fits: bool
    largest: int
    needs: int | None
    changes: tuple[str, ...]


def choices(config: Config, found: Budget) -> list[Choice]:
    """What single changes of `config`, whose budget is `found`, would cost or save, for a pack of the same shape.

    Only those that the rules of options allow beside all else that is set.
    """
    listed = []
    for change, other in _changes(config, found):
        if not rules.accepts(other):
            continue
        budget = predict(other, found.shape)
        gpu, host = (budget.total(place) - found.total(place) for place in ("gpu", "host"))
        listed.append(Choice(change, gpu, host, budget.hardware_flops / found.hardware_flops))
    return listed


def _changes(config: Config, found: Budget) -> Iterator[tuple[str, Config]]:
    if config.train.trainable == "adapter":
        yield from _adapter_changes(config, found)
    memory, train = config.memory, config.train
    recompute = not memory.recompute
    yield f"memory.recompute={str(recompute).lower()}", _with(config, "memory", recompute=recompute)
    for offload in ("none", "auto"):
        if offload != memory.offload:
            yield f"memory.offload={offload}", _with(config, "memory", offload=offload)
    for name in ("keep_attention", "keep_middle"):
        keep = "none" if getattr(memory, name) != "none" else "auto"
        yield f"memory.{name}={keep}", _with(config, "memory", **{name: keep})
    if memory.recompute:
        tile = 0 if memory.tile_rows else MemoryConfig.tile_rows
        yield f"memory.tile_rows={tile}", _with(config, "memory", tile_rows=tile)
    if rows := train.loss_chunk_rows // 2:
        yield f"train.loss_chunk_rows={rows}", _with(config, "train", loss_chunk_rows=rows)


def _adapter_changes(config: Config, found: Budget) -> Iterator[tuple[str, Config]]:
    geometry, adapter = found.geometry, config.adapter
    for name in geometry.targets:
        if name not in adapter.targets:
            yield f"adapter on {name}", _with(config, "adapter", targets=[*adapter.targets, name])
        elif len(adapter.targets) > 1:
            without = [target for target in adapter.targets if target != name]
            yield f"no adapter on {name}", _with(config, "adapter", targets=without)
    yield f"adapter.rank={2 * adapter.rank}", _with(config, "adapter", rank=2 * adapter.rank)
    dropout = 0.0 if adapter.dropout else 0.05
    yield f"adapter.dropout={dropout:g}", _with(config, "adapter", dropout=dropout)
    if geometry.vision:
        merger = not adapter.merger
        yield f"adapter.merger={str(merger).lower()}", _with(config, "adapter", merger=merger)


def _with(config: Config, section: str, **changes: Any) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **changes)})


def largest_pack(
    config: Config, shape: Shape, gpu_bytes: int, host_bytes: int | None = None, reserve: int = RESERVE
) -> int:
    """Most positions of a pack in the proportions of `shape` that fit a GPU of `gpu_bytes`, less `reserve`, and a node
    that can pin `host_bytes`; 0 where none does. In whole thousands above 10,000."""

    def fits(positions: int) -> bool:
        grown = _with(config, "pack", max_positions=positions)
        found = predict(grown, scaled(shape, positions))
        within = found.total("gpu") <= gpu_bytes - reserve
        return within and (host_bytes is None or found.total("host") <= host_bytes)

    low, high = 0, 1
    while fits(high) and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low - low % 1000 if low > 10_000 else low


def scaled(shape: Shape, positions: int) -> Shape:
    """A pack in the proportions of `shape` with so many positions; every count is at least what one segment has."""

    def grow(count: int) -> int:
        return -(-count * positions // shape.positions)

    pairs = shape.pairs * positions**2 // shape.positions**2
    names = ("segments", "inner", "chunks", "rows", "level", "level_chunks", "piece", "joined", "reordered")
    counts = {name: grow(getattr(shape, name)) for name in names}
    calls = (
        replace(call, **{name: grow(count) for name, count in asdict(call).items() if name != "chunk"})
        for call in shape.calls
    )
    return replace(shape, positions=positions, pairs=pairs, calls=tuple(calls), **counts)


def judge(config: Config, found: Budget, listed: Sequence[Choice], room: Room) -> Verdict:
    """Whether the pack of `found` fits, the largest that does, and what would help where it does not."""

    def fits(more_gpu: int = 0, more_host: int = 0) -> bool:
        within = found.total("gpu") + more_gpu <= room.gpu - room.reserve
        return within and (room.host is None or found.total("host") + more_host <= room.host)

    largest = largest_pack(config, found.shape, room.gpu, room.host, room.reserve)
    if fits():
        return Verdict(True, largest, None, ())
    helping = tuple(choice.change for choice in listed if fits(choice.gpu_bytes, choice.host_bytes))
    return Verdict(False, largest, found.total("gpu") + room.reserve, helping)


def summary(listed: Sequence[Choice], room: Room, verdict: Verdict) -> dict[str, Any]:
    """As JSON has it. `largest_pack` is null where not even one position fits; `would_fit` is where this pack does."""
    return {
        "choices": [asdict(choice) for choice in listed],
        "gpu_bytes_there": room.gpu,
        "gpu_bytes_kept_free": room.reserve,
        "fits": verdict.fits,
        "largest_pack": verdict.largest or None,
        "would_fit": None if verdict.fits else {"gpu_bytes": verdict.needs, "changes": list(verdict.changes)},
    }


def describe(listed: Sequence[Choice], found: Budget, room: Room, verdict: Verdict, longest: int | None = None) -> str:
    """As a table, dearest on the GPU first, and what fits. longest: tokens of the longest example, where known."""
    most = max((abs(choice.gpu_bytes) for choice in listed), default=0)
    unit, size = unit_of(most)
    lines = [f"one change at a time:   {unit} on each {room.each:<8}{unit} pinned on each node   FLOPs"]
    for choice in sorted(listed, key=lambda choice: (-choice.gpu_bytes, choice.change)):
        lines.append(
            f"  {choice.change:<28}{choice.gpu_bytes / size:+11.3f}{choice.host_bytes / size:+26.3f}{choice.flops:8.3f}"
        )
    return "\n".join([*lines, *_told(found, room, verdict, longest)])


def _told(found: Budget, room: Room, verdict: Verdict, longest: int | None) -> list[str]:
    """Whether it fits and what would, a line each."""
    needed = f"{amount(found.total('gpu'))} needed and {amount(room.reserve)} kept free"
    pinned = "" if room.host is None else f", {amount(found.total('host'))} pinned of {room.host / 1e9:g} GB"
    lines = [f"{'fits' if verdict.fits else 'DOES NOT FIT'}: {needed} of {room.said}{pinned}"]
    if not verdict.largest:
        lines.append("largest pack that fits: none, not even one of a single position")
    else:
        small = longest is not None and verdict.largest < longest
        less = f"; too few for the longest example, which has {longest:,} tokens" if small else ""
        lines.append(f"largest pack that fits, in such proportions: {verdict.largest:,} positions{less}")
    if verdict.needs is not None:
        ways = [f"{room.each} memory of {-(-verdict.needs // 10**7) / 100:g} GB", *verdict.changes]
        lines.append(f"what would hold this pack: {', or '.join(ways)}")
    return lines
