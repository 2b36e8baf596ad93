"""What a long check says while it goes on."""

from __future__ import annotations

from prefix_train.stream import progress
from prefix_train.stream.progress import Progress


class Clock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rest_is_reckoned_by_what_is_done() -> None:
    clock, said = Clock(), list[str]()
    going = Progress({"fast": 10, "slow": 30}, said.append, clock)
    for _ in going.part([1, 2], "pack"):
        clock.now += 4.0
    assert said == ["1 of 2: fast, 2 packs"]
    items = going.part(list("abc"), "example")
    assert said[1:] == ["2 of 2: slow, 3 examples; about 0:00:24 left"]
    assert (len(items), items[1], list(items[1:])) == (3, "b", ["b", "c"])
    for _ in items:
        clock.now += progress.EVERY_S
    # 18 s for 20 of 40, then 28 s for 30 of them.
    assert said[2:] == [
        "2 of 2: slow, example 2 of 3; about 0:00:18 left",
        "2 of 2: slow, example 3 of 3; about 0:00:09 left",
    ]


def test_what_is_quick_says_little() -> None:
    clock, said = Clock(), list[str]()
    going = Progress({"one": 1}, said.append, clock)
    assert list(going.part(list(range(1000)), "pack")) == list(range(1000))
    assert said == ["1 of 1: one, 1000 packs"]
