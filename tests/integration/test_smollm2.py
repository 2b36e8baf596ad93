"""A few updates of configs/smollm2-135m.yaml as a user starts it: a pretrained model learns, and packs are exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

from configs import compose, runfolder
from configs.schema import Config
from prefix_train import model as models
from prefix_train.dist import Ranks
from prefix_train.heldout import Heldout
from prefix_train.render import Renderer

REPOSITORY = Path(__file__).resolve().parents[2]
FEW = (
    *("train.epochs=null", "train.updates=5", "train.schedule=constant", "slurm.tasks_per_node=1"),
    *("pack.packs_per_update=1", "pack.max_positions=900", "evaluate.examples=12", "evaluate.generate=false"),
    *("verify.examples=2", "preflight.min_free_memory_gib=3"),
)


def run(*program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SUBMITIT"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *program], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def loss_before(config: Config) -> float:
    """Held-out loss of the pretrained model: fresh adapters change nothing."""
    model, processor = models.load(config.model)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    heldout = Heldout.load(config, Renderer(processor, model.config), ranks)
    assert heldout is not None
    prepared = models.prepare(model, config)
    root = models.Root(prepared, torch.float32, config.train.loss_chunk_rows, images=False)
    return fmean(heldout.losses(root, ranks).values())


@pytest.mark.slow
def test_a_pretrained_model_learns_a_real_task_and_packs_equal_examples_alone(tmp_path: Path) -> None:
    config = str(REPOSITORY / "configs" / "smollm2-135m.yaml")
    run("-m", "slurm.submit", config, *FEW, cwd=tmp_path)
    (folder,) = (tmp_path / "runs").glob("smollm2-135m-*")
    result = json.loads((folder / runfolder.RESULT).read_text())
    assert result["updates"] == 5
    assert (result["layers"], result["heldout_examples"]) == (30, 12)
    assert result["verify"]["passed"]
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()

    before = loss_before(compose.from_run(folder))
    assert result["heldout_loss"] < 0.5 * before

    answer = run("-m", "prefix_train.cli", "verify", str(folder), "--examples", "4", "--json", cwd=tmp_path)
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["passed"]
    assert found["tensors"] == 2 * 5 * 30
