"""One rank's model and everything that moves its weights."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.data.loader import Batch, Split
from steelyard.parallel import apply, norm, shard
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.pipeline import Pipeline, TiedTable
from steelyard.spec.run import Run
from steelyard.train.loss_scale import Scaler
from steelyard.train.optimizer import AdamW


@dataclass(frozen=True)
class Micro:
    """One micro-batch on its device. `weights` are each token's share of the loss that is differentiated."""

    batch: Batch
    weights: Tensor  # [micro, sequence]


class Engine:
    """Forward, backward, clip and update on whatever layout `parallel/` made of the model."""

    def __init__(self, run: Run, mesh: Mesh):
        self.run, self.mesh = run, mesh
        self.parts = apply.build(run, mesh)
        # taken once: while FSDP has a unit gathered, the module shows other objects under the same names
        self.named = {name: p for part in self.parts for name, p in part.named_parameters()}
        self.parameters = list(self.named.values())
        self.tied = TiedTable(run, mesh, self.parts)
        compute = shard.DTYPES[run.precision.compute]
        self.pipeline = Pipeline(run, mesh, self.parts, compute) if run.parallel.pipeline > 1 else None
        self.scaler = Scaler.of(run.precision)
        self.optimizer = AdamW(self.parameters, run.optimizer)
        self._sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        self._valid = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.fingerprint = 0  # of the step's global batch, whatever rank read which sample

    # --- a training step ---------------------------------------------------------------------------------------------

    def begin(self, batches: Sequence[Batch]) -> list[Micro]:
        """This rank's micro-batches of a step, on its device, with the weights of the spec's loss mean.

        "tokens": every valid token of the global batch weighs the same, on whichever rank and micro-batch it is;
        "micro_batches": the mean of micro-batch means.
        """
        self._sums.zero_()
        prints = torch.tensor(sum(map(fingerprint, batches)), dtype=torch.float64, device=self.mesh.device)
        batches = [_to(batch, self.mesh.device) for batch in batches]
        counts = torch.stack([batch.loss_mask.sum() for batch in batches]).double()
        totals = self.mesh.all_reduce(torch.stack([counts.sum(), prints]), ("data",))
        self._valid, self.fingerprint = totals[0], int(totals[1].item())
        micro_batches = len(batches) * self.run.parallel.data
        dtype = torch.float64 if self.run.precision.compute == "fp64" else torch.float32
        every_token_alike = self.run.batch.loss_mean == "tokens"
        divisors = self._valid.expand(len(batches)) if every_token_alike else counts * micro_batches
        # a global or micro batch without a valid token has no loss: weight 0, not 0 / 0
        shares = torch.where(divisors > 0, 1 / divisors.clamp(min=1), 0).to(dtype)
        return [Micro(b, b.loss_mask * share) for b, share in zip(batches, shares, strict=True)]

    def forward_backward(self, micro_batches: Sequence[Micro], step: int) -> None:
        """Accumulate the gradients (times the loss scale) and the loss of all micro-batches of step number `step`."""
        for part in self.parts:
            part.train()
        if self.pipeline:
            inputs = self._inputs(_joined(micro_batches), step)
            self._sums += self.pipeline.train(inputs.pop("tokens"), len(micro_batches), **inputs)
        else:
            for number, micro in enumerate(micro_batches):
                shard.before_micro_batch(self.parts[0], self.run.parallel.zero, number == len(micro_batches) - 1)
                sums = self._forward(self.parts[0], micro, step)
                sums[0].backward()
                self._sums += sums.detach()
        norm.settle(self.parameters)
        self.tied.sum_gradients()

    def _forward(self, part: nn.Module, micro: Micro, step: int) -> Tensor:
        inputs = self._inputs(micro, step)
        return part(inputs.pop("tokens"), **inputs)

    def _inputs(self, micro: Micro, step: int) -> dict[str, Any]:
        """What every stage of the model is given; absent options are left out."""
        tensors = {name: value for name, value in vars(micro.batch).items() if name != "loss_mask"}
        found = {**tensors, "weights": micro.weights, "step": step, "grad_scale": self.scaler.scale}
        return {name: value for name, value in found.items() if value is not None}

    def loss(self) -> float:
        """Mean loss over all valid tokens of the step's global batch, in nats; nan where there were none."""
        total = self.mesh.all_reduce(self._sums[1:].clone(), ("pipeline", "data"))
        return (total / self._valid).item()

    def clip(self, limit: float) -> float:
        """Undo the loss scale and clip to `limit` (0: no clipping). Returns the norm before clipping."""
        counted = [p for p in self.parameters if p is not self.tied.copy]
        total = norm.gradient_norm(counted, self.mesh).item() / self.scaler.scale
        factor = min(1.0, limit / (total + 1e-6)) if limit > 0 else 1.0
        if factor != 1.0 or self.scaler.scale != 1.0:
            norm.scale(self.parameters, factor / self.scaler.scale)
        return total

    def update(self, rate: float) -> None:
        self.optimizer.update(rate)

    def end(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self, with_optimizer: bool, loading: bool = False) -> dict[str, Tensor]:
        """Every tensor of a checkpoint by its global name, in place: master weights, and Adam's moments.

        A tied head on a last stage of its own is the word table: it is saved by the first stage alone, and loaded
        from there.
        """
        names = dict(self._global_names(loading))
        found = {f"weights.{name}": parameter.detach() for parameter, name in names.items()}
        if with_optimizer:
            for parameter, mean, variance in self.optimizer.moments():
                if parameter in names:
                    found[f"mean.{names[parameter]}"], found[f"variance.{names[parameter]}"] = mean, variance
        return found

    def _global_names(self, loading: bool) -> Iterator[tuple[nn.Parameter, str]]:
        for name, parameter in self.named.items():
            if parameter is not self.tied.copy:
                yield parameter, name
            elif loading and self.tied.table is None:
                yield parameter, "embedding.word.weight"

    def after_load(self, updates: int) -> None:
        """Set Adam's count of updates, and a tied copy beside its table on one rank."""
        if self.tied.table is not None and self.tied.copy is not None:
            norm.local(self.tied.copy.detach()).copy_(norm.local(self.tied.table.detach()))
            self.optimizer.copy_moments(self.tied.table, self.tied.copy)
        self.optimizer.set_updates(updates)

    def shapes_on_tensor_rank(self) -> dict[str, tuple[int, ...]]:
        """Every live parameter with its shape before the data axis shards it."""
        return {name: norm.tensor_shape(parameter) for name, parameter in self.named.items()}

    def unique_numel(self) -> int:
        """Parameters of this rank's stages, whole, without copies that another stage counts."""
        return sum(p.numel() for p in self.parameters if p is not self.tied.copy)

    # --- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """(sum of the token losses, valid tokens) over the batches of all data ranks, without dropout."""
        for part in self.parts:
            part.eval()
        micro_batches = [Micro(b, b.loss_mask.float()) for b in (_to(batch, self.mesh.device) for batch in batches)]
        total = torch.stack([self._evaluate_one(micro) for micro in micro_batches]).sum()
        for part in self.parts:
            shard.release(part)
        valid = torch.stack([micro.batch.loss_mask.sum() for micro in micro_batches]).sum().double()
        self.mesh.all_reduce(total, ("pipeline", "data"))
        self.mesh.all_reduce(valid, ("data",))
        return total.item(), int(valid.item())

    def _evaluate_one(self, micro: Micro) -> Tensor:
        """Sum of the token losses of a micro-batch, float64; on a pipeline, 0 but on the last stage's rank."""
        if self.pipeline:
            inputs = self._inputs(micro, 0)
            return self.pipeline.evaluate(inputs.pop("tokens"), **inputs)[1]
        return self._forward(self.parts[0], micro, 0)[1].double()


def share(split: Split, first: int, size: int, run: Run, mesh: Mesh) -> list[Batch]:
    """This data rank's micro-batches of the `size` samples from `first` on (Megatron's assignment: each chunk of
    micro x data samples is dealt to the data ranks in order)."""
    micro, data = run.batch.micro_batch_size, run.parallel.data
    starts = range(first + mesh.data_rank * micro, first + size, micro * data)
    return [split.batch(start, micro, run.model.vocab_size) for start in starts]


def _joined(micro_batches: Sequence[Micro]) -> Micro:
    """All micro-batches as one, along the batch dimension."""

    def join(name: str) -> Any:
        values = [getattr(micro.batch, name) for micro in micro_batches]
        return None if values[0] is None else torch.cat(values)

    batch = Batch(**{field.name: join(field.name) for field in fields(Batch)})
    return Micro(batch, torch.cat([micro.weights for micro in micro_batches]))


def fingerprint(batch: Batch) -> int:
    """A checksum of token ids and sample numbers that adds up over micro-batches and ranks."""
    rows = zip(batch.samples.tolist(), batch.tokens.numpy(force=True), strict=True)
    return sum(zlib.crc32(row.tobytes(), number & 0xFFFFFFFF) for number, row in rows)


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    tensors = {name: value for name, value in vars(batch).items() if value is not None}
    return replace(batch, **{name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()})
