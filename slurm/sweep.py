"""`--sweep key=a,b`: every combination of some options' values as a run of its own, all of them one job array."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from configs.errors import UserError
from configs.wording import counted

SHARED = re.compile(r"(slurm|preflight)\..*|cluster|run_root|name|data\.(train|prepare)")
"""Options that the one sbatch script of an array depends on."""
MOST = 1000
"""Elements of an array: Slurm's own default limit (MaxArraySize) is 1001."""


def combinations(sweeps: Sequence[str]) -> list[list[str]]:
    """The overrides `key=value` of each run, the last key changing fastest. UserError for what cannot be swept."""
    axes = [_axis(text) for text in sweeps]
    keys = [axis[0].partition("=")[0] for axis in axes]
    if len(set(keys)) < len(keys):
        raise UserError(f"--sweep: {max(keys, key=keys.count)} is given twice")
    if not 2 <= (number := math.prod(map(len, axes))) <= MOST:
        raise UserError(f"--sweep: {counted(number, 'run')}; give between 2 and {MOST} (KEY=VALUE,VALUE,...)")
    return [list(chosen) for chosen in itertools.product(*axes)]


def _axis(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--sweep {text}: write KEY=VALUE,VALUE,...")
    if SHARED.fullmatch(key):
        raise UserError(f"--sweep {text}: {key} is the same for all runs of a sweep, for one script starts them")
    return [f"{key}={value}" for value in _split(values)]


def _split(text: str) -> list[str]:
    """At the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
