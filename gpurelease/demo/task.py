"""The task: sort a short row of digits. Guessing gets one digit in ten right."""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS = 10
LENGTH = 5


def make_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Return rows of random digits, of shape ``[count, LENGTH]``, on the generator's device."""
    return torch.randint(DIGITS, (count, LENGTH), generator=generator, device=generator.device)


def reward(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the share of right digits in each answer, of shape ``[count]``.

    Args:
        prompts: Rows of digits, of shape ``[count, LENGTH]``.
        answers: What should be the same digits in order, of the same shape.
    """
    return (answers == prompts.sort(dim=1).values).float().mean(dim=1)
