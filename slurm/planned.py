"""What submit can say of the plan before the job makes it: from the length index, or that there is none."""

from __future__ import annotations

from typing import Any

from configs.errors import UserError
from configs.schema import Config
from prefix_train import lengths, plan_summary

MOST_EXAMPLES = 20_000
"""Beyond this, planning alone takes longer than an answer on a login node should."""

NO_INDEX = "there is no length index yet: the job makes it first (so does `prefix-train plan CONFIG`)"

FIGURES = ("packs", "updates", "examples", "positions", "logical_tokens", "ratio", "digest")


def sketch(config: Config) -> dict[str, Any]:
    """Figures of the first epoch's plan under `known`, or under `unknown` why there are none."""
    if not lengths.index_path(config).exists():
        return {"unknown": NO_INDEX}
    try:
        index = lengths.load(config)
        if len(index.forest) > MOST_EXAMPLES:
            tokens, least = int(index.lengths.sum()), int(index.forest.length.sum())
            return {"known": {"examples": len(index.forest), "logical_tokens": tokens, "least_positions": least}}
        run = lengths.run_plan(config, index)
        summary = plan_summary.summary(run.epoch(0))
    except UserError as error:
        return {"unknown": str(error)}
    return {"known": {**{name: summary[name] for name in FIGURES}, "updates_in_run": run.total}}


def line(found: dict[str, Any]) -> str:
    """`sketch`'s answer for people."""
    if "unknown" in found:
        return "made by the job" if found["unknown"] == NO_INDEX else f"not known: {found['unknown']}"
    known = found["known"]
    if "packs" not in known:
        return (
            f"{known['examples']:,} examples of {known['logical_tokens']:,} tokens, {known['least_positions']:,} "
            "positions at best; for packs and updates: prefix-train plan CONFIG"
        )
    return (
        f"{known['updates_in_run']:,} updates, {known['updates']:,} per epoch; {known['examples']:,} examples in "
        f"{known['packs']:,} packs: {known['positions']:,} positions for {known['logical_tokens']:,} logical tokens, "
        f"{known['ratio']:.1f} times fewer"
    )
