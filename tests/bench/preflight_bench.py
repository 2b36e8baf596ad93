"""Planted faults and healthy controls through the real collectors and the real judge: precision and recall.

    python tests/bench/preflight_bench.py [NAME ...]

Three nodes are judged together; the fault is on one. Hardware that this machine lacks is stood in for: nvidia-smi, what
torch says of its GPU, and what importing Triton and FLA says. A fault is found where its node is blamed by a
check that was expected, its consequences on the same node included; every other problem is a false alarm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from configs import kernel_pins, runfolder  # noqa: E402
from preflight.pairs import judge_ranks  # noqa: E402
from preflight.ranks import read  # noqa: E402
from tests import standin  # noqa: E402
from tests.bench.preflight_cases import CASES, COLLECTIVES, GPU, HEALTHY, SMI, VERSIONS, Case  # noqa: E402

NODES = ("node0", "node1", "node2")
ODD = "node2"


@dataclass
class Score:
    """What the cases came to."""

    found: int = 0
    missed: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    controls: int = 0

    def add(self, case: Case, problems: list[tuple[str, str]], sentence: str) -> None:
        """Count what was reported, (node, check) each, and print it."""
        blamed = any(node == ODD and check in case.expected for node, check in problems)
        alarms = [f"{node} {check}" for node, check in problems if node != ODD or check not in case.expected]
        self.controls += not case.expected
        self.found += blamed
        self.missed += [case.name] if case.expected and not blamed else []
        self.false_alarms += alarms
        right = not alarms and blamed == bool(case.expected)
        print(f"{'right' if right else 'WRONG'}  {case.name:<30}{sentence[:120]}", flush=True)
        for alarm in alarms:
            print(f"       false alarm: {alarm}", flush=True)

    @property
    def precision(self) -> float:
        """Share of the problems reported that were planted."""
        return self.found / max(1, self.found + len(self.false_alarms))

    @property
    def recall(self) -> float:
        """Share of the planted faults that were found."""
        return self.found / max(1, self.found + len(self.missed))


def make_run(folder: Path) -> Path:
    """A run folder of a job that wants one GPU per node."""
    run = folder / "run"
    (run / "code").mkdir(parents=True)
    (run / "code" / "module.py").write_text("x = 1\n")
    (folder / "train.jsonl").write_text('{"messages": []}\n')
    text = (ROOT / "tests/data/period-27b.yaml").read_text()
    text = text.replace("tests/data/period-27b.yaml", str(folder / "train.jsonl"))
    (run / "config.yaml").write_text(text + "preflight:\n  prove_pins: false\n  deadline_s: 60\n")
    return run


def make_pins(folder: Path) -> Path:
    """Pins of two kernels for the GPU that is stood in for."""
    pins = folder / "pins"
    made = {**VERSIONS, "gpu": GPU, "date": "2026-11-30"}
    config = {"kwargs": {"BK": 64}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}
    kinds = {"l2norm_fwd_kernel": "fla", "chunk_fwd_kernel_o": "triton"}
    for kernel in kinds:
        runfolder.write_json(pins / f"{kernel}.json", kernel_pins.document(kernel, config, made, []))
    listed = {kernel: kernel_pins.entry(pins, kernel, kind) for kernel, kind in kinds.items()}
    runfolder.write_json(pins / kernel_pins.LIST, {**made, "kernels": listed})
    return pins


def collect(folder: Path, node: str, case: Case | None) -> Path:
    """Run the real collector as `node`, with the case's fault; the run folder that it left its answer in."""
    run, pins, path = make_run(folder), make_pins(folder), folder / "path"
    variables = {"SLURMD_NODENAME": node, "FLA_CONFIG_DIR": str(pins)}
    variables["PATH"] = standin.program(folder / "bin", "nvidia-smi", SMI)
    if case:
        case.plant(folder)
        variables |= {name: value.format(folder=folder) for name, value in case.variables.items()}
    # Where pins lie and what is on the path must not look like a difference between nodes.
    env = standin.environment(path, HEALTHY + (case.code if case else ""), **variables)
    subprocess.run([sys.executable, "-m", "preflight", "run", str(run)], env=env, stdout=subprocess.DEVNULL,
                   stderr=subprocess.PIPE, check=False)  # fmt: skip
    return run


def judge(run: Path) -> dict[str, Any]:
    """The real judge's document over what lies in `run`."""
    program = [sys.executable, "-m", "preflight", "judge", str(run), "--nodes", ",".join(NODES), "--json"]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    document: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert (ran.returncode == 0) == document["passed"]
    return document


def judged(folder: Path, healthy: dict[str, Any], case: Case) -> dict[str, Any]:
    """Collect the odd node, lay two healthy ones beside it, judge all three."""
    run = collect(folder, ODD, case)
    answers = run / "preflight" / "0"
    for node in NODES[:2]:
        runfolder.write_json(answers / f"{node}.json", {**healthy, "node": node, "wall": time.time()})
    if case.spoil:
        case.spoil(answers / f"{ODD}.json")
    leaked = "planted-secret" in (answers / f"{ODD}.json").read_text() if (answers / f"{ODD}.json").exists() else False
    found = judge(run)
    if leaked:
        found["problems"].append({"node": ODD, "finding": {"check": "leaked secret", "found": ""}})
    return found


def cases(names: list[str]) -> Iterator[Case]:
    """Those named, or all."""
    yield from (case for case in CASES if not names or case.name in names)


def main(names: list[str]) -> int:
    """Score every case, print each, then precision and recall."""
    score = Score()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "case"  # the same for all, so that paths are no difference
        run = collect(place, "node0", None)
        healthy = runfolder.read_json(run / "preflight/0/node0.json")
        for case in cases(names):
            shutil.rmtree(place)
            found = judged(place, healthy, case)
            score.add(case, [(p["node"], p["finding"]["check"]) for p in found["problems"]], found["headline"])
        for case, problems, sentence in collective_cases(Path(temporary), names):
            score.add(case, problems, sentence)
        print(f"64 nodes judged in {many(Path(temporary), healthy):.1f} s")
    print(f"{score.found + len(score.missed)} faults, {score.controls} controls")
    print(f"missed: {', '.join(score.missed) or 'none'}; false alarms: {len(score.false_alarms)}")
    print(f"precision {score.precision:.3f}, recall {score.recall:.3f}")
    return 0 if score.precision == score.recall == 1.0 else 1


def collective_cases(folder: Path, names: list[str]) -> Iterator[tuple[Case, list[tuple[str, str]], str]]:
    """Three ranks over gloo, each a node, one with a fault: the case, who is blamed by what, and the first sentence."""
    for number, case in enumerate(case for case in COLLECTIVES if not names or case.name in names):
        run = folder / f"collectives{number}"
        absent = (2,) if case.name == "rank never joins" else ()
        standin.run_ranks(run, 3, {2: case.code}, absent, seconds=45)
        found = judge_ranks(read(run / "preflight/0"), 3, {rank: f"node{rank}" for rank in range(3)})
        bad = [(node, finding.check) for node, finding in found if finding.state != "pass"]
        yield case, bad, f"{found[0][0]}: {found[0][1].found}"


def many(folder: Path, healthy: dict[str, Any]) -> float:
    """Seconds that the judge takes over 64 nodes, from the command to the report."""
    run = make_run(folder / "many")
    names = [f"node{number}" for number in range(64)]
    for name in names:
        runfolder.write_json(run / "preflight/0" / f"{name}.json", {**healthy, "node": name, "wall": time.time()})
    began = time.monotonic()
    program = [sys.executable, "-m", "preflight", "judge", str(run), "--nodes", ",".join(names)]
    subprocess.run(program, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    return time.monotonic() - began


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
