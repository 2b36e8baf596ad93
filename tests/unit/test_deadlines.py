"""slurm/deadlines.py: when a rank counts as overdue."""

from __future__ import annotations

import dataclasses

import pytest

from configs.schema import WatchConfig
from prefix_train.heartbeat import PHASES, Beat
from slurm.deadlines import Pauses, age, deadline, is_warm, overdue, percentile_99

WATCH = WatchConfig(load_s=11, first_update_s=12, floor_s=3, factor=2, save_s=14, evaluate_s=15)

BEAT = Beat(
    rank=0,
    world=2,
    attempt=0,
    host="here",
    pid=1,
    phase="forward",
    part="forward",
    update=7,
    pack=0,
    time=1000.0,
    since=1000.0,
    clock=50.0,
    since_clock=50.0,
    update_clock=40.0,
    completed=6,
    durations=(1.0, 2.0, 5.0),
)


def beat(**changes: object) -> Beat:
    return dataclasses.replace(BEAT, **changes)


def test_percentile() -> None:
    assert percentile_99([1.0]) == 1.0
    assert percentile_99([float(n) for n in range(1, 101)]) == 99
    assert percentile_99([float(n) for n in range(100, 0, -1)]) == 99
    assert percentile_99([1.0] * 99 + [60.0]) == 1.0


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("load", 11), ("compile", 12), ("first_update", 12), ("save", 14), ("evaluate", 15), ("done", 11)],
)
def test_phases_have_their_own_deadlines(phase: str, seconds: float) -> None:
    assert deadline(beat(phase=phase, update_clock=None), WATCH, [1.0] * 9) == seconds


def test_every_phase_has_a_deadline() -> None:
    assert all(deadline(beat(phase=phase, update_clock=None), WATCH, []) > 0 for phase in PHASES)


@pytest.mark.parametrize(
    ("durations", "seconds"),
    [([], 12), ([1.0, 1.0], 12), ([1.0, 2.0, 5.0], 10), ([0.1] * 9, 3), ([1.0] * 200 + [50.0], 3)],
)
def test_updates_are_measured_against_the_runs_own(durations: list[float], seconds: float) -> None:
    assert deadline(BEAT, WATCH, durations) == seconds


def test_an_updates_time_runs_from_its_beginning_on_the_ranks_own_clock() -> None:
    assert age(BEAT, "here", clock=55.0, wall=9999.0) == 15
    assert age(beat(phase="save", update_clock=None), "here", clock=55.0, wall=9999.0) == 5
    assert age(beat(phase="first_update"), "here", clock=55.0, wall=9999.0) == 5
    assert age(BEAT, "elsewhere", clock=55.0, wall=1004.0) == 4


def test_the_longest_overdue_comes_first_and_all_ranks_durations_count() -> None:
    others = [beat(rank=1, update_clock=30.0, durations=(6.0,) * 3), beat(rank=2, update_clock=54.0)]
    late = overdue([BEAT, *others], WATCH, "here", clock=55.0, wall=0.0)
    assert [(item.beat.rank, item.age, item.limit) for item in late] == [(1, 25.0, 12.0), (0, 15.0, 12.0)]
    assert late[0].sentence == "update 7 has taken 25.0 s, its deadline was 12.0 s"


def test_waiting_for_data_counts_as_part_of_the_update() -> None:
    assert deadline(beat(phase="data", part="data"), WATCH, [1.0] * 9) == 3
    assert age(beat(phase="data"), "here", clock=55.0, wall=0.0) == 15


def test_time_in_which_the_watcher_was_not_let_run_does_not_count() -> None:
    pauses = Pauses(poll_s=1.0)
    for clock in (30.0, 31.0, 32.0):
        pauses.tick(clock)
        assert not pauses.now
    pauses.tick(52.0)
    assert pauses.now
    assert pauses.since(0.0) == pauses.since(33.0) == 19
    assert pauses.since(40.0) == 12
    assert pauses.since(52.0) == 0
    pauses.tick(53.0)
    assert not pauses.now
    assert [late.age for late in overdue([BEAT], WATCH, "here", 55.0, 0.0)] == [15]
    assert overdue([BEAT], WATCH, "here", 55.0, 0.0, pauses) == []
    assert [late.age for late in overdue([BEAT], WATCH, "here", 64.0, 0.0, pauses)] == [12]


def test_the_watchers_own_work_is_no_pause() -> None:
    pauses = Pauses(poll_s=1.0)
    pauses.tick(10.0)
    pauses.rest()
    pauses.tick(40.0)
    assert not pauses.now
    assert pauses.since(0.0) == 0


def test_what_is_usual_is_known_after_some_updates() -> None:
    assert is_warm(BEAT)
    assert not is_warm(beat(durations=(1.0, 2.0)))
    assert not is_warm(beat(phase="first_update"))
    assert not is_warm(beat(phase="save", update_clock=None))
