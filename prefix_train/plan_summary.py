"""What a plan comes to, as figures and as text: what sharing saves, what is wasted, which examples are longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from configs.wording import counted
from prefix_train.packing import Pack
from prefix_train.plan import Plan, predicted_time

LONGEST = 5
"""How many of the longest examples are named."""

BARS = "▁▂▃▄▅▆▇█"


def summary(plan: Plan) -> dict[str, Any]:
    """The figures of a plan, as JSON has them.

    positions and visible pairs are counted from the packs, `standalone` from the examples' lengths. waste: how far
    the plan is above what any plan needs, for packs in whole rounds of the ranks. fill: positions over the cap of the
    packs that are not empty. balance: mean rank's predicted time over the time until the slowest is done.
    """
    packs = [pack for pack in plan.packs if pack.members]
    lengths = np.array(plan.lengths)
    positions, logical = sum(pack.positions for pack in packs), sum(pack.logical for pack in packs)
    pairs = sum(pack.pairs for pack in packs)
    alone = sum(length * (length + 1) // 2 for length in plan.lengths)
    rounds = -(-plan.bound[0] // plan.ranks) * plan.ranks
    counts, edges = np.histogram(lengths, bins=min(16, int(lengths.max() - lengths.min()) + 1))
    longest = sorted(range(len(lengths)), key=lambda example: (-plan.lengths[example], example))[:LONGEST]
    return {
        "mode": plan.pack.mode,
        "seed": plan.seed,
        "epoch": plan.epoch,
        "ranks": plan.ranks,
        "digest": plan.digest,
        "max_positions": plan.pack.max_positions,
        "updates": len(plan.updates),
        "packs": len(packs),
        "empty_packs": sum(not pack.members for pack in plan.packs),
        "packs_per_update": _spread([sum(map(len, update)) for update in plan.updates]),
        "examples": sum(len(pack.members) for pack in packs),
        "examples_per_update": _spread([_examples(chain.from_iterable(update)) for update in plan.updates]),
        "segments": sum(len(pack.lengths) for pack in packs),
        "depth": max(len(path) for pack in packs for path in pack.paths),
        "positions": positions,
        "logical_tokens": logical,
        "ratio": logical / positions,
        "visible_pairs": {"packed": pairs, "standalone": alone, "ratio": alone / pairs},
        "fill": positions / (len(packs) * plan.pack.max_positions),
        "bound": {"packs": plan.bound[0], "positions": plan.bound[1]},
        "waste": {"packs": max(0.0, len(packs) / rounds - 1), "positions": positions / plan.bound[1] - 1},
        "balance": _balance(plan),
        "longest": [{"source": plan.source(example), "tokens": plan.lengths[example]} for example in longest],
        "histogram": {"edges": [round(float(edge), 1) for edge in edges], "examples": counts.tolist()},
    }


def describe(plan: Plan) -> str:
    """A plan in a few lines."""
    return told(summary(plan))


def told(s: Mapping[str, Any]) -> str:
    """The figures of `summary` in a few lines."""
    per_update, pairs, waste = s["packs_per_update"], s["visible_pairs"], s["waste"]
    tokens, counts = s["histogram"]["edges"], s["histogram"]["examples"]
    bars = "".join(BARS[-(-count * (len(BARS) - 1) // max(counts))] for count in counts)
    longest = ", ".join(f"{entry['tokens']:,} ({entry['source']})" for entry in s["longest"][:3])
    rows = [
        ("examples", f"{s['examples']:,} in {counted(s['packs'], 'pack')} ({s['mode']}), each once per epoch"),
        (
            "updates",
            f"{s['updates']:,} {_epoch(s)} on {counted(s['ranks'], 'rank')}: {_range(per_update, 'pack')} and "
            f"{_range(s['examples_per_update'], 'example')} per update"
            + (f"; empty packs: {s['empty_packs']}" if s["empty_packs"] else ""),
        ),
        ("positions", f"{s['positions']:,} for {s['logical_tokens']:,} logical tokens: {s['ratio']:.1f} times fewer"),
        (
            "visible pairs",
            f"{pairs['packed']:.3g}, standalone {pairs['standalone']:.3g}: {pairs['ratio']:.1f} times fewer",
        ),
        ("segments", f"{s['segments']:,}, at most {s['depth']} deep"),
        (
            "packs",
            f"{s['fill']:.1%} of {s['max_positions']:,} positions used; {waste['positions']:.2%} more positions than "
            f"the least possible; {s['balance']:.1%} balanced",
        ),
        ("lengths", f"{int(tokens[0]):,} {bars} {int(tokens[-1]):,} tokens"),
        ("longest", longest),
        ("plan", f"seed {s['seed']}, epoch {s['epoch']}, sha256 {s['digest'][:16]}"),
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def _examples(packs: chain[Pack]) -> int:
    return sum(len(pack.members) for pack in packs)


def _balance(plan: Plan) -> float:
    """Mean rank's predicted time over that of whole updates."""
    ranks = sum(plan.cost.of(pack.positions, pack.pairs) for pack in plan.packs)
    return ranks / plan.ranks / sum(predicted_time(update, plan.cost) for update in plan.updates)


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {"least": min(values), "mean": fmean(values), "most": max(values)}


def _range(spread: Mapping[str, float], what: str) -> str:
    least, most = int(spread["least"]), int(spread["most"])
    return counted(most, what) if least == most else f"{least:,} to {counted(most, what)}"


def _epoch(s: Mapping[str, Any]) -> str:
    """Where the counted updates are: epochs differ where others of the run have more or fewer."""
    total, epochs = s.get("updates_in_run"), s.get("epochs")
    if epochs is None or total == epochs * s["updates"]:
        return "per epoch"
    return f"in the first of {epochs:g} epochs, {total:,} in all,"
