"""One rank's collective test: a program that says before and after each stage how far it came.

Nothing is caught except where a pair of nodes fails: the supervisor (`preflight collectives`) reads how far the program
came, and `pairs.judge_ranks` compares the ranks.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from configs import runfolder
from preflight.pairs import rounds
from preflight.programs import answer_and_end

MIB, GIB = 1 << 20, 1 << 30
ELEMENTS, SHARE = 4096, 64
"""Elements of each rank's part in the tests of values, and of what reduce-scatter leaves to each."""
REPEATS, MOMENT_S = 3, 1.0
POLL_S = 0.05


@dataclass(frozen=True)
class Place:
    """A rank among the others. seconds: what the whole test may take. folder: where rank 0 says where it listens."""

    rank: int
    world: int
    local_rank: int
    node: str
    seconds: float
    folder: Path

    @property
    def step(self) -> timedelta:
        """What one stage may take."""
        return timedelta(seconds=max(1.0, self.seconds / 6))


def say(**line: Any) -> None:
    """One line of the program's answer."""
    print(json.dumps(line), flush=True)


@contextmanager
def stage(name: str) -> Iterator[dict[str, Any]]:
    """Say that a stage begins, and what it found."""
    say(begin=name)
    found: dict[str, Any] = {}
    yield found
    say(stage=name, **found)


def meet(place: Place) -> Store:
    """Connect to rank 0's store: at MASTER_ADDR and MASTER_PORT, or where rank 0 says in `place.folder`."""
    address = place.folder / "store.json"
    wait = timedelta(seconds=place.seconds / 3)
    fixed = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    host, port = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) if fixed else (socket.gethostname(), 0)
    if place.rank == 0:
        store = TCPStore(host, port, None, True, wait, wait_for_workers=False)
        if not fixed:
            runfolder.write_json(address, {"host": host, "port": store.port})
        return store
    end = time.monotonic() + wait.total_seconds()
    while not fixed and not address.exists():
        if time.monotonic() > end:
            raise TimeoutError("rank 0 did not say where it listens")
        time.sleep(POLL_S)
    if not fixed:
        said = runfolder.read_json(address)
        host, port = said["host"], int(said["port"])
    return TCPStore(host, port, None, False, wait, wait_for_workers=False)


def join(place: Place, store: Store) -> list[int]:
    """Wait for all ranks; returns those that did not come in time."""
    store.set(f"here/{place.rank}", place.node)
    keys = [f"here/{rank}" for rank in range(place.world)]
    end = time.monotonic() + place.seconds / 3
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(POLL_S)
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


def leave(place: Place, store: Store, ranks: list[int]) -> None:
    """Rank 0 keeps its store until the others have left: those in the pairs' rounds still need it."""
    store.set(f"left/{place.rank}", "1")
    end = time.monotonic() + place.seconds / 2
    while place.rank == 0 and not store.check([f"left/{rank}" for rank in ranks]) and time.monotonic() < end:
        time.sleep(POLL_S)


def values(place: Place, device: torch.device) -> None:
    """All-reduce, all-gather, reduce-scatter and broadcast, against what they must give."""
    rank, world = place.rank, place.world
    own = part(rank, device)
    everyone = torch.stack([part(other, device) for other in range(world)])
    with stage("all_reduce") as found:
        total = own.clone()
        dist.all_reduce(total)
        found["ok"] = torch.equal(total, everyone.sum(0))
    with stage("all_gather") as found:
        gathered = torch.empty(world * ELEMENTS, dtype=own.dtype, device=device)
        dist.all_gather_into_tensor(gathered, own)
        found["wrong"] = [r for r, got in enumerate(gathered.view(world, -1)) if not torch.equal(got, everyone[r])]
    with stage("reduce_scatter") as found:
        shares = (
            own[: ELEMENTS // 64].repeat(world).view(world, -1) + torch.arange(world, device=device)[:, None]
        ).flatten()
        share = torch.empty(ELEMENTS // 64, dtype=own.dtype, device=device)
        dist.reduce_scatter_tensor(share, shares)
        found["ok"] = torch.equal(share, everyone[:, : ELEMENTS // 64].sum(0) + world * rank)
    with stage("broadcast") as found:
        sent = own.clone()
        dist.broadcast(sent, src=world - 1)
        found["ok"] = torch.equal(sent, everyone[world - 1])


def part(rank: int, device: torch.device) -> torch.Tensor:
    """What `rank` sends: integers, so that sums are exact in every order."""
    return (torch.arange(ELEMENTS, device=device) * 7 + rank * 1009) % 8191


def pair_test(place: Place, store: Store, nodes: list[str], backend: str, device: torch.device) -> None:
    """The first rank of each node with those of two other nodes, round by round, each pair a group of its own."""
    names = list(dict.fromkeys(nodes))
    mine = names.index(place.node)
    if nodes.index(place.node) != place.rank:
        return
    for number, pairs in enumerate(rounds(len(names))):
        pair = next((pair for pair in pairs if mine in pair), None)
        if pair is None:
            continue
        peer = names[pair[1] if pair[0] == mine else pair[0]]
        with stage("pair") as found:
            found |= {"round": number, "peer": peer}
            own_store = PrefixStore(f"pair/{number}/{pair}", store)
            try:
                found["gib_s"] = bandwidth(own_store, pair.index(mine), backend, device, place.step)
            except RuntimeError as error:  # this pair failed; the next one must still be tested
                found["error"] = str(error).splitlines()[0][:300]


def bandwidth(store: Store, rank: int, backend: str, device: torch.device, timeout: timedelta) -> float:
    """Best GiB/s of all-reduces between two ranks. Raises RuntimeError where they cannot talk, or in no time."""
    group: Any
    if backend == "nccl":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = ProcessGroupNCCL(store, rank, 2, options)
    else:
        group = ProcessGroupGloo(store, rank, 2, timeout)
    size = 256 * MIB if backend == "nccl" else 4 * MIB
    data = torch.ones(size // 4, device=device)
    seconds = [timed(group, data) for _ in range(REPEATS)]
    # Both must stop alike, and go on for long enough that a busy moment of the host does not count.
    more = torch.tensor([int(MOMENT_S / min(seconds))], device=device)
    group.allreduce([more]).wait()
    seconds += [timed(group, data) for _ in range(int(more.item()) // 2)]
    return size / min(seconds) / GIB


def timed(group: Any, data: torch.Tensor) -> float:
    """Seconds of one transfer."""
    began = time.perf_counter()
    transfer(group, data)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    return time.perf_counter() - began


def transfer(group: Any, data: torch.Tensor) -> None:
    """One all-reduce of a pair."""
    group.allreduce([data]).wait()


def run(place: Place) -> None:
    """The whole test."""
    with stage("store"):
        store = meet(place)
    with stage("join") as found:
        found["missing"] = missing = join(place, store)
    if missing:
        leave(place, store, [rank for rank in range(place.world) if rank not in missing])
        return
    nodes = [store.get(f"here/{rank}").decode() for rank in range(place.world)]
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a collective that does not end raises here, not in a thread
        torch.cuda.set_device(device)
    with stage("group") as found:
        found["backend"] = backend
        group_store = PrefixStore("world", store)
        dist.init_process_group(backend, store=group_store, rank=place.rank, world_size=place.world, timeout=place.step)
    values(place, device)
    with stage("clock") as found:
        dist.barrier()
        found["wall"] = time.time()
    pair_test(place, store, nodes, backend, device)
    say(stage="done")
    leave(place, store, list(range(place.world)))
    dist.destroy_process_group()


def main() -> None:
    """Test as the rank that the command line describes."""
    told = json.loads(sys.argv[1])
    run(Place(**{**told, "folder": Path(told["folder"])}))


if __name__ == "__main__":
    from preflight import collectives  # the module by its name, as others that are imported here see it

    answer_and_end(collectives.main)
