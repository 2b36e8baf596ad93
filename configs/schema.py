"""Every option of a run: typed, frozen, documented. No torch here: a login node reads this in milliseconds.

An option is addressed as `section.field`. `configs/compose.py` reads YAML and `key=value` into these classes;
rules that involve several fields stand in `configs/rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelConfig:
    """Which model, in which precision, on which kernels."""

    path: str | None = None
    """Folder with a model in transformers' format, or a GGUF file; `package:NAME/FILE` is a file that the Python
    package NAME carries. Exactly one of `path` and `build` is given."""
    build: dict[str, Any] = field(default_factory=dict)
    """A transformers configuration (`model_type`, `text_config`, ...): a model with random weights is made of it."""
    seed: int = 0
    """Seed of the random weights of `build`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the frozen weights and of computing. Trainable parameters are float32 masters in either case."""
    attention: Literal["auto", "merged", "joined", "flex", "dense"] = "auto"
    """Kernels of tree attention: merged dense pieces, the same pieces joined in one pass (CUDA and Triton only),
    FlexAttention (CUDA only), or the dense reference. `auto`, here and in the next three: what was measured to be
    fastest, where that was measured: on GPUs of compute capability 9.0 (an H200), with weights that stay on them
    (`engine: sharded`), and where it takes the model and its packages are installed. On GPUs otherwise what was there
    before, on a CPU torch's own operations. For attention that is `joined`; `merged`; and where neither takes the model
    (float32; heads over 256 or no multiple of 8) `flex`, `dense` for heads under 16. On a CPU `merged`. What was chosen
    stands in `prefix-train budget` and, under `kernels`, in `result.json`; `tests/bench/LOG.md` has what was
    measured."""
    deltanet: Literal["auto", "reference", "fla", "fla_segments", "fla_forest", "fla_cuda"] = "auto"
    """Kernels of Gated DeltaNet: the chunked reference, or flash-linear-attention's (CUDA only), and with these four
    ways to its convolution: over a buffer in which each segment follows a copy of what it reads before it; of each
    segment by itself (`fla_segments`); of the whole forest by a kernel of our own, without any copies, for widths up to
    4 (`fla_forest`); or by causal-conv1d (`fla_cuda`). `auto` (see `attention`): `fla_forest`; `fla` for wider
    convolutions and elsewhere on GPUs; on a CPU `reference`."""
    elementwise: Literal["auto", "torch", "liger", "fused"] = "auto"
    """Norms and gated activations: transformers' own operations, or Liger's kernels (CUDA only). `fused`: Liger's, and
    one kernel each for a residual sum and its norm, for a norm's gradient and the one that comes beside it, and for a
    gated norm. Both need `memory.recompute` and `memory.tile_rows`. `auto` (see `attention`): `fused`; `liger` for OLMo
    and elsewhere on GPUs; `torch` without Liger, without these two options, and on a CPU."""
    heads: Literal["auto", "torch", "fused"] = "auto"
    """Norm, rotary embedding and output gate of attention's heads: transformers' own operations, or one kernel before
    attention and one behind it (`fused`, CUDA and Triton only). `auto` (see `attention`): `fused`; `torch` for OLMo,
    for heads over 256, and elsewhere."""


@dataclass(frozen=True)
class DataConfig:
    """Where the examples are and what to do with bad ones."""

    train: str = ""
    """Training examples: a chat JSONL file, a parquet file, a folder of them, a folder saved by `datasets`, or a folder
    of prompts (`prefix_train/prompts.py` says what that is). Relative paths are relative to the working folder at
    submit."""
    heldout: str | None = None
    """The same for held-out examples."""
    prepare: Literal["none", "digits", "biopsies"] = "none"
    """Demonstration data to write beside `train` before anything else, where it is not there yet."""
    on_bad_example: Literal["stop", "skip"] = "stop"
    """`stop`: a bad example ends the plan with file and line. `skip`: all ranks leave it out, the report counts it."""
    targets: Literal["last", "all"] = "last"
    """`last`: the last answer of a conversation is learned. `all`: every answer, where the chat template writes each as
    it does when it is the last; otherwise an error names the template, and a row per answer does the same."""
    max_example_tokens: int | None = None
    """Longest example that is accepted, in tokens; none: `pack.max_positions`. Nothing is ever truncated."""


@dataclass(frozen=True)
class PackConfig:
    """How examples are grouped into buffers."""

    mode: Literal["shared", "standalone"] = "shared"
    """`shared`: prefixes once per pack. `standalone`: one example per buffer, the baseline."""
    max_positions: int = 8192
    """Most positions (tokens physically in the buffer) of one pack."""
    min_shared: int = 16
    """A shared beginning becomes a segment of its own where that saves at least so many tokens."""
    packs_per_update: int | None = None
    """Packs in one update, over all ranks together (a multiple of the ranks). Give this or `examples_per_update`."""
    examples_per_update: int | None = None
    """Examples in one update, over all ranks together; the plan finds the packs."""


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA, through PEFT; used where `train.trainable` is `adapter`."""

    rank: int = 8
    """Rank of the adapters."""
    alpha: float = 16.0
    """LoRA's alpha: the update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on an adapter's input, drawn from (run, update, pack, layer, module)."""
    masks: Literal["drawn", "counted"] = "drawn"
    """`drawn`: torch's generator writes each mask. `counted`: each entry is a function of the same names, its row and
    its column (Philox), which rounds `dropout` to a multiple of 2^-16. On GPUs with Triton products compute these masks
    in registers and write none; that needs a `rank` of at most 64, `memory.recompute` and `memory.tile_rows`. Elsewhere
    masks are written out. `adapter_masks` among the `kernels` of `result.json` says what was done. The two kinds are
    different masks: a run keeps to its own."""
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"])
    """Names of the linear modules of the language model that get an adapter. Of a model of experts that is the shared
    expert, never the others; for `qwen3_next`, `qwen3_moe` and `mixtral` leave `gate_proj`, `up_proj` and `down_proj`
    out."""
    merger: bool = True
    """Train the vision tower's merger too, the module between it and the language model (all of its tensors); without
    effect on a text model."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    trainable: Literal["adapter", "all"] = "adapter"
    """`adapter`: LoRA and the merger. `all`: every parameter, the vision tower included."""
    lr: float = 2e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warm-up."""
    warmup_updates: int = 10
    """Updates over which the learning rate rises linearly from 0."""
    updates: int | None = None
    """Updates to train. Give this or `epochs`."""
    epochs: float | None = None
    """Passes over the training examples. Give this or `updates`."""
    beta1: float = 0.9
    """AdamW's first decay."""
    beta2: float = 0.95
    """AdamW's second decay."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them."""
    weighting: Literal["example", "token"] = "example"
    """`example`: every example weighs the same. `token`: every target token does."""
    loss_chunk_rows: int = 4096
    """Prediction rows that go through the head at a time."""
    loss_chunk_words: int = 0
    """Words of the vocabulary whose logits exist at a time (a multiple of 64); 0: all. In chunks each row's logits are
    computed twice. The same number gives the same bits in both engines."""
    save_every: int = 50
    """Updates between checkpoints; 0: only at the end or when asked to stop."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    threads: int = 1
    """CPU threads per rank. Recorded: bit-equal resuming needs the same number."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept between forward and backward."""

    recompute: bool = True
    """Keep only the input of each decoder layer and recompute the rest in backward."""
    offload: str = "none"
    """Let inputs of decoder layers wait in pinned host memory between forward and backward: `none`; a number: of the
    first so many layers, whose inputs wait longest; `auto`: of all but the last, with which backward begins. Gradients
    stay the same to the bit. Each rank pins, at the start and for the whole run, the inputs of these layers for a pack
    of `pack.max_positions`, in chunks of 64 MiB: `prefix-train budget` shows how much. Needs `memory.recompute`."""
    tile_rows: int = 16384
    """Compute norms, adapters and feed-forward so many positions at a time (a multiple of 2048), so that their tensors
    are never whole; 0: whole. Without effect where `memory.recompute` is off."""
    keep_attention: str = "none"
    """Keep what attention has computed (output, and log-sum-exp, which joins what is computed in pieces), so that a
    layer's recomputation does not do it again: `none`; a number: in the last so many layers with attention; `auto`: in
    all. Gradients stay the same to the bit. In layers whose inputs wait in pinned host memory the output does too:
    `prefix-train budget` shows how much. Needs `memory.recompute`; without effect where attention's kernels are neither
    `merged` nor `joined`."""
    keep_middle: str = "none"
    """Keep a layer's hidden states between its token mixer and its feed-forward as well as its input, so that each half
    is recomputed by itself, the mixer without its last product: `none`; a number: in the last so many layers; `auto`:
    in all. Gradients stay the same to the bit. In layers whose inputs wait in pinned host memory these wait there too:
    as much again. Needs `memory.recompute`."""


@dataclass(frozen=True)
class StreamConfig:
    """`engine: stream`: frozen weights lie in a store on disk and pass through the device one block at a time."""

    store: str | None = None
    """Folder of the store, which `prefix-train stream build` makes of `model.path`."""
    check: Literal["hash", "size"] = "hash"
    """What a run compares of the store before its first update. `hash`: every byte with the hashes in its manifest. The
    store is read once for that, in up to 8 threads, while model and data are made ready; a core hashes 1 to 2 GB a
    second, so 20 GB take 10 to 20 s of one core, or as long as the disk needs to give them. `size`: sizes and headers
    of the files alone; a changed byte is then not seen."""
    budget_gib: float | None = None
    """Most device memory, in GiB, planned before the first update and held to; a run that needs more does not start."""
    slots: int = 3
    """Blocks that may be on the device at a time besides the resident ones: one is computed with while others come."""
    resident_blocks: str = "auto"
    """Blocks that stay on the device for the whole run: the last ones, with which backward begins. `auto`: as many as
    `budget_gib` has room for beside the largest pack; or a number."""
    packs_per_visit: int = 1
    """Packs that a block computes each time it is there; the packs of an update go through the model in such groups."""
    host: Literal["files", "pinned"] = "files"
    """`files`: blocks are read from the store each time (from the page cache where that holds them). `pinned`: all of
    the store is read into pinned memory at the start, which must have room for it."""
    readers: int = 2
    """Threads that read blocks."""
    graphs: Literal["off", "auto", "on"] = "off"
    """Record what a block launches on the GPU as CUDA graphs, for each slot and resident block, direction and layout of
    packs, and repeat it by one call: gradients stay the same to the bit, and a visit costs the host next to nothing.
    What comes a first time is launched ordinarily, a second time it is recorded. `on`: an error where there can be none
    (with `adapter.dropout` unless `adapter.masks` is `counted`, with experts, without a GPU). `auto`: without graphs
    there. Takes memory of its own: `prefix-train budget` shows how much."""
    graph_layouts: int = 4
    """Layouts of packs (lengths and parents of their segments) whose recordings are kept, those that came last."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Held-out quality."""

    every: int = 0
    """Updates between evaluations; 0: only at the end."""
    examples: int | None = None
    """Held-out examples that are used; none: all."""
    generate: bool = True
    """Also generate answers, greedily, each shared beginning computed once, when training has ended; all ranks do."""
    metrics: list[str] = field(default_factory=lambda: ["exact"])
    """What is measured of the answers. `exact`: letter by letter. `json`: objects, field by field. `FILE.py:FUNCTION`:
    a function of your own; docs/guides/evaluation.md."""
    max_new_tokens: int = 64
    """Most tokens of a generated answer."""
    cache_tokens: int = 262144
    """Most tokens, prompts and answers, that the caches of answers which are generated together may hold on a rank."""
    chance: float | None = None
    """Accuracy that guessing would reach; printed beside the measured one."""


@dataclass(frozen=True)
class ReportConfig:
    """Who is told of the run besides metrics.jsonl and TensorBoard, whose files are always written."""

    trackers: list[str] = field(default_factory=list)
    """Experiment trackers, by Accelerate's names: `wandb`, `mlflow`, `trackio` and others; docs/guides/trackers.md."""
    project: str | None = None
    """The trackers' project (MLflow's experiment); none: `name`."""
    run_name: str | None = None
    """What the trackers show the run as; none: the run folder's name. trackio has the folder's name always."""
    offline: bool = False
    """Trackers write files and reach nothing: `wandb` and `mlflow` below `logs/` of the run folder."""


@dataclass(frozen=True)
class VerifyConfig:
    """The run's check of itself against transformers' own model."""

    examples: int = 0
    """Held-out examples that are compared at the end of training; 0: none (`prefix-train verify RUN` works anyway)."""
    mean_loss: float | None = None
    """Bound on the difference of mean losses; none: 1e-5 in float32, 2e-4 in bfloat16."""
    example_mean: float | None = None
    """Bound on the mean difference per example; none: 1e-5 in float32, 0.007 in bfloat16."""
    example_max: float | None = None
    """Bound on the largest difference of one example; none: 1e-4 in float32, 0.04 in bfloat16."""
    gradient: float | None = None
    """Bound on each gradient tensor's relative difference, float32 only; none: 1e-4."""


@dataclass(frozen=True)
class WatchConfig:
    """When a rank counts as stuck. Seconds, per phase."""

    poll_s: float = 1.0
    """How often a watcher reads the heartbeats."""
    start_s: float = 120.0
    """Longest wait of a rank for its node's watcher to start: a rank that nobody watches is not started."""
    load_s: float = 1800.0
    """Longest loading of model and data."""
    first_update_s: float = 3600.0
    """Longest first update of a process: compiling and autotuning belong here."""
    floor_s: float = 30.0
    """No later update is called stuck before this."""
    factor: float = 2.0
    """An update is stuck after max(floor_s, factor x the 99th percentile of the run's own updates)."""
    save_s: float = 1800.0
    """Longest checkpoint."""
    evaluate_s: float = 3600.0
    """Longest evaluation."""
    sample_gap_s: float = 5.0
    """Time between the two rounds of stack samples, which must agree."""
    collective_timeout_s: float = 7200.0
    """Timeout of the process group: longer than every deadline above, so that the watcher speaks first."""


@dataclass(frozen=True)
class PreflightConfig:
    """The gate before training."""

    enabled: bool = True
    """Without preflight a job starts on whatever it finds."""
    deadline_s: float = 120.0
    """A node that has not answered by then is `silent`."""
    packages: list[str] = field(default_factory=list)
    """Packages to compare besides those that always matter."""
    allow: list[str] = field(default_factory=list)
    """Findings that do not stop the job, by name, `host.memory` for one; each is shown in the report."""
    min_free_disk_gib: float = 1.0
    """Least free space of the run folder's file system."""
    min_free_memory_gib: float = 1.0
    """Least memory that the job can have on a node, within its cgroup; with GPUs at least 4 GiB per rank are wanted."""
    prove_pins: bool = True
    """With GPUs: run every kernel of the job before it starts, and count searches. Without, only the files are read."""
    prove_deadline_s: float = 300.0
    """Longest proof of the pins: a fresh machine compiles each kernel once."""
    start_s: float = 60.0
    """Longest time for a step of preflight to start on every node; it comes on top of the step's own deadline."""
    collectives: bool = True
    """Test the ranks' collectives, once the nodes are found fit and where there is more than one rank."""
    collective_deadline_s: float = 120.0
    """Longest test of the ranks' collectives."""
    min_pair_gib_s: float = 0.0
    """Least bandwidth between two nodes, GiB/s, besides half of the cluster's median; 0: no floor."""
    on_bad_node: Literal["stop", "exclude"] = "stop"
    """`exclude` resubmits once without the bad nodes."""


@dataclass(frozen=True)
class SlurmConfig:
    """What Slurm is asked for. Text is passed on letter by letter."""

    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    nodes: int = 1
    """Nodes."""
    tasks_per_node: int = 2
    """Ranks per node: one per GPU, or a number of CPU ranks."""
    gpus_per_node: int = 0
    """GPUs per node; 0: the ranks compute on the CPU."""
    cpus_per_task: int = 1
    """CPUs per rank."""
    mem: str | None = None
    """Memory per node, as Slurm writes it (`64G`)."""
    time: str = "1:00:00"
    """Time limit, as Slurm writes it: minutes, `h:mm:ss` or `d-h:mm:ss`. It holds for `cluster=local` too."""
    constraint: str | None = None
    """Features that nodes must have."""
    reservation: str | None = None
    """Reservation."""
    exclude: str | None = None
    """Nodes to leave out."""
    nodelist: str | None = None
    """Nodes to use."""
    dependency: str | None = None
    """Jobs to wait for."""
    comment: str | None = None
    """Comment."""
    mail_user: str | None = None
    """Who gets mail."""
    mail_type: str | None = None
    """Mail about what."""
    container_image: str | None = None
    """Container image (pyxis)."""
    container_mounts: str | None = None
    """What the image sees of the host (pyxis): `/scratch:/scratch,/home:/home`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines to run first (`module load ...`); a failing one ends the job."""
    signal_delay_s: int = 90
    """How long before the time limit the job is told to save."""
    max_requeues: int = 3
    """Most requeues for failures; requeues for time or preemption are not counted."""
    extra: dict[str, str] = field(default_factory=dict)
    """Any other sbatch option, by its long name."""


@dataclass(frozen=True)
class Config:
    """One complete run."""

    name: str = "run"
    """Part of the run folder's name."""
    seed: int = 0
    """Seed of order, packing, adapters and dropout."""
    cluster: Literal["slurm", "local", "debug"] = "slurm"
    """`slurm`; `local`: submitit's local executor on this machine; `debug`: in this process."""
    engine: Literal["sharded", "stream"] = "sharded"
    """`sharded`: FSDP2. `stream`: frozen weights pass through the GPU block by block."""
    run_root: str = "runs"
    """Folder that the run folders are made in."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def ranks(self) -> int:
        """Ranks that train together."""
        return 1 if self.cluster == "debug" else self.slurm.nodes * self.slurm.tasks_per_node
