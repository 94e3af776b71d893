"""What no argument says and the numbers betray."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard import hardware
from steelyard.compare import attribute
from steelyard.compare.align import Side, run_of, speed, world
from steelyard.compare.differences import Difference
from steelyard.predict import parameters
from steelyard.spec.errors import UserError
from steelyard.spec.run import Run

MIB = 2**20
ALLOCATED = ("device", "reserved_peak", "allocated_peak")  # kinds that cannot be below the tensors' peak
SLACK = 0.97  # a prediction this share of which is still above the measurement rules a setting out
MACHINES = 1.5  # equal work per device that takes this many times longer was not done by equal machines


@dataclass(frozen=True)
class Inference:
    """`side` names the run (or both). `knob` and `value` where a setting follows; `text` is one sentence with the
    numbers it rests on."""

    side: str
    text: str
    knob: str = ""
    value: Any = None


def conclude(one: Side) -> tuple[Side, list[Inference]]:
    """The side with what its own numbers add, and why."""
    found: list[Inference] = []
    for step in (_layout, _zero, _moment):
        one, said = step(one)
        found += said
    found += [*_units(one), *_rates(one), *_occupancy(one), *_counts(one)]
    return one, found


def _kind(one: Side) -> str | None:
    return next((kind for kind in ALLOCATED if kind in one.record.memory), None)


def _zero(one: Side) -> tuple[Side, list[Inference]]:
    """Memory too low for unsharded Adam: the optimizer's states were sharded."""
    kind, data = _kind(one), one.value("parallel.data")
    if "parallel.zero" in one.known or kind is None:
        return one, []
    measured = one.record.memory[kind]
    room = measured - (_context(one) or 0 if kind == "device" else 0)
    whole, early = (attribute.tensor_bytes(one, kind, {"parallel.zero": 0}, early) for early in (False, True))
    if whole is None or early is None or not isinstance(data, int) or data < 2 or min(whole * SLACK, early) <= room:
        return one, []
    predicted = {z: attribute.tensor_bytes(one, kind, {"parallel.zero": z}) or 0 for z in (1, 2)}
    least = (_context(one) or _least_context()) if kind == "device" else 0
    fits = [z for z, size in predicted.items() if (size + least) * SLACK <= measured] or [2]
    stages = " or ".join(f"stage {z} ({_mib(predicted[z])} of tensors)" for z in fits)
    text = (
        f"{_mib(measured)} ({kind}) is below the {_mib(whole)} that unsharded Adam needs here, so ZeRO was on: {stages}"
    )
    one = one.with_known("parallel.zero", fits[0], "inferred from the memory")
    return one, [Inference(one.name, text, "parallel.zero", fits[0])]


def _context(one: Side) -> int | None:
    """Bytes of an idle process on the run's chip; None where they are not known."""
    chip = hardware.chips().get(str(one.value("hardware.chip")))
    return chip.context_bytes if chip else None


def _least_context() -> int:
    """The smallest of any chip."""
    return min(chip.context_bytes for chip in hardware.chips().values() if chip.context_bytes)


def _moment(one: Side) -> tuple[Side, list[Inference]]:
    """Memory too low for states that are known to be whole: it was read before the first update made them."""
    kind = _kind(one)
    if kind is None or "parallel.zero" not in one.known:
        return one, []
    measured = one.record.memory[kind]
    late, early = attribute.tensor_bytes(one, kind), attribute.tensor_bytes(one, kind, early=True)
    if late is None or early is None or late * SLACK <= measured or early > measured:
        return one, []
    text = (
        f"{_mib(measured)} ({kind}) is below the {_mib(late)} of a full step and fits the {_mib(early)} before the "
        "first update: it was read before Adam's moments existed (fp16 skips the first steps)"
    )
    return one.with_known("memory.moment", attribute.FIRST_STEP, "inferred from the memory"), [
        Inference(one.name, text, "memory.moment", attribute.FIRST_STEP)
    ]


def _units(one: Side) -> Iterator[Inference]:
    """A printed rate that is 1000 times off what batch and time give: milliseconds taken for seconds."""
    printed, steps = one.record.printed.get("samples_per_second"), one.record.steps
    timed = [s for s in steps if s.seconds and s.batch_size]
    if not isinstance(printed, int | float) or printed <= 0 or not timed:
        return
    computed = (timed[-1].batch_size or 0) / (timed[-1].seconds or 1)
    for factor, word in ((1000, "small"), (0.001, "large")):
        if 0.7 < computed / printed / factor < 1.4:  # such small rates are printed with one or two digits
            text = f"prints {printed:g} samples/s where batch and time give {computed:.3g}: 1000 x too {word}, ms for s"
            yield Inference(one.name, text)


def _rates(one: Side) -> Iterator[Inference]:
    """A rate that the chip cannot reach."""
    rates, devices, work = speed(one), world(one), attribute.model_flops_per_sample(one)
    if not rates.samples_per_second or not devices or not work:
        return
    reached = work * rates.samples_per_second / devices
    try:
        chip = hardware.find(str(one.value("hardware.chip") or ""))
    except UserError:
        chip = None
    peak = chip.peak.get(str(one.value("precision.compute"))) if chip else None
    if chip and peak and reached > peak:
        yield Inference(
            one.name,
            f"{rates.samples_per_second:,.1f} samples/s are {reached / 1e12:,.0f} TFLOP/s a device, above the peak of "
            f"{chip.name} ({peak / 1e12:,.0f}): the rate, the batch or the number of devices is wrong",
        )


def _occupancy(one: Side) -> Iterator[Inference]:
    """`gpu_rate` of OneAutoTest and the like."""
    rate = one.record.printed.get("gpu_rate")
    if not isinstance(rate, int | float) or not 0 < rate <= 1:
        return
    used = one.record.memory.get("device")
    whole = f": {_mib(used)} / {rate:.0%} = {used / rate / 2**30:.1f} GiB of device memory" if used else ""
    yield Inference(one.name, f"gpu_rate = {rate:.0%} is memory occupancy, not utilisation{whole}")


def _layout(one: Side) -> tuple[Side, list[Inference]]:
    """A printed parameter count that only one layout gives."""
    printed = {k: v for k in COUNTED if isinstance(v := one.record.printed.get(k), int | float)}
    if not printed or ("parallel.tensor" in one.known and "parallel.pipeline" in one.known and not _implied(one)):
        return one, []
    layers = one.value("model.num_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        return one, []
    for name, value in printed.items():
        fits = [layout for layout in LAYOUTS if _prints(one, name, layout) == value]
        sizes = {"tensor": {t for t, _ in fits}, "pipeline": {p for _, p in fits}}
        settled = {axis: size.pop() for axis, size in sizes.items() if len(size) == 1}
        if settled:
            layout = " x ".join(f"{axis} {size}" for axis, size in settled.items())
            said = []
            for axis, size in settled.items():
                one = one.with_known(f"parallel.{axis}", size, f"inferred from {name}")
                text = f"{name} = {value:,} is what {layout} prints, and no other layout"
                said.append(Inference(one.name, text, f"parallel.{axis}", size))
            return one, said[:1]
    return one, []


COUNTED = ("deepspeed_total", "deepspeed_unique", "estimated", "parameters")
MOST_LAYERS = 1000  # each layout is counted tensor by tensor; no model has so many, a damaged log may say so
LAYOUTS = tuple((t, p) for t in (1, 2, 4, 8, 16) for p in (1, 2, 4, 8, 16, 32, 64))


def _implied(one: Side) -> bool:
    return not one.known["parallel.tensor"].given and not one.known["parallel.pipeline"].given


def _prints(one: Side, name: str, layout: tuple[int, int]) -> float | None:
    changes: dict[str, Any] = {
        "parallel.tensor": layout[0],
        "parallel.pipeline": layout[1],
        "parallel.stages": "balanced",
    }
    changes |= {"parallel.data": 1, "batch.global_batch_size": None, "batch.micro_batch_size": None}
    run = run_of(one, changes)
    return None if run is None else reproduced(run).get(name)


def reproduced(run: Run) -> dict[str, Any]:
    """What the frameworks print for a run, by our own count, under the names that the logs' readers use."""
    from steelyard.frameworks import counting

    try:
        entries = counting.printed(run)
    except (UserError, ValueError, ArithmeticError, AssertionError):
        return {}
    names = ("deepspeed_total", "deepspeed_unique", "deepspeed_stage")
    found = {name: entries[name].value for name in names if name in entries}
    found["deepspeed_stage_before_0_12_5"] = entries["deepspeed_stage_before_0_12_5"].value
    found["parameters"] = parameters.unique(run.model, run.parallel.tensor)
    found["megatron_ranks"] = entries["megatron_ranks"].value if "megatron_ranks" in entries else None
    return found


def _counts(one: Side) -> Iterator[Inference]:
    """Whether the parameter counts of the log are those of its configuration."""
    printed = one.record.printed
    run = run_of(one)
    if run is None or not ({"megatron_ranks", "deepspeed_total", "deepspeed_unique"} & printed.keys()):
        return
    ours = reproduced(run)
    agreed: list[str] = []
    apart: list[str] = []
    for name in ("deepspeed_total", "deepspeed_unique"):
        if name in printed and ours.get(name) is not None:
            (agreed if printed[name] == ours[name] else apart).append(f"{name} {printed[name]:,}")
    ranks = printed.get("megatron_ranks")
    if isinstance(ranks, dict) and ranks:
        least, most = min(ranks.values()), max(ranks.values())
        text = f"{len(ranks)} ranks of {least:,} to {most:,}" if least < most else f"{len(ranks)} x {least:,} on a rank"
        fits = any(all(expected.get(place) == n for place, n in ranks.items()) for expected in _per_rank(run, ours))
        (agreed if fits else apart).append(text)
    if agreed:
        yield Inference(one.name, f"parameter counts reproduced from the configuration: {', '.join(agreed)}")
    if apart:
        yield Inference(one.name, f"parameter counts that are not those of this configuration: {', '.join(apart)}")


def _per_rank(run: Run, ours: dict[str, Any]) -> Iterator[dict[str, int]]:
    """ "tensor,pipeline" -> parameters, as Megatron builds the stages and as DeepSpeed's pipeline engine does."""
    tensor, pipeline = run.parallel.tensor, run.parallel.pipeline
    if isinstance(ours.get("megatron_ranks"), list):
        places = [f"{t},{p}" for p in range(pipeline) for t in range(tensor)]
        yield dict(zip(places, ours["megatron_ranks"], strict=False))
    for name in ("deepspeed_stage", "deepspeed_stage_before_0_12_5"):
        if isinstance(ours.get(name), list):
            yield {f"{t},{p}": count for p, count in enumerate(ours[name]) for t in range(tensor)}


def between(a: Side, b: Side, found: Sequence[Difference]) -> Iterator[Inference]:
    """What the rates of the two say about each other."""
    yield from _sizes(a, b)
    left, right, many, few = speed(a), speed(b), world(a), world(b)
    work_a, work_b = attribute.model_flops_per_sample(a), attribute.model_flops_per_sample(b)
    if not (left.samples_per_second and right.samples_per_second):
        return
    both = f"{a.name} and {b.name}"
    if many and few and many != few and work_a == work_b and work_a:
        more, less = (left, right) if many > few else (right, left)
        if more.samples_per_second and less.samples_per_second and more.samples_per_second < less.samples_per_second:
            text = (
                f"{max(many, few)} devices do {more.samples_per_second:,.1f} samples/s and {min(many, few)} do "
                f"{less.samples_per_second:,.1f}: more devices were slower"
            )
            yield Inference(both, text)
    explained = {d.knob.group for d in found} & {"layout", "model", "precision", "hardware"}
    if work_a and work_b and many and few and not explained:
        reached = [
            w * r / n for w, r, n in ((work_a, left.samples_per_second, many), (work_b, right.samples_per_second, few))
        ]
        ratio = max(reached) / min(reached)
        if ratio >= MACHINES:
            hosts = [one.record.environment.get("host") for one in (a, b)]
            same_host = hosts[0] is not None and hosts[0] == hosts[1]
            why = "the machine had other work" if same_host else "these were different machines"
            each = " and ".join(f"{rate / 1e12:#.3g}" for rate in reached)
            yield Inference(
                both, f"{each} model TFLOP/s a device: {ratio:.1f} x apart, more than settings explain; {why}"
            )


def _sizes(a: Side, b: Side) -> Iterator[Inference]:
    """Whether both train the same network: distinct parameters, padding rows left out."""
    runs = run_of(a), run_of(b)
    if runs[0] is None or runs[1] is None:
        return
    left, right = (parameters.unique_unpadded(run.model) for run in runs if run is not None)
    if left != right:
        text = f"{left:,} and {right:,} distinct parameters without padding rows: different models"
        yield Inference(f"{a.name} and {b.name}", text)


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"
