"""One node's checks. Each runs within what is left of the node's deadline; none can end the others."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs.schema import Config
from configs.wording import counted
from preflight.device import check_device
from preflight.host import check_host
from preflight.known_bad import check_known_bad
from preflight.packages import REINSTALL, check_code, check_packages
from preflight.pins import check_pins, check_proof
from preflight.programs import ask
from preflight.setting import Setting
from preflight.states import Finding, NodeReport

Check = Callable[[Setting], list[Finding]]


def node_name() -> str:
    """This node as Slurm calls it, or by its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def collect(config: Config, run: Path | None) -> NodeReport:
    """Run every check on this node; those of one stage at the same time, each a program of its own."""
    began = time.monotonic()
    setting = Setting(config, run, began + config.preflight.deadline_s)
    findings: list[Finding] = []
    for stage in STAGES:
        with ThreadPoolExecutor(len(stage)) as pool:
            findings += [finding for found in pool.map(lambda check: check(setting), stage) for finding in found]
    for conclude in CONCLUSIONS:
        findings += conclude(setting, findings)
    return NodeReport(node_name(), tuple(findings), round(time.monotonic() - began, 3), time.time())


def check_python(setting: Setting) -> list[Finding]:
    """The interpreter."""
    facts = {"version": platform.python_version(), "executable": sys.executable, "kernel": platform.release()}
    return [Finding("python.version", "pass", f"Python {facts['version']} ({facts['executable']})", "", facts)]


def check_torch(setting: Setting) -> list[Finding]:
    """torch's backends and devices, and the libraries that a collective maps."""
    answer = ask([sys.executable, "-m", "preflight.torch_facts"], setting.left_s)
    if answer.status is None:
        return [Finding("torch.backends", "silent", "torch did not name its devices in time: is the driver stuck?")]
    if answer.status != 0:
        how = f"killed by signal {-answer.status}" if answer.status < 0 else answer.last_error_line
        return [Finding("torch.backends", "broken", how, "see `python -m preflight.torch_facts`")]
    facts = answer.documents[-1]
    libraries, sizes = facts.pop("libraries"), facts.pop("bytes")
    found = (
        f"torch {facts['torch']}, {counted(len(facts['devices']), 'GPU')}, gloo {facts['gloo']}, nccl {facts['nccl']}"
    )
    wrong = _torch_wrong(facts, setting.wants_gpus)
    backends = Finding("torch.backends", "fail", *wrong, facts) if wrong else _passed("torch.backends", found, facts)
    named = ", ".join(f"{name} {path}" for name, path in libraries.items()) or "none of CUDA, NCCL, network plugins"
    return [backends, _passed("libraries.mapped", named, {"libraries": libraries, "bytes": sizes})]


def _torch_wrong(facts: dict[str, Any], gpus: int | None) -> tuple[str, str] | None:
    if facts["sum"] != 1000.0:
        return f"a sum of 1000 ones gave {facts['sum']}", REINSTALL
    if not facts["gloo"]:
        return "torch has no gloo", "install a torch with gloo"
    if gpus and len(facts["devices"]) < gpus:
        return (f"torch sees {counted(len(facts['devices']), 'GPU')}, {gpus} wanted (slurm.gpus_per_node)",
                "see the driver, CUDA_VISIBLE_DEVICES and torch's CUDA build")  # fmt: skip
    if gpus and not facts["nccl"]:
        return "torch has no NCCL", "install a torch with CUDA"
    return None


def _passed(check: str, found: str, facts: dict[str, Any]) -> Finding:
    return Finding(check, "pass", found, "", facts)


STAGES: Sequence[Sequence[Check]] = (
    (check_python,),
    (check_device,),
    (check_packages, check_torch, check_host, check_code),
)
"""Checks of one stage run at the same time. The device is asked while nothing of ours runs on it."""

CONCLUSIONS: Sequence[Callable[[Setting, Sequence[Finding]], list[Finding]]] = (
    check_known_bad,
    check_pins,
    check_proof,
)
"""Checks of what the others found."""
