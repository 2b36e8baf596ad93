"""What an update could take at best, and what the driver says of the budget."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.errors import UserError
from prefix_train import kernels
from prefix_train.budget import GIB, ITEMSIZE
from prefix_train.geometry import Geometry, read_config
from prefix_train.layer_bytes import mixer_bytes
from prefix_train.stream import bench_parts, engine, planner, readings
from prefix_train.stream.bench import Case, ratios
from prefix_train.stream.pace import Pace

GPU = torch.device("cuda", 0)


def test_the_least_time_is_the_longer_of_reading_and_computing() -> None:
    pace = Pace(bytes_per_s=20e9, flops_per_s=500e12, flops=180 * 10**9)
    assert pace.least_s(30 * 10**9, 1024) == pytest.approx(1.5)
    assert pace.least_s(30 * 10**9, 8192) == pytest.approx(180e9 * 8192 / 500e12)
    assert Pace(0.0, 500e12, 180 * 10**9).least_s(10**9, 1000) == pytest.approx(0.36)  # all blocks stay


def test_more_than_the_budget_by_the_driver_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "of_process", lambda device: int(6.11 * GIB))
    with pytest.raises(
        UserError,
        match=r"stream.budget_gib is 6, .* uses 6.11 GiB .* the 0.90 GiB of .* lower stream.budget_gib by 0.11",
    ):
        engine.within(6 * GIB, GPU, int(0.9 * GIB))
    assert engine.within(int(6.2 * GIB), GPU, GIB) == {"stream_driver_bytes": int(6.11 * GIB)}


def test_a_driver_that_does_not_tell_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(device: torch.device) -> int:
        raise readings.NoReading("nvidia-smi: no such file")

    monkeypatch.setattr(readings, "of_process", none)
    assert engine.within(GIB, GPU, GIB) == {}
    assert "the driver does not say what this process uses: nvidia-smi: no such file" in capsys.readouterr().out


def test_this_process_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = str(os.getpid())
    monkeypatch.setattr(readings, "_ask", lambda query, gpu: [["1", "9000"], [mine, "512"], ["2", "[N/A]"]])
    assert readings.of_process(GPU) == 512 << 20
    monkeypatch.setattr(readings, "_ask", lambda query, gpu: [["77", "640"]])  # its id is another in a container
    assert readings.of_process(GPU) == 640 << 20
    monkeypatch.setattr(readings, "_ask", lambda query, gpu: [["1", "9000"], ["2", "100"]])
    with pytest.raises(readings.NoReading, match="lists 2 processes on GPU 0, and not this one"):
        readings.of_process(GPU)


def event(name: str, count: int, device_us: float = 0.0, host_us: float = 0.0) -> Any:
    return SimpleNamespace(
        key=name, count=count, self_device_time_total=device_us, self_cpu_time_total=host_us
    )  # fmt: skip


def test_a_profile_is_told_by_kinds() -> None:
    found = bench_parts.of_profile(
        [
            event("Memcpy HtoD (Pinned -> Device)", 500, 900_000),
            event("nf4_dequantise", 1344, 90_000),
            event("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 1300, 250_000),
            event("sm90_xmma_gemm_bf16bf16", 100, 50_000),
            event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 128, 30_000),
            event("void at::native::vectorized_elementwise_kernel", 9000, 80_000),
            event("cudaLaunchKernel", 12_000, 0, 400_000),
            event("cudaMalloc", 14, 0, 120_000),
            event("cudaStreamSynchronize", 3, 0, 1000),
        ]
    )
    kinds = {"copies": 0.9, "dequantising": 0.09, "attention": 0.03, "products": 0.3, "other": 0.08}
    assert found["kinds_s"] == pytest.approx(kinds)
    assert found["kernels_s"] == pytest.approx(0.5)
    assert found["launches"] == 1344 + 1400 + 128 + 9000
    assert [call["call"] for call in found["calls"]] == ["cudaMalloc", "cudaStreamSynchronize"]
    assert bench_parts.changed({"num_device_alloc": 3}, {"num_device_alloc": 17}) == {"num_device_alloc": 14}


def test_each_way_of_hosting_has_its_own_ratio() -> None:
    rows = [
        {"row": "pack", "all_s": 2.0},
        {"row": "accumulated", "all_s": 20.0},
        {"row": "pack@stream.host=pinned", "all_s": 1.0},
        {"row": "accumulated@stream.host=pinned", "all_s": 15.0},
        {"row": "pack@stream.slots=2", "all_s": 1.0},
        {"row": "1024", "all_s": 1.0},
    ]
    assert ratios(rows) == {"pack": 10.0, "pack@stream.host=pinned": 15.0}


def test_kernels_are_proved_with_what_the_budget_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with what the whole GPU would."""
    config = Case("qwen3.6-27b", "no store").config(("pack.max_positions=1024",))
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    geometry = Geometry.of(read_config(config.model))
    kernels.leave_what_a_pack_leaves(config, geometry, GPU)
    plan = planner.make(config)
    layer = mixer_bytes(geometry, "linear_attention", plan.shape, ITEMSIZE["bfloat16"])
    assert shares == [pytest.approx((6 * GIB - plan.needed + layer) / (100 * GIB))]
    assert shares[0] < 0.06
