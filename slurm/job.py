"""What submitit runs in every task: start the rank as a process of its own, and say how it ended.

The rank is a child because only a parent learns how a process was killed (srun and submitit lose it), because thread
counts and caches must be in the environment before anything is imported, and because a Python signal handler does not
run while a rank waits in C. submitit's own handlers, which would requeue by themselves, are replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NamedTuple

from configs import runfolder
from configs.compose import from_run
from configs.nodefolder import private_folder
from configs.schema import Config
from prefix_train import heartbeat
from slurm import flight, memory, presence

FORWARDED = (signal.SIGTERM, signal.SIGUSR2)

PORT = "PREFIX_TRAIN_PORT"
"""Rendezvous port that the submitter of a local run found free."""
DEVICES = "PREFIX_TRAIN_DEVICES"
"""`CUDA_VISIBLE_DEVICES` of the submitter of a local run; submitit's executor overwrites it."""

FIRST_PORT, PORTS = 20000, 12000
"""Rendezvous ports of Slurm jobs: below Linux's ephemeral ports."""


class Place(NamedTuple):
    """Where a rank stands among the others."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    node: int = 0

    @property
    def speaks_for_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0


class Unwatched(RuntimeError):
    """A node's watcher did not start, so its ranks did not either."""


def run_rank(run: str) -> None:
    """Run one rank of the run folder `run` to its end; exits with the rank's status, 128 + n after signal n.

    A rank that saved and stopped as it was asked counts as a good end here: with another status srun's
    `--kill-on-bad-exit` would kill the ranks that are still saving.
    """
    folder = Path(run)
    config, place = from_run(folder), find_place(os.environ)
    relay = Relay()
    if not presence.wait(folder, place.node, config.watch.start_s):
        limit = f"watch.start_s={config.watch.start_s:g} s"
        error = Unwatched(f"no watcher within {limit}: why stands in the job's log or in logs/watch-*")
        heartbeat.ended(folder, place.rank, place.world, error=error)
        raise SystemExit(heartbeat.exit_status(error))
    log = folder / runfolder.LOGS / f"rank{place.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **rank_environment(config, place, os.environ)}
    kills, since = memory.kernel_kills(), time.monotonic()
    with log.open("ab") as stream:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "slurm.rank", run],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,  # a Ctrl-C in the terminal is for slurm.local, which asks all ranks to save
        )
        relay.begin(child)
        status = _wait(child, folder, place, stream)
    why = memory.ended_by_kernel(child.pid, kills, since) if status == -signal.SIGKILL else None
    record_end(folder, place, child.pid, status, why)
    if status not in (0, runfolder.STOPPED):
        raise SystemExit(status if status > 0 else 128 - status)


def find_place(environment: Mapping[str, str]) -> Place:
    """Read rank and rendezvous from submitit's environment; on Slurm the port belongs to this life of the job alone."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    if job.cluster == "slurm":
        life = int(job.raw_job_id) * 31 + int(environment.get("SLURM_RESTART_COUNT", "0"))
        address, port = job.hostnames[0], FIRST_PORT + life % PORTS
    else:
        address, port = "127.0.0.1", int(environment[PORT])
    return Place(job.global_rank, job.num_tasks, job.local_rank, address, port, job.node)


def rank_environment(config: Config, place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank needs in its environment before its interpreter starts."""
    threads = str(config.train.threads)
    cache = private_folder() / f"rank{place.local_rank}"
    found = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # bars of files of a megabyte, drawn into a log
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TILELANG_CACHE_DIR": str(cache / "tilelang"),
    }
    if DEVICES in environment:
        found["CUDA_VISIBLE_DEVICES"] = environment[DEVICES]
    if config.engine == "stream":  # under a hard budget what is left between blocks has to be of use
        found["PYTORCH_ALLOC_CONF"] = environment.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if config.slurm.gpus_per_node:
        found |= flight.environment(private_folder() / "nccl", place.port)
    return found


def record_end(run: Path, place: Place, pid: int, status: int, why: str | None = None) -> None:
    """Write how the rank ended, `status` being Popen's, unless it did so itself. why: what is known of the reason."""
    attempt = runfolder.process_attempt()
    own = any(
        end.rank == place.rank and end.attempt == attempt and end.pid == pid and end.status == status
        for end in heartbeat.read_ends(run)
    )
    if own:
        return
    if status < 0:
        heartbeat.ended(run, place.rank, place.world, signal=-status, pid=pid, message=why)
    else:
        heartbeat.ended(run, place.rank, place.world, status=status, pid=pid)


def _wait(child: subprocess.Popen[bytes], run: Path, place: Place, log: BinaryIO) -> int:
    """Wait for the rank's end; a watcher that dies meanwhile is written down, and the rank goes on."""
    while True:
        try:
            return child.wait(presence.BEAT_S if place.speaks_for_node else None)
        except subprocess.TimeoutExpired:
            if presence.check(run, place.node):
                log.write(b"the watcher of this node has died: training goes on, and nobody watches it\n")
                log.flush()


class Relay:
    """Passes on to a rank the signals that this process gets; what comes before it has started, once it has."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        for number in FORWARDED:
            signal.signal(number, self._pass)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def begin(self, child: subprocess.Popen[bytes]) -> None:
        """`child` is the rank."""
        self._child = child
        for number in self._early:
            child.send_signal(number)

    def _pass(self, number: int, _: FrameType | None) -> None:
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)
