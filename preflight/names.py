"""Names of all checks, which `preflight.allow` may list: a name that no check has would allow nothing, in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from configs.errors import UserError
from preflight.known_bad import ROWS

AREAS = {
    "code": ("snapshot",),
    "collective": ("join", "link", "pair", "values"),
    "device": ("busy", "ecc", "gpus", "links", "mode", "pcie", "power", "throttled", "unlike"),
    "host": ("cache", "clock", "disk", "environment", "files", "limits", "memory", "name", "network", "shm"),
    "known": ("bad",),
    "libraries": ("mapped",),
    "node": ("answer",),
    "pins": ("files", "proof"),
    "preflight": ("config",),
    "python": ("version",),
    "torch": ("backends",),
}
CHECKS = frozenset(f"{area}.{subject}" for area, subjects in AREAS.items() for subject in subjects)


def check_allowed(allow: Sequence[str]) -> None:
    """Raise UserError for the first entry of `preflight.allow` that is the name of no check."""
    known = CHECKS | {f"known.{row.name}" for row in ROWS}
    for name in allow:
        if name in known or re.fullmatch(r"import\.[\w.-]+", name):
            continue
        nearest = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are import.<package>, {', '.join(sorted(known))}"
        raise UserError(f"preflight.allow: no check is called {name!r}: {hint}")
