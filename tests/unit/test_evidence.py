"""What is seen of a hang: readings, logs and dumps as text and bytes, and the files that hold them."""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from configs import runfolder
from prefix_train import heartbeat, ring
from prefix_train.ring import Record
from slurm import alarms, collect, evidence, flight, gpus, kernel_log, processes
from slurm.evidence import Alarm, BadEvidence, Collective, Gpu, Node, Rank, Seen
from slurm.gpus import NoReading, Reading
from slurm.stacks import Frame, Stack, Thread

CALL = Collective(3, "0", "all_gather", ((2, 3),), "float32", "/a/model.py:140", "called", "forward", 7, 2, 12.5, None)


def node(index: int = 1, ranks: tuple[int, ...] = (2, 3), host: str = "node b/ü") -> Node:
    thread = Thread("MainThread", True, False, (Frame("wait", "/a/b.py", 3, False),))
    stack = Stack(11, "S", "futex_wait", (), "py-spy", ("py-spy --native: no",), (thread,))
    seen = Seen(None, stack, processes.look(os.getpid()), ())
    known = tuple(Rank(rank, (seen, Seen(None, None, None, ())), (CALL,), None, ("no heartbeat",)) for rank in ranks)
    reading = (Gpu(0, 100.0, 0.0, 118.5, None),)
    return Node(host, index, 0, 1000.0, 10.0, 5.0, known, (reading, ()), (), (), ("Xid",), "job 1: RUNNING", ())


def test_evidence_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = (node(0, (0, 1), "a"), node(1), node(10, (20, 21), "c"))
    for one in reversed(written):
        evidence.write(tmp_path, one, tmp_path)
    assert evidence.read(tmp_path) == written
    assert evidence.answered(tmp_path) == {0, 1, 10}
    text = (tmp_path / "rank3.txt").read_text()
    assert text.startswith("== first sample, ")
    assert "wait (/a/b.py:3)" in text
    assert "== second sample, 5.0 s later: rank 3, no heartbeat, host node b/ü" in text
    assert text.endswith("not to be had: no heartbeat\n")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"host": 1}'])
def test_what_is_no_evidence_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / evidence.FOLDER / "0-a.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadEvidence, match=r"0-a\.json"):
        evidence.read(tmp_path)
    (tmp_path / evidence.ALARM).write_text(text)
    with pytest.raises(BadEvidence, match=r"alarm\.json"):
        evidence.read_alarm(tmp_path)


ALARM = Alarm(0, "a", 1, 40.0, 30.0, "update 7 has taken 40 s", 1000.0, node=1)


def test_one_alarm_at_a_time(tmp_path: Path) -> None:
    """Watchers that notice at the same moment raise one."""
    start, raised = threading.Barrier(8), list[Path | None]()

    def notice() -> None:
        start.wait()
        raised.append(alarms.raise_one(tmp_path, ALARM))

    threads = [threading.Thread(target=notice) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = tmp_path / "hangs" / "1"
    assert raised.count(folder) == 1
    assert raised.count(None) == 7
    assert evidence.read_alarm(folder) == ALARM
    runfolder.write_json(folder / "verdict.json", {"attempt": 0, "stuck": False, "culprits": [], "sentence": "no"})
    assert alarms.raise_one(tmp_path, ALARM) == tmp_path / "hangs" / "2"


def test_an_alarm_of_an_earlier_life_stops_no_new_one(tmp_path: Path) -> None:
    alarms.raise_one(tmp_path, ALARM)
    assert alarms.raise_one(tmp_path, dataclasses.replace(ALARM, attempt=1), inside=False) == tmp_path / "hangs" / "2"


def test_a_folder_that_nobody_filled_stops_none_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "hangs" / "1"
    folder.mkdir(parents=True)
    assert alarms.raise_one(tmp_path, ALARM) is None
    then = time.time() - alarms.BEING_RAISED_S - 1
    os.utime(folder, (then, then))
    assert alarms.raise_one(tmp_path, ALARM) == tmp_path / "hangs" / "2"


def test_who_judges() -> None:
    assert alarms.is_my_turn(ALARM, 1, complete=True, waited_s=0)
    assert not alarms.is_my_turn(ALARM, 1, complete=False, waited_s=10)
    assert alarms.is_my_turn(ALARM, 1, complete=False, waited_s=alarms.WAIT_S + 1)
    assert not alarms.is_my_turn(ALARM, 0, complete=True, waited_s=alarms.WAIT_S + 1)
    assert alarms.is_my_turn(ALARM, 0, complete=True, waited_s=alarms.WAIT_S + alarms.TURN_S + 1)
    assert not alarms.is_my_turn(ALARM, 2, complete=True, waited_s=alarms.WAIT_S + alarms.TURN_S + 1)
    asked = dataclasses.replace(ALARM, node=-1)
    assert asked.only_look
    assert alarms.is_my_turn(asked, 0, complete=True, waited_s=0)


def test_what_a_watchers_own_looking_takes_counts_as_waiting() -> None:
    assert alarms.waiting_since(ALARM, 100.0, 107.0) == 100.0
    slow = alarms.waiting_since(ALARM, 100.0, 140.0)
    assert not alarms.is_my_turn(ALARM, 1, complete=False, waited_s=141.0 - slow), "the others are as slow"
    assert alarms.is_my_turn(ALARM, 1, complete=False, waited_s=142.1 - slow)
    must = dataclasses.replace(ALARM, must_end=True)
    assert alarms.waiting_since(must, 100.0, 107.0) == 107.0


def test_last_words_of_ranks_that_nobody_watches_any_more(tmp_path: Path) -> None:
    for rank in range(3):
        heartbeat.Heartbeat(tmp_path, rank, 3).phase("forward", 4)
    heartbeat.ended(tmp_path, 2, 3, error=ValueError("planted"))
    (found,) = alarms._ended(tmp_path, 0, (node(0, (0, 1)),))
    (rank,) = found.ranks
    assert rank.end is not None
    assert (rank.rank, rank.end.message) == (2, "planted")
    assert rank.rounds[1].beat is not None


# GPUs

SMI = "0, GPU-aa, 100, 0, 118.41, 1980\n1, GPU-bb, 3, [N/A], [N/A], 345\n"


def test_readings_of_gpus() -> None:
    first, second = gpus.parse(SMI)
    assert first == Reading("GPU-aa", Gpu(0, 100.0, 0.0, 118.41, 1980.0))
    assert second == Reading("GPU-bb", Gpu(1, 3.0, None, None, 345.0))
    with pytest.raises(NoReading, match="printed 'Unable"):
        gpus.parse("Unable to determine the device handle\n")


@pytest.mark.parametrize(
    ("visible", "indices"), [(None, [0, 1]), ("1,0", [1, 0]), ("1", [1]), ("GPU-b", [1]), ("", []), ("7", [])]
)
def test_gpus_are_in_the_order_of_the_ranks(visible: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in gpus.of_ranks(gpus.parse(SMI), visible)] == indices


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sleep 60", r"did not answer in 0\.5 s: driver stuck"),
        ("echo No devices >&2; exit 6", "ended with status 6: No devices"),
        (None, "there is no nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, says: str
) -> None:
    if text is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        program(tmp_path, "nvidia-smi", text, monkeypatch)
    with pytest.raises(NoReading, match=says):
        gpus.read(0.5)


def test_what_is_usual_is_the_highest_of_rare_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    program(
        tmp_path, "nvidia-smi", f"echo x >> {count}; echo 0, GPU-aa, 99, 24, $(wc -l < {count})00, 1400", monkeypatch
    )
    found = gpus.Computing()
    for _ in range(3):
        found.take()
        assert found._thread is not None
        found._thread.join()
    assert count.read_text() == "x\n", "readings are rare"
    monkeypatch.setattr(gpus, "EVERY_S", 0.0)
    found.take()
    found._thread.join()
    program(tmp_path, "nvidia-smi", "echo 0, GPU-aa, 0, 0, 90, 1980", monkeypatch)
    found.take()
    found._thread.join()
    assert found.readings == (Reading("GPU-aa", Gpu(0, 99.0, 24.0, 200.0, 1400.0)),)


def test_readings_at_rest_are_preflights(tmp_path: Path) -> None:
    gpu = {"index": "0", "uuid": "GPU-aa", "utilization.gpu": "0", "power.draw": "119.2", "clocks.sm": "[N/A]"}
    findings = [{"check": "device.gpus", "facts": {"gpus": [gpu]}}, {"check": "host.name", "facts": {}}]
    runfolder.write_json(tmp_path / "preflight" / "0" / "a.json", {"node": "a", "findings": findings})
    assert gpus.at_rest(tmp_path, 0, "a") == (Reading("GPU-aa", Gpu(0, 0.0, None, 119.2, None)),)
    assert gpus.at_rest(tmp_path, 0, "b") == ()
    runfolder.write_json(tmp_path / "preflight" / "0" / "c.json", {"node": "c"})
    assert gpus.at_rest(tmp_path, 0, "c") == ()


# The kernel's log

DMESG = """[    1.000000] NVRM: loading
[  500.250000] NVRM: Xid (PCI:0000:3b:00): 79, pid=11, GPU has fallen off the bus.
[  500.260000] usb 1-1: new device
[  501.000000] Out of memory: Killed process 4242 (python) total-vm:1kB
[  502.000000] nfs: server store not responding, still trying
"""


def test_telling_lines_of_the_kernel_log() -> None:
    assert [line.split("] ")[1].split(":")[0] for line in kernel_log.of_dmesg(DMESG, 400.0)] == [
        "NVRM",
        "Out of memory",
        "nfs",
    ]
    assert len(kernel_log.of_dmesg(DMESG, 0.0)) == 4


def test_telling_lines_of_syslog() -> None:
    now = time.time()
    iso = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now - 5))
    old = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now - 500))
    plain = time.strftime("%b %e %H:%M:%S", time.localtime(now - 5))
    text = "\n".join(
        [
            f"{iso} node kernel: [5.0] NVRM: Xid 79",
            f"{old} node kernel: [1.0] NVRM: Xid 13",
            f"{plain} node kernel: [5.0] task python:12 blocked for more than 120 seconds",
            f"{iso} node sshd: I/O error",
            "??? node kernel: I/O error",
        ]
    )
    assert [line.rpartition("] ")[2] for line in kernel_log.of_syslog(text, 60, now)] == [
        "NVRM: Xid 79",
        "task python:12 blocked for more than 120 seconds",
    ]


@pytest.fixture
def zone(request: pytest.FixtureRequest) -> Iterator[None]:
    """This process is in another time zone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"


@pytest.mark.parametrize(
    ("now", "zone", "old", "recent"),
    [
        ("2027-01-01T00:00:03+00:00", "UTC", "Dec 30 23:59:58", "Dec 31 23:59:58"),
        ("2028-03-01T00:00:03+00:00", "UTC", "Feb 29 12:00:00", "Feb 29 23:59:58"),
        ("2027-03-01T00:00:03+00:00", "UTC", "Feb 29 23:59:58", "Feb 28 23:59:58"),
        ("2026-11-01T02:30:03+01:00", BERLIN, "Nov  1 01:30:00", "Nov  1 02:30:00"),
        ("2026-10-25T02:30:03+01:00", BERLIN, "Oct 25 01:30:00", "Oct 25 02:30:00"),
        ("2026-10-25T02:30:03+02:00", BERLIN, "Oct 25 01:30:00", "Oct 25 02:30:00"),
    ],
    ids=["another year", "leap day", "a day that was not", "plain", "second of two hours", "first of two hours"],
    indirect=["zone"],
)
@pytest.mark.usefixtures("zone")
def test_times_of_syslog_say_no_year_and_no_zone(now: str, old: str, recent: str) -> None:
    text = "".join(f"{when} node kernel: [5.0] NVRM: Xid {when}\n" for when in (old, recent))
    found = kernel_log.of_syslog(text, 60, datetime.fromisoformat(now).timestamp())
    assert [line[:15] for line in found] == [recent]


def test_a_kernel_log_that_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        tmp_path, "dmesg", "echo dmesg: read kernel buffer failed: Operation not permitted >&2; exit 1", monkeypatch
    )
    monkeypatch.setattr(kernel_log, "FILES", (tmp_path / "none",))
    with pytest.raises(kernel_log.Unreadable, match="Operation not permitted"):
        kernel_log.lines(60)


# NCCL's flight recorder


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """An entry as torch 2.11 writes it."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:_all_gather_base",
        "time_created_ns": 1_000_000_000_000 + number,
        "duration_ms": 0.5,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[8, 8]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_001_000_000_000,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        "frames": [
            {"name": "all_gather", "filename": "/x/site-packages/torch/distributed/c.py", "line": 9},
            {"name": "layer", "filename": "/a/model.py", "line": 140},
        ],
        **changes,
    }


DUMP = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": 2}},
    "entries": [
        entry(1, state="scheduled", time_discovered_completed_ns=None, profiling_name="nccl:all_reduce"),
        entry(0),
        entry(2, is_p2p=True),
    ],
}


def test_a_dump_as_collectives() -> None:
    done, waits = flight.collectives(flight.load(pickle.dumps(DUMP, 2)), clock_offset=900.0)
    assert done == Collective(
        0, "0", "all_gather", ((4, 8),), "bfloat16", "/a/model.py:140", "done", "", 0, -1, 100.0, 101.0
    )
    assert (waits.number, waits.kind, waits.state, waits.ended) == (1, "all_reduce", "called", None)


def test_the_ring_adds_what_the_device_does_not_know() -> None:
    device = flight.collectives(DUMP, clock_offset=900.0)
    host = [
        dataclasses.replace(CALL, number=0, started=99.0, state="called"),
        dataclasses.replace(CALL, number=1, kind="barrier"),
    ]
    first, second = flight.merge(device, host)
    assert (first.state, first.ended, first.phase, first.update, first.pack) == ("done", 101.0, "forward", 7, 2)
    assert (second.kind, second.phase) == ("all_reduce", ""), "another kind under the number is another collective"


class Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch planted",)


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps({"entries": [Planted()]}),
        pickle.dumps(Path("x")),
        b"\x80\x02cos\nsystem\n(S'touch planted'\ntR.",
        b"\x80\x02Pplanted\n.",
        b"",
        b".",
        b"garbage.",
        pickle.dumps(DUMP)[:-9] + b".",
    ],
)
def test_nothing_of_a_dump_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(flight.NoDump):
        flight.load(raw)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    "document", [None, [], {}, {"entries": 5}, {"entries": [{}]}, {"entries": [entry(0, process_group=())]}]
)
def test_a_dump_of_another_form(document: Any) -> None:
    with pytest.raises(flight.NoDump, match="unknown format"):
        flight.collectives(document, 0.0)


def answer_the_pipe(variables: dict[str, str], rank: int) -> threading.Thread:
    """What torch does: open the pipe beforehand, look once in a while, write the dump piece by piece."""
    pipe = f"{variables[flight.PIPE]}{rank}.pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def answer() -> None:
        while not (asked := _read(descriptor)):
            time.sleep(0.05)
        assert asked == b"1"
        raw = pickle.dumps(DUMP, 2)
        with Path(f"{variables[flight.DUMP]}{rank}").open("wb", buffering=0) as stream:
            stream.write(raw[:100])
            time.sleep(0.3)
            stream.write(raw[100:])
        os.close(descriptor)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 128)
    except BlockingIOError:
        return b""


def test_a_rank_is_asked_through_its_pipe(tmp_path: Path) -> None:
    variables = flight.environment(tmp_path / "nccl", 20001)
    assert (tmp_path / "nccl").stat().st_mode & 0o777 == 0o700
    thread = answer_the_pipe(variables, 3)
    assert len(flight.ask(3, variables, 0.0)) == 2
    thread.join()


def test_a_rank_that_gives_no_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "ANSWER_S", 0.3)
    variables = flight.environment(tmp_path / "nccl", 20001)
    with pytest.raises(flight.NoDump, match="not switched on"):
        flight.ask(0, {}, 0.0)
    with pytest.raises(flight.NoDump, match="No such file"):
        flight.ask(0, variables, 0.0)
    os.mkfifo(f"{variables[flight.PIPE]}0.pipe")
    with pytest.raises(flight.NoDump, match="No such device"):
        flight.ask(0, variables, 0.0)
    held = os.open(f"{variables[flight.PIPE]}0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(flight.NoDump, match=r"no answer in 0\.3 s"):
        flight.ask(0, variables, 0.0)
    os.close(held)


# What a node's collector makes of its pieces


def test_a_piece_that_hangs_or_fails_is_noted() -> None:
    notes = collect.Notes()
    assert notes.take(collect.Piece("slow", lambda: time.sleep(30)), time.monotonic() + 0.2) is None
    assert notes.take(collect.Piece("bad", lambda: 1 / 0), time.monotonic() + 5, rank=3) is None
    assert notes.take(collect.Piece("good", lambda: 7), time.monotonic() + 5) == 7
    assert notes.node == ["slow: no answer in 0 s"]
    assert notes.ranks == {3: ["bad: ZeroDivisionError: division by zero"]}


def test_records_of_a_ring_as_evidence() -> None:
    record = Record(
        9, 3, 7, 2, 12.5, 0.0, ring.CALLED, "forward", "0", "all_gather", "float32", "2x3", "/a/model.py:140"
    )
    assert collect.collective(record) == CALL
    done = collect.collective(record._replace(state=ring.DONE, ended=13.0))
    assert (done.state, done.ended) == ("done", 13.0)


def test_on_a_gpu_only_the_last_issued_counts_as_under_way() -> None:
    issued = ((0, "0", 1.0), (7, "1", 2.0), (1, "0", 3.0))
    calls = [dataclasses.replace(CALL, number=number, group=group, started=at) for number, group, at in issued]
    assert [one.state for one in collect._issued(calls)] == ["done", "done", "called"]
    assert collect._issued(()) == ()


def test_a_process_that_is_gone() -> None:
    assert processes.look(2**22 + 1).state == ""
    assert processes.children(2**22 + 1) == ()
    assert processes.environment(2**22 + 1) == {}


def test_this_process() -> None:
    before = processes.look(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    Path("/proc/self/status").read_bytes()
    after = processes.look(os.getpid())
    assert after.cpu_s > before.cpu_s
    assert after.read_bytes > before.read_bytes
    assert after.state == "R"
    assert after.rss_bytes > 1 << 20
    assert processes.environment(os.getpid())["PATH"] == os.environ["PATH"]
