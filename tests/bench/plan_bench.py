"""Time and waste of planning 100,000 lengths: `python tests/bench/plan_bench.py [--examples N]` prints JSON.

Three kinds of data, each in packs and in examples per update: two levels of instructions, many documents with a few
questions each, and one long prefix. Seconds are processor time; waste is against the least that any plan needs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import numpy as np

from configs.schema import PackConfig
from prefix_train.plan import plan_epoch
from prefix_train.plan_summary import summary
from prefix_train.tree import Forest


def two_levels(
    examples: int, roots: int = 4, root: int = 6_000, groups: int = 50, group: int = 400, item: float = 250.0
) -> Forest:
    """A forest of `roots` prefixes of `root` tokens, below each `groups` of `group` tokens, and below those the
    examples' own tokens, log-normal around `item`."""
    rng = np.random.default_rng(0)
    own = np.maximum(1, rng.lognormal(np.log(item), 0.6, examples).astype(np.int64))
    rows: list[tuple[int, int, int, int]] = []
    last = np.empty(examples, np.int64)
    above = -1
    for index, members in enumerate(np.array_split(rng.permutation(examples), roots * groups)):
        if index % groups == 0:
            above = len(rows)
            rows.append((-1, 0, root, int(members[0])))
        middle = len(rows)
        rows.append((above, root, group, int(members[0])))
        last[members] = np.arange(middle + 1, middle + 1 + len(members))
        rows += [(middle, root + group, int(own[example]), example) for example in members.tolist()]
    return Forest(*np.array(rows, np.int64).T, last)


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "instructions": ({}, 65_536),
    "documents": ({"roots": 2_000, "root": 3_000, "groups": 2, "group": 10}, 65_536),
    "one long prefix": ({"roots": 1, "root": 64_000, "groups": 80, "group": 100, "item": 900.0}, 144_000),
}


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    results = []
    for name, (shape, max_positions) in CASES.items():
        forest = two_levels(options.examples, **shape)
        for size in ({"packs_per_update": 2 * options.ranks}, {"examples_per_update": 64 * options.ranks}):
            config = PackConfig(max_positions=max_positions, **size)
            begin, wall = time.process_time(), time.monotonic()
            plan = plan_epoch(forest.lengths, forest, config, options.ranks, seed=0, epoch=0)
            seconds, wall = time.process_time() - begin, time.monotonic() - wall
            s = summary(plan)
            kept = ("updates", "packs", "positions", "ratio", "fill", "waste", "balance", "bound")
            results.append({"data": name, **size, "seconds": seconds, "wall_s": wall} | {key: s[key] for key in kept})
    print(json.dumps({"examples": options.examples, "cpu_count": os.cpu_count(), "plans": results}, indent=1))


if __name__ == "__main__":
    main()
