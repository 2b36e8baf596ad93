"""`python -m slurm.local RUN`: one job on this machine, its acts in order, in the foreground.

With `cluster=local` the ranks are submitit's local executor's, with a watcher beside them; with `debug` the only rank
is this very process. Neither submitit's status nor its result is asked: how the job ended is read from the run folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import psutil
import typer

from configs import runfolder
from configs.compose import from_run
from configs.console import make_app, print_json
from configs.console import run as run_app
from configs.rules import time_limit_s
from configs.schema import Config
from slurm import acts, ending, finish, job, life
from slurm.acts import Act
from slurm.finish import Outcome
from slurm.live import Live
from slurm.sbatch import make_folder

STOPPING = "stopping after this update; Ctrl-C again ends at once"
LOOK_EVERY_S = 0.2
END_WATCHER_S = 5.0


def run_job(run: Path) -> Outcome:
    """All acts of the job in `run`, then its ranks."""
    config = from_run(run)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a script's `&` had SIGINT ignored
        signal.signal(number, _interrupt)
    life.begin_next(run)
    (run / runfolder.LOGS).mkdir(exist_ok=True)
    for act in acts.before_training(config, run):
        status = _run_act(act, run)
        if status and act.decides:
            return finish.act_failed(run, act.name, status)
    os.environ[job.PORT] = str(_free_port())
    return _train_here(config, run) if config.cluster == "debug" else _train_in_ranks(config, run)


def _run_act(act: Act, run: Path) -> int:
    """Run one act to its end; one that is judged later leaves what it prints in the logs.

    It has a process group of its own: a Ctrl-C in the terminal is answered here, which ends all that the act started.
    """
    with contextlib.ExitStack() as stack:
        path = run / runfolder.LOGS / f"{act.name}.log"
        log = None if act.decides else stack.enter_context(path.open("ab"))
        process = subprocess.Popen(act.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        try:
            return process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _train_in_ranks(config: Config, run: Path) -> Outcome:
    from submitit import LocalExecutor

    gpus = config.slurm.gpus_per_node
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        os.environ[job.DEVICES] = ",".join(visible.split(",")[:gpus])
    executor = LocalExecutor(make_folder(run))
    executor.update_parameters(  # all of them always: submitit's own limit is two minutes, and it hides all GPUs
        timeout_min=time_limit_s(config.slurm.time) / 60,
        signal_delay_s=config.slurm.signal_delay_s,
        gpus_per_node=gpus,
        tasks_per_node=config.slurm.tasks_per_node,
    )
    live = Live(run, config.train.updates)
    asked = Asked(config.slurm.signal_delay_s)  # before anything has started that would be left over
    with _ignored(signal.SIGINT):  # submitit's processes inherit this: a Ctrl-C in the terminal is answered here alone
        ranks = executor.submit(job.run_rank, str(run))
    controller: subprocess.Popen[bytes] = getattr(ranks, "_process")  # noqa: B009  submitit keeps it to itself
    watcher = subprocess.Popen(
        acts.command("slurm.watch", str(run), "--parent", str(os.getpid())), stdin=subprocess.DEVNULL, process_group=0
    )
    try:
        while not ranks.done():
            live.show()
            asked.answer(controller)
            time.sleep(LOOK_EVERY_S)
        live.show(rest=True)
        watcher.wait(END_WATCHER_S + config.watch.poll_s)
    except subprocess.TimeoutExpired:
        pass  # a rank that never started leaves nothing for the watcher to see
    finally:
        live.close()
        _end(controller, watcher)
    ended = finish.interrupted(run, finish.conclude(run, 0), asked.number)
    live.show_held(ended.line)
    return ended


class Asked:
    """What a person asked of this process: first to stop after the update under way, then to end at once.

    patience_s: how long the ranks may take to save before they are ended all the same, as before a time limit.
    number: the signal that asked, 0 for none.
    """

    def __init__(self, patience_s: float) -> None:
        self.number = 0
        self._times = self._answered = 0
        self._patience_s, self._until = patience_s, math.inf
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.number, self._times = number, self._times + 1

    def answer(self, controller: subprocess.Popen[bytes]) -> None:
        """Pass on to the ranks what has been asked since the last answer."""
        if self._answered == 1 and time.monotonic() > self._until:
            self._times = 2
        if self._times == self._answered:
            return
        self._answered = self._times
        if self._times == 1:
            self._until = time.monotonic() + self._patience_s
            print(STOPPING, file=sys.stderr, flush=True)
            controller.send_signal(signal.SIGTERM)  # submitit passes it on, and the ranks save
        else:
            _kill(controller)


def _kill(controller: subprocess.Popen[bytes]) -> None:
    """End submitit's controller and all that it started."""
    try:
        below = psutil.Process(controller.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    controller.kill()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    controller.wait()


def _train_here(config: Config, run: Path) -> Outcome:
    """The only rank, in this process: no watcher, and an exception comes out as it is."""
    from submitit import DebugExecutor

    from slurm.rank import run_here

    rank = DebugExecutor(make_folder(run)).submit(run_here, run)
    os.environ["SUBMITIT_EXECUTOR"], os.environ["SUBMITIT_DEBUG_JOB_ID"] = "debug", str(rank.job_id)
    os.environ.update(job.rank_environment(config, job.find_place(os.environ), os.environ))
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: _ask_here(asked, number))
    # `exception` runs it here; `result` would drop into pdb.
    if (error := rank.exception()) is not None:
        failed = finish.conclude(run, 0)
        ending.write(run, failed.status, failed.cause, failed.line)
        raise error
    return finish.interrupted(run, finish.conclude(run, 0), asked[0] if asked else 0)


def _ask_here(asked: list[int], number: int) -> None:
    """First have the trainer of this process save, by the signal that it listens to, then end."""
    if asked:
        _interrupt(number, None)
    asked.append(number)
    print(STOPPING, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _end(controller: subprocess.Popen[bytes], watcher: subprocess.Popen[bytes]) -> None:
    """Leave no process behind, whatever ended this one."""
    if controller.poll() is None:
        _kill(controller)
    if watcher.poll() is None:
        watcher.terminate()
        watcher.wait()


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _ignored(number: int) -> Iterator[None]:
    """Ignore signal `number` in the block, and in the processes that it starts to their end."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


app = make_app("Run a job on this machine. Called by slurm.submit. Example: python -m slurm.local runs/demo-1")


@app.command()
def main(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> int:
    """Exit with the training's own status; the last line is the result."""
    try:
        ended = run_job(run)
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        ended = finish.interrupted(run, Outcome(128 + number, ""), number)
    ending.write(run, ended.status, ended.cause, ended.line)
    print(ended.line, file=sys.stdout if ended.status == 0 else sys.stderr, flush=True)
    if ended.status == 0:
        print_json(runfolder.read_json(run / runfolder.RESULT))
    return ended.status


if __name__ == "__main__":
    run_app(app)
