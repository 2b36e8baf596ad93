"""Models of GGUF files compute what they compute from safetensors; what is not read of a file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from configs.errors import UserError
from configs.schema import ModelConfig
from prefix_train import gguf_config, model
from prefix_train.geometry import Geometry, read_config
from prefix_train.stream import sources
from tests import ggufs, models


def logits(made: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(40)[None] % models.IMAGE
    if models.has_experts(made):
        made.set_experts_implementation("eager")
    with torch.no_grad():
        return made.eval()(input_ids=ids, use_cache=False).logits


def test_every_architecture_is_tried_here() -> None:
    assert set(ggufs.ARCHITECTURES.values()) == set(gguf_config.ARCHITECTURES)


@pytest.mark.parametrize("family", ggufs.ARCHITECTURES)
def test_a_file_gives_the_model_that_it_was_made_of(family: str, tmp_path: Path) -> None:
    made = models.build(family)
    path = ggufs.write(made, ggufs.ARCHITECTURES[family], tmp_path / "m.gguf")
    loaded = model.load_weights(path, torch.float32)
    assert {name: value.shape for name, value in loaded.named_parameters()} == {
        name: value.shape for name, value in made.named_parameters()
    }
    torch.testing.assert_close(logits(loaded), logits(made), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ggufs.ARCHITECTURES)
def test_sizes_are_read_without_torch_and_are_the_model_s(family: str, tmp_path: Path) -> None:
    made = models.build(family)
    path = ggufs.write(made, ggufs.ARCHITECTURES[family], tmp_path / "m.gguf")
    geometry = Geometry.of(read_config(ModelConfig(path=str(path))))
    assert sum(geometry.parameters.values()) == sum(value.numel() for value in made.parameters())
    assert geometry.layers == made.config.num_hidden_layers


@pytest.mark.parametrize("family", ggufs.ARCHITECTURES)
def test_a_store_reads_what_a_run_would_load(family: str, tmp_path: Path) -> None:
    path = ggufs.write(models.build(family), ggufs.ARCHITECTURES[family], tmp_path / "m.gguf")
    source = sources.open_source(ModelConfig(path=str(path), dtype="float32"))
    loaded = model.load_weights(path, torch.float32).state_dict()
    parts = _weights(source)
    assert parts.keys() == loaded.keys()
    assert [name for name in loaded if not torch.equal(parts[name], loaded[name])] == []


def _weights(source: sources.Source) -> dict[str, torch.Tensor]:
    from prefix_train.stream import places

    blocks = places.place(source.model, places.Choice("plain", torch.float32))
    return {
        f"{block.module}.{stored.name}": source.parts(block, stored)["data"]
        for block in blocks
        for stored in block.tensors
    }


MORE: dict[str, tuple[str, tuple[str, Any]]] = {
    "a scaled rotary embedding": ("llama", ("llama.rope.scaling.type", "yarn")),
    "frequencies of Llama 3.1": ("llama", ("rope_freqs.weight", np.ones(8, np.float32))),
    "experts of a Mixtral": ("llama", ("llama.expert_count", 8)),
    "a sliding window": ("qwen2", ("qwen2.attention.sliding_window", 128)),
    "a bias": ("qwen3", ("blk.0.attn_q.bias", np.ones(64, np.float32))),
}


@pytest.mark.parametrize("case", MORE)
def test_what_the_reader_would_pass_over_is_refused(case: str, tmp_path: Path) -> None:
    family, (key, value) = MORE[case]
    path = ggufs.write(models.build(family), family, tmp_path / "m.gguf", (key, value))
    with pytest.raises(UserError, match=rf"m\.gguf has .*{key}.*passes over.*give a folder in transformers' format"):
        gguf_config.read_config(path)


def test_an_unknown_architecture_is_one_line_with_those_that_are_known(tmp_path: Path) -> None:
    path = ggufs.write(models.build("llama"), "gemma3", tmp_path / "m.gguf")
    with pytest.raises(UserError) as found:
        gguf_config.read_config(path)
    line = str(found.value)
    assert (
        "architecture 'gemma3'; of GGUF files llama, qwen2, qwen3, qwen3moe, qwen35, qwen35moe are understood" in line
    )
    assert "\n" not in line
