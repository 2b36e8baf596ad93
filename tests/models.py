"""Tiny models of every family, with weights under which no gradient vanishes and a leak would show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
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
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
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
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
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


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_SHARED, num_hidden_layers=2))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_SHARED, num_hidden_layers=2))


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
    "qwen3": _qwen3,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe_text,
    "qwen3_5_moe": _qwen3_5_moe,
}
WITH_VISION = ("qwen3_5", "qwen3_5_moe")


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A tiny model in training mode, with eager experts.

    Matrices have a standard deviation of 0.2, embeddings of 1 (else the first norm magnifies float32's rounding), and
    states decay slowly, by exp(-0.05 softplus(.)).
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[family]()
        draw(model)
    return model.to(dtype).train()


def draw(model: PreTrainedModel) -> None:
    """Draw the model's weights from the running generator; its experts become eager."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter)
    if hasattr(model.get_decoder().config, "num_experts"):
        model.set_experts_implementation("eager")


def _draw(name: str, parameter: torch.nn.Parameter) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(0.03, 0.08).log_()
    elif name.endswith("dt_bias"):
        parameter.uniform_(0.0, 1.0)
    elif parameter.ndim == 1 and parameter.mean() == 1:
        parameter.normal_(1.0, 0.2)
    else:
        parameter.normal_(0.0, 1.0 if "embed" in name and parameter.ndim == 2 else 0.2)
