"""The faults and the controls of `preflight_bench.py`, as data. How a case is written: `preflight_node.py`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import standin
from tests.bench.preflight_node import Case, Node

IN_HOST = "if 'preflight.host' in IN:\n    "
"""Beginning of a fault within the host checks."""

Plant = Callable[[Node], None]


def nothing(node: Node) -> None:
    """No fault."""


def fault(name: str, plant: Plant, *expected: str) -> Case:
    return Case(name, plant, expected=expected)


def control(name: str, plant: Plant = nothing) -> Case:
    return Case(name, plant)


def has(**values: Any) -> Plant:
    """Facts of the node that are not as on the others; a table's entries are added to it."""

    def plant(node: Node) -> None:
        for name, value in values.items():
            before = getattr(node, name)
            setattr(node, name, before | value if isinstance(before, dict) else value)

    return plant


def gpu(name: str, value: str) -> Plant:
    """Another value of the GPU, by nvidia-smi's name for it."""

    def plant(node: Node) -> None:
        assert name in node.gpus[0]
        node.gpus[0][name] = value

    return plant


def smi(script: str) -> Plant:
    """Another nvidia-smi."""
    return lambda node: node.program("nvidia-smi", script)


def module(name: str, source: str) -> Plant:
    """A bare module on PYTHONPATH."""
    return lambda node: node.module(name, source)


def installed(name: str, version: str, source: str = "") -> Plant:
    """A package with its metadata on PYTHONPATH, in place of one that lies there."""
    return lambda node: node.install(name, version, source)


def edited_copy(node: Node) -> None:
    """submitit as it was installed, with one line added."""
    with (node.copy_package("submitit") / "helpers.py").open("a") as stream:
        stream.write("\n# edited\n")


def edit_pin(node: Node) -> None:
    path = node.pins / "chunk_fwd_kernel_o.json"
    document = json.loads(path.read_text())
    document["default_config"]["num_warps"] = 8
    path.write_text(json.dumps(document))


def relist(name: str, value: str) -> Plant:
    def plant(node: Node) -> None:
        path = node.pins / "pins.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return plant


def library(node: Node) -> None:
    """A network plugin of the node's own: any library under such a name."""
    folder = node.folder / "net"
    folder.mkdir()
    shutil.copy("/lib/x86_64-linux-gnu/libz.so.1", folder / "libnccl-net.so")
    node.environment["LD_PRELOAD"] = str(folder / "libnccl-net.so")


def cache(variable: str, kind: str) -> Plant:
    """A variable that names a folder on a file system of this kind."""

    def plant(node: Node) -> None:
        folder = node.folder / "home"
        folder.mkdir()
        node.mounts = [(str(folder), kind, "filer:/home")]
        node.environment[variable] = str(folder)

    return plant


def home_on_nfs(node: Node) -> None:
    node.mounts = [(str(node.folder / "home"), "nfs4", "filer:/home")]


def scratch(node: Node) -> str:
    folder = node.folder / "scratch"
    folder.mkdir()
    node.environment["TMPDIR"] = str(folder)
    return str(folder)


def read_only_scratch(node: Node) -> None:
    node.read_only.append(scratch(node))


def noexec_scratch(node: Node) -> None:
    node.noexec.append(scratch(node))


def interface(**changes: object) -> Plant:
    """Another state of the interface that the node is reached by."""
    return lambda node: node.interfaces["eth0"].update(changes)


def clock_of_answer(seconds: float) -> Plant:
    """The node's answer bears a time so far ahead of now; below 0: behind."""
    return has(spoil=lambda text: json.dumps(json.loads(text) | {"wall": time.time() + seconds}))


def without(path: Callable[[Node], Path]) -> Plant:
    """A file that is not there."""
    return lambda node: path(node).unlink()


def text(path: Callable[[Node], Path], content: str) -> Plant:
    """A file of other content."""
    return lambda node: [path(node).write_text(content), None][1]


def runs(code: str) -> Plant:
    """What the node's programs run first."""
    return has(code=code)


GIB = 1 << 30

CASES = [
    fault("shadowed module", module("omegaconf", "__version__ = '2.4.0'"), "import.omegaconf", "preflight.config"),
    fault("wrong version", installed("peft", "0.20.0"), "import.peft"),
    fault("declared is not imported", installed("peft", "0.21.2", "__version__ = '0.19.0'"), "import.peft"),
    fault("import raises", module("accelerate", "raise ImportError('libfoo.so.3')"),
          "import.accelerate", "import.peft"),
    fault("import is killed", module("submitit", "import os; os.kill(os.getpid(), 11)"), "import.submitit"),
    fault("edited package", edited_copy, "import.submitit"),
    fault("half-installed tilelang", module("tilelang", "raise OSError('libz3.so: cannot open shared object file')"),
          "import.tilelang", "known.tilelang_half_installed"),
    fault("known-bad transformers", installed("transformers", "5.4.0"),
          "import.transformers", "import.peft", "known.transformers_drops_boundaries"),
    fault("known-bad triton on Hopper", runs("if 'preflight.imports' in IN:\n    versions['triton'] = '3.6.0'"),
          "import.triton", "known.triton_hopper_gradients", "pins.files"),
    fault("another Python", runs("import platform; platform.python_version = lambda: '3.12.1'"), "python.version"),
    fault("old code", without(lambda node: node.run / "code/module.py"), "code.snapshot"),
    fault("network plugin from elsewhere", library, "libraries.mapped", "host.environment"),
    fault("cache on NFS", cache("TRITON_CACHE_DIR", "nfs4"), "host.cache"),
    fault("temporary files on Lustre", cache("TMPDIR", "lustre"), "host.cache"),
    fault("loopback name", has(addresses=["127.0.1.1"]), "host.name"),
    fault("name does not resolve", has(addresses=[]), "host.name"),
    fault("full disk", has(disks={"/": (10 << 20, 10**6)}), "host.disk", "host.cache", "host.shm"),
    fault("no inodes", has(disks={"/": (99 * GIB, 0)}), "host.disk", "host.cache"),
    fault("little shared memory", has(disks={"/dev/shm": (64 << 20, 10**6)}), "host.shm"),
    fault("few open files", has(limits={"nofile": 256}), "host.limits"),
    fault("little memory", has(memory_gib=0.1), "host.memory"),
    fault("clock behind the file server", has(clock_s=-600), "host.clock"),
    fault("answer from the future", clock_of_answer(86400), "host.clock"),
    fault("data missing", without(lambda node: node.train), "host.files"),
    fault("other data", text(lambda node: node.train, "{"), "host.files"),
    fault("model file missing", without(lambda node: node.model / "tokenizer.json"), "host.files"),
    fault("file server hangs", runs(IN_HOST + "import time, preflight.host as h\n"
                                    "    h.CHECKS['files'] = lambda setting: time.sleep(600)"), "host.files"),
    fault("NCCL set otherwise", has(environment={"NCCL_P2P_DISABLE": "1"}), "host.environment"),
    fault("nvidia-smi hangs", smi("sleep 600"), "device.gpus"),
    fault("nvidia-smi fails", smi("echo 'driver/library version mismatch'; exit 18"), "device.gpus"),
    fault("GPU in use", has(gpu_processes=[("GPU-1", 4711, 9000)]), "device.busy"),
    fault("GPU memory errors", gpu("ecc.errors.uncorrected.volatile.total", "3"), "device.ecc"),
    fault("GPU throttled", gpu("clocks_throttle_reasons.active", "0x40"), "device.throttled"),
    fault("another driver", gpu("driver_version", "575.57.08"), "device.gpus", "known.cuda13_old_driver"),
    fault("GPU draws power at rest", gpu("power.draw", "412.0"), "device.power"),
    fault("no GPU", has(gpus=[]), "device.gpus"),
    fault("GPU on half its PCIe lanes", gpu("pcie.link.width.current", "8"), "device.pcie"),
    fault("GPU capped lower than the others", gpu("power.limit", "500.00"), "device.gpus"),
    fault("file system read-only", read_only_scratch, "host.cache"),
    fault("cache mounted noexec", noexec_scratch, "host.cache"),
    fault("interface that is not there", has(environment={"NCCL_SOCKET_IFNAME": "bond0"}),
          "host.network", "host.environment"),
    fault("smaller frames than the others", interface(mtu=1500), "host.network"),
    fault("InfiniBand port down", has(infiniband={"mlx5_0/1": ("1: DOWN", "10 Gb/sec (4X SDR)")}), "host.network"),
    fault("model file not copied to its end",
          text(lambda node: node.model / "model-00001-of-00002.safetensors", "\0" * 69999 + "x"), "host.files"),
    fault("pin missing", without(lambda node: node.pins / "l2norm_fwd_kernel.json"), "pins.files"),
    fault("pin edited", edit_pin, "pins.files"),
    fault("pins of another Triton", relist("triton", "3.6.0"), "pins.files"),
    fault("pins of another GPU", relist("gpu", "NVIDIA H100"), "pins.files"),
    fault("no answer", has(spoil=lambda _: None), "node.answer"),
    fault("half an answer", has(spoil=lambda _: "{"), "node.answer"),
    control("healthy"),
    control("healthy again"),
    control("another temporary folder", has(environment={"TMPDIR": "/var/tmp"})),
    control("another GPU visible", has(environment={"CUDA_VISIBLE_DEVICES": "0"})),
    control("home on NFS, caches local", home_on_nfs),
    control("secrets in the environment",
            has(environment={"HF_TOKEN": "planted-secret-1", "WANDB_API_KEY": "planted-secret-2"})),
    control("capped by power", gpu("clocks_throttle_reasons.active", "0x5")),
    control("another temperature", gpu("temperature.gpu", "51")),
    control("more power at rest", gpu("power.draw", "96.9")),
    control("counters not kept", gpu("ecc.errors.uncorrected.volatile.total", "[N/A]")),
    control("another host name", runs("import socket; socket.gethostname = lambda: 'node2.cluster'")),
    control("an unused interface down", lambda node: node.interfaces["ib0"].update(up=False)),
    control("TMPDIR of its own, empty", lambda node: [scratch(node), None][1]),
    control("answers a minute later", clock_of_answer(-60)),
]  # fmt: skip

COLLECTIVES = [
    fault("slow pair", runs(standin.SLOW_NODE), "collective.pair"),
    fault("pair does not answer", runs(standin.DEAF_IN_PAIRS), "collective.pair"),
    fault("rank never joins", has(joins=False), "collective.join"),
    fault("rank stops in a collective", runs(standin.STUCK), "collective.values"),
    fault("rank is killed", runs(standin.KILLED), "collective.values"),
    fault("wrong values", runs(standin.WRONG_VALUES), "collective.values"),
    fault("clock an hour behind", runs(standin.LATE_CLOCK), "host.clock"),
    control("three healthy ranks"),
]
"""Three ranks, the fault in the last one."""
