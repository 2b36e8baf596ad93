"""Why a step could not be started, as srun told it in the job's log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ERROR = re.compile(r"^(?:srun|slurmstepd)(?:-\S+)?: error: (.+)$", re.MULTILINE)
NODE = re.compile(r"failed on node (\S+?):|receive_msgs: \[\[([^\]]+)\]:\d+\] failed")
"""How srun names a node that did not take a task: its own report of a launch, and the message layer's."""
ENDED = re.compile(r"^(?:failed|stuck): |^(?:stopped|interrupted|complete)\b|DUE TO [A-Z]", re.MULTILINE)
"""How a life's last line begins, and Slurm's own word of its end: one job's lives share a log."""


class Said(NamedTuple):
    """line: the last error of the present life, one that names a node before others; empty: none."""

    line: str
    nodes: frozenset[str]


def read(log: Path) -> Said:
    """What srun said of the life that is the last in `log`; nothing where there is no log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    before = [match.end() for match in ENDED.finditer(text)]
    errors = ERROR.findall(text, before[-1] if before else 0)
    naming = [error for error in errors if NODE.search(error)]
    nodes = {name for error in naming for pair in NODE.findall(error) for name in pair if name}
    return Said((naming or errors or [""])[-1], frozenset(nodes))
