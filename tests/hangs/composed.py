"""Cases that no run on a CPU can show, or where evidence is lost: put together, and labelled `composed`.

Readings of GPUs are those of one H200 with driver 580.159 and NCCL 2.28.9 at rest, computing and waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slurm.evidence import Alarm, Collective, Gpu, Node, Process, Rank, Seen
from slurm.stacks import Frame
from tests.hangs import pieces
from tests.hangs.cases import Label
from tests.hangs.pieces import (
    ASLEEP,
    CLOCK,
    CODE,
    COMPUTING,
    IDLE,
    ON_DEVICE,
    SPINNING,
    alarm,
    call,
    end,
    node,
    rank,
    ring,
)

Composed = tuple[Label, list[Node], Alarm]

NCCL_REMOTE = (
    "NCCL error in: ProcessGroupNCCL.cpp:2421, remote process exited or there was a network error, NCCL version 2.28.9"
    "\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
GLOO_CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:31337"
KILLED = "[91234.5] Memory cgroup out of memory: Killed process {pid} (python) total-vm:92817364kB, anon-rss:63912344kB"


def label(story: str, kind: str, ranks: Sequence[int], world: int, hosts: int = 1, **more: Any) -> Label:
    names = tuple(f"node{number + 1}" for number in range(hosts))
    return Label(story, kind, tuple(ranks), world, names, composed=True, **more)


def waiting(number: int, world: int, host: str = "node1", last: int = 40, **more: Any) -> Rank:
    """On a GPU the host waits for its device, and the flight recorder says for which collective."""
    return rank(number, world, host, ON_DEVICE, collectives=ring(last), **more)


def on_gpus(host: str, ranks: Sequence[Rank], readings: Sequence[Gpu], index: int = 0, **more: Any) -> Node:
    """A node with its GPUs' readings, and what is normal for them."""
    count = len(ranks)
    shown = tuple(readings)
    return node(host, ranks, index, gpus=(shown, shown), idle=(IDLE,) * count, computing=(COMPUTING,) * count, **more)


def spinning() -> Composed:
    late = rank(3, 8, frames=ASLEEP, collectives=ring(39, waits=False))
    ranks = [late if number == 3 else waiting(number, 8) for number in range(8)]
    readings = [IDLE if number == 3 else SPINNING for number in range(8)]
    return (
        label("one of eight GPUs is idle, seven spin", "missing_rank", [3], 8),
        [on_gpus("node1", ranks, readings)],
        alarm(),
    )


def fell_off_the_bus() -> Composed:
    late = rank(2, 4, "node2", ON_DEVICE, collectives=ring(39, waits=False))
    first = on_gpus("node1", [waiting(0, 4), waiting(1, 4)], [SPINNING] * 2)
    log = ("[8812.1] NVRM: Xid (PCI:0000:17:00): 79, pid=1002, name=python, GPU has fallen off the bus.",)
    second = on_gpus(
        "node2", [late, waiting(3, 4, "node2")], [Gpu(0, None, None, None, None), SPINNING], 1, kernel_log=log
    )
    return label("a kernel never ends: the GPU fell off the bus", "missing_rank", [2], 4, 2), [first, second], alarm()


def died_with_xid() -> Composed:
    log = ("[8812.1] NVRM: Xid (PCI:0000:65:00): 48, pid=1001, name=python, Double Bit ECC Error",)
    gone = rank(1, 4, stack=None, process=None, end=end(1, signal="SIGABRT"), collectives=ring(40))
    ranks = [gone if number == 1 else waiting(number, 4) for number in range(4)]
    return (
        label("aborts after an uncorrectable memory error", "rank_died", [1], 4),
        [node("node1", ranks, kernel_log=log)],
        alarm(),
    )


def everybody_waits(*log: str) -> list[Node]:
    first = on_gpus("node1", [waiting(0, 4), waiting(1, 4)], [SPINNING] * 2)
    return [
        first,
        on_gpus("node2", [waiting(number, 4, "node2") for number in (2, 3)], [SPINNING] * 2, 1, kernel_log=log),
    ]


def link_down() -> Composed:
    log = "[7712.9] mlx5_core 0000:9a:00.0 ib3: link down"
    return label("the second node's network port went down", "network", [], 4, 2), everybody_waits(log), alarm()


def nvlink() -> Composed:
    log = "[3312.4] NVRM: Xid (PCI:0000:17:00): 74, NVLink: fatal error detected on link 4"
    return label("NVLink failed on the second node", "network", [], 4, 2), everybody_waits(log), alarm()


def no_hint() -> Composed:
    return (
        label("all wait in one collective on two nodes", "network", [], 4, 2, also=("unknown",)),
        everybody_waits(),
        alarm(),
    )


def nccl_remote() -> Composed:
    def lost(number: int, host: str) -> Rank:
        more = {
            "exception": "torch.distributed.DistBackendError",
            "message": NCCL_REMOTE,
            "where": f"{CODE}/step.py:81",
        }
        how = end(number, 4, host, pieces.NOW + number, status=1, **more)
        return rank(number, 4, host, stack=None, process=None, end=how)

    nodes = [
        node("node1", [lost(0, "node1"), lost(1, "node1")]),
        node("node2", [lost(2, "node2"), lost(3, "node2")], 1),
    ]
    return label("every rank reports a remote error and no rank had failed", "network", [], 4, 2), nodes, alarm()


def gloo_closed() -> Composed:
    ranks = [rank(number, 2, stack=None, process=None, end=end(
        number, 2, exception="RuntimeError", message=GLOO_CLOSED, status=1, where=f"{CODE}/dist.py:53"))
        for number in range(2)]  # fmt: skip
    return label("both ranks lost their connection", "network", [], 2), [node("node1", ranks)], alarm()


def node_lost() -> Composed:
    ranks = [rank(number, 4, stack=None, process=None, end=end(
        number, 4, exception="RuntimeError", message=GLOO_CLOSED, status=1)) for number in (0, 1)]  # fmt: skip
    return label("a node fell silent with its watcher", "rank_died", [2, 3], 4, 2), [node("node1", ranks)], alarm()


def killed_for_memory(victim: int, told_by_parent: bool) -> Composed:
    message = "out of memory: the kernel ended it (1 in memory.events of job_12)" if told_by_parent else None
    gone = rank(victim, 4, stack=None, process=None, end=end(victim, signal="SIGKILL", message=message))
    ranks = [gone if number == victim else rank(number, 4, collectives=ring(40)) for number in range(4)]
    log = () if told_by_parent else (KILLED.format(pid=1000 + victim),)
    return (
        label("killed because memory ran out", "oom_killed", [victim], 4),
        [node("node1", ranks, kernel_log=log)],
        alarm(),
    )


def killed_another() -> Composed:
    gone = rank(1, 2, stack=None, process=None, end=end(1, 2, signal="SIGKILL"))
    log = (KILLED.format(pid=4711),)
    nodes = [node("node1", [rank(0, 2, collectives=ring(40)), gone], kernel_log=log)]
    return label("killed; memory ran out for somebody else", "rank_died", [1], 2), nodes, alarm()


def gone_without_a_word() -> Composed:
    gone = rank(
        2, 4, stack=replace(pieces.stack(()), state="", threads=()), process=pieces.process(""), collectives=ring(39)
    )
    ranks = [gone if number == 2 else rank(number, 4, collectives=ring(40)) for number in range(4)]
    return label("its process is gone and nobody wrote why", "rank_died", [2], 4), [node("node1", ranks)], alarm()


def module(skips: bool) -> tuple[Collective, ...]:
    calls = []
    for update in (5, 6, 7):
        calls += [("all_gather", "vision.py:210", update)] * (0 if skips else 4)
        calls += [("all_gather", "text.py:50", update)] * 9
    return tuple(call(number, kind, where, update=update) for number, (kind, where, update) in enumerate(calls[:39]))


def skips_tower(world: int, without: Sequence[int]) -> Composed:
    ranks = []
    for number in range(world):
        at = replace(pieces.beat(number, world, "node1"), durations=(1801.0, 1812.0, 1797.0))
        ranks.append(rank(number, world, frames=ON_DEVICE, collectives=module(number in without), beat=at))
    story = "text-only ranks never call the vision tower; every update stalls for half an hour and goes on"
    nodes = [on_gpus("node1", ranks, [SPINNING] * world)]
    return label(story, "slow_alive", without, world, stays=True), nodes, alarm(age=1750, limit=3624)


def throttled() -> Composed:
    def calls(slow: bool) -> tuple[Collective, ...]:
        took = 0.002 if slow else 0.4
        ends = [CLOCK - 10 + number * 0.5 for number in range(24)]
        return tuple(call(number, started=ended - took, ended=ended) for number, ended in enumerate(ends))

    ranks = [rank(number, 4, frames=ON_DEVICE, collectives=calls(number == 2)) for number in range(4)]
    readings = [Gpu(0, 100.0, 20.0, 240.0, 345.0) if number == 2 else SPINNING for number in range(4)]
    return (
        label("a GPU runs at a quarter of its clock", "straggler", [2], 4, stays=True),
        [on_gpus("node1", ranks, readings)],
        alarm(),
    )


def slow_device() -> Composed:
    """Between the rounds an update ended; of the collectives only the host's side is known, which nobody is late in."""
    calls = tuple(call(number, state="done", ended=None) for number in range(40))
    ranks = []
    for number in range(8):
        first = Seen(pieces.beat(number, 8, "node1"), pieces.stack(ON_DEVICE), pieces.process(), ())
        second = replace(first, beat=pieces.beat(number, 8, "node1", update=8))
        ranks.append(rank(number, 8, stack=first.stack, collectives=calls, second=second))
    readings = [Gpu(0, 100.0, 22.0, 231.0, 705.0) if number == 6 else SPINNING for number in range(8)]
    story = "seven of eight GPUs spin while one computes at half its clock"
    return label(story, "straggler", [6], 8, stays=True), [on_gpus("node1", ranks, readings)], alarm()


def silent(world: int, without: Sequence[int], hosts: int = 1) -> Composed:
    per_node, nodes = world // hosts, []
    for index in range(hosts):
        here = [number for number in range(index * per_node, (index + 1) * per_node) if number not in without]
        host = f"node{index + 1}"
        if here:
            nodes.append(node(host, [rank(one, world, host, collectives=ring(40)) for one in here], index))
    return (
        label("those that could be looked at wait; the others gave nothing", "unknown", [], world, hosts),
        nodes,
        alarm(),
    )


def blind(world: int, culprit: int) -> Composed:
    """Tracing refused, no ring on one rank: all that is known of it is that it runs."""
    nothing = replace(pieces.stack(()), threads=(), method="none", missing=("py-spy: EPERM: Operation not permitted",))
    ranks = [rank(number, world, collectives=ring(40)) if number != culprit else rank(number, world, stack=nothing)
             for number in range(world)]  # fmt: skip
    return label("one rank may not be traced and left no ring", "unknown", [], world), [node("node1", ranks)], alarm()


def traced_by_ring() -> Composed:
    """Tracing refused everywhere: the rings tell who is behind."""
    nothing = replace(pieces.stack(()), threads=(), method="none", missing=("py-spy: EPERM: Operation not permitted",))
    ranks = [
        rank(number, 4, stack=nothing, collectives=ring(39 if number == 1 else 40, number != 1)) for number in range(4)
    ]
    return (
        label("no rank may be traced; one is a collective behind", "missing_rank", [1], 4),
        [node("node1", ranks)],
        alarm(),
    )


def all_in_one_node() -> Composed:
    nodes = [node("node1", [rank(number, 2, collectives=ring(40)) for number in range(2)])]
    return label("all wait in one collective of one node", "unknown", [], 2), nodes, alarm()


def asked_to_end() -> Composed:
    ranks = [rank(number, 2, stack=None, process=None, end=end(number, 2, signal="SIGTERM")) for number in range(2)]
    return label("Slurm ended the job for a requeue", "unknown", [], 2, healthy=True), [node("node1", ranks)], replace(
        alarm(age=1.0), node=-1)  # fmt: skip


def saved_and_stopped() -> Composed:
    ranks = [rank(number, 2, stack=None, process=None, end=end(number, 2, status=3)) for number in range(2)]
    return label("asked to stop, saved and stopped", "unknown", [], 2, healthy=True), [node("node1", ranks)], replace(
        alarm(age=1.0), node=-1)  # fmt: skip


def tunes_on_a_gpu() -> Composed:
    tuning = (Frame("cudaEventSynchronize", "libcudart.so.13", 0, True),
              Frame("do_bench", "/usr/lib/python3/site-packages/triton/testing.py", 149, False),
              Frame("run", "/usr/lib/python3/site-packages/triton/runtime/autotuner.py", 217, False),
              *ASLEEP[1:])  # fmt: skip
    first = Seen(pieces.beat(0, 4, "node1"), pieces.stack(tuning, "R"), pieces.process("R"), ())
    tuner = rank(0, 4, stack=first.stack, process=first.process, collectives=ring(39, waits=False),
                 second=replace(first, process=pieces.process("R", cpu_s=14.9)))  # fmt: skip
    ranks = [tuner, *(waiting(number, 4) for number in (1, 2, 3))]
    nodes = [on_gpus("node1", ranks, [Gpu(0, 60.0, 10.0, 300.0, 1980.0), *[SPINNING] * 3])]
    return (
        label("kernels are searched on rank 0, past every deadline", "autotuning", [], 4, healthy=True),
        nodes,
        alarm(age=99),
    )


def slow_connection() -> Composed:
    """All ranks are in collectives whenever they are looked at; between the looks some were finished."""
    calls = (*ring(38, waits=False), call(39, started=CLOCK - 9, ended=CLOCK + 2.5), call(40, state="called"))
    calls = (*calls[:-1], replace(calls[-1], started=CLOCK + 2.6))
    ranks = [rank(number, 2, frames=ON_DEVICE, collectives=calls) for number in range(2)]
    story = "every collective takes ten seconds, past the deadline, and the run goes on"
    return label(story, "slow_alive", [], 2, healthy=True), [on_gpus("node1", ranks, [SPINNING] * 2)], alarm()


def compiles_in_children() -> Composed:
    """A rank waits for nvcc without moving; nvcc computes."""
    waits = (Frame("wait4", "libc.so.6", 0, True), Frame("_try_wait", "/usr/lib/python3.11/subprocess.py", 2011, False),
             *ASLEEP[1:])  # fmt: skip
    first = Seen(pieces.beat(1, 2, "node1"), pieces.stack(waits), pieces.process(), (compiler(3.0),))
    second = replace(first, children=(compiler(7.5),))
    late = rank(1, 2, stack=first.stack, children=first.children, collectives=ring(39, waits=False), second=second)
    nodes = [on_gpus("node1", [waiting(0, 2), late], [SPINNING, IDLE])]
    return label("waits for a compiler, past its deadline", "compiling", [], 2, healthy=True), nodes, alarm()


def compiler(cpu_s: float) -> Process:
    return replace(pieces.process("R", cpu_s=cpu_s), pid=2001, name="cicc")


CASES: dict[str, Callable[[], Composed]] = {
    "gpu-spinning": spinning,
    "gpu-fell-off": fell_off_the_bus,
    "gpu-ecc": died_with_xid,
    "network-link": link_down,
    "network-nvlink": nvlink,
    "network-no-hint": no_hint,
    "network-nccl": nccl_remote,
    "network-gloo": gloo_closed,
    "died-node": node_lost,
    "died-memory-of-another": killed_another,
    "died-gone": gone_without_a_word,
    "oom-kernel-log": lambda: killed_for_memory(2, False),
    "oom-counted": lambda: killed_for_memory(0, True),
    "slow-tower-of-four": lambda: skips_tower(4, (1, 3)),
    "slow-tower-of-eight": lambda: skips_tower(8, (0, 2, 5)),
    "straggler-clock": throttled,
    "straggler-device": slow_device,
    "unknown-three-and-seven": lambda: silent(8, (3, 7)),
    "unknown-node": lambda: silent(4, (2, 3), 2),
    "unknown-blind": lambda: blind(4, 2),
    "unknown-all-wait": all_in_one_node,
    "ring-alone": traced_by_ring,
    "ok-requeued": asked_to_end,
    "ok-stopped": saved_and_stopped,
    "ok-search-gpu": tunes_on_a_gpu,
    "ok-slow-connection": slow_connection,
    "ok-compile-children": compiles_in_children,
}
