"""Configurations that are submitted."""

from __future__ import annotations

from pathlib import Path

from configs import compose
from configs.schema import Config

YAML = """
model: {build: {model_type: qwen3}}
data: {train: /data/train.jsonl}
pack: {packs_per_update: 16}
train: {updates: 3}
slurm: {nodes: 2, tasks_per_node: 8, gpus_per_node: 8, cpus_per_task: 12}
"""


def composed(tmp_path: Path, *overrides: str) -> Config:
    """Of a run on Slurm, two nodes of eight GPUs, with `overrides`."""
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return compose.load(path, overrides)
