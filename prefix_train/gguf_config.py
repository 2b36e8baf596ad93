"""The transformers configuration of a GGUF file, read from the file's own head. No torch.

transformers reads weights, tokenizer and chat template of such a file by itself (`gguf_file=`); this is what planning
and budgeting need before that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from configs.errors import UserError

ARCHITECTURES = ("llama", "qwen3")
"""GGUF's names of the families that are exact over trees; transformers calls them the same."""

KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
OPTIONAL_KEYS = {"attention.key_length": "head_dim"}

UNREADABLE = (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError)
"""What gguf's reader may raise for a file that is cut off, damaged or foreign."""

NEEDS = "pip install 'prefix-train[smollm]', or pip install gguf"


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
    return dict(_read_once(path, path.stat().st_mtime_ns if path.exists() else 0))


@lru_cache(maxsize=4)
def _read_once(path: Path, _: int) -> dict[str, Any]:
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
    config = {"model_type": kind} | {ours: _value(file, f"{kind}.{theirs}", path) for theirs, ours in KEYS.items()}
    for theirs, ours in OPTIONAL_KEYS.items():
        if f"{kind}.{theirs}" in file.fields:
            config[ours] = _value(file, f"{kind}.{theirs}", path)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return config


def _value(file: Any, key: str, path: Path) -> Any:
    if key not in file.fields:
        raise UserError(f"model.path: {path} does not say its {key}: it is no GGUF file of a language model")
    return file.fields[key].contents()
