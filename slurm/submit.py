"""`python -m slurm.submit CONFIG [key=value ...]`: make a run folder of a configuration and start the job in it.

Also `python slurm/submit.py` from any folder. Works without torch: a login node answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # a script has its own folder on the path, not the one that holds the packages
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import shutil
import socket
import time
import unicodedata
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from configs import compose, metric_names, modelpath, runfolder, tracker_names
from configs.console import make_app, print_json
from configs.console import run as run_app
from configs.errors import UserError
from configs.schema import Config
from prefix_train import heartbeat, metrics
from preflight.names import check_allowed
from slurm import acts, finish, freeze, planned, records, sbatch, scheduler, standing, sweep
from slurm.scheduler import NoAnswer
from slurm.watch import is_alive

LIVELY_S = 60.0
"""A rank of another machine that has beaten within so many seconds and left no word of its end is taken to run."""

PATIENCE_S = 10.0
"""How long Slurm may take here to say whether a job is in its queue: somebody is waiting."""

MAX_NAME = 48
"""Letters of a run's name that go into its folder's name."""


def resolve(config: Config, folder: Path) -> Config:
    """`config` with absolute paths, relative ones being relative to `folder`; what must be there already is."""
    check_allowed(config.preflight.allow)

    def absolute(text: str | None) -> str | None:
        return None if text is None else os.path.abspath(folder / text)

    data = dataclasses.replace(
        config.data, train=absolute(config.data.train) or "", heldout=absolute(config.data.heldout)
    )
    path = config.model.path
    given = {"model.path": path, "data.train": config.data.train, "data.heldout": config.data.heldout}
    given |= {"stream.store": config.stream.store, "run_root": config.run_root}
    for key, text in given.items():
        if text is not None and text.startswith("~"):
            raise UserError(
                f"{key}: {text}: only a shell knows what ~ stands for: write the whole path, or ./~ for a ~"
            )
    model = dataclasses.replace(config.model, path=absolute(path if path is None else str(modelpath.locate(path))))
    needed = {"model.path": model.path}
    if data.prepare == "none":
        needed |= {"data.train": data.train, "data.heldout": data.heldout}
    for key, path in needed.items():
        if path is not None and not Path(path).exists():
            raise UserError(f"{key}: {path} does not exist; write {key}=PATH")
    own = [metric_names.absolute(name, folder) for name in config.evaluate.metrics]
    metrics.check(own)
    tracker_names.require(config.report.trackers)
    evaluate = dataclasses.replace(config.evaluate, metrics=own)
    stream = dataclasses.replace(config.stream, store=absolute(config.stream.store))
    run_root = absolute(config.run_root) or ""
    return dataclasses.replace(config, data=data, model=model, stream=stream, evaluate=evaluate, run_root=run_root)


def name_run(config: Config) -> Path:
    """A folder name that no other run has: name, time, and six random letters."""
    root = Path(config.run_root)
    for letter in str(root):
        if letter in ":%" or unicodedata.category(letter) == "Cc":
            raise UserError(f"run_root: {root} contains {letter!r}, which PYTHONPATH or Slurm would misread")
    slug = re.sub(r"[^\w.-]+", "_", config.name)[:MAX_NAME].strip("._-") or "run"
    return root / f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """What the block makes in `folder` stays only where nothing went wrong; what the disk refuses is a UserError."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        left = f"; remove {folder}, which is not whole" if folder.exists() else ""
        raise UserError(f"run_root: {folder} cannot be made: {_reason(error)}{left}") from error


def _reason(error: OSError) -> str:
    """One sentence; shutil puts one after the other for all files that could not be copied."""
    if isinstance(error, shutil.Error):
        _, target, why = error.args[0][0]
        return f"{target}: {why}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def make_run(config: Config, run: Path) -> None:
    """Make the run folder: the resolved configuration, the frozen code, and the script that starts the job."""
    run.mkdir(parents=True)
    for name in (runfolder.LOGS, runfolder.HEARTBEAT, runfolder.HANGS):
        (run / name).mkdir()
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
    freeze.freeze(run)
    metrics.freeze(run / runfolder.METRIC_FILES, config.evaluate.metrics)
    runfolder.write_text(run / runfolder.SUBMIT_SCRIPT, start_script(config, run))


def start_script(config: Config, run: Path) -> str:
    """What starts the job: the sbatch script, or the same for one machine."""
    if config.cluster == "slurm":
        return sbatch.script(config, run)
    code = shlex.quote(str(run / runfolder.CODE))
    return (
        "#!/bin/bash\n"
        f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1\n'
        f"exec {shlex.join(acts.command('slurm.local', str(run)))}\n"
    )


def become(run: Path, module: str, *arguments: str) -> None:
    """Become `module` of the run's frozen code: from here on nothing else runs."""
    environment = freeze.environment(run, sbatch.without_leaks(os.environ))
    sys.stdout.flush()
    argv = acts.command(module, *arguments)
    os.execve(argv[0], argv, environment)


def is_frozen(run: Path) -> bool:
    """Is this very module the run's own?"""
    return os.path.samefile(__file__, run / runfolder.CODE / "slurm" / "submit.py")


def describe(config: Config, run: Path, plan: dict[str, Any]) -> str:
    """Where the run is, and what is planned."""
    return "\n".join([f"run     {run}", *planned.lines(config, plan)])


def follow(config: Config, run: Path, job: str | None = None) -> str:
    """How to see where the run stands, and what its job and rank 0 say."""
    logs = [str(run / runfolder.LOGS / name) for name in ([f"job-{job}.log"] if job else []) + ["rank0.log"]]
    if config.cluster != "slurm":
        return f"follow  {shlex.join(['tail', '-F', *logs])}"
    status = shlex.join(["python", "-m", "slurm.status", str(run)])
    return f"follow  {status}\nlogs    {shlex.join(['tail', '-F', *logs])}"


def go_on(run: Path, overrides: list[str], dry_run: bool, as_json: bool) -> int:
    """Begin another life of an existing run, from its newest checkpoint, with its own code and options."""
    if not (run / runfolder.CODE / "slurm").is_dir():
        raise UserError(f"{run} is a folder, but not that of a run: give a configuration (YAML) or a run folder")
    if overrides:
        raise UserError(f"{run} is a run: its options are frozen; leave out {overrides[0]}, or submit a configuration")
    if not is_frozen(run):
        flags = [flag for flag, given in (("--dry-run", dry_run), ("--json", as_json)) if given]
        become(run, "slurm.submit", *flags, "--", str(run))
    config = compose.from_run(run)
    with runfolder.reading():
        if is_complete(run):
            print(f"complete already: {run / runfolder.RESULT}")
            print_json(runfolder.read_json(run / runfolder.RESULT))
            return 0
        if alive := still_running(run):
            raise UserError(f"{run} is still running: {alive}; wait for its end, or end it")
        if not dry_run:
            refuse_queued(run)
    planned.require(config)
    print(f"run     {run}\nresume  {finish.saved(run)}", flush=True)
    if dry_run:
        print(f"{follow(config, run)}\n\n{start_script(config, run)}", end="")
        return 0
    if config.cluster != "slurm":
        print(follow(config, run), flush=True)
        become(run, "slurm.local", str(run))
    job = sbatch.submit(config, run)
    print(f"job     {job}\n{follow(config, run, job)}")
    if as_json:
        print_json({"run": str(run), "job": job})
    return 0


@dataclasses.dataclass(frozen=True)
class _Verify:
    passed: bool = True


@dataclasses.dataclass(frozen=True)
class _Result:
    """What is read here of result.json."""

    verify: _Verify = _Verify()


def is_complete(run: Path) -> bool:
    """Whether the run has a result that stands up to its own verification. Raises Damaged."""
    path = run / runfolder.RESULT
    return path.is_file() and records.read(path, _Result).verify.passed


def still_running(run: Path) -> str | None:
    """A rank of the run's present life that runs, as far as can be seen from this machine, in words."""
    attempt = runfolder.current_attempt(run)
    ended = {end.rank for end in heartbeat.read_ends(run) if end.attempt == attempt}
    for beat in heartbeat.read(run):
        age = time.time() - beat.time
        runs = is_alive(beat) if beat.host == socket.gethostname() else age < LIVELY_S
        if beat.attempt == attempt and beat.rank not in ended and runs:
            return f"rank {beat.rank} on {beat.host} was in {beat.phase} of update {beat.update} {age:.0f} s ago"
    return None


def refuse_queued(run: Path) -> None:
    """UserError where the job that was submitted last for `run` is still in Slurm's queue.

    Where Slurm does not answer that is said, and the heartbeats, which have been looked at, decide: a run that can be
    gone on with shall not depend on a controller that is away.
    """
    if (job := standing.job_of(run)) is None:
        return
    try:
        state = scheduler.in_queue(job, PATIENCE_S)
    except NoAnswer as silence:
        told = f"whether job {job} of this run is still in the queue is not known ({silence}); no rank of it runs"
        print(told, file=sys.stderr, flush=True)
        return
    if state is not None:
        raise UserError(
            f"{run}: its job {job} is {state.state} ({state.reason}), and goes on with it; wait for its end, or give "
            f"it up: scancel {job}"
        )


def start_array(config: Path, overrides: list[str], sweeps: list[str], dry_run: bool, as_json: bool) -> int:
    """Start every combination of the swept options as an element of one job array, each with its own run folder."""
    chosen = sweep.combinations(sweeps)
    composed = [resolve(compose.load(config, [*overrides, *one]), Path.cwd()) for one in chosen]
    if composed[0].cluster != "slurm":
        raise UserError(f"--sweep makes a Slurm job array, and cluster is {composed[0].cluster}: give cluster=slurm")
    for one in composed:
        planned.require(one)
    folder = name_run(composed[0])
    runs = [folder / str(number) for number in range(len(composed))]
    print(
        f"sweep   {folder}", *(f"{run.name:<8}{' '.join(one)}" for run, one in zip(runs, chosen, strict=True)), sep="\n"
    )
    if dry_run:
        print(f"\n{sbatch.script(composed[0], folder, len(runs))}", end="")
        return 0
    with making(folder):
        for run, one in zip(runs, composed, strict=True):
            make_run(one, run)
        jobs = sbatch.submit_array(composed[0], folder, runs)
    status = shlex.join(["python", "-m", "slurm.status", "--root", str(folder)])
    print(f"jobs    {jobs[0]} to {jobs[-1]}\nfollow  {status}")
    if as_json:
        print_json({"sweep": str(folder), "runs": [str(run) for run in runs], "jobs": jobs, "options": chosen})
    return 0


app = make_app(
    "Compose, check, freeze the code and start a job. Example: python -m slurm.submit configs/digits.yaml cluster=local"
)


@app.command()
def main(
    config: Annotated[Path, typer.Argument(help="YAML file of a new run, or the folder of one to go on with.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Options to change.")] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="KEY=VALUE,VALUE,...: one job array with a run for each (repeat)."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")] = False,
) -> int:
    """Start a job; with cluster=local or debug, run it here and exit with the training's status."""
    if config.is_dir():
        return go_on(config.absolute(), overrides or [], dry_run, as_json)
    if (config.parent / runfolder.CODE).is_dir() and config.name == runfolder.CONFIG:
        command = shlex.join(["python", "-m", "slurm.submit", str(config.parent)])
        raise UserError(f"{config} belongs to a run; to go on with it: {command}")
    if sweeps:
        return start_array(config, overrides or [], sweeps, dry_run, as_json)
    composed = resolve(compose.load(config, overrides or []), Path.cwd())
    run, plan = name_run(composed), planned.sketch(composed)
    if dry_run:
        text = start_script(composed, run)
        print(f"{describe(composed, run, plan)}\n{follow(composed, run)}\n\n{text}", end="")
        if as_json:
            print_json({"run": str(run), "plan": plan, "script": text})
        return 0
    with making(run):
        make_run(composed, run)
        job = sbatch.submit(composed, run) if composed.cluster == "slurm" else None
    print(describe(composed, run, plan))
    if job is None:
        print(follow(composed, run), flush=True)
        become(run, "slurm.local", str(run))
    print(f"job     {job}\n{follow(composed, run, job)}")
    if as_json:
        print_json({"run": str(run), "plan": plan, "job": job})
    return 0


if __name__ == "__main__":
    run_app(app)
