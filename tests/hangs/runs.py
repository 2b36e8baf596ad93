"""Real runs of the trainer with a planted fault: forked ranks of a tiny model, each a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from configs import compose, runfolder
from configs.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    PackConfig,
    SlurmConfig,
    TrainConfig,
    VerifyConfig,
    WatchConfig,
)
from prefix_train import heartbeat
from prefix_train.heartbeat import Beat, End
from tests import additions, lives
from tests.tiny_text import BUILD

lives.PRELOADED.append("prefix_train.train")

UPDATES = 400
"""More than any fault lets a run do."""
WATCH = WatchConfig(floor_s=2.5, first_update_s=60, save_s=60, evaluate_s=60)


def options(
    folder: Path, world: int, watch: WatchConfig = WATCH, save_every: int = 0, evaluate_every: int = 0
) -> Config:
    """A run of `world` ranks on the rows that are written into `folder`, two packs per rank and update."""
    for name, count in (("train", 24 * world), ("heldout", 2 * world)):
        additions.write(folder / f"{name}.jsonl", count)
    return Config(
        name="hang",
        cluster="local",
        model=ModelConfig(build=BUILD, dtype="float32"),
        data=DataConfig(train=str(folder / "train.jsonl"), heldout=str(folder / "heldout.jsonl")),
        pack=PackConfig(max_positions=192, packs_per_update=2 * world),
        adapter=AdapterConfig(rank=2, dropout=0.0, targets=["q_proj", "down_proj"]),
        train=TrainConfig(updates=UPDATES, lr=1e-4, warmup_updates=2, save_every=save_every),
        evaluate=EvaluateConfig(every=evaluate_every, generate=False),
        verify=VerifyConfig(examples=1),
        watch=watch,
        slurm=SlurmConfig(tasks_per_node=world),
    )


@contextmanager
def running(run: Path, config: Config, faults: Mapping[int, str], world: int) -> Iterator[Ranks]:
    """The ranks of `run`, `faults` planted by rank; none is left at the end."""
    (run / runfolder.LOGS).mkdir(parents=True)
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
    runfolder.write_text(run / runfolder.ATTEMPT, "0\n")
    environment = {"PREFIX_TRAIN_ATTEMPT": "0", "HANGS_RUN": str(run)}
    processes = lives.start(_live, world, run, dict(faults), environment=environment)
    ranks = Ranks(run, processes)
    try:
        yield ranks
    finally:
        for process in processes:
            process.kill()
            process.join()


class Ranks:
    """The processes of a run."""

    def __init__(self, run: Path, processes: list[BaseProcess]) -> None:
        self.run, self.processes = run, processes
        self._recorded: set[int] = set()

    def beats(self) -> dict[int, Beat]:
        """Heartbeats by rank."""
        return {beat.rank: beat for beat in heartbeat.read(self.run)}

    def ends(self) -> list[End]:
        """Ends, after writing those of ranks that a signal or an exit has ended, as their parent does in a job."""
        written = {end.rank for end in heartbeat.read_ends(self.run)}
        for rank, process in enumerate(self.processes):
            status = process.exitcode
            if status is None or rank in written or rank in self._recorded:
                continue
            self._recorded.add(rank)
            how = {"signal": -status} if status < 0 else {"status": status}
            heartbeat.ended(self.run, rank, len(self.processes), pid=process.pid, **how)
        return heartbeat.read_ends(self.run)

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come in {seconds:.0f} s; {self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """The end of every rank's log."""
        return "\n".join(path.read_text()[-300:] for path in sorted((self.run / runfolder.LOGS).glob("*.log")))


def _live(rank: int, run: Path, faults: dict[int, str]) -> None:
    from slurm.rank import main
    from tests.hangs import faults as plants

    output = os.open(run / runfolder.LOGS / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if rank in faults:
        plants.strike(faults[rank], run)
    raise SystemExit(main(run))


def host() -> str:
    """This machine, as heartbeats name it."""
    return socket.gethostname()
