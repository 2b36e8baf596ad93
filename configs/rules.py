"""Rules beyond an option's type. Each error says what to change; no value is ever rewritten."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter

from configs import metric_names, tracker_names
from configs.errors import UserError
from configs.schema import Config, StreamConfig

AT_LEAST: dict[str, float] = {
    "seed": 0,
    "model.seed": 0,
    "pack.max_positions": 1,
    "pack.min_shared": 1,
    "pack.packs_per_update": 1,
    "pack.examples_per_update": 1,
    "data.max_example_tokens": 1,
    "adapter.rank": 1,
    "train.warmup_updates": 0,
    "train.updates": 1,
    "train.weight_decay": 0,
    "train.clip_norm": 0,
    "train.loss_chunk_rows": 1,
    "train.loss_chunk_words": 0,
    "train.save_every": 0,
    "train.keep_checkpoints": 1,
    "train.threads": 1,
    "stream.slots": 2,
    "stream.packs_per_visit": 1,
    "stream.readers": 1,
    "stream.graph_layouts": 1,
    "evaluate.every": 0,
    "evaluate.examples": 1,
    "evaluate.max_new_tokens": 1,
    "evaluate.cache_tokens": 1,
    "evaluate.chance": 0,
    "verify.examples": 0,
    "verify.mean_loss": 0,
    "verify.example_mean": 0,
    "verify.example_max": 0,
    "verify.gradient": 0,
    "watch.factor": 1,
    "preflight.deadline_s": 1,
    "slurm.nodes": 1,
    "slurm.tasks_per_node": 1,
    "slurm.gpus_per_node": 0,
    "slurm.cpus_per_task": 1,
    "slurm.signal_delay_s": 0,
    "slurm.max_requeues": 0,
}
ABOVE_ZERO = (
    "adapter.alpha",
    "train.lr",
    "train.epochs",
    "train.eps",
    "stream.budget_gib",
    "watch.poll_s",
    "watch.load_s",
    "watch.first_update_s",
    "watch.floor_s",
    "watch.save_s",
    "watch.evaluate_s",
    "watch.sample_gap_s",
)
AT_MOST: dict[str, float] = {"model.seed": 2**64 - 1, "evaluate.chance": 1, "stream.slots": 4}
FRACTIONS = ("adapter.dropout", "train.beta1", "train.beta2")

DEADLINES = ("load_s", "first_update_s", "floor_s", "save_s", "evaluate_s")

SLURM_TEXT = (
    *("partition", "account", "qos", "mem", "time", "constraint", "reservation", "exclude", "nodelist"),
    *("dependency", "comment", "mail_user", "mail_type", "container_image", "container_mounts"),
)

COUNTED_RANK = 64
"""Largest rank of adapters whose masks GPUs draw in registers."""

WRITTEN_BY_SUBMIT = frozenset({"job-name", "output", "error", "open-mode", "signal", "array", "wrap", "requeue"})
"""sbatch options that the suite itself depends on; `slurm.extra` may not change them."""

SIGNAL_SLACK_S = 60
"""Slurm looks at time limits now and then: its warning comes up to this much earlier than it was asked to."""


def check(config: Config, source: str) -> None:
    """Raise UserError, beginning with `source`, for the first broken rule."""
    for broken in _broken(config):
        raise UserError(f"{source}: {broken}")


def accepts(config: Config) -> bool:
    """Whether `config` breaks no rule."""
    return next(_broken(config), None) is None


def time_limit_s(text: str) -> int:
    """Seconds of a time limit as Slurm writes it: `m`, `m:s`, `h:m:s`, `d-h`, `d-h:m`, `d-h:m:s`. ValueError else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a time limit")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1, 0)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _broken(config: Config) -> Iterator[str]:
    yield from _ranges(config)
    yield from _choices(config)
    yield from _memory(config)
    yield from _elementwise(config)
    yield from _shape(config)
    yield from _masks(config)
    yield from _streaming(config)
    yield from metric_names.broken(config.evaluate.metrics)
    report = config.report
    yield from tracker_names.broken(report.trackers, report.project, report.run_name, report.offline)
    yield from _watching(config)
    if config.cluster != "debug":
        yield from _time(config)
    if config.cluster == "slurm":
        yield from _sbatch(config)


def _ranges(config: Config) -> Iterator[str]:
    for key, least in AT_LEAST.items():
        value = attrgetter(key)(config)
        if value is not None and value < least:
            yield f"{key} is {value}: give {least} or more"
    for key in ABOVE_ZERO:
        value = attrgetter(key)(config)
        if value is not None and value <= 0:
            yield f"{key} is {value}: give more than 0"
    for key, most in AT_MOST.items():
        if (value := attrgetter(key)(config)) is not None and value > most:
            yield f"{key} is {value}: give {most} or less"
    for key in FRACTIONS:
        if not 0 <= (value := attrgetter(key)(config)) < 1:
            yield f"{key} is {value}: give a number from 0 up to, not including, 1"


def _choices(config: Config) -> Iterator[str]:
    """What has to be given, and what only in one of several ways."""
    pack, train = config.pack, config.train
    yield from _one_of("model.path", config.model.path, "model.build", config.model.build or None)
    if not config.data.train:
        yield "give data.train, the file with the training examples"
    packs, examples = pack.packs_per_update, pack.examples_per_update
    yield from _one_of("pack.packs_per_update", packs, "pack.examples_per_update", examples)
    yield from _one_of("train.updates", train.updates, "train.epochs", train.epochs)
    if train.trainable == "adapter" and not config.adapter.targets:
        yield "adapter.targets is empty: name modules, or set train.trainable=all"
    if config.data.heldout is None:
        if config.evaluate.every:
            yield "evaluate.every needs held-out examples: give data.heldout or set evaluate.every=0"
        if config.verify.examples:
            yield "verify.examples needs held-out examples: give data.heldout or set verify.examples=0"


def _one_of(key: str, value: object, other_key: str, other: object) -> Iterator[str]:
    """What is wrong unless just one of two options is given."""
    if value is None and other is None:
        yield f"give {key} or {other_key}; neither is there"
    elif value is not None and other is not None:
        yield f"{key} and {other_key} are both given: take one back with {key}=null or {other_key}=null"


def _memory(config: Config) -> Iterator[str]:
    """What is kept between forward and backward."""
    memory = config.memory
    if memory.tile_rows < 0 or memory.tile_rows % 2048:
        yield f"memory.tile_rows is {memory.tile_rows}: give a multiple of 2048, or 0"
    for name in ("offload", "keep_attention", "keep_middle"):
        layers = getattr(memory, name)
        if layers not in ("auto", "none") and not re.fullmatch(r"[1-9]\d*", layers):
            yield f"memory.{name} is {layers!r}: give auto, none or a number of layers"
        if layers != "none" and not memory.recompute and name != "offload":
            yield f"memory.{name}={layers} with memory.recompute=false: everything is kept; set it to none"
    if memory.offload != "none" and not memory.recompute:
        yield (
            f"memory.offload={memory.offload} with memory.recompute=false: layers that are not recomputed keep "
            "far more than their inputs; set memory.recompute=true or memory.offload=none"
        )


def _elementwise(config: Config) -> Iterator[str]:
    """Kernels of norms and activations compute the layers that are recomputed in tiles."""
    asked, memory = config.model.elementwise, config.memory
    if asked in ("liger", "fused") and not (memory.recompute and memory.tile_rows):
        off = "memory.tile_rows=0" if memory.recompute else "memory.recompute=false"
        yield (
            f"model.elementwise={asked} with {off}: these kernels compute layers that are recomputed in tiles; set "
            "memory.recompute=true and memory.tile_rows=16384, or model.elementwise=auto"
        )


ON_ANY_DEVICE = {
    "model.attention": ("auto", "merged", "dense"),
    "model.deltanet": ("auto", "reference"),
    "model.elementwise": ("auto", "torch"),
    "model.heads": ("auto", "torch"),
}
"""Kernels that need no GPU; of `auto` some are such."""


def _shape(config: Config) -> Iterator[str]:
    """Ranks, nodes and devices fit each other."""
    slurm, packs = config.slurm, config.pack.packs_per_update
    if config.cluster != "slurm" and slurm.nodes != 1:
        yield f"cluster={config.cluster} is this machine alone: set slurm.nodes=1 instead of {slurm.nodes}"
    if packs is not None and packs % config.ranks:
        more = -(-packs // config.ranks) * config.ranks
        yield f"pack.packs_per_update={packs} is no multiple of the {config.ranks} ranks: give for example {more}"
    if slurm.gpus_per_node and config.cluster != "debug" and slurm.gpus_per_node != slurm.tasks_per_node:
        yield (
            f"slurm.gpus_per_node={slurm.gpus_per_node} with slurm.tasks_per_node={slurm.tasks_per_node}: "
            "there is one rank per GPU, so give both the same number"
        )
    if not slurm.gpus_per_node:
        for key, elsewhere in ON_ANY_DEVICE.items():
            if (kernels := attrgetter(key)(config)) not in elsewhere:
                yield f"{key}={kernels} needs GPUs: give slurm.gpus_per_node, or set {key}={elsewhere[0]}"


def _masks(config: Config) -> Iterator[str]:
    """Counted masks are for GPUs to draw in registers; a CPU writes them out, whatever the other options are."""
    adapter, memory = config.adapter, config.memory
    drops = config.train.trainable == "adapter" and adapter.dropout > 0
    if adapter.masks != "counted" or not drops or not config.slurm.gpus_per_node:
        return
    if adapter.rank > COUNTED_RANK:
        yield (
            f"adapter.masks=counted with adapter.rank={adapter.rank}: GPUs draw these masks for ranks up to "
            f"{COUNTED_RANK}; give a smaller rank or set adapter.masks=drawn"
        )
    if not memory.recompute or not memory.tile_rows:
        off = "memory.tile_rows=0" if memory.recompute else "memory.recompute=false"
        yield (
            f"adapter.masks=counted with {off}: GPUs draw these masks where layers are recomputed in tiles; set "
            "memory.recompute=true and memory.tile_rows=16384, or adapter.masks=drawn"
        )


def _streaming(config: Config) -> Iterator[str]:
    """What each engine needs, and what only the other has."""
    stream, train, evaluate = config.stream, config.train, config.evaluate
    if config.train.loss_chunk_words % 64:
        yield f"train.loss_chunk_words is {train.loss_chunk_words}: give a multiple of 64, or 0"
    if config.engine != "stream":
        defaults = StreamConfig()
        for field in fields(stream):
            if (value := getattr(stream, field.name)) != getattr(defaults, field.name):
                yield f"stream.{field.name}={value} with engine={config.engine}: leave it out, or set engine=stream"
        return
    for name, what in (("store", "the folder that `prefix-train stream build` made"), ("budget_gib", "GiB of memory")):
        if getattr(stream, name) is None:
            yield f"engine=stream needs stream.{name}: give {what}"
    if config.ranks != 1:
        yield f"engine=stream trains on one GPU: set slurm.nodes=1 and slurm.tasks_per_node=1 for {config.ranks} ranks"
    if train.trainable != "adapter":
        yield f"train.trainable={train.trainable} with engine=stream: only adapters can be trained; set it to adapter"
    if not config.memory.recompute:
        yield "memory.recompute=false with engine=stream: a block is gone before its backward; set it to true"
    for name in ("keep_attention", "keep_middle"):
        if getattr(config.memory, name) != "none":
            yield f"memory.{name} with engine=stream: a block keeps nothing but its input; set it to none"
    packs, together = config.pack.packs_per_update, stream.packs_per_visit
    if packs is not None and together > packs:
        yield f"stream.packs_per_visit={together} with pack.packs_per_update={packs}: give no more than there are"
    if stream.resident_blocks != "auto" and not re.fullmatch(r"\d+", stream.resident_blocks):
        yield f"stream.resident_blocks is {stream.resident_blocks!r}: give auto or a number of blocks"
    if stream.graphs == "on" and (dropout := config.adapter.dropout) and config.adapter.masks == "drawn":
        yield (
            f"stream.graphs=on with adapter.dropout={dropout:g} and adapter.masks=drawn: the host draws these masks; "
            "set adapter.masks=counted or stream.graphs=auto"
        )
    if stream.graphs == "on" and not config.slurm.gpus_per_node:
        yield "stream.graphs=on needs a GPU: give slurm.gpus_per_node, or set stream.graphs=auto"
    if config.data.heldout is not None and evaluate.generate:
        yield "evaluate.generate=true with engine=stream: answers need the whole model; set evaluate.generate=false"
    if config.verify.examples:
        yield "verify.examples with engine=stream: that needs the whole model; set it to 0, use `prefix-train verify`"


def _watching(config: Config) -> Iterator[str]:
    watch = config.watch
    longest = max(DEADLINES, key=lambda name: float(getattr(watch, name)))
    if watch.collective_timeout_s <= (seconds := getattr(watch, longest)):
        yield (
            f"watch.collective_timeout_s={watch.collective_timeout_s:g} is not longer than "
            f"watch.{longest}={seconds:g}: give more, so that the watcher speaks first"
        )


def _sbatch(config: Config) -> Iterator[str]:
    slurm = config.slurm
    texts = {f"slurm.{name}": getattr(slurm, name) for name in SLURM_TEXT}
    texts |= {f"slurm.extra.{name}": text for name, text in slurm.extra.items()}
    for key, text in texts.items():
        if text is not None and any(unicodedata.category(letter) == "Cc" for letter in text):
            yield f"{key} holds a line break or another control character: an sbatch line can't"
    if slurm.mem is not None and not re.fullmatch(r"(?i)\d+([KMGT](i?B)?)?", slurm.mem, re.ASCII):
        yield f"slurm.mem is {slurm.mem!r}: write a number and K, M, G or T, for example 500G; 0 is all of a node"
    if slurm.container_mounts is not None and slurm.container_image is None:
        yield "slurm.container_mounts without slurm.container_image: give the image too"
    own = set(SLURM_TEXT) | {"nodes", "gpus_per_node", "cpus_per_task"}
    for name, text in slurm.extra.items():
        if name.replace("-", "_") in own:
            yield f"slurm.extra.{name}: use slurm.{name.replace('-', '_')} instead"
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            yield f"slurm.extra.{name} is no long name of an sbatch option"
        if name in WRITTEN_BY_SUBMIT:
            yield f"slurm.extra.{name}: the suite sets --{name} itself"
        if name == "ntasks-per-node":
            yield "slurm.extra.ntasks-per-node: use slurm.tasks_per_node instead"
        if name == "export" and text.split(",")[0] != "ALL":
            yield f"slurm.extra.export={text}: begin with ALL, else the steps of the job have no PATH"
        if name == "distribution" and not text.startswith(("block", "*")):
            yield f"slurm.extra.distribution={text}: begin with block, for ranks are counted node by node"


def _time(config: Config) -> Iterator[str]:
    slurm = config.slurm
    try:
        limit = time_limit_s(slurm.time)
    except ValueError:
        yield f"slurm.time is {slurm.time!r}: write minutes, h:mm:ss or d-h:mm:ss"
        return
    slack = SIGNAL_SLACK_S if config.cluster == "slurm" else 0
    if limit <= (told := slurm.signal_delay_s + slack):
        yield (
            f"slurm.time={slurm.time} is {limit} s, but slurm.signal_delay_s={slurm.signal_delay_s} has the job told "
            f"to save up to {told} s before its end: give more time or a shorter signal_delay_s"
        )
