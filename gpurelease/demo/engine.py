"""The inference engine: samples answers from a plain copy of the policy. It stands for vLLM or SGLang."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpurelease.demo.policy import SEPARATOR, Policy
from gpurelease.demo.task import LENGTH


class Answers(NamedTuple):
    """Sampled answers.

    Attributes:
        tokens: Prompt, separator and answer, of shape ``[count, 2 * LENGTH + 1]``.
        log_probs: How likely the engine found each digit of the answers, of shape ``[count, LENGTH]``.
    """

    tokens: Tensor
    log_probs: Tensor

    @property
    def prompts(self) -> Tensor:
        """The digits to sort, of shape ``[count, LENGTH]``."""
        return self.tokens[:, :LENGTH]

    @property
    def digits(self) -> Tensor:
        """The digits that were sampled, of shape ``[count, LENGTH]``."""
        return self.tokens[:, -LENGTH:]


class Engine:
    """One rank's engine. It talks to no other rank.

    Args:
        generator: Source of chance; its device is the engine's.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._policy = Policy().to(generator.device)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over the policy's weights."""
        self._policy.load_state_dict(weights)

    @torch.no_grad()
    def generate(self, prompts: Tensor) -> Answers:
        """Sample one answer for each prompt, of shape ``[count, LENGTH]``, digit by digit."""
        tokens = pad(prompts, (0, 1), value=SEPARATOR)
        log_probs: list[Tensor] = []
        for _ in range(LENGTH):
            choices = self._policy(tokens)[:, -1]
            digit = torch.multinomial(choices.exp(), 1, generator=self._generator)
            tokens = torch.cat([tokens, digit], dim=1)
            log_probs.append(choices.gather(1, digit))
        return Answers(tokens, torch.cat(log_probs, dim=1))
