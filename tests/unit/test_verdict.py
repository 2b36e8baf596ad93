"""slurm/verdict.py and its rules on evidence that is put together by hand: who is named, and who never is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm import verdict
from slurm.evidence import Alarm, Node
from slurm.stacks import Frame, Thread
from slurm.verdict import Verdict
from tests.hangs import pieces
from tests.hangs.pieces import ASLEEP, CODE, IN_DATA, IN_SAVE, alarm, call, end, node, rank, ring


def judge(*nodes: Node, world: int = 4, hosts: tuple[str, ...] = (), why: Alarm | None = None) -> Verdict:
    return verdict.judge(nodes, why or alarm(), world, hosts or tuple(one.host for one in nodes))


def waiting(*numbers: int, last: int = 20, world: int = 4, host: str = "node1") -> list[pieces.Rank]:
    return [rank(number, world, host, collectives=ring(last)) for number in numbers]


def test_the_rank_that_is_not_in_the_collective_is_named_and_how_far_behind_it_is() -> None:
    late = rank(2, frames=ASLEEP, collectives=ring(19, waits=False))
    found = judge(node("node1", [*waiting(0, 1), late, *waiting(3)]))
    assert (found.kind, found.ranks, found.nodes, found.ends) == ("missing_rank", (2,), ("node1",), True)
    assert found.sentence == (
        "rank 2 on node1 is in fetch (anatomy.py:88) (forward of update 7, pack 0, 1 collective behind); "
        "3 ranks wait in all_gather (step.py:77). Confidence high: 4 of 4 ranks answered, two samples agree."
    )
    assert found.where == f"{CODE}/anatomy.py:88"
    assert found.confidence == "high"
    assert found.since == pytest.approx(pieces.NOW - 30 + 0.2)


def test_spinning_is_told_by_the_device_s_own_readings() -> None:
    late = rank(1, 2, frames=ASLEEP, collectives=ring(19, waits=False))
    gpus = ((pieces.SPINNING, pieces.IDLE), (pieces.SPINNING, pieces.IDLE))
    readings = {"gpus": gpus, "idle": (pieces.IDLE,) * 2, "computing": (pieces.COMPUTING,) * 2}
    found = judge(node("node1", [*waiting(0, world=2), late], **readings), world=2)
    expected = "Spinning, not computing: rank 0 (100% utilisation, 131 W against 690 W in update 6)."
    assert expected in found.sentence
    small = replace(pieces.COMPUTING, power_w=140.0)  # the same watts are work on another device
    found = judge(node("node1", [*waiting(0, world=2), late], **{**readings, "computing": (small,) * 2}), world=2)
    assert "Spinning" not in found.sentence


def test_nobody_is_named_where_those_that_gave_nothing_are_the_only_ones_left() -> None:
    found = judge(node("node1", waiting(0, 1, 2, 4, 5, 6, world=8)), world=8, hosts=("node1",))
    assert (found.kind, found.ranks, found.ends) == ("unknown", (), True)
    assert found.sentence.startswith("cannot tell: ranks 3 and 7 on node1 gave nothing; 6 ranks wait in all_gather")
    assert found.confidence == "low"
    assert "rank 3: no evidence from its node node1" in found.missing


def skipped(last: int, odd: bool) -> tuple[pieces.Collective, ...]:
    """Updates of three packs and a reduction; in update 7 the odd one has a pack less."""
    calls: list[tuple[str, str, str, int, int]] = []
    for update in (5, 6, 7):
        for pack in range(2 if odd and update == 7 else 3):
            calls.append(("all_gather", "step.py:77", "forward", update, pack))
            calls.append(("reduce_scatter", "step.py:81", "backward", update, pack))
        calls.append(("all_reduce", "step.py:87", "reduce", update, -1))
    return tuple(
        call(number, kind, where, phase=phase, update=update, pack=pack, state="called" if number == last else "done")
        for number, (kind, where, phase, update, pack) in enumerate(calls[: last + 1])
    )


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_r30_which_rank_left_the_loop_after_how_many_packs_and_where_the_others_wait(odd: int, world: int) -> None:
    if odd >= world:
        odd = 1
    ranks = [rank(number, world, collectives=skipped(18, number == odd)) for number in range(world)]
    found = judge(node("node1", ranks), world=world)
    assert (found.kind, found.ranks) == ("missing_rank", (odd,))
    assert found.sentence.startswith(
        f"rank {odd} on node1 left forward of update 7 after 2 packs and went on to all_reduce (step.py:87) in reduce "
        f"of update 7, while the others were at all_gather (step.py:77); {world - 1} rank"
    )
    assert "in all_gather (step.py:77)" in found.sentence


def test_r30_fails_without_fix() -> None:
    """By stacks alone every rank waits in a collective, and nobody can be named."""
    ranks = [replace(rank(number, collectives=skipped(18, number == 2)), collectives=()) for number in range(4)]
    assert judge(node("node1", ranks)).ranks == ()


def test_r31_one_rank_is_one_collective_behind_and_its_last_phase_is_told() -> None:
    late = rank(1, frames=ASLEEP, collectives=ring(18, waits=False), beat=pieces.beat(1, 4, "node1", "data", 8, -1))
    found = judge(node("node1", [*waiting(0, 2, 3, last=19), late]))
    assert found.ranks == (1,)
    assert "(data of update 8, 1 collective behind)" in found.sentence


def test_r31_fails_without_fix() -> None:
    late = rank(1, frames=ASLEEP)
    assert "behind" not in judge(node("node1", [*waiting(0, 2, 3), late])).sentence


def test_r33_its_own_traceback_is_the_cause_and_the_others_wait_for_it() -> None:
    lost = "Connection closed by peer [10.0.0.3]:4242"
    own = end(2, exception="ValueError", message="row 17: corrupt image", where=f"{CODE}/data.py:88", status=1)
    followed = end(0, exception="RuntimeError", message=lost, where=f"{CODE}/dist.py:53", status=1, time=own.time - 1)
    raised = rank(2, stack=None, process=None, collectives=ring(19, waits=False), end=own)
    torn = rank(0, stack=None, process=None, end=followed)
    found = judge(node("node1", [torn, *waiting(1), raised, *waiting(3)]))
    assert (found.kind, found.ranks) == ("rank_raised", (2,))
    assert found.sentence.startswith(
        "rank 2 on node1 raised ValueError in update 7 at data.py:88: row 17: corrupt image; 2 ranks wait in all_gather"
    )


def test_r33_fails_without_fix() -> None:
    """Without its own word the one that lost a connection, an innocent, would be all there is: nobody is named."""
    torn = rank(0, stack=None, end=end(0, exception="RuntimeError", message="Connection reset", status=1))
    found = judge(node("node1", [torn, *waiting(1, 3)]))
    assert 0 not in found.ranks
    assert found.kind != "rank_raised"


def test_what_another_rank_says_of_the_one_that_failed_is_not_its_own_failure() -> None:
    """The others may even have said so before the one that failed had come to an end."""
    said = "rank 0 could not write /runs/demo/checkpoints/update-000006"
    own = rank(0, 2, stack=None, end=end(0, 2, exception="OSError", message="no space left", status=1))
    echo = rank(
        1, 2, stack=None, end=end(1, 2, time=pieces.NOW - 1, exception="CheckpointError", message=said, status=1)
    )
    assert judge(node("node1", [own, echo]), world=2).ranks == (0,)
    silent = rank(0, 2, stack=None)
    assert judge(node("node1", [silent, echo]), world=2).ranks == (0,)
    nan = {"exception": "NotFinite", "message": "rank 1, pack 0: NaN", "status": 1}
    both = [rank(number, 2, stack=None, end=end(number, 2, **nan)) for number in (0, 1)]
    assert judge(node("node1", both), world=2).ranks == (1,)


def locked(rounds: int = 2) -> pieces.Rank:
    inside = (Frame("nanosleep", "libc.so.6", 0, True), Frame("flush", f"{CODE}/report.py", 71, False))
    thread = Thread("metrics", False, True, inside)
    waits = (Frame("take_gil", "python3.11", 0, True), Frame("update", f"{CODE}/step.py", 78, False))
    holds, free = pieces.stack(waits, beside=[thread]), pieces.stack(waits, beside=[replace(thread, holds_lock=False)])
    first = pieces.Seen(pieces.beat(1, 4, "node1"), holds if rounds == 2 else free, pieces.process(), ())
    return rank(1, stack=holds, collectives=ring(19, waits=False), second=replace(first, stack=holds))


def test_r34_the_thread_that_holds_the_lock_is_named_from_native_stacks() -> None:
    found = judge(node("node1", [*waiting(0), locked(), *waiting(2, 3)]))
    assert (found.kind, found.ranks) == ("gil_held", (1,))
    assert "its thread metrics holds the interpreter lock in nanosleep called in flush (report.py:71)" in found.sentence


def test_r34_fails_without_fix() -> None:
    """Stacks at Python's level show where the main thread was, not who keeps it from going on."""
    blind = pieces.stack((Frame("update", f"{CODE}/step.py", 78, False),))
    found = judge(node("node1", [*waiting(0, 2, 3), rank(1, stack=blind, collectives=ring(19, waits=False))]))
    assert found.kind != "gil_held"
    assert "metrics" not in found.sentence


def module(skips: bool, last: int = 40) -> tuple[pieces.Collective, ...]:
    calls = []
    for update in (5, 6, 7):
        calls += [("all_gather", "vision.py:210", update)] * (0 if skips else 4) + [
            ("all_gather", "text.py:50", update)
        ] * 9
    return tuple(call(number, kind, where, update=update) for number, (kind, where, update) in enumerate(calls[:last]))


def slow(number: int) -> pieces.Rank:
    """Text-only ranks 1 and 3 never call the vision tower; every update has stalled and gone on."""
    at = replace(pieces.beat(number, 4, "node1"), durations=(1800.0, 1810.0, 1795.0))
    return rank(number, collectives=module(number in (1, 3)), beat=at)


def spinning_node(ranks: list[pieces.Rank]) -> Node:
    readings = (pieces.SPINNING,) * 4
    return node("node1", ranks, gpus=(readings, readings), idle=(pieces.IDLE,) * 4, computing=(pieces.COMPUTING,) * 4)


def test_r32_slow_not_dead_which_ranks_skip_which_module_and_spinning_not_computing() -> None:
    found = judge(spinning_node([slow(number) for number in range(4)]), why=alarm(age=1700, limit=3600))
    assert (found.kind, found.ends, found.ranks) == ("slow_alive", False, (1, 3))
    assert found.sentence.startswith(
        "slow, not dead: ranks 1 and 3 on node1 skip vision.py:210, which ranks 0 and 2 call"
    )
    assert "Spinning, not computing: all ranks that wait (100% utilisation, 131 W against 690 W" in found.sentence


def test_r32_fails_without_fix() -> None:
    ranks = [replace(slow(number), collectives=()) for number in range(4)]
    assert "vision" not in judge(spinning_node(ranks), why=alarm(age=1700, limit=3600)).sentence


def tuner(busy: bool) -> pieces.Rank:
    search = Frame("run", "/x/site-packages/triton/runtime/autotuner.py", 217, False)
    tuning = (Frame("cuLaunchKernel", "libcuda.so", 0, True), search, *ASLEEP[1:])
    state = "R" if busy else "S"
    first = pieces.Seen(pieces.beat(1, 4, "node1"), pieces.stack(tuning, state), pieces.process(state), ())
    second = replace(first, process=pieces.process(state, cpu_s=14.0 if busy else 10.0))
    return rank(1, stack=first.stack, process=first.process, collectives=ring(19, waits=False), second=second)


def test_r40_autotuning_is_not_a_hang_and_is_left_alone() -> None:
    found = judge(node("node1", [*waiting(0, 2, 3), tuner(busy=True)]), why=alarm(age=4000, limit=3600))
    assert (found.kind, found.ends, found.ranks) == ("autotuning", False, ())
    assert found.sentence.startswith("not a hang: autotuning: rank 1 on node1 in fetch")


def test_r40_fails_without_fix() -> None:
    """Without the rule the tuning rank is the one that the others wait for."""
    from slurm import rules

    table = [rule for rule in rules.RULES if rule is not rules.tunes]
    case = (node("node1", [*waiting(0, 2, 3), tuner(busy=True)]),)
    assert verdict.judge(case, alarm(age=4000, limit=3600), 4, ("node1",), table).ends


def test_a_search_that_uses_no_processor_is_no_excuse() -> None:
    found = judge(node("node1", [*waiting(0, 2, 3), tuner(busy=False)]), why=alarm(age=4000, limit=3600))
    assert found.ends
    assert found.ranks == (1,)


def late_in(numbers: set[int]) -> list[pieces.Rank]:
    """Ranks whose last collectives took half a second where rank 2 came late, and no time else."""
    ranks = []
    for number in range(4):
        clock, calls = pieces.CLOCK - 20, []
        for place in range(24):
            took = 0.5 if place in numbers and number != 2 else 0.001
            clock += 0.55 if place in numbers else 0.01
            calls.append(call(place, started=clock - took, ended=clock))
        at = pieces.beat(number, 4, "node1")
        seen = pieces.Seen(replace(at, pack=1), pieces.stack(), pieces.process(), ())
        ranks.append(rank(number, beat=at, collectives=calls, second=seen))
    return ranks


def test_a_straggler_is_late_again_and_again() -> None:
    found = judge(node("node1", late_in({3, 8, 13, 18})))
    assert (found.kind, found.ranks, found.ends) == ("straggler", (2,), False)
    assert judge(node("node1", late_in({3, 8, 13, 18})), why=alarm(age=200)).ends


def test_a_rank_that_was_late_once_is_no_straggler() -> None:
    found = judge(node("node1", late_in({8})))
    assert (found.kind, found.ranks, found.ends) == ("slow_alive", (), False)


def test_r46_a_slow_checkpoint_within_its_deadline_is_nobody_s_fault() -> None:
    saving = rank(0, frames=IN_SAVE, collectives=ring(19, waits=False), beat=pieces.beat(0, 4, "node1", "save", 7, -1))
    others = [rank(number, collectives=ring(20, phase="save"), beat=pieces.beat(number, 4, "node1", "save", 7, -1))
              for number in (1, 2, 3)]  # fmt: skip
    found = judge(node("node1", [saving, *others]), why=alarm(age=300, limit=1800))
    assert (found.ends, found.ranks) == (False, ())
    assert "no rank is past its deadline; at this moment rank 0 on node1 does not get on with saving" in found.sentence
    late = judge(node("node1", [saving, *others]), why=alarm(age=1900, limit=1800))
    assert (late.kind, late.ranks, late.ends) == ("save_stalled", (0,), True)


def test_r46_fails_without_fix() -> None:
    from slurm import rules

    saving = rank(0, frames=IN_SAVE, beat=pieces.beat(0, 4, "node1", "save", 7, -1))
    others = [rank(number, beat=pieces.beat(number, 4, "node1", "save", 7, -1)) for number in (1, 2, 3)]
    table = [rule for rule in rules.RULES if rule is not rules.in_time]
    assert verdict.judge([node("node1", [saving, *others])], alarm(age=300, limit=1800), 4, ("node1",), table).ends


def test_sizes_that_differ_abort_a_rank_that_may_be_innocent() -> None:
    def last(size: int, number: int) -> tuple[pieces.Collective, ...]:
        return (*ring(19, waits=False), call(20, "all_reduce", "step.py:87", sizes=((size,),), state="called"))

    ended = end(0, 3, signal="SIGABRT")
    ranks = [rank(0, 3, stack=None, collectives=last(15, 0), end=ended), rank(1, 3, collectives=last(16, 1)),
             rank(2, 3, collectives=last(15, 2))]  # fmt: skip
    found = judge(node("node1", ranks), world=3)
    assert (found.kind, found.ranks) == ("size_mismatch", (1,))
    assert "with bfloat16 16 against bfloat16 15" in found.sentence
    pair = judge(node("node1", [ranks[0], replace(ranks[1], end=None)]), world=2)
    assert (pair.kind, pair.ranks) == ("size_mismatch", ())
    assert "which of them is wrong cannot be told" in pair.sentence


def test_memory_that_ran_out_is_told_by_the_kernel_or_by_the_parent() -> None:
    gone = rank(1, stack=None, process=None, end=end(1, signal="SIGKILL"))
    log = ("[123.4] Memory cgroup out of memory: Killed process 1001 (python) total-vm:9000kB",)
    found = judge(node("node1", [*waiting(0, 2, 3), gone], kernel_log=log))
    assert (found.kind, found.ranks) == ("oom_killed", (1,))
    other = (log[0].replace("1001", "77"),)
    found = judge(node("node1", [*waiting(0, 2, 3), gone], kernel_log=other))
    assert (found.kind, found.ranks) == ("rank_died", (1,))
    told = rank(1, stack=None, end=end(1, signal="SIGKILL", message="out of memory: counted in cgroup job_7"))
    assert judge(node("node1", [*waiting(0, 2, 3), told])).kind == "oom_killed"


def test_blocked_file_system_and_its_files() -> None:
    blocked = rank(
        3, frames=ASLEEP, process=pieces.process("D", "folio_wait_bit_common", files=("/data/a.jsonl (nfs4)",))
    )
    found = judge(node("node1", [*waiting(0, 1, 2), blocked]))
    assert (found.kind, found.ranks) == ("io_blocked", (3,))
    assert "waits in the kernel (folio_wait_bit_common) in fetch" in found.sentence
    assert "/data/a.jsonl (nfs4)" in found.sentence


def test_starved_of_data_and_where_the_batches_are_made() -> None:
    makes = (Frame("read", f"{CODE}/images.py", 40, False), Frame("_make", f"{CODE}/feed.py", 113, False))
    maker = Thread("batches_0", False, False, makes)
    starved = rank(2, stack=pieces.stack(IN_DATA, beside=[maker]), collectives=ring(19, waits=False))
    found = judge(node("node1", [*waiting(0, 1, 3), starved]))
    assert (found.kind, found.ranks) == ("data_starved", (2,))
    assert "waits for data in read (images.py:40)" in found.sentence


def test_all_in_one_collective_of_two_nodes_is_the_network_only_as_far_as_that_can_be_said() -> None:
    first, second = node("node1", waiting(0, 1)), node("node2", waiting(2, 3, host="node2"), 1)
    found = judge(first, second)
    assert (found.kind, found.ranks, found.confidence) == ("network", (), "low")
    link = replace(second, kernel_log=("NVRM: Xid (PCI:0000:17:00): 74, NVLink: fatal error",))
    found = judge(first, link)
    assert (found.kind, found.nodes, found.confidence) == ("network", ("node2",), "medium")
    alone = judge(node("node1", waiting(0, 1, 2, 3)))
    assert (alone.kind, alone.ranks) == ("unknown", ())


def test_written_and_read_again(tmp_path: Path) -> None:
    found = judge(node("node1", [*waiting(0, 1, 3), rank(2, frames=ASLEEP)]))
    verdict.write(tmp_path / "hangs" / "1", found, tmp_path)
    assert verdict.load(tmp_path / "hangs" / "1") == found
    assert verdict.latest(tmp_path, 0) == found.sentence
    assert verdict.culprits(tmp_path, 0) == (2,)
    text = (tmp_path / "hangs" / "1" / "verdict.txt").read_text().splitlines()
    assert text[0] == found.sentence
    assert text[1].startswith("next: ")
    assert any(line.startswith("rank 0 on node1: waits in all_gather") for line in text)
