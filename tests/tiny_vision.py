"""The demonstration's processor with a smaller vision-language model, for tests that need real images and templates."""

from __future__ import annotations

from typing import Any

BUILD: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
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
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    },
}
"""3 Gated DeltaNet layers and 1 attention layer."""
