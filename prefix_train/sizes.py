"""What transformers' configuration classes assume where a configuration says nothing, for every family. No torch.

`fill` makes of a language model's configuration one that says everything, under the same names for all families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.errors import UserError
from configs.wording import counted

Sizes = dict[str, Any]

_LINEAR: Sizes = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LINEAR_OF_OLMO: Sizes = dict.fromkeys(_LINEAR) | {"linear_conv_kernel_dim": 4}
_PLAIN: Sizes = {"num_hidden_layers": 32, "attention_bias": False, "tie_word_embeddings": False}
_NO_BIAS: Sizes = {"num_hidden_layers": 32, "tie_word_embeddings": False}
_SPARSE: Sizes = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_MISTRAL: Sizes = (
    _NO_BIAS
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": None}
)
_OLMO: Sizes = _PLAIN | {
    **{"vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    **{"num_key_value_heads": None},
}

DEFAULTS: dict[str, Sizes] = {
    "llama": _PLAIN
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    | {"num_key_value_heads": None, "head_dim": None, "mlp_bias": False},
    "mistral": _MISTRAL | {"sliding_window": 4096},
    "mixtral": _MISTRAL | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "smollm3": _PLAIN
    | {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "mlp_bias": False, "tie_word_embeddings": True},
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"sliding_window": 4096},
    "olmo_hybrid": _OLMO | _LINEAR_OF_OLMO | {"vocab_size": 100352, "hidden_size": 3840, "num_attention_heads": 30},
    "qwen2": _NO_BIAS
    | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": _PLAIN
    | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "head_dim": 128}
    | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": _PLAIN
    | _SPARSE
    | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768, "use_sliding_window": False, "sliding_window": 4096},
    "qwen3_vl_text": {"num_hidden_layers": 32, "attention_bias": False}
    | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_moe_text": _PLAIN
    | _SPARSE
    | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None, "num_experts": 60}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "tie_word_embeddings": True},
    "qwen3_next": _PLAIN
    | _LINEAR
    | _SPARSE
    | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    | {"num_experts": 512, "num_experts_per_tok": 10}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "qwen3_5_text": _PLAIN
    | _LINEAR
    | {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_5_moe_text": _PLAIN
    | _LINEAR
    | {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
    | {"num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}

VISION: Sizes = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}

DEEPSTACK = {"qwen3_vl": (8, 16, 24), "qwen3_vl_moe": (8, 16, 24)}
"""Blocks of the tower whose output goes, through mergers of their own, to the first decoder layers."""

WITH_VISION = {
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models that hold a language model as `text_config` and a vision tower as `vision_config`."""

WINDOW_OF_CONFIG = ("mistral", "mixtral")
"""Every layer has the configuration's sliding window, where that has one."""

OPTIONAL = ("mlp_only_layers", "sliding_window", "use_sliding_window")
"""Numbers and lists that a family may do without."""


def vision(model_type: str, given: Mapping[str, Any]) -> Sizes:
    """A vision tower's configuration that says everything."""
    return VISION | {"deepstack_visual_indexes": DEEPSTACK.get(model_type, ())} | dict(given)


def fill(model_type: str, text: Mapping[str, Any]) -> Sizes:
    """`text`, a language model's configuration, with everything that it leaves out. UserError for what is no number."""
    sizes = DEFAULTS[model_type] | {key: value for key, value in text.items() if value is not None}
    if text.get("sliding_window", 0) is None:
        sizes["sliding_window"] = None
    _require_numbers(sizes, DEFAULTS[model_type])
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    sizes["head_dim"] = sizes.get("head_dim") or sizes["hidden_size"] // heads
    if "num_local_experts" in sizes:
        sizes["num_experts"] = sizes["num_local_experts"]
    if model_type == "mixtral":
        sizes["moe_intermediate_size"] = sizes["intermediate_size"]
    if model_type == "olmo_hybrid":
        for count in ("linear_num_key_heads", "linear_num_value_heads"):
            sizes[count] = sizes[count] or heads
        key = sizes["linear_key_head_dim"] or int(0.75 * sizes["hidden_size"] / sizes["linear_num_key_heads"])
        sizes |= {"linear_key_head_dim": key, "linear_value_head_dim": sizes["linear_value_head_dim"] or 2 * key}
    return sizes


def layer_types(model_type: str, sizes: Sizes) -> tuple[str, ...]:
    """Kinds of token mixers, layer by layer. UserError for one that is not understood, a sliding window among them."""
    layers = int(sizes["num_hidden_layers"])
    types = sizes.get("layer_types") or _default_types(model_type, sizes, layers)
    for layer, name in enumerate(types):
        if name not in ("full_attention", "linear_attention"):
            raise UserError(f"layer_types[{layer}] is {name!r}: full_attention and linear_attention are understood")
    if len(types) != layers:
        raise UserError(f"layer_types names {counted(len(types), 'layer')}, the model has {layers}")
    if model_type in WINDOW_OF_CONFIG and (window := sizes["sliding_window"]) is not None:
        raise UserError(
            f"sliding_window is {window}: a sliding window is not exact over a tree; for a model that does without "
            "one, config.json says sliding_window: null"
        )
    return tuple(types)


def _default_types(model_type: str, sizes: Sizes, layers: int) -> list[str]:
    if model_type == "olmo3":
        return ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(layers)]
    if model_type == "olmo_hybrid":
        types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
        return types if "full_attention" in types else [*types[:-1], "full_attention"]
    if sizes.get("use_sliding_window") and sizes.get("sliding_window") and model_type.startswith("qwen"):
        first = int(sizes.get("max_window_layers") or 0)
        return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    every = int(sizes.get("full_attention_interval") or 4) if "linear_key_head_dim" in sizes else 1
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _require_numbers(sizes: Sizes, like: Sizes) -> None:
    """Raise UserError where a size that is a number by default, or has none, is something else."""
    for key, default in like.items():
        number = default is None or (isinstance(default, int) and not isinstance(default, bool))
        if number and key not in OPTIONAL and not (sizes[key] is None or type(sizes[key]) is int):
            raise UserError(f"{key} is {sizes[key]!r}: a whole number is expected")
