"""Stand-ins for sbatch, srun and scontrol that refuse what they do not know; `srun` starts real processes here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

SBATCH = """
import re, shlex, sys
from pathlib import Path

KNOWN = set("account comment constraint cpus-per-task dependency exclude gpus-per-node job-name mem nodelist nodes "
            "ntasks-per-node open-mode output partition qos requeue signal time".split())
(path,) = sys.argv[1:]
for line in Path(path).read_text().splitlines():
    if line.startswith("#SBATCH"):
        (word,) = shlex.split(line[8:])
        name, _, value = word.removeprefix("--").partition("=")
        if name not in KNOWN:
            sys.exit(f"sbatch: unrecognized option '--{name}'")
        if name == "partition" and value != "gpu":
            sys.exit("sbatch: error: invalid partition specified: " + value)
leaked = [name for name in __import__("os").environ if name.startswith(("SLURM", "SBATCH")) and name != "SLURM_CONF"]
if leaked:
    sys.exit(f"sbatch: leaked {leaked}")
print("Submitted batch job 4711")
"""

SRUN = """
import os, subprocess, sys, time

options, words = {}, sys.argv[1:]
FLAGS = ("--unbuffered", "--overlap")
VALUES = ("--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--output", "--kill-on-bad-exit",
          "--mem")
while words and words[0].startswith("--"):
    name, equals, value = words.pop(0).partition("=")
    if name in FLAGS:
        options[name] = True
    elif name in VALUES:
        options[name] = value if equals else words.pop(0)
    else:
        sys.exit(f"srun: unrecognized option '{name}'")
tasks = int(options.get("--ntasks", os.environ["SLURM_NTASKS"]))
running = []
for task in range(tasks):
    env = {**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0"}
    out = options.get("--output", "/dev/stdout").replace("%j", env["SLURM_JOB_ID"]).replace("%t", str(task))
    with open(out.replace("%n", "0"), "ab") as stream:
        running.append(subprocess.Popen(words, env=env, stdout=stream, stderr=stream))
bad = 0
while any(task.poll() is None for task in running):
    if not bad and any(task.returncode for task in running) and options.get("--kill-on-bad-exit") == "1":
        bad = 143
        for task in running:
            task.terminate()
    time.sleep(0.05)
sys.exit(bad or max(task.returncode for task in running))
"""

SCONTROL = """
import sys
if sys.argv[1:3] != ["show", "hostnames"] or len(sys.argv) != 4:
    sys.exit("scontrol: " + " ".join(sys.argv[1:]))
print(sys.argv[3])
"""


def install(folder: Path) -> Path:
    """Put the stand-ins into `folder`, which goes first on the path."""
    folder.mkdir()
    for name, source in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        program = folder / name
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(0o755)
    return folder


def run_script(script: Path, programs: Path, tasks: int, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run an sbatch script as Slurm would run it on one node."""
    keep = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PREFIX_TRAIN_ATTEMPT")}
    env = {
        **keep,
        **{"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711", "SLURM_NTASKS": str(tasks)},
        **{"SLURM_JOB_NODELIST": os.uname().nodename, "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": str(restarts)},
    }
    return subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=120)


def options(script: str) -> dict[str, str]:
    """The #SBATCH options of a script."""
    words = [shlex.split(line)[0] for line in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)
