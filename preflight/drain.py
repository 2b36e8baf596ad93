"""The command that takes a node out of service. Slurm grants it to administrators alone, so it is printed, not run."""

from __future__ import annotations

import shlex

MOST = 200
"""Letters of a reason: `sinfo -R` shows one line per node."""


def command(node: str, reason: str) -> str:
    """One shell line, safe whatever `reason` holds."""
    words = " ".join(reason.split())[:MOST]
    return f"scontrol update {shlex.quote(f'NodeName={node}')} State=DRAIN Reason={shlex.quote(words)}"
