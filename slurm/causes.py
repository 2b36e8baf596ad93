"""Why a rank ended, by its own record, and which node lost connections point to. Pure but for names of hosts."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Sequence

from prefix_train.heartbeat import End
from slurm import memory
from slurm.policy import Cause

MISTAKE = 2
"""Exit status of a user's mistake."""
LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|nccl(Remote|System)Error|IBV_WC_", re.IGNORECASE
)
"""What a rank says of another one that is gone."""
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
"""How gloo and NCCL name the other end."""
OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")
NO_MEMORY = re.compile(r"out of memory|can(no|')t allocate memory|bad_alloc", re.IGNORECASE)
NOT_FINITE = ("NotFinite",)
UNWATCHED = "Unwatched"

OF_VERDICT: dict[str, Cause] = {
    "network": "network",
    "straggler": "straggler",
    "oom_killed": "memory",
    "rank_raised": "raised",
    "rank_died": "died",
}
"""Causes of what watchers find; all else that they end a run for is `hang`."""

ASKED = (signal.SIGTERM.name, signal.SIGUSR2.name)
"""Slurm's, or a person's: they end a rank that does not listen yet."""


def of(end: End) -> Cause:
    """The cause of one bad end."""
    if end.signal in ASKED:
        return "killed"
    if end.signal:
        return "memory" if end.message and end.message.startswith(memory.SAID) else "died"
    kind, message = (end.exception or "").rpartition(".")[2], end.message or ""
    if kind in OUT_OF_MEMORY or NO_MEMORY.search(message):
        return "memory"
    if kind in NOT_FINITE:
        return "nan"
    if kind == UNWATCHED:
        return "unwatched"
    if lost_connections(end):
        return "network"
    return "mistake" if end.status == MISTAKE else "raised"


def mistake(end: End) -> str | None:
    """What a rank says is the user's to put right, as one line; None where it ended for another reason."""
    if of(end) != "mistake" or end.exception in (None, SystemExit.__name__):
        return None
    return " ".join((end.message or "").split())


def lost_connections(end: End) -> bool:
    """Whether the rank only shows that another one, or the network, had gone before."""
    return bool(end.message and LOST_CONNECTION.search(end.message))


def order(end: End) -> tuple[bool, float]:
    """Sorts bad ends: first causes first."""
    return lost_connections(end), end.time


def suspect(ends: Sequence[End], addresses: Callable[[str], set[str]]) -> str | None:
    """The one host that every lost connection began or ended at; none where that is not one alone.

    addresses: of a host. Between two hosts nobody can say which one it is.
    """
    owner = {address: host for host in {end.host for end in ends} for address in addresses(host)}
    pairs = [
        {end.host, owner[address]}
        for end in ends
        if lost_connections(end)
        for address in ADDRESS.findall(end.message or "")[:1]
        if owner.get(address, end.host) != end.host
    ]
    common = set.intersection(*pairs) if pairs else set[str]()
    return common.pop() if len(common) == 1 else None


def addresses(host: str) -> set[str]:
    """IPv4 addresses of a host by its name; empty where that has none."""
    try:
        return set(socket.gethostbyname_ex(host)[2])
    except OSError:
        return set()
