"""Tiny models of every family, with weights under which no gradient vanishes and a leak would show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCABULARY = 97
IMAGE, VIDEO, VISION_START, VISION_END = 90, 91, 92, 93
PATCH = 4
"""Side of a vision patch in pixels; 2 x 2 patches make a token, and a patch holds 2 frames of 3 channels."""

PATCH_VALUES = 3 * 2 * PATCH * PATCH

_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HYBRID = {
    **_SHARED,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS = {**_ROUTED, "shared_expert_intermediate_size": 16}
_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


_PLAIN = {**_SHARED, "num_hidden_layers": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_DEEP_VISION = {**_VISION, "deepstack_visual_indexes": [0, 1]}


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_PLAIN))


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_PLAIN, sliding_window=None))


def _mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**_PLAIN, sliding_window=None, num_local_experts=4, num_experts_per_tok=2))


def _smollm3() -> PreTrainedModel:
    return SmolLM3ForCausalLM(SmolLM3Config(**_PLAIN, no_rope_layers=[1, 0]))


def _olmo2() -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**_PLAIN))


def _olmo3() -> PreTrainedModel:
    return Olmo3ForCausalLM(Olmo3Config(**_PLAIN, layer_types=["full_attention"] * 2))


def _olmo_hybrid() -> PreTrainedModel:
    values = {key: value for key, value in _HYBRID.items() if key != "rope_parameters"}
    return OlmoHybridForCausalLM(OlmoHybridConfig(**values))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_PLAIN))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_PLAIN))


def _qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_PLAIN, **_ROUTED, norm_topk_prob=True))


def _qwen3_vl() -> PreTrainedModel:
    text = {**_SHARED, "num_hidden_layers": 3, "rope_parameters": _MROPE}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=_DEEP_VISION, **_MARKS))


def _qwen3_vl_moe() -> PreTrainedModel:
    text = {**_SHARED, **_ROUTED, "num_hidden_layers": 3, "rope_parameters": _MROPE, "mlp_only_layers": [0]}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=_DEEP_VISION, **_MARKS))


def _qwen3_next() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**_HYBRID, **_EXPERTS, "rope_parameters": rope}))


def _qwen3_5_text() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_HYBRID))


def _qwen3_5() -> PreTrainedModel:
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=_HYBRID, vision_config=_VISION, **_MARKS))


def _qwen3_5_moe_text() -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_moe_text()))


def _qwen3_5_moe() -> PreTrainedModel:
    return Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=_moe_text(), vision_config=_VISION, **_MARKS)
    )


def _moe_text() -> dict[str, Any]:
    return {**{name: value for name, value in _HYBRID.items() if name != "intermediate_size"}, **_EXPERTS}


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmo_hybrid": _olmo_hybrid,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe_text,
    "qwen3_5_moe": _qwen3_5_moe,
}
WITHOUT_GATE = ("mixtral", "qwen3_moe", "qwen3_next")
"""Where no linear module is called gate_proj, or PEFT takes the name for a part of the experts."""

WITH_VISION = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model in training mode, with eager experts. changes: of its configuration.

    Matrices have a standard deviation of 0.2, embeddings of 1 (else the first norm magnifies float32's rounding), and
    states decay slowly, by exp(-0.05 softplus(.)).
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[family]()
        if changes:
            model = type(model)(type(model.config)(**(model.config.to_dict() | changes)))
        draw(model)
    return model.to(dtype).train()


def draw(model: PreTrainedModel) -> None:
    """Draw the model's weights from the running generator; its experts become eager."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter)
    if has_experts(model):
        model.set_experts_implementation("eager")


def has_experts(model: PreTrainedModel) -> bool:
    """Are there experts that a router chooses from?"""
    return bool(getattr(model.get_decoder().config, "num_experts_per_tok", 0))


def _draw(name: str, parameter: torch.nn.Parameter) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(0.03, 0.08).log_()
    elif name.endswith("dt_bias"):
        parameter.uniform_(0.0, 1.0)
    elif parameter.ndim == 1 and parameter.mean() == 1:
        parameter.normal_(1.0, 0.2)
    else:
        parameter.normal_(0.0, 1.0 if "embed" in name and parameter.ndim == 2 else 0.2)
