"""Tables of the page: what was counted, what differs between runs, what each run's files say. Text in, text out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from configs.redact import redact, redact_value
from configs.schema import Config
from configs.wording import counted
from prefix_train.budget import GIB
from prefix_train.results.charts import number
from prefix_train.results.lives import ENDED_WELL
from prefix_train.results.records import Node, Plan, Preflight, Spread, Verify
from prefix_train.results.run import Run

NONE = "–"
SUMS = ("packs", "examples", "targets", "positions", "logical_tokens")
MOST_ROWS = 40
"""Rows of a table that a run may fill at will; more are counted."""

MOST_GROUPS = 6
"""Kinds of nodes whose environment is shown."""


@dataclass(frozen=True)
class Table:
    """head: of the columns. The first cell of each row names it."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def total(run: Run, name: str) -> float | None:
    """The sum of a figure over all updates of metrics.jsonl; none where an update, or all of them, lack it."""
    values = [line.get(name) for line in run.updates]
    present = [value for value in values if value is not None]
    return sum(present) if present and len(present) == len(values) else None


def state(run: Run) -> str:
    """How the run stands, in a few words."""
    done = f"{_done(run):,} of {'?' if run.total is None else f'{run.total:,}'} updates"
    if run.ending is not None and run.ending.status not in ENDED_WELL:
        return f"life {run.attempt} ended badly, {done}: {run.ending.line}"
    if run.result is not None:
        failed = run.result.verify is not None and not run.result.verify.passed
        return f"complete: {done}" + ("; its check of itself FAILED" if failed else "")
    last = run.spans[-1] if run.spans else None
    if last is None or last.cause is None:
        return f"not complete: {done}" + ("" if run.beats or run.updates else "; no rank was heard of yet")
    return f"life {last.attempt} ended ({last.cause}): {done}"


def figures(runs: Sequence[Run]) -> Table:
    """Figures that were counted from what ran, a column for each run, and where each comes from."""
    columns = [_figures(run) for run in runs]
    rows = [(name, *(column[name][0] for column in columns), columns[0][name][1]) for name in columns[0]]
    known = tuple(row for row in rows if any(cell != NONE for cell in row[1:-1]))
    return Table("What was counted from what ran", ("figure", *(run.label for run in runs), "where it is from"), known)


def _figures(run: Run) -> dict[str, tuple[str, str]]:
    """(figure, source) by name, the same names for every run."""
    sums = {name: total(run, name) for name in (*SUMS, "seconds")}
    result, plan, first, last = run.result, run.plan, run.updates[:1], run.updates[-1:]
    held = [line["heldout_loss"] for line in run.heldout]
    used = [line["memory_bytes"] / GIB for line in run.updates if "memory_bytes" in line]
    times = [line["seconds"] for line in run.updates if "seconds" in line]
    metrics, said = "metrics.jsonl", "result.json"
    tensors = result.tensors if result else None
    return {
        "state": (state(run), "the run's files"),
        "updates done": (_count(_done(run)), metrics),
        "loss, first and last": (" → ".join(number(line["loss"]) for line in (*first, *last)) or NONE, metrics),
        "held-out loss": (number(held[-1]) if held else NONE, f"{metrics}, the last evaluation"),
        "held-out answers exact": (_answers(run), f"{said}, generated with each prefix computed once"),
        "positions computed": (_count(sums["positions"]), f"{metrics}, sum of all updates"),
        "logical tokens": (_count(sums["logical_tokens"]), f"{metrics}, sum: tokens had each example run alone"),
        "times fewer positions": (_ratio(sums["logical_tokens"], sums["positions"]), f"{metrics}: the two above"),
        "as planned": (number(plan.ratio) if plan else NONE, "plan.json, first epoch"),
        "target tokens": (_count(sums["targets"]), f"{metrics}, sum"),
        "examples": (_count(sums["examples"]), f"{metrics}, sum over all epochs"),
        "time in updates": (_seconds(sums["seconds"]), f"{metrics}, sum; loading, saving and waiting not in it"),
        "median update": (
            f"{number(median(times[1:] or times))} s" if times else NONE,
            f"{metrics}, without the first",
        ),
        "positions/s": (_ratio(sums["positions"], sums["seconds"]), f"{metrics}, sums, the first update in it"),
        "logical tokens/s": (_ratio(sums["logical_tokens"], sums["seconds"]), f"{metrics}, the same"),
        "most memory": (
            f"{max(used):.2f} GiB" if used else NONE,
            f"{metrics}, of the rank that used most: of its GPU, on a CPU of the whole process",
        ),
        "memory planned": (
            f"{run.limit.gib:.2f} GiB" if run.limit else NONE,
            run.limit.source if run.limit else "prefix-train budget",
        ),
        "tensors trained": (
            f"{tensors.trained}, {tensors.covered} had a gradient" if tensors else NONE,
            f"{said}, counted in the last life",
        ),
        "weights changed": (_changed(run), f"{said}, sha256 before and after"),
        "sums agree": (_agreement(run), f"{said} against {metrics}"),
        "computed by": (_kernels(run), said),
        "trackers": (_trackers(run), f"{said}: lines that each took, of all lives"),
        "left-out examples": (_count(len(result.skipped)) if result else NONE, said),
        "ranks": (_count(run.config.ranks if run.config else None), "config.yaml"),
        "commit": (_commit(run), "code/COMMIT.json"),
    }


def verify(found: Verify) -> Table:
    """Packs against transformers' own model, one example at a time."""
    names = {
        "mean_loss": "mean loss",
        "example_mean": "loss of an example, mean difference",
        "example_max": "loss of an example, largest difference",
        "gradient": f"gradient, worst of {found.tensors} tensors, relative",
    }
    rows = []
    for name, value in found.differences.items():
        bound = found.bounds.get(name)
        holds = "reported only" if bound is None else "no" if name in found.failed or value > bound else "yes"
        rows.append((names.get(name, name), f"{value:.2e}", NONE if bound is None else f"{bound:.0e}", holds))
    caption = f"Packs against transformers' own model on {found.examples} held-out examples, trained weights"
    return Table(caption, ("quantity", "difference", "bound", "within it"), tuple(rows))


def options(runs: Sequence[Run]) -> Table | None:
    """Options that differ between runs; of a run by itself those that are not their defaults."""
    known = [(run.label, flat(redact_value(asdict(run.config)))) for run in runs if run.config is not None]
    if not known or (len(runs) > 1 and len(known) < 2):
        return None
    if len(runs) == 1:
        caption, known = "Options that are not their defaults", [*known, ("default", flat(asdict(Config())))]
    else:
        caption = "Options that differ between the runs"
    names = dict.fromkeys(name for _, values in known for name in values)
    rows = [(name, *(values.get(name, NONE) for _, values in known)) for name in names]
    return Table(caption, ("option", *(label for label, _ in known)), tuple(r for r in rows if len({*r[1:]}) > 1))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by dotted name, as text."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def packs(plan: Plan) -> Table:
    """The plan of the first epoch."""
    pairs = plan.visible_pairs
    rows = (
        ("examples", f"{plan.examples:,} in {counted(plan.packs, 'pack')} ({plan.mode})"),
        ("updates", f"{plan.updates:,} in the epoch, {_range(plan.packs_per_update, 'pack')} each"),
        ("examples per update", _range(plan.examples_per_update)),
        ("positions", f"{plan.positions:,} for {plan.logical_tokens:,} logical tokens: {plan.ratio:.1f} times fewer"),
        ("visible pairs", f"{pairs.packed:.3g}, standalone {pairs.standalone:.3g}: {pairs.ratio:.1f} times fewer"),
        ("segments", f"{plan.segments:,}, at most {plan.depth} deep"),
        ("fill", f"{plan.fill:.1%} of {plan.max_positions:,} positions"),
        ("above the least possible", f"{plan.waste.positions:.2%} more positions"),
        ("balance", f"{plan.balance:.1%}: mean rank's predicted time over the slowest's"),
        *(
            (f"longest {place}", f"{one.tokens:,} tokens ({one.source})")
            for place, one in enumerate(plan.longest[:3], 1)
        ),
    )
    return Table("Packs and sharing, first epoch", ("figure", "plan"), rows)


def lives(run: Run) -> Table:
    """Every life, how it ended, what followed."""
    rows = []
    for one in run.spans:
        life = one.life
        rows.append(
            (
                str(one.attempt),
                when(one.began),
                when(one.ended),
                ", ".join(life.nodes) if life and life.nodes else NONE,
                one.cause or "not known, or not ended",
                str(life.update) if life and life.cause else NONE,
                _followed(life.why, life.excluded) if life else NONE,
            )
        )
    head = ("life", "began about (UTC)", "ended (UTC)", "nodes", "how it ended", "at update", "what followed")
    return Table("Lives", head, tuple(rows))


def hangs(run: Run) -> Table | None:
    """Every time that evidence was taken."""
    if not run.hangs:
        return None
    rows = []
    for hang in run.hangs:
        alarm, verdict = hang.alarm, hang.verdict
        said = verdict.sentence if verdict else alarm.sentence if alarm else "neither alarm nor verdict can be read"
        follows = NONE if verdict is None else "life ended" if verdict.ends else "nothing was ended"
        life = NONE if hang.attempt is None else str(hang.attempt)
        kind = f"{verdict.kind}, {verdict.confidence or 'low'} confidence" if verdict else "not judged"
        rows.append((str(hang.number), life, when(alarm.time if alarm else None), kind, said, follows))
    head = ("hang", "life", "noticed (UTC)", "kind", "verdict", "what followed")
    return Table("Hangs: evidence that was taken", head, tuple(rows))


def endings(run: Run) -> Table | None:
    """Ranks of the present life that ended badly, in the order in which they did."""
    bad = sorted((end for end in run.ends if end.status not in ENDED_WELL), key=lambda end: end.time)
    if not bad:
        return None
    rows = [
        (
            str(end.rank),
            end.host,
            when(end.time),
            f"{end.phase or 'before its first heartbeat'}, update {end.update or 0}",
            redact(": ".join(filter(None, (end.signal or end.exception or f"status {end.status}", end.message)))),
        )
        for end in bad
    ]
    return cut(Table("Ranks that ended badly", ("rank", "node", "time (UTC)", "in", "with"), tuple(rows)))


def problems(found: Preflight) -> Table | None:
    """What preflight did not like."""
    if not found.problems:
        return None
    rows = [
        (
            one.node,
            one.finding.state + (" (allowed)" if one.allowed else ""),
            one.finding.check,
            " → ".join(filter(None, (one.finding.found, one.finding.advice))),
        )
        for one in found.problems
    ]
    return cut(Table("What preflight found", ("node", "state", "check", "found and advice"), tuple(rows)))


def environments(found: Preflight) -> list[Table]:
    """What nodes are, one table for each group of nodes that are alike, the largest group first."""
    alike: dict[str, list[Node]] = {}
    for node in found.nodes:
        # Addresses, free space and memory differ between healthy nodes.
        own = [one for one in node.findings if not (one.check.startswith("host.") and one.state == "pass")]
        alike.setdefault(repr([(one.check, one.state, one.found) for one in own]), []).append(node)
    groups = sorted(alike.values(), key=len, reverse=True)
    tables = []
    for nodes in groups[:MOST_GROUPS]:
        names = ", ".join(node.node for node in nodes[:8]) + (f", ... ({len(nodes)})" if len(nodes) > 8 else "")
        rows = tuple((one.check, one.state, one.found) for one in nodes[0].findings)
        tables.append(Table(f"Environment of {names}", ("check", "state", "found"), rows))
    if len(groups) > MOST_GROUPS:
        tables[-1] = replace(
            tables[-1], caption=f"{tables[-1].caption}; {len(groups) - MOST_GROUPS} more kinds of nodes"
        )
    return tables


def cut(table: Table) -> Table:
    """`table` with at most MOST_ROWS rows; how many more there are stands in its caption."""
    more = len(table.rows) - MOST_ROWS
    if more <= 0:
        return table
    return Table(f"{table.caption} ({more:,} more are not shown)", table.head, table.rows[:MOST_ROWS])


def when(at: float | None) -> str:
    """Seconds since 1970 as date and time, UTC."""
    if at is None or not 0 <= at < 1e11:
        return NONE
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def _done(run: Run) -> int:
    return max((int(line["update"]) for line in run.updates), default=0)


def _count(value: float | None) -> str:
    return NONE if value is None else f"{int(value):,}"


def _ratio(above: float | None, below: float | None) -> str:
    return NONE if above is None or not below else number(above / below)


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    hours, rest = divmod(round(value), 3600)
    return f"{number(value)} s" if value < 120 else f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _range(spread: Spread, what: str = "") -> str:
    least, most = number(spread.least), number(spread.most)
    words = least if least == most else f"{least} to {most}"
    return words if not what else f"{words} {what}{'' if words == '1' else 's'}"


def _answers(run: Run) -> str:
    result = run.result
    if result is None or result.accuracy is None:
        return NONE
    chance = "" if result.chance is None else f" (chance {result.chance:.0%})"
    of = "" if result.heldout_examples is None else f" of {result.heldout_examples:,}"
    fields = "".join(f"; {name} {share:.1%}" for name, share in result.fields.items())
    return f"{result.accuracy:.1%}{of}{chance}{fields}"


def _changed(run: Run) -> str:
    result = run.result
    if result is None or result.hash_before is None or result.hash_after is None:
        return NONE
    return "yes" if result.hash_before != result.hash_after else "NO: to the bit as before training"


def _agreement(run: Run) -> str:
    """Whether the totals that the run has written are those of its metrics."""
    if run.result is None:
        return NONE
    written = {name: getattr(run.result, name) for name in SUMS} | {"updates": run.result.updates}
    counted = {name: total(run, name) for name in SUMS} | {"updates": len(run.updates)}
    wrong = [
        f"{name} {_count(written[name])} against {_count(counted[name])}"
        for name in written
        if written[name] is not None and written[name] != counted[name]
    ]
    return f"NO: {', '.join(wrong)}" if wrong else "yes"


def _kernels(run: Run) -> str:
    found = run.result.kernels if run.result else {}
    return ", ".join(f"{name.replace('_', ' ')}: {kernel}" for name, kernel in found.items()) or NONE


def _trackers(run: Run) -> str:
    found = run.result.trackers if run.result else {}
    return "; ".join(
        f"{name}: {counted(one.taken, 'line')}" + (f", {one.failed:,} NOT ({redact(one.error)})" if one.failed else "")
        for name, one in found.items()
    ) or NONE  # fmt: skip


def _commit(run: Run) -> str:
    if run.commit is None or run.commit.commit is None:
        return NONE
    return run.commit.commit[:12] + (" with changes" if run.commit.dirty else "")


def _followed(why: str, excluded: Sequence[str]) -> str:
    without = f"from then on without {', '.join(excluded)}" if excluded else ""
    return "; ".join(filter(None, (why, without))) or NONE
