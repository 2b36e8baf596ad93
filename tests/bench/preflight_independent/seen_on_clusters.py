"""Faults and harmless oddities of real clusters, written from the product's description and the cases' interface alone.

What each plants, where, and which family of checks may blame it was fixed before the first run.
"""

from __future__ import annotations

import json
import os
import shutil

from configs import kernel_pins, runfolder
from tests.bench.preflight_node import INTERFACES, Control, Fault, Node

# Python and what it imports


def half_upgraded(node: Node) -> None:
    """An upgrade that was killed half-way: the files are the new version's, the metadata still the old one's."""
    node.copy_package("peft")
    (info,) = node.path.glob("peft-*.dist-info")
    old = info.with_name("peft-0.19.1.dist-info")
    info.rename(old)
    lines = (old / "METADATA").read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if line.startswith("Version: "))
    lines[at] = "Version: 0.19.1\n"
    (old / "METADATA").write_text("".join(lines))


def emptied_by_a_crash(node: Node) -> None:
    """The machine lost power after an installation: one file that was not flushed is empty. It is imported lazily, by
    the trainer only, and the model of this job needs it."""
    package = node.copy_package("transformers")
    (package / "models" / "qwen3_5" / "modeling_qwen3_5.py").write_text("")


def path_file(node: Node) -> None:
    """A forgotten .pth file puts an old environment's folder first on sys.path; its omegaconf works."""
    package = node.copy_package("omegaconf")
    old = node.folder / "old-env" / "lib" / "site-packages"
    old.mkdir(parents=True)
    version = package / "version.py"
    version.write_text(version.read_text().replace('__version__ = "2.4.0"', '__version__ = "2.3.1"'))
    for found in list(node.path.iterdir()):
        shutil.move(found, old / found.name.replace("-2.4.0.", "-2.3.1."))
    metadata = old / "omegaconf-2.3.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 2.4.0", "Version: 2.3.1"))
    node.code = f"import sys\nsys.path.insert(0, {str(old)!r})\n"


def other_python(node: Node) -> None:
    """The node's image has another minor version of Python."""
    node.code = """
import collections, sys
sys.version = "3.10.14 (main, Jun  8 2024, 18:29:57) [GCC 11.4.0]"
Version = collections.namedtuple("version_info", "major minor micro releaselevel serial")
sys.version_info = Version(3, 10, 14, "final", 0)
sys.hexversion = 0x030A0EF0
"""


def import_crashes(node: Node) -> None:
    """An extension module built for another C++ runtime: importing it kills the process, there is no traceback."""
    node.install("accelerate", "1.15.0", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")


# The job's code and its environment


def interrupted_copy(node: Node) -> None:
    """rsync of the frozen code was cut off: its temporary file lies there, the module does not."""
    module = node.run / "code" / "module.py"
    module.rename(module.with_name(".module.py.Xq3v9T"))


def other_protocol(node: Node) -> None:
    """Somebody's experiment in /etc/profile.d: ranks that disagree about NCCL's protocol hang or crash."""
    node.environment["NCCL_PROTO"] = "LL"


# Pins


def write_pins(node: Node, **changed: object) -> None:
    """Write every pin and the list of them anew, so that they agree with each other; changed: fields of every file."""
    listed = json.loads((node.pins / kernel_pins.LIST).read_text())
    for kernel, entry in listed["kernels"].items():
        file = node.pins / f"{kernel}.json"
        runfolder.write_json(file, json.loads(file.read_text()) | changed)
        listed["kernels"][kernel] = kernel_pins.entry(node.pins, kernel, entry["kind"])
    listed |= {name: value for name, value in changed.items() if name in listed}
    runfolder.write_json(node.pins / kernel_pins.LIST, listed)


def tuned_alone(node: Node) -> None:
    """Pins made anew on this node: valid, complete, consistent, and other than everybody else's."""
    write_pins(
        node,
        date="2026-12-02",
        default_config={"kwargs": {"BK": 32}, "num_warps": 8, "num_stages": 2, "num_ctas": 1},
    )


def pins_of_h100(node: Node) -> None:
    """Pins copied from the cluster's other partition."""
    write_pins(node, gpu="NVIDIA H100 80GB HBM3")


def pins_without_ctas(node: Node) -> None:
    """A field that this Triton needs is missing, so that FLA would silently search instead."""
    write_pins(node, default_config={"kwargs": {"BK": 64}, "num_warps": 4, "num_stages": 3})


# GPU


def left_in_mig(node: Node) -> None:
    """The node served notebooks before: MIG is still on, and a rank gets a slice of the GPU."""
    node.gpus[0]["mig.mode.current"] = "Enabled"
    node.torch["devices"] = ["NVIDIA H200 MIG 1g.18gb"]


def other_board(node: Node) -> None:
    """A PCIe board among SXM ones; its name only begins alike."""
    node.gpus[0] |= {
        "name": "NVIDIA H200 NVL",
        "vbios_version": "96.00.CD.00.02",
        "power.limit": "600.00",
        "power.default_limit": "600.00",
        "power.max_limit": "600.00",
    }
    node.torch["devices"] = ["NVIDIA H200 NVL"]


def memory_of_nobody(node: Node) -> None:
    """A killed job's memory was never given back: nvidia-smi shows it in use, and no process."""
    node.gpus[0] |= {"memory.used": "61440", "memory.free": "81720"}


def no_fabric_manager(node: Node) -> None:
    """nvidia-fabricmanager is not running: nvidia-smi is content, CUDA cannot be initialised (error 802)."""
    node.torch["devices"] = []


def sensors_lost(node: Node) -> None:
    """A GPU in trouble: nvidia-smi ends well but says [Unknown Error] where it cannot read the device."""
    for name in ("power.draw", "temperature.gpu", "clocks.sm", "clocks.current.sm", "utilization.gpu"):
        node.gpus[0][name] = "[Unknown Error]"


def few_lanes(node: Node) -> None:
    """A badly seated riser: the link came up with 4 of 16 lanes."""
    node.gpus[0]["pcie.link.width.current"] = "4"


# Host


def stale_name(node: Node) -> None:
    """The name server has the address of before the move to another rack, which no interface has any more."""
    node.addresses = ["10.0.0.99"]


def one_lane(node: Node) -> None:
    """A damaged cable: the InfiniBand port is active with one lane of four."""
    node.infiniband["mlx5_0/1"] = ("4: ACTIVE", "100 Gb/sec (1X NDR)")


def default_memory(node: Node) -> None:
    """This partition's DefMemPerCPU: the job's cgroup holds 2 GiB on this node."""
    node.memory_gib = 2.0


def shm_of_a_container(node: Node) -> None:
    """The container runtime's default /dev/shm."""
    node.disks["/dev/shm"] = (64 << 20, 1 << 20)


def no_inodes(node: Node) -> None:
    """Millions of small files: plenty of bytes, no inode is left for the run folder."""
    node.disks[str(node.run)] = (900 << 30, 0)


def pruned_blob(node: Node) -> None:
    """The model's folder is links into a download cache, and this node's clean-up removed a blob."""
    shard = node.model / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(node.folder / "hub" / "blobs" / "9f2c41d0a7")


def other_data(node: Node) -> None:
    """This node's copy of the data is last week's: same size, one label corrected since."""
    text = node.train.read_text()
    other = text.replace("messages", "massages")
    assert len(other) == len(text)
    assert other != text
    node.train.write_text(other)


def cache_on_beegfs(node: Node) -> None:
    """A profile of this node moves Triton's cache to the parallel file system."""
    cache = node.folder / "scratch" / "triton"
    cache.mkdir(parents=True)
    node.mounts = [(str(node.folder / "scratch"), "beegfs", "beegfs_nodev")]
    node.environment["TRITON_CACHE_DIR"] = str(cache)


def slow_clock(node: Node) -> None:
    """chronyd died after the last boot; the hardware clock is ten minutes late."""
    node.clock_s = -600.0


# Collectives


def illegal_instruction(node: Node) -> None:
    """An older CPU: the collective library's first vector instruction kills the rank."""
    node.code = "if 'preflight.collectives' in IN:\n    import os, signal\n    os.kill(os.getpid(), signal.SIGILL)\n"


# Harmless


def bytecode(node: Node) -> None:
    """Somebody looked into the frozen code with Python: it left its byte code there."""
    cache = node.run / "code" / "__pycache__"
    cache.mkdir()
    (cache / "module.cpython-311.pyc").write_bytes(os.urandom(64))


def unseen_user_site(node: Node) -> None:
    """An old peft in ~/.local, which the virtual environment's Python never looks at; this home is node-local."""
    site = node.folder / "home" / ".local" / "lib" / "python3.11" / "site-packages" / "peft"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text('__version__ = "0.10.0"\n')
    node.environment["HOME"] = str(node.folder / "home")


def just_used(node: Node) -> None:
    """The previous job ended a minute ago: warm, clocks still up; another board of the same model."""
    node.gpus[0] |= {
        "uuid": "GPU-7c1e5f0a-3b1d-4d2e-9a55-0f6b8c2d1e44",
        "temperature.gpu": "58",
        "clocks.sm": "1980",
        "clocks.current.sm": "1980",
        "power.draw": "119.6",
        "memory.used": "9",
        "memory.free": "143151",
    }


def corrected_errors(node: Node) -> None:
    """A few errors that ECC has corrected, as it should."""
    node.gpus[0]["ecc.errors.corrected.volatile.total"] = "7"


def idle_bridge(node: Node) -> None:
    """Docker is installed here: a bridge without a container."""
    node.interfaces = {
        **INTERFACES,
        "docker0": {"up": False, "mtu": 1500, "speed": 0, "addresses": ["172.17.0.1"]},
    }


def both_protocols(node: Node) -> None:
    """The name resolves to an IPv4 and an IPv6 address of the same interface."""
    node.interfaces = {**INTERFACES, "eth0": {**INTERFACES["eth0"], "addresses": ["10.0.0.7", "fd00:10::7"]}}
    node.addresses = ["10.0.0.7", "fd00:10::7"]


def staged_data(node: Node) -> None:
    """The data is a link to a copy on the node's own disk, with the same bytes and a later date."""
    staged = node.folder / "nvme" / "train.jsonl"
    staged.parent.mkdir()
    shutil.copy(node.train, staged)
    node.train.unlink()
    node.train.symlink_to(staged)


def a_little_ahead(node: Node) -> None:
    """NTP holds clocks to some milliseconds, a network hiccup makes it a few tenths of a second for a while."""
    node.clock_s = 0.3


def own_job_variables(node: Node) -> None:
    """What Slurm and a login give each node for itself."""
    node.environment |= {
        "SLURM_NODEID": "2",
        "SLURM_TASK_PID": "48211",
        "XDG_RUNTIME_DIR": "/run/user/1000",
        "SSH_CONNECTION": "10.0.0.1 53122 10.0.0.7 22",
    }


CASES = [
    Fault("peft half upgraded", half_upgraded, on="node1", family="imports", says=("0.19.1",)),
    Fault("a modelling file emptied by a crash", emptied_by_a_crash, on="node0", family="imports"),
    Fault("a .pth file puts an old environment first", path_file, on="node2", family="imports", says=("2.3.1",)),
    Fault("another minor version of Python", other_python, on="node1", family="imports", says=("3.10.14",)),
    Fault("an import kills the process", import_crashes, on="node0", family="imports"),
    Fault("the copy of the code was cut off", interrupted_copy, on="node1", family="code"),
    Fault("NCCL_PROTO on one node", other_protocol, on="node2", family="environment", says=("NCCL_PROTO",)),
    Fault("pins tuned anew on one node", tuned_alone, on="node0", family="pins"),
    Fault("pins of the H100 partition", pins_of_h100, on="node1", family="pins", says=("H100",)),
    Fault("pins without num_ctas", pins_without_ctas, on="node2", family="pins", says=("num_ctas",)),
    Fault("MIG left on", left_in_mig, on="node1", family="device", says=("MIG",)),
    Fault("an H200 NVL among SXM boards", other_board, on="node0", family="device", also=("pins",), says=("H200 NVL",)),
    Fault("GPU memory that no process holds", memory_of_nobody, on="node2", family="device"),
    Fault("no fabric manager", no_fabric_manager, on="node1", family="device"),
    Fault("nvidia-smi says Unknown Error", sensors_lost, on="node0", family="device"),
    Fault("4 of 16 PCIe lanes", few_lanes, on="node2", family="device"),
    Fault("the name has an address of no interface", stale_name, on="node1", family="host", says=("10.0.0.99",)),
    Fault("1 of 4 InfiniBand lanes", one_lane, on="node0", family="host"),
    Fault("2 GiB of memory in the cgroup", default_memory, on="node2", family="host"),
    Fault("a container's /dev/shm", shm_of_a_container, on="node1", family="host", says=("/dev/shm",)),
    Fault("no inodes for the run folder", no_inodes, on="node0", family="host", says=("inode",)),
    Fault("a weight file is a dangling link", pruned_blob, on="node2", family="host", says=("model-00001-of-00002",)),
    Fault("data of the same size, other text", other_data, on="node0", family="host", says=("train.jsonl",)),
    Fault(
        "Triton cache on BeeGFS", cache_on_beegfs, on="node1", family="host", also=("environment",), says=("beegfs",)
    ),
    Fault("a clock ten minutes late", slow_clock, on="node0", family="host"),
    Fault("the rank dies of an illegal instruction", illegal_instruction, on="node1", family="collectives"),
    Control("byte code beside the frozen code", bytecode, on="node1"),
    Control("a user site that Python does not see", unseen_user_site, on="node0"),
    Control("a GPU that was just used", just_used, on="node2"),
    Control("corrected ECC errors", corrected_errors, on="node0"),
    Control("an idle bridge", idle_bridge, on="node1"),
    Control("IPv4 and IPv6 of one interface", both_protocols, on="node2"),
    Control("staged data behind a link", staged_data, on="node0"),
    Control("0.3 s ahead", a_little_ahead, on="node1", collectives=True),
    Control("variables of the node's own", own_job_variables, on="node2"),
]
