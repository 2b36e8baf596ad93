"""Kernel pins as files: which are right, which not and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs import kernel_pins, runfolder
from preflight.pins import judge_pins

GPU = "NVIDIA H200"
VERSIONS: dict[str, str | None] = {"triton": "3.6.0", "fla": "0.6.0", "dtype": "bfloat16"}
CONFIG = {"kwargs": {"BK": 64}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}
MADE = {**VERSIONS, "gpu": GPU, "date": "2026-11-30"}
KERNELS = {"chunk_fwd_kernel_o": "fla", "l2norm_fwd_kernel": "triton", "causal_conv1d_fwd_kernel": "fla"}


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    folder = kernel_pins.folder(GPU, tmp_path)
    assert folder.name == "NVIDIA_H200"
    for kernel in KERNELS:
        runfolder.write_json(folder / f"{kernel}.json", kernel_pins.document(kernel, CONFIG, MADE, []))
    listed = {kernel: kernel_pins.entry(folder, kernel, kind) for kernel, kind in KERNELS.items()}
    runfolder.write_json(folder / kernel_pins.LIST, {**MADE, "kernels": listed})
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_whole_pins_pass_with_a_digest(pins: Path) -> None:
    finding = judge_pins(pins, GPU, VERSIONS, None)
    assert finding.state == "pass"
    assert finding.facts["digest"] == judge_pins(pins, GPU, VERSIONS, "default").facts["digest"]
    assert kernel_pins.read_config(pins, "chunk_fwd_kernel_o") == CONFIG


def test_r39_a_config_file_is_missing(pins: Path) -> None:
    (pins / "l2norm_fwd_kernel.json").unlink()
    finding = judge_pins(pins, GPU, VERSIONS, "default")
    assert finding.state == "fail"
    assert finding.facts["pinned"] == ["causal_conv1d_fwd_kernel", "chunk_fwd_kernel_o"]
    assert finding.facts["not_pinned"] == {"l2norm_fwd_kernel": "file missing"}
    assert "2 pinned kernels" in finding.found
    assert finding.found.startswith("l2norm_fwd_kernel: file missing (")


def test_r39_fails_without_the_list_of_kernels(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of files alone, as FLA reads it, does not show that one is gone."""
    (pins / "l2norm_fwd_kernel.json").unlink()
    read = kernel_pins.read_list

    def what_is_there(folder: Path) -> dict[str, Any]:
        listed = read(folder)
        there = {kernel: entry for kernel, entry in listed["kernels"].items() if (folder / f"{kernel}.json").exists()}
        return {**listed, "kernels": there}

    monkeypatch.setattr(kernel_pins, "read_list", what_is_there)
    assert judge_pins(pins, GPU, VERSIONS, "default").state == "pass"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"default_config": None}, "malformed: no default_config"),
        (
            {"default_config": {"kwargs": {}, "num_warps": 4, "num_stages": 2}},
            "malformed: default_config has no num_ctas",
        ),
        ({"default_config": {**CONFIG, "num_warps": 8}}, "edited since it was made"),
        ({"kernel_name": "another"}, "made for kernel another"),
    ],
)
def test_a_file_that_is_not_right(pins: Path, changes: dict[str, Any], why: str) -> None:
    edit(pins / "chunk_fwd_kernel_o.json", **changes)
    assert judge_pins(pins, GPU, VERSIONS, None).facts["not_pinned"] == {"chunk_fwd_kernel_o": why}


def test_a_file_that_is_not_json(pins: Path) -> None:
    (pins / "chunk_fwd_kernel_o.json").write_text("{")
    assert "malformed" in judge_pins(pins, GPU, VERSIONS, None).facts["not_pinned"]["chunk_fwd_kernel_o"]


@pytest.mark.parametrize(
    ("gpu", "versions", "words"),
    [
        ("NVIDIA H100", VERSIONS, "made for gpu NVIDIA H200, here is NVIDIA H100"),
        (GPU, VERSIONS | {"triton": "3.7.1"}, "made for triton 3.6.0, here is 3.7.1"),
        (GPU, VERSIONS | {"fla": "0.6.1"}, "made for fla 0.6.0, here is 0.6.1"),
        (GPU, VERSIONS | {"dtype": "float32"}, "made for dtype bfloat16, here is float32"),
    ],
)
def test_pins_made_for_something_else(pins: Path, gpu: str, versions: dict[str, str | None], words: str) -> None:
    finding = judge_pins(pins, gpu, versions, None)
    assert finding.state == "fail"
    assert words in finding.found


def test_pins_of_another_gpu_say_so_first_and_all_else_behind(pins: Path) -> None:
    (pins / "l2norm_fwd_kernel.json").unlink()
    found = judge_pins(pins, "NVIDIA H100", VERSIONS | {"dtype": "float32"}, None).found
    gpu, dtype = "made for gpu NVIDIA H200, here is NVIDIA H100", "made for dtype bfloat16, here is float32"
    assert found.startswith(f"pins.json: {gpu}; {dtype}; l2norm_fwd_kernel: file missing (")


def test_a_file_that_no_list_names(pins: Path) -> None:
    runfolder.write_json(pins / "stray.json", kernel_pins.document("stray", CONFIG, MADE, []))
    assert judge_pins(pins, GPU, VERSIONS, None).facts["not_pinned"] == {
        "stray": "has a file, but the list does not name it"
    }


def test_no_folder_no_list_a_spoilt_list_and_another_mode(pins: Path, tmp_path: Path) -> None:
    assert "does not exist" in judge_pins(tmp_path / "none", GPU, VERSIONS, None).found
    assert "FLA_CACHE_MODE is 'strict'" in judge_pins(pins, GPU, VERSIONS, "strict").found
    (pins / kernel_pins.LIST).write_text("[]")
    assert "malformed" in judge_pins(pins, GPU, VERSIONS, None).found
    (pins / kernel_pins.LIST).unlink()
    assert "missing in" in judge_pins(pins, GPU, VERSIONS, None).found
