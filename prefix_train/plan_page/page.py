"""`prefix-train plan --html`: one HTML page of a plan that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup

from configs.wording import counted
from prefix_train import near_misses, planning
from prefix_train.packing import Pack
from prefix_train.plan_page import trees
from prefix_train.planning import Planned
from prefix_train.results import charts, document, tables
from prefix_train.results.charts import LEFT, WIDTH, Chart
from prefix_train.results.records import Plan
from prefix_train.results.tables import Table

PACKS = 4
"""Packs that are drawn, the first of the epoch."""

MISSES, VARIANTS = 8, 8
"""Near misses that are shown, those that would save most, and the texts of each that most examples have."""

LONGEST = 20
"""Examples that the table of the longest has."""

WORDS = 160
"""Letters of the data in one place; more are cut."""


WHITE = " \n\t\r"
SIGNS = str.maketrans(WHITE, "␣⏎⇥␍")


@dataclass(frozen=True)
class Variant:
    """One differing text, spelt so that white space is seen; of how many examples, and where the first of them are."""

    text: str
    examples: int
    sources: str


@dataclass(frozen=True)
class Miss:
    """A near miss: a sentence, the text around the difference, and the variants that are shown."""

    words: str
    before: str
    after: str
    variants: tuple[Variant, ...]
    more: int


def write(planned: Planned, found: dict[str, Any], place: Path) -> None:
    """Write the page of `planned`, whose summary is `found`. Raises UserError where it cannot be written."""
    document.write(render(planned, found), place, "--html")


def render(planned: Planned, found: dict[str, Any]) -> str:
    """The page as text."""
    data, model = planned.config.data.train, planned.config.model
    misses = found["near_misses"] or ()
    return document.render(
        Path(__file__).parent / "page.html",
        title=f"Plan of {data}",
        model=model.path or "a model that is built",
        refused=_cut(planned.refused, 2 * WORDS),
        lead=lead(found),
        sharing=sharing_bars(found["logical_tokens"], found["positions"]),
        lengths=charts.histogram(
            "lengths", "Lengths of examples", found["histogram"]["edges"], found["histogram"]["examples"]
        ),
        shared=shared(found["shared"]["largest"]),
        sizes=sizes(found) if found["sizes"] else None,
        packs=[_pack(planned, place, pack) for place, pack in enumerate(islice(_filled(planned), PACKS))],
        pack_count=found["packs"],
        misses=[miss(one) for one in misses[:MISSES]],
        more_misses=max(0, len(misses) - MISSES),
        longest=longest(planned),
        too_long=too_long(planned, found["too_long"]),
        advice=_advice(planned, found["too_long"]["longest"]),
        left_out=tables.cut(Table("Left out", ("example", "because"), tuple(map(_left_out, found["skipped"])))),
        figures=tables.packs(msgspec.convert(found, Plan)),
    )


def lead(found: Mapping[str, Any]) -> str:
    """What it comes to, in a sentence."""
    saved = 1 - found["positions"] / found["logical_tokens"]
    return (
        f"{counted(found['examples'], 'example')} in {counted(found['packs'], 'pack')}: "
        f"{found['positions']:,} positions are computed for {found['logical_tokens']:,} logical tokens, "
        f"{found['ratio']:.1f} times fewer than each example alone. {saved:.1%} of the positions are saved."
    )


def sharing_bars(logical: int, positions: int) -> Chart:
    """What each example alone would compute, and what the packs do, to one scale."""
    parts = []
    for row, (name, tokens) in enumerate((("alone", logical), ("packs", positions))):
        top, width = 6 + 34 * row, max(0.5, (WIDTH - LEFT) * tokens / logical)
        within = width > (WIDTH - LEFT) / 2
        bar = Markup('<rect class="segment s{}" x="{}" y="{}" width="{:.1f}" height="24"/>')
        text = Markup('<text class="{}" x="{:.1f}" y="{}">{}</text>')
        parts += [
            text.format("end", LEFT - 6, top + 16, name),
            bar.format(row, LEFT, top, width),
            text.format("inside" if within else "", LEFT + 6 + (0 if within else width), top + 16, f"{tokens:,}"),
        ]
    words = f"{logical:,} tokens where each example is alone, {positions:,} positions in packs"
    return Chart("What sharing saves", charts.picture("sharing", "What sharing saves", words, parts, 74), (words,))


def shared(largest: Sequence[Mapping[str, Any]]) -> Table | None:
    """The beginnings that save most."""
    if not largest:
        return None
    rows = tuple(
        (
            _cut(one["text"]),
            f"{one['tokens']:,}" + (f" after {one['start']:,}" if one["start"] else ""),
            f"{one['examples']:,}",
            f"{one['saves']:,}",
            one["source"],
        )
        for one in largest
    )
    return Table("Shared beginnings, those that save most", ("begins with", "tokens", "examples", "saves", "in"), rows)


def sizes(found: Mapping[str, Any]) -> Table:
    """What packs of other sizes would come to."""
    rows = tuple(
        (
            f"{size['max_positions']:,}" + (" (this plan)" if size["max_positions"] == found["max_positions"] else ""),
            f"{size['packs']:,}",
            f"{size['positions']:,}",
            f"{found['logical_tokens'] / size['positions']:.1f}",
        )
        for size in found["sizes"]
    )
    head = ("pack.max_positions", "packs, at least", "positions, at least", "times fewer")
    return Table("Packs of other sizes: larger ones repeat a beginning less often and need more memory", head, rows)


def miss(found: Mapping[str, Any]) -> Miss:
    """A near miss, as the page has it."""
    variants = tuple(
        Variant(_spelt(_cut(one["text"])), one["examples"], ", ".join(one["sources"]))
        for one in found["variants"][:VARIANTS]
    )
    words = f"{near_misses.sentence(found)}."
    more = found["variant_count"] - len(variants)
    return Miss(words, _cut(found["before"], from_end=True), _cut(found["after"]), variants, more)


def longest(planned: Planned) -> Table:
    """The longest examples by line."""
    index = planned.index
    order = sorted(range(len(index.sources)), key=lambda example: -int(index.lengths[example]))[:LONGEST]
    rows = []
    for example in order:
        nodes = index.forest.path(example)
        own = int(index.lengths[example] - index.forest.start[nodes[-1]])
        counts = int(index.lengths[example]), own, int(index.targets[example])
        rows.append((index.sources[example], *(f"{count:,}" for count in counts)))
    head = ("example", "tokens", "of them in its last segment", "learned")
    return Table("The longest examples", head, tuple(rows))


def too_long(planned: Planned, found: Mapping[str, Any]) -> Table | None:
    """Examples above the cap."""
    if not found["examples"]:
        return None
    rows = tuple((one["source"], f"{one['tokens']:,}", f"{one['tokens'] - planned.cap:,}") for one in found["longest"])
    more = found["examples"] - len(rows)
    caption = f"Examples of more than {planned.cap:,} tokens: {found['examples']:,}"
    caption += f" ({more:,} more are not shown)" if more else ""
    return Table(caption, ("example", "tokens", "too many"), rows)


def _advice(planned: Planned, too_long: Sequence[Mapping[str, Any]]) -> str:
    return planning.advice(planned, too_long[0]["tokens"]).replace("`", "") if too_long else ""


def _filled(planned: Planned) -> Iterator[Pack]:
    return (pack for pack in planned.run.epoch(0).packs if pack.members)


def _pack(planned: Planned, place: int, pack: Pack) -> Chart:
    def words_of(segment: int) -> str:
        example, start = pack.origin[segment]
        text = planned.text_of(example, start, min(trees.TOLD, pack.lengths[segment]))
        return f"{planned.index.sources[example]}: {_cut(text)}"

    return trees.draw(f"pack{place}", f"Pack {place + 1}", pack, words_of)


def _left_out(line: str) -> tuple[str, str]:
    source, _, reason = line.partition(": ")
    return source, _cut(reason, 2 * WORDS)


def _cut(text: str, most: int = WORDS, from_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return "…" + text[-most:] if from_end else text[:most] + "…"


def _spelt(text: str) -> str:
    """`text` with the white space at its ends as signs, since that may be all that differs."""
    inner = text.strip(WHITE)
    before = len(text) - len(text.lstrip(WHITE)) if inner else len(text)
    ends = (text[:before].translate(SIGNS), text[before + len(inner) :].translate(SIGNS))
    return inner.join(ends) or "(nothing)"
