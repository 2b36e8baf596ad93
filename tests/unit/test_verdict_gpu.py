"""slurm/verdict.py on evidence of GPUs, and on collectives of which less is known than on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from slurm import verdict
from slurm.evidence import Alarm, Collective, Gpu, Node, Rank
from slurm.stacks import Frame, Thread
from slurm.verdict import Verdict
from tests.hangs import pieces
from tests.hangs.pieces import ASLEEP, CODE, COMPUTING, IDLE, ON_DEVICE, SPINNING, TORCH, alarm, call, node, rank, ring

SITE = "/usr/lib/python3.11/site-packages"
THROTTLED = Gpu(0, 100.0, 22.0, 231.0, 705.0)
MEASURING = Gpu(0, 95.0, 12.0, 180.0, 1905.0)


def judge(ranks: Sequence[Rank], *rounds: Sequence[Gpu], why: Alarm | None = None) -> Verdict:
    """One node's ranks; one list of readings stands for both rounds, none for devices that tell nothing."""
    return verdict.judge([on_gpus(ranks, *rounds)], why or alarm(), len(ranks), ("node1",))


def on_gpus(ranks: Sequence[Rank], *rounds: Sequence[Gpu]) -> Node:
    if not rounds:
        return node("node1", ranks)
    count, shown = len(ranks), (tuple(rounds[0]), tuple(rounds[-1]))
    return node("node1", ranks, gpus=shown, idle=(IDLE,) * count, computing=(COMPUTING,) * count)


def issued(last: int, ended: int = 0, known: bool = False) -> tuple[Collective, ...]:
    """Scatters and one sum, as the host issues them. ended: so many are over. known: and when they ended is known."""
    calls = [call(number, "reduce_scatter", "step.py:81", state="called") for number in range(last)]
    calls.append(call(last, "all_reduce", "step.py:87", phase="reduce", pack=-1, state="called"))
    over = [replace(one, state="done", ended=one.started + 0.01 if known else None) for one in calls[:ended]]
    return (*over, *calls[ended:])


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        (issued(20), "all_reduce (step.py:87)"),
        (issued(20, ended=5, known=True), "reduce_scatter (step.py:81)"),
        (issued(20, ended=20, known=True), "all_reduce (step.py:87)"),
    ],
    ids=["nothing is known", "an earlier one has not ended", "all earlier ones have ended"],
)
def test_waiting_ranks_wait_in_their_last_call_unless_an_earlier_one_has_not_ended(
    calls: tuple[Collective, ...], place: str
) -> None:
    late = rank(2, frames=ASLEEP, collectives=issued(20)[:4])
    found = judge([late if number == 2 else rank(number, frames=ON_DEVICE, collectives=calls) for number in range(4)])
    assert f"3 ranks wait in {place}." in found.sentence


def test_a_call_of_another_group_that_nothing_says_is_over_is_not_what_they_wait_in() -> None:
    loading = call(0, "broadcast", "model.py:20", group="1", state="called", phase="load")
    calls = (loading, *issued(20, ended=20))
    late = rank(0, frames=ASLEEP, collectives=issued(20)[:4])
    found = judge([late, *(rank(number, frames=ON_DEVICE, collectives=calls) for number in (1, 2, 3))])
    assert "3 ranks wait in all_reduce (step.py:87)." in found.sentence


BENCHES = {
    "triton": (("do_bench", f"{SITE}/triton/testing.py"), ("run", f"{SITE}/triton/runtime/autotuner.py")),
    "fla": (("run", f"{SITE}/fla/ops/utils/cache.py"),),
    "tilelang": (("do_bench", f"{SITE}/tilelang/profiler/bench.py"), ("run", f"{SITE}/tilelang/autotuner/tuner.py")),
}


def tuner(number: int, library: str) -> Rank:
    """Measures a kernel and waits for its device."""
    inside = tuple(Frame(name, file, 150, False) for name, file in BENCHES[library])
    tuning = (ON_DEVICE[0], *inside, *ON_DEVICE[1:])
    return rank(number, frames=tuning, collectives=issued(3), process=pieces.process("R"))


@pytest.mark.parametrize("library", BENCHES)
@pytest.mark.parametrize("readings", [(), ([MEASURING] * 4,)], ids=["no readings", "readings"])
def test_all_ranks_that_measure_kernels_search_and_do_not_wait(library: str, readings: tuple[list[Gpu], ...]) -> None:
    found = judge([tuner(number, library) for number in range(4)], *readings, why=alarm(age=4000, limit=3600))
    assert (found.kind, found.ranks, found.ends) == ("autotuning", (), False)


def test_a_search_whose_device_spins_waits_for_the_rank_that_is_elsewhere() -> None:
    late = rank(1, frames=ASLEEP, collectives=issued(3)[:2])
    ranks = [late if number == 1 else tuner(number, "triton") for number in range(4)]
    found = judge(ranks, [IDLE if number == 1 else SPINNING for number in range(4)])
    assert (found.kind, found.ranks, found.ends) == ("missing_rank", (1,), True)


DRIVER = tuple(Frame(f"0x7f63{number}", "libcuda.so.580", 0, True) for number in range(14))
LAUNCHING = (*DRIVER, Frame("cuLaunchKernelEx", "libcuda.so.580", 0, True), *ON_DEVICE[1:])


def one_asleep(others: Callable[[int], Rank], reading: Gpu) -> Verdict:
    """Rank 1 of four sleeps before a collective that the others have issued; `reading`: of the others' devices."""
    late = rank(1, frames=ASLEEP, collectives=issued(3)[:2])
    ranks = [late if number == 1 else others(number) for number in range(4)]
    return judge(ranks, [IDLE if number == 1 else reading for number in range(4)])


@pytest.mark.parametrize(("reading", "kind"), [(SPINNING, "missing_rank"), (COMPUTING, "unknown")])
def test_a_rank_that_launches_waits_only_where_its_device_spins(reading: Gpu, kind: str) -> None:
    """The queue to a GPU that waits in a collective is full after a thousand launches; the driver waits deep in C."""
    found = one_asleep(lambda number: rank(number, frames=LAUNCHING, collectives=issued(3)), reading)
    assert (found.kind, found.ranks) == (kind, (1,) if kind == "missing_rank" else ())


ENGINE = (
    Frame("torch::autograd::Engine::thread_main", "libtorch_cpu.so", 0, True),
    Frame("torch::autograd::python::PythonEngine::thread_init", "libtorch_python.so", 0, True),
)
RESTS = (
    Frame("pthread_cond_wait", "libc.so.6", 0, True),
    Frame("torch::autograd::ReadyQueue::pop", "libtorch_cpu.so", 0, True),
    *ENGINE,
)
IN_BACKWARD = (
    Frame("pthread_cond_wait", "libc.so.6", 0, True),
    Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 865, False),
    Frame("backward", f"{TORCH}/_tensor.py", 647, False),
    *ON_DEVICE[1:],
)


def backward(number: int, inside: tuple[Frame, ...]) -> Rank:
    """A rank whose main thread waits for autograd's engine, one thread of which is in `inside`."""
    beside = [Thread("1867", False, False, RESTS), Thread("1868", False, False, (*inside, *ENGINE))]
    return rank(number, stack=pieces.stack(IN_BACKWARD, "R", beside), collectives=issued(3))


@pytest.mark.parametrize("inside", [LAUNCHING[:-2], ON_DEVICE[:1]], ids=["queue full", "synchronises"])
def test_in_a_backward_pass_autograds_threads_wait_for_the_device(inside: tuple[Frame, ...]) -> None:
    found = one_asleep(lambda number: backward(number, inside), SPINNING)
    assert (found.kind, found.ranks, found.ends) == ("missing_rank", (1,), True)
    assert "3 ranks wait in all_reduce (step.py:87)" in found.sentence


def test_it_is_the_engines_threads_that_count() -> None:
    found = one_asleep(lambda number: backward(number, RESTS[:2]), SPINNING)
    assert "ranks wait" not in found.sentence


def test_a_rank_without_end_in_a_recomputed_layer_does_not_compile() -> None:
    """Such a layer runs below `torch._dynamo.disable`."""
    without = Frame("DisableContext.__call__.<locals>._fn", f"{TORCH}/_dynamo/eval_frame.py", 1263, False)
    busy = tuple(pieces.process("R", cpu_s=seconds) for seconds in (10.0, 14.0))
    shown = pieces.stack((Frame("mix", f"{CODE}/deltanet.py", 61, False), without, *ASLEEP[1:]), "R")
    second = pieces.Seen(pieces.beat(1, 4, "node1"), shown, busy[1], ())
    lost = rank(1, stack=shown, process=busy[0], second=second, collectives=issued(3)[:2])
    waits = [rank(number, frames=ON_DEVICE, collectives=issued(3)) for number in (0, 2, 3)]
    found = judge([waits[0], lost, *waits[1:]])
    assert (found.kind, found.ranks, found.ends) == ("missing_rank", (1,), True)


PLAIN = [("all_gather", "step.py:77"), ("reduce_scatter", "step.py:81"), ("all_gather", "step.py:90"),
         ("all_reduce", "step.py:95")]  # fmt: skip
OWN = ("all_reduce", "plugin.py:91")


def after(*calls: tuple[str, str], state: str = "called") -> tuple[Collective, ...]:
    """Ten gathers, then `calls` in one and the same part of the update."""
    before = [call(number) for number in range(10)]
    return (*before, *(call(10 + place, kind, where, state=state) for place, (kind, where) in enumerate(calls)))


def differ(mine: tuple[Collective, ...], others: tuple[Collective, ...]) -> Verdict:
    return judge([rank(number, collectives=mine if number == 2 else others) for number in range(4)])


def test_another_kind_at_one_number_and_nothing_after_it_is_no_more_than_that() -> None:
    found = differ(after(OWN), after(("reduce_scatter", "step.py:81")))
    assert (found.kind, found.ranks, found.confidence) == ("kind_mismatch", (2,), "medium")
    assert found.sentence.startswith(
        "rank 2 on node1 called all_reduce (plugin.py:91) in forward of update 7 where the others called "
        "reduce_scatter (step.py:81); whether one more or this one instead cannot be told: nothing after it is shifted "
        "by one; 3 ranks wait in"
    )


def test_another_kind_and_then_the_same_calls_at_the_same_numbers_is_this_one_instead() -> None:
    found = differ(after(PLAIN[0], OWN, *PLAIN[2:]), after(*PLAIN))
    assert (found.kind, found.ranks) == ("kind_mismatch", (2,))


def test_another_kind_and_then_the_others_calls_one_number_later_is_one_more() -> None:
    found = differ(after(PLAIN[0], OWN, *PLAIN[1:]), after(*PLAIN))
    assert (found.kind, found.ranks, found.confidence) == ("extra_collective", (2,), "high")


def test_where_all_that_follows_is_alike_the_number_of_calls_tells() -> None:
    alike = [("reduce_scatter", "step.py:81")] * 4
    one_more = differ(after(OWN, *alike), after(*alike))
    assert (one_more.kind, one_more.ranks) == ("extra_collective", (2,))
    instead = differ(after(OWN, *alike[1:]), after(*alike))
    assert (instead.kind, instead.ranks) == ("kind_mismatch", (2,))


def test_a_barrier_takes_no_call_s_place() -> None:
    found = differ(after(("barrier", "plugin.py:58")), after(("reduce_scatter", "step.py:81")))
    assert (found.kind, found.ranks) == ("extra_collective", (2,))


def going_on(world: int = 4) -> list[Rank]:
    """No ring tells who is late; every rank's heartbeat goes on."""
    ranks = []
    for number in range(world):
        at = pieces.beat(number, world, "node1")
        second = pieces.Seen(replace(at, update=8), pieces.stack(ON_DEVICE), pieces.process(), ())
        ranks.append(rank(number, world, frames=ON_DEVICE, collectives=issued(20), second=second))
    return ranks


def readings(slow: Gpu, others: Gpu) -> list[Gpu]:
    return [slow if number == 2 else others for number in range(4)]


@pytest.mark.parametrize("others", [SPINNING, COMPUTING], ids=["both rounds", "one round"])
@pytest.mark.parametrize("age", [31.0, 4000.0])
def test_the_only_gpu_that_computes_and_below_its_clock_is_the_straggler(others: Gpu, age: float) -> None:
    found = judge(going_on(), readings(THROTTLED, SPINNING), readings(THROTTLED, others), why=alarm(age=age))
    assert (found.kind, found.ranks, found.ends) == ("straggler", (2,), False)
    assert "rank 2 on node1 is slow: its GPU computes while those of the others spin" in found.sentence
    assert "its GPU runs at 705 MHz against 1480 MHz before" in found.sentence


@pytest.mark.parametrize(
    ("slow", "others"),
    [
        (replace(THROTTLED, sm_clock_mhz=1400.0), SPINNING),
        (replace(THROTTLED, memory_utilisation=0.0), SPINNING),
        (THROTTLED, COMPUTING),
        (THROTTLED, IDLE),
        (THROTTLED, THROTTLED),
    ],
    ids=["its own clock", "does not compute", "others compute", "others rest", "all are slow"],
)
def test_no_straggler_by_its_device_where_it_is_not_slow_or_the_others_do_not_spin(slow: Gpu, others: Gpu) -> None:
    found = judge(going_on(), readings(slow, others))
    assert (found.kind, found.ranks) == ("slow_alive", ())


def test_spinning_is_said_of_the_ranks_whose_devices_spin() -> None:
    late = rank(1, frames=ASLEEP, collectives=ring(19, waits=False))
    ranks = [late if number == 1 else rank(number, frames=ON_DEVICE, collectives=ring(20)) for number in range(4)]
    all_spin = judge(ranks, [SPINNING, IDLE, SPINNING, SPINNING])
    assert "Spinning, not computing: all ranks that wait (100% utilisation" in all_spin.sentence
    some = judge(ranks, [SPINNING, SPINNING, IDLE, SPINNING])
    assert "Spinning, not computing: ranks 0 and 3 (100% utilisation" in some.sentence
    busy = judge(ranks, [THROTTLED, SPINNING, COMPUTING, IDLE])
    assert "Spinning" not in busy.sentence
    assert f"{CODE}/anatomy.py:88" == busy.where
