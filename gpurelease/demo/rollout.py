"""The rollout: the one place where the job uses gpurelease."""

from __future__ import annotations

import torch
from torch import Tensor

from gpurelease import releases_world, restored_world
from gpurelease.demo.engine import Answers, Engine
from gpurelease.demo.trainer import Trainer

# NCCL needs a GPU for each rank. Where there are not even two, Gloo poses as the backend to release.
BACKEND = "nccl" if torch.cuda.device_count() >= 2 else "gloo"


@releases_world(backends=BACKEND)
def rollout(engine: Engine, trainer: Trainer, prompts: Tensor) -> Answers:
    """Sample one answer for each prompt, while the trainer's communicators are gone.

    All ranks must call. The engine gets new weights in mid-rollout, as in pipelined RL: the first half of the answers
    is one step off-policy, which the trainer's importance ratio corrects.

    Args:
        engine: Samples the answers.
        trainer: Has the weights.
        prompts: This rank's prompts, of shape ``[count, LENGTH]``, one row for each answer.
    """
    first, second = prompts.chunk(2)
    stale = engine.generate(first)
    with restored_world():  # the weights are gathered over the trainer's own groups
        engine.load(trainer.full_weights())
    fresh = engine.generate(second)
    return Answers(*map(torch.cat, zip(stale, fresh, strict=True)))
