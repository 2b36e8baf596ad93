"""What others than torch say of a streaming run: the driver of its device memory, the kernel of its page cache."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from types import TracebackType

import torch

from prefix_train.stream.store import Store

SMI, DEADLINE_S = "nvidia-smi", 20.0
"""A driver that is stuck does not answer."""

EVERY_S = 0.02
"""Between two samples of what is free."""


class NoReading(RuntimeError):
    """The driver's memory could not be read: why."""


class Driver:
    """The driver's reading of this process on a CUDA device. To be made before CUDA is used: what others hold by then
    is not this process's."""

    def __init__(self, device: torch.device) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._gpu = visible[device.index or 0] if visible != [""] else str(device.index or 0)
        self._others = self._of_device()

    def nbytes(self) -> tuple[int, str]:
        """Bytes of this process, and where that is read: of its entry in the driver's list of processes, or of the
        only entry (a container has process ids of its own), or all that the device lost since the beginning."""
        used = {int(pid): mib for pid, mib in _ask("compute-apps=pid,used_memory", self._gpu) if mib.isdecimal()}
        if os.getpid() in used:
            return int(used[os.getpid()]) << 20, "process"
        if len(used) == 1 and self._others < 1 << 30:
            return int(next(iter(used.values()))) << 20, "only process"
        return self._of_device() - self._others, "device"

    def _of_device(self) -> int:
        found = _ask("gpu=memory.used", self._gpu)
        if len(found) != 1 or not found[0][0].isdecimal():
            raise NoReading(f"{SMI} told no memory of GPU {self._gpu}: {found}")
        return int(found[0][0]) << 20


def of_process(device: torch.device) -> int:
    """Bytes of this process by the driver's own list of processes, of the only one where ids are a container's.

    Raises NoReading where there is no such list, or it has several others.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpu = visible[device.index or 0] if visible != [""] else str(device.index or 0)
    used = {int(pid): mib for pid, mib in _ask("compute-apps=pid,used_memory", gpu) if mib.isdecimal()}
    mine = used.get(os.getpid(), next(iter(used.values())) if len(used) == 1 else None)
    if mine is None:
        raise NoReading(f"{SMI} lists {len(used)} processes on GPU {gpu}, and not this one")
    return int(mine) << 20


class Peak:
    """Samples, while entered, how much of the device is not free. nbytes: the most, of all processes together."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.nbytes = device, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="device-memory", daemon=True)

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(EVERY_S):
            free, total = torch.cuda.mem_get_info(self.device)
            self.nbytes = max(self.nbytes, total - free)


def _ask(query: str, gpu: str) -> list[list[str]]:
    """Lines of nvidia-smi's answer for one GPU, split into cells. Raises NoReading."""
    program = [SMI, f"--id={gpu}", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoReading(f"{' '.join(program)}: {error}") from error
    return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def cached(store: Store) -> float:
    """Share of the blocks' pages that are in memory (Linux, mincore)."""
    page, libc = os.sysconf("SC_PAGESIZE"), ctypes.CDLL(None, use_errno=True)
    there = pages = 0
    for block in store.layers:
        mapped = store.bytes(block)
        found = (ctypes.c_ubyte * (-(-block.nbytes // page)))()
        if libc.mincore(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(block.nbytes), found):
            raise OSError(ctypes.get_errno(), f"mincore of {store.path(block)}")
        there += len(found) - bytes(value & 1 for value in found).count(0)
        pages += len(found)
    return there / pages


def drop(store: Store) -> None:
    """Ask the kernel to forget the pages of the blocks; those of a store in memory stay."""
    for block in store.layers:
        with store.path(block).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
