"""The parts of a verdict's sentence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from slurm import causes, frames
from slurm.evidence import Collective
from slurm.views import Case, View

MESSAGE = 200
"""Letters of an exception's message that a sentence holds."""


def short(where: str) -> str:
    """`file:line` without the folders."""
    path, _, line = where.rpartition(":")
    return f"{PurePosixPath(path).name}:{line}" if path else PurePosixPath(where).name


def numbers(ranks: Sequence[int]) -> str:
    """`3`, `3 and 7`, `0, 3 and 7`."""
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last


def name(views: Sequence[View]) -> str:
    """`rank 5 on node3`, `ranks 3 and 7 on node1, node2`."""
    return f"{named(views)} on {', '.join(dict.fromkeys(view.host for view in views))}"


def named(views: Sequence[View]) -> str:
    """`rank 5`, `ranks 3 and 7`."""
    return f"{verb(views, 'rank', 'ranks')} {numbers([view.rank for view in views])}"


def verb(views: Sequence[View], one: str, several: str) -> str:
    """The word that fits so many ranks."""
    return one if len(views) == 1 else several


def standing(view: View) -> str:
    """Which part of which update a rank is in, by its heartbeat."""
    beat = view.beat
    if beat is None:
        return "before its first heartbeat"
    part = beat.part if beat.part != "load" else "loading"
    if not beat.update:
        return part
    return f"{part} of update {beat.update}" + (f", pack {beat.pack}" if beat.pack >= 0 else "")


def inside(view: View) -> str:
    """` in function (file:line)`, or nothing where no frame is known."""
    frame = view.frame
    if frame is None:
        return f" in {short(view.where)}" if view.where else ""
    what = frames.bare(frame)
    return f" in {what} ({short(frames.place(frame))})"


def call(one: Collective) -> str:
    """`all_gather (model.py:140)`."""
    return f"{one.kind} ({short(one.where)})" if one.where else one.kind


def waiting(views: Iterable[View]) -> str:
    """`7 ranks wait in all_gather (model.py:140)`; empty where nobody waits."""
    places = Counter(_waits_in(view) for view in views)
    if not places:
        return ""
    (place, most), *others = places.most_common()
    first = f"{_count(most)} in {place}"
    return ", ".join([first, *(f"{count} in {other}" for other, count in others)])


def _count(ranks: int) -> str:
    return "1 rank waits" if ranks == 1 else f"{ranks} ranks wait"


def brief(message: str) -> str:
    """A message as part of a sentence: one line, without an end, and not all of a long one."""
    text = " ".join(message.split()).rstrip(". ")
    return text if len(text) <= MESSAGE else f"{text[:MESSAGE]}..."


def _waits_in(view: View) -> str:
    if view.pending is not None:
        return call(view.pending)
    kind = (view.stack and frames.collective(view.stack)) or "a collective"
    own = frames.own_frame(view.stack.main) if view.stack else None
    return f"{kind} ({short(frames.place(own))})" if own else kind


def spinning(case: Case) -> str:
    """Which waiting ranks' GPUs spin, and what the first one draws; empty where that is not known of any."""
    views = [view for view in case.waiting if view.spins(view.gpu)]
    if not views:
        return ""
    first = views[0]
    now, computing = first.gpu, first.gpu_computing
    assert now is not None
    assert computing is not None
    who = named(views) if len(views) == 1 or len(views) < len(case.waiting) else "all ranks that wait"
    update = f" in update {first.beat.update - 1}" if first.beat and first.beat.update > 1 else ""
    return (
        f"Spinning, not computing: {who} ({now.utilisation:.0f}% utilisation, {now.power_w:.0f} W "
        f"against {computing.power_w:.0f} W{update})."
    )


def lines(case: Case) -> tuple[str, ...]:
    """One line for each rank: where it is."""
    return tuple(f"rank {view.rank} on {view.host}: {_line(view)}" for view in case.views)


def _line(view: View) -> str:
    if view.end is not None:
        return ended(view)
    if view.known is None or not view.answered:
        return "gave nothing"
    state = "stopped" if view.stopped else "gone" if view.gone else ""
    if not state:
        state = f"waits in {_waits_in(view)}" if view.waits else f"is{inside(view) or ' where no frame tells'}"
    return f"{state}; {standing(view)}"


def ended(view: View) -> str:
    """How a rank ended, from its own record or another's."""
    end = view.end
    assert end is not None
    when = f" in update {end.update}" if end.update else ""
    if end.signal:
        return f"was ended by {end.signal}{when}" + (f": {end.message}" if end.message else "")
    if causes.mistake(end) is not None:
        return f"stopped{when}: {brief(end.message or '')}"
    if end.exception:
        message = brief(end.message or "")
        place = f" at {short(end.where)}" if end.where else ""
        return f"raised {end.exception}{when}{place}: {message}"
    return f"ended with status {end.status}{when}"
