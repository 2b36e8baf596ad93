"""Charts of a run's page: values where they belong, no peak lost, colours that can be told apart."""

from __future__ import annotations

import re
from pathlib import Path

from prefix_train.results import charts
from tests import run_folders as made
from tests.run_page import shown


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_stand_out_light_and_dark(tmp_path: Path) -> None:
    found, _ = shown(made.begun(tmp_path / "new"))
    schemes = re.findall(r":root\{([^}]+)\}", found.css)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w]+):(#[0-9a-f]{6})", scheme))
        assert len(colours) == 13
        for name, colour in colours.items():
            darker, lighter = sorted((luminance(colour), luminance(colours["ground"])))
            ratio = (lighter + 0.05) / (darker + 0.05)
            assert ratio >= {"ground": 1.0, "rule": 1.2}.get(name, 4.5), (name, colour, ratio)


def test_curves_are_where_their_values_are() -> None:
    axis = charts.Axis(0.0, 10.0, 200.0, 10.0)
    assert axis.at(2.5) == "152.5"
    log = charts.Axis.over([1.0, 100.0], 0.0, 1.0, log=True)
    assert log.log
    assert [label for _, label in log.ticks()] == ["1", "2", "5", "10", "20", "50", "100"]
    assert not charts.Axis.over([0.0, 100.0], 0.0, 1.0, log=True).log
    flat = charts.Axis.over([7.0, 7.0], 0.0, 1.0)
    assert flat.low < 7.0 < flat.high
    assert len({label for _, label in charts.Axis.over([1.00001, 1.00002], 0.0, 1.0).ticks()}) > 2
    for values in ([-5.0, -1.0], [0.0], [1e-12, 2e-12], [-1e99, 1e99], [1e99]):
        assert charts.Axis.over(values, 0.0, 1.0).ticks()


def test_a_long_curve_keeps_its_peaks() -> None:
    points = [(float(at), 1.0) for at in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[77_777] = (77_777.0, -9.0)
    kept = charts.thinned(points)
    assert len(kept) <= charts.MOST_POINTS
    assert {points[54_321], points[77_777]} <= set(kept)
    assert [at for at, _ in kept] == sorted(at for at, _ in kept)


def test_a_limit_is_held_against_memory() -> None:
    series = [charts.Series("a", 0, [(1.0, 2.0), (2.0, 3.0)])]
    chart = charts.lines("m", "Memory", series, [charts.Level("a, planned", 0, 6.0)], " GiB")
    assert chart is not None
    assert chart.words[-1] == "a, planned: 6 GiB"
    (height,) = re.findall(r'class="level s0"[^>]* y1="([\d.]+)"', chart.svg)
    assert float(height) < min(float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", chart.svg))
