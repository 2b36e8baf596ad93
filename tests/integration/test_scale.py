"""512 nodes of 8 ranks, with stand-ins for Slurm's programs that refuse what they do not know."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from prefix_train import heartbeat
from preflight.pairs import RankReport
from preflight.states import Finding, NodeReport
from slurm import finish, life, scheduler, verdict
from slurm.life import VARIABLE
from tests import fake_slurm
from tests.standins import make_clone, submit_command

NODES, TASKS = 512, 8
SHAPE = (f"slurm.nodes={NODES}", f"slurm.tasks_per_node={TASKS}", f"pack.packs_per_update={NODES * TASKS}")

SCONTROL = """
import sys
from pathlib import Path

def names(text):
    if text == "node[001-512]":
        return [f"node{number:03}" for number in range(1, 513)]
    if "[" in text:
        sys.exit("scontrol: cannot expand " + text)
    return text.split(",")

match sys.argv[1:]:
    case ["show", "hostnames", text]:
        print(*names(text), sep="\\n")
    case ["requeue", "4711"]:
        pass
    case ["update", "JobId=4711", text] if text.startswith("ExcNodeList="):
        pass
    case unknown:
        sys.exit(f"scontrol: {unknown}")
with (Path(sys.argv[0]).parent / "asked").open("a") as asked:
    print(*sys.argv[1:], file=asked)
"""

SINFO = """
import sys
if sys.argv[1:] != ["-h", "-N", "-p", "big", "-o", "%N %T"]:
    sys.exit("sinfo: " + " ".join(sys.argv[1:]))
for number in range(1, 601):
    print(f"node{number:03}", "down*" if number > 590 else "allocated" if number <= 512 else "idle")
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = fake_slurm.install(tmp_path / "bin")
    for name, source in (("scontrol", SCONTROL), ("sinfo", SINFO)):
        (folder / name).write_text(f"#!{sys.executable}\n{source}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def run(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job on all nodes that has begun."""
    command, env = submit_command(make_clone(tmp_path / "clone"), "cluster=slurm", *SHAPE, "--json")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=tmp_path / "clone", env=env, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[001-512]", "SLURM_JOB_PARTITION": "big"}
    for name, text in {**job, VARIABLE: "0"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(scheduler, "outlive_requeue", lambda: None)  # this process is not the job's
    folder = Path(json.loads(done.stdout.splitlines()[-1])["run"])
    assert life.begin_job(folder) == 0
    return folder


def ended(run: Path) -> None:
    """Every rank has left a word: killed by its watcher, as after a hang."""
    heartbeat.Heartbeat(run, 0, NODES * TASKS).phase("forward", 7)
    heartbeat.ended(run, 0, NODES * TASKS, signal=9)
    for folder in ("heartbeat", "logs"):
        document = json.loads((run / folder / "rank0.json").read_text())
        for rank in range(1, NODES * TASKS):
            (run / folder / f"rank{rank}.json").write_text(json.dumps({**document, "rank": rank}))


def test_hang_on_one_of_512_nodes(run: Path, programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended(run)
    for node in range(NODES):
        culprits = (2003,) if node == 250 else ()
        sentence = "rank 2003 is stopped" if culprits else "no rank can be named"
        verdict.write(run / "hangs" / str(node + 1), verdict.Verdict(0, "missing_rank", True, culprits, sentence), run)
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert finish.main(run, "143") == finish.HUNG
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4.0
    assert capfd.readouterr().err.splitlines()[-1] == "stuck: rank 2003 is stopped; begins again without node251"
    (mine,) = life.read(run)
    assert (mine.cause, mine.culprits, mine.excluded, mine.update) == ("hang", ("node251",), ("node251",), 7)
    assert (programs / "asked").read_text().splitlines()[-2:] == [
        "requeue 4711",
        "update JobId=4711 ExcNodeList=node251",
    ]


def test_node_is_not_left_out_where_the_partition_has_no_other(
    run: Path, programs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (programs / "sinfo").write_text((programs / "sinfo").read_text().replace("590", "512"))
    ended(run)
    verdict.write(run / "hangs" / "1", verdict.Verdict(0, "missing_rank", True, (8,), "rank 8 is stopped"), run)
    finish.main(run, "143")
    assert "node002 cannot be left out: too few other nodes are up" in capfd.readouterr().err
    assert (programs / "asked").read_text().splitlines()[-1] == "requeue 4711"


def answered(run: Path, missing: int) -> list[str]:
    """The preflight of all nodes, each in a state of its own, and of all ranks but one; the nodes' names."""
    names = [f"node{number:03}" for number in range(1, NODES + 1)]
    folder = run / "preflight" / "0"
    (folder / "ranks").mkdir(parents=True)
    checks = [Finding(f"host.check{number}", "pass", f"as it should be {number}") for number in range(30)]
    for number, name in enumerate(names):
        report = NodeReport(name, (*checks, Finding("host.state", "pass", f"state {number}")), 9.0, time.time())
        (folder / f"{name}.json").write_text(json.dumps(report.to_json()))
    stages = ("group", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "clock")
    steps: list[dict[str, object]] = [{"begin": "store"}, {"stage": "store"}, {"begin": "join"}]
    steps += [{"stage": "join", "missing": [missing]}] + [{"begin": stage} for stage in stages]
    for rank in set(range(NODES * TASKS)) - {missing}:
        document = asdict(RankReport(rank, names[rank // TASKS], tuple(steps)))
        (folder / "ranks" / f"rank{rank}.json").write_text(json.dumps(document))
    return names


def judge(run: Path, names: list[str], *options: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The job's own act over what lies in the run folder; and its seconds of CPU, for that may be shared."""
    command = [sys.executable, "-m", "preflight", "judge", str(run), *options, "--nodes", ",".join(names)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"judged {' '.join(options)} in {seconds:.2f} s of CPU")
    return done, seconds


def test_judging_512_nodes_and_their_ranks(run: Path) -> None:
    """First the nodes alone, of which one more never answered; then with 4,096 ranks, of which one never joined."""
    names = answered(run, 2003)
    done, seconds = judge(run, [*names, "node513"])
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("FAIL node513: silent: node.answer: gave no answer in time")
    assert json.loads((run / "preflight/0/report.json").read_text())["bad_nodes"] == ["node513"]
    assert seconds < 2
    done, seconds = judge(run, names, "--ranks", str(NODES * TASKS))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("FAIL node251: silent: collective.join: rank 2003 never joined the collectives")
    assert done.stdout.splitlines()[-1].startswith("scontrol update NodeName=node251 State=DRAIN")
    assert json.loads((run / "preflight/0/report.json").read_text())["bad_nodes"] == ["node251"]
    assert seconds < 4
