"""The sbatch script: submitit writes it, this module says what is in it.

A failing line of submitit's `setup` does not stop the job, and the status of its `teardown` replaces that of the
training. So each line here says what its failure means, and the first line after the ranks keeps their status.
"""

from __future__ import annotations

import io
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from configs import runfolder
from configs.errors import UserError
from configs.rules import time_limit_s
from configs.schema import Config
from slurm import acts, life, scheduler
from slurm.acts import Act
from slurm.finish import GATE_FAILED
from slurm.scheduler import NoAnswer

FOLDER = "submitit"
"""Folder within the run folder that is submitit's own: mode 0700, for it holds a pickled call."""

ELEMENT = "%a"
"""How Slurm writes an array element's number in the names of output files."""

LEAKS = ("SLURM", "SBATCH", "SRUN", "SUBMITIT", "PMI", "TORCHELASTIC")
"""Beginnings of variables that a job's environment must not bring into a job submitted from within it."""
NO_SLURM = re.compile(
    r"unable to contact slurm controller|could not establish a configuration source|failed to fetch config"
    r"|socket timed out|connection refused|zero bytes were transmitted",
    re.IGNORECASE,
)
"""How sbatch says that it reached no controller, whatever it asked for."""
PREFIX = re.compile(r"^sbatch: (?:(?:error|fatal): )?")
"""What sbatch begins its lines with."""
PLACE = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""Variables that give a process a place among torch's ranks: those of the shell that submits are not the job's."""


def without_leaks(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what an outer job left in it; SLURM_CONF stays, it says where the cluster is."""

    def stays(name: str) -> bool:
        return name == "SLURM_CONF" or (name not in PLACE and not name.startswith(LEAKS))

    return {name: text for name, text in environment.items() if stays(name)}


def script(config: Config, run: Path, members: int = 0) -> str:
    """The text of the sbatch script for `run`; nothing is written or submitted.

    members: `run` holds that many runs, 0, 1, ..., which are the elements of one job array.
    """
    executor = _executor(config, run, members)
    if members:
        executor.parameters["map_count"] = members
    return str(executor._make_submission_file_text(executor._submitit_command_str, "")) + "\n"


def submit(config: Config, run: Path) -> str:
    """Submit the job of `run` and return its id. UserError where there is no Slurm or it refuses the job."""
    (job,) = _submit(config, run, [run], 0)
    return job


def submit_array(config: Config, folder: Path, members: Sequence[Path]) -> list[str]:
    """Submit the runs 0, 1, ... in `folder` as one job array, at least two; their ids. Raises as `submit` does."""
    return _submit(config, folder, members, len(members))


def _submit(config: Config, folder: Path, runs: Sequence[Path], members: int) -> list[str]:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from slurm.job import run_rank

    if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
        raise UserError(f"no {missing[0]} here: submit from a login node of the cluster, or give cluster=local")
    try:
        make_folder(folder)
        # submitit also prints what sbatch says to stderr; the error below says it.
        with _environment(without_leaks(os.environ)), redirect_stderr(io.StringIO()):
            jobs = _executor(config, folder, members).map_array(run_rank, [str(run) for run in runs])
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(refusal(str(error))) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    ids = [str(job.job_id) for job in jobs]
    _record(runs, ids)
    return ids


def refusal(said: str) -> str:
    """What sbatch said, as one line, and what to do where no Slurm answers here."""
    lines = [PREFIX.sub("", line.strip()) for line in said.splitlines() if line.strip()]
    if NO_SLURM.search(said):
        return (
            f"no Slurm answers here ({lines[-1]}): submit from a login node of the cluster, or give cluster=local to "
            "run on this machine"
        )
    return f"Slurm refused the job: {'; '.join(lines)}"


def _record(runs: Sequence[Path], jobs: Sequence[str]) -> None:
    """Write each run's job into its folder. A job that cannot be found again from there is taken back."""
    try:
        for run, job in zip(runs, jobs, strict=True):
            runfolder.write_text(run / runfolder.JOB, f"{job}\n")
    except OSError as error:
        number = jobs[0].partition("_")[0]
        try:
            scheduler.ask("scancel", number)
        except NoAnswer as silence:
            raise UserError(f"{error}; job {number} is submitted: cancel it ({silence})") from error
        raise UserError(f"{error}; job {number} was cancelled") from error


def make_folder(run: Path) -> Path:
    """submitit's folder in the run folder."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _executor(config: Config, run: Path, members: int) -> Any:
    from submitit import SlurmExecutor

    class Executor(SlurmExecutor):
        """Also writes the script where there is no Slurm."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    executor = Executor(run / FOLDER, max_num_timeout=config.slurm.max_requeues)
    executor.update_parameters(**_parameters(config, run, members))
    return executor


def _parameters(config: Config, folder: Path, members: int) -> dict[str, Any]:
    """What submitit's Slurm executor is told."""
    slurm, run = config.slurm, folder / ELEMENT if members else folder
    given = {name: getattr(slurm, name) for name in ("partition", "account", "qos", "mem", "constraint", "exclude")}
    given |= {name: getattr(slurm, name) for name in ("nodelist", "dependency", "comment", "mail_user", "mail_type")}
    extra: dict[str, Any] = {name: text or True for name, text in slurm.extra.items()}
    if slurm.reservation:
        extra["reservation"] = slurm.reservation
    # Slurm gets the user's own words; submitit counts in minutes.
    extra |= {"time": slurm.time, "output": str(run / runfolder.LOGS / "job-%j.log"), "requeue": True}
    return {
        **{name: value for name, value in given.items() if value},
        "job_name": folder.name,
        "time": max(1, time_limit_s(slurm.time) // 60),
        "nodes": slurm.nodes,
        "ntasks_per_node": slurm.tasks_per_node,
        "cpus_per_task": slurm.cpus_per_task,
        "gpus_per_node": slurm.gpus_per_node or None,
        "signal_delay_s": slurm.signal_delay_s,
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": extra,
        "setup": list(_setup(config, run)),
        "teardown": list(_teardown(run)),
        "srun_args": ["--kill-on-bad-exit=1", *_step_options(config)],
    }


def _setup(config: Config, run: Path) -> Iterator[str]:
    yield f"PREFIX_TRAIN_RUN={_folder(run)} PREFIX_TRAIN_PYTHON={shlex.quote(sys.executable)}"
    yield "export PYTHONSAFEPATH=1"
    finish = _line(acts.command("slurm.finish", str(run)), run)
    yield f'stop() {{ PYTHONPATH="$PREFIX_TRAIN_RUN/{runfolder.CODE}" {finish} "$1:$2"; exit $?; }}'
    for number, line in enumerate(config.slurm.setup, 1):
        yield line
        yield f"rc=$?; [ $rc -eq 0 ] || stop 'setup line {number}' $rc"
    # After the user's lines: loading a module may put other folders before the frozen code.
    yield f'export PYTHONPATH="$PREFIX_TRAIN_RUN/{runfolder.CODE}${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield f"{life.VARIABLE}=$({_line(acts.command('slurm.life', str(run)), run)}) || exit $?"
    yield f"export {life.VARIABLE}"
    for act in acts.before_training(config, run):
        yield _act(act, config, run)
    log = f"--output={run / runfolder.LOGS / 'watch-%j-%n.log'}"
    watch = _node_step(config, "--overlap", "--mem=0", log)
    # srun tells how the watchers ended when the job's last line may be out: not in the job's log.
    said = f'>>"$PREFIX_TRAIN_RUN/{runfolder.LOGS}/watch-$SLURM_JOB_ID.log" 2>&1'
    yield f"{watch} {_line(acts.command('slurm.watch', str(run)), run)} {said} &"
    yield _line(acts.command("slurm.presence", str(run)), run)


def _folder(run: Path) -> str:
    """The run folder as a shell word."""
    if run.name == ELEMENT:
        return f'{shlex.quote(str(run.parent))}/"$SLURM_ARRAY_TASK_ID"'
    return shlex.quote(str(run))


def _teardown(run: Path) -> Iterator[str]:
    yield "rc=$?"
    yield '[ -d "$PREFIX_TRAIN_RUN" ] || { echo "failed: the run folder $PREFIX_TRAIN_RUN is gone" >&2; exit 1; }'
    yield f"{_line(acts.command('slurm.finish', str(run)), run)} $rc"
    yield "exit $?"


def _act(act: Act, config: Config, run: Path) -> str:
    line = _line(act.argv, run)
    if act.where != "once":
        # A node that does not even start its task would keep srun for ever; the judge sees who is missing.
        limit = f"timeout --kill-after=10 {math.ceil(act.seconds + config.preflight.start_s)}"
        step = _node_step(config) if act.where == "node" else _rank_step(config)
        alone = f'{limit} {_step(config, 1, 1, 1)} --nodelist="$node" {line}'
        line = f"{limit} {step} {line}" + (f"; {_silent_alone(alone)}" if act.where == "node" else "")
    if act.name == acts.GATE:
        finish = _line(acts.command("slurm.finish", str(run), f"{act.name}:1"), run)
        nodes = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)"'
        return f"{line} --nodes {nodes} || {{ {finish}; exit {GATE_FAILED}; }}"
    return f"{line} || stop {act.name} $?" if act.decides else line


def _silent_alone(line: str) -> str:
    """`line` once more for each `$node` without an answer, all at a time, unless srun was ended for its time.

    Where a step cannot start on one node, srun ends it on all: those that are fit would count as silent too.
    """
    nodes = '$(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    answer = f'"$PREFIX_TRAIN_RUN/{runfolder.PREFLIGHT}/${life.VARIABLE}/$node.json"'
    return f"[ $? -ge 124 ] || (for node in {nodes}; do [ -e {answer} ] || {line} & done; wait)"


def _node_step(config: Config, *options: str) -> str:
    """srun with one task on every node."""
    return _step(config, config.slurm.nodes, config.slurm.nodes, 1, *options)


def _rank_step(config: Config) -> str:
    """srun with one task for every rank, dealt to the nodes and with the devices of the training step."""
    return _step(config, config.slurm.nodes, config.ranks, config.slurm.tasks_per_node)


def _step(config: Config, nodes: int, tasks: int, per_node: int, *options: str) -> str:
    counts = ("srun", f"--nodes={nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={per_node}")
    return shlex.join((*counts, *options, *_step_options(config)))


def _step_options(config: Config) -> list[str]:
    """Options of every step: srun does not take these over from sbatch."""
    options = [f"--cpus-per-task={config.slurm.cpus_per_task}"]
    if config.slurm.container_image:
        options.append(f"--container-image={config.slurm.container_image}")
    if config.slurm.container_mounts:
        options.append(f"--container-mounts={config.slurm.container_mounts}")
    return options


def _line(argv: tuple[str, ...], run: Path) -> str:
    """`argv` as shell words, interpreter and run folder by the script's variables."""
    known = {sys.executable: '"$PREFIX_TRAIN_PYTHON"', str(run): '"$PREFIX_TRAIN_RUN"'}
    return " ".join(known.get(word) or shlex.quote(word) for word in argv)


@contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
    """Run the block, and the programs that it starts, in `environment`."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
