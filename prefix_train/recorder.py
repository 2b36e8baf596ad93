"""Writes every collective of this rank into its ring, whoever calls it: FSDP2, DeviceMesh, `dist.py`, a compiled graph.

All of them end in the operators `c10d::*` of torch's dispatcher, whatever the backend. A kernel under the dispatch key
BackendSelect, which every call passes on its way to the backend, notes the call and passes it on. The cost is some 60
microseconds a collective; nothing waits, nothing is synchronised.

What is known of the end: on the CPU a collective is over when its work says so, which is asked when something waits
for a collective and when the next one is called. So one that nobody has waited for may be over and still read `called`.
On a GPU the host does not learn of it: a record there says that the collective was issued and stays `called`; what has
run on the device is in NCCL's flight recorder. Works of a GPU are not kept, for they hold their tensors.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work

from configs import runfolder
from prefix_train import ring
from prefix_train.ring import Record, Ring


class Operator(NamedTuple):
    """How to read one operator of c10d: its kind, and where among its arguments are inputs and the group."""

    kind: str
    tensors: int
    group: int
    alone: bool = False
    """From one rank to another: not counted among the group's collectives, which all of its ranks issue."""


OPERATORS = {
    "allreduce_": Operator("all_reduce", 0, 1),
    "allreduce_coalesced_": Operator("all_reduce", 0, 1),
    "allgather_": Operator("all_gather", 1, 2),
    "allgather_coalesced_": Operator("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 1, 2),
    "_allgather_base_": Operator("all_gather", 1, 2),
    "reduce_scatter_": Operator("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 1, 2),
    "_reduce_scatter_base_": Operator("reduce_scatter", 1, 2),
    "broadcast_": Operator("broadcast", 0, 1),
    "reduce_": Operator("reduce", 0, 1),
    "gather_": Operator("gather", 1, 2),
    "scatter_": Operator("scatter", 1, 2),
    "alltoall_": Operator("all_to_all", 1, 2),
    "alltoall_base_": Operator("all_to_all", 1, 2),
    "barrier": Operator("barrier", 0, 1),
    "monitored_barrier_": Operator("barrier", 0, 1),
    "send": Operator("send", 0, 1, alone=True),
    "recv_": Operator("recv", 0, 1, alone=True),
    "recv_any_source_": Operator("recv", 0, 1, alone=True),
}

_WRAPPERS = ("/contextlib.py", "/functools.py", "/typing_extensions.py", "/warnings.py")

Standing = tuple[str, int, int]
"""Phase as the trainer names it, update, pack."""

_KEY = torch._C.DispatchKey.BackendSelect
_TORCH = str(Path(torch.__file__).parent)
_OWN = {__file__, str(Path(__file__).with_name("dist.py"))}
"""Files that only pass a collective on: their line says nothing of who wants it."""


class Recorder:
    """In its block every collective of this process is written down. `standing`: what the rank does now."""

    def __init__(self, run: Path, rank: int, standing: Callable[[], Standing]) -> None:
        attempt = runfolder.process_attempt()
        self.path = ring.path_of(run, rank, attempt)
        self._ring = Ring(self.path, rank, attempt)
        ring.remove_earlier(self.path)
        self._standing = standing
        self._count = 0
        self._numbers: dict[str, int] = defaultdict(int)
        self._pending: list[tuple[Work, Record]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Recorder:
        self._libraries: list[Any] = [_library("c10d"), _library("_c10d_functional")]
        for name, operator in OPERATORS.items():
            kernel = self._kernel(getattr(torch.ops.c10d, name).default, operator)
            self._libraries[0].impl(name, kernel, _KEY.name, with_keyset=True)
        self._libraries[1].impl("wait_tensor", self._wait_tensor, _KEY.name, with_keyset=True)
        self._wait = Work.wait
        Work.wait = self._watched(self._wait)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Work.wait = self._wait  # type: ignore[method-assign]
        for library in self._libraries:
            library._destroy()
        self.settle()
        self._pending.clear()
        self._ring.close(remove=kind is None)

    def settle(self, waited: Work | None = None, state: int = ring.DONE) -> None:
        """Write down which of the collectives under way are over; `waited` is, in `state`, whatever it says itself."""
        with self._lock:
            self._settle(waited, state)

    def _settle(self, waited: Work | None = None, state: int = ring.DONE) -> None:
        waiting = []
        for work, record in self._pending:
            if work is waited:
                self._end(record, state)
            elif work.is_completed():
                self._end(record, ring.DONE)
            elif record.place > self._count - ring.RECORDS:
                waiting.append((work, record))
        self._pending = waiting

    def _kernel(self, overload: Any, operator: Operator) -> Callable[..., Any]:
        """What runs in place of `overload`: notes the call, and passes it on."""

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = list(_tensors(args[operator.tensors]))
            record = self._begin(operator, tensors, ProcessGroup.unbox(args[operator.group]).group_name)
            try:
                found = overload.redispatch(keys.remove(_KEY), *args, **kwargs)
            except BaseException:
                with self._lock:
                    self._end(record, ring.RAISED)
                raise
            self._follow(record, found[-1] if isinstance(found, tuple) else found, tensors)
            return found

        return kernel

    def _begin(self, operator: Operator, tensors: list[Tensor], group: str) -> Record:
        where = caller(sys._getframe(2))
        phase, update, pack = self._standing()
        if operator.alone:
            group = f"{group} pairs"
        shapes = ",".join("x".join(map(str, tensor.shape)) for tensor in tensors) if tensors else "-"
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        now = time.monotonic()
        with self._lock:
            self._settle()
            number, place = self._numbers[group], self._count
            self._numbers[group], self._count = number + 1, place + 1
            record = Record(
                place, number, update, pack, now, 0.0, ring.CALLED, phase, group, operator.kind, dtype, shapes, where
            )
            self._ring.put(record)
        return record

    def _follow(self, record: Record, work: Any, tensors: list[Tensor]) -> None:
        if any(tensor.is_cuda for tensor in tensors):
            return
        with self._lock:
            if isinstance(work, torch.ScriptObject):
                self._pending.append((Work.unbox(work), record))
            else:
                self._end(record, ring.DONE)

    def _end(self, record: Record, state: int) -> None:
        if record.place > self._count - ring.RECORDS:
            self._ring.put(record._replace(state=state, ended=time.monotonic()))

    def _watched(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`Work.wait` that writes down what is over."""

        def waits(work: Work, *args: Any, **kwargs: Any) -> Any:
            try:
                found = wait(work, *args, **kwargs)
            except BaseException:
                self.settle(work, ring.RAISED)
                raise
            self.settle(work)
            return found

        return waits

    def _wait_tensor(self, keys: Any, tensor: Tensor) -> Any:
        found = torch.ops._c10d_functional.wait_tensor.default.redispatch(keys.remove(_KEY), tensor)
        self.settle()
        return found


def _library(name: str) -> Any:
    return torch.library.Library(name, "IMPL")  # type: ignore[no-untyped-call]


def caller(frame: FrameType | None) -> str:
    """`file:line` of the nearest frame outside torch.

    On a thread of autograd there is none: there it is where the main thread waits for the gradients.
    """
    found = _outside(frame)
    if found is None:
        found = _outside(sys._current_frames().get(threading.main_thread().ident or 0))
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found else ""


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, "<")) and name not in _OWN and not name.endswith(_WRAPPERS):
            return frame
        frame = frame.f_back
    return None


def _tensors(argument: Any) -> Iterator[Tensor]:
    """The tensors of an operator's argument: one, a list, or a list of lists."""
    if isinstance(argument, Tensor):
        yield argument
    else:
        for item in argument:
            yield from _tensors(item)
