"""The memory of a run that streams, term by term, before it starts; how many blocks may stay; what would fit. No torch.

The sizes of the files come from the store's manifest, or from the model's geometry where there is no store yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from configs import rules
from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import budget
from prefix_train.budget import GIB, ITEMSIZE, Budget, Shape, Term, tensor_bytes
from prefix_train.budget_choices import scaled
from prefix_train.geometry import Geometry, read_config
from prefix_train.layer_bytes import LayerBytes
from prefix_train.stream import origin
from prefix_train.stream.schedule import reads

CONTEXT = 864 << 20
"""Bytes that a CUDA context and its libraries take of a GPU besides torch's allocator, and some to spare: 828 to 844
MiB by the driver of an H200 (tests/bench/LOG.md)."""

FRAGMENTS = 160 << 20
"""Bytes that torch's allocator holds and cannot hand out: 118 and 158 MiB where it ran out (the same rows)."""

WORKSPACES = 2 * 32 << 20
"""Bytes that cuBLAS takes of torch's allocator on Hopper: for the thread that goes forward, and for autograd's."""

RECORDING = 512 << 10
"""Bytes that a recording of launches takes of a GPU besides torch's allocator. An estimate: not measured."""

SCRATCH = 1 << 18, 6
"""Elements that are dequantised at once (`nf4.CHUNK`) without a GPU, and bytes that each takes besides the matrix it
goes to. On a GPU one kernel does it, without."""

NF4_BYTES, ALIGNMENT = 0.5 + 4 / 64, 64
"""Per element of a quantised matrix without double quantisation; and what every part begins at."""

HEAD_TILES = 2
"""Tiles of the head that are on the device at a time."""


@dataclass(frozen=True)
class Files:
    """Bytes of a store's files. staying: of what is in the model all the time. matrix: elements of the largest matrix
    that is quantised, 0 where none is. source: where this is known from. assumed: there is no store yet."""

    blocks: tuple[int, ...]
    head: int
    staying: int
    matrix: int
    source: str
    assumed: bool = False

    @classmethod
    def of(cls, config: Config, geometry: Geometry) -> Files:
        """Of the run's store; of NF4 for its model where there is no store yet."""
        folder = config.stream.store
        if folder is not None and (path := Path(folder) / origin.MANIFEST).is_file():
            return cls._of_store(path)
        source = f"the model's sizes; there is no store in {folder} yet, NF4 assumed"
        return cls._of_geometry(geometry, ITEMSIZE[config.model.dtype], NF4_BYTES, source)

    @classmethod
    def unchanged(cls, config: Config) -> Files:
        """Of a store of the run's model whose weights are not quantised."""
        itemsize = ITEMSIZE[config.model.dtype]
        found = cls._of_geometry(Geometry.of(read_config(config.model)), itemsize, itemsize, "the model's sizes")
        return replace(found, matrix=0)

    @classmethod
    def _of_store(cls, path: Path) -> Files:
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            origin.require_format(path, manifest["format"])
            listed = manifest["blocks"]
            nbytes = {block["name"]: int(block["nbytes"]) for block in listed}
            shapes = [tensor["shape"] for block in listed for tensor in block["tensors"] if tensor["weights"] == "nf4"]
            blocks = tuple(
                nbytes[f"block.{index}"] for index in range(sum(name.startswith("block.") for name in nbytes))
            )
            staying = nbytes["final_norm"] + nbytes.get("vision", 0)
            head = nbytes.get("head", nbytes["embedding"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read as a store's manifest: {error!r}; build the store again") from error
        return cls(blocks, head, staying, max(map(prod, shapes), default=0), str(path.parent))

    @classmethod
    def _of_geometry(cls, geometry: Geometry, itemsize: int, element: float, source: str) -> Files:
        """element: bytes of one of a block's matrices."""
        blocks, largest = [], 0
        for layer in range(geometry.layers):
            matrices = [prod(shape) for shape in geometry.linears(layer).values()]
            largest = max(largest, *matrices)
            plain = geometry.layer_parameters(layer) - sum(matrices)
            blocks.append(int(sum(matrices) * element) + plain * itemsize + 2 * ALIGNMENT * len(matrices))
        parts = geometry.parameters
        staying = (geometry.hidden + parts["vision"] + parts["merger"]) * itemsize
        head = parts["embedding"] * itemsize
        return cls(tuple(blocks), head, staying, largest, source, assumed=True)


@dataclass(frozen=True)
class Plan:
    """What a run with packs of up to `pack.max_positions` needs. files: the store's. resident: blocks that stay.

    limit: bytes of `stream.budget_gib`. shape: of the largest pack. like: the pack whose proportions it has, or none if
    it is one example.
    """

    config: Config
    files: Files
    resident: int
    shape: Shape
    like: Shape | None = None

    @property
    def limit(self) -> int:
        """Most device memory that may be used."""
        assert self.config.stream.budget_gib is not None
        return int(self.config.stream.budget_gib * GIB)

    @cached_property
    def budget(self) -> Budget:
        """The terms."""
        found = budget.predict(self.config, self.shape)
        activations = list(_activations(self.config, self.files, found))
        weights = _weights(self.config, self.files, self.resident, found)
        return replace(found, terms=(*weights, *activations, *self._graphs(found, activations)))

    @property
    def recordings(self) -> int:
        """Bytes that recordings of launches take besides torch's allocator."""
        stream, blocks = self.config.stream, len(self.files.blocks)
        if not _records(self.config):
            return 0
        places = self.resident + min(stream.slots, blocks - self.resident)
        return 2 * places * stream.graph_layouts * RECORDING

    @property
    def beside(self) -> int:
        """Bytes of the device that torch's allocator does not have."""
        return CONTEXT + self.recordings

    def _graphs(self, found: Budget, activations: list[Term]) -> Iterator[Term]:
        """What `stream.graphs` takes. What comes a first time is computed without, in memory of its own."""
        if not _records(self.config):
            return
        itemsize, hidden = ITEMSIZE[self.config.model.dtype], found.geometry.hidden
        states = tensor_bytes(3, self.shape.positions, hidden, itemsize=itemsize)
        yield Term("fixed hidden states", states, "gpu", f"3 x {self.shape.positions:,} x {hidden:,} x {itemsize} B")
        layer = [term for term in activations if term.when == "layer" and term.place == "gpu"]
        names = ", ".join(term.name for term in layer)
        # Here a block's output and the gradient that it is given stay while it goes backward.
        pool = sum(term.bytes for term in layer) + WORKSPACES + states * 2 // 3
        yield Term("pool of the recordings", pool, "gpu", f"{names} and two hidden states, once more")
        yield Term("recordings", self.recordings, "gpu", f"{self.recordings // RECORDING} of {RECORDING >> 10} KiB")

    @property
    def needed(self) -> int:
        """Most bytes of the device at a time."""
        return self.budget.total("gpu")

    @property
    def fits(self) -> bool:
        """Is that within the budget?"""
        return self.needed <= self.limit

    def reads(self, lowest: int = 0) -> int:
        """Bytes that one pass of a group of packs reads, once the first is over: of blocks, and of the head twice."""
        blocks = self.files.blocks
        counted = reads(len(blocks), lowest, self.config.stream.slots, self.resident, 3)[-1]
        passing = blocks[: len(blocks) - self.resident] or (0,)
        return counted * sum(passing) // len(passing) + 2 * self.files.head

    def refuse(self) -> None:
        """Raise UserError, with what would fit, where the budget is too small."""
        if self.fits:
            return
        largest = sorted(self.budget.at_most("gpu"), key=lambda term: -term.bytes)[:3]
        terms = ", ".join(f"{term.name} {term.bytes / GIB:.3f}" for term in largest)
        fitting = "; ".join(self.would_fit()) or "nothing with this model, not even one position"
        raise UserError(
            f"stream.budget_gib={self.config.stream.budget_gib:g} is too small: packs of up to "
            f"{counted(self.shape.positions, 'position')} need {self.needed / GIB:.3f} GiB (largest terms {terms}); "
            f"what would fit: {fitting}"
        )

    def would_fit(self) -> list[str]:
        """Changes of one option, then of several, which the options' rules allow and with which the budget would do."""
        found = [name for name, other in self._changes() if self._does(other)]
        names, least = self._all_changes()
        if most := self._largest(self.config):
            found.append(f"pack.max_positions={most}")
        if not found and self._does(least):
            found.append(" ".join(names))
        if not most and (most := self._largest(least)):
            found.append(" ".join([*names, f"pack.max_positions={most}"]))
        return found

    def _does(self, config: Config) -> bool:
        return rules.accepts(config) and make(config, self.like, self.files).fits

    def _changes(self) -> Iterator[tuple[str, Config]]:
        for name, change in CHANGES:
            other = change(self.config)
            if other != self.config:
                yield name.format(tile=TILE), other

    def _all_changes(self) -> tuple[list[str], Config]:
        """Those that may be made one after the other, and what they come to."""
        names, least = [], self.config
        for name, change in CHANGES:
            other = change(least)
            if other != least and rules.accepts(other):
                names.append(name.format(tile=TILE))
                least = other
        return names, least

    def _largest(self, config: Config) -> int:
        """Most positions of a pack in the same proportions."""
        low, high = 0, self.shape.positions
        while high - low > 1:
            middle = (low + high) // 2
            does = self._does(_with(config, "pack", max_positions=middle))
            low, high = (middle, high) if does else (low, middle)
        return low

    def describe(self) -> str:
        """As a table."""
        lines = [
            budget.describe(self.budget),
            f"sizes from {self.files.source}",
            *self._other_store(),
            f"budget {self.limit / GIB:.3f} GiB, {'fits' if self.fits else 'TOO SMALL'}; {self.resident} of "
            f"{counted(len(self.files.blocks), 'block')} resident; {self.reads() / 1e9:.2f} GB read per pass of "
            f"{counted(self.config.stream.packs_per_visit, 'pack')}",
        ]
        if not self.fits:
            lines.append("what would fit: " + ("; ".join(self.would_fit()) or "nothing"))
        return "\n".join(lines)

    def _other_store(self) -> Iterator[str]:
        """Where there is no store yet: what one whose weights are not quantised would need at least."""
        if not self.files.assumed:
            return
        plan = make(self.config, self.shape, Files.unchanged(self.config))
        least = replace(plan, resident=0) if self.config.stream.resident_blocks == "auto" else plan
        weights = {"bfloat16": "bf16", "float32": "float32"}[self.config.model.dtype]
        yield (
            f"a store of unchanged weights (--weights {weights}) would need at least {least.needed / GIB:.3f} GiB: "
            f"{'fits' if least.fits else 'TOO MUCH'}"
        )

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return budget.summary(self.budget) | {
            "budget_bytes": self.limit,
            "fits": self.fits,
            "files": asdict(self.files),
            "resident_blocks": self.resident,
            "read_bytes_per_pass": self.reads(),
            "would_fit": [] if self.fits else self.would_fit(),
        }


TILE = 8192
"""Words of the vocabulary at a time, as advice."""


def _with(config: Config, section: str, **changes: Any) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **changes)})


def _tiled(config: Config) -> Config:
    return config if 0 < config.train.loss_chunk_words <= TILE else _with(config, "train", loss_chunk_words=TILE)


def _in_tiles(config: Config) -> Config:
    rows = config.memory.tile_rows
    return config if 0 < rows <= 2048 else _with(config, "memory", tile_rows=2048)


def _few_rows(config: Config) -> Config:
    return config if config.train.loss_chunk_rows <= 512 else _with(config, "train", loss_chunk_rows=512)


CHANGES = (
    ("stream.resident_blocks=0", lambda config: _with(config, "stream", resident_blocks="0")),
    ("memory.offload=auto", lambda config: _with(config, "memory", offload="auto")),
    ("stream.graphs=off", lambda config: _with(config, "stream", graphs="off")),
    ("train.loss_chunk_words={tile}", _tiled),
    ("train.loss_chunk_rows=512", _few_rows),
    ("memory.tile_rows=2048", _in_tiles),
    ("stream.packs_per_visit=1", lambda config: _with(config, "stream", packs_per_visit=1)),
    ("stream.slots=2", lambda config: _with(config, "stream", slots=2)),
)
"""Options that save memory on the device, those that cost least first."""


def _records(config: Config) -> bool:
    """May launches be recorded?"""
    told = bool(config.adapter.dropout) and config.adapter.masks != "counted"
    return config.stream.graphs != "off" and not told and config.slurm.gpus_per_node > 0


def make(config: Config, shape: Shape | None = None, files: Files | None = None) -> Plan:
    """The plan of `config` for packs in the proportions of `shape`, grown to `pack.max_positions`."""
    most = config.pack.max_positions
    grown = Shape.of([most], [-1], most) if shape is None else scaled(shape, most)
    files = files or Files.of(config, Geometry.of(read_config(config.model)))
    blocks, asked = len(files.blocks), config.stream.resident_blocks
    plan = Plan(config, files, 0 if asked == "auto" else min(int(asked), blocks), grown, shape)
    while asked == "auto" and plan.resident < blocks:
        more = replace(plan, resident=plan.resident + 1)
        if not more.fits:
            break
        plan = more
    return plan


def _weights(config: Config, files: Files, resident: int, found: Budget) -> list[Term]:
    """What lies on the device all the time."""
    passing, staying = files.blocks[: len(files.blocks) - resident], files.blocks[len(files.blocks) - resident :]
    largest, slots = max(passing, default=0), config.stream.slots if passing else 0
    words = found.geometry.vocabulary
    tile = min(config.train.loss_chunk_words or words, words)
    tiles = min(HEAD_TILES, -(-words // tile))
    itemsize = ITEMSIZE[config.model.dtype]
    one = tensor_bytes(tile, found.geometry.hidden, itemsize=itemsize)
    matrix = files.matrix * itemsize
    trained = next(term for term in found.terms if term.name == "trained parameters")
    context, workspaces, lost = (CONTEXT, WORKSPACES, FRAGMENTS) if config.slurm.gpus_per_node else (0, 0, 0)
    return [
        Term("CUDA context", context, "gpu", "context and libraries"),
        Term("workspaces", workspaces, "gpu", "cuBLAS's, one for each direction"),
        Term("fragments", lost, "gpu", "what torch's allocator cannot hand out"),
        Term("slots", slots * largest, "gpu", f"{slots} x {largest:,} B, the largest block that passes through"),
        Term("resident blocks", sum(staying), "gpu", f"{resident} of {counted(len(files.blocks), 'block')}"),
        Term("tiles of the head", tiles * one, "gpu", f"{tiles} x {tile:,} words x {found.geometry.hidden:,}"),
        Term("dequantised matrix", matrix, "gpu", f"the largest, {files.matrix:,} elements"),
        Term("last norm, vision tower", files.staying, "gpu", "as stored"),
        trained,
    ]


def _activations(config: Config, files: Files, found: Budget) -> Iterator[Term]:
    """What packs make, `packs_per_visit` of them at a time; their blocks are computed one after the other."""
    packs, itemsize, geometry = config.stream.packs_per_visit, ITEMSIZE[config.model.dtype], found.geometry
    positions, rows = found.shape.positions, found.shape.rows
    one = tensor_bytes(positions, geometry.hidden, itemsize=itemsize)
    for term in found.terms:
        if term.name in ("layer inputs", "offloaded layer inputs"):
            yield replace(term, bytes=packs * term.bytes, formula=f"{counted(packs, 'pack')} x ({term.formula})")
        elif term.name in ("one layer recomputed", "gradients in the layer", "logits of a chunk"):
            yield term
    if not config.slurm.gpus_per_node and files.matrix:
        scratch, lull = min(files.matrix, SCRATCH[0]) * SCRATCH[1], _lull(config, found)
        yield Term("scratch of dequantising", max(0, scratch - lull), "gpu", "what a lull has no room for", "layer")
    adapters = next(term for term in found.terms if term.name == "trained parameters").bytes // budget.MASTER_BYTES
    tables = tensor_bytes(packs * positions, 2 * int(geometry.text["head_dim"]), itemsize=itemsize)
    copies = tensor_bytes(2 * adapters // geometry.layers, itemsize=itemsize)
    yield Term(
        "rotary tables, copies",
        tables + copies,
        "gpu",
        f"of {counted(packs, 'pack')}; a block's adapters and gradients",
    )
    yield Term("residual stream", packs * one, "gpu", f"{counted(packs, 'pack')}: a gradient on the way down")
    width = geometry.hidden * (itemsize + 4)
    what = f"{packs} x {counted(rows, 'row')}: inputs and float32 gradient"
    yield Term("prediction rows", packs * rows * width, "gpu", what, "loss")
    yield Term("last norm's own", 3 * 4 * positions * geometry.hidden, "gpu", "three float32 copies", "loss")


def _lull(config: Config, found: Budget) -> int:
    """Bytes less than at its worst moment that the layer which needs the most has when it reads its matrices."""
    layers = range(found.geometry.layers)
    inside = (LayerBytes.of(config, found.kernels, found.geometry, layer, found.shape) for layer in layers)
    return max(inside, key=LayerBytes.total).lull
