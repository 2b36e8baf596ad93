"""The faults and the controls of `preflight_bench.py`, as data."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests import standin

GPU = "NVIDIA H200"
VERSIONS = {"triton": "3.7.1", "fla": "0.6.0"}
ROW = "0, NVIDIA H200, GPU-1, 580.159.04, 143771, 4, Enabled, 0, 0x0, Enabled, Disabled, 345, 1980, 78.2, 37, 0"
SMI = f"case $1 in --query-gpu*) echo '{ROW}';; esac"

HEALTHY = """
if 'preflight.imports' in IN:
    import preflight.imports as i
    own_describe, versions = i.describe, {'triton': '3.7.1', 'fla': '0.6.0'}
    here = {'absent': False, 'folder': '/opt/env', 'from': 'site', 'editable': False}
    def describe(package):
        if package not in versions:
            return own_describe(package)
        version, path = versions[package], f'/opt/env/{package}/__init__.py'
        return {'package': package, 'declared': version, 'version': version, 'path': path, **here}
    i.describe = describe
if 'preflight.torch_facts' in IN:
    import preflight.torch_facts as t
    real_facts = t.facts
    gpu = {'devices': ['NVIDIA H200'], 'capability': [9, 0], 'cuda': '13.0', 'nccl': True}
    t.facts = lambda: real_facts() | gpu
if 'preflight.host' in IN:
    import socket
    import preflight.host as h
    import preflight.files as f
    socket.getaddrinfo = lambda *_: [(2, 1, 6, '', ('10.0.0.7', 0))]
"""
"""What every node's programs run first: a GPU that torch sees, and a name that other nodes can reach."""

IN_HOST = "if 'preflight.host' in IN:\n    "
"""Beginning of a fault within the host checks."""


def nothing(folder: Path) -> None:
    """No files to plant."""


@dataclass(frozen=True)
class Case:
    """One fault, or a control where `expected` is empty.

    expected: checks that may blame the node. code: run first by the node's programs. variables: of its environment,
    `{folder}` being the case's. plant: puts files there. spoil: changes the node's answer.
    """

    name: str
    expected: frozenset[str]
    code: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    plant: Callable[[Path], None] = nothing
    spoil: Callable[[Path], None] | None = None


def fault(name: str, *expected: str, **how: object) -> Case:
    return Case(name, frozenset(expected), **how)  # type: ignore[arg-type]


def control(name: str, **how: object) -> Case:
    return Case(name, frozenset(), **how)  # type: ignore[arg-type]


def module(name: str, source: str) -> Callable[[Path], None]:
    """A bare module on PYTHONPATH."""

    def plant(folder: Path) -> None:
        (folder / "path" / name).mkdir(parents=True, exist_ok=True)
        (folder / "path" / name / "__init__.py").write_text(source)

    return plant


def installed(name: str, version: str, source: str = "") -> Callable[[Path], None]:
    """A package with its metadata on PYTHONPATH, in place of one that lies there."""

    def plant(folder: Path) -> None:
        for old in (folder / "path").glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        standin.package(folder / "path", name, version, source)

    return plant


def edited_copy(folder: Path) -> None:
    """submitit as it was installed, with one line added."""
    found = importlib.metadata.distribution("submitit")
    for file in found.files or []:
        source, target = Path(str(file.locate())), folder / "path" / str(file)
        if file.parts[0] != ".." and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    with (folder / "path/submitit/helpers.py").open("a") as stream:
        stream.write("\n# edited\n")


def smi(script: str) -> Callable[[Path], None]:
    """Another nvidia-smi."""

    def plant(folder: Path) -> None:
        standin.program(folder / "bin", "nvidia-smi", script)

    return plant


def gpu_row(old: str, new: str) -> Callable[[Path], None]:
    """nvidia-smi with one value changed."""
    assert ROW.count(old) == 1
    return smi(SMI.replace(ROW, ROW.replace(old, new)))


def mounts(kind: str, point: str) -> Callable[[Path], None]:
    """A mount table that says that a folder of the case lies on a file system of this kind."""

    def plant(folder: Path) -> None:
        own = folder / "proc" / "self"
        own.mkdir(parents=True)
        (folder / point).mkdir(exist_ok=True)
        table = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {folder / point} rw - {kind} filer:/x rw\n"
        (own / "mountinfo").write_text(table)
        (own / "maps").write_text("")

    return plant


def pin(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something done to the folder of pins."""
    return lambda folder: change(folder / "pins")


def edit_pin(pins: Path) -> None:
    path = pins / "chunk_fwd_kernel_o.json"
    document = json.loads(path.read_text())
    document["default_config"]["num_warps"] = 8
    path.write_text(json.dumps(document))


def relist(name: str, value: str) -> Callable[[Path], None]:
    def change(pins: Path) -> None:
        path = pins / "pins.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return pin(change)


def library(folder: Path) -> None:
    """A network plugin of the node's own: any library under such a name."""
    (folder / "net").mkdir()
    shutil.copy("/lib/x86_64-linux-gnu/libz.so.1", folder / "net" / "libnccl-net.so")


def answer(**changes: object) -> Callable[[Path], None]:
    """Change the node's answer itself."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def unlink(path: Path) -> None:
    path.unlink()


def garbage(path: Path) -> None:
    path.write_text("{")


SPACE = "import types, shutil; shutil.disk_usage = lambda f: types.SimpleNamespace(free={free})"

CASES = [
    fault("shadowed module", "import.omegaconf", "preflight.config",
          plant=module("omegaconf", "__version__ = '2.4.0'")),
    fault("wrong version", "import.peft", plant=installed("peft", "0.20.0")),
    fault("declared is not imported", "import.peft", plant=installed("peft", "0.21.2", "__version__ = '0.19.0'")),
    fault("import raises", "import.accelerate", "import.peft",
          plant=module("accelerate", "raise ImportError('libfoo.so.3')")),
    fault("import is killed", "import.submitit", plant=module("submitit", "import os; os.kill(os.getpid(), 11)")),
    fault("edited package", "import.submitit", plant=edited_copy),
    fault("half-installed tilelang", "import.tilelang", "known.tilelang_half_installed",
          plant=module("tilelang", "raise OSError('libz3.so: cannot open shared object file')")),
    fault("known-bad transformers", "import.transformers", "import.peft", "known.transformers_drops_boundaries",
          plant=installed("transformers", "5.4.0")),
    fault("known-bad triton on Hopper", "import.triton", "known.triton_hopper_gradients", "pins.files",
          code="if 'preflight.imports' in IN:\n    versions['triton'] = '3.6.0'"),
    fault("another Python", "python.version", code="import platform; platform.python_version = lambda: '3.12.1'"),
    fault("old code", "code.snapshot", plant=lambda folder: unlink(folder / "run/code/module.py")),
    fault("network plugin from elsewhere", "libraries.mapped", "host.environment", plant=library,
          variables={"LD_PRELOAD": "{folder}/net/libnccl-net.so"}),
    fault("cache on NFS", "host.cache", plant=mounts("nfs4", "home"),
          variables={"PREFLIGHT_PROC": "{folder}/proc", "TRITON_CACHE_DIR": "{folder}/home/.triton"}),
    fault("temporary files on Lustre", "host.cache", plant=mounts("lustre", "scratch"),
          variables={"PREFLIGHT_PROC": "{folder}/proc", "TMPDIR": "{folder}/scratch"}),
    fault("loopback name", "host.name",
          code=IN_HOST + "socket.getaddrinfo = lambda *_: [(2, 1, 6, '', ('127.0.1.1', 0))]"),
    fault("name does not resolve", "host.name",
          code=IN_HOST + "def lost(*_): raise socket.gaierror(-2, 'Name or service not known')\n"
          "    socket.getaddrinfo = lost"),
    fault("full disk", "host.disk", "host.cache", "host.shm", code=IN_HOST + SPACE.format(free="10 << 20")),
    fault("no inodes", "host.disk", "host.cache",
          code=IN_HOST + "import os, types; s = os.statvfs; os.statvfs = lambda f: types.SimpleNamespace("
          "f_files=9, f_favail=0, **{n: getattr(s(f), n) for n in ('f_bavail', 'f_bfree', 'f_blocks', 'f_frsize')})"),
    fault("little shared memory", "host.shm",
          code=IN_HOST + "import shutil, types; d = shutil.disk_usage; shutil.disk_usage = lambda f: d(f) "
          "if str(f) != '/dev/shm' else types.SimpleNamespace(free=64 << 20)"),
    fault("few open files", "host.limits", code=IN_HOST + "import resource; resource.setrlimit(7, (256, 256))"),
    fault("little memory", "host.memory",
          code=IN_HOST + "import psutil, types\n"
          "    psutil.virtual_memory = lambda: types.SimpleNamespace(available=1 << 20)"),
    fault("clock behind the file server", "host.clock",
          code=IN_HOST + "import time; now = time.time; time.time = lambda: now() - 600"),
    fault("answer from the future", "host.clock", spoil=answer(wall=time.time() + 86400)),
    fault("data missing", "host.files", plant=lambda folder: unlink(folder / "train.jsonl")),
    fault("other data", "host.files", plant=lambda folder: garbage(folder / "train.jsonl")),
    fault("file server hangs", "host.files",
          code=IN_HOST + "import time; h.CHECKS['files'] = lambda setting: time.sleep(600)"),
    fault("NCCL set otherwise", "host.environment", variables={"NCCL_P2P_DISABLE": "1"}),
    fault("nvidia-smi hangs", "device.gpus", plant=smi("sleep 600")),
    fault("nvidia-smi fails", "device.gpus", plant=smi("echo 'driver/library version mismatch'; exit 18")),
    fault("GPU in use", "device.busy",
          plant=smi(SMI.replace("esac", "--query-compute*) echo 'GPU-1, 4711, 9000';; esac"))),
    fault("GPU memory errors", "device.ecc", plant=gpu_row("Enabled, 0,", "Enabled, 3,")),
    fault("GPU throttled", "device.throttled", plant=gpu_row("0x0", "0x40")),
    fault("another driver", "device.gpus", "known.cuda13_old_driver", plant=gpu_row("580.159.04", "575.57.08")),
    fault("GPU draws power at rest", "device.power", plant=gpu_row("78.2", "412.0")),
    fault("no GPU", "device.gpus", plant=smi("exit 0")),
    fault("pin missing", "pins.files", plant=pin(lambda pins: unlink(pins / "l2norm_fwd_kernel.json"))),
    fault("pin edited", "pins.files", plant=pin(edit_pin)),
    fault("pins of another Triton", "pins.files", plant=relist("triton", "3.6.0")),
    fault("pins of another GPU", "pins.files", plant=relist("gpu", "NVIDIA H100")),
    fault("no answer", "node.answer", spoil=unlink),
    fault("half an answer", "node.answer", spoil=garbage),
    control("healthy"),
    control("healthy again"),
    control("another temporary folder", variables={"TMPDIR": "/var/tmp"}),
    control("another GPU visible", variables={"CUDA_VISIBLE_DEVICES": "0"}),
    control("home on NFS, caches local", plant=mounts("nfs4", "home"), variables={"PREFLIGHT_PROC": "{folder}/proc"}),
    control("secrets in the environment",
            variables={"HF_TOKEN": "planted-secret-1", "WANDB_API_KEY": "planted-secret-2"}),
    control("capped by power", plant=gpu_row("0x0", "0x5")),
    control("another temperature and power", plant=gpu_row("78.2, 37", "96.9, 51")),
    control("counters not kept", plant=gpu_row("Enabled, 0,", "Enabled, [N/A],")),
    control("another host name", code="import socket; socket.gethostname = lambda: 'node2.cluster'"),
    control("answers a minute later", spoil=answer(wall=time.time() - 60)),
]  # fmt: skip

COLLECTIVES = [
    fault("slow pair", "collective.pair", code=standin.SLOW_NODE),
    fault("pair does not answer", "collective.pair", code=standin.DEAF_IN_PAIRS),
    fault("rank never joins", "collective.join"),
    fault("rank stops in a collective", "collective.values", code=standin.STUCK),
    fault("rank is killed", "collective.values", code=standin.KILLED),
    fault("wrong values", "collective.values", code=standin.WRONG_VALUES),
    fault("clock an hour behind", "host.clock", code=standin.LATE_CLOCK),
    control("three healthy ranks"),
]
"""Three ranks, the fault in the last one."""
