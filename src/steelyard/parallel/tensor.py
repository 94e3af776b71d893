"""Tensor and sequence parallelism: DTensor plans laid over a part of the model from outside.

Column-parallel qkv, up and gate; row-parallel out and down; the word table cut by rows, and the loss over those rows.
Forward: one all-reduce per half block; backward: one more (the query, key and value projections are one matrix, and an
MLP's gate and up share their input). With sequence parallelism each all-reduce becomes an all-gather and a
reduce-scatter, and norms, dropout and residuals work on this rank's part of the sequence.
"""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from steelyard.model.gpt import GPT, Block
from steelyard.model.loss import ChunkedLoss
from steelyard.parallel.mesh import Mesh
from steelyard.spec.run import Run


def tensor_parallel(part: GPT, mesh: Mesh, run: Run) -> None:
    """Apply the plan in place to what this part holds."""
    sequence = run.parallel.sequence
    for block in part.layers.values():
        assert isinstance(block, Block)
        parallelize_module(block, mesh.tensor, _block_plan(block, sequence))
        _place_block(block, mesh, run)
    parallelize_module(part, mesh.tensor, _ends_plan(part, sequence))
    if isinstance(part.loss, ChunkedLoss):
        part.loss = VocabularyParallelLoss(part.loss, mesh)


def _residual(sequence: bool) -> Placement:
    """How hidden states between the halves of a block lie on the tensor axis."""
    return Shard(1) if sequence else Replicate()


def _block_plan(block: Block, sequence: bool) -> dict[str, ParallelStyle]:
    outside = _residual(sequence)
    plan: dict[str, ParallelStyle] = {
        # (hidden, where, cache): only the first is a tensor
        "attention": PrepareModuleInput(
            input_layouts=(outside, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=outside),
        "mlp": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=outside),
    }
    if block.mlp.gate is not None:
        plan["mlp.gate"] = ColwiseParallel()
    if block.attention.query_norm is not None:
        # one weight for all heads, each rank with its own heads: the gradients add up over the tensor axis
        plan["attention.query_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan["attention.key_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    if sequence:
        plan["attention_norm"] = SequenceParallel()
        plan["mlp_norm"] = SequenceParallel()
    return plan


def _place_block(block: Block, mesh: Mesh, run: Run) -> None:
    """Tell what hashes coordinates where this rank's heads and positions begin."""
    block.attention.core.first_head = mesh.tensor_rank * (run.model.num_attention_heads // run.parallel.tensor)
    if run.parallel.sequence:
        first = mesh.tensor_rank * (run.model.seq_length // run.parallel.tensor)
        block.attention_dropout.first_position = block.mlp_dropout.first_position = first


def _ends_plan(part: GPT, sequence: bool) -> dict[str, ParallelStyle]:
    """The embedding, the final norm and a head of its own."""
    plan: dict[str, ParallelStyle] = {}
    if part.embedding is not None:
        plan["embedding.word"] = RowwiseParallel(input_layouts=Replicate())
        if sequence:
            plan["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    if part.norm is not None and sequence:
        plan["norm"] = SequenceParallel()
    if part.head is not None:
        plan["head"] = ColwiseParallel()
    return plan


class VocabularyParallelLoss(nn.Module):
    """The chunked loss over rows of the table that are cut over the tensor axis.

    Every rank has all hidden states of the micro-batch and its own rows; maxima, sums and the label's logit are reduced
    a chunk at a time. Each rank's gradient of the hidden states is partial, and they are summed once.
    """

    def __init__(self, inner: ChunkedLoss, mesh: Mesh):
        super().__init__()
        self.inner, self._mesh = inner, mesh
        inner.reduce = lambda values, operation: mesh.all_reduce(values, ("tensor",), operation)

    def forward(self, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, grad_scale: float = 1.0) -> Tensor:
        assert isinstance(head, DTensor)
        rows = head.to_local()  # [rows / tensor, hidden]
        self.inner.first_row = self._mesh.tensor_rank * rows.shape[0]
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self._mesh.tensor, [Replicate()], run_check=False)
        whole = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return self.inner(whole, rows, labels, weights, grad_scale)
