"""What needs two GPUs of one host, side by side where the parts do not disturb each other, each with its own time.

    python -m tests.bench.gpu_visit OUT ACT [--seconds LIMIT] [--given FOLDER]

`pair`: preflight of a job with two ranks, the sharding checks over NCCL, readings of the GPUs, hangs over NCCL.
`single`: `tune` into a fresh folder and its comparison with the committed pins, beside the tests of one GPU.
`kernels`: tests of the newest kernels, beside each of them alone and what others offer.
`rows`: a pack of the whole model with them, beside the same examples alone.
`settings`: 256,000 positions, beside four layers with each of the newest kernels left out.
`sharded`: one pack per GPU under FSDP2; then the memory of two updates and the save.
`many`: all GPUs of the host: preflight, the whole geometry on 1, 2, 4, ... of them, a missing rank.

FOLDER has JSON files of an earlier act: a gate that has passed there need not pass again.

No part can stop another one. OUT gets summary.json and all logs and records in visit.tar.gz, written anew after each
part. Exit status 0 where every part ended well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from configs import compose, kernel_pins, runfolder
from configs.nodefolder import private_folder

PERIOD = Path(__file__).parents[1] / "data" / "period-27b.yaml"
PAIR = ("slurm.tasks_per_node=2", "slurm.gpus_per_node=2", "pack.packs_per_update=2")
GPU_TESTS = "tests/gpu"
NEWEST = (
    *("model.attention=joined", "model.deltanet=fla_forest", "adapter.masks=counted", "model.heads=fused"),
    "model.elementwise=fused",
)
OLDER = (
    *("model.attention=merged", "model.deltanet=fla", "adapter.masks=drawn", "model.heads=torch"),
    "model.elementwise=liger",
)
"""Kernels that a visit measures, and those that each takes the place of."""
WAITING = ("memory.offload=auto", "memory.keep_attention=auto")
CLOCKS = ("nvidia-smi", "--query-gpu=timestamp,index,clocks.sm,power.draw,clocks_event_reasons.active",
          "--format=csv,noheader", "-lms", "500")  # fmt: skip
"""Whether a chip was throttled."""
SHOWN = 25
"""Lines of a log that are printed when its part has ended."""


@dataclass(frozen=True)
class Part:
    """One program. seconds: its time. gpus: CUDA_VISIBLE_DEVICES."""

    name: str
    program: tuple[str, ...]
    seconds: float
    gpus: str = "0,1"


Lane = Sequence[Part]
"""One after the other, whatever becomes of each."""


@dataclass
class Visit:
    """Runs parts and keeps what they leave in `kept`; ends with the parts that are running at `until` (monotonic)."""

    out: Path
    kept: Path
    until: float
    found: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stage(self, *lanes: Lane) -> None:
        """Lanes side by side."""
        threads = [threading.Thread(target=self._lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _lane(self, lane: Lane) -> None:
        for part in lane:
            self._run(part)

    def _run(self, part: Part) -> None:
        seconds = min(part.seconds, self.until - time.monotonic())
        if seconds < 1:
            return self._note(part, None, 0.0)
        began = time.monotonic()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": part.gpus, "PYTHONUNBUFFERED": "1"}
        with self._log(part).open("wb") as log:
            process = subprocess.Popen(part.program, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
                _kill(process.pid)
                process.wait()
        self._note(part, status, time.monotonic() - began)

    def _log(self, part: Part) -> Path:
        return self.kept / f"{part.name}.log"

    def _note(self, part: Part, status: int | None, seconds: float) -> None:
        """status: None where its time was up."""
        with self.lock:
            self.found[part.name] = {"status": status, "seconds": round(seconds, 1)}
            self.save()
            path = self._log(part)
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            print(f"== {part.name}: status {status}, {seconds:.0f} s", *(line[:300] for line in lines[-SHOWN:]),
                  sep="\n", flush=True)  # fmt: skip

    def save(self) -> None:
        """What there is so far."""
        runfolder.write_json(self.out / "summary.json", self.found)
        aside = self.kept.with_suffix(".tar.gz")
        with tarfile.open(aside, "w:gz") as archive:
            archive.add(self.kept, "visit")
        shutil.copy(aside, self.out / "visit.tar.gz")


def _kill(pid: int) -> None:
    """A program and all below it, also what has a session of its own."""
    program = psutil.Process(pid)
    for process in (*program.children(recursive=True), program):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def python(*arguments: str | Path) -> tuple[str, ...]:
    return (sys.executable, *map(str, arguments))


def tests(*arguments: str) -> tuple[str, ...]:
    return python(
        "-m", "pytest", "-s", "-rA", "--durations=10", "-p", "no:cacheprovider", "-p", "no:logging", *arguments
    )


def pair(visit: Visit) -> None:
    """Whatever needs both GPUs. Preflight looks at them while they rest, so the checks beside it begin later."""
    run = visit.kept / "run"
    run.mkdir()
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(compose.load(PERIOD, list(PAIR))))
    visit.stage(
        [
            Part("preflight", python("-m", "preflight", "run", run), 200),
            Part("collectives", python("-m", "preflight", "collectives", run, "--spawn", "2"), 90),
            Part("judge", python("-m", "preflight", "judge", run, "--ranks", "2", "--json"), 30),
        ],
        [
            Part("rest", ("sleep", "30"), 40),
            Part("sharded", tests(f"{GPU_TESTS}/test_sharded_gpu.py"), 200),
        ],
    )
    visit.stage(
        [Part("readings", python("-m", "tests.bench.gpu_readings", visit.kept / "readings.json"), 110)],
    )
    hangs = tests(f"{GPU_TESTS}/test_hang_gpu.py", "--basetemp", str(visit.kept / "hangs"))
    visit.stage([Part("hangs", hangs, 330)])
    for dump in (private_folder() / "nccl").glob("*dump*"):
        shutil.copy(dump, visit.kept)
    visit.save()


def single(visit: Visit) -> None:
    """GPU 0: tuning. GPU 1: tests; those that look at times first."""
    fresh = visit.kept / "fresh-pins"
    one = "0"
    whole = tests(f"{GPU_TESTS}/test_model_gpu.py", "-k", "bfloat16 or through_flash")  # its truth comes from the CPU
    visit.stage(
        [
            Part("tune", python("-m", "prefix_train.cli", "tune", PERIOD, "--out", fresh, "--json"), 480, one),
            Part("compare", python("-m", "tests.bench.gpu_visit", visit.out, "compare", "--pins", fresh), 60, one),
        ],
        [
            Part("offload", tests(f"{GPU_TESTS}/test_offload_gpu.py"), 200, "1"),
            Part("no_sync", tests(f"{GPU_TESTS}/test_no_sync_gpu.py", f"{GPU_TESTS}/test_collate.py"), 200, "1"),
            Part("fused", tests(f"{GPU_TESTS}/test_fused_gpu.py"), 100, "1"),
        ],
        [
            Part("model", ("env", "OMP_NUM_THREADS=8", *whole), 500, "1"),
        ],
        [
            Part("rest", ("sleep", "60"), 70, ""),
            Part("mixers", tests(f"{GPU_TESTS}/test_mixers_gpu.py"), 400, "1"),
        ],
    )


def bench(visit: Visit, out: str, *arguments: str) -> tuple[str, ...]:
    """`prefix-train bench ...` into a file that is kept; rows in the same file share its gate."""
    return python("-m", "prefix_train.cli", "bench", *arguments, "--out", visit.kept / f"{out}.json")


@contextmanager
def clocks(visit: Visit) -> Iterator[None]:
    """Meanwhile each chip's clock, power and reasons to slow down are written twice a second."""
    with (visit.kept / f"clocks-{time.monotonic():.0f}.csv").open("wb") as log:
        watching = subprocess.Popen(CLOCKS, stdout=log, stderr=log)
        try:
            yield
        finally:
            watching.kill()
            watching.wait()
            visit.save()


def kernels(visit: Visit) -> None:
    """GPU 0: right or wrong. GPU 1: how fast, each alone."""
    newest = "pieces or joining or convolutions or waits"
    visit.stage(
        [
            Part("mixers", tests(f"{GPU_TESTS}/test_mixers_gpu.py", "-k", newest), 240, "0"),
            Part("fused", tests(f"{GPU_TESTS}/test_fused_gpu.py", "-k", "registers or heads"), 110, "0"),
            Part("large", tests(f"{GPU_TESTS}/test_large_gpu.py"), 150, "0"),
            Part("no_sync", tests(f"{GPU_TESTS}/test_no_sync_gpu.py"), 150, "0"),
        ],
        [
            Part("pieces", python("-m", "tests.bench.gpu_pieces", visit.kept / "pieces.json"), 260, "1"),
            Part("rivals", python("-m", "tests.bench.gpu_rivals", visit.kept / "rivals.json"), 260, "1"),
        ],
    )


def rows(visit: Visit) -> None:
    """The gate by itself, since two at once take three times as long. Then GPU 0: the whole model, GPU 1: examples
    alone through the whole model."""
    whole, alone = ("--row", "packed", "--warm", "2"), ("--row", "standalone", "--alone", "3", "--warm", "1")
    settings = (*WAITING, *NEWEST)
    visit.stage([Part("gate", bench(visit, "gate", "pack", "--row", "gate", *settings), 100, "0")])
    for row in ("pack", "alone"):
        shutil.copy(visit.kept / "gate.json", visit.kept / f"{row}.json")
    visit.stage(
        [Part("pack", bench(visit, "pack", "pack", *whole, "--no-profile", *settings), 420, "0")],
        [Part("alone", bench(visit, "alone", "pack", *alone, "--no-profile", *settings), 420, "1")],
    )


def settings(visit: Visit) -> None:
    """GPU 0: the longest pack. GPU 1: what each of the newest kernels is worth, in four layers."""
    long = ("--row", "packed", "--prefix", "96000", "--continuations", "160x1000", "--warm", "1", "--no-profile")
    four = ("--row", "packed", "--layers", "4", "--warm", "2", "--no-profile")
    pairs = zip(NEWEST, OLDER, strict=True)
    without = {"none": OLDER, **{new.split("=")[0]: (*(set(NEWEST) - {new}), old) for new, old in pairs}}
    visit.stage(
        [Part("long", bench(visit, "pack", "pack", *long, *WAITING, *NEWEST), 550, "0")],
        [
            Part(f"four, {name}", bench(visit, f"without-{name}", "pack", *four, *WAITING, *kept), 150, "1")
            for name, kept in without.items()
        ],
    )


def sharded(visit: Visit) -> None:
    """Both GPUs together, then each by itself at sizes that the memory's formulas were not fitted to."""
    visit.stage([Part("sharded", python("-m", "tests.bench.gpu_sharded", visit.kept / "sharded.json"), 320)])
    sizes = ("--layers", "16"), ("--layers", "4", "--prefix", "96000", "--continuations", "60x1500")
    visit.stage(
        *(
            [Part(f"memory {gpu}", bench(visit, f"memory{gpu}", "memory", *size, *WAITING, *NEWEST), 120, str(gpu))]
            for gpu, size in enumerate(sizes)
        )
    )


def many(visit: Visit) -> None:
    """However many GPUs the host has. Four or more hold the layers' inputs themselves, next to their part of 27B."""
    gpus = torch.cuda.device_count()
    everyone, worlds = ",".join(map(str, range(gpus))), [1 << power for power in range(gpus.bit_length())]
    kept, run = visit.kept, visit.kept / "run"
    run.mkdir()
    all_ranks = [f"slurm.tasks_per_node={gpus}", f"slurm.gpus_per_node={gpus}", f"pack.packs_per_update={gpus}"]
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(compose.load(PERIOD, all_ranks)))
    spared = [word for world in worlds if world >= 4 for word in ("--with", str(world), "memory.offload=none")]
    programs = {
        "preflight": (python("-m", "preflight", "run", run), 150),
        "collectives": (python("-m", "preflight", "collectives", run, "--spawn", str(gpus)), 90),
        "judge": (python("-m", "preflight", "judge", run, "--ranks", str(gpus), "--json"), 30),
        "hangs": (python("-m", "tests.gpu.hang_run", kept / "hangs", "nccl-gather", "--ranks", str(gpus)), 120),
        "readings": (python("-m", "tests.bench.gpu_readings", kept / "readings.json", "--ranks", str(gpus)), 90),
        "sharded": (python("-m", "tests.bench.gpu_sharded", kept / "many.json", "--layers", "0", "--seconds", "900",
                           "--worlds", *map(str, worlds), *spared, "--override", *WAITING, *NEWEST), 900),
    }  # fmt: skip
    visit.stage([Part(name, program, seconds, everyone) for name, (program, seconds) in programs.items()])


def compare(pins: Path) -> int:
    """Print which kernels' winners are others than the committed ones; 1 where the set of kernels is another."""
    committed = kernel_pins.folder(torch.cuda.get_device_name())
    mine, theirs = (set(kernel_pins.read_list(folder)["kernels"]) for folder in (pins, committed))
    print(f"{len(mine & theirs)} kernels in both; only fresh {sorted(mine - theirs)}, "
          f"only committed {sorted(theirs - mine)}")  # fmt: skip
    for kernel in sorted(mine & theirs):
        new, old = (kernel_pins.read_config(folder, kernel) for folder in (pins, committed))
        print(f"{kernel}: {'same' if new == old else f'{old} -> {new}'}")
    return 0 if mine == theirs else 1


ACTS = {act.__name__: act for act in (pair, single, kernels, rows, settings, sharded, many)}


def machine() -> Mapping[str, Any]:
    """What this ran on."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"date": time.strftime("%Y-%m-%d"), "gpus": names, "torch": torch.__version__, "cpus": os.cpu_count()}


def main() -> int:
    """One act of the visit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("act", choices=[*ACTS, "compare"])
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--pins", type=Path)
    parser.add_argument("--given", type=Path)
    given = parser.parse_args()
    if given.act == "compare":
        return compare(given.pins)
    given.out.mkdir(parents=True, exist_ok=True)
    kept = Path(tempfile.mkdtemp(prefix="visit-"))
    for path in given.given.glob("*.json") if given.given else ():
        shutil.copy(path, kept)
    visit = Visit(given.out, kept, time.monotonic() + given.seconds, {"machine": {"status": 0, **machine()}})
    with clocks(visit):
        ACTS[given.act](visit)
    return 0 if all(part["status"] == 0 for part in visit.found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
