"""Planted faults and healthy controls through the real collectors and the real judge: precision and recall.

    python tests/bench/preflight_bench.py [--only own|independent|times] [NAME ...]

Three nodes are judged together; the fault is on one. Hardware that this machine lacks is stood in for: nvidia-smi, what
torch says of its GPU, and what importing Triton and FLA says. A fault is found where its node is blamed by a
check that was expected, its consequences on the same node included; every other problem is a false alarm. The cases of
`preflight_independent/`, written without sight of the rules, are scored and printed apart.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from configs import runfolder  # noqa: E402
from preflight.pairs import judge_ranks  # noqa: E402
from preflight.ranks import read  # noqa: E402
from tests import standin  # noqa: E402
from tests.bench.preflight_cases import CASES, COLLECTIVES, nothing  # noqa: E402
from tests.bench.preflight_node import NODES, Case, Node  # noqa: E402
from tests.bench.preflight_stage import make_node  # noqa: E402

INDEPENDENT = Path(__file__).parent / "preflight_independent"
PARTS = ("own", "independent", "times")


@dataclass
class Score:
    """What the cases of one part came to."""

    found: int = 0
    missed: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    controls: int = 0

    def add(self, case: Case, problems: list[tuple[str, str, str]]) -> None:
        """Count what was reported, (node, check, sentence) each, and print it."""
        blamed = [(check, said) for node, check, said in problems if case.right(node, check)]
        alarms = [problem for problem in problems if not case.right(*problem[:2])]
        unsaid = [words for words in case.says if not any(words in said for _, said in blamed)]
        found = bool(blamed) and not unsaid
        self.controls += not case.expected
        self.found += found
        self.missed += [case.name] if case.expected and not found else []
        self.false_alarms += [f"{case.name}: {node} {check}" for node, check, _ in alarms]
        right = not alarms and found == bool(case.expected)
        shown = f"{blamed[0][0]}: {blamed[0][1]}" if blamed else "no problem"
        print(f"{'right' if right else 'WRONG'}  {case.name:<34}{shown[:120]}", flush=True)
        for node, check, said in alarms:
            print(f"       false alarm: {node} {check}: {said[:160]}", flush=True)
        for words in unsaid if blamed else ():
            print(f"       does not say: {words}", flush=True)

    def tell(self, title: str) -> None:
        """Print what they came to."""
        print(f"{title}: {self.found + len(self.missed)} faults, {self.controls} controls")
        print(f"  missed: {', '.join(self.missed) or 'none'}; false alarms: {len(self.false_alarms)}")
        print(f"  precision {self.precision:.3f}, recall {self.recall:.3f}", flush=True)

    @property
    def precision(self) -> float:
        """Share of the problems reported that were planted."""
        return self.found / max(1, self.found + len(self.false_alarms))

    @property
    def recall(self) -> float:
        """Share of the planted faults that were found."""
        return self.found / max(1, self.found + len(self.missed))


def collect(folder: Path, case: Case) -> Node:
    """Run the real collector on the node that the case spoils; the node, with the run folder that holds its answer."""
    node = make_node(folder, case.on)
    case.plant(node)
    env = standin.environment(node.path, node.inside(), **node.variables())
    subprocess.run([sys.executable, "-m", "preflight", "run", str(node.run)], env=env, stdout=subprocess.DEVNULL,
                   stderr=subprocess.PIPE, check=False)  # fmt: skip
    return node


def answers(run: Path) -> Path:
    """Where the nodes' answers lie."""
    return run / "preflight" / "0"


def judge(run: Path) -> dict[str, Any]:
    """The real judge's document over what lies in `run`."""
    program = [sys.executable, "-m", "preflight", "judge", str(run), "--nodes", ",".join(NODES), "--json"]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    document: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert (ran.returncode == 0) == document["passed"]
    return document


def judged(place: Path, healthy: dict[str, Any], case: Case) -> list[tuple[str, str, str]]:
    """Collect the odd node, lay two healthy ones beside it, judge all three: node, check, sentence of each problem."""
    shutil.rmtree(place, ignore_errors=True)
    node = collect(place, case)
    folder = answers(node.run)
    own = folder / f"{case.on}.json"
    for name in set(NODES) - {case.on}:
        runfolder.write_json(folder / f"{name}.json", {**healthy, "node": name, "wall": time.time()})
    if node.spoil and own.exists():
        text = node.spoil(own.read_text())
        own.unlink() if text is None else own.write_text(text)
    leaked = own.exists() and "planted-secret" in own.read_text()
    found = [
        (problem["node"], problem["finding"]["check"], problem["finding"]["found"])
        for problem in judge(node.run)["problems"]
    ]
    return [*found, (case.on, "leaked secret", "")] if leaked else found


def ranks_judged(place: Path, case: Case) -> list[tuple[str, str, str]]:
    """Three ranks over gloo, each a node, one with the fault: who is blamed by what."""
    shutil.rmtree(place, ignore_errors=True)
    node, rank = make_node(place, case.on), NODES.index(case.on)
    case.plant(node)
    standin.run_ranks(node.run, 3, {rank: node.inside()}, () if node.joins else (rank,), seconds=45,
                      variables={rank: node.environment})  # fmt: skip
    found = judge_ranks(read(answers(node.run)), 3, dict(enumerate(NODES)))
    return [(name, finding.check, finding.found) for name, finding in found if finding.state != "pass"]


def scored(
    place: Path, healthy: dict[str, Any], alone: Iterable[Case], together: Iterable[Case], names: list[str]
) -> Score:
    """Run and print the cases. alone: nodes by themselves. together: ranks that talk to each other."""
    by_itself, among_ranks = {case.name: case for case in alone}, {case.name: case for case in together}
    score = Score()
    for name, case in (by_itself | among_ranks).items():
        if names and name not in names:
            continue
        problems = judged(place, healthy, case) if name in by_itself else []
        score.add(case, problems + (ranks_judged(place, case) if name in among_ranks else []))
    return score


def independent() -> Iterator[Case]:
    """The cases of every file in the folder of independent ones."""
    for path in sorted(INDEPENDENT.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"independent_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield from module.CASES


def main(arguments: list[str]) -> int:
    """Score every part, print each case, then precision and recall. Only the own cases decide the exit status."""
    only = [arguments.pop(1), arguments.pop(0)][0] if arguments[:1] == ["--only"] else None
    if only not in (None, *PARTS):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "case"  # the same for all, so that paths are no difference
        node = collect(place, Case("healthy", nothing, NODES[0]))
        healthy = runfolder.read_json(answers(node.run) / f"{NODES[0]}.json")
        if only in (None, "own"):
            score = scored(place, healthy, CASES, COLLECTIVES, arguments)
            score.tell("own cases")
            status = 0 if score.precision == score.recall == 1.0 else 1
        apart = list(independent()) if only in (None, "independent") else []
        if apart := [case for case in apart if not arguments or case.name in arguments]:
            together = [case for case in apart if case.collectives]
            scored(place, healthy, apart, together, arguments).tell("independently written cases, scored apart")
        if only in (None, "times"):
            print(f"64 nodes judged in {many(Path(temporary) / 'many', healthy):.1f} s")
    return status


def many(folder: Path, healthy: dict[str, Any]) -> float:
    """Seconds that the judge takes over 64 nodes, from the command to the report."""
    run = make_node(folder, NODES[0]).run
    names = [f"node{number}" for number in range(64)]
    for name in names:
        runfolder.write_json(answers(run) / f"{name}.json", {**healthy, "node": name, "wall": time.time()})
    began = time.monotonic()
    program = [sys.executable, "-m", "preflight", "judge", str(run), "--nodes", ",".join(names)]
    subprocess.run(program, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    return time.monotonic() - began


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
