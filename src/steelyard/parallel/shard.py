"""ZeRO on FSDP2: one number in the spec, four ways to shard.

Stage 3 reshards parameters after the forward pass; stage 2 keeps them gathered between micro-batches and reduces each
micro-batch's gradients to shards; stage 1 accumulates whole gradients and reduces once a step; stage 0 is one shard
per replica. Gradients are summed, not averaged: the loss already carries the weights of the global batch.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from steelyard.model.gpt import GPT
from steelyard.parallel.mesh import Mesh
from steelyard.spec.precision import Precision
from steelyard.spec.run import Run

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: GPT, blocks: Iterable[nn.Module], mesh: Mesh, run: Run) -> None:
    """Apply FSDP2 in place: every block a unit of its own, the rest of the stage one more."""
    policy = mixed_precision(run.precision)
    resharding = run.parallel.zero == 3
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=resharding)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=resharding)
    for module in units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """Weights are gathered in the compute dtype; gradients are accumulated and reduced in `precision.gradients`."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.gradients],
        cast_forward_inputs=False,
    )


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def release(model: nn.Module) -> None:
    """Give back what a forward pass without a backward has left gathered."""
    for module in units(model):
        module.reshard()


def accumulate(model: nn.Module) -> None:
    """Add gradients that lie in the compute dtype to those kept in the dtype of gradients. FSDP does so at the end of a
    backward pass, but not where the gradients of weights are computed apart from it."""
    for module in units(model):
        if group := module._get_fsdp_state()._fsdp_param_group:
            for parameter in group.fsdp_params if group.is_unsharded else ():
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def before_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """Tell FSDP what to do with this micro-batch's gradients and parameters. Nothing on a model without FSDP."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or zero >= 2)
    model.set_reshard_after_backward(last or zero == 3)
