"""What a pack costs before it runs: visible pairs, FLOPs, and bytes term by term, on a GPU and in pinned memory.

T positions, S segments, L layers. Every term is a formula over the model's sizes and the pack; one rank has one GPU.
What allocators and kernels keep for themselves is not in here. No torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import kernel_choice
from prefix_train.geometry import Geometry, read_config
from prefix_train.kernel_choice import Kernels, Machine
from prefix_train.layer_bytes import ITEMSIZE as ITEMSIZE
from prefix_train.layer_bytes import LayerBytes, adapted, keeps_middle
from prefix_train.layer_bytes import kept_layers as kept_layers
from prefix_train.layer_bytes import tensor_bytes as tensor_bytes
from prefix_train.layer_bytes import tile_rows as tile_rows
from prefix_train.shape import Shape as Shape
from prefix_train.shape import visible_pairs as visible_pairs

GIB = 1 << 30

PINNED_CHUNK = 64 << 20
"""Bytes in which offloaded tensors lie in pinned memory."""

KEEPING = ("merged", "joined")
"""Kernels of attention whose output `memory.keep_attention` keeps."""

WHEN = {"always": "", "loss": "; only while the loss is computed", "layer": "; only in a layer's backward"}

UNPLANNED = "there is no plan of these data, model and options yet (`prefix-train plan CONFIG`): of a made-up pack"
"""Said before a budget whose pack is none of a plan."""

MASTER_BYTES = 16
"""A trainable parameter: float32 master, gradient, and AdamW's two moments."""


@dataclass(frozen=True)
class Cost:
    """Predicted time of a pack, in positions: per_position for each position, per_pair for each visible pair.

    The default is that of a hybrid model of 27B parameters (hidden 5,120, 16 of 64 layers with attention), by FLOPs.
    """

    per_position: float = 1.0
    per_pair: float = 1.2e-5

    @classmethod
    def by_flops(cls, geometry: Geometry, trainable: Literal["adapter", "all"]) -> Cost:
        """In the proportion of a model's training FLOPs."""
        products = geometry.product_flops * (2 if trainable == "adapter" else 3)
        return cls(1.0, 3 * geometry.pair_flops / (products + 3 * geometry.recurrence_flops))

    @classmethod
    def under(cls, config: Config) -> Cost:
        """Of the model that `config` names, trained as it says: every plan of a run uses this one."""
        return cls.by_flops(Geometry.of(read_config(config.model)), config.train.trainable)

    def of(self, positions: int, pairs: int) -> float:
        """Predicted time of a pack, in units of the time of one position."""
        return self.per_position * positions + self.per_pair * pairs


def pinned_bytes(layers: int, positions: int, hidden: int, ranks: int = 1, itemsize: int = 2) -> int:
    """Pinned host memory of `ranks` ranks of a node that each offload the inputs of so many layers, in whole chunks."""
    chunks = -(-tensor_bytes(positions, hidden, itemsize=itemsize) // PINNED_CHUNK)
    return ranks * layers * chunks * PINNED_CHUNK


def model_flops(geometry: Geometry, shape: Shape, trainable: Literal["adapter", "all"], adapters: int = 0) -> int:
    """FLOPs of one training step of a pack, nothing recomputed: forward, gradients of inputs, and of what is trained.

    Frozen weights count twice (forward, input gradient), trained ones, pairs and recurrence three times; the head
    counts for prediction rows alone. adapters: parameters of adapters. The vision tower is not counted.
    """
    passes = 2 if trainable == "adapter" else 3
    per_position = passes * geometry.product_flops + 3 * geometry.recurrence_flops + 6 * adapters
    per_row = passes * geometry.row_flops
    return shape.positions * per_position + 3 * shape.pairs * geometry.pair_flops + shape.rows * per_row


def recomputed_flops(geometry: Geometry, shape: Shape) -> int:
    """FLOPs of the layers' forward, done once more where only layer inputs are kept."""
    per_position = geometry.product_flops + geometry.recurrence_flops
    return shape.positions * per_position + shape.pairs * geometry.pair_flops


@dataclass(frozen=True)
class Term:
    """Bytes of one purpose. place: on each GPU, or pinned on each node. when: all the time, while the loss is computed,
    or while a layer's backward runs: the last two never meet."""

    name: str
    bytes: int
    place: Literal["gpu", "host"]
    formula: str
    when: Literal["always", "loss", "layer"] = "always"


@dataclass(frozen=True)
class Budget:
    """The terms of one configuration and one pack, computed by these kernels of that machine, and the FLOPs of an
    update's part that this pack is."""

    geometry: Geometry
    shape: Shape
    machine: Machine
    kernels: Kernels
    terms: tuple[Term, ...]
    model_flops: int
    hardware_flops: int

    def total(self, place: Literal["gpu", "host"]) -> int:
        """Most bytes at a time on each GPU, or pinned on each node."""
        return sum(term.bytes for term in self.at_most(place))

    def at_most(self, place: Literal["gpu", "host"]) -> list[Term]:
        """The terms of the moment at which most is needed."""
        here = [term for term in self.terms if term.place == place]
        moments = [[term for term in here if term.when in ("always", when)] for when in ("loss", "layer")]
        return max(moments, key=lambda terms: sum(term.bytes for term in terms))

    def refuse(self, *, gpu_bytes: int | None = None, host_bytes: int | None = None) -> None:
        """Raise UserError, naming the largest terms, where the device or the node has less than is needed."""
        for place, there, what in (("gpu", gpu_bytes, "a GPU"), ("host", host_bytes, "a node's pinned memory")):
            needed = self.total(place)  # type: ignore[arg-type]
            if there is not None and needed > there:
                terms = sorted(self.at_most(place), key=lambda term: -term.bytes)[:3]  # type: ignore[arg-type]
                largest = ", ".join(f"{term.name} {term.bytes / GIB:.1f}" for term in terms)
                raise UserError(
                    f"a pack of {counted(self.shape.positions, 'position')} needs {needed / GIB:.1f} GiB of {what}, "
                    f"which has {there / GIB:.1f}: largest terms {largest}; lower pack.max_positions or change "
                    "memory.offload"
                )


def predict(config: Config, shape: Shape | None = None, machine: Machine | None = None) -> Budget:
    """The budget of `config` for a pack of `shape`; none: one example as long as `pack.max_positions`.

    machine: whose kernels count; none: that which the job is expected to run on. UserError as `kernel_choice.choose`.
    """
    geometry = Geometry.of(read_config(config.model))
    machine = machine or kernel_choice.expected(config)
    kernels = kernel_choice.choose(config, machine, geometry)
    most = config.pack.max_positions
    shape = shape or Shape.of([most], [-1], most)
    adapters = 0
    if config.train.trainable == "adapter":
        adapters = geometry.adapter_parameters(config.adapter.rank, config.adapter.targets)
    flops = model_flops(geometry, shape, config.train.trainable, adapters)
    again = recomputed_flops(geometry, shape) if config.memory.recompute else 0
    terms = (*_weight_terms(config, geometry), *_activation_terms(config, kernels, geometry, shape))
    return Budget(geometry, shape, machine, kernels, terms, flops, flops + again)


def _weight_terms(config: Config, geometry: Geometry) -> list[Term]:
    """Weights, gradients and optimizer, sharded over all ranks."""
    itemsize, ranks = ITEMSIZE[config.model.dtype], config.ranks
    of = counted(ranks, "rank")
    parts = geometry.parameters
    total = sum(parts.values())
    shapes = _trained_shapes(config, geometry)
    # PEFT keeps the merger's original beside the trained copy.
    frozen = total if adapted(config) else 0
    trained = sum(map(prod, shapes)) if adapted(config) else total
    shard = sum(-(-rows // ranks) * columns for rows, columns in shapes) if adapted(config) else -(-total // ranks)
    largest = max(map(geometry.layer_parameters, range(geometry.layers)))
    gathered = (parts["embedding"] + parts["head"] + 2 * largest) * itemsize if ranks > 1 else 0
    return [
        Term("frozen weights", frozen * itemsize // ranks, "gpu", f"{frozen:,} x {itemsize} B / {of}"),
        Term("gathered weights", gathered, "gpu", "embedding, head and two layers, unsharded"),
        Term(
            "trained parameters",
            shard * MASTER_BYTES,
            "gpu",
            f"{trained:,}, on the first of {of} {shard:,}, x {MASTER_BYTES} B (master, gradient, two moments)",
        ),
    ]


def _trained_shapes(config: Config, geometry: Geometry) -> list[tuple[int, int]]:
    """(rows, columns) of what is trained beside frozen weights. Sharding cuts rows: an adapter's few lie on the first
    ranks, which have more than the average."""
    shapes = geometry.adapter_shapes(config.adapter.rank, config.adapter.targets)
    return [*shapes, *(geometry.merger_shapes if config.adapter.merger else [])]


def _activation_terms(config: Config, kernels: Kernels, geometry: Geometry, shape: Shape) -> list[Term]:
    """What lies on a GPU beside weights while a pack runs, and what waits for its backward on the host."""
    attention = _kept_attention(config, kernels, geometry, shape)
    return [
        *_stream_terms(config, geometry, shape),
        Term("attention kept", attention["gpu"], "gpu", "its output where it does not wait on the host; log-sum-exps"),
        *_layer_terms(config, kernels, geometry, shape),
        *_loss_terms(config, geometry, shape),
        *_host_terms(config, geometry, shape, attention["host"]),
    ]


def _stream_terms(config: Config, geometry: Geometry, shape: Shape) -> list[Term]:
    """The hidden states between layers: those that are kept as inputs, and those that backward passes on."""
    one = tensor_bytes(shape.positions, geometry.hidden, itemsize=ITEMSIZE[config.model.dtype])
    away = offloaded_layers(config.memory.offload, geometry.layers)
    middles = _middles(config, geometry)
    staying = geometry.layers - away + middles["gpu"]
    # Backward has what it needs and what it needs next, where these come back from the host.
    inputs = max(staying, 2 if away else 0)
    more = "middles and " * any(middles.values()) + "copies under way included"
    stream = 1 if tile_rows(config) else 3
    passing = "gradients that pass through a layer" + ", and its output" * (stream > 1)
    return [
        Term("layer inputs", inputs * one, "gpu", f"{inputs} x {one:,} B, {more}"),
        Term("residual stream", stream * one, "gpu", passing),
    ]


def _layer_terms(config: Config, kernels: Kernels, geometry: Geometry, shape: Shape) -> list[Term]:
    """What layers keep for their backward, of the largest alone where they are recomputed, and what it makes."""
    inside = [LayerBytes.of(config, kernels, geometry, layer, shape) for layer in range(geometry.layers)]
    largest = max(inside, key=LayerBytes.total)
    if config.memory.recompute:
        what = f"layer {largest.layer}, {geometry.layer_types[largest.layer]}"
        kept = Term("one layer recomputed", largest.kept, "gpu", what, "layer")
    else:
        everything = sum(found.kept for found in inside)
        kept = Term(
            "all layers' tensors", everything, "gpu", f"{counted(geometry.layers, 'layer')}, nothing recomputed"
        )
    return [kept, Term("gradients in the layer", largest.made, "gpu", largest.what, "layer")]


def _loss_terms(config: Config, geometry: Geometry, shape: Shape) -> list[Term]:
    """Logits of the rows and words that are computed at a time, and the gradient of a head that is trained."""
    rows = min(shape.rows, config.train.loss_chunk_rows)
    words = min(config.train.loss_chunk_words or geometry.vocabulary, geometry.vocabulary)
    # Kernels of `logits` take whole rows on a GPU; the streaming engine has the head in tiles, be it in one.
    in_place = words == geometry.vocabulary and config.engine != "stream" and config.slurm.gpus_per_node > 0
    itemsize = ITEMSIZE[config.model.dtype]
    logits = tensor_bytes(rows, words, itemsize=itemsize if in_place else 8)
    head = 0 if adapted(config) else tensor_bytes(geometry.vocabulary, geometry.hidden, itemsize=4)
    how = f"{itemsize} B (their gradient takes their place)" if in_place else "8 B (float32, and a temporary of it)"
    what = f"{rows:,} rows x {words:,} x {how}"
    return [
        Term("logits of a chunk", logits, "gpu", what, "loss"),
        Term("gradient of the head", head, "gpu", "float32, unsharded, where the head is trained"),
    ]


def _host_terms(config: Config, geometry: Geometry, shape: Shape, attention: int) -> list[Term]:
    """What waits in pinned memory of a node: inputs of layers, and `attention` bytes of each rank."""
    ranks = 1 if config.cluster == "debug" else config.slurm.tasks_per_node
    away, middles = offloaded_layers(config.memory.offload, geometry.layers), _middles(config, geometry)["host"]
    most, itemsize = max(config.pack.max_positions, shape.positions), ITEMSIZE[config.model.dtype]
    each = counted(ranks, "rank")
    return [
        Term(
            "offloaded layer inputs",
            pinned_bytes(away, most, geometry.hidden, ranks, itemsize),
            "host",
            f"{each} x {counted(away, 'layer')} of pack.max_positions, in chunks of {PINNED_CHUNK >> 20} MiB",
        ),
        Term(
            "offloaded middles",
            pinned_bytes(middles, most, geometry.hidden, ranks, itemsize),
            "host",
            f"{each} x {middles} of these layers, which keep their middle",
        ),
        Term(
            "offloaded attention",
            ranks * attention,
            "host",
            f"{each}, output of attention in layers that keep it, of pack.max_positions",
        ),
    ]


def _middles(config: Config, geometry: Geometry) -> dict[str, int]:
    """How many layers' middles wait where."""
    away = offloaded_layers(config.memory.offload, geometry.layers)
    kept = [layer for layer in range(geometry.layers) if keeps_middle(config, geometry.layers, layer)]
    waiting = sum(layer < away for layer in kept)
    return {"gpu": len(kept) - waiting, "host": waiting}


def _kept_attention(config: Config, kernels: Kernels, geometry: Geometry, shape: Shape) -> dict[str, int]:
    """Bytes of `memory.keep_attention`, where they wait; of a layer that stays the recomputed tensors count its own."""
    if kernels.attention not in KEEPING:
        return {"gpu": 0, "host": 0}
    layers = [layer for layer, kind in enumerate(geometry.layer_types) if kind == "full_attention"]
    kept = layers[len(layers) - kept_layers(config.memory.keep_attention, len(layers)) :]
    away = offloaded_layers(config.memory.offload, geometry.layers)
    itemsize, most = ITEMSIZE[config.model.dtype], max(config.pack.max_positions, shape.positions)
    waiting = sum(layer < away for layer in kept)
    statistics = tensor_bytes(shape.positions, int(geometry.text["num_attention_heads"]), itemsize=4)
    output = tensor_bytes(shape.positions, geometry.query_width, itemsize=itemsize)
    here = len(kept) * statistics + max(0, len(kept) - waiting - 1) * output
    return {"gpu": here, "host": waiting * pinned_bytes(1, most, geometry.query_width, itemsize=itemsize)}


def offloaded_layers(offload: str, layers: int) -> int:
    """How many layers' inputs wait in pinned memory under `memory.offload`: never the last one's, with which backward
    begins."""
    if offload == "none":
        return 0
    return layers - 1 if offload == "auto" else min(int(offload), layers - 1)


def summary(budget: Budget) -> dict[str, Any]:
    """A budget as JSON has it; bytes are bytes."""
    return {
        "shape": asdict(budget.shape),
        "kernels": budget.kernels._asdict(),
        "parameters": budget.geometry.parameters,
        "terms": [asdict(term) for term in budget.terms],
        "gpu_bytes": budget.total("gpu"),
        "host_bytes_per_node": budget.total("host"),
        "model_flops": budget.model_flops,
        "hardware_flops": budget.hardware_flops,
    }


def describe(budget: Budget, each: Literal["GPU", "rank"] = "GPU") -> str:
    """A budget as a table. each: what has a device's memory; a rank, where that is the machine's."""
    shape = budget.shape
    lines = [
        f"a pack of {counted(shape.positions, 'position')}: {counted(shape.segments, 'segment')}, {shape.pairs:.3g} "
        f"visible pairs, {counted(shape.rows, 'prediction row')}",
        f"model FLOPs {budget.model_flops:.4g}, with recomputation {budget.hardware_flops:.4g}",
        f"kernels on {budget.machine}: {budget.kernels}",
    ]
    for place, title in (("gpu", f"at most on each {each}"), ("host", "pinned on each node")):
        unit, size = unit_of(budget.total(place))  # type: ignore[arg-type]
        lines.append(f"{budget.total(place) / size:10.3f} {unit} {title}")  # type: ignore[arg-type]
        lines += [
            f"{term.bytes / size:14.3f} {term.name:<24}{term.formula}{WHEN[term.when]}"
            for term in budget.terms
            if term.place == place
        ]
    return "\n".join(lines)


def unit_of(most: int) -> tuple[str, int]:
    """The unit in which a table up to `most` bytes is read, and its bytes: MiB for what is small in GiB, none for 0."""
    return ("MiB", 1 << 20) if 0 < most < GIB else ("GiB", GIB)


def amount(size: int) -> str:
    """So many bytes as text."""
    unit, one = unit_of(size)
    return f"{size / one:.4g} {unit}"
