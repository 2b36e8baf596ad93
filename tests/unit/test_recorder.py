"""prefix_train/ring.py and recorder.py: what a rank's last collectives leave behind, and that it costs little."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import Work

from prefix_train import ring
from prefix_train.recorder import Recorder
from prefix_train.ring import Record, Ring

ROOT = Path(__file__).parents[2]

RECORD = Record(0, 0, 7, 3, 10.0, 0.0, ring.CALLED, "forward", "0", "all_gather", "float32", "3x4,7", "/a/model.py:12")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of this test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def recorder(run: Path, phase: str = "forward") -> Recorder:
    return Recorder(run, 0, lambda: (phase, 7, 3))


def records(run: Path, rank: int = 0) -> tuple[Record, ...]:
    return ring.read(ring.path_of(run, rank, 0)).records


def put(path: Path, count: int) -> Ring:
    written = Ring(path, 2, 1)
    for index in range(count):
        written.put(RECORD._replace(place=index, number=index))
    return written


def test_a_ring_keeps_the_last_records(tmp_path: Path) -> None:
    put(tmp_path / "ring", 5)
    contents = ring.read(tmp_path / "ring")
    assert (contents.pid, contents.attempt, contents.torn) == (os.getpid(), 1, 0)
    assert contents.records == tuple(RECORD._replace(place=index, number=index) for index in range(5))
    put(tmp_path / "ring", ring.RECORDS + 3)
    assert [record.place for record in ring.read(tmp_path / "ring").records] == list(range(3, ring.RECORDS + 3))


def test_a_record_that_is_being_written_is_left_out_and_counted(tmp_path: Path) -> None:
    put(tmp_path / "ring", 3)
    raw = bytearray((tmp_path / "ring").read_bytes())
    raw[ring._HEAD_BYTES + ring._RECORD_BYTES + 40] ^= 1
    (tmp_path / "ring").write_bytes(raw)
    contents = ring.read(tmp_path / "ring")
    assert [record.place for record in contents.records] == [0, 2]
    assert contents.torn == 1


def test_long_texts_are_cut(tmp_path: Path) -> None:
    where = "/é" * 200 + "/model.py:12"
    put(tmp_path / "ring", 0).put(RECORD._replace(sizes=",".join(["10x20"] * 60), where=where, group="g" * 99))
    (record,) = ring.read(tmp_path / "ring").records
    assert record.where.endswith("é/model.py:12")
    assert record.group == "g" * 32
    assert set(ring.shapes(record.sizes)) == {(10, 20)}


def test_shapes() -> None:
    assert ring.shapes("3x4,7") == ((3, 4), (7,))
    assert ring.shapes("") == ((),)
    assert ring.shapes("-") == ()


@pytest.mark.parametrize("content", [b"", b"x" * 64, bytes(ring._HEAD_BYTES + ring.RECORDS * ring._RECORD_BYTES)])
def test_what_is_no_ring_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ring").write_bytes(content)
    with pytest.raises(ring.BadRing, match="ring"):
        ring.read(tmp_path / "ring")


def test_every_way_to_a_collective_is_seen(tmp_path: Path, alone: None) -> None:
    ones = torch.ones(2, 3)
    with recorder(tmp_path):
        line = sys._getframe().f_lineno + 1
        dist.all_reduce(ones)
        with torch.inference_mode():
            dist.broadcast(torch.ones(4, dtype=torch.bfloat16), 0)
        dist.all_gather_into_tensor(torch.empty(2, 3), ones)
        dist.reduce_scatter_tensor(torch.empty(2, 3), ones)
        dist.all_gather([torch.empty(2, 3)], ones)
        dist.barrier()
        functional.wait_tensor(functional.all_reduce(ones, "sum", dist.group.WORLD))
        dist.all_reduce(torch.tensor(1))
        seen = records(tmp_path)
    kinds = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_gather", "barrier"]
    assert [record.kind for record in seen] == [*kinds, "all_reduce", "all_reduce"]
    assert [record.number for record in seen] == list(range(8))
    assert {record.group for record in seen} == {dist.group.WORLD.group_name}
    assert {(record.phase, record.update, record.pack) for record in seen} == {("forward", 7, 3)}
    assert all(record.state == ring.DONE and record.ended >= record.started for record in seen)
    assert (seen[0].where, seen[0].sizes, seen[0].dtype) == (f"{__file__}:{line}", "2x3", "float32")
    assert (seen[1].sizes, seen[1].dtype, ring.shapes(seen[7].sizes)) == ("4", "bfloat16", ((),))


def test_nothing_is_left_after_the_block(tmp_path: Path, alone: None) -> None:
    wait = Work.wait
    with recorder(tmp_path):
        assert Work.wait is not wait
        dist.all_reduce(torch.ones(1))
        path = ring.path_of(tmp_path, 0, 0)
        assert path.exists()
    assert Work.wait is wait
    assert not path.exists(), "a rank that ended well needs no ring"
    dist.all_reduce(torch.ones(1))


def test_a_ring_stays_after_an_error_and_goes_in_a_later_life(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError), recorder(tmp_path):
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(4))
    assert len(records(tmp_path)) == 1
    monkeypatch.setenv("PREFIX_TRAIN_ATTEMPT", "1")
    with recorder(tmp_path):
        assert not ring.path_of(tmp_path, 0, 0).exists()


def test_a_collective_that_raises(tmp_path: Path, alone: None) -> None:
    with recorder(tmp_path):
        with pytest.raises(RuntimeError):
            dist.reduce_scatter_tensor(torch.empty(3), torch.ones(4))
        (record,) = records(tmp_path)
    assert record.state == ring.RAISED


def test_the_cost_of_a_collective(tmp_path: Path, alone: None) -> None:
    """Time of this thread, best of some rounds: a busy machine would else be measured."""

    def seconds() -> float:
        begin = time.thread_time()
        for _ in range(200):
            dist.all_reduce(ones)
        return (time.thread_time() - begin) / 200

    ones = torch.ones(4)
    bare = min(seconds() for _ in range(5))
    with recorder(tmp_path):
        recorded = min(seconds() for _ in range(5))
    assert recorded - bare < 200e-6, f"{(recorded - bare) * 1e6:.0f} us"
