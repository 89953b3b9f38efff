"""Megatron-Core as its users have it: all of its groups, and a pipeline under its own 1F1B schedule.

A module of its own, which ranks are forked after: to import Megatron would take each of eight ranks two seconds.
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

with mock.patch("torch.cuda.is_available", return_value=False):
    # Megatron imports it, and where there is an nvcc it asks for a device, only to warn. Once anybody has asked, torch
    # refuses to use CUDA in forked processes.
    import torch.utils.cpp_extension

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.transformer.transformer_config import TransformerConfig

MICROBATCHES = 4


def groups():
    """Return all groups that this rank is a member of, in order of creation: WORLD, and those on Gloo too."""
    return [group or dist.group.WORLD for group in parallel_state._global_process_group_list]


def handles():
    """Return which objects ``parallel_state`` has in its globals."""
    return {name: id(value) for name, value in vars(parallel_state).items() if "_GROUP" in name}


class OnHost(torch.autograd.Function):
    """Arithmetic on the CPU, since the double has no kernels: a stage adds 1, and the loss is a sum of squares."""

    @staticmethod
    def forward(ctx, tensor, is_last):
        ctx.value, ctx.is_last = tensor.detach().cpu(), is_last
        return (ctx.value.square().sum() if is_last else ctx.value + 1).cuda()

    @staticmethod
    def backward(ctx, gradient):
        return (2 * ctx.value if ctx.is_last else gradient.cpu() + 1).cuda(), None


class Stage(nn.Module):
    """This rank's stage of a pipeline: what Megatron's schedule asks of a model.

    Args:
        batched: Whether sends and receives go in batches, as is Megatron's default; else one by one, and in pipelines
            of two stages half of them over WORLD.
    """

    model_type = ModelType.encoder_or_decoder

    def __init__(self, batched):
        super().__init__()
        self.config = TransformerConfig(
            num_layers=8, hidden_size=2, num_attention_heads=1, pipeline_dtype=torch.float32, batch_p2p_comm=batched
        )

    def set_input_tensor(self, tensors):
        [self.received] = tensors

    def forward(self, microbatch):
        tensor = microbatch if self.received is None else self.received
        self.seen.append(tensor.detach().cpu().flatten().tolist())
        return OnHost.apply(tensor, parallel_state.is_pipeline_last_stage())

    def step(self):
        """Pass the microbatches through the pipeline, forward and back, and check all numbers on the way."""
        self.seen = []
        first = parallel_state.get_pipeline_model_parallel_first_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        last = parallel_state.get_pipeline_model_parallel_world_size() - 1
        values = [[10.0 * first + number, -1.0] for number in range(MICROBATCHES)]
        microbatches = [torch.tensor([[value]]).cuda().requires_grad_() for value in values]
        forward_backward_pipelining_without_interleaving(
            forward_step_func=lambda data, model: (model(next(data)), None),
            data_iterator=iter(microbatches),
            model=self,
            num_microbatches=MICROBATCHES,
            seq_length=parallel_state.get_context_parallel_world_size(),
            micro_batch_size=1,
        )
        assert self.seen == [[number + stage for number in value] for value in values]
        if stage == 0:
            gradients = [microbatch.grad.cpu().flatten().tolist() for microbatch in microbatches]
            assert gradients == [[2 * (number + last) + last for number in value] for value in values]
