"""One process of the job."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpurelease import Report
from gpurelease.demo.engine import Engine
from gpurelease.demo.meter import Meter
from gpurelease.demo.record import Step
from gpurelease.demo.rollout import BACKEND, rollout
from gpurelease.demo.task import make_prompts, reward
from gpurelease.demo.trainer import GROUP, Trainer

PROMPTS = 32  # per rank and step
TIMEOUT = timedelta(seconds=30)  # for a rank that does not come to a collective or a transition


@dataclass(frozen=True)
class Job:
    """What all ranks are told.

    Attributes:
        ranks: Number of processes.
        steps: Number of steps, each a rollout and an update.
        seed: Decides the initial policy, the prompts and the answers.
    """

    ranks: int
    steps: int
    seed: int


def run_rank(rank: int, job: Job, port: int, results: Connection) -> None:
    """Do one rank's part of the job.

    Args:
        rank: Which rank.
        job: What to do.
        port: Where the launcher's store listens on this machine.
        results: Where rank 0 sends a :class:`Step` after each step.
    """
    if rank != 0:
        results.close()  # so that the launcher sees the end of it when rank 0 dies
    torch.set_num_threads(1)
    # Its advice, to gather in another order, is not this trainer's to take.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    device = torch.device("cuda", rank) if BACKEND == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, timeout=TIMEOUT)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=job.ranks, timeout=TIMEOUT)

    torch.manual_seed(job.seed)
    trainer = Trainer(make_mesh(device, job.ranks), job.steps)
    chance = torch.Generator(device).manual_seed(job.seed * job.ranks + rank)
    engine = Engine(chance)
    engine.load(trainer.full_weights())
    with Meter(device) as meter:
        for number in range(1, job.steps + 1):
            prompts = make_prompts(PROMPTS, chance).repeat_interleave(GROUP, dim=0)
            before = meter.usage()
            answers, inside, report = rollout(engine, trainer, prompts, meter)
            after = meter.usage()
            rewards = reward(answers.prompts, answers.digits)
            trainer.update(answers, rewards)
            mean_reward = mean_over_ranks(rewards.mean())
            samples = meter.take_samples()
            if rank == 0:
                now = time.monotonic()
                results.send(Step(number, mean_reward, before, inside, after, report or Report(), samples, now))
    dist.destroy_process_group()


def make_mesh(device: torch.device, ranks: int) -> DeviceMesh:
    """Return a mesh of all ranks with tp = 2, or 1 where that would leave nothing to shard parameters over."""
    tp = 2 if ranks % 2 == 0 and ranks > 2 else 1
    return init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over all ranks. All ranks must call."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
