"""Writes the independent cases: `python -m tests.hangs.independent.write`. Labels were decided before any was judged.

Frames follow what py-spy shows of gloo waits under FSDP2 (torch 2.13) and what was measured of two H200: a rank that
waits in NCCL spins at 100% and little power, the one that never came is idle. Rings follow the order of collectives of
one update: one agreement on data, per pack the gathers of forward and backward and the scatters, three sums.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from prefix_train.heartbeat import Beat, End
from slurm.evidence import Alarm, Collective, Gpu, Node, Process, Rank, Seen
from slurm.stacks import Frame, Stack, Thread

HERE = Path(__file__).parent
SITE = "/opt/envs/train/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"
RUN = "/data/runs/claims-20260914-081502-9f3c1e"
CODE = f"{RUN}/code"
TRAIN = f"{CODE}/prefix_train"
MODEL = f"{SITE}/transformers/models/qwen3/modeling_qwen3.py"
PLUGIN = "/home/ana/claims/plugins/reweight.py"
FSDP = f"{TORCH}/distributed/fsdp/_fully_shard"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
LIBC, LIBCXX = "/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libstdc++.so.6.0.30"
CPU_LIB, PY_LIB = f"{TORCH}/lib/libtorch_cpu.so", f"{TORCH}/lib/libtorch_python.so"
CUDA_LIB, DRIVER = f"{TORCH}/lib/libtorch_cuda.so", "/usr/lib/x86_64-linux-gnu/libcuda.so.565.57.01"
RUNTIME = f"{SITE}/nvidia/cuda_runtime/lib/libcudart.so.12"
PYTHON = "/opt/envs/train/bin/python3.11"
WALL = 1789374600.0
LAYERS, PACKS, KEPT = 5, 2, 40

Frames = tuple[Frame, ...]


def py(name: str, file: str, line: int) -> Frame:
    return Frame(name, file, line, False)


def c(name: str, file: str) -> Frame:
    return Frame(name, file, 0, True)


START = c("__libc_start_main", LIBC)
OUTER = (py("main", f"{TRAIN}/train.py", 58), py("main", f"{CODE}/slurm/rank.py", 51))
OUTER += (py("<module>", f"{CODE}/slurm/rank.py", 70), START)
CONDITION = (c("0x7f7c2d6a3f16", LIBC), c("pthread_cond_wait", LIBC))
FUTEX = (c("0x7f7c2d6a3f16", LIBC), c("pthread_cond_timedwait", LIBC))
GLOO = (*CONDITION, c("std::condition_variable::wait", LIBCXX), c("c10d::Work::wait", CPU_LIB))
GLOO += (c("pybind11::cpp_function::dispatcher", PY_LIB),)
LOGGED = py("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83)
NO_GRAD = py("context_decorator.<locals>.decorate_context", f"{TORCH}/utils/_contextlib.py", 124)
CALL = tuple(
    py(name, f"{TORCH}/nn/modules/module.py", line)
    for name, line in (("Module._call_impl", 1884), ("Module._wrapped_call_impl", 1778))
)
AUTOGRAD = (
    c("torch::autograd::PyFunctionTensorPreHook::operator()", PY_LIB),
    c("torch::autograd::Engine::evaluate_function", CPU_LIB),
    c("torch::autograd::Engine::thread_main", CPU_LIB),
    c("torch::autograd::Engine::execute_with_graph_task", CPU_LIB),
    c("torch::autograd::python::PythonEngine::execute", PY_LIB),
    c("THPEngine_run_backward", PY_LIB),
    py("_engine_run_backward", f"{TORCH}/autograd/graph.py", 979),
    py("backward", f"{TORCH}/autograd/__init__.py", 395),
    py("Tensor.backward", f"{TORCH}/_tensor.py", 623),
)
UPDATING = py("Life.train", f"{TRAIN}/train.py", 124)
BODY = (
    py("Qwen3Model.forward", MODEL, 407),
    *CALL,
    py("Root._run", f"{TRAIN}/model.py", 164),
    py("Root.forward", f"{TRAIN}/model.py", 151),
    *CALL,
)
CUDA_WAIT = (
    c("clock_gettime", "[vdso]"),
    c("cuStreamSynchronize", DRIVER),
    c("cudaStreamSynchronize", RUNTIME),
    c("at::native::_local_scalar_dense_cuda", CUDA_LIB),
    c("at::_ops::_local_scalar_dense::call", CPU_LIB),
)


@dataclass(frozen=True)
class Call:
    """A collective as the trainer issues it."""

    kind: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    where: str
    phase: str
    update: int
    pack: int = -1


def one(where: str, phase: str, update: int) -> Call:
    return Call("all_reduce", ((1,),), "int64", f"{TRAIN}/{where}", phase, update)


def of_update(update: int, world: int) -> list[Call]:
    """All collectives of one update, the agreement on its data first and on stopping last."""
    calls = [one("feed.py:130", "data", update)]
    for pack in range(PACKS):
        calls += gathers("forward", update, pack, f"{TRAIN}/step.py:77")
        back = f"{TRAIN}/step.py:81"
        for _ in range(LAYERS):
            calls.append(Call("all_gather", ((393216,),), "bfloat16", back, "backward", update, pack))
            calls.append(Call("reduce_scatter", ((393216 * world,),), "float32", back, "backward", update, pack))
        calls.append(Call("reduce_scatter", ((1245184 * world,),), "float32", back, "backward", update, pack))
    calls.append(Call("all_reduce", ((97,),), "float64", f"{TRAIN}/step.py:87", "reduce", update))
    return [*calls, one("train.py:211", "optimizer", update), one("train.py:134", "optimizer", update)]


def gathers(phase: str, update: int, pack: int, where: str) -> list[Call]:
    root = Call("all_gather", ((1245184,),), "bfloat16", where, phase, update, pack)
    return [root] + [replace(root, sizes=((393216,),), where=f"{MODEL}:407")] * LAYERS


def of_evaluation(update: int, packs: int = 3) -> list[Call]:
    calls = []
    for _ in range(packs):
        calls.append(one("evaluate.py:65", "evaluate", update))
        calls += gathers("evaluate", update, -1, f"{TRAIN}/evaluate.py:66")
    return calls


def of_save(update: int, tensors: int = 8) -> list[Call]:
    whole = Call("all_gather", ((196608,),), "float32", f"{TRAIN}/tensors.py:67", "save", update)
    text = Call("all_gather", ((1,),), "int64", f"{TRAIN}/checkpoint.py:119", "save", update)
    texts = [text, replace(text, sizes=((5120,),), dtype="uint8")]
    return [whole] * tensors + texts + [replace(text, where=f"{TRAIN}/checkpoint.py:139")]


def find(calls: Sequence[Call], phase: str, update: int, pack: int = -1, nth: int = 0) -> int:
    at = [place for place, call in enumerate(calls) if (call.phase, call.update, call.pack) == (phase, update, pack)]
    return at[nth]


def waiting(call: Call) -> Frames:
    """Frames of a gloo rank that waits in `call`."""
    name = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}.get(call.kind, call.kind)
    line = {"all_reduce": 3252, "all_gather": 4394, "reduce_scatter": 4885, "barrier": 5356}[call.kind]
    inner = (*GLOO, py(name, C10D, line), LOGGED)
    file, _, number = call.where.rpartition(":")
    short = file.removeprefix(f"{TRAIN}/")
    total = (py("Ranks.sum" if number == "87" else "Ranks.max", f"{TRAIN}/dist.py", 41 if number == "87" else 48),)
    agree = (*total, py("Ranks.any", f"{TRAIN}/dist.py", 53))
    if call.kind == "barrier" or file == PLUGIN:
        under = in_forward(77) if call.phase == "forward" else (*AUTOGRAD, *in_update(81))
        return (*inner, py("balance", PLUGIN, int(number)), *under)
    if short == "feed.py":
        walk = (py("Feed._agree", file, 130), py("Feed.walk", file, 89), py("Life.train", f"{TRAIN}/train.py", 115))
        return (*inner, *agree, *walk, *OUTER)
    if short == "step.py" and number == "87":
        return (*inner, *total, py("update", file, 87), UPDATING, *OUTER)
    if short == "train.py" and number == "211":
        return (*inner, *total, py("Life._report", file, 211), py("Life.train", file, 125), *OUTER)
    if short == "train.py":
        return (*inner, *agree, py("Life.train", file, 134), *OUTER)
    if short == "evaluate.py" and number == "65":
        return (*inner, *agree, py("Ranks.together", f"{TRAIN}/dist.py", 66), *evaluating(65))
    if short in ("checkpoint.py", "tensors.py"):
        through = (py("Ranks.gather", f"{TRAIN}/dist.py", 83),)
        if short == "tensors.py":
            full = f"{TORCH}/distributed/tensor/_api.py"
            through = (py("DTensor.full_tensor", full, 689), py("full_tensors", file, 67))
        line = int(number) if short == "checkpoint.py" else 117
        return (*inner, *through, *saving(line))
    collectives = f"{FSDP}/_fsdp_collectives.py"
    if call.kind == "reduce_scatter":
        chain = (py("DefaultReduceScatter.__call__", collectives, 170), py("foreach_reduce", collectives, 627))
        chain += (NO_GRAD, py("FSDPParamGroup.post_backward", f"{FSDP}/_fsdp_param_group.py", 668))
        return (*inner, *chain, *AUTOGRAD, py("update", f"{TRAIN}/step.py", 81), UPDATING, *OUTER)
    chain = (py("DefaultAllGather.__call__", collectives, 119), py("foreach_all_gather", collectives, 364), NO_GRAD)
    chain += (py("FSDPParamGroup.unshard", f"{FSDP}/_fsdp_param_group.py", 407),)
    if call.phase == "backward":
        chain += (py("FSDPParamGroup.pre_backward", f"{FSDP}/_fsdp_param_group.py", 582),)
        return (*inner, *chain, *AUTOGRAD, py("update", f"{TRAIN}/step.py", 81), UPDATING, *OUTER)
    chain += (py("FSDPParamGroup.pre_forward", f"{FSDP}/_fsdp_param_group.py", 551),)
    chain += (py("FSDPState._pre_forward", f"{FSDP}/_fsdp_state.py", 314), *CALL)
    body = BODY if file == MODEL else ()
    return (*inner, *chain, *body, *(evaluating(66) if call.phase == "evaluate" else in_update(77)))


def in_update(line: int) -> Frames:
    return (py("update", f"{TRAIN}/step.py", line), UPDATING, *OUTER)


def in_forward(line: int) -> Frames:
    return (py("UnitForward._run", f"{TRAIN}/unit.py", 68), *CALL, *BODY, *in_update(line))


def evaluating(line: int) -> Frames:
    frames = [("losses", "evaluate.py", line), ("Heldout.losses", "heldout.py", 53)]
    frames += [("Life._evaluate", "train.py", 236), ("Life.train", "train.py", 130)]
    return (*(py(name, f"{TRAIN}/{file}", at) for name, file, at in frames), *OUTER)


def saving(line: int) -> Frames:
    frames = [("save", "checkpoint.py", line), ("Life._save", "train.py", 244), ("Life.train", "train.py", 136)]
    return (*(py(name, f"{TRAIN}/{file}", at) for name, file, at in frames), *OUTER)


READING = tuple(
    py(name, f"{TRAIN}/{file}", line)
    for name, file, line in (
        ("decode", "images.py", 161),
        ("ImageStore._process", "images.py", 114),
        ("ImageStore.load", "images.py", 107),
        ("ImageRef.load", "images.py", 77),
        ("collate", "collate.py", 147),
    )
)
READ = (py("Path.read_bytes", "/opt/envs/train/lib/python3.11/pathlib.py", 1051), *READING)
POOL = (
    py("Feed._make", f"{TRAIN}/feed.py", 110),
    py("_WorkItem.run", "/opt/envs/train/lib/python3.11/concurrent/futures/thread.py", 58),
    py("_worker", "/opt/envs/train/lib/python3.11/concurrent/futures/thread.py", 83),
    py("Thread.run", "/opt/envs/train/lib/python3.11/threading.py", 982),
)
FOR_BATCHES = (
    *FUTEX,
    c("PyThread_acquire_lock_timed", PYTHON),
    py("Condition.wait", "/opt/envs/train/lib/python3.11/threading.py", 327),
    py("Future.result", "/opt/envs/train/lib/python3.11/concurrent/futures/_base.py", 451),
    py("Feed.walk", f"{TRAIN}/feed.py", 89),
    py("Life.train", f"{TRAIN}/train.py", 115),
    *OUTER,
)
COMPUTING = (
    c("mkl_blas_avx512_sgemm_kernel_0", CPU_LIB),
    c("at::native::addmm_impl_cpu_", CPU_LIB),
    c("at::_ops::linear::call", CPU_LIB),
    py("Linear.forward", f"{TORCH}/nn/modules/linear.py", 134),
    *CALL,
    py("Qwen3MLP.forward", MODEL, 82),
    *CALL,
    py("Qwen3DecoderLayer.forward", MODEL, 315),
    *in_forward(77),
)
IN_BACKWARD = (
    c("mkl_blas_avx512_sgemm_kernel_0", CPU_LIB),
    c("torch::autograd::generated::MmBackward0::apply", CPU_LIB),
    *AUTOGRAD[1:],
    *in_update(81),
)
ON_DEVICE = (*CUDA_WAIT, py("update", f"{TRAIN}/step.py", 87), UPDATING, *OUTER)
GONE = Seen(None, None, None, ())
IDLE, BUSY, SPIN = (0.0, 0.0, 120.4, 1980.0), (99.0, 23.0, 690.2, 1455.0), (100.0, 0.0, 133.1, 1980.0)
Reading = tuple[float | None, float | None, float | None, float | None]


@dataclass
class Job:
    """A run of which evidence is taken. base: collectives before the first of `calls`."""

    world: int
    hosts: tuple[str, ...]
    calls: list[Call]
    gpu: bool = False
    age: float = 61.0
    seconds: float = 8.4
    completed: int = 180
    base: int = 6120
    gap: float = 5.2
    ranks: dict[int, Rank] = field(default_factory=dict)
    kernel: dict[int, tuple[str, ...]] = field(default_factory=dict)
    readings: dict[int, tuple[Reading, Reading]] = field(default_factory=dict)
    missing: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def host(self, rank: int) -> int:
        return rank * len(self.hosts) // self.world

    def clock(self, rank: int) -> float:
        return 512000.0 + 71333.0 * self.host(rank)

    def beat(self, rank: int, phase: str, update: int, pack: int, age: float, part: str = "", done: int = 0) -> Beat:
        """A beat that was written `age` seconds before the first round."""
        first = phase in ("first_update", "compile", "load")
        clock = self.clock(rank) - age
        durations = () if first else tuple(round(self.seconds + 0.07 * ((7 * n) % 5 - 2), 3) for n in range(24))
        begun = clock - 2.0 if phase in ("forward", "backward", "reduce", "optimizer", "first_update") else None
        return Beat(
            rank,
            self.world,
            1,
            self.hosts[self.host(rank)],
            41000 + 13 * rank,
            phase,
            part or phase,
            update,
            pack,
            WALL - age,
            WALL - age - 0.6,
            clock,
            clock - 0.6,
            clock if begun is None and phase == "data" else begun,
            0 if first else self.completed + done,
            durations,
        )

    def ring(self, rank: int, calls: Sequence[Call], issued: int, age: float, over: int | None = None) -> Any:
        """The last of the first `issued` calls; those before `over` are done where the host can tell."""
        over = issued if over is None else over
        found = []
        for place in range(max(0, issued - KEPT), issued):
            call, late = calls[place], issued - 1 - place
            started = self.clock(rank) - age - 0.11 * late
            known = place < over and not self.gpu
            found.append(
                Collective(
                    self.base + place,
                    "0",
                    call.kind,
                    call.sizes,
                    call.dtype,
                    call.where,
                    "done" if known else "called",
                    call.phase,
                    call.update,
                    call.pack,
                    started,
                    started + 0.012 if known else None,
                )
            )
        return tuple(found)

    def process(self, rank: int, state: str, wchan: str, number: int, cpu: float, **more: Any) -> Process:
        """The rank's process in round `number`; cpu: seconds of computing between the rounds."""
        read, written = more.get("read", 0), more.get("written", 0)
        return Process(
            41000 + 13 * rank,
            "python",
            state,
            wchan,
            round(2104.6 + 3.1 * rank + number * cpu, 2),
            9_412_608_000 + number * read,
            48_300_032 + number * written,
            14_812_000_256,
            more.get("files", ()),
        )

    def put(
        self,
        rank: int,
        beats: tuple[Beat | None, Beat | None],
        frames: tuple[Frames, Frames] | Frames,
        ring: Iterable[Collective],
        state: str = "S",
        wchan: str = "futex_wait_queue",
        cpu: float = 0.02,
        others: tuple[Thread, ...] = (),
        lock: bool = False,
        kernel: tuple[str, ...] = (),
        method: str = "py-spy --native",
        unseen: tuple[str, ...] = (),
        children: tuple[tuple[Process, ...], tuple[Process, ...]] = ((), ()),
        missing: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        both = frames if isinstance(frames[0], tuple) else (frames, frames)
        rounds = []
        for number in (0, 1):
            main = Thread("MainThread", True, lock, both[number])  # type: ignore[arg-type]
            threads = () if method == "none" else (main, *others)
            pid = 41000 + 13 * rank
            stack = Stack(pid, state, wchan, kernel, method, unseen, threads)
            process = self.process(rank, state, wchan, number, cpu, **more)
            rounds.append(Seen(beats[number], stack, process, children[number]))
        self.ranks[rank] = Rank(rank, (rounds[0], rounds[1]), tuple(ring), None, missing)

    def wait(self, rank: int, at: int, calls: Sequence[Call] | None = None, age: float | None = None) -> None:
        """The rank waits in call `at`: with gloo in that line, on a GPU in the first line that needs a result."""
        calls, age = self.calls if calls is None else calls, self.age if age is None else age
        call = calls[at]
        frames, state, wchan, cpu = waiting(call), "S", "futex_wait_queue", 0.02
        if self.gpu and call.where.endswith("step.py:87"):
            frames, state, wchan, cpu = ON_DEVICE, "R", "", self.gap - 0.1
        elif self.gpu:
            frames = (*CUDA_WAIT, *(frame for frame in frames if frame not in GLOO))
            state, wchan, cpu = "R", "", self.gap - 0.1
        beat = self.beat(rank, call.phase, call.update, call.pack, age)
        self.put(rank, (beat, beat), frames, self.ring(rank, calls, at + 1, age, at), state, wchan, cpu)
        if self.gpu:
            self.readings[rank] = (SPIN, SPIN)

    def dead(
        self, rank: int, phase: str, update: int, pack: int, issued: int, age: float, raised: bool = False, **how: Any
    ) -> None:
        """The rank ended `age` seconds ago; raised: out of its last call."""
        beat = self.beat(rank, phase, update, pack, age + 1.0)
        fields = {"status": None, "signal": None, "exception": None, "message": None, "where": None, "frames": ()} | how
        host = self.hosts[self.host(rank)]
        end = End(rank, self.world, 1, host, 41000 + 13 * rank, WALL - age, phase, update, **fields)
        seen = Seen(beat, None, None, ())
        ring = self.ring(rank, self.calls, issued, age + 0.4)
        if raised and not self.gpu:
            ring = (*ring[:-1], replace(ring[-1], state="raised"))
        self.ranks[rank] = Rank(rank, (seen, seen), ring, end, ("stack: the process has ended",))

    def nodes(self, silent: Iterable[int] = ()) -> list[Node]:
        found = []
        for index, host in enumerate(self.hosts):
            if index in silent:
                continue
            mine = [rank for rank in range(self.world) if self.host(rank) == index]
            gpus: tuple[tuple[Gpu, ...], tuple[Gpu, ...]] = ((), ())
            idle: tuple[Gpu, ...] = ()
            computing: tuple[Gpu, ...] = ()
            if self.gpu:
                shown = [self.readings.get(rank, (SPIN, SPIN)) for rank in mine]
                gpus = tuple(  # type: ignore[assignment]
                    tuple(Gpu(place, *pair[number]) for place, pair in enumerate(shown)) for number in (0, 1)
                )
                idle = tuple(Gpu(place, *IDLE) for place in range(len(mine)))
                computing = tuple(Gpu(place, *BUSY) for place in range(len(mine)))
            found.append(
                Node(
                    host,
                    index,
                    1,
                    WALL + 0.3 * index,
                    512000.0 + 71333.0 * index,
                    self.gap,
                    tuple(self.ranks[rank] for rank in mine if rank in self.ranks),
                    gpus,
                    idle,
                    computing,
                    self.kernel.get(index, ()),
                    f"JobId=90417 JobState=RUNNING NodeList={','.join(self.hosts)}; {host} State=ALLOCATED",
                    self.missing.get(index, ()),
                )
            )
        return found

    def alarm(self, rank: int, sentence: str, **more: Any) -> Alarm:
        node = self.host(rank)
        values = {"age": self.age, "limit": 30.0, "time": WALL - 0.2, "node": node} | more
        return Alarm(attempt=1, host=self.hosts[node], rank=rank, sentence=sentence, **values)


def keep(name: str, job: Job, alarm: Alarm, label: dict[str, Any], silent: Iterable[int] = ()) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "evidence").mkdir(parents=True)
    whole = label | {"world": job.world, "hosts": job.hosts, "composed": True}
    (folder / "label.json").write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    (folder / "alarm.json").write_bytes(msgspec.json.format(msgspec.json.encode(alarm), indent=1) + b"\n")
    for node in job.nodes(silent):
        (folder / "evidence" / f"{node.index}-{node.host}.json").write_bytes(msgspec.json.encode(node) + b"\n")


def past(job: Job, rank: int, place: str) -> Alarm:
    return job.alarm(rank, f"rank {rank} has been in {place} for {job.age:.0f} s, allowed are 30 s")


def ended(job: Job, rank: int, how: str, age: float = 2.0) -> Alarm:
    return job.alarm(rank, f"rank {rank} ended: {how}", age=age, limit=0.0)


CASES: list[Callable[[], None]] = []


def case(make: Callable[[], None]) -> Callable[[], None]:
    CASES.append(make)
    return make


def two_updates(update: int, world: int) -> list[Call]:
    return [*of_update(update - 1, world), *of_update(update, world), *of_update(update + 1, world)]


@case
def evaluation_reads_dead_nfs() -> None:
    calls = [*of_update(240, 8), *of_evaluation(240)]
    job = Job(8, ("n031", "n032"), calls, age=140.0)
    at = find(calls, "evaluate", 240, nth=7)
    for rank in set(range(8)) - {4, 6}:
        job.wait(rank, at)
    for rank, name in ((4, "scans/0711.png"), (6, "scans/0714.png")):
        beat = job.beat(rank, "evaluate", 240, -1, 151.0)
        together = py("Ranks.together", f"{TRAIN}/dist.py", 63)
        job.put(
            rank,
            (beat, beat),
            (*READ, together, *evaluating(65)),
            job.ring(rank, calls, at, 151.0),
            "D",
            "rpc_wait_bit_killable",
            0.0,
            kernel=("rpc_wait_bit_killable+0x11/0x70 [sunrpc]", "nfs4_proc_getattr+0x5d/0x130 [nfsv4]"),
            method="py-spy",
            unseen=("py-spy --native: not tried, the process is in the kernel",),
            files=(f"/mnt/claims/{name} (nfs4)",),
        )
    job.kernel[1] = ("nfs: server filer03 not responding, still trying",)
    story = "Ranks 4 and 6 read held-out images from a dead NFS server."
    label = {"story": story, "kind": "io_blocked", "ranks": (4, 6)}
    keep("evaluation_reads_dead_nfs", job, past(job, 4, "evaluate, update 240"), label)


@case
def batches_thread_on_dead_nfs() -> None:
    calls = two_updates(91, 8)
    job = Job(8, ("n031", "n032"), calls, age=74.0, completed=90)
    at = find(calls, "data", 91)
    for rank in set(range(8)) - {5}:
        job.wait(rank, at)
    beat = job.beat(5, "data", 91, -1, 74.1)
    reader = Thread("batches_0", False, False, (c("read", LIBC), *READ, *POOL))
    files = ("/mnt/claims/scans/2290.png (nfs4)",)
    ring = job.ring(5, calls, at, 74.1)
    job.put(5, (beat, beat), FOR_BATCHES, ring, others=(reader,), files=files)
    label = {
        "story": "Rank 5 waits for its batches, whose thread reads an image that NFS does not give.",
        "kind": "data_starved",
        "also": ("io_blocked",),
        "ranks": (5,),
    }
    keep("batches_thread_on_dead_nfs", job, past(job, 5, "data, update 91"), label)


@case
def endless_loop_in_python() -> None:
    calls = two_updates(57, 8)
    job = Job(8, ("a1", "a2"), calls, age=66.0, completed=56)
    at = find(calls, "backward", 57, 0, nth=0)
    for rank in set(range(8)) - {6}:
        job.wait(rank, at)
    beat = job.beat(6, "forward", 57, 0, 66.4)
    loops = tuple((py("balance", PLUGIN, line), py("weights_of", PLUGIN, 22), *in_update(77)) for line in (43, 41))
    job.put(6, (beat, beat), (loops[0], loops[1]), job.ring(6, calls, at, 66.2), "R", "", 5.1, lock=True)
    label = {"story": "Rank 6 loops for ever in the user's Python.", "kind": "missing_rank", "ranks": (6,)}
    keep("endless_loop_in_python", job, past(job, 6, "forward, update 57"), label)


@case
def interpreter_lock_in_regex() -> None:
    calls = two_updates(300, 4)
    job = Job(4, ("c17",), calls, age=95.0, completed=299)
    at = find(calls, "backward", 300, 1, nth=4)
    for rank in (0, 1, 3):
        job.wait(rank, at)
    beat = job.beat(2, "backward", 300, 1, 95.2)
    match = (c("SRE(match)", PYTHON), c("pattern_match", PYTHON), py("clean", "/home/ana/claims/plugins/text.py", 18))
    holder = Thread("batches_0", False, True, (*match, *POOL))
    main = (*FUTEX, c("take_gil", PYTHON), c("PyEval_RestoreThread", PYTHON), *AUTOGRAD, *in_update(81))
    job.put(2, (beat, beat), main, job.ring(2, calls, at, 95.1), cpu=5.2, others=(holder,))
    label = {
        "story": "On rank 2 a regular expression that backtracks for ever keeps the interpreter lock.",
        "kind": "gil_held",
        "ranks": (2,),
    }
    keep("interpreter_lock_in_regex", job, past(job, 2, "backward, update 300"), label)


@case
def alone_in_evaluation() -> None:
    common = of_update(120, 4)
    others, alone = [*common, *of_update(121, 4)], [*common, *of_evaluation(120)]
    job = Job(4, ("d1", "d2"), others, age=52.0, completed=120)
    for rank in (0, 2, 3):
        job.wait(rank, find(others, "backward", 121, 0))
    job.wait(1, find(alone, "evaluate", 120, nth=7), alone)
    label = {
        "story": "Rank 1 left the updates after number 120 and is in an evaluation of its own.",
        "kind": "extra_collective",
        "also": ("missing_rank",),
        "ranks": (1,),
    }
    keep("alone_in_evaluation", job, past(job, 0, "backward, update 121"), label)


@case
def one_barrier_too_many() -> None:
    calls = two_updates(33, 8)
    job = Job(8, ("b01", "b02"), calls, age=44.0, completed=32)
    at = find(calls, "forward", 33, 1, nth=0)
    for rank in set(range(8)) - {4}:
        job.wait(rank, at)
    barrier = Call("barrier", (), "", f"{PLUGIN}:58", "forward", 33, 1)
    job.wait(4, at, [*calls[:at], barrier])
    label = {
        "story": "Rank 4 calls a barrier in the user's code that no other rank calls.",
        "kind": "extra_collective",
        "also": ("kind_mismatch",),
        "ranks": (4,),
    }
    keep("one_barrier_too_many", job, past(job, 0, "forward, update 33"), label)


@case
def one_reduce_too_many_nccl() -> None:
    calls = two_updates(410, 8)
    job = Job(8, ("h200-05",), calls, gpu=True, age=38.0, completed=409, seconds=11.9)
    at = find(calls, "reduce", 410)
    for rank in set(range(8)) - {3}:
        job.wait(rank, at)
    extra = find(calls, "backward", 410, 1, nth=2)
    more = Call("all_reduce", ((1,),), "float32", f"{PLUGIN}:77", "backward", 410, 1)
    job.wait(3, at + 1, [*calls[:extra], more, *calls[extra:]])
    label = {
        "story": "Rank 3 issued one all-reduce of a metric more than the others.",
        "kind": "extra_collective",
        "ranks": (3,),
    }
    keep("one_reduce_too_many_nccl", job, past(job, 0, "reduce, update 410"), label)


@case
def gather_of_another_size_nccl() -> None:
    calls = two_updates(12, 8)
    job = Job(8, ("h200-07",), calls, gpu=True, age=47.0, completed=11, seconds=12.3, base=480)
    for rank in range(7):
        job.wait(rank, find(calls, "reduce", 12))
    at = find(calls, "forward", 12, 1, nth=3)
    other = [*calls[:at], replace(calls[at], sizes=((442368,),)), *calls[at + 1 :]]
    job.wait(7, find(other, "reduce", 12), other)
    label = {"story": "Rank 7 gathers a layer with another shape.", "kind": "size_mismatch", "ranks": (7,)}
    keep("gather_of_another_size_nccl", job, past(job, 2, "reduce, update 12"), label)


@case
def scatter_against_reduce() -> None:
    calls = two_updates(76, 4)
    job = Job(4, ("e4",), calls, age=58.0, completed=75)
    at = find(calls, "backward", 76, 0, nth=5)
    assert calls[at].kind == "reduce_scatter"
    for rank in (0, 1, 3):
        job.wait(rank, at)
    job.wait(2, at, [*calls[:at], replace(calls[at], kind="all_reduce", where=f"{PLUGIN}:91")])
    label = {
        "story": "Where the others scatter a layer's gradients rank 2 reduces them whole.",
        "kind": "kind_mismatch",
        "ranks": (2,),
    }
    keep("scatter_against_reduce", job, past(job, 2, "backward, update 76"), label)


@case
def killed_by_oom_killer() -> None:
    calls = two_updates(19, 16)
    job = Job(16, ("m1", "m2", "m3", "m4"), calls, age=4.0, completed=18)
    at = find(calls, "forward", 19, 0, nth=2)
    for rank in set(range(16)) - {9}:
        job.wait(rank, at, age=3.5)
    job.dead(9, "forward", 19, 0, at, 2.0, signal="SIGKILL")
    job.kernel[2] = (
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0,mems_allowed=0-1,"
        "oom_memcg=/slurm/uid_2041/job_90417/step_0,task_memcg=/slurm/uid_2041/job_90417/step_0/task_1,"
        "task=python,pid=41117,uid=2041",
        "Memory cgroup out of memory: Killed process 41117 (python) total-vm:98811264kB, anon-rss:63904112kB, "
        "file-rss:91204kB, shmem-rss:0kB, UID:2041 pgtables:151280kB oom_score_adj:0",
    )
    label = {"story": "The kernel killed rank 9 for memory; 15 wait.", "kind": "oom_killed", "ranks": (9,)}
    keep("killed_by_oom_killer", job, ended(job, 9, "SIGKILL"), label)


@case
def segfault_and_lost_peer() -> None:
    calls = two_updates(208, 2)
    job = Job(2, ("w1", "w2"), calls, age=2.0, completed=207)
    at = find(calls, "backward", 208, 0)
    job.dead(0, "forward", 208, 0, at, 3.1, signal="SIGSEGV")
    frames = tuple(f"{one.file}:{one.line} {one.name}" for one in reversed(waiting(calls[at])) if not one.native)
    lost = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.4.0.21]:39118"
    how = {"exception": "RuntimeError", "message": lost, "where": f"{C10D}:4394", "frames": frames}
    job.dead(1, "backward", 208, 0, at + 1, 2.9, True, status=1, **how)
    job.kernel[0] = ("python[41000]: segfault at 18 ip 00007f10aa21c3b4 sp 00007ffe7d3a5c10 error 4 in _flex.so",)
    label = {
        "story": "Rank 0 segfaulted in an extension; rank 1 raised because the connection to it closed.",
        "kind": "rank_died",
        "ranks": (0,),
    }
    keep("segfault_and_lost_peer", job, ended(job, 0, "SIGSEGV"), label)


@case
def raised_while_others_wait_nccl() -> None:
    calls = two_updates(812, 16)
    job = Job(16, ("h200-01", "h200-02"), calls, gpu=True, age=3.0, completed=811, seconds=14.2, base=41000)
    for rank in set(range(16)) - {11}:
        job.wait(rank, find(calls, "reduce", 812), age=2.5)
    places = (f"{TRAIN}/train.py:124 Life.train", f"{TRAIN}/step.py:77 update", f"{PLUGIN}:31 balance")
    how = {"exception": "KeyError", "message": "'claim_type'", "where": f"{PLUGIN}:31", "frames": places}
    job.dead(11, "forward", 812, 1, find(calls, "forward", 812, 1, nth=4), 2.2, status=1, **how)
    job.readings[11] = (IDLE, IDLE)
    label = {"story": "Rank 11 raised in the user's code, 15 wait.", "kind": "rank_raised", "ranks": (11,)}
    keep("raised_while_others_wait_nccl", job, ended(job, 11, "KeyError"), label)


@case
def stopped_by_signal() -> None:
    calls = two_updates(64, 4)
    job = Job(4, ("f1", "f2"), calls, age=40.0, completed=63)
    at = find(calls, "forward", 64, 1, nth=5)
    for rank in range(3):
        job.wait(rank, at)
    beat = job.beat(3, "forward", 64, 1, 40.6)
    frames = tuple(frame for frame in COMPUTING if not frame.native)
    unseen = ("faulthandler: a stopped process answers no signal",)
    ring = job.ring(3, calls, at, 40.3)
    job.put(3, (beat, beat), frames, ring, "T", "do_signal_stop", 0.0, method="py-spy", unseen=unseen)
    label = {"story": "Somebody stopped rank 3 with SIGSTOP.", "kind": "missing_rank", "ranks": (3,)}
    keep("stopped_by_signal", job, past(job, 0, "forward, update 64"), label)


@case
def one_node_silent() -> None:
    calls = two_updates(505, 16)
    job = Job(16, ("g1", "g2", "g3", "g4"), calls, age=71.0, completed=504)
    at = find(calls, "backward", 505, 1, nth=6)
    for rank in (*range(8), *range(12, 16)):
        job.wait(rank, at)
    label = {"story": "Nothing came from node g3, all others wait in one call.", "kind": "unknown", "ranks": ()}
    keep("one_node_silent", job, past(job, 13, "backward, update 505"), label, silent=(2,))


@case
def two_ranks_unseen() -> None:
    calls = two_updates(40, 8)
    job = Job(8, ("k1", "k2"), calls, age=63.0, completed=39)
    at = find(calls, "forward", 40, 0, nth=1)
    for rank in set(range(8)) - {3, 7}:
        job.wait(rank, at)
    for rank in (3, 7):
        reasons = ("heartbeat: cannot be read: Stale file handle", "stack: no pid", "ring: Stale file handle")
        job.ranks[rank] = Rank(rank, (GONE, GONE), (), None, reasons)
    label = {"story": "Ranks 3 and 7 could not be seen at all, the others wait.", "kind": "unknown", "ranks": ()}
    keep("two_ranks_unseen", job, past(job, 0, "forward, update 40"), label)


@case
def connections_reset_everywhere() -> None:
    calls = two_updates(1210, 8)
    job = Job(8, ("r1", "r2"), calls, age=1.0, completed=1209)
    at = find(calls, "forward", 1210, 0, nth=0)
    for rank in range(8):
        peer = f"[10.7.0.{11 + (rank + 4) % 8 // 4}]:{41022 + rank}"
        text = f"[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error {peer}: Connection reset by peer"
        frames = tuple(f"{one.file}:{one.line} {one.name}" for one in reversed(waiting(calls[at])) if not one.native)
        how = {"exception": "RuntimeError", "message": text, "where": f"{C10D}:4394", "frames": frames}
        job.dead(rank, "forward", 1210, 0, at + 1, 1.5 - 0.02 * rank, True, status=1, **how)
    label = {"story": "All connections between two nodes were reset in one call.", "kind": "network", "ranks": ()}
    keep("connections_reset_everywhere", job, ended(job, 0, "RuntimeError"), label)


@case
def all_wait_in_the_same_call_nccl() -> None:
    calls = two_updates(77, 16)
    job = Job(16, ("p1", "p2"), calls, gpu=True, age=49.0, completed=76, seconds=13.0)
    for rank in range(16):
        job.wait(rank, find(calls, "reduce", 77))
    label = {
        "story": "All ranks issued the same and spin in it: the fabric between two nodes lost packets.",
        "kind": "network",
        "also": ("unknown",),
        "ranks": (),
    }
    keep("all_wait_in_the_same_call_nccl", job, past(job, 5, "reduce, update 77"), label)


@case
def gpu_fell_off_the_bus() -> None:
    calls = two_updates(950, 8)
    job = Job(8, ("h1", "h2"), calls, gpu=True, age=5.0, completed=949, seconds=12.0)
    for rank in set(range(8)) - {6}:
        job.wait(rank, find(calls, "reduce", 950), age=4.0)
    job.dead(6, "backward", 950, 0, find(calls, "backward", 950, 0, nth=4), 2.0, signal="SIGABRT")
    job.readings[6] = ((None,) * 4, (None,) * 4)
    job.kernel[1] = (
        "NVRM: Xid (PCI:0000:9b:00): 79, pid=41078, name=python, GPU has fallen off the bus.",
        "NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.",
    )
    job.missing[1] = ("GPU 2: Unable to determine the device handle for GPU 0000:9b:00.0: GPU is lost",)
    label = {
        "story": "The GPU of rank 6 fell off the bus, and NCCL's watchdog aborted the rank.",
        "kind": "rank_died",
        "also": ("rank_raised",),
        "ranks": (6,),
    }
    keep("gpu_fell_off_the_bus", job, ended(job, 6, "SIGABRT"), label)


@case
def straggler_on_a_shared_core() -> None:
    calls = two_updates(141, 4)
    job = Job(4, ("s9",), calls, age=0.2, seconds=9.0, completed=140)
    at = find(calls, "backward", 141, 0, nth=0)
    for rank in range(3):
        job.wait(rank, at)
        seen = job.ranks[rank]
        main = Thread("MainThread", True, False, waiting(calls[at + 7]))
        second = replace(seen.rounds[1], stack=replace(seen.rounds[1].stack, threads=(main,)))
        job.ranks[rank] = replace(seen, rounds=(seen.rounds[0], second), collectives=slowed(seen, 0.4, at))
    beats = (job.beat(3, "forward", 141, 0, 4.0), job.beat(3, "backward", 141, 0, -0.1))
    job.put(3, beats, (COMPUTING, IN_BACKWARD), job.ring(3, calls, at, 0.4), "R", "", 2.6)
    job.ranks[3] = replace(job.ranks[3], collectives=slowed(job.ranks[3], 0.0, at))
    label = {
        "story": "Rank 3 shares its core with another program and takes twice as long; the run goes on.",
        "kind": "straggler",
        "also": ("slow_alive",),
        "ranks": (3,),
        "stays": True,
        "noticed": False,
    }
    alarm = job.alarm(3, "update 141 takes 24 s, usually 9 s", age=24.0)
    keep("straggler_on_a_shared_core", job, alarm, label)


def slowed(rank: Rank, early: float, last: int) -> tuple[Collective, ...]:
    """The calls 0.6 s apart, all ending when the slow rank comes; this rank came `early` seconds before it."""
    found = []
    for call in rank.collectives:
        met = 512000.2 - 0.6 * (6120 + last - call.number)
        found.append(replace(call, started=met - early, ended=None if call.ended is None else met + 0.01))
    return tuple(found)


@case
def straggler_with_low_clock_nccl() -> None:
    calls = two_updates(620, 8)
    job = Job(8, ("h200-11",), calls, gpu=True, age=4.0, completed=619, seconds=12.0)
    at = find(calls, "reduce", 620)
    for rank in range(8):
        job.wait(rank, at)
        seen = job.ranks[rank]
        later = job.beat(rank, "forward", 621, 0, -1.5, done=1)
        frames = (c("cudaLaunchKernel", RUNTIME), *COMPUTING[3:])
        stack = replace(seen.rounds[1].stack, threads=(Thread("MainThread", True, True, frames),))
        second = replace(seen.rounds[1], beat=later, stack=stack)
        job.ranks[rank] = replace(seen, rounds=(seen.rounds[0], second))
        job.readings[rank] = (SPIN, (100.0, 4.0, 188.0, 1960.0))
    job.readings[2] = ((100.0, 22.0, 231.4, 705.0), (100.0, 23.0, 228.9, 705.0))
    label = {
        "story": "The GPU of rank 2 runs at half its clock; every update takes twice as long and ends.",
        "kind": "straggler",
        "also": ("slow_alive",),
        "ranks": (2,),
        "stays": True,
        "noticed": False,
    }
    alarm = job.alarm(2, "update 620 takes 25 s, usually 12 s", age=25.0)
    keep("straggler_with_low_clock_nccl", job, alarm, label)


SYNCING = (
    c("fsync", LIBC),
    py("sync", f"{TRAIN}/tensors.py", 99),
    py("write_tensors", f"{TRAIN}/tensors.py", 116),
    py("_write", f"{TRAIN}/checkpoint.py", 276),
    *saving(132),
)


@case
def checkpoint_on_dead_nfs() -> None:
    calls = [*of_update(500, 16), *of_save(500)]
    job = Job(16, ("q1", "q2", "q3", "q4"), calls, age=660.0, completed=500)
    for rank in range(1, 16):
        job.wait(rank, len(calls) - 1)
    beat = job.beat(0, "save", 500, -1, 662.0)
    job.put(
        0,
        (beat, beat),
        SYNCING[1:],
        job.ring(0, calls, len(calls) - 1, 661.0),
        "D",
        "nfs_wait_on_request",
        0.0,
        kernel=("nfs_wait_on_request+0x3a/0x60 [nfs]", "nfs_file_fsync+0x8f/0x1a0 [nfs]"),
        method="py-spy",
        unseen=("py-spy --native: not tried, the process is in the kernel",),
        files=(f"{RUN}/checkpoints/update-000500.q1.41000.tmp/model.safetensors (nfs4)",),
    )
    job.kernel[0] = ("nfs: server filer01 not responding, still trying",)
    label = {
        "story": "Rank 0 cannot sync the checkpoint to a dead NFS server, the others wait in the same save.",
        "kind": "io_blocked",
        "also": ("save_stalled",),
        "ranks": (0,),
    }
    alarm = job.alarm(0, "rank 0 has been in save, update 500 for 660 s, allowed are 600 s", limit=600.0)
    keep("checkpoint_on_dead_nfs", job, alarm, label)


@case
def waits_for_a_queue_nccl() -> None:
    calls = two_updates(88, 16)
    job = Job(16, ("t1", "t2"), calls, gpu=True, age=36.0, completed=87, seconds=12.0)
    for rank in set(range(16)) - {13}:
        job.wait(rank, find(calls, "reduce", 88))
    beat = job.beat(13, "forward", 88, 1, 36.8)
    get = (py("Condition.wait", "/opt/envs/train/lib/python3.11/threading.py", 327),)
    get += (py("Queue.get", "/opt/envs/train/lib/python3.11/queue.py", 171), py("balance", PLUGIN, 64))
    frames = (*CONDITION, c("PyThread_acquire_lock_timed", PYTHON), *get, *in_forward(77))
    job.put(13, (beat, beat), frames, job.ring(13, calls, find(calls, "forward", 88, 1, nth=3), 36.5))
    job.readings[13] = (IDLE, IDLE)
    label = {
        "story": "Rank 13 waits for ever for a queue in the user's code, its GPU at rest while 15 spin.",
        "kind": "missing_rank",
        "ranks": (13,),
    }
    keep("waits_for_a_queue_nccl", job, past(job, 1, "reduce, update 88"), label)


def healthy(story: str, kind: str = "slow_alive", noticed: bool = False) -> dict[str, Any]:
    return {"story": story, "kind": kind, "ranks": (), "healthy": True, "noticed": noticed}


@case
def healthy_slow_checkpoint() -> None:
    calls = [*of_update(200, 8), *of_save(200)]
    job = Job(8, ("u1", "u2"), calls, age=320.0, completed=200)
    for rank in range(1, 8):
        job.wait(rank, len(calls) - 1)
    beat = job.beat(0, "save", 200, -1, 321.0)
    save = (c("write", LIBC), c("safetensors::tensor::serialize_to_file", f"{SITE}/safetensors/_safetensors_rust.so"))
    save += (py("save_file", f"{SITE}/safetensors/torch.py", 352), py("write_tensors", f"{TRAIN}/tensors.py", 113))
    save += (py("_write", f"{TRAIN}/checkpoint.py", 276), *saving(132))
    ring = job.ring(0, calls, len(calls) - 1, 320.5)
    job.put(0, (beat, beat), save, ring, "R", "", 1.4, written=1_310_720_000)
    alarm = job.alarm(0, "rank 0 has been in save, update 200 for 320 s, allowed are 300 s", limit=300.0)
    keep("healthy_slow_checkpoint", job, alarm, healthy("Rank 0 writes a large checkpoint, slowly.", noticed=True))


@case
def healthy_first_update_compiles() -> None:
    calls = of_update(1, 4)
    job = Job(4, ("v1",), calls, gpu=True, age=210.0, completed=0, base=130)
    at = find(calls, "reduce", 1)
    inductor = f"{TORCH}/_inductor"
    compiling = (
        *CONDITION,
        c("PyThread_acquire_lock_timed", PYTHON),
        py("Future.result", "/opt/envs/train/lib/python3.11/concurrent/futures/_base.py", 451),
        py("AsyncCompile.wait", f"{inductor}/async_compile.py", 560),
        py("PyCodeCache.load_by_key_path", f"{inductor}/codecache.py", 3180),
        py("compile_fx", f"{inductor}/compile_fx.py", 1741),
        py("_compile_inner", f"{TORCH}/_dynamo/convert_frame.py", 1198),
        *in_forward(77),
    )
    for rank in range(4):
        if rank in (0, 1):
            job.wait(rank, at)
            part, issued, frames = "reduce", at + 1, ON_DEVICE
        else:
            part, issued, frames = "forward", find(calls, "forward", 1, 0, nth=2), compiling
        beat = job.beat(rank, "first_update", 1, 0 if part == "forward" else -1, 205.0, part)
        if part == "reduce":
            seen = job.ranks[rank]
            rounds = tuple(replace(one, beat=beat) for one in seen.rounds)
            job.ranks[rank] = replace(seen, rounds=(rounds[0], rounds[1]))
            continue
        makers = tuple(
            (
                Process(52000 + rank, "ptxas", "R", "", 31.0 + 5.1 * number, 9_000_000, 310_000, 910_000_000, ()),
                Process(52010 + rank, "python", "R", "", 77.0 + 5.0 * number, 44_000_000, 90_000, 1_310_000_000, ()),
            )
            for number in (0, 1)
        )
        children = (makers[0], makers[1])
        job.put(rank, (beat, beat), frames, job.ring(rank, calls, issued, 204.0), cpu=0.3, children=children)
        job.readings[rank] = (IDLE, IDLE)
    alarm = Alarm(1, "v1", 2, 205.0, 1800.0, "somebody asked", WALL, -1)
    story = "Two ranks still compile kernels of their first update while two have theirs and wait."
    keep("healthy_first_update_compiles", job, alarm, healthy(story, "compiling"))


@case
def healthy_autotuning() -> None:
    calls = of_update(1, 8)
    job = Job(8, ("x1",), calls, gpu=True, age=95.0, completed=0, base=260)
    tuner = f"{SITE}/triton/runtime/autotuner.py"
    for rank in range(8):
        beat = job.beat(rank, "first_update", 1, 0, 95.0, "forward")
        tuning = tuple(
            (
                c("cudaDeviceSynchronize", RUNTIME),
                py("synchronize", f"{TORCH}/cuda/__init__.py", 1083),
                py("do_bench", f"{SITE}/triton/testing.py", line),
                py("Autotuner._bench", tuner, 167),
                py("Autotuner.run", tuner, 239),
                py("chunk_gated_delta_rule_fwd_h", f"{SITE}/fla/ops/common/chunk_delta_h.py", 506),
                *in_forward(77),
            )
            for line in (149, 166)
        )
        ring = job.ring(rank, calls, find(calls, "forward", 1, 0, nth=2), 94.0)
        job.put(rank, (beat, beat), (tuning[0], tuning[1]), ring, "R", "", 5.1)
        job.readings[rank] = ((88.0, 12.0, 341.0 + rank, 1905.0), (74.0, 9.0, 305.0 + rank, 1935.0))
    alarm = Alarm(1, "x1", 0, 95.0, 1800.0, "somebody asked", WALL, -1)
    keep("healthy_autotuning", job, alarm, healthy("All ranks search for the fastest kernels.", "autotuning"))


@case
def healthy_slow_images() -> None:
    calls = two_updates(118, 4)
    job = Job(4, ("y1", "y2"), calls, age=33.0, completed=117)
    at = find(calls, "data", 118)
    for rank in (0, 2, 3):
        job.wait(rank, at)
        seen, later = job.ranks[rank], job.beat(rank, "forward", 118, 0, -4.0)
        main = Thread("MainThread", True, False, COMPUTING)
        stack = replace(seen.rounds[1].stack, state="R", wchan="", threads=(main,))
        second = replace(seen.rounds[1], beat=later, stack=stack)
        job.ranks[rank] = replace(seen, rounds=(seen.rounds[0], second))
    decoding = (c("jpeg_read_scanlines", f"{SITE}/pillow.libs/libjpeg-4bf4b09f.so.62"), *READING, *POOL)
    beats = (job.beat(1, "data", 118, -1, 33.1), job.beat(1, "forward", 118, 0, -4.0))
    reader = Thread("batches_0", False, True, decoding)
    ring = job.ring(1, calls, at, 33.0)
    job.put(1, beats, (FOR_BATCHES, COMPUTING), ring, cpu=5.0, others=(reader,), read=288_000_000)
    keep(
        "healthy_slow_images",
        job,
        past(job, 1, "data, update 118"),
        healthy("Rank 1 decodes many images for one update, and goes on.", noticed=True),
    )


@case
def healthy_long_evaluation() -> None:
    calls = [*of_update(60, 8), *of_evaluation(60, packs=9)]
    job = Job(8, ("z1", "z2"), calls, age=130.0, completed=60)
    at = find(calls, "evaluate", 60, nth=40)
    frames = (*COMPUTING[:9], *COMPUTING[9 : -len(in_update(77))], *evaluating(66))
    for rank in range(8):
        beat = job.beat(rank, "evaluate", 60, -1, 130.0 - 0.1 * rank)
        job.put(rank, (beat, beat), frames, job.ring(rank, calls, at, 1.2), "R", "", 5.1)
    alarm = Alarm(1, "z1", 0, 130.0, 600.0, "somebody asked", WALL, -1)
    keep("healthy_long_evaluation", job, alarm, healthy("All ranks compute held-out losses."))


@case
def healthy_looked_at() -> None:
    calls = two_updates(330, 16)
    job = Job(16, ("aa1", "aa2", "aa3", "aa4"), calls, gpu=True, age=2.0, completed=329, seconds=5.0)
    for rank in range(16):
        at = find(calls, "reduce", 330)
        job.wait(rank, at, age=1.0)
        seen, later = job.ranks[rank], job.beat(rank, "reduce", 331, -1, -4.1, done=1)
        job.ranks[rank] = replace(seen, rounds=(seen.rounds[0], replace(seen.rounds[1], beat=later)))
        job.readings[rank] = ((99.0, 21.0, 668.0 + rank, 1470.0), (100.0, 23.0, 691.0, 1440.0))
    alarm = Alarm(1, "aa1", 0, 1.0, 30.0, "somebody asked", WALL, -1)
    keep("healthy_looked_at", job, alarm, healthy("Somebody looks at a run that goes well."))


if __name__ == "__main__":
    for make in CASES:
        make()
    print(f"{len(CASES)} cases")
