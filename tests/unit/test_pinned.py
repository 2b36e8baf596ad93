"""Pinned memory made by many threads: what is registered, and that it is given back. The device is a stand-in."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefix_train import pinned
from prefix_train.pinned import Pinned

CHUNK = 1 << 28
"""Four of them make a segment of 1 GiB; touched are pages of memory that nobody reads."""


class Driver:
    """Ranges that are registered. most: after so many the next is refused."""

    def __init__(self, most: int = 99) -> None:
        self.ranges: dict[int, int] = {}
        self.most, self.lock, self.threads = most, threading.Lock(), set[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        with self.lock:
            assert ctypes.string_at(address, 1) == b"\0"  # mapped
            self.threads.add(threading.get_ident())
            if len(self.ranges) == self.most:
                return 2
            self.ranges[address] = size
            return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert ctypes.string_at(address, 1) is not None  # still mapped
        del self.ranges[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"out of memory ({status})")

    class Device:
        def __init__(self, index: int) -> None:
            assert index == 3

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(ctypes, "memset", lambda address, value, size: None)
    for name, value in {
        "current_device": lambda: 3,
        "device": Device,
        "cudart": lambda: made,
        "check_error": check,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield made
    gc.collect()


def test_every_byte_is_registered_once_and_given_back(driver: Driver) -> None:
    size = 9 * CHUNK
    made: Any = Pinned(size, CHUNK)
    begin = made.tensor.data_ptr()
    assert sorted(driver.ranges.items()) == [(begin, 1 << 30), (begin + (1 << 30), 1 << 30), (begin + (2 << 30), CHUNK)]
    assert len(made.tensor) == size
    del made
    assert driver.ranges == {}


def test_no_copy_crosses_a_border(driver: Driver) -> None:
    chunk = 3 << 28  # no divisor of 1 GiB: a segment is one chunk
    made = Pinned(4 * chunk, chunk)
    borders = {address - made.tensor.data_ptr() for address in driver.ranges}
    assert all(border % chunk == 0 for border in borders)


def test_what_is_not_to_be_had_leaves_nothing_registered(driver: Driver) -> None:
    driver.most = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        Pinned(12 * CHUNK, CHUNK)
    gc.collect()
    assert driver.ranges == {}


def test_threads_are_a_rank_s_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned.os, "sched_getaffinity", lambda _: range(12))
    assert pinned.threads() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert pinned.threads() == 3
    monkeypatch.setattr(pinned.os, "sched_getaffinity", lambda _: range(2))
    assert pinned.threads() == 1
