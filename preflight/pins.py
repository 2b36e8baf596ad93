"""Kernel pins of this node: files that are there, valid, and made for what is imported here; then the proof."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import kernel_pins
from configs.schema import ModelConfig
from configs.wording import counted
from preflight.programs import ask
from preflight.setting import Setting
from preflight.states import Finding

RETUNE = "run `prefix-train tune CONFIG` on such a GPU and commit what it writes"


def needed(setting: Setting, findings: Sequence[Finding]) -> str | None:
    """The GPU model whose pins the job needs, None where no kernel of the job searches."""
    torch = next((finding.facts for finding in findings if finding.check == "torch.backends"), {})
    devices, model = torch.get("devices") or [], setting.config.model
    if not devices or not setting.wants_gpus or model.deltanet == "reference" or not has_delta_net(model):
        return None
    return str(devices[0])


def has_delta_net(model: ModelConfig) -> bool:
    """Whether the model has Gated DeltaNet layers, whose kernels search; told by its configuration's text."""
    config = Path(model.path or "") / "config.json"
    text = json.dumps(model.build) if not model.path else config.read_text() if config.is_file() else ""
    return re.search(r"qwen3_(5|next)|linear_attention", text) is not None


def check_pins(setting: Setting, findings: Sequence[Finding]) -> list[Finding]:
    """From what imports and torch said, and the files of the folder: which kernels are pinned, which not and why."""
    gpu = needed(setting, findings)
    if gpu is None:
        return [Finding("pins.files", "pass", "no pinned kernel is wanted")]
    versions = {name: _version(findings, name) for name in ("triton", "fla")}
    made_for = {**versions, "dtype": setting.config.model.dtype}
    pins = Path(os.environ.get("FLA_CONFIG_DIR") or kernel_pins.folder(gpu))
    return [judge_pins(pins, gpu, made_for, os.environ.get("FLA_CACHE_MODE"))]


def judge_pins(pins: Path, gpu: str, versions: dict[str, str | None], mode: str | None) -> Finding:
    """The folder `pins` against what is here: versions of Triton and FLA, and the model's dtype.

    mode: FLA_CACHE_MODE, None: a rank sets it itself.
    """
    if mode not in (None, "default"):
        return Finding("pins.files", "fail", f"FLA_CACHE_MODE is {mode!r}: pins would not be read", "unset it")
    why_not = kernel_pins.problems(pins, gpu, versions)
    listed = sorted(kernel_pins.read_list(pins)["kernels"]) if kernel_pins.LIST not in why_not else []
    pinned = [kernel for kernel in listed if kernel not in why_not]
    facts = {"folder": str(pins), "pinned": pinned, "not_pinned": why_not}
    if why_not:
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in why_not.items())
        found = f"{reasons} ({counted(len(pinned), 'pinned kernel')} in {pins})"
        return Finding("pins.files", "fail", found, RETUNE, facts)
    facts["digest"] = kernel_pins.digest(pins)
    return Finding(
        "pins.files",
        "pass",
        f"{counted(len(pinned), 'kernel')} pinned for {gpu}, Triton {versions['triton']}",
        "",
        facts,
    )


def check_proof(setting: Setting, findings: Sequence[Finding]) -> list[Finding]:
    """Run every kernel of the job once and count searches: none may happen. Only where the files are right."""
    files = [finding for finding in findings if finding.check == "pins.files"]
    if needed(setting, findings) is None or not setting.config.preflight.prove_pins or files[0].state != "pass":
        return []
    program = [sys.executable, "-m", "prefix_train.cli", "kernels", str(setting.run), "--prove", "--json"]
    answer = ask(program, setting.config.preflight.prove_deadline_s)
    if answer.status is None:
        return [
            Finding("pins.proof", "silent", "the kernels did not all run in time", "raise preflight.prove_deadline_s")
        ]
    if not answer.documents:
        return [
            Finding("pins.proof", "broken", answer.last_error_line, f"see `prefix-train kernels {setting.run} --prove`")
        ]
    found = answer.documents[-1]
    if found["passed"]:
        ran, facts = counted(len(found["launched"]), "kernel"), {"kernels": found.get("kernels")}
        return [Finding("pins.proof", "pass", f"{ran} ran, none searched", "", facts)]
    reasons = "; ".join(f"{kernel}: {why}" for kernel, why in found["problems"].items())
    return [Finding("pins.proof", "fail", reasons, RETUNE, {"launched": found["launched"]})]


def _version(findings: Sequence[Finding], package: str) -> str | None:
    facts = next((finding.facts for finding in findings if finding.check == f"import.{package}"), {})
    version = facts.get("version") or facts.get("declared")
    return None if version is None else str(version)
