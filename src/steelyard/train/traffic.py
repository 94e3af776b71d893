"""What a step really sent: every collective and message that PyTorch's distributed engine dispatches, counted.

A dispatch mode sees the c10d operations of FSDP, the pipeline schedules and our own reductions, and the functional ones
that DTensor makes, on the pieces this rank holds. `predict/traffic.py` says what it must find.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steelyard.parallel.mesh import Mesh
from steelyard.predict import traffic
from steelyard.spec.run import Run

# what an operation is called here, by its name in PyTorch; others count under their own name
KINDS = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "allgather_base": "all_gather", "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather", "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter": "reduce_scatter", "recv": "receive",
}  # fmt: skip


class TrafficCounter(TorchDispatchMode):
    """Counts calls and bytes by (kind, axis) while it is entered. Bytes are those of the whole tensor of a call: what
    is reduced, gathered, scattered or sent, in the dtype it travels in."""

    def __init__(self, mesh: Mesh, tied: dist.ProcessGroup | None = None):
        """`tied`: the group of the first and the last stage, where the engine has one."""
        super().__init__()
        self._mesh = mesh
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self._axes: dict[str, str] = {
            mesh.whole.get_group(name).group_name: name for name in mesh.whole.mesh_dim_names or ()
        }
        # DTensor may still use the groups of an equal mesh that was made before this one
        self._by_ranks = {_ranks(name): axis for name, axis in self._axes.items()}
        if tied is not None:
            self._axes[tied.group_name] = "tied"

    def found(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(kind, axis) -> (calls, bytes)."""
        return {key: (calls, self.bytes[key]) for key, calls in self.calls.items()}

    def wrong_by_rank(self, run: Run, micro_batches: int) -> dict[str, traffic.Difference]:
        """Where any rank's count of a step differs from the prediction, by rank and operation; on all ranks."""
        shard = self._mesh.whole["shard"].get_local_rank()
        predicted = traffic.on_rank(run, self._mesh.pipeline_rank, shard, micro_batches)
        everywhere: list[dict[str, traffic.Difference]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, traffic.differences(predicted, self.found()))
        return {
            f"rank {rank}: {what}": difference
            for rank, found in enumerate(everywhere)
            for what, difference in found.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let it come apart into operations on local pieces, which are seen here
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        grouped = any(argument.name in ("process_group", "group_name") for argument in func._schema.arguments)
        if grouped and space in ("c10d", "_c10d_functional"):
            self._count(KINDS.get(name.strip("_"), name.strip("_")), args, result)
        return result

    def _count(self, kind: str, args: Any, result: Any) -> None:
        key = kind, next(filter(None, map(self._axis, args)), "other")
        self.calls[key] += 1
        # the largest of an operation's tensors is the whole one: what a gather makes, what a scatter takes
        self.bytes[key] += max(map(_bytes, (*args, result)))

    def _axis(self, value: Any) -> str:
        """The axis of a group, given as its name or as the object itself; "" for anything else."""
        if isinstance(value, torch.ScriptObject):
            try:
                value = dist.ProcessGroup.unbox(value).group_name
            except (RuntimeError, TypeError):
                return ""
        if not isinstance(value, str):
            return ""
        return self._axes.get(value) or self._by_ranks.get(_ranks(value), "")


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _ranks(group: Any) -> tuple[int, ...]:
    """The ranks of a group by its name; () where there is no such group."""
    try:
        return tuple(dist.get_process_group_ranks(_resolve_process_group(group)))
    except (RuntimeError, ValueError):
        return ()
