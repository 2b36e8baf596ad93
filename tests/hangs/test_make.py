"""Freezing evidence keeps whatever a rule reads of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm import frames, signs
from slurm.stacks import Frame, Stack, Thread
from tests.hangs import make
from tests.hangs.pieces import CODE, TORCH

SITE = TORCH.rpartition("/")[0]
TEMPLATE = f"std::function<{'void, ' * 30}int>"
NATIVE = [
    "sched_yield",
    "0x7f6309f7e048",
    "_PyObject_Call",
    "cublasGemmEx",
    "cuLaunchKernelEx",
    "cudaStreamSynchronize",
    "gloo::waitForEvent",
    "c10d::ProcessGroupNCCL::wait",
    f"{TEMPLATE}::c10d::Work",
    TEMPLATE,
    "torch::autograd::Engine::thread_main",
    "torch::autograd::ReadyQueue::pop",
]
PYTHON = [
    ("update", f"{CODE}/step.py"),
    ("wrapper", f"{CODE}/recorder.py"),
    ("sync", f"{CODE}/tensors.py"),
    ("walk", f"{CODE}/feed.py"),
    ("all_gather_into_tensor", f"{TORCH}/distributed/distributed_c10d.py"),
    ("destroy_process_group", f"{TORCH}/distributed/distributed_c10d.py"),
    ("_engine_run_backward", f"{TORCH}/autograd/graph.py"),
    ("_fn", f"{TORCH}/_dynamo/eval_frame.py"),
    ("run", f"{TORCH}/_inductor/async_compile.py"),
    ("run", f"{SITE}/triton/runtime/autotuner.py"),
    ("load", f"{SITE}/PIL/ImageFile.py"),
    ("wait", "/usr/lib/python3.11/threading.py"),
    (".".join(["outer.<locals>"] * 20), f"{CODE}/{'deep/' * 40}model.py"),
]

SHOWN = st.one_of(
    st.builds(lambda name: Frame(name, "/usr/lib/libany.so", 0, True), st.sampled_from(NATIVE)),
    st.builds(lambda name, line: Frame(*name, line, False), st.sampled_from(PYTHON), st.integers(1, 9)),
)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    many = st.lists(SHOWN, max_size=16).map(tuple)
    locked = draw(st.sampled_from([None, 0, 1, 2]))
    threads = [Thread(f"t{place}", place == 0, place == locked, draw(many)) for place in range(draw(st.integers(1, 3)))]
    return Stack(1, "S", "", ("do_wait",), "py-spy --native", (), tuple(threads))


def deep() -> Stack:
    """A launch that waits, ten frames of the driver deep, as on driver 580 from cuBLAS."""
    inside = [Frame(f"0x7f{number}", "/usr/lib/libcuda.so.580", 0, True) for number in range(10)]
    launch = Frame("cuLaunchKernelEx", "/usr/lib/libcuda.so.580", 0, True)
    return Stack(1, "R", "", (), "py-spy --native", (), (Thread("MainThread", True, False, (*inside, launch)),))


def read(stack: Stack) -> dict[str, Any]:
    """All that rules take from a stack."""
    files = (frames.AUTOTUNING, frames.COMPILING, signs.DATA_FILES, signs.SAVE_FILES)
    holder, found = frames.lock_in_c(stack), [frames.thread_in(stack, each) for each in files]
    one = (frames.waits_for_ranks, frames.waits_for_device, frames.launches, frames.tunes, frames.leaves,
           frames.blocking, frames.collective, frames.own_functions)  # fmt: skip
    return {each.__name__: each(stack) for each in one} | {
        "lock_in_c": holder and (holder.name, frames.own_frame(holder)),
        "thread_in": [thread and (thread.name, frames.own_frame(thread)) for thread in found],
        "main": stack.main and frames.own_frame(stack.main),
    }


@given(stacks())
@example(deep())
def test_a_frozen_stack_tells_the_same(stack: Stack) -> None:
    assert read(make.trim_stack(stack)) == read(stack)


def test_it_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight native frames of a thread and no more: the launch is not among them."""
    assert frames.launches(deep())
    monkeypatch.setattr(frames, "READ_NATIVE", frames.WAITING_NATIVE)
    assert read(make.trim_stack(deep())) != read(deep())


def test_what_nothing_reads_is_cut() -> None:
    idle = Thread("idle", False, False, (Frame("pthread_cond_wait", "/usr/lib/libc.so.6", 0, True),) * 3)
    main = Thread("MainThread", True, False, (Frame(TEMPLATE, "/usr/lib/libany.so", 0, True),) * 3)
    trimmed = make.trim_stack(Stack(1, "S", "", ("do_wait",), "py-spy --native", (), (main, idle)))
    assert [thread.name for thread in trimmed.threads] == ["MainThread"]
    assert trimmed.kernel == ()
    assert all(len(frame.name) == make.LETTERS for frame in trimmed.threads[0].frames)
