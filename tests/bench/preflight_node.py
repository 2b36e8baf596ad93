"""How to write a case for the preflight bench. This page is all that is needed; preflight's rules need not be known.

Three nodes, `node0`, `node1` and `node2`, are about to run one job: it trains a language model with one rank per node
on one NVIDIA H200 each, in bf16, with flash-linear-attention's kernels. All nodes are alike and fit. A case spoils one
of them. Then preflight's own programs run on that node as they would in a job, and its judge compares all three. The
case is found where that node, and nothing else, is blamed, by a check of the family that the case declares.

A file of any name in `tests/bench/preflight_independent/` defines a list CASES:

    from tests.bench.preflight_node import Control, Fault, Node

    def older_peft(node: Node) -> None:
        node.install("peft", "0.20.0")

    def warm(node: Node) -> None:
        node.gpus[0]["temperature.gpu"] = "44"

    CASES = [
        Fault("an older peft", older_peft, on="node1", family="imports", says=("0.20.0",)),
        Control("a warmer GPU", warm),
    ]

`Fault` is something that would let a job fail, hang, slow down or compute wrong numbers. `Control` is a difference
that a healthy cluster has: any problem that is reported with it is a false alarm. Write what you have seen or read of
on real clusters. Simulate the cause as the operating system, the driver or Python would show it, not what you think a
check looks at.

    python tests/bench/preflight_bench.py --only independent            all of them
    python tests/bench/preflight_bench.py --only independent "an older peft"
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import standin

FAMILIES = {
    "imports": ("python", "import", "known", "torch", "preflight.config"),
    "libraries": ("libraries", "torch", "host.environment"),
    "environment": ("host.environment", "host.network", "libraries", "torch", "pins", "device"),
    "code": ("code", "node.answer"),
    "pins": ("pins", "known", "host.environment"),
    "device": ("device", "torch", "known"),
    "host": ("host",),
    "collectives": ("collective", "host.clock", "host.network"),
    "answer": ("node", "host.clock"),
}
"""Family -> checks, or areas of checks, that may blame a node for a fault of that family.

imports: Python, the packages that are imported, known-bad combinations of them. libraries: shared libraries that a
collective loads. environment: variables that change what a rank does. code: the job's frozen source. pins: the files
with the kernels' settings. device: GPU and driver. host: disks, memory, limits, clock, name, network interfaces, data
and model files. collectives: what shows only when ranks talk to each other. answer: the node says nothing, or nonsense.
"""

NODES = ("node0", "node1", "node2")
MODEL_FILES = {"model-00001-of-00002.safetensors": b"\0" * 70000, "tokenizer.json": b'{"model": "BPE"}'}
"""What the model's folder holds besides config.json: not loaded here, but every node must read the same."""


@dataclass
class Node:
    """A node that a case may spoil before it is checked. All paths exist already and are the node's own.

    folder: this node's disk. run: the run folder as this node sees it, with config.yaml and code/. train: the file of
    training data. model: the model's folder. pins: one JSON file per kernel, and a list of them. path: first on the
    node's PYTHONPATH.
    """

    folder: Path
    name: str

    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every program on this node, besides those that all nodes have."""
    gpus: list[dict[str, str]] = field(default_factory=lambda: [dict(H200)])
    """What nvidia-smi says of each GPU, by the names of `nvidia-smi --help-query-gpu`; a name that is not in it is
    answered with [N/A]. An empty list: nvidia-smi finds no device."""
    gpu_processes: list[tuple[str, int, int]] = field(default_factory=list)
    """Processes that nvidia-smi lists: uuid of the GPU, pid, MiB."""
    torch: dict[str, object] = field(default_factory=lambda: dict(TORCH))
    """What torch says of its GPUs: devices, capability, cuda (of its build), nccl, nccl_version, cudnn, peers."""
    addresses: list[str] | None = field(default_factory=lambda: ["10.0.0.7"])
    """What the node's host name resolves to; empty: nothing; None: to what it really does."""
    interfaces: dict[str, dict[str, Any]] | None = field(default_factory=lambda: json.loads(json.dumps(INTERFACES)))
    """Network interfaces, with up, mtu, speed (Mbit/s) and addresses of each; the node's own address is eth0's. None:
    the real ones."""
    infiniband: dict[str, tuple[str, str]] = field(default_factory=lambda: dict(INFINIBAND))
    """`device/port` -> state and rate, as files under /sys/class/infiniband say them."""
    disks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Folder -> free bytes and free inodes of the file system that it lies on, where they are not the real ones."""
    read_only: list[str] = field(default_factory=list)
    """Folders on file systems that are mounted read-only."""
    noexec: list[str] = field(default_factory=list)
    """Folders on file systems that are mounted noexec."""
    mounts: list[tuple[str, str, str]] = field(default_factory=list)
    """Mount point, type and source, as in `mount`: ("/home", "nfs4", "filer:/home"). Empty: the real table."""
    limits: dict[str, int] = field(default_factory=lambda: {"memlock": -1, "nofile": 65536})
    """`ulimit`: names of the module resource without RLIMIT_, in small letters (nofile, memlock, nproc, stack) -> what
    it says, -1: unlimited. Those that are not named are the real ones."""
    memory_gib: float | None = None
    """Memory that programs can have, where that is not the real one."""
    clock_s: float = 0.0
    """How far the node's clock is ahead of the others'; below 0: behind."""
    code: str = ""
    """Python that every Python program on this node runs before anything else, for what nothing above can say. `IN` is
    the program's command line: `if 'preflight.host' in IN: ...`. Programs: preflight run, preflight.imports,
    preflight.torch_facts, preflight.host, preflight.collectives."""
    spoil: Callable[[str], str | None] | None = None
    """What becomes of the text of the node's answer on its way; None: it never arrives."""
    joins: bool = True
    """Whether the node's rank takes part in the collectives."""
    transfer_s: float = 0.0
    """Seconds that each transfer between this node and another takes longer."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def pins(self) -> Path:
        return self.folder / "pins"

    @property
    def path(self) -> Path:
        return self.folder / "path"

    def program(self, name: str, script: str) -> None:
        """A shell script first on the node's PATH, in place of the program of that name (`nvidia-smi`)."""
        standin.program(self.folder / "bin", name, script)

    def install(self, package: str, version: str, source: str = "") -> None:
        """A package of this version before the one of the environment, with an installer's metadata.

        source: of its __init__.py, behind `__version__ = version`.
        """
        for old in self.path.glob(f"{package}-*.dist-info"):
            shutil.rmtree(old)
        standin.package(self.path, package, version, source)

    def module(self, name: str, source: str) -> None:
        """A bare module on PYTHONPATH, which no installer knows of."""
        (self.path / name).mkdir(parents=True, exist_ok=True)
        (self.path / name / "__init__.py").write_text(source)

    def copy_package(self, package: str) -> Path:
        """A full copy of an installed package before the real one; its folder, to change something in it."""
        for file in importlib.metadata.distribution(package).files or []:
            source, target = Path(str(file.locate())), self.path / str(file)
            if file.parts[0] != ".." and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        return self.path / package

    # For the bench itself

    def variables(self) -> dict[str, str]:
        """Variables of the node's programs; writes what they are to find."""
        smi = self.folder / "bin" / "nvidia-smi"
        if not smi.exists():
            told = json.dumps([self.gpus, self.gpu_processes])
            self.program("nvidia-smi", f"exec {sys.executable} -S -E - \"$@\" <<'END'\nTOLD = {told!r}\n{SMI}\nEND")
        path = os.pathsep.join((str(smi.parent), "/usr/bin", "/bin"))
        own = {"SLURMD_NODENAME": self.name, "FLA_CONFIG_DIR": str(self.pins), "PATH": path}
        if self.mounts:
            proc = self.folder / "proc" / "self"
            proc.mkdir(parents=True, exist_ok=True)
            rows = [("/", "ext4", "/dev/sda"), *self.mounts]
            lines = [
                f"{n} 1 0:{n} / {point} rw - {kind} {source} rw\n" for n, (point, kind, source) in enumerate(rows, 1)
            ]
            (proc / "mountinfo").write_text("".join(lines))
            if not (proc / "maps").is_symlink():
                (proc / "maps").symlink_to("/proc/self/maps")
            own["PREFLIGHT_PROC"] = str(proc.parent)
        for port, (state, rate) in self.infiniband.items():
            device, _, number = port.partition("/")
            folder = self.folder / "sys" / "class" / "infiniband" / device / "ports" / number
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "state").write_text(f"{state}\n")
            (folder / "rate").write_text(f"{rate}\n")
        own["PREFLIGHT_SYS"] = str(self.folder / "sys")
        return own | self.environment

    def inside(self) -> str:
        """What the node's Python programs run first."""
        told = {name: getattr(self, name) for name in TOLD}
        return f"TOLD = __import__('json').loads({json.dumps(told)!r})\n{INSIDE}\n{self.code}\n"


@dataclass(frozen=True)
class Case:
    """One fault on one node, or a control where `expected` is empty.

    expected: checks, or areas of checks, that may blame the node. says: words of which each must stand in what is said
    of the node. collectives: whether the ranks' test is run too.
    """

    name: str
    plant: Callable[[Node], None]
    on: str = "node2"
    expected: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    collectives: bool = False

    def right(self, node: str, check: str) -> bool:
        """Whether blaming `node` by `check` is what was expected."""
        return node == self.on and any(check == name or check.startswith(f"{name}.") for name in self.expected)


def Fault(
    name: str,
    plant: Callable[[Node], None],
    *,
    on: str = "node2",
    family: str,
    also: tuple[str, ...] = (),
    says: tuple[str, ...] = (),
) -> Case:
    """A fault that `plant` puts on the node `on`.

    family: one of FAMILIES. also: other families whose checks may see consequences of it on the same node. says: words
    that must stand in the report of that node, where a message without them would be of no use (a version, a path).
    """
    assert on in NODES
    expected = tuple(check for one in (family, *also) for check in FAMILIES[one])
    return Case(name, plant, on, expected, says, "collectives" in (family, *also))


def Control(name: str, plant: Callable[[Node], None], *, on: str = "node2", collectives: bool = False) -> Case:
    """A harmless difference of the node `on`. collectives: whether it could matter to ranks that talk to each other."""
    assert on in NODES
    return Case(name, plant, on, collectives=collectives)


H200 = {
    "index": "0",
    "name": "NVIDIA H200",
    "uuid": "GPU-1",
    "driver_version": "580.159.04",
    "vbios_version": "96.00.BC.00.01",
    "memory.total": "143771",
    "memory.used": "4",
    "memory.free": "143156",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0",
    "ecc.errors.corrected.volatile.total": "0",
    "clocks_throttle_reasons.active": "0x0000000000000001",
    "clocks_event_reasons.active": "0x0000000000000001",
    "persistence_mode": "Enabled",
    "compute_mode": "Default",
    "mig.mode.current": "Disabled",
    "pstate": "P0",
    "clocks.sm": "345",
    "clocks.current.sm": "345",
    "clocks.max.sm": "1980",
    "clocks.mem": "3201",
    "clocks.max.mem": "3201",
    "power.draw": "78.2",
    "power.limit": "700.00",
    "power.default_limit": "700.00",
    "power.max_limit": "700.00",
    "temperature.gpu": "37",
    "utilization.gpu": "0",
    "utilization.memory": "0",
    "pcie.link.gen.current": "5",
    "pcie.link.gen.max": "5",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}
"""A healthy H200 at rest."""

INTERFACES = {
    "lo": {"up": True, "mtu": 65536, "speed": 0, "addresses": ["127.0.0.1"]},
    "eth0": {"up": True, "mtu": 9000, "speed": 100000, "addresses": ["10.0.0.7"]},
    "ib0": {"up": True, "mtu": 4092, "speed": 400000, "addresses": ["10.1.0.7"]},
}
INFINIBAND = {"mlx5_0/1": ("4: ACTIVE", "400 Gb/sec (4X NDR)")}

TOLD = ("name", "torch", "addresses", "interfaces", "disks", "read_only", "noexec", "limits", "memory_gib", "clock_s",
        "transfer_s")  # fmt: skip
"""Facts that the node's programs are told."""

TORCH: dict[str, object] = {"devices": ["NVIDIA H200"], "capability": [9, 0], "cuda": "13.0", "nccl": True}

SMI = """
import json, sys
gpus, processes = json.loads(TOLD)
question = sys.argv[1] if len(sys.argv) > 1 else ""
fields = question.partition("=")[2].split(",")
if question.startswith("--query-gpu=") and not gpus:
    print("No devices were found")
if question.startswith("--query-gpu="):
    for gpu in gpus:
        print(", ".join(gpu.get(name, "[N/A]") for name in fields))
if question.startswith("--query-compute-apps="):
    for row in processes:
        print(", ".join(str(value) for value in row))
if question == "topo" and len(gpus) > 1:
    names = [f"GPU{number}" for number in range(len(gpus))]
    print("\\t".join(["", *names, "CPU Affinity"]))
    for own in names:
        print("\\t".join([own, *(" X " if own == other else "NV18" for other in names), "0-47"]))
"""
"""The stand-in for nvidia-smi."""

INSIDE = """
import os, time
if 'preflight' in IN:
    import resource, socket
    limits = {getattr(resource, 'RLIMIT_' + name.upper()): value for name, value in TOLD['limits'].items()}
    def told_limits(number, real=resource.getrlimit):
        return (limits[number], resource.RLIM_INFINITY) if number in limits else real(number)
    resource.getrlimit = told_limits
    def told_addresses(host, port=0, *_, real=socket.getaddrinfo, **how):
        if host not in (socket.gethostname(), TOLD['name']) or 'preflight.collectives' in IN:
            return real(host, port, *_, **how)
        if not TOLD['addresses']:
            raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')
        families = {address: socket.AF_INET6 if ':' in address else socket.AF_INET for address in TOLD['addresses']}
        return [(family, socket.SOCK_STREAM, 6, '', (address, port or 0)) for address, family in families.items()]
    if TOLD['addresses'] is not None:
        socket.getaddrinfo = told_addresses
    def told_statvfs(path, real=os.statvfs):
        found, where = real(path), os.path.realpath(path) if isinstance(path, (str, os.PathLike)) else ''
        below = lambda folder: (where + '/').startswith(os.path.realpath(folder).rstrip('/') + '/')
        values = list(found[:10])
        for folder in sorted(filter(below, TOLD['disks']), key=len):
            free, inodes = TOLD['disks'][folder]
            values[3] = values[4] = free // values[1]
            values[6] = values[7] = inodes
        values[8] |= os.ST_RDONLY * any(map(below, TOLD['read_only'])) | os.ST_NOEXEC * any(map(below, TOLD['noexec']))
        return os.statvfs_result(values)
    os.statvfs = told_statvfs
    def refused(path, mode):
        where = os.path.realpath(path) + '/' if isinstance(path, (str, os.PathLike)) else ''
        if mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            if any(where.startswith(os.path.realpath(folder).rstrip('/') + '/') for folder in TOLD['read_only']):
                raise OSError(30, 'Read-only file system', str(path))
    def told_open(path, flags, *rest, real=os.open, **how):
        refused(path, flags)
        return real(path, flags, *rest, **how)
    os.open = told_open
    if TOLD['clock_s']:
        time.time = lambda real=time.time: real() + TOLD['clock_s']
if 'preflight.imports' in IN:
    import preflight.imports as i
    own_describe, versions = i.describe, {'triton': '3.7.1', 'fla': '0.6.0'}
    here = {'absent': False, 'folder': '/opt/env', 'from': 'site', 'editable': False}
    def describe(package):
        planted = any(os.path.exists(os.path.join(folder, package)) for folder in sys.path)
        if package not in versions or planted:
            return own_describe(package)
        version, path = versions[package], f'/opt/env/{package}/__init__.py'
        return {'package': package, 'declared': version, 'version': version, 'path': path, **here}
    i.describe = describe
if 'preflight.torch_facts' in IN:
    import preflight.torch_facts as t
    real_facts = t.facts
    t.facts = lambda: real_facts() | TOLD['torch']
if 'preflight.host' in IN:
    import psutil, types
    if TOLD['interfaces'] is not None:
        fields = {name: {'isup': told['up'], **told} for name, told in TOLD['interfaces'].items()}
        psutil.net_if_stats = lambda: {name: types.SimpleNamespace(**told) for name, told in fields.items()}
        psutil.net_if_addrs = lambda: {
            name: [types.SimpleNamespace(address=one) for one in told['addresses']] for name, told in fields.items()
        }
    if TOLD['memory_gib'] is not None:
        real_memory = psutil.virtual_memory
        psutil.virtual_memory = lambda: real_memory()._replace(available=int(TOLD['memory_gib'] * 2**30))
if 'preflight.collectives' in IN and TOLD['transfer_s']:
    import preflight.collectives as c
    def slow(*given, real=c.transfer):
        time.sleep(TOLD['transfer_s'])
        return real(*given)
    c.transfer = slow
"""
"""What every node's programs run first: a GPU that torch sees, packages of a GPU node, and what the node was told."""
