"""The gate's steps on real nodes: each fault on one of three nodes is found and named, and nothing else is blamed.

All three nodes answer at first, healthy, and wherever ranks talk to each other. For a fault of a node by itself that
node alone is asked again, beside the answers that the others gave before: a pass over all takes the test machine three
times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from preflight import baseline
from tests.bench.preflight_cases import edit_pin, gpu, module, relist, smi, without
from tests.bench.preflight_node import Node
from tests.slurm.lab import Lab
from tests.slurm.preflight_nodes import DISK, NAMES, ODD, Nodes, Plant, make_nodes

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def nodes(running_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """All nodes healthy, each with the answer that it gave."""
    running_lab.heal()
    made = make_nodes(running_lab, tmp_path_factory.mktemp("preflight"))
    seconds = made.ask(*NAMES[:2])
    print(f"two nodes checked in {seconds:.1f} s")
    made.ask(*NAMES[2:])
    yield made
    running_lab.heal()


@contextmanager
def spoilt(nodes: Nodes, plant: Plant) -> Iterator[None]:
    """The odd node's disk with a fault, within the block."""
    nodes.lay(ODD, plant)
    try:
        yield
    finally:
        nodes.lay(ODD)


def blames_only_the_odd_node(document: dict[str, Any], checks: set[str], says: str) -> None:
    problems = [(problem["node"], problem["finding"]["check"]) for problem in document["problems"]]
    assert problems, "nothing was found"
    assert {node for node, _ in problems} == {ODD}, document["headline"]
    assert {check for _, check in problems} <= checks, problems
    assert document["headline"].startswith(f"FAIL {ODD}: ")
    assert any(says in problem["finding"]["found"] for problem in document["problems"]), problems


def test_healthy_nodes_pass_and_their_gpus_at_rest_are_known(nodes: Nodes) -> None:
    document = nodes.judge()
    assert document["passed"], document["headline"]
    assert document["problems"] == []
    assert [node["node"] for node in document["nodes"]] == list(NAMES)
    (at_rest,) = baseline.at_rest(nodes.run, 0, ODD)
    assert (at_rest.power_w, at_rest.sm_clock_mhz) == (78.2, 345.0)


def harmless(node: Node) -> None:
    node.environment |= {"TMPDIR": "/dev/shm", "HF_TOKEN": "planted-secret", "CUDA_VISIBLE_DEVICES": "0"}
    node.gpus[0] |= {"temperature.gpu": "51", "power.draw": "96.9", "clocks_throttle_reasons.active": "0x4"}


def test_harmless_differences_pass(nodes: Nodes) -> None:
    with spoilt(nodes, harmless), nodes.asked_again(ODD):
        document = nodes.judge()
        assert document["problems"] == []
        assert document["passed"]
        assert "planted-secret" not in "".join(path.read_text() for path in nodes.answers.glob("*.*"))


def unreadable(node: Node) -> None:
    """A file whose first block the disk does not give."""
    node.train.unlink()
    node.train.symlink_to("/proc/self/mem")


def cache_on_nfs(node: Node) -> None:
    node.mounts = [(str(DISK / "home"), "nfs4", "filer:/home")]
    node.environment["TRITON_CACHE_DIR"] = str(DISK / "home" / ".triton")


def small_scratch(node: Node) -> None:
    (DISK / "scratch").mkdir()
    node.environment["TMPDIR"] = str(DISK / "scratch")


@pytest.mark.parametrize(
    ("plant", "checks", "says"),
    [
        pytest.param(lambda node: node.install("peft", "0.20.0"), {"import.peft"}, "0.20.0", id="wrong version"),
        pytest.param(module("omegaconf", "__version__ = '2.4.0'"), {"import.omegaconf", "preflight.config"},
                     f"{DISK}/path/omegaconf", id="shadowed module"),
        pytest.param(without(lambda node: node.pins / "l2norm_fwd_kernel.json"), {"pins.files"}, "l2norm_fwd_kernel",
                     id="missing pin"),
        pytest.param(edit_pin, {"pins.files"}, "chunk_fwd_kernel_o", id="edited pin"),
        pytest.param(relist("triton", "3.6.0"), {"pins.files"}, "3.6.0", id="pins of another Triton"),
        pytest.param(cache_on_nfs, {"host.cache"}, "nfs4 from filer:/home", id="cache on NFS"),
        pytest.param(smi("sleep 600"), {"device.gpus"}, "did not answer in 20 s: driver stuck", id="nvidia-smi hangs"),
        pytest.param(smi("echo 'driver/library version mismatch'; exit 18"), {"device.gpus"}, "version mismatch",
                     id="nvidia-smi fails"),
        pytest.param(gpu("ecc.errors.uncorrected.volatile.total", "3"), {"device.ecc"}, "3 uncorrected",
                     id="memory errors"),
        pytest.param(unreadable, {"host.files"}, "Input/output error", id="unreadable data"),
    ],
)  # fmt: skip
def test_fault_of_one_node(nodes: Nodes, plant: Plant, checks: set[str], says: str) -> None:
    with spoilt(nodes, plant), nodes.asked_again(ODD):
        blames_only_the_odd_node(nodes.judge(), checks, says)


@contextmanager
def loopback_name(nodes: Nodes, folder: Path) -> Iterator[None]:
    """The odd node's own table of hosts says what Debian's installer writes."""
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {ODD}\n")
    nodes.lab.inside("mount", "--bind", hosts, "/etc/hosts", node=ODD)
    try:
        yield
    finally:
        nodes.lab.inside("umount", "/etc/hosts", node=ODD)


@contextmanager
def full_disk(nodes: Nodes, folder: Path) -> Iterator[None]:
    """The odd node's folder for temporary files lies on a small disk that is full."""
    nodes.lay(ODD, small_scratch)
    nodes.lab.inside("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", DISK / "scratch", node=ODD)
    nodes.lab.inside("dd", "if=/dev/zero", f"of={DISK}/scratch/filler", check=False, node=ODD)
    try:
        yield
    finally:
        nodes.lab.inside("umount", DISK / "scratch", node=ODD)
        nodes.lay(ODD)


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [(loopback_name, "host.name", "127.0.1.1"), (full_disk, "host.cache", f"0.0 GiB free at {DISK}/scratch")],
)
def test_fault_of_the_node_itself(nodes: Nodes, tmp_path: Path, fault: Any, check: str, says: str) -> None:
    broken: AbstractContextManager[None] = fault(nodes, tmp_path)
    with broken, nodes.asked_again(ODD):
        blames_only_the_odd_node(nodes.judge(), {check}, says)


def never_answers(node: Node) -> None:
    node.code = "if 'preflight run' in IN:\n    import time\n    time.sleep(600)\n"


def test_silent_node_delays_the_report_by_its_deadline_only(nodes: Nodes) -> None:
    with spoilt(nodes, never_answers), nodes.asked_again(ODD, seconds=15) as seconds:
        blames_only_the_odd_node(nodes.judge(), {"node.answer"}, "gave no answer in time")
    print(f"a silent node with a deadline of 15 s cost {seconds:.1f} s")
    assert 15 <= seconds < 25


def test_ranks_of_healthy_nodes_meet(nodes: Nodes) -> None:
    print(f"three ranks met in {nodes.meet():.1f} s")
    document = nodes.judge("--ranks", "3")
    assert document["problems"] == []
    assert document["passed"]


@contextmanager
def slow_link(nodes: Nodes, folder: Path) -> Iterator[None]:
    """The odd node sends at 100 Mbit/s."""
    shape = ("root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "400ms")
    nodes.lab.inside("tc", "qdisc", "add", "dev", "eth0", *shape, node=ODD)
    try:
        yield
    finally:
        nodes.lab.inside("tc", "qdisc", "del", "dev", "eth0", "root", node=ODD)


@contextmanager
def never_joins(nodes: Nodes, folder: Path) -> Iterator[None]:
    """The odd node's rank does not come to the rendezvous."""
    code = "if 'preflight.collectives' in IN:\n    import time\n    time.sleep(600)\n"
    with spoilt(nodes, lambda node: setattr(node, "code", code)):
        yield


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [(slow_link, "collective.pair", "GiB/s with node"), (never_joins, "collective.join", "rank 1 never joined")],
)
def test_fault_between_nodes(nodes: Nodes, tmp_path: Path, fault: Any, check: str, says: str) -> None:
    broken: AbstractContextManager[None] = fault(nodes, tmp_path)
    with broken:
        nodes.meet()
    blames_only_the_odd_node(nodes.judge("--ranks", "3"), {check}, says)
