"""What `nvidia-smi` says of this node's GPUs, before anything of ours touches them."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from typing import Any

from configs.wording import counted
from preflight.programs import ask
from preflight.setting import Setting
from preflight.states import Finding

SMI = "nvidia-smi"
DEADLINE_S = 20.0
"""A healthy driver answers in a second or two, without persistence mode in up to ten."""
FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "memory.used", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active", "persistence_mode", "mig.mode.current",
    "clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "utilization.gpu", "utilization.memory",
    "power.limit", "compute_mode", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
ALIKE = ("name", "driver_version", "memory.total", "ecc.mode.current", "persistence_mode", "mig.mode.current",
         "clocks.max.sm", "power.limit", "compute_mode")  # fmt: skip
"""What must be the same for all GPUs of a job: the slowest one sets the pace."""
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
             0x80: "hardware power brake"}  # fmt: skip
"""Bits of clocks_throttle_reasons.active that no healthy GPU shows at rest (NVML, nvmlClocksThrottleReasons)."""
UNREADABLE = re.compile(r"\[?(unknown error|gpu requires reset|gpu is lost|err!)\]?", re.IGNORECASE)
"""What nvidia-smi prints for a field of a GPU in trouble, and ends with status 0; [N/A] and [Not Supported] are fields
that this GPU does not have."""
MOST_USED_MIB = 2048
"""Memory that a driver may hold by itself."""
MOST_BUSY = 10
"""Percent of utilisation at rest."""


def check_device(setting: Setting) -> list[Finding]:
    """Facts of every GPU, whether they are fit to train, and how they are linked."""
    wanted = setting.wants_gpus
    if wanted == 0 or (wanted is None and shutil.which(SMI) is None):
        return [Finding("device.gpus", "pass", "no GPU is wanted" if wanted == 0 else "no GPU here", "", {"gpus": []})]
    texts = []
    for question in (f"--query-gpu={','.join(FIELDS)}", "--query-compute-apps=gpu_uuid,pid,used_memory"):
        answer = _ask(setting, question, "--format=csv,noheader,nounits")
        if isinstance(answer, Finding):
            return [answer]
        texts.append(answer)
    gpus = _rows(texts[0])
    findings = judge_gpus(gpus, _rows(texts[1]), wanted)
    if len(gpus) > 1 and findings[0].state == "pass":
        answer = _ask(setting, "topo", "-m")
        findings.append(judge_links(answer) if isinstance(answer, str) else answer)
    return findings


def _ask(setting: Setting, *question: str) -> str | Finding:
    """What nvidia-smi prints, or what is wrong where it does not answer."""
    seconds = min(DEADLINE_S, setting.left_s)
    try:
        answer = ask([SMI, *question], seconds)
    except FileNotFoundError:
        return _finding(
            "fail",
            f"{counted(setting.wants_gpus or 0, 'GPU')} wanted, but there is no {SMI}",
            "install the driver here",
        )
    if answer.status is None:
        return _finding("silent", f"{SMI} did not answer in {seconds:.0f} s: driver stuck", "reboot this node")
    if answer.status != 0:
        said = (answer.stdout.strip() or answer.stderr.strip()).splitlines()
        how = said[-1] if said else "without a word"
        return _finding("fail", f"{SMI} ended with status {answer.status}: {how}", "repair or reboot this node")
    return answer.stdout


def judge_links(matrix: str) -> Finding:
    """The matrix of `nvidia-smi topo -m` -> how each pair of GPUs is linked (NV18: NVLink), for comparing. Pure."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    rows = [cells for cells in lines if len(cells) > 1 and re.fullmatch(r"GPU\d+", cells[0])]
    rows = [cells for cells in rows if not re.fullmatch(r"GPU\d+", cells[1])]  # not the line of headings
    if not rows:
        return Finding("device.links", "broken", f"{SMI} topo -m printed no matrix", f"see `{SMI} topo -m`")
    links = {f"{a}-{b}": rows[a][1 + b] for a in range(len(rows)) for b in range(a + 1, len(rows))}
    kinds = Counter(links.values())
    found = ", ".join(f"{kind} between {count} pair(s)" for kind, count in sorted(kinds.items()))
    return Finding("device.links", "pass", found, "", {"links": links})


def judge_gpus(gpus: list[list[str]], apps: list[list[str]], wanted: int | None) -> list[Finding]:
    """Rows of nvidia-smi, one per GPU (FIELDS) and one per process (uuid, pid, MiB), -> findings. Pure."""
    short = [row for row in gpus if len(row) != len(FIELDS)]
    if short:
        return [_finding("broken", f"{SMI} printed {short[0]}, not {len(FIELDS)} values", "see `nvidia-smi`")]
    described = [dict(zip(FIELDS, row, strict=True)) for row in gpus]
    facts: dict[str, Any] = {"gpus": described, "compared": _compared(described)}
    findings = []
    if wanted is not None and len(gpus) < wanted:
        findings.append(_finding("fail", f"{counted(len(gpus), 'GPU')} here, {wanted} wanted (slurm.gpus_per_node)",
                                 "a GPU that fell off the bus comes back with a reboot", facts))  # fmt: skip
    lost = _unreadable(described)
    if lost:
        findings.append(_finding("fail", "; ".join(lost.values()), "reset the GPU, or reboot this node", facts))
    findings += _unlike([gpu for number, gpu in enumerate(described) if number not in lost])
    for gpu in described:
        findings += _fitness(gpu, [row for row in apps if row[0] == gpu["uuid"]])
    if not any(finding.check == "device.gpus" for finding in findings):
        models = ", ".join(sorted({gpu["name"] for gpu in described})) or "none"
        findings.insert(0, _finding("pass", f"{counted(len(gpus), 'GPU')}: {models}", "", facts))
    return findings


def _fitness(gpu: dict[str, str], apps: list[list[str]]) -> list[Finding]:
    """What is wrong with one GPU at rest."""
    name, findings = f"GPU {gpu['index']}", []
    if apps:
        pids = ", ".join(f"{pid} ({mib} MiB)" for _, pid, mib in apps)
        findings.append(Finding("device.busy", "fail", f"{name} is in use by process {pids}", "end it on this node"))
    elif _number(gpu["memory.used"]) > MOST_USED_MIB:
        findings.append(Finding("device.busy", "fail", f"{name} has {gpu['memory.used']} MiB in use and no process",
                                "reset the GPU, or look into other containers"))  # fmt: skip
    elif _number(gpu["utilization.gpu"]) > MOST_BUSY:
        findings.append(Finding("device.busy", "fail", f"{name} is {gpu['utilization.gpu']}% busy and no process shows",
                                "look into other containers"))  # fmt: skip
    if _number(gpu["ecc.errors.uncorrected.volatile.total"]) > 0:
        errors = gpu["ecc.errors.uncorrected.volatile.total"]
        findings.append(Finding("device.ecc", "fail", f"{name} has {errors} uncorrected memory errors",
                                "reset the GPU; replace it if they come back"))  # fmt: skip
    active = int(gpu["clocks_throttle_reasons.active"] or "0", 16) if _is_hex(gpu) else 0
    reasons = [reason for bit, reason in THROTTLED.items() if active & bit]
    if reasons:
        findings.append(Finding("device.throttled", "fail", f"{name} is throttled at rest: {', '.join(reasons)} "
                                f"({gpu['temperature.gpu']} C)", "see its cooling and power"))  # fmt: skip
    width, widest = gpu["pcie.link.width.current"], gpu["pcie.link.width.max"]
    if _number(width) < _number(widest):
        findings.append(Finding("device.pcie", "fail", f"{name} uses {width} of {widest} PCIe lanes",
                                "reseat the GPU or its riser"))  # fmt: skip
    if gpu["compute_mode"] == "Prohibited":
        findings.append(Finding("device.mode", "fail", f"{name} lets no program compute (compute mode Prohibited)",
                                f"{SMI} -i {gpu['index']} -c DEFAULT"))  # fmt: skip
    return findings


def _unreadable(gpus: list[dict[str, str]]) -> dict[int, str]:
    """GPUs, by their numbers, that nvidia-smi lists and cannot read: what it says of which fields."""
    found = {}
    for number, gpu in enumerate(gpus):
        fields: dict[str, list[str]] = {}
        for name, value in gpu.items():
            if UNREADABLE.fullmatch(value):
                fields.setdefault(value, []).append(name)
        said = [f"{value} for {', '.join(names)}" for value, names in fields.items()]
        if said:
            found[number] = f"{SMI} says of GPU {number} {'; '.join(said)}"
    return found


def _unlike(gpus: list[dict[str, str]]) -> list[Finding]:
    """GPUs of this node that are not as most of its GPUs."""
    findings = []
    for name in ALIKE:
        (common, count), *others = Counter(gpu[name] for gpu in gpus).most_common() or [("", 0)]
        odd = [f"GPU {gpu['index']}: {gpu[name]}" for gpu in gpus if gpu[name] != common]
        if others:
            findings.append(Finding("device.unlike", "fail", f"{name} is {common} on {count} of {len(gpus)} GPUs, but "
                                    f"{', '.join(odd)}", "make all GPUs of the node alike"))  # fmt: skip
    return findings


def _compared(gpus: list[dict[str, str]]) -> dict[str, list[str]]:
    """What must agree between nodes."""
    return {"count": [str(len(gpus))], **{name: sorted({gpu[name] for gpu in gpus}) for name in ALIKE}}


def _finding(state: Any, found: str, advice: str, facts: dict[str, Any] | None = None) -> Finding:
    return Finding("device.gpus", state, found, advice, facts or {})


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.strip()]
    return [[cell.strip() for cell in line.split(",")] for line in lines]


def _number(text: str) -> float:
    """A count, or 0 where the GPU does not keep it (`[N/A]`)."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _is_hex(gpu: dict[str, str]) -> bool:
    return gpu["clocks_throttle_reasons.active"].lower().startswith("0x")
