"""The mesh of ranks: pipeline x replicate x shard x tensor, the tensor axis fastest (Megatron's order)."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steelyard.spec.parallel import Parallel


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh.

    `data` is the product of replicate and shard: ZeRO 0 is one shard per replica, hybrid sharding several of each.
    """

    device: torch.device
    parallel: Parallel
    whole: DeviceMesh

    @property
    def tensor(self) -> DeviceMesh:
        return self.whole["tensor"]

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh `fully_shard` takes: 1-D to shard over all data ranks, 2-D to replicate shards as well."""
        return self.whole["shard"] if self._replicas == 1 else self.whole["replicate", "shard"]

    @property
    def _replicas(self) -> int:
        return self.whole["replicate"].size()

    @property
    def pipeline_rank(self) -> int:
        return self.whole.get_local_rank("pipeline")

    @property
    def tensor_rank(self) -> int:
        return self.whole.get_local_rank("tensor")

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank computes."""
        shard = self.whole["shard"]
        return self.whole.get_local_rank("replicate") * shard.size() + shard.get_local_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the run."""
        return dist.get_rank() == 0

    def all_reduce(self, values: Tensor, axes: tuple[str, ...], op: str = "sum") -> Tensor:
        """Reduce in place over the named axes ("data" stands for replicate and shard); sizes of 1 cost nothing."""
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        for axis in axes:
            for name in ("replicate", "shard") if axis == "data" else (axis,):
                if self.whole[name].size() > 1:
                    dist.all_reduce(values, operation, group=self.whole.get_group(name))
        return values


def build(parallel: Parallel, device: torch.device, timeout_seconds: float = 600.0) -> Mesh:
    """The mesh of an initialised process group of `parallel.world_size` ranks.

    A rank that waits longer than `timeout_seconds` in a collective of any axis raises.
    """
    replicate = parallel.data if parallel.zero == 0 else parallel.replicate
    shape = (parallel.pipeline, replicate, parallel.data // replicate, parallel.tensor)
    names = ("pipeline", "replicate", "shard", "tensor")
    whole = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for name in names:  # the mesh's groups do not take over the process group's own timeout
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), whole.get_group(name))
    return Mesh(device, parallel, whole)
