"""Pinned host memory, made by many threads.

A pool of a hundred GiB is touched once before a device may copy to and from it, and the kernel hands out its pages one
after the other: on one thread that takes minutes. Here every thread touches and registers segments of its own, in huge
pages where the system has them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

MOST = 16
"""Threads that touch memory, at most."""


class Pinned:
    """`size` bytes of zeros, registered with the current CUDA device until this object goes. chunk: no copy crosses the
    border of two chunks. tensor: [size] uint8, to be used for as long as this object is there.

    Raises OSError or RuntimeError where so much is not to be had.
    """

    def __init__(self, size: int, chunk: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # advice: a kernel without huge pages does without
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        device, segment = torch.cuda.current_device(), max(1, (1 << 30) // chunk) * chunk
        registered: list[int] = []
        release = weakref.finalize(self, _unregister, registered, memory, device)
        release.atexit = False  # the process's end gives everything back at once

        def ready(start: int) -> None:
            address, length = self.tensor.data_ptr() + start, min(segment, size - start)
            ctypes.memset(address, 0, length)
            with torch.cuda.device(device):
                _check(_driver().cudaHostRegister(address, length, 0))
            registered.append(address)

        with ThreadPoolExecutor(threads()) as pool:
            list(pool.map(ready, range(0, size, segment)))


def threads() -> int:
    """This rank's share of the node's processors, MOST at the most."""
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _unregister(addresses: list[int], memory: mmap.mmap, device: int) -> None:
    """memory: stays mapped until here."""
    torch.cuda.synchronize(device)
    for address in addresses:
        _check(_driver().cudaHostUnregister(address))


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(status: Any) -> None:
    torch.cuda.check_error(int(status))
