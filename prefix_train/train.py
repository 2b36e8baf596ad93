"""One rank of a training run: composes configuration, data, plan, model and reports, and walks the plan's updates.

The order of what happens is here; each thing that happens has its own file.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from statistics import fmean
from types import FrameType

import torch
import transformers
from torch import nn

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import (
    anatomy,
    biopsies,
    checkpoint,
    digits,
    dist,
    engines,
    gradients,
    kernels,
    machine,
    offload,
    outcome,
)
from prefix_train.budget import Shape
from prefix_train.dropout import counted_masks
from prefix_train.feed import Feed, load_agreed, shape_of
from prefix_train.heartbeat import Heartbeat
from prefix_train.heldout import Heldout
from prefix_train.plan import Cursor, RunPlan, Step
from prefix_train.recorder import Recorder
from prefix_train.render import Renderer
from prefix_train.report import Reporter, Update, memory_bytes
from prefix_train.step import Stepper, StepResult, learning_rate, update
from prefix_train.stream.whole import Check
from prefix_train.tensors import TensorError, digest, full_tensors

PROCESS = "memory is that of the whole process: Python, torch and the data with what a budget counts, the tensors"


def main(run: Path) -> int:
    """Train the run folder `run` as the rank that the environment names; the rank's exit status.

    0: the run is complete. runfolder.STOPPED: it was asked to stop (SIGUSR2 or SIGTERM), saved a checkpoint and can go
    on. Raises UserError for a user's mistake; the same on every rank.
    """
    config = compose.from_run(run)
    torch.set_num_threads(config.train.threads)
    # What transformers falls back to in the check of itself stands in result.json, under `kernels`.
    transformers.logging.set_verbosity_error()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    stop, beat = StopRequest(), Heartbeat(run, rank, world)
    with dist.joined(config.watch.collective_timeout_s) as ranks, Recorder(run, rank, lambda: beat.standing):
        if ranks.device.type == "cuda":
            ready_kernels(config, ranks, beat)
        closing = live(run, config, ranks, beat, stop)
        if closing is None:
            return runfolder.STOPPED
        beat.phase("evaluate")
        gc.collect()  # what trained is no longer needed, and its memory is
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        ready = outcome.restored(config, closing, ranks)
    if rank == 0:
        for line in outcome.lines(outcome.write(run, config, closing, ready, ranks.device)):
            print(line, flush=True)
    beat.phase("done")
    return 0


def live(run: Path, config: Config, ranks: dist.Ranks, beat: Heartbeat, stop: StopRequest) -> outcome.Closing | None:
    """One life of the run on this rank; what it leaves when training is complete, none where it was asked to stop."""
    with engines.checking(config) as check:
        life = Life(run, config, ranks, beat, check)
    with life.reporter:
        return life.close() if life.train(stop) else None


def ready_kernels(config: Config, ranks: dist.Ranks, beat: Heartbeat) -> None:
    """Pin the kernels that search, and compile them ahead: a phase of its own, for a new machine takes long for it."""
    beat.phase("compile")
    pinned = kernels.use_pins(dtype=config.model.dtype)
    seconds = kernels.compile_ahead(config, ranks.device)
    beat.phase("load")
    if ranks.rank == 0:
        print(f"{pinned}; compiled in {seconds:.0f} s; {machine.chosen(config, ranks.device)}", flush=True)


class StopRequest:
    """Set by SIGUSR2 (Slurm's warning before the time limit) and SIGTERM (preemption); read between updates."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class Life:
    """One process's part of a run, from loading to the end of training. check: of the store that weights come from."""

    def __init__(
        self, run: Path, config: Config, ranks: dist.Ranks, beat: Heartbeat, check: Check | None = None
    ) -> None:
        self.run, self.config, self.ranks, self.beat = run, config, ranks, beat
        ranks.together(lambda: prepare_data(config) if ranks.rank == 0 else None)
        model, processor = ranks.together(lambda: engines.load(config))
        renderer = Renderer(processor, model.config, targets=config.data.targets)
        examples = load_agreed(Path(config.data.train), renderer, config, ranks)
        self.feed = Feed(config, examples, ranks)
        self.heldout = Heldout.load(config, renderer, ranks)
        self.metrics = self.heldout.metrics(run / runfolder.METRIC_FILES, config, ranks) if self.heldout else []
        self.skipped = [*examples.skipped, *(self.heldout.skipped if self.heldout else [])]
        images = self.feed.images or bool(self.heldout and self.heldout.images)
        self.model = ranks.together(lambda: engines.prepare(model, config, ranks.device))
        # Before the pace is measured: both read the disk.
        checked = None if check is None else ranks.together(check.wait)
        self.root, self.offload = engines.make_root(self.model, config, ranks, images, self._largest_pack())
        self.parameters = anatomy.trainable(self.model)
        self.optimizer = make_optimizer(self.parameters, config)
        self.hash_before = digest(full_tensors(self.parameters, keep=ranks.rank == 0))
        self.heldout_losses: dict[int, float] = {}
        self.cursor = self._resume()
        if checked is not None:
            self.reporter.say(checked)
        self.stepper = self._make_stepper()

    def _largest_pack(self) -> Shape:
        """Of the first epoch and of the held-out examples."""
        heldout = self.heldout
        shapes = [self.feed.largest_pack()]
        if heldout is not None:
            targets = [int(example.target.sum()) for example in heldout.examples]
            shapes += [shape_of(pack, targets) for pack in heldout.packs(self.ranks.rank) if pack.members]
        return max(shapes, key=lambda shape: (shape.positions, shape.rows))

    def train(self, stop: StopRequest) -> bool:
        """Walk the plan's updates from where the run stands; False where the run was asked to stop and saved."""
        config, total = self.config, self.feed.plan.total
        began = time.monotonic()
        if self.cursor.number < total:
            self.beat.phase("data", self.cursor.number + 1)
        for ready in self.feed.walk(self.cursor):
            step, number = ready.step, ready.step.after.number
            for line in ready.skipped:
                self.reporter.say(f"update {number}: left out {line}")
            self.skipped += [line for line in ready.skipped if line not in self.skipped]
            self.beat.phase("forward", number)
            lr = learning_rate(
                step.cursor.number, total, config.train.lr, config.train.warmup_updates, config.train.schedule
            )
            result = update(self.stepper, number, lr, ready.batches)
            self._report(step, result, time.monotonic() - began)
            self.cursor = step.after
            last = number == total
            if self.heldout and (last or (config.evaluate.every and number % config.evaluate.every == 0)):
                try:
                    self._evaluate(number)
                except UserError:
                    self._save(number)  # a held-out example that is gone takes no update with it
                    raise
            stopping = self.ranks.any(stop.asked) and not last
            if last or stopping or (config.train.save_every and number % config.train.save_every == 0):
                self._save(number)
            if stopping:
                self.reporter.say(f"asked to stop: saved after update {number}; the run can go on from here")
                return False
            if not last:
                self.beat.phase("data", number + 1)
            began = time.monotonic()
        return True

    def close(self) -> outcome.Closing:
        """What is needed of all ranks to judge the result: gathered tensors, losses and figures."""
        if self.heldout and not self.heldout_losses:
            self.heldout_losses = self.heldout.losses(self.root, self.ranks)
        return outcome.Closing(
            full_tensors(self.parameters, keep=self.ranks.rank == 0 or outcome.answers_wanted(self.config)),
            self.hash_before,
            self.ranks.world,
            self.heldout,
            self.heldout_losses,
            self.metrics,
            self.stepper.coverage.covered,
            self.stepper.coverage.waiting,
            self.skipped,
            self.reporter.finish(),
            counted_masks(self.model),
        )

    def _resume(self) -> Cursor:
        """The run's place in its plan; starts the reporter there."""
        folder = self.ranks.together(lambda: newest_checkpoint(self.run))
        self.ranks.require_same("the checkpoint to go on from", folder.name if folder else "none")
        cursor, line = Cursor(), None
        if folder is not None:
            try:
                resumed = checkpoint.load(folder, self.ranks, self.parameters, self.optimizer, self.config)
            except TensorError as error:
                advice = "go on with the options that it was saved with, or begin a new run"
                raise UserError(f"{folder}: the checkpoint does not fit this run: {error}; {advice}") from error
            found, line = resumed.cursor, resumed.line
            if found.data != self.feed.digest and not resumed.may_have_other_data:
                raise UserError(f"{folder}: the data is not what it was when this was saved: {self.config.data.train}")
            plan = self.feed.plan.epoch(found.epoch)
            if plan.digest != found.plan and not resumed.changes:
                raise UserError(f"{folder}: the data is not what it was: the plan of epoch {found.epoch} has changed")
            # Under other options the epoch may have fewer updates than were done of it: then it is over.
            goes_on = found.done < len(plan.updates)
            cursor = Cursor(found.update, found.epoch + (not goes_on), found.done if goes_on else 0)
        self.reporter = self.ranks.together(
            lambda: Reporter(self.run, self.ranks.rank, self.feed.plan.total, cursor.number, self.config)
        )
        self.reporter.say(line or begins(self.feed.plan))
        if self.ranks.device.type == "cpu":
            self.reporter.say(PROCESS)
        if self.offload is not None:
            self.reporter.say(offload.describe(self.offload))
        return cursor

    def _make_stepper(self) -> Stepper:
        vision = self.root.anatomy.vision
        within = {id(parameter) for parameter in vision.parameters()} if vision is not None else set[int]()
        names = frozenset(name for name, parameter in self.parameters.items() if id(parameter) in within)
        return Stepper(
            self.root,
            self.parameters,
            self.optimizer,
            self.ranks,
            gradients.Coverage(list(self.parameters), names, self.config.train.warmup_updates),
            self.config.seed,
            self.config.train.clip_norm,
            self.feed.name,
            lambda name, pack: self.beat.phase(name, pack=pack),
        )

    def _report(self, step: Step, result: StepResult, seconds: float) -> None:
        memory = self.ranks.max(memory_bytes(self.ranks.device))
        within_epoch = (step.cursor.update + 1) / len(step.plan.updates)
        self.reporter.updated(
            Update(
                update=step.after.number,
                epoch=step.cursor.epoch + within_epoch,
                loss=result.loss,
                target_loss=result.target_loss,
                example_loss=result.example_loss,
                lr=result.lr,
                grad_norm=result.norm,
                packs=result.packs,
                examples=result.examples,
                targets=result.targets,
                positions=result.positions,
                logical_tokens=result.logical,
                seconds=seconds,
                memory_bytes=memory,
                more=self.root.metrics(seconds) | self._offloaded(),
            )
        )

    def _offloaded(self) -> dict[str, float]:
        return offload.metrics(self.offload, self.ranks) if self.offload is not None else {}

    def _evaluate(self, number: int) -> None:
        assert self.heldout is not None
        self.beat.phase("evaluate", number)
        self.heldout_losses = self.heldout.losses(self.root, self.ranks)
        self.reporter.evaluated(number, {"loss": fmean(self.heldout_losses.values())})

    def _save(self, number: int) -> None:
        self.beat.phase("save", number)
        at = self.cursor
        digest = self.feed.plan.epoch(at.epoch).digest
        cursor = checkpoint.Cursor(at.number, at.epoch, at.update, digest, self.feed.digest)
        checkpoint.save(self.run, self.ranks, self.parameters, self.optimizer, cursor, self.config)


def begins(plan: RunPlan) -> str:
    """What is begun, in one line: the plan's figures have been told when it was made."""
    return f"begins: {counted(plan.total, 'update')} of the plan with sha256 {plan.epoch(0).digest[:16]}"


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint to go on from; none: there is none. UserError where it is damaged: a person has to decide."""
    try:
        return checkpoint.latest(run)
    except TensorError as error:
        raise UserError(str(error)) from error


def prepare_data(config: Config) -> None:
    """Write the demonstration's data where the run asks for it and it is not there."""
    path = Path(config.data.train)
    if config.data.prepare == "none" or path.exists():
        return
    if path.name != digits.TRAIN:
        raise UserError(
            f"data.train: {path}: with data.prepare={config.data.prepare} the file's name is {digits.TRAIN}"
        )
    write = {"digits": digits.write_digits, "biopsies": biopsies.write_biopsies}[config.data.prepare]
    write(path.parent)


def make_optimizer(parameters: dict[str, nn.Parameter], config: Config) -> torch.optim.AdamW:
    """AdamW over everything that is trained; the learning rate is set anew for each update."""
    train = config.train
    return torch.optim.AdamW(
        parameters.values(),
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
    )
