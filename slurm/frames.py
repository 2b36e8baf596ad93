"""What a stack says: where a process is, whether it waits for other ranks, who has the interpreter lock. Pure."""

from __future__ import annotations

import re
from itertools import takewhile

from slurm.stacks import Frame, Stack, Thread, python_frames

WAITING_FILES = "/torch/distributed/"
WAITING_NATIVE = re.compile(r"gloo::|c10d::|ProcessGroup")
DEVICE_NATIVE = re.compile(r"(cuda|cu)(Device|Stream|Event|Ctx)Synchronize|cudaMemcpy|cuMemcpy")
"""Where a thread waits for its GPU, and so for a collective that the GPU is in."""
LAUNCHES = re.compile(r"(cuda|cu)LaunchKernel")
"""Where a thread waits too, once the queue to its GPU is full: some thousand launches."""
BACKWARD, ENGINE = "_engine_run_backward", re.compile(r"torch::autograd::Engine::thread_main")
"""Where the main thread waits in a backward pass on a GPU, and what the threads are in that compute it."""
READ_NATIVE = re.compile("|".join(one.pattern for one in (WAITING_NATIVE, DEVICE_NATIVE, LAUNCHES, ENGINE)))
"""Names of native frames that mean something here."""
PASSES_ON = ("/prefix_train/recorder.py", "/prefix_train/dist.py")
"""Our own files between a caller and torch's collectives."""
LEAVING = "destroy_process_group"
AUTOTUNING = re.compile(
    r"/triton/runtime/autotuner\.py|/triton/testing\.py|/fla/ops/utils/cache\.py|/tilelang/(autotuner|profiler)/"
)
COMPILING = re.compile(
    r"/torch/_(inductor|dynamo|functorch)/(?!(eval_frame|external_utils)\.py)"
    r"|/triton/(compiler|backends)/|/triton/runtime/(jit|build)|/tilelang/|cutlass"
)
"""Every recomputed layer runs below `torch._dynamo.disable`, whose wrapper is in eval_frame.py."""
COMPILERS = re.compile(r"^(nvcc|ptxas|cicc|cc1(plus)?|g\+\+|gcc|c\+\+|clang.*|ld|as|ninja|hipcc)$")
"""Programs that a compiling rank starts."""


def waits_for_ranks(stack: Stack) -> bool:
    """Whether the main thread is in a collective: from its innermost frame outwards nothing but torch up to one."""
    if stack.main is None:
        return False
    for frame in stack.main.frames:
        if frame.native:
            if WAITING_NATIVE.search(frame.name):
                return True
        elif WAITING_FILES in frame.file:
            return True
        elif not (_of_torch(frame) or frame.file.endswith(PASSES_ON)):
            return False
    return False


def waits_for_device(stack: Stack) -> bool:
    """Whether a thread that computes waits in C for its GPU."""
    return any(_is_in(thread, DEVICE_NATIVE) for thread in _computing(stack))


def launches(stack: Stack) -> bool:
    """Whether a thread that computes launches a kernel."""
    return any(_is_in(thread, LAUNCHES) for thread in _computing(stack))


def tunes(stack: Stack) -> bool:
    """Whether the main thread searches for kernels."""
    return stack.main is not None and any(AUTOTUNING.search(frame.file) for frame in python_frames(stack.main))


def leaves(stack: Stack) -> bool:
    """Whether the main thread tears its process group down."""
    return stack.main is not None and any(bare(frame) == LEAVING for frame in python_frames(stack.main))


def lock_in_c(stack: Stack) -> Thread | None:
    """The thread that has the interpreter lock while it is in C."""
    holder = stack.lock_holder
    return holder if holder and holder.frames and holder.frames[0].native else None


def blocking(stack: Stack) -> Frame | None:
    """The innermost Python frame of the thread that matters: the one in C with the lock, else the main thread."""
    thread = lock_in_c(stack) or stack.main
    return next(iter(python_frames(thread)), None) if thread else None


def own_frame(thread: Thread | None) -> Frame | None:
    """The innermost frame of a thread outside installed packages and outside what only passes collectives on."""
    frames = python_frames(thread) if thread else ()
    own = [frame for frame in frames if not _installed(frame)]
    return next((frame for frame in own if not frame.file.endswith(PASSES_ON)), next(iter(own), None))


def thread_in(stack: Stack, files: re.Pattern[str]) -> Thread | None:
    """The first thread, the main one before others, that has a Python frame in one of `files`."""
    ordered = sorted(stack.threads, key=lambda thread: not thread.main)
    return next((one for one in ordered if any(files.search(frame.file) for frame in python_frames(one))), None)


def collective(stack: Stack) -> str | None:
    """Name of the collective that the main thread is in; None where it is in none."""
    if not waits_for_ranks(stack) or stack.main is None:
        return None
    inside = [frame.name for frame in python_frames(stack.main) if frame.file.endswith("/distributed_c10d.py")]
    named = [name for name in inside if not name.startswith("_") and name != "wrapper"]
    return next(iter([*reversed(named), *reversed(inside)]), None)


def functions(stack: Stack) -> tuple[tuple[str, str], ...]:
    """Python functions of the main thread by file and bare name, which is all that every method tells."""
    frames = python_frames(stack.main) if stack.main else ()
    return tuple((frame.file, bare(frame)) for frame in frames)


def own_functions(stack: Stack) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Python functions of the main thread, and of every thread beside it that is in our own code."""
    beside = [python_frames(thread) for thread in stack.threads if not thread.main and own_frame(thread)]
    found = [tuple((frame.file, bare(frame)) for frame in shown) for shown in beside]
    return functions(stack), *sorted(found)


def bare(frame: Frame) -> str:
    """A frame's function without the class or function that it is in."""
    return frame.name.rpartition(".")[2]


def place(frame: Frame) -> str:
    """`file:line` of a frame."""
    return f"{frame.file}:{frame.line}" if frame.line else frame.file


def _computing(stack: Stack) -> list[Thread]:
    """The main thread; in a backward pass those of autograd's engine too."""
    if stack.main is None:
        return []
    innermost = next(iter(python_frames(stack.main)), None)
    if innermost is None or bare(innermost) != BACKWARD:
        return [stack.main]
    return [stack.main, *(one for one in stack.threads if _enters(one, ENGINE))]


def _is_in(thread: Thread, calls: re.Pattern[str]) -> bool:
    """Whether a thread is in C, however deep, in one of `calls`."""
    return any(calls.search(frame.name) for frame in takewhile(lambda frame: frame.native, thread.frames))


def _enters(thread: Thread, calls: re.Pattern[str]) -> bool:
    """Whether one of `calls` is anywhere below what a thread is in."""
    return any(frame.native and calls.search(frame.name) for frame in thread.frames)


def _of_torch(frame: Frame) -> bool:
    return "/torch/" in frame.file or "/contextlib.py" in frame.file or "/threading.py" in frame.file


def _installed(frame: Frame) -> bool:
    return "/site-packages/" in frame.file or "/lib/python" in frame.file or frame.file.startswith("<")
