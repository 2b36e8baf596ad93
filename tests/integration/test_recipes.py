"""The two recipes for 64 GPUs: built on the meta device by the product's own code, planned, budgeted, dry-run.

What a user has to supply, model folder and data, is written here: the real model's configuration, the demonstration's
tokenizer, and a long instruction with an image that many examples share, all lengths a hundredth of the real ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from configs import compose
from configs.schema import Config
from prefix_train import anatomy, budget, lengths, plan_summary, planning, shard, tiny
from prefix_train import model as models
from prefix_train.budget import GIB, Budget, Shape
from prefix_train.families import NotExact
from prefix_train.layout import Layout

REPOSITORY = Path(__file__).resolve().parents[2]
GEOMETRY = REPOSITORY / "configs" / "models" / "qwen3.6-27b"
RECIPES = ("packed", "standalone")
GPU_BYTES = 80 * 10**9
REAL = {
    "packed": Shape.of([64_000] + [1_000] * 80, [-1] + [0] * 80, rows=8_000),
    "standalone": Shape.of([72_000], [-1], rows=100),
}
"""The longest buffers that the recipes are made for."""


def recipe(name: str, *overrides: str) -> Config:
    return compose.load(REPOSITORY / "configs" / f"qwen3.6-27b-{name}.yaml", overrides)


# What the files say.


@pytest.mark.parametrize("name", ["qwen3.6-27b-packed", "qwen3.6-27b-standalone", "smollm2-135m"])
def test_every_option_says_why(name: str) -> None:
    lines = (REPOSITORY / "configs" / f"{name}.yaml").read_text().splitlines()
    options = [line for line in lines if re.match(r" *\w+: *[^ #]", line)]
    assert len(options) > 30
    assert [line for line in options if " # " not in line] == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_what_was_decided(name: str) -> None:
    config = recipe(name)
    assert (config.ranks, config.slurm.nodes, config.slurm.gpus_per_node) == (64, 8, 8)
    assert (config.adapter.rank, config.adapter.dropout, config.adapter.merger) == (8, 0.05, True)
    assert config.adapter.targets == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
    assert (config.model.dtype, config.train.trainable, config.train.weighting) == ("bfloat16", "adapter", "example")
    assert (config.memory.recompute, config.memory.offload) == (True, "auto")
    assert (config.train.lr, config.train.warmup_updates, config.train.epochs) == (2e-4, 10, 2)
    expected = {"packed": ("shared", "constant"), "standalone": ("standalone", "cosine")}[name]
    assert (config.pack.mode, config.train.schedule) == expected
    assert config.data.max_example_tokens == recipe("standalone").pack.max_positions


# The model, on the meta device.


@pytest.fixture(scope="module")
def ranks() -> Iterator[None]:
    """64 ranks of which this process is the first; their collectives do nothing."""
    distributed.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_is_built_adapted_patched_and_sharded(name: str, ranks: None) -> None:
    config = recipe(name, f"model.path={GEOMETRY}")
    prepared = models.prepare(models.skeleton(config.model), config)
    found = anatomy.find(prepared)
    assert {parameter.device.type for parameter in prepared.parameters()} == {"meta"}
    assert sum("linear_attn" in dict(layer.named_children()) for layer in found.layers) == 48
    assert (len(found.layers), len(found.blocks), len(found.mergers)) == (64, 27, 1)

    predicted = budget.predict(config)
    geometry = predicted.geometry
    trained = anatomy.trainable(prepared)
    # 16 attention layers: q with its gate 12,288, k and v 1,024 each, o from 6,144; 64 gates of 17,408; all from 5,120.
    attention = (5_120 + 12_288) + 2 * (5_120 + 1_024) + (6_144 + 5_120)
    adapters = 8 * (16 * attention + 64 * (5_120 + 17_408))
    lora = {key: tensor for key, tensor in trained.items() if ".lora_" in key}
    assert sum(tensor.numel() for tensor in lora.values()) == adapters
    assert geometry.adapter_parameters(8, config.adapter.targets) == adapters
    rest = {key: tensor for key, tensor in trained.items() if key not in lora}
    assert all(".visual.merger." in key for key in rest)
    assert sum(tensor.numel() for tensor in rest.values()) == geometry.parameters["merger"]
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert not any(tensor.requires_grad for block in found.blocks for tensor in block.parameters())
    frozen = {tensor.dtype for key, tensor in prepared.named_parameters() if key not in trained}
    assert frozen == {torch.bfloat16}

    root = models.Root(prepared, torch.bfloat16, config.train.loss_chunk_rows, images=True)
    shard.shard(root, init_device_mesh("cpu", (64,)))
    # FSDP2 pads a tensor's first dimension to a multiple of the ranks, which small ones feel: 1% in all.
    mine = [tensor for tensor in root.parameters() if not tensor.requires_grad]
    here = sum(tensor.to_local().numel() * tensor.element_size() for tensor in mine)  # type: ignore[attr-defined]
    assert here == pytest.approx(term(predicted, "frozen weights"), rel=0.01)
    shards = [tensor for tensor in root.parameters() if tensor.requires_grad]
    elements = sum(tensor.to_local().numel() for tensor in shards)  # type: ignore[attr-defined]
    assert elements * budget.MASTER_BYTES == term(predicted, "trained parameters")


def term(predicted: Budget, name: str) -> int:
    return next(found.bytes for found in predicted.terms if found.name == name)


def test_on_the_meta_device_too_a_pack_needs_its_layout() -> None:
    """The patch is in place: the probe ran there, and what is not exact is refused."""
    config = recipe("packed", f"model.path={GEOMETRY}")
    model = models.prepare(models.skeleton(config.model), config)
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    layout = Layout.from_tree([2, 1, 1], [-1, 0, 0]).to(torch.device("meta"))
    with pytest.raises(NotExact, match="layout"):
        model(input_ids=ids, position_ids=layout.position_ids(), use_cache=False)
    with pytest.raises(NotExact, match="attention_mask"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), layout=layout, use_cache=False)


# Plan, budget, submit.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with models/ and data/ where the recipes look for them."""
    folder = tmp_path_factory.mktemp("recipes")
    write_model(folder / "models" / "Qwen3.6-27B")
    write_data(folder / "data")
    return folder


def write_model(folder: Path) -> None:
    """The real configuration, with the tiny tokenizer's ids for the marks of images."""
    folder.mkdir(parents=True)
    processor = tiny.build_processor(AutoConfig.from_pretrained(GEOMETRY))
    processor.save_pretrained(folder)
    ids = {key: processor.tokenizer.convert_tokens_to_ids(token) for key, token in tiny.MARKS.items()}
    own = json.loads((GEOMETRY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | ids))


def write_data(folder: Path, rows: int = 512) -> None:
    """`rows` examples of about 750 tokens: a shared first turn of about 650 with an image, then an item's own."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, seed in (("shown", 0), ("item-0", 1), ("item-1", 2)):
        pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    rules = " ".join(
        f"Rule {number}: a form with the mark {number * 37} goes to desk {number}." for number in range(26)
    )
    shared = [
        {"role": "system", "content": rules},
        {"role": "user", "content": [{"type": "image", "image": "shown.png"}, {"type": "text", "text": "A form."}]},
        {"role": "assistant", "content": "Desk 3."},
    ]
    lines = []
    for row in range(rows):
        words = " ".join(str(number) for number in random.integers(0, 100, 18))
        content = [{"type": "image", "image": f"item-{row % 2}.png"}, {"type": "text", "text": f"Form {row}: {words}"}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": f"Desk {row % 26}."}]
        lines.append(json.dumps({"id": str(row), "messages": shared + turns}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "heldout.jsonl").write_text("".join(lines[:8]))


def scaled(name: str) -> list[str]:
    """Overrides: a hundredth of the recipe's lengths."""
    config = recipe(name)
    return [f"pack.max_positions={config.pack.max_positions // 100}", "data.max_example_tokens=1000"] + (
        ["pack.max_positions=1000"] if name == "standalone" else []
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_planned_and_budgeted(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    config = recipe(name, *scaled(name))
    planned = planning.make(config, keep=True, choose_size=False)
    assert planned.refused == ""
    plan = plan_summary.summary(planned.run.epoch(0))
    assert (plan["examples"], plan["ranks"]) == (512, 64)
    assert plan["packs_per_update"] == {"least": 64, "mean": 64, "most": 64}
    assert plan["positions"] < plan["logical_tokens"] / 4 if name == "packed" else plan["ratio"] == 1
    small = budget.predict(config, lengths.largest_pack(config, lengths.load(config)))
    assert small.shape.positions <= config.pack.max_positions

    real = budget.predict(recipe(name), REAL[name])
    real.refuse(gpu_bytes=GPU_BYTES)
    assert small.total("gpu") < real.total("gpu") < GPU_BYTES
    print(budget.describe(real))
    text = capsys.readouterr().out
    assert all(found.name in text for found in real.terms)
    assert f"{real.total('host') / GIB:.3f} GiB pinned on each node" in text
    # Every rank of a node pins the inputs of all layers but the last, [positions, 5120] in bf16, in chunks of 64 MiB.
    chunks = -(-recipe(name).pack.max_positions * 5_120 * 2 // (64 << 20))
    assert real.total("host") == 8 * 63 * chunks * (64 << 20)


def submit(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SUBMITIT"))}
    program = [sys.executable, "-m", "slurm.submit", *arguments]
    return subprocess.run(
        program,
        cwd=place,
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_dry_run_as_a_program(name: str, place: Path) -> None:
    path = str(REPOSITORY / "configs" / f"qwen3.6-27b-{name}.yaml")
    done = submit(place, path, "slurm.partition=h100", "slurm.nodes=8", "--dry-run")
    assert done.returncode == 0, done.stderr
    told, _, script = done.stdout.partition("\n\n")
    assert "plan    " in told
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))
    wanted = {"partition": "h100", "nodes": "8", "gpus-per-node": "8", "cpus-per-task": "8", "mem": "0"}
    assert wanted.items() <= asked.items()
    assert asked["time"] in ("24:00:00", "1440")
    assert not (place / "runs").exists() or not list((place / "runs").glob("qwen*"))


def test_a_model_that_is_not_there_is_named(place: Path, tmp_path: Path) -> None:
    path = str(REPOSITORY / "configs" / "qwen3.6-27b-packed.yaml")
    done = submit(tmp_path, path, "slurm.partition=h100", "--dry-run")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"model.path: {tmp_path}/models/Qwen3.6-27B does not exist; write model.path=PATH" in done.stderr
