"""Kernel pins without a GPU: which buckets are reached, what is written, which kernels are left alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs import compose, kernel_pins
from configs.errors import UserError
from configs.schema import Config
from prefix_train import heartbeat, kernels, machine, train, trial, tune
from prefix_train.dist import Ranks
from prefix_train.geometry import Geometry, read_config
from prefix_train.kernel_choice import Machine

CONFIG = compose.load(Path(__file__).parents[1] / "data" / "period-27b.yaml")
TINY = {"model_type": "qwen3_5_text", "num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
MADE = {"triton": "3.6.0", "fla": "0.6.0", "dtype": "bfloat16", "gpu": "NVIDIA H200", "date": "2026-11-30"}


def triton_config(warps: int) -> SimpleNamespace:
    return SimpleNamespace(kwargs={"BK": 64}, num_warps=warps, num_stages=3, num_ctas=1)


def autotuner(*warps: int) -> SimpleNamespace:
    """Searches with these winners, shortest buffer first."""
    return SimpleNamespace(cache={(number, "torch.bfloat16"): triton_config(w) for number, w in enumerate(warps)})


def test_every_length_bucket_that_a_pack_can_reach() -> None:
    geometry = Geometry.of(read_config(CONFIG.model))
    reached = kernels.buckets(geometry, 144_000)
    assert reached[-1] == 144_000
    assert {-(-tokens * 16 // kernels.BUCKET) for tokens in reached} == set(range(1, 37))
    assert kernels.buckets(geometry, 4096) == [4096]


def test_what_is_written_is_what_the_check_accepts(tmp_path: Path) -> None:
    (tmp_path / "of_another_set.json").write_text("{}")
    tune.write(tmp_path, {"l2norm_fwd_kernel": autotuner(4, 8, 4), "other": autotuner(2, 8)}, MADE)
    made_for = {name: MADE[name] for name in ("triton", "fla", "dtype")}
    assert kernel_pins.problems(tmp_path, "NVIDIA H200", made_for) == {}
    assert kernel_pins.read_config(tmp_path, "l2norm_fwd_kernel")["num_warps"] == 4
    assert kernel_pins.read_config(tmp_path, "other")["num_warps"] == 8
    assert not (tmp_path / "of_another_set.json").exists()


def test_the_committed_pins_are_whole() -> None:
    folder = kernel_pins.folder("NVIDIA H200")
    named = kernel_pins.read_list(folder)
    made_for = {name: named[name] for name in ("triton", "fla", "dtype")}
    assert kernel_pins.problems(folder, named["gpu"], made_for) == {}
    assert named["dtype"] == "bfloat16"


def test_nothing_searches_on_a_cpu_or_with_the_reference() -> None:
    cpu = torch.device("cpu")
    assert kernels.searching_kernels(CONFIG, cpu) is None
    cuda = torch.device("cuda")
    assert kernels.searching_kernels(CONFIG, cuda) is not None
    reference = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, deltanet="reference"))
    assert kernels.searching_kernels(reference, cuda) is None


def test_a_trial_update_has_one_layer_of_each_kind() -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dtype="float32", build=TINY))
    model = trial.distinct_layers(config, torch.device("cpu"))
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert len(model.model.layers) == 2
    trial.whole_update(config, trial.LEAST, torch.device("cpu"))


SMALL = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TOWER = {"hidden_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32, "num_position_embeddings": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


@pytest.mark.parametrize(
    "build",
    [
        {"model_type": "llama", **SMALL},
        {"model_type": "qwen3_vl", "text_config": {**SMALL, "rope_parameters": ROPE}, "vision_config": TOWER},
    ],
    ids=["llama", "qwen3_vl"],
)
def test_a_trial_update_where_all_layers_are_alike(build: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dtype="float32", build=build))
    assert len(trial.distinct_layers(config, torch.device("cpu")).get_decoder().layers) == 1
    trial.whole_update(config, trial.LEAST, torch.device("cpu"))


def launched(*names: str, choices: int = 2) -> dict[str, SimpleNamespace]:
    """Kernels that ran, with so many configurations each."""
    return {name: SimpleNamespace(configs=[triton_config(4)] * choices) for name in names}


@pytest.mark.parametrize(
    ("ran", "searched", "listed", "cut_short", "wrong"),
    [
        (launched("a", "b"), {}, {"a", "b"}, {}, {}),
        (launched("a") | launched("helper", choices=1), {}, {"a"}, {}, {}),
        (launched("a", choices=1), {}, {"a"}, {}, {}),
        (launched("a", "b"), {"b": 2}, {"a", "b"}, {}, {"b": "searched 2 times"}),
        (launched("a", "b"), {}, {"a"}, {}, {"b": "launched, but not pinned"}),
        (launched("a", "b"), {"b": 1}, {"a"}, {}, {"b": "searched 1 time"}),
        (launched("a"), {}, {"a", "b"}, {}, {"b": "pinned, but not launched: made for another set"}),
        (launched("a"), {}, {"a", "b"}, {"memory": "out of memory"}, {"memory": "out of memory"}),
    ],
)
def test_a_kernel_that_searches_one_without_a_pin_and_pins_of_another_set_are_wrong(
    ran: dict[str, SimpleNamespace],
    searched: dict[str, int],
    listed: set[str],
    cut_short: dict[str, str],
    wrong: dict[str, str],
) -> None:
    launches = kernels.Launches(ran, Counter(searched))
    names, found = kernels.judge_launches(launches, listed, cut_short)
    assert found == wrong
    assert names == sorted(name for name in ran if name != "helper")


def test_pins_of_a_convolution_that_is_not_launched_are_not_missed() -> None:
    listed = {"causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel", "chunk_fwd_kernel_o"}
    assert kernels.wanted_pins(listed, "fla") == kernels.wanted_pins(listed, "fla_segments") == listed
    assert kernels.wanted_pins(listed, "fla_forest") == {"chunk_fwd_kernel_o"}


def test_kernels_are_made_ready_in_a_phase_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new machine compiles for long: that is neither loading nor an update, and has its own deadline."""
    phases = []

    def compile_ahead(config: Config, device: torch.device) -> float:
        phases.extend(beat.phase for beat in heartbeat.read(tmp_path))
        return 12.0

    monkeypatch.setattr(kernels, "use_pins", lambda dtype: f"kernels: pinned for {dtype}")
    monkeypatch.setattr(kernels, "compile_ahead", compile_ahead)
    monkeypatch.setitem(machine._machines, torch.device("cuda", 0), Machine("cuda", None, frozenset()))
    ranks = Ranks(0, 1, torch.device("cuda", 0), None)
    train.ready_kernels(CONFIG, ranks, heartbeat.Heartbeat(tmp_path, 0, 1))
    assert phases == ["compile"]
    (beat,) = heartbeat.read(tmp_path)
    assert (beat.phase, beat.completed) == ("load", 0)
    assert capsys.readouterr().out == (
        "kernels: pinned for bfloat16; compiled in 12 s; "
        "attention merged, deltanet fla, elementwise torch, heads torch\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
def test_tuning_needs_the_gpu() -> None:
    with pytest.raises(UserError, match="no CUDA device"):
        tune.tune(CONFIG)
    assert kernels.use_pins() == "kernels: no CUDA device, nothing to pin"


def test_nothing_is_proved_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        kernels.prove(CONFIG)
