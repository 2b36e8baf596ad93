"""A real Slurm cluster on this machine, from Debian's packages: one set of Linux namespaces per node.

    python -m tests.slurm.lab start /tmp/lab      then: PATH=/tmp/lab/bin:$PATH sbatch ...
    python -m tests.slurm.lab stop /tmp/lab

Each node has its own name, address, processes and /dev/shm; files are shared, as on a cluster. All of it lies within
one outer set of namespaces that has no way out: killing its first process ends everything, and nothing is left but
files under the lab's folder. That folder's name must be short, for it holds Unix sockets.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import TypeVar

from slurm.sbatch import without_leaks

HERE = Path(__file__).parent
NET = "10.99.0"
CLIENTS = [
    "sbatch",
    "srun",
    "salloc",
    "scancel",
    "scontrol",
    "squeue",
    "sinfo",
    "sacct",
    "sacctmgr",
    "sattach",
    "sbcast",
    "sstat",
    "sprio",
]
PROGRAMS = [
    "slurmctld",
    "slurmd",
    "srun",
    "munged",
    "slurmdbd",
    "mariadbd",
    "mariadb",
    "unshare",
    "nsenter",
    "setpriv",
    "ip",
    "ps",
]
PACKAGES = [
    "slurmctld",
    "slurmd",
    "slurm-client",
    "munge",
    "slurmdbd",
    "mariadb-server-core",
    "mariadb-client-core",
    "iproute2",
    "procps",
]
ACCOUNTING = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={net}.1
AccountingStoragePass={root}/run/munge.sock"""
SLURMDBD = """DbdHost=ctl
DbdAddr={net}.1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""
CLIENT = """#!/bin/sh
# From outside the lab's network this goes in; within it (jobs get this PATH too) it is there already.
export SLURM_CONF={root}/etc/slurm.conf
[ "$(readlink /proc/self/ns/net)" = "{outside}" ] || exec /usr/bin/{name} "$@"
exec nsenter -t "$(cat {root}/run/lab.pid)" --net -- /usr/bin/{name} "$@"
"""

T = TypeVar("T")


class LabError(RuntimeError):
    """The cluster does not do what it is asked to."""


def missing() -> list[str]:
    """Programs that a lab needs and that are not here."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def install() -> None:
    """Install Debian's packages. Raises LabError where that cannot be done here."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise LabError(f"{', '.join(missing())} not found, and only root with apt-get could install Slurm")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ("-o", "DPkg::Lock::Timeout=120")
    install = ["apt-get", *wait, "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    for command in (["apt-get", *wait, "update", "-qq"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise LabError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()[-300:]}")


def wait_for(condition: Callable[[], T], what: str, seconds: float = 60, every: float = 0.1) -> T:
    """The first true value of `condition`; LabError naming `what` after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(every)
    raise LabError(f"not within {seconds:g} s: {what}")


class Lab:
    """A cluster of `nodes` nodes under the folder `root`: node1, node2, ..."""

    def __init__(self, root: Path, nodes: int = 4, *, accounting: bool = True) -> None:
        self.root, self.nodes, self.accounting = root, nodes, accounting
        self.environment = {
            **without_leaks(os.environ),
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "SLURM_CONF": f"{root}/etc/slurm.conf",
        }

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    # The cluster as a whole

    def start(self, *, die_with_caller: bool = False) -> None:
        """Start, or do nothing where it runs already. `die_with_caller`: it also ends when this process is killed."""
        if self.running():
            return
        self._write_files()
        namespaces = ["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        init = ["bash", str(HERE / "lab_init.sh"), str(self.root), str(self.nodes), NET, str(int(self.accounting))]
        bound = ["setpriv", "--pdeathsig", "KILL"] if die_with_caller else []
        with (self.root / "log" / "lab-init.log").open("wb") as log:
            self._outer = subprocess.Popen(
                [*bound, *namespaces, *init], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        (pid, *_) = wait_for(lambda: children.read_text().split(), "the lab's first process", 10, 0.01)
        (self.root / "run" / "lab.pid").write_text(pid)
        try:
            wait_for(self.healthy, "all nodes idle", 120)
        except LabError as error:
            said = (self.root / "log" / "lab-init.log").read_text()
            self.stop()
            raise LabError(f"the cluster did not start: {error}\n{said}") from error

    def stop(self) -> None:
        """End every process of the lab; nothing to do where none runs."""
        if self.running():
            os.kill(self.pid, signal.SIGKILL)  # the kernel ends its whole pid namespace with it
            wait_for(lambda: not self.running(), "the lab's end", 20, 0.02)
        if hasattr(self, "_outer"):
            self._outer.wait(20)

    @property
    def pid(self) -> int:
        """The lab's first process, as seen from outside."""
        return int((self.root / "run" / "lab.pid").read_text())

    def running(self) -> bool:
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return str(self.root).encode() in command and any(word.endswith(b"lab_init.sh") for word in command)

    def healthy(self) -> bool:
        """Whether every node is idle."""
        if self._outer_ended():
            raise LabError("its first process has ended")
        done = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
        return done.returncode == 0 and done.stdout.split() == ["idle"] * self.nodes

    def heal(self) -> None:
        """Back to no jobs and idle nodes, whatever a test did."""
        for name in self.names:
            self.node_heal(name)
            if not self.node_alive(name) or not self._slurmd_alive(name):
                self.node_start(name)
        self.run("scancel", "-u", "root", check=False)
        wait_for(lambda: not self.run("squeue", "-h", "-o", "%i").stdout.strip(), "no jobs", 60)
        for name in self.names:
            self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        wait_for(self.healthy, "all nodes idle", 60)

    # Commands and jobs

    def run(self, *command: object, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster would on its login node."""
        words = [str(word) for word in command]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            raise LabError(f"{shlex.join(words)}: status {done.returncode}: {done.stderr.strip() or done.stdout}")
        return done

    def sbatch(self, *arguments: object) -> str:
        """Submit; the job's id."""
        return self.run("sbatch", "--parsable", *arguments).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What the controller knows of a job, from `scontrol show job`; nothing where it has forgotten it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "-o", "show", "job", job, check=False).stdout))

    def state(self, job: str) -> str:
        return self.job(job).get("JobState", "UNKNOWN")

    def exit_status(self, job: str) -> int:
        """Exit status of the batch script; 128 + n after signal n."""
        status, _, number = self.job(job)["ExitCode"].partition(":")
        return int(status) or (128 + int(number) if int(number) else 0)

    def wait_state(self, job: str, *states: str, seconds: float = 60) -> str:
        """Wait until the job is in one of `states`."""

        def reached() -> str | None:
            state = self.state(job)
            return state if state in states else None

        found = wait_for(reached, f"job {job} in {' or '.join(states)}", seconds)
        assert found is not None
        return found

    def wait_end(self, job: str, seconds: float = 240) -> str:
        """Wait until the job has ended for good; its last state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
        return self.wait_state(job, *ended, seconds=seconds)

    def lives(self, job: str) -> list[str]:
        """States of all lives of a job that the accounting knows of."""
        return self.run("sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", job).stdout.split("\n")[:-1]

    # Faults

    def inside(self, *command: object, node: str | None = None, check: bool = True) -> str:
        """Run a command in the lab, on the controller or on `node`; what it prints."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--pid", "--mount", "--"]
        if node is not None:
            enter += ["nsenter", "-t", self._node_pid(node), "--net", "--uts", "--ipc", "--pid", "--mount", "--"]
        return self.run(*enter, *command, check=check).stdout

    def node_kill(self, node: str) -> None:
        """The node loses power."""
        self.inside("kill", "-9", self._node_pid(node))

    def node_start(self, node: str) -> None:
        self._command(f"node {node.removeprefix('node')}")

    def node_cut(self, node: str) -> None:
        """The node's network goes silent."""
        self.inside("ip", "link", "set", f"v{node.removeprefix('node')}", "down")

    def node_heal(self, node: str) -> None:
        self.inside("ip", "link", "set", f"v{node.removeprefix('node')}", "up", check=False)

    def node_alive(self, node: str) -> bool:
        return bool(self.inside("ps", "-o", "pid=", "-p", self._node_pid(node), check=False).strip())

    def slurmd_kill(self, node: str) -> None:
        """slurmd dies; what it had started runs on."""
        pid = (self.root / "run" / f"slurmd-{node}.pid").read_text().strip()
        self.inside("kill", "-9", pid, node=node)

    def daemon_stop(self, name: str) -> None:
        """Stop `slurmctld` or `slurmdbd`."""
        pid = (self.root / "run" / f"{name}.pid").read_text().strip()
        self.inside("kill", pid)
        wait_for(lambda: not self.inside("ps", "-o", "pid=", "-p", pid, check=False).strip(), f"{name}'s end", 30)

    def daemon_start(self, name: str) -> None:
        self._command(name)

    def processes(self, node: str, words: str) -> list[int]:
        """Processes of a node whose command line holds `words`, as the node numbers them."""
        lines = self.inside("ps", "-eo", "pid=,args=", node=node).splitlines()
        return [int(line.split()[0]) for line in lines if words in line and " ps " not in line]

    def parent(self, node: str, pid: int) -> int:
        """The parent of a process, as the node numbers them."""
        return int(self.inside("ps", "-o", "ppid=", "-p", pid, node=node))

    def within(self, path: Path) -> Path:
        """A path as the lab sees it, for files on disks that are mounted there only."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def _slurmd_alive(self, node: str) -> bool:
        return bool(self.processes(node, "slurmd -D"))

    def _node_pid(self, node: str) -> str:
        return (self.root / "run" / f"{node}.pid").read_text().strip()

    def _command(self, line: str) -> None:
        with (self.root / "run" / "commands").open("w") as commands:
            commands.write(f"{line}\n")

    def _outer_ended(self) -> bool:
        return hasattr(self, "_outer") and self._outer.poll() is not None

    # Files

    def _write_files(self) -> None:
        root = self.root
        for name in ("state", "spool", "run", "db"):
            shutil.rmtree(root / name, ignore_errors=True)
        for name in ("etc", "state", "log", "run", "dev", "munge", "bin", "small", *(f"spool/{n}" for n in self.names)):
            (root / name).mkdir(parents=True, exist_ok=True)
        root.chmod(0o755)  # munge wants every folder above its socket to be searchable
        (root / "munge").chmod(0o700)
        self._write("munge/key", os.urandom(128), 0o600)
        for number, device in enumerate(("/dev/null", "/dev/zero")):  # "GPUs": any character device will do
            link = root / "dev" / f"gpu{number}"
            link.unlink(missing_ok=True)
            link.symlink_to(device)
        addresses = [("127.0.0.1", "localhost"), (f"{NET}.1", f"ctl {socket.gethostname()}")]
        addresses += [(f"{NET}.{10 + number}", name) for number, name in enumerate(self.names, 1)]
        self._write("etc/hosts", "".join(f"{address} {names}\n" for address, names in addresses))
        self._write("etc/slurm.conf", self._slurm_conf())
        self._write("etc/gres.conf", f"NodeName=node[1-{self.nodes}] Name=gpu File={root}/dev/gpu[0-1]\n")
        self._write("etc/slurmdbd.conf", SLURMDBD.format(root=root, net=NET), 0o600)
        outside = os.readlink("/proc/self/ns/net")
        for name in CLIENTS:
            self._write(f"bin/{name}", CLIENT.format(root=root, name=name, outside=outside), 0o755)

    def _slurm_conf(self) -> str:
        lines = [f"NodeName={name} NodeAddr={NET}.{10 + number}" for number, name in enumerate(self.names, 1)]
        off = "AccountingStorageType=accounting_storage/none"
        return Template((HERE / "slurm.conf").read_text()).substitute(
            root=self.root,
            net=NET,
            nodes="\n".join(lines),
            first_job=random.randrange(1000, 60000),
            accounting=ACCOUNTING.format(root=self.root, net=NET) if self.accounting else off,
        )

    def _write(self, name: str, content: str | bytes, mode: int = 0o644) -> None:
        path = self.root / name
        path.touch(mode)
        path.chmod(mode)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("start", "stop"):
        print(__doc__, file=sys.stderr)
        return 2
    lab = Lab(Path(arguments[1]))
    if arguments[0] == "start":
        if missing():
            install()
        lab.start()
        print(f"export PATH={lab.root}/bin:$PATH SLURM_CONF={lab.root}/etc/slurm.conf")
    else:
        lab.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
