"""What a rank's memory holds during a step: the timeline, the names of the terms, and the check against a run.

A step has moments: every engine says what is alive at each beside the states, and the peak is the largest sum. Bytes
are integers and stand for what PyTorch's allocator gives out (`allocated`) unless a name says otherwise; `reserved` and
`device` are separate estimates on top of it.

Names of terms: `boundary` (hidden states sent or received), `activations.norm`, `.attention`, `.scores`, `.mlp`,
`.dropout`, `.inputs` (what full recompute keeps), `.embedding`, `logits`, `recomputed` (a block run again), `backward`
(gradients of activations), `held back` (those that put-off gradients of weights wait for), `dropout` (masks being
made), `loss.gradients`, `communication`, `masks`, `workspaces`, `batch`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from steelyard.hardware import Chip

UPDATING = ("optimizer", "steady")  # moments at which the optimizer's states exist in every step
SEGMENT = 2 * 2**20  # what the caching allocator asks the driver for is a multiple of it (CUDACachingAllocator)


@dataclass(frozen=True)
class States:
    """What training holds from step to step, in bytes of one rank. `weights` are those the network computes with;
    `master` the ones the optimizer updates where they are apart from them; `optimizer` Adam's two moments."""

    weights: int
    gradients: int
    master: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.master + self.optimizer


@dataclass(frozen=True)
class Moment:
    """What is alive at one moment of a step. `terms` are beside the states; `states` are those that exist then."""

    name: str
    states: States
    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.states.total + sum(self.terms.values())


@dataclass(frozen=True)
class Memory:
    """The memory of a class of equal ranks: pipeline rank `stage`, tensor rank `tensor`, `count` of them.

    `moments` are those of a normal step; `lazy` is the part of the states that the first update makes, so that the
    moments before it are that much smaller. `left` is what stays allocated after a step beside the states.
    """

    stage: int
    tensor: int
    count: int
    moments: tuple[Moment, ...]
    left: Mapping[str, int] = field(default_factory=dict)
    kept: States = States(0, 0, 0, 0)
    lazy: int = 0

    @property
    def at_peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        return self.at_peak.total

    @property
    def peak_first_step(self) -> int:
        """The peak before the optimizer's states exist: they appear in the first update that is not skipped, and fp16
        skips the first steps."""
        before = max((m.total - self.lazy for m in self.moments if m.name not in UPDATING), default=0)
        return max(before, max((m.total for m in self.moments if m.name in UPDATING), default=0), self.steady)

    @property
    def steady(self) -> int:
        """Allocated after a step that was not skipped."""
        return self.kept.total + sum(self.left.values())


def reserved(memory: Memory) -> int:
    """What the allocator holds from the driver: at least the peak, in whole segments. What fragmentation adds is not
    modelled; the logs in docs/memory.md show a factor of 1.06 to 1.27 where many sizes mix."""
    return _segments(memory.peak)


def _segments(size: int) -> int:
    return -(-size // SEGMENT) * SEGMENT


def device(memory: Memory, chip: Chip | None) -> int | None:
    """What the driver reports as used: `reserved` and the context. Communicators are not modelled. None where the
    context of the chip is unknown."""
    if chip is None or chip.context_bytes is None:
        return None
    return reserved(memory) + chip.context_bytes


def total(terms: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Terms of several parts added up by name, without those that are zero."""
    found: dict[str, int] = {}
    for part in terms:
        for name, value in part.items():
            found[name] = found.get(name, 0) + value
    return {name: value for name, value in found.items() if value}


def times(terms: Mapping[str, int], count: int | float) -> dict[str, int]:
    return {name: round(value * count) for name, value in terms.items()}


# --- a run checks its own prediction ---------------------------------------------------------------------------------

TOLERANCE = 0.05
# measured kind -> what it is held against, and in which words
KINDS = {
    "tensors_before": "tensors before the first step",
    "tensors": "tensors alive after the step",
    "tensors_forward_backward": "tensors at the peak of forward and backward",
    "tensors_update": "tensors at the peak of the update",
    "allocated": "allocated after the step",
    "allocated_peak": "allocated at the peak",
    "reserved_peak": "reserved at the peak",
    "device": "device",
}


@dataclass(frozen=True)
class Checked:
    """One measured kind of memory beside its prediction, in bytes. `term` names the part of the prediction that is
    nearest in size to the difference where that is more than TOLERANCE; "" otherwise."""

    kind: str
    predicted: int
    measured: int
    term: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        line = f"{KINDS[self.kind]}: predicted {self.predicted / 2**20:,.1f} MiB, measured {self.measured / 2**20:,.1f}"
        return f"{line} ({self.error:+.1%}{f'; look at {self.term}' if self.term else ''})"


def check(ranks: Sequence[Memory], measured: Mapping[str, int], chip: Chip | None) -> list[Checked]:
    """The prediction for the largest of some ranks beside what was measured on them, in bytes by kind
    (train/audit.py): after the first step that updated, and the tensors of forward and backward and of the update in
    the one after it. Kinds that are not predicted, such as `rss`, are passed over: a process holds more than tensors.
    """
    sizes: dict[str, Callable[[Memory], int | None]] = {
        "tensors_before": lambda memory: memory.steady - memory.lazy,
        "tensors": lambda memory: memory.steady,
        "tensors_forward_backward": lambda memory: max(m.total for m in memory.moments if m.name not in UPDATING),
        "tensors_update": lambda memory: max(m.total for m in memory.moments if m.name in UPDATING),
        "allocated": lambda memory: memory.steady,
        "allocated_peak": lambda memory: memory.peak_first_step,
        "reserved_peak": lambda memory: _segments(memory.peak_first_step),
        "device": lambda memory: device(memory, chip),
    }
    found = []
    for kind, size in sizes.items():
        largest = max(ranks, key=lambda memory: size(memory) or 0)
        value = size(largest)
        if value is not None and measured.get(kind):
            off = abs(value / measured[kind] - 1) > TOLERANCE
            found.append(Checked(kind, value, measured[kind], _suspect(largest, value - measured[kind]) if off else ""))
    return found


def _suspect(memory: Memory, difference: int) -> str:
    """The state or term at the peak whose size is nearest to a difference."""
    parts = {**vars(memory.at_peak.states), **memory.at_peak.terms}
    return min(parts, key=lambda name: abs(parts[name] - abs(difference)))
