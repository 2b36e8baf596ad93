"""One node's checks. Each runs within what is left of the node's deadline; none can end the others."""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from configs.schema import PreflightConfig
from preflight import imports
from preflight.programs import ask
from preflight.states import Finding, NodeReport

GIB = 1 << 30
REINSTALL = "install the same environment on this node, or point the job at the right one"


@dataclass(frozen=True)
class Setting:
    """What a check may ask for: the options, the folder whose disk matters, and the time left."""

    options: PreflightConfig
    folder: Path
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds until the node's deadline, at least a tenth."""
        return max(0.1, self.deadline - time.monotonic())


def collect(options: PreflightConfig, folder: Path) -> NodeReport:
    """Run every check on this node.

    folder: the run folder, or any folder on the file system that the run will write to.
    """
    began = time.monotonic()
    setting = Setting(options, folder, began + options.deadline_s)
    findings = [finding for check in CHECKS for finding in check(setting)]
    return NodeReport(socket.gethostname(), tuple(findings), round(time.monotonic() - began, 3))


def check_packages(setting: Setting) -> list[Finding]:
    """Declared against imported, for every package that matters."""
    wanted = [*imports.REQUIRED, *setting.options.packages, *imports.OPTIONAL]
    waiting, findings = list(dict.fromkeys(wanted)), []
    while waiting:
        answer = ask([sys.executable, "-m", "preflight.imports", *waiting], setting.left_s)
        lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
        described = [line for line in lines if "package" in line]
        findings += [judge_package(facts, setting.options) for facts in described]
        waiting = waiting[len(described) :]
        if waiting:
            findings.append(_import_failed(waiting.pop(0), answer.status, answer.last_error_line))
    return findings


def _import_failed(package: str, status: int | None, error: str) -> Finding:
    check = f"import.{package}"
    if status is None:
        return Finding(check, "silent", f"import {package} did not end in time")
    how = f"was killed by signal {-status}" if status < 0 else error
    return Finding(check, "fail", f"import {package}: {how}", f"repair or remove {package} on this node")


def judge_package(facts: dict[str, Any], options: PreflightConfig) -> Finding:
    """One package's facts (see `imports.describe`) -> a finding. Pure."""
    package, check = facts["package"], f"import.{facts['package']}"
    if facts["absent"]:
        needed = package in imports.REQUIRED or package in options.packages
        return Finding(check, "fail" if needed else "pass", f"{package} is not installed", REINSTALL, facts)
    declared, version = facts.get("declared"), facts["version"]
    origin = f"{facts['path']} (from {facts['from']})"
    if declared is None:
        return Finding(check, "fail", f"{package} is imported from {origin} but no installed package declares it",
                       "remove it from PYTHONPATH, or install it", facts)  # fmt: skip
    outside = not facts["editable"] and not Path(facts["path"]).is_relative_to(facts["folder"])
    if outside:
        return Finding(check, "fail", f"{package} {version} is imported from {origin}, which shadows the installed "
                       f"{declared} in {facts['folder']}", "take that folder off PYTHONPATH", facts)  # fmt: skip
    if version is not None and version.split("+")[0] != declared.split("+")[0]:
        return Finding(check, "fail", f"{package}: {declared} is declared, {version} is imported from {origin}",
                       REINSTALL, facts)  # fmt: skip
    return Finding(check, "pass", f"{package} {version or declared}", "", facts)


def check_python(setting: Setting) -> list[Finding]:
    """The interpreter."""
    facts = {"version": platform.python_version(), "executable": sys.executable, "kernel": platform.release()}
    return [Finding("python.version", "pass", f"Python {facts['version']} ({facts['executable']})", "", facts)]


def check_torch(setting: Setting) -> list[Finding]:
    """torch's backends and devices."""
    answer = ask([sys.executable, "-m", "preflight.torch_facts"], setting.left_s)
    if answer.status is None:
        return [Finding("torch.backends", "silent", "torch did not name its devices in time: is the driver stuck?")]
    if answer.status != 0:
        return [Finding("torch.backends", "broken", answer.last_error_line, "see `python -m preflight.torch_facts`")]
    facts = json.loads(answer.stdout.splitlines()[-1])
    found = f"torch {facts['torch']}, {len(facts['devices'])} GPUs, gloo {facts['gloo']}, nccl {facts['nccl']}"
    if facts["sum"] != 1000.0:
        return [Finding("torch.backends", "fail", f"a sum of 1000 ones gave {facts['sum']}", REINSTALL, facts)]
    if not facts["gloo"]:
        return [Finding("torch.backends", "fail", f"{found}: no gloo", "install a torch with gloo", facts)]
    return [Finding("torch.backends", "pass", found, "", facts)]


def check_host_name(setting: Setting) -> list[Finding]:
    """The name that other nodes will use must resolve; whether loopback will do is for the judge, who counts nodes."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except socket.gaierror as error:
        return [
            Finding("host.name", "fail", f"{name} does not resolve: {error.strerror}", "add it to DNS or /etc/hosts")
        ]
    loopback = all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)
    facts = {"addresses": addresses, "loopback": loopback}
    return [Finding("host.name", "pass", f"{name} is {', '.join(addresses)}", "", facts)]


def check_disk(setting: Setting) -> list[Finding]:
    """Free space and inodes where the run writes."""
    usage, inodes = shutil.disk_usage(setting.folder), os.statvfs(setting.folder)
    free, least = usage.free / GIB, setting.options.min_free_disk_gib
    facts = {"free_gib": round(free, 2), "free_inodes": inodes.f_favail, "inodes": inodes.f_files}
    found = f"{free:.1f} GiB free at {setting.folder}"
    if free < least:
        return [Finding("host.disk", "fail", f"{found}, {least} are wanted (preflight.min_free_disk_gib)",
                        "free some space, or set run_root elsewhere", facts)]  # fmt: skip
    if inodes.f_files and inodes.f_favail < 1000:
        return [Finding("host.disk", "fail", f"{found}, but only {inodes.f_favail} inodes", "remove files", facts)]
    return [Finding("host.disk", "pass", found, "", facts)]


def check_memory(setting: Setting) -> list[Finding]:
    """Memory that programs can have."""
    free, least = psutil.virtual_memory().available / GIB, setting.options.min_free_memory_gib
    facts, found = {"available_gib": round(free, 2)}, f"{free:.1f} GiB of memory available"
    if free < least:
        return [Finding("host.memory", "fail", f"{found}, {least} are wanted (preflight.min_free_memory_gib)",
                        "end what else runs on this node", facts)]  # fmt: skip
    return [Finding("host.memory", "pass", found, "", facts)]


CHECKS: Sequence[Callable[[Setting], list[Finding]]] = (
    check_python,
    check_host_name,
    check_disk,
    check_memory,
    check_packages,
    check_torch,
)
