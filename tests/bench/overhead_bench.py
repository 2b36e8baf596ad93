"""What being watched costs: heartbeats, the ring of collectives and the node's watcher, per update, in pairs.

An update here is the traffic of one of a sharded model, without its computing: for each pack two gathers and one
scatter per layer, a heartbeat at each change of phase, a few reductions. Every pair is one update without and one with
heartbeat and recorder, in turn; the median of the differences counts. The watcher is a process of its own: its
processor time over one update counts whole. Times are of the processor, because other work on the machine would else
be measured; wall time stands beside it. Exits with 1 above LIMIT of an update of UPDATE_S.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from configs import compose, runfolder
from configs.schema import Config, DataConfig, ModelConfig, PackConfig, SlurmConfig, TrainConfig
from prefix_train.heartbeat import Heartbeat
from prefix_train.recorder import Recorder

LAYERS, PACKS, RANKS = 64, 2, 8
REDUCTIONS = 6
COLLECTIVES = PACKS * LAYERS * 3 + REDUCTIONS
PAIRS = 40
WATCHED_S = 20.0
UPDATE_S, LIMIT = 10.0, 0.005


class Times(NamedTuple):
    """Seconds of one update."""

    processor: float
    wall: float


def main() -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        os.environ["TMPDIR"] = tempfile.tempdir = name
        dist.init_process_group("gloo", init_method=f"file://{run}/meet", rank=0, world_size=1)
        try:
            pairs = [_pair(run) for _ in range(PAIRS)]
        finally:
            dist.destroy_process_group()
        watcher_s = _watcher(run) * UPDATE_S
    rank = [with_.processor - without.processor for without, with_ in pairs]
    wall = [with_.wall - without.wall for without, with_ in pairs]
    total = statistics.median(rank) + watcher_s
    report = {
        "collectives_per_update": COLLECTIVES,
        "heartbeats_per_update": 2 * PACKS + 3,
        "pairs": PAIRS,
        "without_ms": _ms(statistics.median(without.processor for without, _ in pairs)),
        "with_ms": _ms(statistics.median(with_.processor for _, with_ in pairs)),
        "rank_ms": _ms(statistics.median(rank)),
        "rank_ms_quartiles": [_ms(value) for value in statistics.quantiles(rank, n=4)],
        "rank_wall_ms": _ms(statistics.median(wall)),
        "watcher_ms": _ms(watcher_s),
        "total_ms": _ms(total),
        "share_of_update": round(total / UPDATE_S, 6),
        "limit": LIMIT,
    }
    print(f"an update of {COLLECTIVES} collectives and {2 * PACKS + 3} heartbeats, {PAIRS} pairs:")
    print(f"  heartbeat and recorder {report['rank_ms']} ms per update ({report['rank_wall_ms']} ms of wall time)")
    print(f"  watcher of {RANKS} ranks {report['watcher_ms']} ms of its own processor time per {UPDATE_S:g} s")
    print(f"  together {report['total_ms']} ms: {total / UPDATE_S:.3%} of an update of {UPDATE_S:g} s")
    print(json.dumps(report))
    return int(total > LIMIT * UPDATE_S)


def _pair(run: Path) -> tuple[Times, Times]:
    beat = Heartbeat(run, 0, 1)
    without = _time(lambda: _update(lambda name, pack: None))
    with Recorder(run, 0, lambda: beat.standing):
        return without, _time(lambda: _update(lambda name, pack: beat.phase(name, 1, pack)))


def _update(phase: Callable[[str, int], None]) -> None:
    shard, whole, value = torch.ones(8), torch.empty(8), torch.ones(1)
    phase("data", -1)
    for pack in range(PACKS):
        phase("forward", pack)
        for _ in range(LAYERS):
            dist.all_gather_into_tensor(whole, shard)
        phase("backward", pack)
        for _ in range(LAYERS):
            dist.all_gather_into_tensor(whole, shard)
            dist.reduce_scatter_tensor(shard, whole)
    phase("reduce", -1)
    for _ in range(REDUCTIONS):
        dist.all_reduce(value)
    phase("optimizer", -1)


def _time(work: Callable[[], None]) -> Times:
    wall, processor = time.perf_counter(), time.thread_time()
    work()
    return Times(time.thread_time() - processor, time.perf_counter() - wall)


def _watcher(run: Path) -> float:
    """Processor seconds per second of a watcher beside RANKS ranks, after it has started."""
    with _watched(run) as process:
        time.sleep(3)
        before = sum(process.cpu_times()[:2])
        time.sleep(WATCHED_S)
        return float(sum(process.cpu_times()[:2]) - before) / WATCHED_S


@contextmanager
def _watched(run: Path) -> Iterator[psutil.Process]:
    config = Config(
        name="overhead",
        cluster="local",
        model=ModelConfig(build={"model_type": "none"}),
        data=DataConfig(train="none"),
        pack=PackConfig(packs_per_update=PACKS * RANKS),
        train=TrainConfig(updates=1),
        slurm=SlurmConfig(tasks_per_node=RANKS),
    )
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
    for rank in range(RANKS):
        Heartbeat(run, rank, RANKS).phase("forward", 1, 0)
    process = subprocess.Popen([sys.executable, "-m", "slurm.watch", str(run)])
    try:
        yield psutil.Process(process.pid)
        if process.poll() is not None:
            raise RuntimeError(f"the watcher ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
