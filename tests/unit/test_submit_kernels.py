"""Kernels that do not take the model are refused before the queue."""

from __future__ import annotations

import pytest

from configs.errors import UserError
from configs.schema import Config, ModelConfig, SlurmConfig
from slurm import planned

OLMO = {"model_type": "olmo2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def options(**model: str) -> Config:
    return Config(model=ModelConfig(build=OLMO, **model), slurm=SlurmConfig(gpus_per_node=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"heads": "fused"}, "heads=fused does not take attention that normalises all heads"),
        ({"elementwise": "fused"}, "elementwise=fused does not compute layers with norms behind their mixer"),
        ({"attention": "joined", "dtype": "float32"}, "'joined' on CUDA take bfloat16 .*, not float32"),
    ],
    ids=str,
)
def test_what_does_not_take_the_model_is_refused(asked: dict[str, str], message: str) -> None:
    for check in (planned.require, planned.sketch):
        with pytest.raises(UserError, match=message):
            check(options(**asked))
    planned.require(options())


def test_a_model_that_is_not_here_yet_is_the_job_s_matter() -> None:
    config = Config(model=ModelConfig(path="not/here", heads="fused"), slurm=SlurmConfig(gpus_per_node=1))
    planned.require(config)
