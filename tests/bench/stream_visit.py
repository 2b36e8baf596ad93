"""What one visit of a block costs the host: counts by part, seconds, and a profile. Needs no GPU.

    python tests/bench/stream_visit.py [--profile] [--recorded] [--launches]

16 blocks of hidden size 64, where nothing but the host's work takes time. `--recorded`: launches are recorded and none
is repeated, so that what is left is the host's work around that one call. `--launches`: instead, what a GPU would
launch, by operator and by who asks for it, of blocks with attention and of blocks with a recurrence.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import launches, visits


def print_launches() -> None:
    """For both kinds of blocks; of those with attention for fused kernels, too."""
    blocks, fused = visits.MODEL["num_hidden_layers"], {"heads": "fused", "elementwise": "fused"}
    plain, hybrid = (visits.MODEL, visits.TARGETS), (visits.HYBRID, visits.OF_HYBRID)
    for (sizes, targets), chosen in ((plain, {}), (plain, fused), (hybrid, {})):
        with tempfile.TemporaryDirectory() as folder, launches.kernels():
            run, root = visits.small(
                Path(folder) / "store", build_of=sizes, targets=targets, positions=128, kernels=chosen
            )
            run()
            print(f"{sizes['model_type']} {chosen}\n{launches.table(launches.count(run), blocks)}\n")
            root.source.close()


def main() -> None:
    """Print counts and seconds; with `--profile` also where the time goes."""
    if "--launches" in sys.argv:
        print_launches()
        return
    with tempfile.TemporaryDirectory() as folder:
        recorded = "--recorded" in sys.argv
        how: dict[str, Any] = {"recorder": visits.Nothing(), "graphs": "on"} if recorded else {}
        run, root = visits.small(Path(folder) / "store", **how)
        for _ in range(3):
            run()
        before = root.ring.figures.visits
        run()
        per_update = root.ring.figures.visits - before
        print(visits.table(visits.count(run), per_update))
        times = []
        for _ in range(8):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        print(
            f"{per_update} visits, {min(times) / per_update * 1e3:.2f} ms per visit, the best of {len(times)} updates"
        )
        if "--profile" in sys.argv:
            with cProfile.Profile() as profile:
                for _ in range(3):
                    run()
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        root.source.close()


if __name__ == "__main__":
    main()
