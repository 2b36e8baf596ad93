"""Evidence put together by hand: for unit tests of rules, and for what no run on a CPU can show."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_train.heartbeat import Beat, End
from slurm.evidence import Alarm, Collective, Gpu, Node, Process, Rank, Seen
from slurm.stacks import Frame, Stack, Thread

CODE = "/runs/demo/code/prefix_train"
TORCH = "/usr/lib/python3.11/site-packages/torch"
NOW = 1_790_000_000.0
CLOCK = 5000.0

IN_GATHER = (
    Frame("pthread_cond_wait", "libc.so.6", 0, True),
    Frame("all_gather_into_tensor", f"{TORCH}/distributed/distributed_c10d.py", 4142, False),
    Frame("wrapper", f"{TORCH}/distributed/c10d_logger.py", 83, False),
    Frame("update", f"{CODE}/step.py", 81, False),
    Frame("train", f"{CODE}/train.py", 120, False),
)
ON_DEVICE = (
    Frame("cudaDeviceSynchronize", "libcudart.so.13", 0, True),
    Frame("update", f"{CODE}/step.py", 92, False),
    Frame("train", f"{CODE}/train.py", 120, False),
)
ASLEEP = (
    Frame("clock_nanosleep", "libc.so.6", 0, True),
    Frame("fetch", f"{CODE}/anatomy.py", 88, False),
    Frame("train", f"{CODE}/train.py", 118, False),
)
IN_DATA = (
    Frame("wait", "/usr/lib/python3.11/threading.py", 327, False),
    Frame("result", "/usr/lib/python3.11/concurrent/futures/_base.py", 451, False),
    Frame("walk", f"{CODE}/feed.py", 84, False),
    Frame("train", f"{CODE}/train.py", 112, False),
)
IN_SAVE = (
    Frame("fsync", "libc.so.6", 0, True),
    Frame("sync", f"{CODE}/tensors.py", 90, False),
    Frame("_write", f"{CODE}/checkpoint.py", 276, False),
    Frame("save", f"{CODE}/checkpoint.py", 132, False),
    Frame("_save", f"{CODE}/train.py", 234, False),
)

IDLE = Gpu(0, 0.0, 0.0, 122.0, 1980.0)
COMPUTING = Gpu(0, 100.0, 23.0, 690.0, 1480.0)
SPINNING = Gpu(0, 100.0, 0.0, 131.0, 1980.0)
"""One H200, driver 580.159, NCCL 2.28.9: at rest with a context, in matrix products, waiting in a collective."""


def stack(
    frames: Sequence[Frame] = IN_GATHER, state: str = "S", beside: Sequence[Thread] = (), lock: bool = False
) -> Stack:
    """A stack whose main thread has `frames`, innermost first."""
    main = Thread("MainThread", True, lock, tuple(frames))
    return Stack(100, state, "futex_wait_queue", (), "py-spy --native", (), (main, *beside))


def beat(rank: int, world: int, host: str, phase: str = "forward", update: int = 7, pack: int = 0) -> Beat:
    """A heartbeat; six updates of a second lie behind it."""
    return Beat(
        rank, world, 0, host, 1000 + rank, phase, phase, update, pack, NOW - 20, NOW - 20, CLOCK - 20, CLOCK - 20,
        CLOCK - 20, update - 1, (1.0,) * max(0, update - 2),
    )  # fmt: skip


def process(
    state: str = "S", wchan: str = "futex_wait_queue", cpu_s: float = 10.0, files: Sequence[str] = ()
) -> Process:
    """A rank's process."""
    return Process(1000, "python", state, wchan, cpu_s, 0, 0, 1 << 30, tuple(files))


def call(number: int, kind: str = "all_gather", where: str = "step.py:77", **more: object) -> Collective:
    """A finished collective of update 7; `state="called"` and others as keywords."""
    began = CLOCK - 30 + number * 0.01
    known: dict[str, object] = {
        "number": number, "group": "0", "kind": kind, "sizes": ((1024,),), "dtype": "bfloat16",
        "where": f"{CODE}/{where}", "state": "done", "phase": "forward", "update": 7, "pack": 0, "started": began,
        "ended": began + 0.005, **more,
    }  # fmt: skip
    if known["state"] == "called":
        known["ended"] = None
    return Collective(**known)  # type: ignore[arg-type]


def ring(last: int, waits: bool = True, first: int = 0, **more: object) -> tuple[Collective, ...]:
    """Numbers `first` to `last`, the last one not finished where it `waits`."""
    calls = [call(number) for number in range(first, last)]
    return (*calls, call(last, **({"state": "called", **more} if waits else more)))


def rank(
    number: int,
    world: int = 4,
    host: str = "node1",
    frames: Sequence[Frame] = IN_GATHER,
    collectives: Sequence[Collective] = (),
    **more: object,
) -> Rank:
    """A rank that shows the same in both rounds; `stack`, `beat`, `process`, `end`, `missing`, `second` as keywords."""
    at = more.get("beat", beat(number, world, host))
    seen = Seen(at, more.get("stack", stack(frames)), more.get("process", process()), more.get("children", ()))  # type: ignore[arg-type]
    second = more.get("second", seen)
    return Rank(number, (seen, second), tuple(collectives), more.get("end"), more.get("missing", ()))  # type: ignore[arg-type]


def node(host: str, ranks: Sequence[Rank], index: int = 0, **more: object) -> Node:
    """A node's evidence; `gpus`, `idle`, `computing`, `kernel_log`, `missing` as keywords."""
    return Node(
        host, index, 0, NOW, CLOCK, 5.0, tuple(ranks), more.get("gpus", ((), ())), more.get("idle", ()),  # type: ignore[arg-type]
        more.get("computing", ()), more.get("kernel_log", ()), "", more.get("missing", ()),  # type: ignore[arg-type]
    )  # fmt: skip


def alarm(rank: int = 0, host: str = "node1", age: float = 31.0, limit: float = 30.0) -> Alarm:
    """Past the deadline."""
    return Alarm(0, host, rank, age, limit, f"update 7 has taken {age} s, its deadline was {limit} s", NOW, 0)


def end(number: int, world: int = 4, host: str = "node1", time: float = NOW, **more: object) -> End:
    """How a rank ended."""
    known: dict[str, object] = {
        "rank": number, "world": world, "attempt": 0, "host": host, "pid": 1000 + number, "time": time,
        "phase": "forward", "update": 7, "status": None, "signal": None, "exception": None, "message": None,
        "where": None, "frames": (), **more,
    }  # fmt: skip
    return End(**known)  # type: ignore[arg-type]
