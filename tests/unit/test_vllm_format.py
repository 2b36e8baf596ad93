"""Adapters are what vLLM reads, by the rules of its 0.33.0, told here anew; what it refuses is refused for its reason.

The rules stand in vllm/lora/peft_helper.py (`PEFTHelper.from_dict`, `validate_legal`: keys, features, rank),
vllm/config/lora.py (`MaxLoRARanks`), vllm/lora/utils.py (`parse_fine_tuned_lora_name`: names of tensors),
vllm/lora/lora_model.py (`from_local_checkpoint`: file, unexpected modules) and, for the modules that a model has and
the names that it gives them, vllm/model_executor/models/{llama,qwen3_5,qwen3_vl}.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import AdapterConfig
from prefix_train import adapters, export, tensors
from prefix_train import anatomy as anatomies
from tests import models

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be; 16 where it is not given."""

REFUSED = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
MODULES = {
    "llama": ATTENTION,
    "qwen3": ATTENTION,
    "qwen3_5_text": ATTENTION | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
    "qwen3_5": ATTENTION | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
}
"""Last names of the modules that may have an adapter, the parts of packed ones by themselves."""

RENAMED = {
    "qwen3_5_text": {"model.language_model.": "model."},
    "qwen3_5": {"model.language_model.": "language_model.model.", "model.visual.": "visual."},
}
"""Beginnings of names, and what they are called in vLLM."""


class Refused(Exception):
    """vLLM would not load this adapter."""


def read(folder: Path, family: str, max_rank: int = 16) -> dict[str, float]:
    """Scaling of each adapted module by vLLM's name for it."""
    config = json.loads((folder / "adapter_config.json").read_text())
    if lost := {"r", "lora_alpha", "target_modules"} - config.keys():
        raise Refused(f"missing configuration fields {sorted(lost)}")
    if unknown := set(config.get("modules_to_save") or ()) - {"classifier", "score"}:
        raise Refused(f"modules_to_save {sorted(unknown)}")
    if on := [name for name in REFUSED if config.get(name)]:
        raise Refused(f"{on[0]} is not supported")
    if isinstance(config.get("init_lora_weights"), str):
        raise Refused("initial weights that change the base model")
    if config.get("bias", "none") != "none":
        raise Refused("a bias is not supported")
    if max([config["r"], *(config.get("rank_pattern") or {}).values()]) > max_rank:
        raise Refused(f"rank {config['r']} is greater than {max_rank}")
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise Refused("no tensors")
    halves: dict[str, set[str]] = {}
    for name, tensor in load_file(path).items():
        module, half = parse(name, family)
        if tensor.shape[0 if half == "lora_A" else 1] != config["r"]:
            raise Refused(f"{name} has shape {tuple(tensor.shape)}")
        halves.setdefault(module, set()).add(half)
    if broken := [module for module, found in halves.items() if found != {"lora_A", "lora_B"}]:
        raise Refused(f"{broken[0]} has half an adapter")
    return dict.fromkeys(halves, config["lora_alpha"] / config["r"])


def parse(name: str, family: str) -> tuple[str, str]:
    """vLLM's name of the module that a tensor is for, and which half it is."""
    module = name.removeprefix("base_model.model.")
    for ours, theirs in RENAMED.get(family, {}).items():
        if module.startswith(ours):
            module = theirs + module.removeprefix(ours)
            break
    *path, half, last = module.split(".")
    if half not in ("lora_A", "lora_B") or last != "weight":
        raise Refused(f"{name} is no weight of LoRA")
    if path[-1] not in MODULES[family]:
        raise Refused(f"unexpected module {'.'.join(path)}")
    return ".".join(path), half


def adapter(folder: Path, family: str, **options: Any) -> Path:
    """An adapter of a tiny model, exported as a run's end does it."""
    model = adapters.attach(models.build(family), AdapterConfig(**options), seed=0)
    trained = tensors.full_tensors(anatomies.trainable(model))
    return export.export(model, None, trained, folder / "adapter").folder


def modules_of(family: str, targets: list[str]) -> set[str]:
    """Adapted modules by vLLM's names, from the model itself."""
    found = set()
    for name, module in models.build(family).named_modules():
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in targets and "visual" not in name:
            found.add(parse(f"base_model.model.{name}.lora_A.weight", family)[0])
    return found


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("targets", [AdapterConfig().targets, ["q_proj", "down_proj"]])
def test_an_adapter_of_the_language_model_loads(tmp_path: Path, family: str, targets: list[str]) -> None:
    folder = adapter(tmp_path, family, targets=targets, rank=8, alpha=12.0, merger=False)
    found = read(folder, family)
    assert found == dict.fromkeys(modules_of(family, targets), 1.5)
    assert len(found) >= 2
    prefix = "language_model.model.layers." if family == "qwen3_5" else "model.layers."
    assert all(name.startswith(prefix) for name in found)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5"])
def test_gated_delta_nets_projections_may_be_adapted(tmp_path: Path, family: str) -> None:
    targets = ["in_proj_qkv", "in_proj_z", "out_proj"]
    found = read(adapter(tmp_path, family, targets=targets, merger=False), family)
    assert {name.split(".")[-1] for name in found} == set(targets)


def test_a_trained_merger_is_refused(tmp_path: Path) -> None:
    """So is the default for a vision-language model: then the merged export is what vLLM loads."""
    folder = adapter(tmp_path, "qwen3_5")
    with pytest.raises(Refused, match=r"modules_to_save \['model.visual.merger'\]"):
        read(folder, "qwen3_5")
    edit(folder, "modules_to_save", None)
    with pytest.raises(Refused, match=r"merger.* is no weight of LoRA"):
        read(folder, "qwen3_5")


@pytest.mark.parametrize(("rank", "limit"), [(8, 16), (16, 16), (24, 32), (64, 64)])
def test_the_server_must_admit_the_rank(tmp_path: Path, rank: int, limit: int) -> None:
    folder = adapter(tmp_path, "llama", rank=rank)
    assert read(folder, "llama", limit)
    assert limit == max(16, min(most for most in RANKS if most >= rank))
    with pytest.raises(Refused, match=f"rank {rank} is greater"):
        read(folder, "llama", max(most for most in RANKS if most < rank))


def edit(folder: Path, name: str, value: Any) -> None:
    """Change an entry of `adapter_config.json`; `...` takes it away."""
    path = folder / "adapter_config.json"
    config = {key: one for key, one in json.loads(path.read_text()).items() if key != name}
    path.write_text(json.dumps(config if value is ... else config | {name: value}))


def rename(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no rank": (lambda folder: edit(folder, "r", ...), r"missing configuration fields \['r'\]"),
    "no targets": (lambda folder: edit(folder, "target_modules", ...), r"missing .*target_modules"),
    "DoRA": (lambda folder: edit(folder, "use_dora", True), "use_dora"),
    "a bias": (lambda folder: edit(folder, "bias", "all"), "bias"),
    "a bias of LoRA's own": (lambda folder: edit(folder, "lora_bias", True), "lora_bias"),
    "PiSSA": (lambda folder: edit(folder, "init_lora_weights", "pissa"), "initial weights"),
    "another rank": (lambda folder: edit(folder, "r", 4), "has shape"),
    "other names": (lambda folder: rename(folder, lambda name: name.replace(".lora_A.", ".lora_A.default.")), "LoRA"),
    "another module": (lambda folder: rename(folder, lambda name: name.replace("q_proj", "query")), "unexpected"),
    "half an adapter": (
        lambda folder: rename(
            folder, lambda name: name.replace("layers.0.mlp.gate_proj.lora_A", "layers.9.up_proj.lora_A")
        ),
        "half an adapter",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_the_format_is_refused(tmp_path: Path, fault: str) -> None:
    plant, words = FAULTS[fault]
    folder = adapter(tmp_path, "llama")
    assert read(folder, "llama")
    plant(folder)
    with pytest.raises(Refused, match=words):
        read(folder, "llama")
