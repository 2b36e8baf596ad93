"""Bytes of one decoder layer, part by part: what its forward keeps, and what its backward makes beside it. No torch.

Every formula names the tensors of the CUDA kernels that packs run through: flash-linear-attention's delta rule, merged
attention, and what `tiles` and `frozen` leave of norms, adapters and the feed-forward. Where plain torch computes the
recurrence, or a gated activation, that is what counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs.rules import COUNTED_RANK
from configs.schema import AdapterConfig, Config
from prefix_train.geometry import Geometry
from prefix_train.kernel_choice import Kernels
from prefix_train.recurrence_bytes import Reference
from prefix_train.shape import DELTA_CHUNK, Shape

GATHERED_STATES = 512 << 20
"""Most bytes of initial states that one group of segments gathers."""

HEADS_BYTES = 256 << 20
"""Most bytes that merged attention's backward makes at a time for its pieces, where it can take fewer heads."""

OTHER_INPUTS = ("out_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate")
"""Linear modules that do not read what a recurrent mixer is given."""

FEED_FORWARD = ("gate_proj", "up_proj", "down_proj", "shared_expert_gate")
"""Linear modules of a feed-forward; all others are the token mixer's."""

ITEMSIZE = {"bfloat16": 2, "float32": 4}


def tensor_bytes(*sizes: int, itemsize: int = 2) -> int:
    """A tensor of these sizes: a hidden state is (T, hidden), a dropout mask has itemsize 1, logits (rows, vocab)."""
    total = itemsize
    for size in sizes:
        total *= size
    return total


def mixer_bytes(geometry: Geometry, layer_type: str, shape: Shape, itemsize: int = 2) -> int:
    """What one layer's token mixer keeps for its backward, its norm included, computed operation by operation."""
    if layer_type == "full_attention":
        gates = 2 if geometry.gated else 0
        width = 2 * geometry.hidden + (3 + gates) * geometry.query_width + 3 * geometry.key_width
        statistics = 4 * int(geometry.text["num_attention_heads"])
        return shape.positions * (width * itemsize + statistics)
    heads = int(geometry.text["linear_num_value_heads"])
    mixed = 2 * geometry.linear_key_width + geometry.linear_value_width
    # The convolution's input; query and key; value, output, normed output and gate; a chunk's inverse of each head.
    width = mixed + 2 * geometry.linear_key_width + 4 * geometry.linear_value_width + heads * DELTA_CHUNK
    hidden, gates = 2 * geometry.hidden, 2 * 4 * heads
    return shape.positions * ((hidden + width) * itemsize + gates) + state_bytes(geometry, shape)


def pieces_bytes(heads: tuple[int, int], size: int, positions: int, piece: int, single: bool, itemsize: int = 2) -> int:
    """What merged attention's backward makes for all its heads at once.

    Tensors of the largest piece: copies of keys and values for each query head, gradients of all three, and the
    kernel's own float32 sums of the query's, with two statistics of each row. Where there are several pieces, float32
    sums of what they give. heads: of queries, and of keys. size: of a head. piece: see `Shape`.
    """
    queries, keys = heads
    sums = 0 if single else 4 * positions * (queries + 2 * keys) * size
    return piece * queries * size * itemsize + 2 * 4 * positions * queries + sums


def head_groups(heads: tuple[int, int], size: int, positions: int, piece: int, single: bool, itemsize: int = 2) -> int:
    """In how many groups of heads, each computed after the other, merged attention goes forward and backward: as few as
    keep `pieces_bytes` of one within HEADS_BYTES, a head of keys in each if need be."""
    total = pieces_bytes(heads, size, positions, piece, single, itemsize)
    return next(
        count
        for count in range(1, heads[1] + 1)
        if not heads[1] % count and (total <= count * HEADS_BYTES or count == heads[1])
    )


def state_bytes(geometry: Geometry, shape: Shape) -> int:
    """Recurrent states that one Gated DeltaNet layer keeps, float32: those that segments with children hand on, and
    those that one group of segments starts from."""
    one = 4 * geometry.state_elements
    return shape.inner * one + min(shape.segments * one, max(GATHERED_STATES, one))


def feed_forward_bytes(geometry: Geometry, layer: int, positions: int, itemsize: int = 2) -> int:
    """What one feed-forward block keeps for its backward, its norm included: gate, up and their product."""
    width = 2 * geometry.hidden + 3 * geometry.mlp_width(layer)
    if geometry.sparse(layer):
        _, experts, chosen = geometry.experts(layer)
        width += experts + chosen * (3 * int(geometry.text["moe_intermediate_size"]) + geometry.hidden)
    return tensor_bytes(positions, width, itemsize=itemsize)


def feed_forward_gradient_bytes(geometry: Geometry, layer: int, positions: int, itemsize: int = 2) -> int:
    """Gradients that one feed-forward block's backward makes before it lets go of what it kept: product, gate, up."""
    width = 3 * geometry.mlp_width(layer)
    if geometry.sparse(layer):
        width += 3 * geometry.experts(layer)[2] * int(geometry.text["moe_intermediate_size"])
    return tensor_bytes(positions, width, itemsize=itemsize)


def feed_forward_tile_bytes(
    geometry: Geometry, layer: int, positions: int, adapter: AdapterConfig, fused: bool, masks: bool, itemsize: int = 2
) -> int:
    """What the backward of a tile of a gated feed-forward with frozen weights makes: gate, up, their product, which an
    adapter of the last linear module alone needs, its gradient; and, where the activation is not one kernel (`fused`)
    that writes over what it reads, both gradients and a temporary.

    masks: an adapter's dropout has a mask written out, and its input multiplied by it: one module's at a time, the last
    one's before there are these gradients, the others' when the temporary is gone."""
    inner = geometry.mlp_width(layer)
    tensors = 4 - ("down_proj" not in adapter.targets)
    moments = [(tensors + 3 * (not fused)) * inner]
    if masks and "down_proj" in adapter.targets:
        moments.append((tensors + 2) * inner)
    if masks and {"gate_proj", "up_proj"} & set(adapter.targets):
        moments.append((tensors + 2 * (not fused)) * inner + 2 * geometry.hidden)
    return tensor_bytes(positions, max(moments), itemsize=itemsize)


def mixer_gradient_bytes(
    geometry: Geometry, layer_type: str, shape: Shape, itemsize: int = 2, joined: bool = False
) -> int:
    """What the backward of one layer's token mixer makes beside what it kept, less what it has let go of by then.

    joined: attention's heads are not parted in groups, and gradients of queries wait for those of the last piece.
    Attention: the gradients of what came in, but for a group of heads made before their pieces' tensors
    (`pieces_bytes`); without a gate the output's, for it is kept; the residual sum's. Gated DeltaNet, whose backward
    computes a depth's tensors again: nine as wide as the values (what its chunks are condensed to, and gradients), and
    two states per chunk; of output, normed output and gate, gone by then, two have a gradient.
    """
    if layer_type == "full_attention":
        size = int(geometry.text["head_dim"])
        heads, positions = (geometry.query_width // size, geometry.key_width // size), shape.positions
        single, own = shape.segments == 1, positions * geometry.query_width * (not geometry.gated) * itemsize
        if joined:
            wider = 0 if single else 4 * positions * 2 * geometry.key_width
            return shape.joined * geometry.query_width * itemsize + 2 * 4 * positions * heads[0] + wider + own
        given = (heads, size, positions, shape.piece, single, itemsize)
        groups = head_groups(*given)
        width = (geometry.query_width + 2 * geometry.key_width) * (groups > 1)
        return pieces_bytes(*given) // groups + positions * width * itemsize + own
    states = 2 * shape.level_chunks * geometry.state_elements
    return ((9 * shape.level - shape.positions) * geometry.linear_value_width + states) * itemsize


@dataclass(frozen=True)
class LayerBytes:
    """One decoder layer at the worst moment of its backward. kept: what its forward left. made: gradients beside it.
    lull: bytes less than that while the feed-forward's products are computed."""

    layer: int
    kept: int
    made: int
    what: str
    lull: int = 0

    @classmethod
    def of(cls, config: Config, kernels: Kernels, geometry: Geometry, layer: int, shape: Shape) -> LayerBytes:
        """The backward of the feed-forward comes first, while everything is still kept, then that of the mixer.

        With `memory.tile_rows` norms, adapters and feed-forward keep their inputs alone, which are there already. A
        layer that keeps its middle (counted with layers' inputs) has either the feed-forward's tensors or the mixer's.
        """
        itemsize, kind, positions = ITEMSIZE[config.model.dtype], geometry.layer_types[layer], shape.positions
        mixer = mixer_bytes(geometry, kind, shape, itemsize)
        block = feed_forward_bytes(geometry, layer, positions, itemsize)
        gradient = feed_forward_gradient_bytes(geometry, layer, positions, itemsize)
        of_mixer, of_block = _adapter_bytes(config, geometry, layer, positions)
        activating = 0
        one = tensor_bytes(positions, geometry.hidden, itemsize=itemsize)
        if rows := tile_rows(config):
            mixer -= one  # the norm's input is the layer's
            if kind != "full_attention" and adapted(config) and not _reads_hidden(geometry, layer, config.adapter):
                mixer -= one  # frozen products need not keep its output
            of_mixer = of_block = 0
            if not geometry.sparse(layer):
                tile = min(rows, positions)
                if adapted(config):
                    fused, masks = kernels.elementwise != "torch", writes_masks(config)
                    gradient = one + feed_forward_tile_bytes(
                        geometry, layer, tile, config.adapter, fused, masks, itemsize
                    )
                    gradient += sum(_adapter_bytes(config, geometry, layer, tile, dropout=False))
                    activating = 0 if fused else tensor_bytes(tile, geometry.mlp_width(layer), itemsize=itemsize)
                else:
                    gradient = one + feed_forward_gradient_bytes(geometry, layer, tile, itemsize)
                    gradient += feed_forward_bytes(geometry, layer, tile, itemsize)
                block = 2 * one
        mixer_gradient = mixer_gradient_bytes(geometry, kind, shape, itemsize, kernels.attention == "joined")
        if kind != "full_attention" and kernels.deltanet == "reference":
            mixer -= mixer_bytes(geometry, kind, shape, itemsize) - 2 * one
            recurrence, mixer_gradient = Reference.of(geometry, itemsize).bytes(shape)
            mixer += recurrence
        mixer, block = mixer + of_mixer, block + of_block
        if keeps_middle(config, geometry.layers, layer):
            moments = [(block - one, gradient), (mixer, mixer_gradient)]
        else:
            moments = [(mixer + block, gradient), (mixer + of_block, mixer_gradient)]
        whose = ["the feed-forward's", f"those of {kind.replace('_', ' ')}"]
        worst = max((cls(layer, *moment, what) for moment, what in zip(moments, whose, strict=True)), key=cls.total)
        multiplying = sum(moments[0]) - activating
        return replace(worst, lull=worst.total() - multiplying)

    def total(self) -> int:
        """All that the moment takes."""
        return self.kept + self.made


def _reads_hidden(geometry: Geometry, layer: int, adapter: AdapterConfig) -> bool:
    """Has a product of the layer's first norm an adapter, which needs its input in backward?"""
    return any(name in adapter.targets for name in geometry.linears(layer) if name not in OTHER_INPUTS)


def tile_rows(config: Config) -> int:
    """Positions of a tile; 0 where everything is computed whole."""
    return config.memory.tile_rows if config.memory.recompute else 0


def kept_layers(keep: str, layers: int) -> int:
    """How many of so many layers an option of `memory` that names the last ones means."""
    if keep == "none":
        return 0
    return layers if keep == "auto" else min(int(keep), layers)


def keeps_middle(config: Config, layers: int, layer: int) -> bool:
    """Does this layer, of so many, keep what lies between its mixer and its feed-forward?"""
    return layer >= layers - kept_layers(config.memory.keep_middle, layers)


def writes_masks(config: Config) -> bool:
    """Are masks of dropout written out? Those that are counted are not on a GPU, where kernels take the rank."""
    adapter = config.adapter
    in_registers = adapter.masks == "counted" and config.slurm.gpus_per_node > 0 and adapter.rank <= COUNTED_RANK
    return adapter.dropout > 0 and not in_registers


def _adapter_bytes(
    config: Config, geometry: Geometry, layer: int, positions: int, dropout: bool = True
) -> tuple[int, int]:
    """Of the mixer's adapters, and of the feed-forward's. dropout: as it is set, or none."""
    if not adapted(config):
        return 0, 0
    itemsize, targets = ITEMSIZE[config.model.dtype], config.adapter.targets
    adapter = config.adapter if dropout else replace(config.adapter, dropout=0.0)
    parts = [[name for name in targets if (name in FEED_FORWARD) == of_block] for of_block in (False, True)]
    of_mixer, of_block = (
        adapter_input_bytes(geometry, layer, positions, replace(adapter, targets=part), itemsize) for part in parts
    )
    return of_mixer, of_block


def adapter_input_bytes(
    geometry: Geometry, layer: int, positions: int, adapter: AdapterConfig, itemsize: int = 2
) -> int:
    """What one layer's adapters keep: rank-wide products and, with dropout, each input once more and its mask."""
    total = 0
    for name, (inputs, _) in geometry.linears(layer).items():
        if name in adapter.targets:
            total += tensor_bytes(positions, adapter.rank, itemsize=itemsize)
            total += tensor_bytes(positions, inputs, itemsize=itemsize + 1) if adapter.dropout else 0
    return total


def adapted(config: Config) -> bool:
    return config.train.trainable == "adapter"
