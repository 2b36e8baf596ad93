"""`python -m slurm.diagnose RUN`: why a run hung or died, from its folder alone, on any machine.

Evidence of a hang is judged anew, so that what was learned since holds for old hangs too. Where there is none, the
ranks' own words of how they ended are judged by the same rules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from configs import runfolder
from configs.compose import from_run
from configs.console import make_app, print_json
from configs.console import run as run_app
from configs.errors import UserError
from configs.wording import counted
from prefix_train import heartbeat
from prefix_train.heartbeat import Beat, End
from slurm import alarms, archive, ending, evidence, life, presence, verdict
from slurm.evidence import Alarm, Node, Rank, Seen
from slurm.verdict import Verdict

ENDED_WELL = (0, runfolder.STOPPED)
READ = (
    runfolder.ATTEMPT,
    runfolder.END,
    *(name for folder in (runfolder.HEARTBEAT, runfolder.LIVES) for name in (folder, f"{folder}/*.json")),
    *(runfolder.LOGS, f"{runfolder.LOGS}/*.json"),
    *(runfolder.HANGS, f"{runfolder.HANGS}/*", f"{runfolder.HANGS}/*/*.json"),
    *(f"{folder}/{name}" for folder in (f"{runfolder.LOGS}/end-*", f"{runfolder.HANGS}/*") for name in
      ("", evidence.FOLDER, f"{evidence.FOLDER}/*.json")),
)  # fmt: skip
"""What is read of a run folder, each folder before what is in it."""


@dataclass(frozen=True)
class Diagnosis:
    """hang: number of the hang that it is of; none: of how the ranks ended, or of nothing."""

    run: Path
    hang: int | None
    verdict: Verdict | None
    standing: str
    """What is said where there is no verdict."""

    def text(self) -> str:
        """For people."""
        if self.verdict is None:
            return self.standing + "\n"
        text = self.verdict.text().replace(" RUN", f" {self.run}")
        return text if self.hang is None else f"{text}evidence: {self.run / runfolder.HANGS / str(self.hang)}\n"

    def document(self) -> dict[str, Any]:
        """For programs."""
        found = None if self.verdict is None else asdict(self.verdict)
        return {"run": str(self.run), "hang": self.hang, "verdict": found, "standing": self.standing}


def diagnose(run: Path, hang: int | None = None) -> Diagnosis:
    """Of hang number `hang`; without one, of the run's last life: its latest hang, else how its ranks ended.

    Raises UserError where there is no such hang, or its evidence cannot be read.
    """
    if hang is not None:
        folder = run / runfolder.HANGS / str(hang)
        if not folder.is_dir():
            there = ", ".join(path.name for path in verdict.folders(run)) or "none"
            raise UserError(f"{run} has no hang {hang}: there is {there}")
        return Diagnosis(run, hang, _of_hang(run, folder), f"hang {hang} has neither evidence nor verdict")
    attempt = runfolder.current_attempt(run)
    found = [(int(folder.name), each) for folder in verdict.folders(run) if (each := _of_hang(run, folder))]
    found = [(number, each) for number, each in found if each.attempt == attempt]
    if decisive := [item for item in found if item[1].ends]:
        number, each = max(decisive, key=lambda item: bool(item[1].ranks))
        return Diagnosis(run, number, each, "")
    ends = [end for end in heartbeat.read_ends(run) if end.attempt == attempt]
    if any(end.status not in ENDED_WELL for end in ends):
        return Diagnosis(run, None, _of_ends(run, attempt, ends), "")
    if found and not ends:
        return Diagnosis(run, *found[-1], "")
    return Diagnosis(run, None, None, _standing(run, attempt, ends))


def judge_folder(run: Path, folder: Path) -> Verdict | None:
    """What the evidence in hangs/<n> says; none: there is no evidence. Raises BadEvidence."""
    nodes = evidence.read(folder)
    if not nodes:
        return None
    alarm = _alarm(folder, nodes)
    return alarms.conclude(run, folder, alarm, _world(run), _hosts(run, alarm.attempt, nodes))


def of_life(run: Path, attempt: int) -> Verdict | None:
    """What is said of a life whose ranks have ended, of which one ended badly; none: nobody has left a word.

    A later life overwrites the ranks' own words; what the watchers saw of the end stays.
    """
    seen = evidence.read(evidence.of_end(run, attempt))
    ends = {end.rank: end for end in heartbeat.read_ends(run) if end.attempt == attempt}
    ends |= {rank.rank: rank.end for node in seen for rank in node.ranks if rank.end is not None}
    return _of_ends(run, attempt, list(ends.values())) if ends else None


def _of_hang(run: Path, folder: Path) -> Verdict | None:
    return judge_folder(run, folder) or verdict.load(folder)


def _of_ends(run: Path, attempt: int, ends: Sequence[End]) -> Verdict:
    """Judge how the ranks ended, by what their watchers saw of it, and where there is none by their own words."""
    words: dict[str, dict[int, tuple[Beat | None, End | None]]] = {}
    seen = evidence.read(evidence.of_end(run, attempt))
    known = {rank.rank for node in seen for rank in node.ranks}
    for beat in heartbeat.read(run):
        if beat.attempt == attempt and beat.rank not in known:
            words.setdefault(beat.host, {})[beat.rank] = (beat, None)
    for end in ends:
        if end.rank not in known:
            here = words.setdefault(end.host, {})
            here[end.rank] = (here.get(end.rank, (None, None))[0], end)
    nodes = (*seen, *(_node(host, attempt, ranks) for host, ranks in words.items()))
    alarm = Alarm(attempt, "", -1, 0.0, 0.0, "ranks have ended", max(end.time for end in ends), must_end=True)
    return verdict.judge(nodes, alarm, _world(run), _hosts(run, attempt, nodes))


def _node(host: str, attempt: int, words: dict[int, tuple[Beat | None, End | None]]) -> Node:
    ranks = []
    for number, (beat, end) in sorted(words.items()):
        missing = () if end is not None else ("it left no word of how it ended",)
        ranks.append(Rank(number, (Seen(beat, None, None, ()), Seen(beat, None, None, ())), (), end, missing))
    return Node(host, 0, attempt, 0.0, 0.0, 0.0, tuple(ranks), ((), ()), (), (), (), "", ())


def _alarm(folder: Path, nodes: Sequence[Node]) -> Alarm:
    """Why the evidence was taken; what an alarm that was not written would have said is not made up."""
    first = nodes[0]
    return evidence.read_alarm(folder) or Alarm(first.attempt, first.host, -1, 0.0, 0.0, "", first.time, must_end=True)


def _world(run: Path) -> int:
    return from_run(run).ranks


def _hosts(run: Path, attempt: int, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Hosts of the life's nodes, in order: as the job wrote them down, else as far as evidence and watchers tell."""
    for one in life.read(run):
        if one.attempt == attempt and one.nodes:
            return one.nodes
    known = {node.index: node.host for node in nodes if node.index >= 0}
    present = {place: presence.read(run, place) for place in range(from_run(run).slurm.nodes)}
    return tuple(known.get(place) or (one.host if one else "?") for place, one in present.items())


def _standing(run: Path, attempt: int, ends: Sequence[End]) -> str:
    if (bad := ending.bad(run, attempt)) is not None:
        return bad.line  # also of ranks that ended well: it may be what they left that was wrong
    if (run / runfolder.RESULT).exists():
        return f"nothing to explain: the run is complete; see {run / runfolder.RESULT}"
    if ends:
        return f"nothing to explain: {counted(len(ends), 'rank')} of life {attempt} ended well"
    if not heartbeat.read(run):
        return f"nothing to explain yet: no rank has given a heartbeat in life {attempt}"
    return "no hang is known and no rank has ended; --now looks at the ranks of a run that is alive"


def _refuse_links(run: Path) -> None:
    """What a link leads to is not of the run, and is not read for what is said of it."""
    for pattern in READ:
        for path in run.glob(pattern):
            if path.is_symlink():
                raise UserError(f"{path} is a link: what it leads to is not of the run; put the files in its place")


def _check_alive(run: Path) -> None:
    """Raise UserError where nobody can answer: the run is complete, not begun, or its ranks have ended."""
    attempt = runfolder.current_attempt(run)
    beats = [beat for beat in heartbeat.read(run) if beat.attempt == attempt]
    ended = {end.rank for end in heartbeat.read_ends(run) if end.attempt == attempt}
    if (run / runfolder.RESULT).exists():
        reason = "the run is complete"
    elif not beats:
        reason = f"no rank has given a heartbeat in life {attempt}"
    elif ended >= set(range(max(beat.world for beat in beats))):
        reason = f"all ranks of life {attempt} have ended"
    else:
        return
    raise UserError(f"{run}: there is nobody to look at: {reason}; leave out --now")


def _now(run: Path) -> int:
    """Collect from the live job; the number of the folder that it went into."""
    _check_alive(run)
    print(f"asking the watchers of {run}, for at most {alarms.ANSWER_S:.0f} s", file=sys.stderr, flush=True)
    return int(alarms.look_now(run).name)


def _found(run: Path, hang: int | None, now: bool) -> Diagnosis:
    """Raises UserError naming the file where one of the run's is damaged or cannot be read."""
    _refuse_links(run)
    with runfolder.reading():
        return diagnose(run, _now(run) if now else hang)


app = make_app("Why a run hung or died, from its folder alone. Example: python -m slurm.diagnose runs/demo-1")


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    hang: Annotated[int | None, typer.Option(help="Number of a hang, instead of the latest one.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Look at the ranks of a live job first; ends nothing.")] = False,
    archive_to: Annotated[
        Path | None, typer.Option("--archive", help="Pack what explains it into this .tar.gz, without secrets.")
    ] = None,
    with_code: Annotated[bool, typer.Option("--with-code", help="The run's frozen code goes into it as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")] = False,
) -> int:
    """Exits with 0 where the run could be read, whatever is said of it."""
    if not (run / runfolder.CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {runfolder.CONFIG}")
    if now and hang is not None:
        raise UserError("--now looks at the present and --hang at the past: give one of them")
    run = run.resolve()
    if archive_to is not None:
        archive.check_target(run, archive_to)
    found = _found(run, hang, now)
    text = found.text()
    print(text, end="")
    packed = None
    if archive_to is not None:
        packed, links = archive.write(run, archive_to, text, with_code)
        if links:
            print(f"left out, for they are links: {', '.join(links)}")
        print(f"{counted(len(packed), 'file')} in {archive_to}; look into it before you pass it on")
    if as_json:
        print_json({**found.document(), "archive": packed and str(archive_to)})
    return 0


if __name__ == "__main__":
    run_app(app)
