"""The rollout: the one place where the job uses gpurelease."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpurelease import Report, current_report, releases_world, restored_world
from gpurelease.demo.engine import Answers, Engine
from gpurelease.demo.meter import Meter, Usage
from gpurelease.demo.trainer import Trainer

# NCCL needs a GPU for each rank. Where there are not even two, Gloo poses as the backend to release.
BACKEND = "nccl" if torch.cuda.device_count() >= 2 else "gloo"


class Rollout(NamedTuple):
    """What a rollout gave, and what it took.

    Attributes:
        answers: One for each prompt.
        inside: What the rank held while the world was released.
        report: Has all releases and restores of the rollout once it has returned; None if the scope did nothing.
    """

    answers: Answers
    inside: Usage
    report: Report | None


@releases_world(backends=BACKEND)
def rollout(engine: Engine, trainer: Trainer, prompts: Tensor, meter: Meter) -> Rollout:
    """Sample one answer for each prompt, while the trainer's communicators are gone.

    All ranks must call. The engine gets new weights in mid-rollout, as in pipelined RL: the first half of the answers
    is one step off-policy, which the trainer's importance ratio corrects.

    Args:
        engine: Samples the answers.
        trainer: Has the weights.
        prompts: This rank's prompts, of shape ``[count, LENGTH]``, one row for each answer.
        meter: Tells what this rank holds.
    """
    first, second = prompts.chunk(2)
    inside, report = meter.usage(), current_report()
    stale = engine.generate(first)
    with restored_world():  # the weights are gathered over the trainer's own groups
        engine.load(trainer.full_weights())
    fresh = engine.generate(second)
    answers = Answers(*map(torch.cat, zip(stale, fresh, strict=True)))
    return Rollout(answers, inside, report)
