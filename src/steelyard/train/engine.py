"""One rank's model and everything that moves its weights."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from steelyard.data.loader import Batch, Split
from steelyard.parallel import apply, norm, shard
from steelyard.parallel.mesh import Mesh
from steelyard.spec.run import Run
from steelyard.train import optimizer
from steelyard.train.loss_scale import Scaler


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
        self.scaler = Scaler.of(run.precision)
        self.optimizer = optimizer.build(self.parameters, run.optimizer)
        self._sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        self._valid = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.fingerprint = 0  # of the step's global batch, whatever rank read which sample

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.parts for parameter in part.parameters()]

    # --- a training step ---------------------------------------------------------------------------------------------

    def begin(self, batches: Sequence[Batch]) -> list[Micro]:
        """This rank's micro-batches of a step, on its device, with the weights of the spec's loss mean.

        "tokens": every valid token of the global batch weighs the same, on whichever rank and micro-batch it is;
        "micro_batches": the mean of micro-batch means.
        """
        self._sums.zero_()
        prints = torch.tensor(sum(map(_fingerprint, batches)), dtype=torch.float64, device=self.mesh.device)
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
        (part,) = self.parts
        part.train()
        for number, micro in enumerate(micro_batches):
            shard.before_micro_batch(part, self.run.parallel.zero, number == len(micro_batches) - 1)
            sums = self._forward(part, micro, step)
            sums[0].backward()
            self._sums += sums.detach()

    def _forward(self, part: nn.Module, micro: Micro, step: int) -> Tensor:
        batch = micro.batch
        return part(
            batch.tokens,
            labels=batch.labels,
            weights=micro.weights,
            positions=batch.positions,
            documents=batch.documents,
            samples=batch.samples,
            step=step,
            grad_scale=self.scaler.scale,
        )

    def loss(self) -> float:
        """Mean loss over all valid tokens of the step's global batch, in nats; nan where there were none."""
        total = self.mesh.all_reduce(self._sums[1:].clone(), ("data",))
        return (total / self._valid).item()

    def clip(self, limit: float) -> float:
        """Undo the loss scale and clip to `limit` (0: no clipping). Returns the norm before clipping."""
        total = norm.gradient_norm(self.parameters, self.mesh).item() / self.scaler.scale
        factor = min(1.0, limit / (total + 1e-6)) if limit > 0 else 1.0
        if factor != 1.0 or self.scaler.scale != 1.0:
            norm.scale(self.parameters, factor / self.scaler.scale)
        return total

    def update(self, rate: float) -> None:
        optimizer.set_rate(self.optimizer, rate)
        self.optimizer.step()

    def end(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self, with_optimizer: bool) -> dict[str, Tensor]:
        """Every tensor of a checkpoint by its global name, in place: weights in the master dtype, and Adam's two
        moments, which are made here where no update has made them yet."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                found[f"weights.{name}"] = parameter.detach()
                if with_optimizer:
                    moments = self.optimizer.state[parameter] or self._new_moments(parameter)
                    found[f"mean.{name}"], found[f"variance.{name}"] = moments["exp_avg"], moments["exp_avg_sq"]
        return found

    def _new_moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        moments = self.optimizer.state[parameter]
        moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return moments

    def after_load(self, updates: int) -> None:
        """Adam's own count of updates, from which its bias correction follows."""
        for moments in self.optimizer.state.values():
            moments["step"].fill_(updates)

    def shapes_on_tensor_rank(self) -> dict[str, tuple[int, ...]]:
        """Every live parameter with its shape before the data axis shards it."""
        return {name: norm.tensor_shape(p) for part in self.parts for name, p in part.named_parameters()}

    # --- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """(sum of the token losses, valid tokens) over the batches of all data ranks, without dropout."""
        (part,) = self.parts
        part.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for batch in batches:
            batch = _to(batch, self.mesh.device)
            sums = self._forward(part, Micro(batch, batch.loss_mask.float()), 0)
            totals += torch.stack([sums[1], batch.loss_mask.sum()])
        self.mesh.all_reduce(totals, ("data",))
        return totals[0].item(), int(totals[1].item())


def share(split: Split, first: int, size: int, run: Run, mesh: Mesh) -> list[Batch]:
    """This data rank's micro-batches of the `size` samples from `first` on (Megatron's assignment: each chunk of
    micro x data samples is dealt to the data ranks in order)."""
    micro, data = run.batch.micro_batch_size, run.parallel.data
    starts = range(first + mesh.data_rank * micro, first + size, micro * data)
    return [split.batch(start, micro, run.model.vocab_size) for start in starts]


def _fingerprint(batch: Batch) -> int:
    """A checksum of token ids and sample numbers that adds up over micro-batches and ranks."""
    rows = zip(batch.samples.tolist(), batch.tokens.numpy(force=True), strict=True)
    return sum(zlib.crc32(row.tobytes(), number & 0xFFFFFFFF) for number, row in rows)


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    tensors = {name: value for name, value in vars(batch).items() if value is not None}
    return replace(batch, **{name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()})
