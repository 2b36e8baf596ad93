"""Small charts as SVG that takes its colours from the page: light, dark and printed, with words for those who hear it.

Every chart is 400 units wide, so that its text can be read on a phone. Series differ in colour and in dashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from configs.wording import counted

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 36
MOST_POINTS = 400
"""A longer series is drawn by the least and most of each stretch."""
LOGARITHMIC = 30.0
"""From this ratio of most to least on, where a chart may be logarithmic."""
COLOURS = 6
DASHES = ("", "7 3", "2 2", "9 3 2 3", "12 4", "4 2 1 2 1 2", "1 3")


@dataclass(frozen=True)
class Series:
    """One run's curve. index: of the run, which decides its colour and dashes. dots: few points, marked each."""

    label: str
    index: int
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A height to hold against the curves, a budget for instance."""

    label: str
    index: int
    value: float


@dataclass(frozen=True)
class Bar:
    """One life on the time line. state: `well`, `bad` or `open` (its end is not known)."""

    number: int
    begin: float
    end: float
    state: str
    words: str


@dataclass(frozen=True)
class Mark:
    """One hang on the time line."""

    number: int
    at: float
    words: str


@dataclass(frozen=True)
class Chart:
    """What stands on the page: title and words below the picture, and the picture."""

    title: str
    svg: Markup
    words: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """From values to places in the picture, begin to end."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], begin: float, end: float, log: bool = False) -> Axis:
        """An axis with a little room around `values`, which are not empty."""
        listed = list(values)
        low, high = min(listed), max(listed)
        if log and low > 0 and high / low >= LOGARITHMIC:
            return cls(low / 1.2, high * 1.2, begin, end, True)
        room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
        bottom = 0.0 if 0 <= low < 0.5 * high else low - room
        return cls(bottom, high + room, begin, end)

    def at(self, value: float) -> str:
        """The place of `value`, as SVG writes it."""
        low, high, where = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return f"{self.begin + (self.end - self.begin) * (where - low) / (high - low):.1f}"

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values within the axis, and how they are written."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            fine, coarse = (
                [
                    step * 10.0**power
                    for power in powers
                    for step in steps
                    if self.low <= step * 10.0**power <= self.high
                ]
                for steps in ((1, 2, 5), (1,))
            )
            found = fine if len(fine) <= 8 else coarse[:: -(-len(coarse) // 8)]
            return [(value, short(value)) for value in found]
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / about))
        step = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= about)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        digits = 3 if self.high <= 0 else max(3, math.ceil(math.log10(self.high / step)) + 1)
        return [(number * step, short(number * step, min(digits, 15))) for number in numbers]


def lines(
    key: str, title: str, series: Sequence[Series], levels: Sequence[Level] = (), unit: str = "", log: bool = False
) -> Chart | None:
    """Curves over updates; None where there is no point. key: tells this picture's ids from others'."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    heights = [*(y for one in drawn for _, y in one.points), *(level.value for level in levels)]
    x = Axis.over([x for one in drawn for x, _ in one.points], LEFT, WIDTH - RIGHT)
    y = Axis.over(heights, HEIGHT - BOTTOM, TOP, log)
    words = [_words(one, unit) for one in drawn]
    words += [f"{level.label}: {number(level.value)}{unit}" for level in levels]
    parts = [_axes(x, y)]
    for level in levels:
        parts.append(
            Markup('<line class="level s{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                level.index % COLOURS, LEFT, WIDTH - RIGHT, y.at(level.value), y.at(level.value)
            )
        )
    parts += [_curve(one, x, y) for one in drawn]
    name = title + (", logarithmic" if y.log else "")
    return Chart(name, picture(key, name, "; ".join(words), parts), tuple(words))


def histogram(key: str, title: str, edges: Sequence[float], counts: Sequence[int]) -> Chart | None:
    """How many examples have which length; None where the plan does not tell."""
    if len(edges) != len(counts) + 1 or not counts or not edges[0] < edges[-1] or max(counts) <= 0:
        return None
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    y = Axis(0.0, max(counts) * 1.05, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, "tokens")]
    said = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if count > 0:
            left, top = float(x.at(low)), float(y.at(count))
            parts.append(
                Markup('<rect class="bar" x="{}" y="{}" width="{}" height="{}"/>').format(
                    f"{left:.1f}", f"{top:.1f}", f"{max(1.0, float(x.at(high)) - left - 1):.1f}", f"{y.begin - top:.1f}"
                )
            )
            said.append(f"{count:,} of {low:,.0f} to {high:,.0f} tokens")
    words = (f"{counted(sum(counts), 'example')} of {edges[0]:,.0f} to {edges[-1]:,.0f} tokens",)
    return Chart(title, picture(key, title, "; ".join([*words, *said]), parts), words)


def time_line(key: str, title: str, bars: Sequence[Bar], marks: Sequence[Mark], in_order: bool) -> Chart | None:
    """Lives as bars and hangs as flags above them, over hours; in_order: the places say nothing but what came first."""
    if not bars:
        return None
    start, height = bars[0].begin, 126
    last = max([*(bar.end for bar in bars), *(mark.at for mark in marks)])
    scale, unit = next(
        (s, u) for s, u in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if last - start > s or s == 1
    )
    x = Axis(0.0, max((last - start) / scale, 1e-3) * 1.01, 12, WIDTH - RIGHT)
    parts = [] if in_order else [_ticks_below(x, height - 24, unit, height)]
    for bar in bars:
        left, right = (float(x.at((time - start) / scale)) for time in (bar.begin, bar.end))
        parts.append(
            Markup('<rect class="life {}" x="{}" y="50" width="{}" height="16"/><text x="{}" y="79">{}</text>').format(
                bar.state, f"{left:.1f}", f"{max(2.0, right - left - 1):.1f}", f"{left:.1f}", bar.number
            )
        )
    for mark in marks:
        at = x.at((mark.at - start) / scale)
        parts.append(
            Markup('<path class="hang" d="M{0} 48V22l9 5-9 5"/><text x="{0}" y="17" class="mid">{1}</text>').format(
                at, mark.number
            )
        )
    words = [*(bar.words for bar in bars), *(mark.words for mark in marks)]
    legend = "bars: lives by number; flags: hangs by number"
    return Chart(title, picture(key, title, "; ".join(words), parts, height), (legend,))


def picture(key: str, title: str, description: str, parts: Sequence[Markup], height: int = HEIGHT) -> Markup:
    """An SVG with its title and description, which screen readers say."""
    return Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-labelledby="{}-t {}-d"><title id="{}-t">{}</title>'
        '<desc id="{}-d">{}</desc>{}</svg>'
    ).format(WIDTH, height, key, key, key, visible(title), key, visible(description), Markup("").join(parts))


def short(value: float, digits: int = 3) -> str:
    """A value beside an axis."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")


def number(value: float) -> str:
    """A value in a sentence or table: counts whole, the rest to four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def visible(text: str) -> str:
    """`text` in which letters that cannot be printed, or turn the direction of others, are spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _curve(one: Series, x: Axis, y: Axis) -> Markup:
    """A line, or dots where there are few points or one."""
    colour = one.index % COLOURS
    points = [(x.at(at), y.at(value)) for at, value in thinned(one.points)]
    if one.dots or len(points) == 1:
        circles = (Markup('<circle class="dot s{}" cx="{}" cy="{}" r="3"/>').format(colour, *point) for point in points)
        return Markup("").join(circles)
    path = "M" + "L".join(f"{left} {top}" for left, top in points)
    dashes = DASHES[one.index % len(DASHES)]
    return Markup('<path class="curve s{}" stroke-dasharray="{}" d="{}"/>').format(colour, dashes or "none", path)


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most about MOST_POINTS of `points`, none of the peaks lost."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // (MOST_POINTS // 2))
    kept = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _words(one: Series, unit: str) -> str:
    """A curve in words."""
    (first, begin), (last, end) = one.points[0], one.points[-1]
    if len(one.points) == 1:
        return f"{one.label}: {number(begin)}{unit} at update {first:.0f}"
    least, most = (choose(one.points, key=lambda point: point[1]) for choose in (min, max))
    return (
        f"{one.label}: {number(begin)}{unit} at update {first:.0f}, {number(end)}{unit} at update {last:.0f}; "
        f"least {number(least[1])}{unit} at {least[0]:.0f}, most {number(most[1])}{unit} at {most[0]:.0f}"
    )


def _axes(x: Axis, y: Axis, unit: str = "update") -> Markup:
    """Grid, numbers, and what runs along."""
    line = Markup('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>')
    text = Markup('<text x="{}" y="{}" dy=".35em" class="end">{}</text>')
    rows = [
        line.format(LEFT, WIDTH - RIGHT, y.at(value)) + text.format(LEFT - 5, y.at(value), label)
        for value, label in y.ticks()
    ]
    return Markup("").join(rows) + _ticks_below(x, HEIGHT - BOTTOM + 14, unit, HEIGHT)


def _ticks_below(x: Axis, top: int, unit: str, height: int) -> Markup:
    numbers = (
        Markup('<text x="{}" y="{}" class="mid">{}</text>').format(x.at(value), top, label)
        for value, label in x.ticks(6)
    )
    name = Markup('<text x="{}" y="{}" class="end">{}</text>').format(WIDTH - RIGHT, height - 5, unit)
    return Markup("").join(numbers) + name
