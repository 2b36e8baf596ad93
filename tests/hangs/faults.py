"""Faults to plant into a rank of the real trainer, by name. Each is put in before training starts and strikes once.

`strike(fault, run)` is called in the process of a rank that shall have it. The product knows nothing of this file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prefix_train import checkpoint, feed, heldout, train
from prefix_train import dist as ranks_of
from prefix_train.dist import Ranks
from prefix_train.heartbeat import Heartbeat

UPDATE = 6
"""The update in which faults strike: by then a run has a pace of its own."""
LONG_S = 600.0


def strike(fault: str, run: Path) -> None:
    """Plant `fault` into this process, a rank of `run`."""
    FAULTS[fault](run)


def at(phase: str, action: Callable[[], None], update: int = UPDATE, pack: int | None = None) -> None:
    """Call `action` once, as the trainer enters `phase` of `update`."""
    original, done = Heartbeat.phase, []

    def entering(beat: Heartbeat, name: str, number: int | None = None, of_pack: int = -1, **more: Any) -> None:
        original(beat, name, number, more.get("pack", of_pack))
        _, now, at_pack = beat.standing
        if name == phase and now == update and (pack is None or at_pack == pack) and not done:
            done.append(True)
            action()

    Heartbeat.phase = entering  # type: ignore[method-assign, assignment]


def sleep() -> None:
    """Wait as in a lost lock."""
    time.sleep(LONG_S)


def spin() -> None:
    """Compute without end."""
    number = 0
    while True:
        number = (number * 31 + 7) % 1000003


def stop() -> None:
    """Be stopped from outside."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_for_a_moment() -> None:
    """Be stopped, and go on by itself."""
    if os.fork() == 0:
        time.sleep(4)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_lock() -> None:
    """Wait in C with the interpreter lock."""
    ctypes.PyDLL(None).sleep(int(LONG_S))


def hold_lock_elsewhere() -> None:
    """The same on a thread beside."""
    threading.Thread(target=hold_lock, name="metrics", daemon=True).start()
    time.sleep(LONG_S)


def wait_for_fifo(run: Path) -> None:
    """Read a file that never answers."""
    path = run / "never"
    if not path.exists():
        os.mkfifo(path)
    path.read_bytes()


def blocked_in_kernel(run: Path) -> None:
    """State D: the kernel holds the caller until a child, which opens a file that never answers, has started."""
    path = run / "never"
    if not path.exists():
        os.mkfifo(path)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, str(path), os.O_RDONLY, 0)])


def in_batches(action: Callable[[], None], update: int = UPDATE) -> Callable[[Path], None]:
    """`action` where a rank makes its batches, in the background: two for an update."""

    def plant(_: Path) -> None:
        original, made = feed.collate, []

        def collate(*args: Any) -> Any:
            made.append(True)
            if len(made) == 2 * update:
                action()
            return original(*args)

        feed.collate = collate  # type: ignore[assignment]

    return plant


def replace_update(change: Callable[[list[Any]], list[Any]]) -> Callable[[Path], None]:
    """This rank has other packs than the others in one update of several packs."""

    def plant(_: Path) -> None:
        original, done = train.update, []

        def update(stepper: Any, number: int, lr: float, batches: Any) -> Any:
            if number >= UPDATE and len(batches) > 1 and not done:
                done.append(True)
                batches = change(list(batches))
            return original(stepper, number, lr, batches)

        train.update = update  # type: ignore[assignment]

    return plant


def once(owner: Any, name: str, instead: Callable[..., Any], calls: int = 0) -> None:
    """In update UPDATE, `instead(original, *args)` in place of `owner.name`, once; after so many ordinary calls."""
    original, seen = getattr(owner, name), []
    struck: list[bool] = []
    at_last = [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if at_last[0] and not struck:
            seen.append(True)
            if len(seen) > calls:
                struck.append(True)
                return instead(original, *args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, as_if_in(wrapped, original))
    as_if_in(instead, original)
    at("forward", lambda: at_last.__setitem__(0, 1), pack=-1)


def skip_agreement(_: Path) -> None:
    """Does not ask the others whether they could read their examples: one collective behind."""
    once(Ranks, "any", lambda original, self, flag: flag, calls=0)


def skip_norms(_: Path) -> None:
    """Does not add up the gradients' norms."""
    once(Ranks, "sum", lambda original, self, values: values)


def extra_sum(_: Path) -> None:
    """Logs a sum of its own that no other rank asks for."""
    at("reduce", lambda: dist.all_reduce(torch.ones(3)))


def extra_barrier(_: Path) -> None:
    """Waits for the others before it writes a line of a log."""
    at("optimizer", log_with_barrier)


def log_with_barrier() -> None:
    dist.barrier()
    print("all are here", flush=True)


def extra_gather(_: Path) -> None:
    """Gathers in the middle of a forward pass."""
    at("backward", lambda: dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size())], torch.zeros(2)))


def other_size(_: Path) -> None:
    """Has one more gradient to add up."""

    def sums(original: Any, self: Ranks, values: torch.Tensor) -> torch.Tensor:
        original(self, torch.cat([values, values[:1]]))
        return values

    once(Ranks, "sum", sums)


def other_dtype(_: Path) -> None:
    """Adds in float32 what the others add in float64."""

    def sums(original: Any, self: Ranks, values: torch.Tensor) -> torch.Tensor:
        return original(self, values.float()).double()

    once(Ranks, "sum", sums)


def other_kind(_: Path) -> None:
    """Sends where the others add up."""

    def sums(original: Any, self: Ranks, values: torch.Tensor) -> torch.Tensor:
        dist.broadcast(values, 0)
        return values

    once(Ranks, "sum", sums)


def gather_instead(_: Path) -> None:
    """Gathers where the others look for the largest."""

    def largest(original: Any, self: Ranks, value: int) -> int:
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(parts, torch.tensor([value]))
        return value

    once(Ranks, "max", largest)


def as_if_in(function: Any, model: Any) -> Any:
    """`function` with its code said to stand where `model`'s does: the fault is a branch of the product's own code."""
    at_home = model.__code__
    function.__code__ = function.__code__.replace(
        co_filename=at_home.co_filename, co_firstlineno=at_home.co_firstlineno
    )
    return function


def evaluate_alone(_: Path) -> None:
    """Begins an evaluation that the others do not."""
    original = train.Life._report

    def report(life: train.Life, made: Any, result: Any, seconds: float) -> None:
        original(life, made, result, seconds)
        if made.after.number == UPDATE:
            life._evaluate(UPDATE)

    train.Life._report = report  # type: ignore[method-assign, assignment]


def save_alone(_: Path) -> None:
    """Begins a checkpoint that the others do not."""
    original = train.Life._report

    def report(life: train.Life, made: Any, result: Any, seconds: float) -> None:
        original(life, made, result, seconds)
        if made.after.number == UPDATE:
            life.cursor = made.after
            life._save(UPDATE)

    train.Life._report = report  # type: ignore[method-assign, assignment]


def leave_loop(_: Path) -> None:
    """Ends well, before the others do."""

    def gone() -> None:
        from prefix_train import heartbeat

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        heartbeat.ended(Path(os.environ["HANGS_RUN"]), rank, world, status=0)
        os._exit(0)

    at("forward", gone)


def raise_then_wait(_: Path) -> None:
    """An exception whose teardown waits for the others."""

    def destroy_process_group() -> None:
        time.sleep(LONG_S)

    ranks_of.torch_dist.destroy_process_group = destroy_process_group  # type: ignore[assignment]
    at("backward", raise_value_error)


def raise_value_error() -> None:
    raise ValueError("row 17: the image is 0 x 0")


def raise_runtime_error() -> None:
    raise RuntimeError("a device-side assertion failed")


def segfault() -> None:
    """Touch what is not mapped."""
    import faulthandler

    faulthandler.disable()
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_quietly() -> None:
    os._exit(7)


def in_save(action: Callable[[], None]) -> Callable[[Path], None]:
    """`action` while a checkpoint's tensors are written."""

    def plant(_: Path) -> None:
        original = checkpoint.write_tensors

        def write_tensors(path: Path, tensors: Any) -> None:
            action()
            original(path, tensors)

        checkpoint.write_tensors = write_tensors  # type: ignore[assignment]

    return plant


def in_evaluation(action: Callable[[], None]) -> Callable[[Path], None]:
    """`action` in the middle of an evaluation."""

    def plant(_: Path) -> None:
        original = heldout.evaluate.losses

        def losses(*args: Any) -> Any:
            action()
            return original(*args)

        heldout.evaluate.losses = losses  # type: ignore[assignment]

    return plant


def slow(seconds: float, phase: str = "backward") -> Callable[[Path], None]:
    """Every update takes so much longer on this rank."""

    def plant(_: Path) -> None:
        original = Heartbeat.phase

        def entering(beat: Heartbeat, name: str, number: int | None = None, pack: int = -1) -> None:
            original(beat, name, number, pack)
            if name == phase and pack >= 0:
                time.sleep(seconds)

        Heartbeat.phase = entering  # type: ignore[method-assign, assignment]

    return plant


def slow_once(seconds: float, phase: str, update: int = UPDATE) -> Callable[[Path], None]:
    """One long stay in one place."""
    return lambda run: at(phase, lambda: time.sleep(seconds), update)


def drip(seconds: float) -> Callable[[], None]:
    """Read slowly, a piece at a time."""

    def read_piece(path: Path, piece: int) -> bytes:
        time.sleep(0.2)
        return path.read_bytes()[:piece]

    def check_piece(found: bytes) -> None:
        time.sleep(0.2 + len(found) * 0)

    def reading() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            check_piece(read_piece(Path(__file__), 4096))

    return reading


TUNER = """
def benchmark(count):
    found = 0
    for number in range(count):
        found += number * number % 7
    return found


def run(seconds, clock):
    end = clock() + seconds
    config = 0
    while clock() < end:
        config += benchmark(20000)
    return config
"""


def search_kernels(seconds: float) -> Callable[[], None]:
    """Compute under a file of Triton's name, as its search of kernels does; Triton itself needs a GPU."""

    def searching() -> None:
        scope: dict[str, Any] = {}
        code = compile(TUNER, f"{sys.prefix}/lib/python3/site-packages/triton/runtime/autotuner.py", "exec")
        exec(code, scope)  # noqa: S102
        scope["run"](seconds, time.monotonic)

    return searching


def compile_really(count: int) -> Callable[[], None]:
    """torch.compile of one function after another."""

    def compiling() -> None:
        for number in range(count):
            torch._dynamo.reset()
            torch.compile(lambda x, n=number: (x.sin() * n + x.cos() ** (n % 5 + 2)).sum(0).relu().exp())(
                torch.ones(8 + number, 33)
            )

    return compiling


def in_phase(phase: str, action: Callable[[], None], update: int = UPDATE) -> Callable[[Path], None]:
    return lambda run: at(phase, action, update)


def with_run(phase: str, action: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda run: at(phase, lambda: action(run))


FAULTS: dict[str, Callable[[Path], None]] = {
    "sleep in forward": in_phase("forward", sleep),
    "sleep in backward": in_phase("backward", sleep),
    "sleep in reduce": in_phase("reduce", sleep),
    "sleep in optimizer": in_phase("optimizer", sleep),
    "sleep in evaluation": in_evaluation(sleep),
    "spin": in_phase("backward", spin),
    "stopped": in_phase("backward", stop),
    "stopped for a moment": in_phase("backward", stop_for_a_moment),
    "one pack less": replace_update(lambda batches: batches[:-1]),
    "one pack more": replace_update(lambda batches: [*batches, batches[-1]]),
    "skip agreement": skip_agreement,
    "skip norms": skip_norms,
    "leave": leave_loop,
    "extra sum": extra_sum,
    "extra barrier": extra_barrier,
    "extra gather": extra_gather,
    "evaluate alone": evaluate_alone,
    "save alone": save_alone,
    "other size": other_size,
    "other dtype": other_dtype,
    "other kind": other_kind,
    "gather instead": gather_instead,
    "killed": in_phase("backward", killed),
    "segfault": in_phase("forward", segfault),
    "abort": in_phase("reduce", abort),
    "exit 7": in_phase("forward", exit_quietly),
    "raise in data": in_batches(raise_value_error),
    "raise in backward": in_phase("backward", raise_runtime_error),
    "raise in save": in_save(raise_runtime_error),
    "raise and wait": raise_then_wait,
    "lock": in_phase("backward", hold_lock),
    "lock in a thread": in_phase("forward", hold_lock_elsewhere),
    "lock in save": in_save(hold_lock),
    "kernel in forward": with_run("forward", blocked_in_kernel),
    "kernel in reduce": with_run("reduce", blocked_in_kernel),
    "data sleeps": in_batches(sleep),
    "data from a dead file": lambda run: in_batches(lambda: wait_for_fifo(run))(run),
    "data drips": in_batches(drip(25)),
    "save sleeps": in_save(sleep),
    "save to a dead file": lambda run: in_save(lambda: wait_for_fifo(run))(run),
    "slow": slow(0.02),
    "slow forward": slow(1.5, "forward"),
    "long first update": slow_once(12, "forward", 1),
    "long update": slow_once(4, "backward"),
    "long save": in_save(lambda: time.sleep(8)),
    "long evaluation": in_evaluation(lambda: time.sleep(10)),
    "search": in_phase("forward", search_kernels(25), 1),
    "search late": in_phase("backward", search_kernels(25)),
    "compile": in_phase("forward", compile_really(40), 1),
    "compile late": in_phase("forward", compile_really(40)),
}
