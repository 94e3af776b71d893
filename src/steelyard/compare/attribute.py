"""How much of a gap each difference explains: the average of what it adds over every order of switching the settings
(Shapley 1953), so that no order is preferred and the parts add up to the whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from math import factorial
from types import ModuleType
from typing import Any

from steelyard.compare.align import Side, run_of
from steelyard.compare.differences import Difference
from steelyard.predict import engine, flops
from steelyard.predict.memory import Memory
from steelyard.predict.stages import split
from steelyard.spec import UserError
from steelyard.spec.run import Engine, Run

MOST_GROUPS = 7  # 2^7 configurations are predicted; more differences than that make no one culprit
FRAMEWORK, MOMENT = "framework", "moment"
# With full recomputation PyTorch's caching allocator holds more than the tensors' peak, because sizes mix: reserved /
# allocated peak in the median of five logs of Megatron-LM and Megatron-DeepSpeed of 2021, which all recompute (401
# ranks, 1.06 to 1.40). Saved activations are of few sizes and fill it well. OneFlow, LiBai's engine, plans its memory.
CACHED = 1.19
CACHING = ("megatron", "megatron_deepspeed", "deepspeed")
FIRST_STEP = "before the first update"

Value = Callable[[frozenset[str]], float | None]


def shapley(players: Sequence[str], value: Value) -> dict[str, float] | None:
    """Each player's average contribution to value(all) - value(none); None where a subset has no value. They add up to
    the difference."""
    count = len(players)
    worth: dict[frozenset[str], float] = {}
    for size in range(count + 1):
        for chosen in combinations(players, size):
            found = value(frozenset(chosen))
            if found is None:
                return None
            worth[frozenset(chosen)] = found
    shares = {}
    for player in players:
        others = [p for p in players if p != player]
        share = 0.0
        for size in range(count):
            orders = factorial(size) * factorial(count - size - 1) / factorial(count)
            for chosen in combinations(others, size):
                before = frozenset(chosen)
                share += orders * (worth[before | {player}] - worth[before])
        shares[player] = share
    return shares


@cache
def memory_model(framework: str) -> ModuleType | None:
    """What a framework allocates; for one whose allocation is not written down, None."""
    if framework == "steelyard":
        return engine
    name = f"steelyard.frameworks.{framework}.memory"
    try:
        found = framework.isidentifier() and find_spec(name) is not None
    except ModuleNotFoundError:
        return None
    return import_module(name) if found else None


@dataclass(frozen=True)
class Predictor:
    """Predicts the memory of runs by one framework's allocation. `stands_in`: it is not the run's own framework."""

    model: ModuleType
    framework: str
    stands_in: bool

    def largest(self, run: Run, host: bool = False) -> Memory | None:
        """The rank with the largest peak; None where the model refuses the run. `host`: with the kernels of a CPU."""
        if self.stands_in or (not run.engine.implementation and self.framework == "megatron"):
            engine = {"framework": self.framework, "version": "2021", "implementation": "local", "attention": "unfused"}
            run = run.model_copy(update={"engine": run.engine.model_copy(update=engine)})
        if self.framework == "steelyard" and run.engine.framework != "steelyard":
            run = run.model_copy(update={"engine": run.engine.model_copy(update={"framework": "steelyard"})})
        try:
            ranks: tuple[Memory, ...] = self.model.ranks(run, host=True) if host else self.model.ranks(run)
        except (UserError, ValueError, ArithmeticError, AssertionError, KeyError, TypeError):
            return None
        return max(ranks, key=lambda memory: memory.peak, default=None)


def predictor(framework: str) -> Predictor | None:
    """That framework's own model of memory, or Megatron's of 2021 in its place: the same GPT takes the same tensors."""
    if (own := memory_model(framework)) is not None:
        return Predictor(own, framework, stands_in=False)
    stand_in = memory_model("megatron")
    return Predictor(stand_in, "megatron", stands_in=True) if stand_in else None


def tensor_bytes(one: Side, kind: str, changes: Mapping[str, Any] | None = None, early: bool = False) -> int | None:
    """Predicted bytes of the tensors on the largest rank, nothing else: the peak, or for `allocated` what stays between
    steps. `early`: before the first update has made the optimizer's states."""
    model, run = predictor(one.framework), run_of(one, changes)
    if model is None or run is None:
        return None
    found = model.largest(run, host=kind == "tensors_peak")  # which only our own runs on CPUs measure
    if found is None:
        return None
    if kind == "allocated":
        return found.steady - (found.lazy if early else 0)
    return found.peak_first_step if early else found.peak


def predicted_bytes(one: Side, kind: str, changes: Mapping[str, Any] | None = None, early: bool = False) -> int | None:
    """The same with what the allocator holds beyond the tensors, for the kinds that contain it. The context of the
    device is left out: two runs on equal devices have equal ones."""
    found = tensor_bytes(one, kind, changes, early)
    recompute = (changes or {}).get("recompute.mode", one.value("recompute.mode"))
    held = kind in ("device", "reserved", "reserved_peak") and one.framework in CACHING and recompute == "full"
    if found is None or not held:
        return found
    return round(found * CACHED)


@dataclass(frozen=True)
class Explained:
    """Signed amounts from A to B: the measured gap, each group's share of it, and what no setting explains."""

    gap: float
    shares: Mapping[str, float]
    model: str

    @property
    def unexplained(self) -> float:
        return self.gap - sum(self.shares.values())


def memory(a: Side, b: Side, kind: str, found: Sequence[Difference]) -> Explained | None:
    """Why B's memory is not A's. None where a shape is not known or the settings that differ are too many to order."""
    groups = _groups(found, lambda d: d.knob.memory > 0)
    if a.value("memory.moment") != b.value("memory.moment"):
        groups[MOMENT] = []
    if memory_model(a.framework) is not memory_model(b.framework):
        groups[FRAMEWORK] = []
    for joined in (groups, _joined(groups)):
        shares = _memory_shares(a, b, kind, joined)
        if shares is not None:
            gap = b.record.memory[kind] - a.record.memory[kind]
            return Explained(gap, shares, _model_names(a, b))
    return None


def _memory_shares(a: Side, b: Side, kind: str, groups: Mapping[str, list[Difference]]) -> dict[str, float] | None:
    if not groups or len(groups) > MOST_GROUPS:
        return None

    def value(chosen: frozenset[str]) -> float | None:
        changes = {d.knob.key: d.b for name in chosen for d in groups[name]}
        changes |= _dependents(b, chosen)
        one = replace(a, framework=b.framework if FRAMEWORK in chosen else a.framework)
        moment = (b if MOMENT in chosen else a).value("memory.moment")
        return predicted_bytes(one, kind, changes, early=moment == FIRST_STEP)

    return shapley(list(groups), value)


def _dependents(b: Side, chosen: frozenset[str]) -> dict[str, Any]:
    """Keys that go with a group and that `differences` does not list, because they follow."""
    found: dict[str, Any] = {}
    if "recompute" in chosen:
        found |= {k: v.value for k, v in b.known.items() if k.startswith("recompute.") and v.value != "none"}
        found["recompute.mode"] = b.value("recompute.mode")
    if "layout" in chosen and "parallel.stages" in b.known:
        found["parallel.stages"] = b.value("parallel.stages")
    if "kernels" in chosen:  # what only one of them says of its engine goes with what both say
        found |= {f"engine.{name}": b.value(f"engine.{name}") for name in Engine.model_fields if name != "framework"}
    return found


def _model_names(a: Side, b: Side) -> str:
    names = []
    for one in (a, b):
        model = predictor(one.framework)
        assert model is not None
        text = (
            f"{one.record.framework} by Megatron-LM's model of 2021"
            if model.stands_in
            else f"{one.record.framework}'s own"
        )
        names.append(text)
    return "; ".join(dict.fromkeys(names))


def seconds(a: Side, b: Side, found: Sequence[Difference], seconds_a: float | None) -> dict[str, float]:
    """Seconds of a step that each group adds at A's rate of executed FLOPs, recomputation counted. Empty where A's time
    or a shape is not known."""
    groups = _groups(found, lambda d: d.knob.speed > 0 and d.knob.group in ("recompute", "batch", "model", "layout"))
    base = hardware_flops_per_device(a)
    if not seconds_a or not base or not groups or len(groups) > MOST_GROUPS:
        return {}

    def value(chosen: frozenset[str]) -> float | None:
        changes = {d.knob.key: d.b for name in chosen for d in groups[name]} | _dependents(b, chosen)
        work = hardware_flops_per_device(a, changes)
        return None if work is None else work / base * seconds_a

    return shapley(list(groups), value) or {}


def hardware_flops_per_device(one: Side, changes: Mapping[str, Any] | None = None) -> float | None:
    """Executed FLOPs of one step on one device, on average: causal, recomputation included."""
    run = run_of(one, changes)
    if run is None or "batch.global_batch_size" not in one.known:
        return None
    stages = split(run.model, run.parallel)
    each = flops.hardware_flops(run.model, run.padded_vocab_size, run.recompute, stages)
    return each * run.batch.global_batch_size / run.parallel.world_size


def model_flops_per_sample(one: Side) -> int | None:
    """Forward and backward FLOPs of one sequence: causal attention, no recomputation."""
    run = run_of(one)
    return None if run is None else flops.model_flops(run.model, run.padded_vocab_size)


def _groups(found: Sequence[Difference], wanted: Callable[[Difference], bool]) -> dict[str, list[Difference]]:
    groups: dict[str, list[Difference]] = {}
    names = {d.knob.group for d in found if wanted(d)}
    for difference in found:
        if difference.knob.group in names:
            groups.setdefault(difference.knob.group, []).append(difference)
    return groups


def _joined(groups: Mapping[str, list[Difference]]) -> dict[str, list[Difference]]:
    """Batch and layout as one: a batch need not divide over the other run's data ranks."""
    joined = {name: list(members) for name, members in groups.items() if name != "batch"}
    joined.setdefault("layout", []).extend(groups.get("batch", []))
    return {name: members for name, members in joined.items() if members or name in (MOMENT, FRAMEWORK)}
