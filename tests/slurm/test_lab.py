"""The test cluster itself is what the other tests take it for."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import psutil

from tests.slurm.lab import Lab, wait_for


def test_nodes_have_their_own_names_and_addresses(lab: Lab) -> None:
    command = ("srun", "-N4", "-l", "sh", "-c", "echo $(hostname) $(ip -4 -o addr show eth0 | awk '{print $4}')")
    lines = sorted(lab.run(*command).stdout.splitlines())
    assert lines == [f"{n - 1}: node{n} 10.99.0.{10 + n}/24" for n in range(1, 5)]


def test_a_dead_node_comes_back_and_starting_twice_changes_nothing(lab: Lab) -> None:
    before = lab.pid
    lab.start()
    assert lab.pid == before
    lab.node_kill("node3")
    wait_for(lambda: not lab.node_alive("node3"), "node3's end")
    lab.heal()
    assert lab.run("srun", "-w", "node3", "hostname").stdout == "node3\n"


def test_exit_status_and_state_of_a_job(lab: Lab, tmp_path: Path) -> None:
    job = lab.sbatch("-o", tmp_path / "out", "--wrap", "srun hostname; exit 7")
    assert lab.wait_end(job) == "FAILED"
    assert lab.exit_status(job) == 7
    assert (tmp_path / "out").read_text() == "node1\n"


def test_stopping_leaves_nothing_and_may_be_repeated(lab: Lab) -> None:
    """A second cluster beside the one that the tests share."""
    root = Path(tempfile.mkdtemp(prefix="slb", dir="/tmp"))
    other = Lab(root, nodes=1)
    try:
        other.start(die_with_caller=True)
        assert other.run("srun", "hostname").stdout == "node1\n"
        assert left_of(root)
    finally:
        other.stop()
    other.stop()
    assert not left_of(root)
    assert str(root) not in Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(root)
    assert lab.run("srun", "-w", "node1", "hostname").stdout == "node1\n", "the first one runs on"


def left_of(root: Path) -> list[str]:
    """Commands of running processes that name `root`."""
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [command for command in commands if str(root) in command]
