"""A store's bytes against its hashes, read in threads while a run gets ready: no update is made of a damaged store."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from configs.wording import counted
from prefix_train.stream.manifest import BlockFile
from prefix_train.stream.store import Store

MOST_THREADS = 8
"""Threads that read and hash: a core hashes one to two gigabytes a second, and a disk gives less than eight do."""


class Check:
    """Begins to read every byte of `store`, block by block in the order of the forward pass."""

    def __init__(self, store: Store) -> None:
        self._store, self._began = store, time.monotonic()
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "store-check")
        self._blocks = [self._pool.submit(self._time, block) for block in store.blocks]

    def wait(self) -> str:
        """One line on what was read. UserError names the first block, by the forward pass, that is damaged."""
        asked = time.monotonic()
        took = max(block.result() for block in self._blocks) - self._began
        waited = time.monotonic() - asked
        nbytes = sum(block.nbytes for block in self._store.blocks)
        return (
            f"store: {counted(len(self._blocks), 'file')}, {nbytes / 1e9:.2f} GB, every byte as it was written; "
            f"read in {took:.1f} s, of which the run waited {waited:.1f} s"
        )

    def close(self) -> None:
        """Begin no further block."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _time(self, block: BlockFile) -> float:
        self._store.check_bytes(block)
        return time.monotonic()
