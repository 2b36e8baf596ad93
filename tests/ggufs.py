"""GGUF files of tiny models, written as llama.cpp's converter writes them: its names, and its layout of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor
from transformers import PreTrainedModel

from tests import models

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""What a family's models are called in GGUF files. (Mistral's compute what Llama's do.)"""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
HYBRID = ("qwen35", "qwen35moe")


def write(model: PreTrainedModel, architecture: str, path: Path, *more: tuple[str, Any], name: str = "tiny") -> Path:
    """`model` as a GGUF file in float32. more: keys and values of the head besides, or tensors by name."""
    writer = GGUFWriter(path, architecture)
    writer.add_name(name)
    _add_sizes(writer, model.config, architecture)
    for key, value in more:
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor, value in _tensors(model, architecture):
        writer.add_tensor(tensor, value.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = head if architecture not in HYBRID else int(head * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_token_list([f"token{index}" for index in range(models.VOCABULARY)])
    if architecture.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in HYBRID:
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    if architecture == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        block, own = "", name
        if name.startswith("model.layers."):
            index, _, own = name.removeprefix("model.layers.").partition(".")
            block = f"blk.{index}."
        if own == "mlp.experts.gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            yield f"{block}ffn_gate_exps.weight", gate
            yield f"{block}ffn_up_exps.weight", up
        elif own == "mlp.experts.down_proj":
            yield f"{block}ffn_down_exps.weight", value
        else:
            changed = _hybrid(own, value, model.config) if architecture in HYBRID else value
            if architecture == "llama" and own.endswith(("q_proj.weight", "k_proj.weight")):
                changed = _interleaved(value, model.config.head_dim)
            yield f"{block}{_name(own, architecture)}", changed


def _name(own: str, architecture: str) -> str:
    if own == "linear_attn.A_log":
        return "ssm_a"
    if own == "linear_attn.dt_bias":
        return "ssm_dt.bias"
    module, _, kind = own.rpartition(".")
    found = NAMES[module]
    if found == "ffn_norm" and architecture in HYBRID:
        found = "post_attention_norm"
    return f"{found}.{kind}"


def _interleaved(weight: Tensor, head: int) -> Tensor:
    """llama.cpp rotates neighbours, transformers halves: rows of each head change places."""
    return weight.view(-1, 2, head // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hybrid(own: str, value: Tensor, config: Any) -> Tensor:
    """Of Qwen3.5: norms around one, exp of decays, a flat convolution, value heads of all key heads in turn."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    head = config.linear_value_head_dim
    kind = own.removeprefix("linear_attn.")
    if own.endswith("norm.weight") and kind != "norm.weight":
        return value + 1
    if kind == "A_log":
        return -_tiled(value, config, 1).exp()
    if kind in ("dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return _tiled(value, config, 1)
    if kind == "in_proj_z.weight":
        return _tiled(value, config, head)
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        value = value.squeeze(1) if kind == "conv1d.weight" else value
        return torch.cat([value[:keys], _tiled(value[keys:], config, head)])
    if kind == "out_proj.weight":
        return _tiled(value.t(), config, head).t()
    return value


def _tiled(value: Tensor, config: Any, head: int) -> Tensor:
    """Rows of value heads, grouped by their key heads, as one value head of each key head after the other."""
    groups = config.linear_num_key_heads
    rows = value.reshape(groups, config.linear_num_value_heads // groups, head, *value.shape[1:])
    return rows.transpose(0, 1).reshape(value.shape)
