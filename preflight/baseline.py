"""A node's GPUs at rest, as preflight saw them before training: what a later reading is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from configs import runfolder


@dataclass(frozen=True)
class AtRest:
    """One GPU. None: the device does not tell."""

    index: int
    uuid: str
    utilisation: float | None
    """Percent."""
    memory_utilisation: float | None
    """Percent."""
    power_w: float | None
    sm_clock_mhz: float | None


def answer_path(run: Path, attempt: int, node: str) -> Path:
    """Where a node's answer lies in the run folder."""
    return run / runfolder.PREFLIGHT / str(attempt) / f"{quote(node, safe='')}.json"


def at_rest(run: Path, attempt: int, node: str) -> tuple[AtRest, ...]:
    """The GPUs of `node`, by index; none where preflight did not run or saw none.

    Raises ValueError or KeyError where the node's file is not an answer of preflight.
    """
    path = answer_path(run, attempt, node)
    if not path.exists():
        return ()
    findings = runfolder.read_json(path)["findings"]
    gpus = [
        gpu for finding in findings if finding["check"] == "device.gpus" for gpu in finding["facts"].get("gpus", ())
    ]
    return tuple(sorted((_at_rest(gpu) for gpu in gpus), key=lambda gpu: gpu.index))


def _at_rest(gpu: dict[str, str]) -> AtRest:
    """From what nvidia-smi printed for the fields of `device.FIELDS`; a field that it was not asked for is None."""
    numbers = {name: _number(text) for name, text in gpu.items()}
    return AtRest(
        index=int(gpu["index"]),
        uuid=gpu["uuid"],
        utilisation=numbers.get("utilization.gpu"),
        memory_utilisation=numbers.get("utilization.memory"),
        power_w=numbers.get("power.draw"),
        sm_clock_mhz=numbers.get("clocks.sm"),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # `[N/A]`
        return None
