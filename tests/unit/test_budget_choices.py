"""What single changes cost, and the largest pack that fits: by predicting again, never by rules of thumb."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs import compose
from configs.schema import AdapterConfig, Config, MemoryConfig, ModelConfig, SlurmConfig
from prefix_train.budget import GIB, Shape, predict, tensor_bytes
from prefix_train.budget_choices import RESERVE, Room, choices, describe, judge, largest_pack, scaled, summary
from prefix_train.shape import Call
from tests.unit.test_budget import PACK, config
from tests.unit.test_geometry import MODELS

EIGHTY = 80 * 10**9


def test_each_change_is_the_difference_of_two_budgets() -> None:
    memory = MemoryConfig(offload="auto", tile_rows=0)
    given = config(adapter=AdapterConfig(dropout=0.05), memory=memory)
    found = predict(given, PACK)
    listed = {choice.change: choice for choice in choices(given, found)}
    more = replace(given.adapter, targets=[*given.adapter.targets, "up_proj"])
    up = predict(config(adapter=more, memory=memory), PACK)
    assert listed["adapter on up_proj"].gpu_bytes == up.total("gpu") - found.total("gpu")
    assert listed["no adapter on q_proj"].gpu_bytes < 0
    down = tensor_bytes(144_000, 17_408, itemsize=3)  # its input once more, and a mask of a byte
    assert listed["adapter on down_proj"].gpu_bytes == pytest.approx(down, rel=0.01)
    assert listed["memory.tile_rows=16384"].gpu_bytes < -10 * GIB
    away = listed["memory.offload=none"]
    assert away.host_bytes == -found.total("host")
    assert away.gpu_bytes == 62 * tensor_bytes(144_000, 5_120)
    assert listed["train.loss_chunk_rows=2048"].gpu_bytes == 0, "logits are gone when the layers' backward begins"
    assert "adapter.dropout=0" in listed
    kept = listed["memory.keep_attention=auto"]
    assert kept.host_bytes > 0 < kept.gpu_bytes < GIB
    middle = listed["memory.keep_middle=auto"]
    assert middle.host_bytes == found.total("host"), "63 tensors more, as many as inputs"
    assert middle.gpu_bytes < -5 * GIB, "without tiles the feed-forward's backward needs the most"
    assert "adapter.merger=false" in listed


def test_recomputing_is_a_choice_where_nothing_is_offloaded() -> None:
    given = config(memory=MemoryConfig(offload="none"))
    listed = {choice.change: choice for choice in choices(given, predict(given, PACK))}
    assert listed["memory.recompute=false"].flops < 1
    assert listed["memory.recompute=false"].gpu_bytes > 1000 * GIB
    assert listed["memory.offload=auto"].gpu_bytes < 0


@pytest.mark.parametrize("gpu", [40 * 10**9, EIGHTY])
def test_the_largest_pack_fits_and_a_larger_one_does_not(gpu: int) -> None:
    given = config()
    largest = largest_pack(given, PACK, gpu)
    assert largest % 1000 == 0

    def needed(positions: int) -> int:
        return predict(given, scaled(PACK, positions)).total("gpu")

    assert needed(largest) <= gpu - RESERVE < needed(largest + 1000)


def test_pinned_memory_limits_the_pack_too() -> None:
    given = config()
    largest = largest_pack(given, PACK, EIGHTY, host_bytes=300 * GIB)
    assert 0 < largest < largest_pack(given, PACK, EIGHTY)
    assert largest_pack(given, PACK, 4 * GIB) == 0


def test_a_scaled_shape_keeps_proportions() -> None:
    assert scaled(PACK, PACK.positions) == PACK
    half = scaled(PACK, 72_000)
    assert (half.segments, half.inner, half.chunks, half.rows) == (41, 1, 1140, 4000)
    assert scaled(Shape.of([10], [-1], 1), 1) == Shape(1, 0, 1, 0, 1, 1, 1, 1, 7, 7, 0, (Call(1, 1, 10, 1, 0, 0, 0),))


def room(gpu: int, host: int | None = None) -> Room:
    return Room(gpu, host, "GPU", f"a GPU of {gpu / 1e9:g} GB")


def told(gpu: int, host: int | None = None, longest: int | None = None) -> tuple[str, dict[str, Any]]:
    """What is said of PACK and a GPU, as text and as JSON."""
    given = config()
    found = predict(given, PACK)
    listed = choices(given, found)
    verdict = judge(given, found, listed, room(gpu, host))
    text = describe(listed, found, room(gpu, host), verdict, longest)
    assert all(choice.change in text for choice in listed)
    return text, summary(listed, room(gpu, host), verdict)


def test_what_fits_is_said_with_the_largest_pack() -> None:
    text, found = told(EIGHTY)
    needed = predict(config(), PACK).total("gpu") / GIB
    largest = largest_pack(config(), PACK, EIGHTY)
    *_, fits, most = text.splitlines()
    assert fits == f"fits: {needed:.4g} GiB needed and 4 GiB kept free of a GPU of 80 GB"
    assert most == f"largest pack that fits, in such proportions: {largest:,} positions"
    assert (found["fits"], found["largest_pack"], found["would_fit"]) == (True, largest, None)
    assert largest >= PACK.positions
    text, _ = told(EIGHTY, longest=largest + 1)
    assert text.endswith(f"positions; too few for the longest example, which has {largest + 1:,} tokens")


def test_what_does_not_fit_is_said_with_what_would() -> None:
    needed = predict(config(), PACK).total("gpu")
    gpu = needed + RESERVE - 1
    text, found = told(gpu)
    *_, fits, most, ways = text.splitlines()
    assert fits.startswith("DOES NOT FIT: ")
    assert 0 < found["largest_pack"] < PACK.positions
    assert f" {found['largest_pack']:,} positions" in most
    assert found["would_fit"]["gpu_bytes"] == gpu + 1
    assert "no adapter on q_proj" in found["would_fit"]["changes"]
    assert ways.startswith(f"what would hold this pack: GPU memory of {(gpu + 1) / 1e9:.2f}"[:-2])
    assert ways.endswith(found["would_fit"]["changes"][-1])
    assert told(gpu + 1)[1]["fits"]


def test_where_nothing_fits_that_is_said_and_null() -> None:
    text, found = told(GIB)
    assert "\nlargest pack that fits: none, not even one of a single position\nwhat would hold this pack: " in text
    assert (found["fits"], found["largest_pack"], found["would_fit"]["changes"]) == (False, None, [])
    assert found["would_fit"]["gpu_bytes"] == predict(config(), PACK).total("gpu") + RESERVE


def test_what_a_node_cannot_pin_does_not_fit() -> None:
    text, found = told(EIGHTY, host=GIB)
    assert "DOES NOT FIT" in text
    assert not found["fits"]
    assert f" pinned of {GIB / 1e9:g} GB" in text
    assert "memory.offload=none" not in found["would_fit"]["changes"], "then the GPU would not hold it"


# What sets options so that a single change of another may be forbidden.
SET: list[list[str]] = [
    [],
    ["adapter.masks=counted", "adapter.dropout=0.05"],
    ["adapter.masks=counted", "adapter.rank=64"],
    ["adapter.masks=counted", "adapter.dropout=0.05", "adapter.rank=64", "memory.offload=none"],
    ["adapter.masks=counted", "adapter.dropout=0", "adapter.rank=128"],
    ["adapter.masks=counted", "adapter.dropout=0", "memory.tile_rows=0"],
    ["adapter.masks=counted", "adapter.dropout=0.05", "slurm.gpus_per_node=0"],
    ["memory.offload=none", "memory.keep_attention=auto"],
    ["memory.offload=none", "memory.keep_middle=2"],
    ["memory.offload=none", "memory.keep_attention=auto", "memory.keep_middle=auto"],
    ["memory.offload=none", "memory.recompute=false"],
    ["memory.offload=3", "memory.keep_attention=1"],
    ["train.trainable=all", "train.loss_chunk_rows=1"],
    ["adapter.targets=[q_proj]", "adapter.merger=false", "train.loss_chunk_words=4096"],
]


@pytest.mark.parametrize("changes", SET, ids=" ".join)
@pytest.mark.parametrize("model", ["qwen3_5, 27B", "llama"])
def test_every_choice_is_a_configuration_that_is_accepted(tmp_path: Path, model: str, changes: list[str]) -> None:
    """Written as a user would, beside what the user has written already; the costs are those of that configuration."""
    path = tmp_path / "run.yaml"
    path.write_text(compose.to_yaml(config(model=ModelConfig(build=MODELS[model]))))
    given = compose.load(path, ["adapter.targets=[q_proj, down_proj]", *changes])
    found = predict(given, PACK)
    listed = choices(given, found)
    assert len({choice.change for choice in listed}) == len(listed) > 2
    for choice in listed:
        told = compose.load(path, ["adapter.targets=[q_proj, down_proj]", *changes, override(given, choice.change)])
        assert told != given
        there = predict(told, PACK)
        assert choice.gpu_bytes == there.total("gpu") - found.total("gpu"), choice.change
        assert choice.host_bytes == there.total("host") - found.total("host"), choice.change


def override(given: Config, change: str) -> str:
    """`change` as key=value."""
    words = change.split(" ")
    if len(words) == 1:
        return change
    kept = [target for target in given.adapter.targets if target != words[-1]]
    return f"adapter.targets=[{', '.join(kept if words[0] == 'no' else [*kept, words[-1]])}]"


@pytest.mark.parametrize("changes", SET, ids=" ".join)
@pytest.mark.parametrize("host", [None, 300 * GIB])
def test_the_largest_pack_is_accepted_and_fits(tmp_path: Path, changes: list[str], host: int | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(compose.to_yaml(config()))
    given = compose.load(path, changes)
    largest = largest_pack(given, PACK, EIGHTY, host)
    if largest:
        told = compose.load(path, [*changes, f"pack.max_positions={largest}"])
        predict(told, scaled(PACK, largest)).refuse(gpu_bytes=EIGHTY - RESERVE, host_bytes=host)


@pytest.mark.parametrize("name", [name for name in MODELS if "defaults" not in name])
def test_every_family_has_choices(name: str) -> None:
    given = config(
        model=ModelConfig(build=MODELS[name]),
        adapter=AdapterConfig(targets=["q_proj", "k_proj"]),
        slurm=SlurmConfig(tasks_per_node=1),
    )
    assert choices(given, predict(given, Shape.of([8, 2], [-1, 0], 2)))
