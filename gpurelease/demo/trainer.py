"""The trainer: GRPO on FSDP2 and tensor parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LinearLR

from gpurelease.demo.engine import Answers
from gpurelease.demo.policy import Policy
from gpurelease.demo.task import LENGTH

GROUP = 16  # answers to one prompt, whose rewards are compared with each other
MINIBATCHES = 2  # optimizer steps per rollout
LEARNING_RATE, LAST_LEARNING_RATE = 4e-3, 8e-4  # it falls, or else the almost settled policy swings back
CLIP = 0.2


class Trainer:
    """One rank's part of the trainer. All ranks must make one, from one random state, and make the same calls.

    Args:
        mesh: Over its dimension "dp" parameters are sharded and answers are split, over "tp" the layers of a block.
        steps: How often :meth:`update` will be called.
    """

    def __init__(self, mesh: DeviceMesh, steps: int) -> None:
        self._tp = mesh.get_group("tp")
        self._policy = Policy().to(mesh.device_type)
        for block in self._policy.blocks:
            split = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
            join = {name: RowwiseParallel() for name in ("out", "down")}
            fully_shard(parallelize_module(block, mesh["tp"], {**split, **join}), mesh=mesh["dp"])
        fully_shard(self._policy, mesh=mesh["dp"])
        # One parameter at a time: "foreach" does not take parameters of different meshes in one call.
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=LEARNING_RATE, foreach=False)
        self._schedule = LinearLR(self._optimizer, 1.0, LAST_LEARNING_RATE / LEARNING_RATE, total_iters=steps)

    def full_weights(self) -> dict[str, Tensor]:
        """Gather the whole policy on every rank."""
        return {name: weight.full_tensor() for name, weight in self._policy.state_dict().items()}

    def update(self, answers: Answers, rewards: Tensor) -> None:
        """Make the policy find answers likelier that got more reward than others to the same prompt.

        Args:
            answers: This rank's answers, ``GROUP`` in a row for each prompt.
            rewards: Their rewards, of shape ``[count]``.
        """
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        # The ranks of one tp group are one model together, and so must see the same answers.
        batch = [self._gather(part) for part in (answers.tokens, answers.log_probs, advantages.view(-1, 1))]
        for tokens, old, advantage in zip(*(part.chunk(MINIBATCHES) for part in batch), strict=True):
            choices = self._policy(tokens[:, :-1])[:, -LENGTH:]
            new = choices.gather(2, tokens[:, -LENGTH:, None]).squeeze(2)
            ratio = (new - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            self._optimizer.zero_grad()
            (-gain.mean()).backward()
            self._optimizer.step()
        self._schedule.step()

    def _gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self._tp.size())]
        dist.all_gather(parts, part, group=self._tp)
        return torch.cat(parts)
