"""Combinations of versions that are known to compute wrong numbers or to fail: data, each with its source and date."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from preflight.setting import Setting
from preflight.states import Finding

HOPPER = (9, 0)


@dataclass(frozen=True)
class Facts:
    """What a row may ask of a node.

    versions: of imported packages, without those that are absent or cannot be imported. errors: what failing imports
    said. capability: of the first GPU. cuda: of torch's build. driver: of the GPU. nvcc: whether a compiler is here.
    fla_kernels: whether the job runs flash-linear-attention's kernels.
    """

    versions: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    capability: tuple[int, ...] | None = None
    cuda: str | None = None
    driver: str | None = None
    nvcc: bool = False
    fla_kernels: bool = False

    def within(self, package: str, least: str, below: str) -> bool:
        """Whether `package` is here in a version of [least, below)."""
        version = self.versions.get(package)
        return version is not None and numbers(least) <= numbers(version) < numbers(below)


@dataclass(frozen=True)
class Row:
    """One known-bad combination."""

    name: str
    applies: Callable[[Facts], bool]
    why: str
    advice: str
    source: str
    date: str


def numbers(version: str) -> tuple[int, ...]:
    """`3.6.0+git1` -> (3, 6, 0): a release's numbers, for comparing."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _wrong_gradients(facts: Facts) -> bool:
    bad = facts.capability == HOPPER and facts.within("triton", "3.4.0", "3.7.1") and facts.fla_kernels
    return bad and not ("tilelang" in facts.versions and facts.nvcc)


ROWS = (
    Row(
        "triton_hopper_gradients",
        _wrong_gradients,
        "Triton from 3.4.0 to before 3.7.1 computes wrong Gated DeltaNet gradients on Hopper; FLA refuses unless "
        "tilelang and nvcc are there",
        "install triton>=3.7.1, or tilelang and nvidia-cuda-nvcc",
        "https://github.com/fla-org/flash-linear-attention/issues/640; fla/ops/common/chunk_o.py of FLA 0.6.0",
        "2026-11-30",
    ),
    Row(
        "tilelang_half_installed",
        lambda facts: any("z3" in facts.errors.get(package, "") for package in ("tilelang", "fla")),
        "tilelang does not find z3's library, which breaks `import fla` altogether",
        "install z3-solver beside tilelang, or uninstall tilelang",
        "measured with tilelang 0.1.15 and FLA 0.6.0",
        "2026-11-30",
    ),
    Row(
        "transformers_drops_boundaries",
        lambda facts: facts.within("transformers", "5.2.0", "5.9.0"),
        "transformers from 5.2.0 to before 5.9.0 drops the boundary argument before Gated DeltaNet, without a word",
        "install transformers>=5.24",
        "https://github.com/modelscope/ms-swift/issues/9618, https://github.com/huggingface/transformers/issues/46093",
        "2026-06-22",
    ),
    Row(
        "cuda13_old_driver",
        lambda facts: bool(
            facts.cuda and numbers(facts.cuda)[0] >= 13 and facts.driver and numbers(facts.driver) < (580,)
        ),
        "a torch built for CUDA 13 needs a driver of 580 or newer",
        "update the driver, or install a torch built for CUDA 12",
        "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ (table of least driver versions)",
        "2025-08-04",
    ),
    Row(
        "fla_without_pins",
        lambda facts: facts.fla_kernels and facts.within("fla", "0", "0.5.1"),
        "FLA before 0.5.1 does not know FLA_CACHE_MODE: every rank would search for kernels, whatever is pinned",
        "install flash-linear-attention>=0.6",
        "fla/ops/utils/cache.py of fla-core 0.5.0 and 0.5.1",
        "2026-11-30",
    ),
)


def check_known_bad(setting: Setting, findings: Sequence[Finding]) -> list[Finding]:
    """The rows that apply to this node, from what the other checks found."""
    return judge_known_bad(gather(setting, findings))


def judge_known_bad(facts: Facts) -> list[Finding]:
    """Rows that apply -> one failing finding each, `known.<row>`. Pure."""
    found = [
        Finding(f"known.{row.name}", "fail", f"{row.why} ({row.source}, {row.date})", row.advice)
        for row in ROWS
        if row.applies(facts)
    ]
    return found or [Finding("known.bad", "pass", f"none of {len(ROWS)} known-bad combinations")]


def gather(setting: Setting, findings: Sequence[Finding]) -> Facts:
    """What the rows ask for, out of the findings so far."""
    by_check = {finding.check: finding.facts for finding in findings}
    packages = [finding.facts for finding in findings if finding.check.startswith("import.") and finding.facts]
    torch, gpus = by_check.get("torch.backends", {}), by_check.get("device.gpus", {}).get("gpus") or []
    versions = {facts["package"]: facts["version"] or facts["declared"] for facts in packages if "version" in facts}
    capability = torch.get("capability")
    return Facts(
        versions={package: version for package, version in versions.items() if version},
        errors={facts["package"]: facts["error"] for facts in packages if "error" in facts},
        capability=tuple(capability) if capability else None,
        cuda=torch.get("cuda"),
        driver=gpus[0]["driver_version"] if gpus else None,
        nvcc=has_nvcc(),
        fla_kernels="fla" in versions and setting.config.model.deltanet != "reference",
    )


def has_nvcc() -> bool:
    """Whether FLA finds a compiler for tilelang's kernels (fla/utils/env.py of 0.6.0, has_usable_nvcc)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or any(
        (Path(folder) / "bin" / "nvcc").exists() for folder in (home, "/usr/local/cuda")
    )
