"""What one node says of itself, from captured or planted facts."""

from __future__ import annotations

import ast
import errno
import os
import resource
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.errors import UserError
from configs.schema import Config, SlurmConfig
from preflight import cgroup, environment, files, host, mounts, names, network, programs
from preflight.setting import Setting

MOUNTINFO = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 0:35 / /home rw,relatime shared:20 - nfs4 filer:/home rw,vers=4.2
41 40 0:36 / /home/me/with\\040space rw - tmpfs tmpfs rw
42 22 0:37 / /scratch rw - lustre mds@tcp:/scratch rw
43 22 0:38 / /work rw - nfs filer:/work rw
44 43 0:39 / /work rw - xfs /dev/nvme1n1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/tmp/x", "ext4", False),
        ("/home/me/.triton", "nfs4", True),
        ("/home/me/with space/c", "tmpfs", False),
        ("/scratch/a", "lustre", True),
        ("/work/a", "xfs", False),
        ("/homework", "ext4", False),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_deepest_mount(path: str, kind: str, shared: bool) -> None:
    mount = mounts.of(Path(path), mounts.parse(MOUNTINFO))
    assert mount is not None
    assert (mount.kind, mount.shared) == (kind, shared)


@pytest.fixture
def shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the node's mount table says lies on NFS."""
    cache = tmp_path / "home" / "cache"
    cache.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    table = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {cache.parent} rw - nfs4 filer:/home rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(table)
    monkeypatch.setenv("PREFLIGHT_PROC", str(tmp_path / "proc"))
    for name in host.CACHES:
        monkeypatch.delenv(name, raising=False)
    return cache


@pytest.mark.parametrize("name", host.CACHES)
def test_r41_a_cache_on_a_network_file_system(shared_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert host.check_cache(Setting()).state == "pass"
    monkeypatch.setenv(name, str(shared_cache / "not" / "yet"))
    monkeypatch.setattr("tempfile.tempdir", None)
    finding = host.check_cache(Setting())
    assert finding.state == "fail"
    for words in (name, str(shared_cache), "network file system", "nfs4", "filer:/home"):
        assert words in finding.found


def test_r41_fails_without_the_mount_table(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared_cache))
    monkeypatch.setattr("preflight.mounts.NETWORK", frozenset())
    assert host.check_cache(Setting()).state == "pass"


def test_little_shared_memory_matters_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    gpus = Setting(Config(slurm=SlurmConfig(gpus_per_node=8)), Path("/run"))
    assert host.check_shm(Setting()).state == "pass"
    assert host.check_shm(gpus).state == "fail"


GIB = 1 << 30


def available(monkeypatch: pytest.MonkeyPatch, memory: int, limit: int | None = None) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=memory))
    monkeypatch.setattr("preflight.cgroup.memory_limit", lambda: limit)


def ranks(number: int, gpus: int) -> Setting:
    return Setting(Config(slurm=SlurmConfig(tasks_per_node=number, gpus_per_node=gpus)), Path("/run"))


def test_memory_is_what_the_cgroup_leaves_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 900 * GIB, 16 * GIB)
    assert host.check_memory(ranks(4, 4)).facts == {"gib": 16.0}
    finding = host.check_memory(ranks(8, 8))
    assert finding.state == "fail"
    assert finding.found == (
        "16.0 GiB of memory is the limit of the job's cgroup, 32 are wanted (4 for each of 8 rank(s))"
    )
    assert "slurm.mem" in finding.advice
    assert "DefMemPerCPU" in finding.advice
    available(monkeypatch, 900 * GIB, 1 << 62)
    assert host.check_memory(ranks(8, 8)).found == "900.0 GiB of memory available"


def test_little_memory_by_itself_and_for_ranks_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 2 * GIB)
    assert host.check_memory(Setting()).state == "pass"
    assert host.check_memory(ranks(2, 0)).state == "pass"
    assert host.check_memory(ranks(1, 1)).state == "fail"
    available(monkeypatch, GIB // 2)
    assert "1 are wanted (preflight.min_free_memory_gib)" in host.check_memory(Setting()).found


@pytest.mark.parametrize(
    ("table", "limits", "found"),
    [
        ("0::/system.slice/job_7/step_0/user\n", {"system.slice/job_7/memory.max": "2147483648"}, 2 * GIB),
        ("0::/a/b\n", {"a/memory.max": "4096", "a/b/memory.max": "8192"}, 4096),
        ("0::/a/b\n", {"a/memory.max": "max", "a/b/memory.max": "max"}, None),
        ("9:cpu,memory:/slurm/job_7\n0::/\n", {"memory/slurm/job_7/memory.limit_in_bytes": "4096"}, 4096),
        ("4:memory:/docker/of-the-host\n", {"memory/memory.limit_in_bytes": "4096"}, 4096),
        ("3:cpuset:/a\n", {"memory.max": "4096"}, None),
        (None, {"memory.max": "4096"}, None),
    ],
)
def test_the_least_memory_limit_from_the_group_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str | None, limits: dict[str, str], found: int | None
) -> None:
    monkeypatch.setenv("PREFLIGHT_PROC", str(tmp_path / "proc"))
    monkeypatch.setenv("PREFLIGHT_SYS", str(tmp_path / "sys"))
    texts = {tmp_path / "sys/fs/cgroup" / name: f"{value}\n" for name, value in limits.items()}
    texts |= {tmp_path / "proc/self/cgroup": table} if table else {}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup.memory_limit() == found


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (256, 256))
    finding = host.check_limits(Setting())
    assert finding.state == "fail"
    assert "nofile 256" in finding.found


def test_no_room_and_no_inodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = Setting(run=tmp_path)
    assert host.check_disk(setting).state == "pass"
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda folder: SimpleNamespace(
            f_files=10**6, f_favail=3, f_bavail=9**9, f_blocks=9**9, f_bfree=9**9, f_frsize=9
        ),
    )
    assert "only 3 inodes" in host.check_disk(setting).found
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    assert host.check_disk(setting).state == "fail"


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a quota or a read-only mount would have it."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)
    finding = host.check_disk(Setting(run=tmp_path))
    assert finding.state == "fail"
    assert f"{tmp_path} cannot be written: Disk quota exceeded" in finding.found
    assert not list(tmp_path.iterdir())


def test_kernels_cannot_be_loaded_from_a_noexec_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def noexec(folder: str | Path) -> os.statvfs_result:
        values = list(real(folder)[:10])
        return os.statvfs_result((*values[:8], values[8] | os.ST_NOEXEC, values[9]))

    monkeypatch.setattr(os, "statvfs", noexec)
    assert host.check_cache(Setting(run=Path("/tmp"))).state == "pass"
    finding = host.check_cache(Setting(Config(slurm=SlurmConfig(gpus_per_node=1)), Path("/tmp")))
    assert finding.state == "fail"
    assert "noexec" in finding.found


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("eth", True),
        ("=eth0", True),
        ("=eth", False),
        ("ib", False),
        ("ib,eth", True),
        ("^lo", True),
        ("^lo,eth", False),
    ],
)
def test_interfaces_that_variables_name(monkeypatch: pytest.MonkeyPatch, wanted: str, found: bool) -> None:
    up = SimpleNamespace(isup=True, mtu=9000, speed=100000)
    down = SimpleNamespace(isup=False, mtu=4092, speed=0)
    monkeypatch.setattr("psutil.net_if_stats", lambda: {"lo": up, "eth0": up, "ib0": down})
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [SimpleNamespace(address="10.0.0.7")]})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", ("10.0.0.7", 0))])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", wanted)
    finding = network.check_network(Setting())
    assert finding.state == ("pass" if found else "fail")
    if found:
        assert (finding.facts["interface"], finding.facts["mtu"], finding.facts["speed_mbit"]) == ("eth0", 9000, 100000)
    else:
        assert f"NCCL_SOCKET_IFNAME is {wanted!r}" in finding.found


def test_states_of_infiniband_ports(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert network.infiniband(tmp_path) == {"mlx5_0/1": "ACTIVE 400 Gb/sec (4X NDR)"}
    assert network.infiniband(tmp_path / "none") == {}


def test_a_machine_by_itself_has_no_run_folder_to_agree_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    alone, run = host.check_clock(Setting()), host.check_clock(Setting(run=tmp_path))
    assert alone.found == f"the clock agrees with that of the files in {tmp_path}"
    assert run.found == "the clock agrees with the run folder's"


def test_a_clock_far_from_the_file_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert host.check_clock(Setting(run=tmp_path)).state == "pass"
    now = host.time.time()
    monkeypatch.setattr(host.time, "time", lambda: now + 90)
    finding = host.check_clock(Setting(run=tmp_path))
    assert finding.state == "fail"
    assert "90.0 s ahead" in finding.found


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert network.check_name(Setting()).state == "fail"


@pytest.mark.parametrize(("address", "interface"), [("10.0.0.7", "eth0"), ("10.0.0.99", None)])
def test_the_interface_that_has_the_address_of_the_host_name(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str | None
) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [SimpleNamespace(address="10.0.0.7")]})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", (address, 0))])
    finding = network.check_name(Setting())
    assert finding.state == "pass"
    assert finding.facts == {"addresses": [address], "loopback": False, "interface": interface}


def test_secrets_never_enter_a_report() -> None:
    planted = {
        "HF_TOKEN": "hf_abcdefghijklmnop1234",
        "WANDB_API_KEY": "0123456789abcdef0123",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
        "DB_PASSWORD": "correct horse",
        "https_proxy": "http://me:hunter2222@proxy:3128",
        "SOME_NAME": "glpat-ABCDEFGHIJKLMNOPQRST",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/opt/code",
    }
    assert environment.shown(planted) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/opt/code"}
    leaked = {
        "found": "could not read https://user:sesame99@host/x with correct horse",
        "facts": [{"error": f"401: token {value}"} for value in planted.values()],
        "log": "Authorization: Bearer abc.def.ghi, ghp_abcdefghijklmnop1234",
    }
    clean = repr(environment.without_secrets(leaked, planted))
    for secret in (*planted.values(), "sesame99", "hunter2222", "abc.def.ghi", "ghp_abcdefghijklmnop1234"):
        assert (secret in clean) == (secret in ("INFO", "/opt/code")), secret


def test_names_that_preflight_allow_may_hold() -> None:
    """Every name in the sources, and nothing else: what is mistyped would allow nothing, in silence."""
    texts = [
        node.args[0].value
        for path in Path(files.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
        and (getattr(node.func, "id", "") in ("Finding", "_passed") or node.args[0].value == "host.disk")
    ]  # fmt: skip
    assert set(texts) == names.CHECKS
    assert {f"host.{name}" for name in host.CHECKS} <= names.CHECKS
    names.check_allowed(["host.memory", "import.flash_attn", "known.triton_hopper_gradients"])
    with pytest.raises(UserError, match=r"no check is called 'host.memry': did you mean host.memory\?"):
        names.check_allowed(["host.memory", "host.memry"])
    for wrong in ("import.", "known.nothing_such", "", "host"):
        with pytest.raises(UserError, match="no check is called"):
            names.check_allowed([wrong])


STAYS = """
import threading, time
{name}
def main():
    threading.Thread(target=time.sleep, args=(600,)).start()
    print('{{"package": "p"}}')
{ending}
"""
"""A program that imported something which keeps a thread."""


def test_a_program_that_has_answered_ends_whatever_it_imported() -> None:
    source = STAYS.format(name="from preflight.programs import answer_and_end", ending="answer_and_end(main)")
    answer = programs.ask([sys.executable, "-c", source], 60)
    assert (answer.status, answer.documents) == (0, [{"package": "p"}])
    answer = programs.ask([sys.executable, "-c", STAYS.format(name="", ending="main()")], 2)
    assert answer.status is None
