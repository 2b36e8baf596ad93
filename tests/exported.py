"""Run folders with a checkpoint, made without training, for tests of what is exported from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from configs import compose, runfolder
from configs.schema import AdapterConfig, Config, DataConfig, ModelConfig, PackConfig, TrainConfig
from prefix_train import anatomy, checkpoint, tiny
from prefix_train import model as models_of_runs
from prefix_train.dist import Ranks
from tests import models, tiny_text

ALONE = Ranks(0, 1, torch.device("cpu"), None)
TARGETS = {"qwen3_next": ["q_proj", "v_proj"], "qwen3_5_moe": ["q_proj", "v_proj"], "qwen3_5_moe_text": ["q_proj"]}


def model_folder(folder: Path, family: str = "qwen3", shards: str = "20KB", **config: Any) -> Path:
    """A tiny model in transformers' format, in float32 and many shards, with a tokenizer or processor."""
    return saved(folder, models.build(family, **config), shards)


def text_folder(folder: Path, shards: str = "100KB") -> Path:
    """The smallest hybrid language model with the demonstration's words."""
    return saved(folder, tiny.build_model(tiny_text.BUILD, 0, torch.float32), shards)


def saved(folder: Path, model: PreTrainedModel, shards: str) -> Path:
    model.save_pretrained(folder, max_shard_size=shards)
    tiny.build_processor(model.config).save_pretrained(folder)
    return folder


def run_of(run: Path, model: ModelConfig, family: str = "", trainable: Any = "adapter", **more: Any) -> Path:
    """A run of `model` whose checkpoint has tensors that all differ from those that it began with."""
    adapter = AdapterConfig(rank=4, alpha=12.0, targets=TARGETS.get(family, AdapterConfig().targets))
    more = {"data": DataConfig(train="none.jsonl"), "pack": PackConfig(packs_per_update=2)} | more
    config = Config(model=model, adapter=adapter, train=TrainConfig(trainable=trainable, updates=2), **more)
    run.mkdir(parents=True, exist_ok=True)
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
    trained = models_of_runs.adapt(models_of_runs.load(model)[0], config)
    move(trained)
    parameters = anatomy.trainable(trained)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.0)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    checkpoint.save(run, ALONE, parameters, optimizer, checkpoint.Cursor(2, 0, 2, "a" * 64), config)
    return run


def move(model: nn.Module) -> None:
    """Change everything that is trained, as training would."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in anatomy.trainable(model).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)


def restored(run: Path) -> nn.Module:
    """The run's model under PEFT, or as it is where everything was trained, in the run's dtype."""
    config = compose.from_run(run)
    model = models_of_runs.adapt(models_of_runs.load(config.model)[0], config)
    newest = checkpoint.latest(run)
    assert newest is not None
    checkpoint.load(
        newest, ALONE, anatomy.trainable(model), torch.optim.AdamW(anatomy.trainable(model).values()), config
    )
    return model


def merged_by_peft(run: Path) -> PreTrainedModel:
    """What PEFT's own merging makes of the run."""
    model = restored(run)
    found: PreTrainedModel = model.merge_and_unload() if isinstance(model, PeftModel) else model
    return found


def heldout(path: Path, rows: int = 6) -> DataConfig:
    """Chat rows that share an instruction."""
    lines = [
        {
            "messages": [
                {"role": "system", "content": "Say which of two numbers is larger, as JSON."},
                {"role": "user", "content": f"{row} or {row * row % 7}?"},
                {"role": "assistant", "content": json.dumps({"larger": max(row, row * row % 7)})},
            ]
        }
        for row in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataConfig(train=str(path), heldout=str(path))
