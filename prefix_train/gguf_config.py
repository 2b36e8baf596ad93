"""The transformers configuration of a GGUF file, read from the file's own head. No torch.

transformers reads weights, tokenizer and chat template of such a file by itself (`gguf_file=`), and passes over what it
does not know; this is what planning and budgeting need before that, and refuses a file that says more than it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from configs.errors import UserError

Keys = dict[str, str]
"""A size under GGUF's name, and under transformers'."""

_COMMON: Keys = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_DENSE: Keys = _COMMON | {"feed_forward_length": "intermediate_size"}
_EXPERTS: Keys = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_HYBRID: Keys = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_SHARED: Keys = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

ARCHITECTURES: dict[str, tuple[str, Keys]] = {
    "llama": ("llama", _DENSE),
    "qwen2": ("qwen2", _DENSE),
    "qwen3": ("qwen3", _DENSE),
    "qwen3moe": ("qwen3_moe", _DENSE | _EXPERTS),
    "qwen35": ("qwen3_5_text", _DENSE | _HYBRID),
    "qwen35moe": ("qwen3_5_moe_text", _COMMON | _HYBRID | _EXPERTS | _SHARED),
}
"""GGUF's names of the families that are exact over trees and that transformers reads: its own, and their sizes."""

OPTIONAL_KEYS: Keys = {"attention.key_length": "head_dim"}

CORRECTED = ("head_dim", "moe_intermediate_size")
"""Sizes that are in the file, but that transformers takes to be those of the first models of their kind."""

_ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
_FEED_FORWARD = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_ROUTED = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")

TENSORS: dict[str, tuple[str, ...]] = {
    "llama": (*_ATTENTION, *_FEED_FORWARD),
    "qwen2": (*_ATTENTION, *_FEED_FORWARD),
    "qwen3": (*_ATTENTION, *_HEAD_NORMS, *_FEED_FORWARD),
    "qwen3moe": (*_ATTENTION, *_HEAD_NORMS, *_FEED_FORWARD, *_ROUTED),
}
"""Tensors of a block that transformers reads; it passes over others. (Of other architectures it says itself.)"""

BIASED = {"qwen2": ("attn_q", "attn_k", "attn_v")}

UNREADABLE = (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError)
"""What gguf's reader may raise for a file that is cut off, damaged or foreign."""

NEEDS = "pip install gguf"


def reader() -> Callable[[Path], Any]:
    """The package gguf's reader. Raises UserError where the package is not installed."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            f"model.path names a GGUF file, and reading one needs the package gguf ({error}): {NEEDS}"
        ) from (error)
    found: Callable[[Path], Any] = GGUFReader
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Sizes of the model in `path` under transformers' names. Raises UserError for a file that is not understood."""
    return dict(_read_once(path, path.stat().st_mtime_ns if path.exists() else 0)[1])


def architecture(path: Path) -> str:
    """GGUF's name of what is in `path`. Raises UserError as `read_config`."""
    return _read_once(path, path.stat().st_mtime_ns if path.exists() else 0)[0]


def correct(config: Any, path: Path) -> None:
    """Set in `config`, which transformers has made of `path`, what the file says and transformers does not read."""
    sizes = read_config(path)
    for key in CORRECTED:
        if key in sizes:
            setattr(config, key, sizes[key])


@lru_cache(maxsize=4)
def _read_once(path: Path, _: int) -> tuple[str, dict[str, Any]]:
    """The head holds the whole vocabulary: reading it takes seconds, so once for each state of the file."""
    read = reader()
    try:
        file = read(path)
    except UNREADABLE as error:
        raise UserError(f"model.path: {path} cannot be read as GGUF: {error}") from error
    kind = _value(file, "general.architecture", path)
    if kind not in ARCHITECTURES:
        raise UserError(
            f"model.path: {path} holds a model of architecture {kind!r}; of GGUF files {', '.join(ARCHITECTURES)} are "
            "understood: give a folder in transformers' format"
        )
    _refuse_more(file, kind, path)
    model_type, keys = ARCHITECTURES[kind]
    config = {"model_type": model_type} | {
        ours: _value(file, f"{kind}.{theirs}", path) for theirs, ours in keys.items()
    }
    for theirs, ours in OPTIONAL_KEYS.items():
        if f"{kind}.{theirs}" in file.fields:
            config[ours] = _value(file, f"{kind}.{theirs}", path)
    config["num_hidden_layers"] -= _or_zero(file, f"{kind}.nextn_predict_layers", path)
    if "linear_num_value_heads" in config:
        config["linear_value_head_dim"] = (
            _value(file, f"{kind}.ssm.inner_size", path) // config["linear_num_value_heads"]
        )
    tensors = {tensor.name: tensor for tensor in file.tensors}
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return kind, config


def _refuse_more(file: Any, kind: str, path: Path) -> None:
    """Raise UserError for what changes the model's results, and what transformers' reader passes over."""
    scaling = f"{kind}.rope.scaling.type"
    if scaling in file.fields and (value := _value(file, scaling, path)) != "none":
        raise UserError(_unread(path, f"{scaling} = {value}"))
    if window := _or_zero(file, f"{kind}.attention.sliding_window", path):
        raise UserError(_unread(path, f"{kind}.attention.sliding_window = {window}"))
    if kind == "llama" and (experts := _or_zero(file, "llama.expert_count", path)):
        raise UserError(_unread(path, f"llama.expert_count = {experts}"))
    if kind in TENSORS:
        weights, biases = "|".join(TENSORS[kind]), "|".join(BIASED.get(kind, ("no bias",)))
        known = re.compile(rf"(token_embd|output_norm|output|blk\.\d+\.({weights}))\.weight|blk\.\d+\.({biases})\.bias")
        for tensor in file.tensors:
            if not known.fullmatch(tensor.name):
                raise UserError(_unread(path, f"the tensor {tensor.name}"))


def _unread(path: Path, what: str) -> str:
    return (
        f"model.path: {path} has {what}, which transformers' reader of GGUF files passes over: the model would compute "
        "something else; give a folder in transformers' format"
    )


def _or_zero(file: Any, key: str, path: Path) -> int:
    return int(_value(file, key, path)) if key in file.fields else 0


def _value(file: Any, key: str, path: Path) -> Any:
    if key not in file.fields:
        raise UserError(f"model.path: {path} does not say its {key}: it is no GGUF file of a language model")
    return file.fields[key].contents()
