"""Pipeline parallelism: which layers stand where, and PyTorch's schedules over them."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import GraphExecGroup

from steelyard.model.gpt import GPT
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.shard import accumulate
from steelyard.predict import stages
from steelyard.predict.pipeline import few
from steelyard.spec.run import Run

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Chunk:
    """One stage of the pipeline: the layers it holds, and whether it is the first or the last."""

    stage: int
    layers: range
    first: bool
    last: bool


def chunks(run: Run, pipeline_rank: int) -> list[Chunk]:
    """The stages of one pipeline rank, in the order of the spec's schedule."""
    sizes = stages.split(run.model, run.parallel)
    starts = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    return [
        Chunk(stage, range(starts[stage], starts[stage + 1]), stage == 0, stage == len(sizes) - 1)
        for stage in stages.chunks(run.parallel, pipeline_rank)
    ]


class Stage(PipelineStage):
    """A stage that has memory for what it receives only from the receiving until the backward pass is through: PyTorch
    keeps it for all micro-batches of a step. Where a schedule puts weight gradients off, they are added up in
    `precision.gradients` as all others are."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._received: dict[str, dict[int, list[Tensor]]] = {"forward": {}, "backward": {}}

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self._received["forward"] = _multiplied(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self._received["backward"] = _multiplied(self.grad_recv_info, num_microbatches)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _resize(self._received["forward"].get(fwd_chunk_id, []), whole=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        _resize(self._received["backward"].get(bwd_chunk_id, []), whole=True)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        found = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._through(bwd_chunk_id)
            return found
        for info in self.args_recv_info[bwd_chunk_id]:
            if info.buffer is not None:
                info.buffer.grad = None  # the schedule has it, and here it would stay until the second half
        return found

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        with GraphExecGroup():  # what selective recompute runs again is run once for all weights
            super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **options)
        accumulate(self.submod)
        self._through(bwd_chunk_id)

    def _through(self, chunk: int) -> None:
        """Let go of what a micro-batch has received, from another rank or from a stage of this one."""
        for kind, infos in (("forward", self.args_recv_info), ("backward", self.grad_recv_info)):
            buffers = self._received[kind].get(chunk, [])
            for info, buffer in zip([i for i in infos[chunk] if i.buffer is not None], buffers, strict=True):
                info.buffer, buffer.grad = buffer, None
            _resize(buffers, whole=False)


def _multiplied(infos: dict[int, Any], micro_batches: int) -> dict[int, list[Tensor]]:
    """What the first micro-batch receives, for all of them; returns their buffers, which have no memory yet."""
    buffers: dict[int, list[Tensor]] = {}
    for number in range(micro_batches):
        if number:
            infos[number] = tuple(copy.copy(info) for info in infos[0])
        for info in infos[number]:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer) if number else info.buffer
                buffers.setdefault(number, []).append(info.buffer)
        _resize(buffers.get(number, []), whole=False)
    return buffers


def _resize(buffers: list[Tensor], whole: bool) -> None:
    for buffer in buffers:
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size() if whole else 0)


class Pipeline:
    """The schedule of a run over this rank's parts.

    A schedule is made per number of micro-batches, which a batch ramp changes.
    """

    def __init__(self, run: Run, mesh: Mesh, parts: Sequence[GPT], dtype: torch.dtype):
        self._run, self._mesh, self._parts = run, mesh, parts
        self._group = mesh.whole.get_group("pipeline")
        self._hidden = _between_stages(run, dtype)
        self._chunks = chunks(run, mesh.pipeline_rank)
        self._schedules: dict[int, Any] = {}

    @property
    def holds_first(self) -> bool:
        return any(chunk.first for chunk in self._chunks)

    def train(self, tokens: Tensor, micro_batches: int, **inputs: Any) -> Tensor:
        """Forward and backward of all micro-batches.

        tokens and the tensors of `inputs` are [micro_batches x micro, sequence] and reach every stage. Returns the
        [2] sums of the loss on the rank with the last stage and zeros elsewhere.
        """
        schedule = self._schedules.get(micro_batches) or self._schedule(micro_batches)
        self._schedules[micro_batches] = schedule
        sums = schedule.step(*([tokens] if self.holds_first else []), target=inputs["labels"], **inputs)
        return self._zeros() if sums is None else sums.detach().view(-1, 2).sum(0).double()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """Forward only, one micro-batch; the same sums. (Zero-bubble schedules cannot run without a backward.)"""
        sums = self._zeros()
        for chunk, part in zip(self._chunks, self._parts, strict=True):
            hidden = tokens if chunk.first else self._receive(chunk.stage - 1)
            output = part(hidden, **inputs)
            if chunk.last:
                sums += output
            else:
                self._send(output, chunk.stage + 1)
        return sums

    def _send(self, hidden: Tensor, stage: int) -> None:
        owner = self._owner(stage)
        if owner == self._mesh.pipeline_rank:
            self._handed_on = hidden
        else:
            dist.send(hidden.contiguous(), group=self._group, group_dst=owner)

    def _receive(self, stage: int) -> Tensor:
        owner = self._owner(stage)
        if owner == self._mesh.pipeline_rank:
            return self._handed_on
        hidden = torch.empty_like(self._hidden, device=self._mesh.device)
        dist.recv(hidden, group=self._group, group_src=owner)
        return hidden

    def _owner(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        size = self._run.parallel.pipeline
        return next(rank for rank in range(size) if stage in stages.chunks(self._run.parallel, rank))

    def _zeros(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._mesh.device)

    def _schedule(self, micro_batches: int) -> Any:
        built = [self._stage(chunk, part) for chunk, part in zip(self._chunks, self._parts, strict=True)]
        name = self._run.parallel.pipeline_schedule
        if few(self._run.parallel, micro_batches):
            name = "gpipe"  # PyTorch's 1F1B refuses to run
        kind = SCHEDULES[name]
        return kind(
            built if self._run.parallel.virtual > 1 else built[0], micro_batches, loss_fn=_weighted, scale_grads=False
        )

    def _stage(self, chunk: Chunk, part: GPT) -> PipelineStage:
        """The shapes between stages are known, so no rank has to find them out by a trial run."""
        micro, length = self._run.batch.micro_batch_size, self._run.model.seq_length
        tokens = torch.empty(micro, length, dtype=torch.int64, device="meta")
        wide = torch.float64 if self._hidden.dtype == torch.float64 else torch.float32
        sums = torch.empty(2, dtype=wide, device="meta", requires_grad=True)
        return Stage(
            part,
            chunk.stage,
            self._run.parallel.num_stages,
            self._mesh.device,
            input_args=(tokens if chunk.first else self._hidden,),
            output_args=(sums if chunk.last else self._hidden,),
            group=self._group,
        )


def _between_stages(run: Run, dtype: torch.dtype) -> Tensor:
    """What one stage hands to the next, on the meta device: [micro, sequence, hidden], cut by sequence parallelism."""
    length = run.model.seq_length // (run.parallel.tensor if run.parallel.sequence else 1)
    shape = (run.batch.micro_batch_size, length, run.model.hidden_size)
    # requires_grad: the schedules send a gradient back only for what asks for one
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _weighted(sums: Tensor, _: Tensor) -> Tensor:
    """The loss that is differentiated: the first of the two sums. No view: zero-bubble schedules detach it in place."""
    return sums[0].clone()


class TiedTable:
    """The word table where it stands twice: on the first stage, and as the head of a last stage apart from it.

    Both start equal, and both get the sum of both gradients, so both stay equal.
    """

    def __init__(self, run: Run, mesh: Mesh, parts: Sequence[GPT]):
        tied = run.model.tied_embeddings and run.parallel.num_stages > 1
        found = chunks(run, mesh.pipeline_rank)
        pairs = list(zip(found, parts, strict=True))
        self.table = _parameter(p.embedding.word for _, p in pairs if tied and p.embedding is not None)
        self.copy = _parameter(p.head for c, p in pairs if tied and c.last and p.head is not None)
        self.group = self._pair_group(run, mesh) if tied else None

    @staticmethod
    def _pair_group(run: Run, mesh: Mesh) -> Any:
        """The group of this column's first and last stage; made by all ranks together. None where one rank has both."""
        last_rank = 0 if run.parallel.pipeline_schedule == "zbv" else run.parallel.pipeline - 1
        if last_rank == 0:
            return None
        columns = mesh.whole.mesh.flatten(1)  # [pipeline, ranks of a stage]
        mine = None
        for column in range(columns.shape[1]):
            ranks = [int(columns[0, column]), int(columns[last_rank, column])]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine = group
        return mine

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give both tables the sum of their gradients."""
        from steelyard.parallel.norm import local

        held = [local(t.grad) for t in (self.table, self.copy) if t is not None and t.grad is not None]
        if len(held) == 2:
            held[0] += held[1]
            held[1].copy_(held[0])
        elif held and self.group is not None:
            dist.all_reduce(held[0], group=self.group)


def _parameter(modules: Iterable[nn.Module]) -> nn.Parameter | None:
    """The weight of the first module, as the parameter it is."""
    return next((module.get_parameter("weight") for module in modules), None)
