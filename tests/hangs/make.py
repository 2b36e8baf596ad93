"""`python -m tests.hangs.make CASE|all`: make cases of the corpus again, by real runs with planted faults.

The evidence is the product's own (slurm.deadlines gives the alarm, slurm.collect looks), frozen as files. What would
tell of this machine is renamed, what no rule reads is cut.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from configs.schema import WatchConfig
from prefix_train.heartbeat import Beat, End
from slurm import collect, deadlines, evidence, frames, signs
from slurm.collect import Scene
from slurm.evidence import Alarm, Node, Rank, Seen
from slurm.stacks import Frame, Stack, Thread
from tests.hangs import composed, runs
from tests.hangs.cases import CORPUS, PLANS, Label, Plan
from tests.standins import ROOT

RING, NATIVE, LETTERS, DURATIONS = 40, 8, 80, 8
"""What is kept: calls of a ring, native frames innermost of a thread, letters of their names, durations of a heartbeat.
Of native frames whatever `frames` reads is kept too."""
GAP_S = 1.5


def make(plan: Plan, into: Path = CORPUS) -> Path:
    """Run `plan` and freeze what was seen into its folder."""
    work = Path(tempfile.mkdtemp(prefix="hangs-"))
    watch = replace(runs.WATCH, **{name: value for name, value in plan.options.items() if hasattr(runs.WATCH, name)})
    every = {name: plan.options.get(name, 0) for name in ("save_every", "evaluate_every")}
    config = runs.options(work, plan.world, watch, **every)
    began = time.monotonic()
    try:
        with runs.running(work / "run", config, plan.faults, plan.world) as ranks:
            alarm = wait(plan, ranks, watch)
            scene = Scene(work / "run", 0, runs.host(), 0, tuple(range(plan.world)), GAP_S, began)
            node = collect.collect(scene)
        hosts = tuple(f"node{number + 1}" for number in range(plan.nodes))
        label = Label(plan.story, plan.kind, plan.named, plan.world, hosts, plan.healthy, plan.stays, False, plan.also,
                      alarm.age > alarm.limit)  # fmt: skip
        names = {
            str(work / "run"): "/runs/demo",
            str(work): "/data",
            tempfile.gettempdir(): "/scratch",
            sys.prefix: "/usr",
            sys.base_prefix: "/usr",
            str(ROOT): "/runs/demo/code",
            runs.host(): "node1",
        }
        calls = 2 * RING if plan.look == "slow" else RING
        return freeze(into / plan.name, label, split(node, hosts), alarm, names, calls)
    finally:
        shutil.rmtree(work)


def wait(plan: Plan, ranks: runs.Ranks, watch: WatchConfig) -> Alarm:
    """Until it is time to look; what the watcher would say then."""
    word, _, phase = plan.look.partition(" ")
    if word == "alarm":
        ranks.wait(lambda: bad_ends(ranks) or overdue(ranks, watch), 90, "an alarm")
        time.sleep(0.5 if bad_ends(ranks) else 0)
    elif word == "phase":
        ranks.wait(lambda: any(beat.phase == phase and time.time() - beat.since > 1 for beat in ranks.beats().values()),
                   90, plan.look)  # fmt: skip
    else:
        ranks.wait(
            lambda: (found := ranks.beats().values()) and min(beat.completed for beat in found) >= 10, 90, "updates"
        )
    ranks.ends()
    late = most_late(ranks, watch)
    if word == "slow":
        late = late._replace(age=watch.floor_s + 0.5, limit=watch.floor_s)
    return Alarm(0, "node1", late.beat.rank, late.age, late.limit, late.sentence, time.time(), 0)


def bad_ends(ranks: runs.Ranks) -> list[End]:
    """Ranks that have ended badly."""
    return [end for end in ranks.ends() if end.status != 0]


def overdue(ranks: runs.Ranks, watch: WatchConfig) -> list[deadlines.Overdue]:
    """Ranks that run and are past their deadline."""
    ended = {end.rank for end in ranks.ends()}
    beats = [beat for rank, beat in ranks.beats().items() if rank not in ended]
    return deadlines.overdue(beats, watch, runs.host(), time.monotonic(), time.time())


def most_late(ranks: runs.Ranks, watch: WatchConfig) -> deadlines.Overdue:
    """The rank that is furthest into its deadline, past it or not."""
    beats = list(ranks.beats().values())
    durations = [seconds for beat in beats for seconds in beat.durations]

    def one(beat: Beat) -> deadlines.Overdue:
        age = deadlines.age(beat, runs.host(), time.monotonic(), time.time())
        return deadlines.Overdue(beat, age, deadlines.deadline(beat, watch, durations))

    return max(map(one, beats), key=lambda late: late.age / late.limit)


def split(node: Node, hosts: Sequence[str]) -> list[Node]:
    """One machine's evidence as that of several nodes, its ranks spread evenly."""
    per_node = len(node.ranks) // len(hosts)
    parts = [node.ranks[index * per_node : (index + 1) * per_node] for index in range(len(hosts))]
    return [
        replace(node, host=host, index=index, ranks=tuple(_hosted(rank, host) for rank in part))
        for index, (host, part) in enumerate(zip(hosts, parts, strict=True))
    ]


def freeze(
    folder: Path, label: Label, nodes: Sequence[Node], alarm: Alarm, names: dict[str, str], calls: int = RING
) -> Path:
    """Write a case; `names`: text of this machine, and what stands in its place. calls: kept of each ring."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / evidence.FOLDER).mkdir(parents=True)
    (folder / "label.json").write_text(json.dumps(asdict(label), indent=1) + "\n")
    _write(folder / evidence.ALARM, alarm, names)
    for node in nodes:
        _write(folder / evidence.FOLDER / f"{node.index}-{node.host}.json", trim(node, calls), names)
    return folder


def trim(node: Node, calls: int = RING) -> Node:
    """Without what no rule reads."""
    return replace(node, ranks=tuple(_trim_rank(rank, calls) for rank in node.ranks), scheduler="")


def _trim_rank(rank: Rank, kept: int) -> Rank:
    first, second = map(_trim_seen, rank.rounds)
    end = rank.end and replace(rank.end, frames=rank.end.frames[-4:])
    calls = tuple(
        replace(one, started=round(one.started, 4), ended=one.ended and round(one.ended, 4))
        for one in rank.collectives[-kept:]
    )
    return replace(rank, rounds=(first, second), collectives=calls, end=end)


def _trim_seen(seen: Seen) -> Seen:
    beat = seen.beat and replace(seen.beat, durations=seen.beat.durations[-DURATIONS:])
    return replace(seen, beat=beat, stack=seen.stack and trim_stack(seen.stack))


def trim_stack(stack: Stack) -> Stack:
    """Without threads and native frames that nothing in `frames` reads; the innermost native ones are for people."""
    return replace(stack, threads=tuple(_trim_thread(one) for one in stack.threads if _is_read(one)), kernel=())


def _is_read(thread: Thread) -> bool:
    python = any(signs.below(thread, files) for files in (frames.AUTOTUNING, frames.COMPILING, signs.DATA_FILES))
    native = any(frame.native and frames.READ_NATIVE.search(frame.name) for frame in thread.frames)
    return thread.main or bool(thread.holds_lock) or frames.own_frame(thread) is not None or python or native


def _trim_thread(thread: Thread) -> Thread:
    native = [frame for frame in thread.frames if frame.native]
    kept = {id(frame) for frame in native[:1]}
    kept |= {id(frame) for frame in native[:NATIVE] if not frame.name.startswith("_Py")}
    kept |= {id(frame) for frame in native if frames.READ_NATIVE.search(frame.name)}
    shown = [frame for frame in thread.frames if not frame.native or id(frame) in kept]
    return replace(thread, frames=tuple(map(_trim_frame, shown)))


def _trim_frame(frame: Frame) -> Frame:
    whole = not frame.native or frames.READ_NATIVE.search(frame.name)
    return frame if whole else replace(frame, name=frame.name[:LETTERS])


def _hosted(rank: Rank, host: str) -> Rank:
    first, second = (replace(seen, beat=seen.beat and replace(seen.beat, host=host)) for seen in rank.rounds)
    return replace(rank, rounds=(first, second), end=rank.end and replace(rank.end, host=host))


def _write(path: Path, value: Any, names: dict[str, str]) -> None:
    text = msgspec.json.encode(value).decode()
    for here, there in sorted(names.items(), key=lambda item: -len(item[0])):
        text = text.replace(here, there)
    path.write_text(text + "\n")


def main(arguments: Sequence[str]) -> None:
    """Make the cases with these names, or all; one line each."""
    wanted = [plan for plan in PLANS if "all" in arguments or plan.name in arguments]
    unknown = set(arguments) - {"all"} - {plan.name for plan in PLANS} - set(composed.CASES)
    if unknown:
        sys.exit(f"no case {sorted(unknown)[0]}; cases are {', '.join(plan.name for plan in PLANS)}")
    from tests.hangs.cases import read

    for plan in wanted:
        began = time.monotonic()
        try:
            found = read(make(plan)).judge()
        except TimeoutError as late:
            print(f"{plan.name}: {late}", flush=True)
            continue
        good = found.ranks == plan.named and (found.kind == plan.kind or found.kind in plan.also)
        good = good and found.ends == (not plan.healthy and not plan.stays)
        seconds = time.monotonic() - began
        print(f"{'ok ' if good else 'BAD'} {plan.name} ({seconds:.0f} s): {found.kind} {found.ranks}: {found.sentence}",
              flush=True)  # fmt: skip
    for name, compose in composed.CASES.items():
        if "all" in arguments or name in arguments:
            freeze(CORPUS / name, *compose(), {})
            print(f"{name}: composed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
