"""A model's sizes, read from its transformers configuration without loading transformers or torch.

Parameters and FLOPs follow from them. A position is one token in the buffer, a pair one (query, key) that attention
computes. Multiplication and addition count as two FLOPs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from configs.errors import UserError
from configs.modelpath import is_gguf, locate
from configs.schema import ModelConfig
from prefix_train import gguf_config, sizes
from prefix_train.sizes import DEFAULTS, WITH_VISION, Sizes

BUILT_VOCABULARY = 1024
"""Tokens of the tokenizer that a model of `model.build` gets, where it names no other number."""

GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Whose attention gates its output: `q_proj` makes a gate beside the query."""

BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj")}
"""Whose attention has biases, whatever the configuration says."""

WITHOUT_NORMS = ("llama", "mistral", "mixtral", "smollm3", "qwen2")
"""Whose attention does not normalise queries and keys."""

WHOLE_NORMS = ("olmo2", "olmo3", "olmo_hybrid")
"""Whose attention normalises all heads together."""

NO_TARGETS = {"qwen3_next": ("gate_proj", "up_proj", "down_proj")}
"""Modules whose names PEFT takes for parts of fused experts, so that no adapter can be on them."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model. text, vision: its configurations, defaults filled in; vision is None for a text model."""

    model_type: str
    text: Sizes
    vision: Sizes | None
    layer_types: tuple[str, ...]
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Geometry:
        """From a transformers configuration (`config.json`, or `model.build`). UserError names what is not known."""
        given = str(config.get("model_type"))
        text: Mapping[str, Any] = config
        model_type, vision = given, None
        if given in WITH_VISION:
            text = config.get("text_config") or {}
            model_type, vision = WITH_VISION[given], sizes.vision(given, config.get("vision_config") or {})
        if model_type not in DEFAULTS:
            known = ", ".join(sorted({*DEFAULTS, *WITH_VISION}))
            raise UserError(f"model_type {given!r}: its sizes are not known; known are {known}")
        filled = sizes.fill(model_type, text)
        tied = config.get("tie_word_embeddings", False) if vision else filled.get("tie_word_embeddings", False)
        return cls(model_type, filled, vision, sizes.layer_types(model_type, filled), bool(tied))

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_types)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.text["hidden_size"])

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding and of the head."""
        return int(self.text["vocab_size"])

    @property
    def query_width(self) -> int:
        """All query heads together."""
        return int(self.text["num_attention_heads"] * self.text["head_dim"])

    @property
    def key_width(self) -> int:
        """All key (or value) heads of attention together."""
        return int(self.text["num_key_value_heads"] * self.text["head_dim"])

    @property
    def linear_key_width(self) -> int:
        """All key heads of Gated DeltaNet together."""
        return int(self.text["linear_num_key_heads"] * self.text["linear_key_head_dim"])

    @property
    def linear_value_width(self) -> int:
        """All value heads of Gated DeltaNet together."""
        return int(self.text["linear_num_value_heads"] * self.text["linear_value_head_dim"])

    @property
    def state_elements(self) -> int:
        """One recurrent state of Gated DeltaNet: value heads x K x V."""
        return self.linear_value_width * int(self.text["linear_key_head_dim"])

    @property
    def gated(self) -> bool:
        """Does attention's `q_proj` make a gate beside the query?"""
        return self.model_type in GATED

    def count(self, layer_type: str) -> int:
        """Layers of a type."""
        return self.layer_types.count(layer_type)

    def sparse(self, layer: int) -> bool:
        """Has this layer experts?"""
        step = self.text.get("decoder_sparse_step", 1)
        dense = layer in (self.text.get("mlp_only_layers") or ())
        return bool(self.text.get("num_experts")) and not dense and (layer + 1) % step == 0

    def mlp_width(self, layer: int) -> int:
        """Intermediate width of the feed-forward block (of the shared expert, where there are experts; 0: none)."""
        if self.sparse(layer):
            return int(self.text.get("shared_expert_intermediate_size", 0))
        return int(self.text["intermediate_size"])

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a layer's linear modules by name."""
        h, width = self.hidden, self.mlp_width(layer)
        found = {"gate_proj": (h, width), "up_proj": (h, width), "down_proj": (width, h)} if width else {}
        if width and self.sparse(layer):
            found["shared_expert_gate"] = (h, 1)
        if self.layer_types[layer] == "full_attention":
            query, key = self.query_width, self.key_width
            found |= {"q_proj": (h, query * (2 if self.gated else 1)), "k_proj": (h, key), "v_proj": (h, key)}
            return found | {"o_proj": (query, h)}
        return found | self._recurrent_linears()

    def _recurrent_linears(self) -> dict[str, tuple[int, int]]:
        h, heads = self.hidden, int(self.text["linear_num_value_heads"])
        key, value = self.linear_key_width, self.linear_value_width
        if self.model_type == "olmo_hybrid":
            found = {"q_proj": (h, key), "k_proj": (h, key), "v_proj": (h, value), "g_proj": (h, value)}
            return found | {"a_proj": (h, heads), "b_proj": (h, heads), "o_proj": (value, h)}
        if self.model_type == "qwen3_next":
            found = {"in_proj_qkvz": (h, 2 * key + 2 * value), "in_proj_ba": (h, 2 * heads)}
        else:
            found = {"in_proj_qkv": (h, 2 * key + value), "in_proj_z": (h, value)}
            found |= {"in_proj_b": (h, heads), "in_proj_a": (h, heads)}
        return found | {"out_proj": (value, h)}

    def experts(self, layer: int) -> tuple[int, int, int]:
        """(parameters of one expert, experts, experts per token) of a layer; zeros where it has none."""
        if not self.sparse(layer):
            return 0, 0, 0
        one = 3 * self.hidden * int(self.text["moe_intermediate_size"])
        return one, int(self.text["num_experts"]), int(self.text["num_experts_per_tok"])

    def layer_parameters(self, layer: int) -> int:
        """All parameters of one decoder layer."""
        linears = self.linears(layer)
        total = sum(inputs * outputs for inputs, outputs in linears.values()) + 2 * self.hidden
        one, experts, _ = self.experts(layer)
        total += experts * (one + self.hidden)
        if self.text.get("mlp_bias"):
            total += sum(linears[name][1] for name in ("gate_proj", "up_proj", "down_proj"))
        if self.layer_types[layer] == "full_attention":
            every = ("q_proj", "k_proj", "v_proj", "o_proj") if self.text.get("attention_bias") else ()
            total += sum(linears[name][1] for name in BIASED.get(self.model_type, every))
            return total + self._norm_parameters()
        channels = 2 * self.linear_key_width + self.linear_value_width
        total += channels * int(self.text["linear_conv_kernel_dim"])
        return total + 2 * int(self.text["linear_num_value_heads"]) + int(self.text["linear_value_head_dim"])

    def _norm_parameters(self) -> int:
        """Of the norms of queries and keys in one attention."""
        if self.model_type in WITHOUT_NORMS:
            return 0
        return self.query_width + self.key_width if self.model_type in WHOLE_NORMS else 2 * int(self.text["head_dim"])

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Parameters by part: embedding, layers (with the last norm), head (0 if tied), vision, merger."""
        embedding = self.vocabulary * self.hidden
        layers = sum(self.layer_parameters(layer) for layer in range(self.layers)) + self.hidden
        vision, merger = _vision_parameters(self.vision) if self.vision else (0, 0)
        head = 0 if self.tied else embedding
        return {"embedding": embedding, "layers": layers, "head": head, "vision": vision, "merger": merger}

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Names that `adapter.targets` may hold, sorted."""
        names = {name for layer in range(self.layers) for name in self.linears(layer)}
        return tuple(sorted(names.difference(NO_TARGETS.get(self.model_type, ()))))

    def adapter_shapes(self, rank: int, targets: list[str]) -> list[tuple[int, int]]:
        """(rows, columns) of every tensor of LoRA adapters of this rank on the named modules.

        Raises UserError where no layer has such a module.
        """
        names = {name for layer in range(self.layers) for name in self.linears(layer)}
        if unknown := sorted(set(targets) - names):
            raise UserError(f"adapter.targets: no layer has {', '.join(unknown)}; there are {', '.join(sorted(names))}")
        return [
            shape
            for layer in range(self.layers)
            for name, (inputs, outputs) in self.linears(layer).items()
            if name in targets
            for shape in ((rank, inputs), (outputs, rank))
        ]

    def adapter_parameters(self, rank: int, targets: list[str]) -> int:
        """Parameters of LoRA adapters of this rank on the named modules."""
        return sum(map(prod, self.adapter_shapes(rank, targets)))

    @cached_property
    def merger_shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of every tensor of the vision tower's merger; none for a text model."""
        return _merger_shapes(self.vision) if self.vision else []

    @cached_property
    def product_flops(self) -> int:
        """Forward FLOPs of one position in all layers' products with weights (of experts, the chosen ones)."""
        weights = 0
        for layer in range(self.layers):
            one, experts, chosen = self.experts(layer)
            weights += sum(inputs * outputs for inputs, outputs in self.linears(layer).values())
            weights += chosen * one + experts * self.hidden
        return 2 * weights

    @cached_property
    def recurrence_flops(self) -> int:
        """Forward FLOPs of one position in Gated DeltaNet's recurrence: 6 per element of each layer's state, for
        reading it with the key, adding the update and reading it with the query."""
        linear = self.count("linear_attention")
        return 6 * linear * self.state_elements if linear else 0

    @cached_property
    def pair_flops(self) -> int:
        """Forward FLOPs of one visible pair in all attention layers: query x key, weight x value."""
        return 4 * self.query_width * self.count("full_attention")

    @cached_property
    def row_flops(self) -> int:
        """Forward FLOPs of one row through the head."""
        return 2 * self.hidden * self.vocabulary


def read_config(model: ModelConfig) -> dict[str, Any]:
    """The transformers configuration that `model.path` or `model.build` gives, with a built model's vocabulary."""
    if model.path is None:
        config = dict(model.build)
        if config.get("model_type") in WITH_VISION:
            config["text_config"] = {"vocab_size": BUILT_VOCABULARY} | dict(config.get("text_config") or {})
            return config
        return {"vocab_size": BUILT_VOCABULARY} | config
    place = locate(model.path)
    if not place.exists():
        raise UserError(f"model.path: {place} does not exist; write model.path=PATH, a model in transformers' format")
    if is_gguf(place):
        return gguf_config.read_config(place)
    path = place / "config.json"
    if not path.is_file():
        raise UserError(f"model.path: {place} is no model: a folder with config.json is expected, or a GGUF file")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"model.path: {path} holds no JSON object")
    return config


def _vision_parameters(vision: Sizes) -> tuple[int, int]:
    """Parameters of the vision tower without its merger, and of the merger."""
    h, wide, depth = int(vision["hidden_size"]), int(vision["intermediate_size"]), int(vision["depth"])
    patch = _product(vision["patch_size"], 2) * _product(vision["temporal_patch_size"], 1) * int(vision["in_channels"])
    block = 4 * h + (h * 3 * h + 3 * h) + (h * h + h) + (h * wide + wide) + (wide * h + h)
    tower = patch * h + h + int(vision["num_position_embeddings"]) * h + depth * block
    return tower, sum(map(prod, _merger_shapes(vision)))


def _merger_shapes(vision: Sizes) -> list[tuple[int, int]]:
    """A norm and two linear modules, each with weight and bias; the same, but a wider norm, for each deeper merger."""
    h, out = int(vision["hidden_size"]), int(vision["out_hidden_size"])
    merged = h * int(vision["spatial_merge_size"]) ** 2
    linears = [(merged, merged), (merged, 1), (out, merged), (out, 1)]
    deeper = [(merged, 1), (merged, 1), *linears] * len(vision["deepstack_visual_indexes"])
    return [(h, 1), (h, 1), *linears, *deeper]


def _product(size: int | list[int], dimensions: int) -> int:
    """Elements of a size that is given once for all dimensions, or for each."""
    return prod([size] * dimensions if isinstance(size, int) else size)
