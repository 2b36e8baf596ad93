"""A geometry file for the streaming bench, of a model as small as a test wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BUILD = """
name: small
cluster: local
model:
  dtype: bfloat16
  attention: {attention}
  elementwise: {elementwise}
  build:
    model_type: qwen3
    num_hidden_layers: {layers}
    hidden_size: {width}
    intermediate_size: {inner}
    num_attention_heads: 16
    num_key_value_heads: 4
    head_dim: {head}
    vocab_size: 8192
data:
  train: tests/data/tiny-geometry.yaml
pack:
  packs_per_update: 1
adapter:
  targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
train:
  updates: 1
slurm:
  tasks_per_node: 1
  gpus_per_node: 1
"""


def geometry(folder: Path, **sizes: Any) -> str:
    given = {"attention": "auto", "elementwise": "auto", "layers": 6, "width": 512, "inner": 1024, "head": 64}
    path = folder / "small.yaml"
    path.write_text(BUILD.format(**{**given, **sizes}))
    return str(path)
