"""What `nvidia-smi` says of a node's GPUs, from captured or planted answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from configs import runfolder
from configs.schema import Config, SlurmConfig
from preflight import baseline, device
from preflight.setting import Setting
from preflight.states import NodeReport
from tests.bench.preflight_node import H200


def gpu(**changes: str) -> list[str]:
    """One row of nvidia-smi's answer, a healthy H200's but for `changes`."""
    fields = H200 | {name.replace("__", "."): value for name, value in changes.items()}
    return [fields[name] for name in device.FIELDS]


def test_a_healthy_gpu_passes() -> None:
    findings = device.judge_gpus([gpu(), gpu(index="1", uuid="GPU-2", power__draw="[N/A]")], [], 2)
    assert [(finding.check, finding.state) for finding in findings] == [("device.gpus", "pass")]


@pytest.mark.parametrize(
    ("changes", "apps", "check", "words"),
    [
        ({}, [["GPU-1", "4711", "9000"]], "device.busy", "4711"),
        ({"memory__used": "9000"}, [], "device.busy", "9000 MiB in use and no process"),
        ({"utilization__gpu": "99"}, [], "device.busy", "99% busy"),
        ({"ecc__errors__uncorrected__volatile__total": "2"}, [], "device.ecc", "2 uncorrected"),
        ({"clocks_throttle_reasons__active": "0x0000000000000048"}, [], "device.throttled", "hardware slowdown, hardw"),
        ({"pcie__link__width__current": "8"}, [], "device.pcie", "8 of 16 PCIe lanes"),
        ({"compute_mode": "Prohibited"}, [], "device.mode", "Prohibited"),
    ],
)
def test_unfit_gpus(changes: dict[str, str], apps: list[list[str]], check: str, words: str) -> None:
    (finding,) = [f for f in device.judge_gpus([gpu(**changes)], apps, 1) if f.state != "pass"]
    assert finding.check == check
    assert finding.state == "fail"
    assert words in finding.found


def test_resting_reasons_and_absent_counters_are_healthy() -> None:
    row = gpu(clocks_throttle_reasons__active="0x0000000000000005", ecc__errors__uncorrected__volatile__total="[N/A]")
    assert [f.state for f in device.judge_gpus([row], [], 1)] == ["pass"]


@pytest.mark.parametrize("said", ["[Unknown Error]", "[GPU requires reset]", "[GPU is lost]", "ERR!"])
def test_a_gpu_that_cannot_be_read_is_one_finding_with_its_fields(said: str) -> None:
    sick = gpu(index="1", uuid="GPU-2", power__limit=said, temperature__gpu=said, ecc__mode__current="[N/A]")
    findings = device.judge_gpus([gpu(), sick, gpu(index="2", uuid="GPU-3")], [], 3)
    assert [(finding.check, finding.state) for finding in findings] == [("device.gpus", "fail")]
    assert findings[0].found == f"nvidia-smi says of GPU 1 {said} for temperature.gpu, power.limit"
    assert len(findings[0].facts["gpus"]) == 3


@pytest.mark.parametrize("said", ["[N/A]", "[Not Supported]", "[Insufficient Permissions]", "N/A"])
def test_a_field_that_the_gpu_does_not_have_is_healthy(said: str) -> None:
    row = gpu(power__draw=said, temperature__gpu=said, ecc__mode__current=said, clocks__sm=said)
    assert [finding.state for finding in device.judge_gpus([row], [], 1)] == ["pass"]


def test_a_missing_gpu() -> None:
    (finding,) = device.judge_gpus([gpu()], [], 2)
    assert finding.state == "fail"
    assert "1 GPU here, 2 wanted" in finding.found


@pytest.mark.parametrize("name", device.ALIKE)
def test_one_gpu_that_is_not_as_the_others_of_its_node(name: str) -> None:
    rows = [gpu(index=str(index), uuid=f"GPU-{index}", **({name: "42"} if index == 3 else {})) for index in range(4)]
    (finding,) = [finding for finding in device.judge_gpus(rows, [], 4) if finding.state != "pass"]
    assert finding.check == "device.unlike"
    assert finding.found.startswith(f"{name} is ")
    assert finding.found.endswith("on 3 of 4 GPUs, but GPU 3: 42")


MATRIX = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPHB\tNODE\t0-47\t0
GPU1\tNV18\t X \tNV18\tNODE\t0-47\t0
GPU2\tPHB\tNV18\t X \tNODE\t0-47\t0
NIC0\tNODE\tNODE\tNODE\t X \t\t

Legend:
  X    = Self
"""


def test_links_between_gpus() -> None:
    finding = device.judge_links(MATRIX)
    assert finding.facts == {"links": {"0-1": "NV18", "0-2": "PHB", "1-2": "NV18"}}
    assert finding.found == "NV18 between 2 pair(s), PHB between 1 pair(s)"
    assert device.judge_links("no such command").state == "broken"


def test_gpus_at_rest_are_kept_for_later_readings(tmp_path: Path) -> None:
    rows = [gpu(index="1", uuid="GPU-2", power__draw="[N/A]"), gpu(utilization__memory="1")]
    answer = NodeReport("a node/1", tuple(device.judge_gpus(rows, [], 2)))
    runfolder.write_json(baseline.answer_path(tmp_path, 3, "a node/1"), answer.to_json())
    first, second = baseline.at_rest(tmp_path, 3, "a node/1")
    assert first == baseline.AtRest(0, "GPU-1", 0.0, 1.0, 78.2, 345.0)
    assert (second.index, second.uuid, second.power_w) == (1, "GPU-2", None)
    assert baseline.at_rest(tmp_path, 2, "a node/1") == ()


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """nvidia-smi on the path as a shell script; a job that wants one GPU."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Setting(Config(slurm=SlurmConfig(gpus_per_node=1)), Path("/run"))


def test_r38_nvidia_smi_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = stand_in(tmp_path, "sleep 600", monkeypatch)
    monkeypatch.setattr(device, "DEADLINE_S", 1.0)
    began = time.monotonic()
    (finding,) = device.check_device(setting)
    assert time.monotonic() - began < 60
    assert finding.state == "silent"
    assert finding.found == "nvidia-smi did not answer in 1 s: driver stuck"


def test_r38_fails_without_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the answer comes when the stand-in ends, and as something else."""
    setting = stand_in(tmp_path, "sleep 2; exit 9", monkeypatch)
    monkeypatch.setattr(device, "DEADLINE_S", 600.0)
    (finding,) = device.check_device(setting)
    assert finding.state != "silent"


@pytest.mark.parametrize(
    ("script", "state", "words"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9", "fail", "status 9"),
        ("echo 'Unable to determine the device handle for GPU1: Unknown Error' >&2; exit 255", "fail", "Unknown Error"),
        ("echo gibberish", "broken", "gibberish"),
        ("exit 0", "fail", "0 GPUs here"),
    ],
)
def test_a_failing_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str, words: str
) -> None:
    (finding,) = device.check_device(stand_in(tmp_path, script, monkeypatch))
    assert finding.state == state
    assert words in finding.found


def test_no_nvidia_smi_is_fine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.check_device(Setting())[0].state == "pass"
    assert device.check_device(Setting(Config(), Path("/run")))[0].state == "pass"
    wanted = Setting(Config(slurm=SlurmConfig(gpus_per_node=1)), Path("/run"))
    assert device.check_device(wanted)[0].state == "fail"
