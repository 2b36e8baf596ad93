"""What `nvidia-smi` says of GPUs at rest, computing, and in a collective that does not finish: a table for the record.

    python -m tests.bench.gpu_readings [OUT.json] [--ranks 2]

Needs a GPU of one host for each rank. They do over NCCL what they are told, state by state, and the last one does not
come to a collective; `slurm.gpus` reads all of them meanwhile, as a watcher does. Writes OUT.json and the table OUT.md
beside it, by default tests/bench/results/readings.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs import runfolder
from preflight.device import check_device
from preflight.setting import Setting
from slurm import gpus
from slurm.evidence import Gpu

OUT = Path(__file__).parent / "results" / "readings.json"
SIZE, MIB = 8192, 1 << 20
SETTLE_S, SAMPLES, EVERY_S = 2.0, 6, 0.5
"""nvidia-smi's utilisation and power are means over up to a second."""
COMPUTE_S = SETTLE_S + SAMPLES * (EVERY_S + 1.0) + 2.0
FIELDS = {"utilisation": "%", "memory_utilisation": "%", "power_w": "W", "sm_clock_mhz": "MHz"}
STATES = {
    "untouched": "no process on it",
    "at rest": "at rest, context held",
    "computing": "computing (bf16 products)",
    "waiting": "waiting in an NCCL all_gather",
    "missing": "the rank that never came",
}


class Ranks:
    """Processes that do a word at a time."""

    def __init__(self, meet: Path, world: int) -> None:
        command = [sys.executable, "-m", "tests.bench.gpu_readings", str(meet), "--ranks", str(world), "--rank"]
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}  # multicast can take the host's GPUs along
        self.processes = [
            subprocess.Popen([*command, str(rank)], env=environment, text=True, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
            for rank in range(world)
        ]  # fmt: skip

    def tell(self, word: str, ranks: Sequence[int] | None = None) -> None:
        """Have `ranks`, or all, begin with `word`; they say so."""
        ranks = range(len(self.processes)) if ranks is None else ranks
        for rank in ranks:
            stream = self.processes[rank].stdin
            assert stream is not None
            stream.write(f"{word}\n")
            stream.flush()
        for rank in ranks:
            answers = self.processes[rank].stdout
            assert answers is not None
            said = answers.readline().strip()
            if said != word:
                raise RuntimeError(f"rank {rank} said {said!r} to {word!r}")


@contextmanager
def started(world: int) -> Iterator[Ranks]:
    """The ranks; none is left at the end."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder) / "meet", world)
        try:
            yield ranks
        finally:
            for process in ranks.processes:
                process.kill()
                process.wait()


def rank_main(rank: int, world: int, meet: Path) -> None:
    """Do what is told: meet, compute, gather, end."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    data = torch.ones(MIB, device=device)
    for word in map(str.strip, sys.stdin):
        print(word, flush=True)
        if word == "meet":
            dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{meet}", rank=rank,
                                    world_size=world, device_id=device if cuda else None)  # fmt: skip
            _gather(data)
        elif word == "compute":
            _compute(device, SIZE if cuda else 64)
        elif word == "gather":
            _gather(data)


def _compute(device: torch.device, size: int) -> None:
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + COMPUTE_S
    while time.monotonic() < end:
        for _ in range(16):
            torch.mm(left, right)
        _wait(device)


def _gather(data: torch.Tensor) -> None:
    dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * len(data), device=data.device), data)
    _wait(data.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take() -> list[tuple[Gpu, ...]]:
    """Readings of all GPUs, one after the other, once a state has settled."""
    time.sleep(SETTLE_S)
    found = []
    for _ in range(SAMPLES):
        found.append(tuple(reading.gpu for reading in gpus.read()))
        time.sleep(EVERY_S)
    return found


def span(samples: Sequence[Gpu]) -> dict[str, list[float]]:
    """Least and most of each field; a field that a device does not tell is left out."""
    told = {name: [value for one in samples if (value := getattr(one, name)) is not None] for name in FIELDS}
    return {name: [min(values), max(values)] for name, values in told.items() if values}


def measure(world: int) -> dict[str, Any]:
    """All states: state -> field -> [least, most], over all GPUs in that state."""
    found: dict[str, dict[str, list[float]]] = {"untouched": span([gpu for each in take() for gpu in each])}
    with started(world) as ranks:
        ranks.tell("meet")
        time.sleep(SETTLE_S)
        found["at rest"] = span([gpu for each in take() for gpu in each])
        ranks.tell("compute")
        found["computing"] = span([gpu for each in take() for gpu in each])
        time.sleep(2 * SETTLE_S)
        ranks.tell("gather", range(world - 1))
        hung = take()
        found["waiting"] = span([gpu for each in hung for gpu in each[: world - 1]])
        found["missing"] = span([each[world - 1] for each in hung])
        ranks.tell("gather", [world - 1])
    return found


def machine() -> dict[str, Any]:
    """Date, GPU, driver and versions."""
    described = check_device(Setting())[0].facts["gpus"]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"  # type: ignore[no-untyped-call]
    return {"date": time.strftime("%Y-%m-%d"), "gpu": described[0]["name"], "gpus": len(described),
            "driver": described[0]["driver_version"], "torch": torch.__version__, "nccl": nccl}  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        f"{found['gpus']} x {found['gpu']}, driver {found['driver']}, NCCL {found['nccl']}, torch {found['torch']}, "
        f"{found['date']}; {SAMPLES} readings of `nvidia-smi` per state, least to most.",
        "",
        "| state | utilisation | memory utilisation | power | SM clock |",
        "| --- | --- | --- | --- | --- |",
    ]
    for state, title in STATES.items():
        shown = found["readings"][state]
        cells = [_span_text(shown.get(name), unit) for name, unit in FIELDS.items()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _span_text(span_of: list[float] | None, unit: str) -> str:
    if span_of is None:
        return "not told"
    least, most = (f"{value:.0f}" for value in span_of)
    return f"{least if least == most else f'{least}-{most}'} {unit}"


def main() -> int:
    """Measure and write the record, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.ranks, given.out)
        return 0
    at = machine()  # before anything runs on the GPUs
    found = {**at, "readings": measure(given.ranks)}
    runfolder.write_json(given.out, found)
    runfolder.write_text(given.out.with_suffix(".md"), table(found))
    print(table(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
