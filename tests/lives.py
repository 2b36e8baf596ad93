"""Processes that are forked from one that has imported everything: a life of two ranks starts in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

PRELOADED = ["torch", "torch.distributed.fsdp", "transformers", "peft", "prefix_train.export", "prefix_train.report"]


def server() -> ForkServerContext:
    """The context of processes whose parent has imported PRELOADED and computed nothing yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(work: Callable[..., None], world: int, *arguments: Any, environment: dict[str, str]) -> list[BaseProcess]:
    """Start `work(rank, *arguments)` as `world` ranks with the variables that a launcher would set."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world), **environment}
    ranks = [server().Process(target=_run, args=(work, rank, place, arguments), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    return ranks


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _run(work: Callable[..., None], rank: int, place: dict[str, str], arguments: tuple[Any, ...]) -> None:
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    work(rank, *arguments)
