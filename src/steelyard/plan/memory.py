"""The memory of a run as a part of its plan: every rank class, whether it fits, and what would make it fit."""

from collections.abc import Iterator
from typing import Any

from steelyard import hardware
from steelyard.frameworks import allocating
from steelyard.hardware import Chip
from steelyard.predict import flops, stages
from steelyard.predict.memory import Memory, device, reserved
from steelyard.spec import write
from steelyard.spec.errors import UserError, did_you_mean, error
from steelyard.spec.load import resolve
from steelyard.spec.run import Run


def as_json(run: Run, rank: int | None = None) -> dict[str, Any] | None:
    """The memory of every class of equal ranks, or of rank `rank` alone, in bytes. None where the framework's memory is
    not modelled. Raises UserError H001, M001, P002."""
    model = allocating.find(run.engine.framework)
    if model is None:
        name, readable = run.engine.framework, allocating.known()
        if allocating.folder(name) not in readable:
            raise error("P002", "engine.framework", name=name, suggestion=did_you_mean(name, list(readable)))
        return None
    found = allocating.ranks(run) if rank is None else allocating.of_rank(run, rank)
    assert found
    chip = hardware.of(run.hardware)
    known = chip if chip and chip.memory_bytes else None
    return {
        "framework": model.NAME,
        "chip": known.name if known else None,
        "capacity": known.memory_bytes if known else None,
        "fits": fits(found, known),
        "assumed": list(model.assumed(run)),
        "ranks": [_rank(memory, chip) for memory in found],
        "not_counted": [*NOT_COUNTED, *([] if known and known.context_bytes else ["context"])],
        "says": SAYS,
    }


def need(memory: Memory, chip: Chip | None) -> int:
    """What a device must have: the estimate of what the driver would report, or of what the allocator holds where a
    context's size is unknown."""
    return device(memory, chip) or reserved(memory)


def fits(found: tuple[Memory, ...], chip: Chip | None) -> bool | None:
    """Whether the largest rank fits; None on an unknown chip."""
    return max(need(memory, chip) for memory in found) <= chip.memory_bytes if chip else None


def _rank(memory: Memory, chip: Chip | None) -> dict[str, Any]:
    at_peak = memory.at_peak
    return {
        "stage": memory.stage,
        "tensor": memory.tensor,
        "count": memory.count,
        "states": dict(vars(at_peak.states)),
        "steady": memory.steady,
        "peak": memory.peak,
        "peak_first_step": memory.peak_first_step,
        "moment": at_peak.name,
        "terms": {name: value for name, value in at_peak.terms.items() if value},
        "reserved": reserved(memory),
        "device": device(memory, chip),
    }


NOT_COUNTED = ("fragmentation", "communicators")
SAYS = {
    "states": "Weights the network computes with, gradients, master weights and Adam's moments, at the peak.",
    "terms": "What else is alive at the peak, by name; with the states it adds up to `peak`.",
    "moment": "The moment of the step at which the peak is reached.",
    "peak": "The most that the allocator has given out in a step.",
    "peak_first_step": "The same before the optimizer's moments exist; fp16 skips its first steps.",
    "steady": "Allocated between steps.",
    "not_counted": "What a device holds beside `device`, or `reserved` where that is null.",
    "reserved": "What the allocator holds from the driver: the peak in whole segments. Fragmentation is not modelled.",
    "device": "What the driver reports: `reserved` and the context. Communicators are not modelled; null where the "
    "context of the chip is unknown.",
}


def changes(run: Run) -> list[dict[str, Any]]:
    """Single changes of the run that would make it fit, the cheapest in FLOPs first; among equals the one that leaves
    more room last. Empty on an unknown chip. Changes of layout keep the world and the global batch."""
    chip = hardware.of(run.hardware)
    if chip is None or not chip.memory_bytes:
        return []
    found = []
    for text in _candidates(run):
        changed = _changed(run, text)
        ranks = _ranks(changed) if changed else None
        if changed and ranks and fits(ranks, chip):
            more = _executed(changed) / _executed(run) - 1
            found.append({"set": text, "need": max(need(m, chip) for m in ranks), "more_flops": more})
    return sorted(found, key=lambda change: (round(change["more_flops"], 4), -change["need"]))


def _ranks(run: Run) -> tuple[Memory, ...] | None:
    """None too where the framework's memory with these settings is not modelled."""
    try:
        return allocating.ranks(run)
    except UserError:
        return None


def _candidates(run: Run) -> Iterator[str]:
    parallel, recompute, batch = run.parallel, run.recompute, run.batch
    if parallel.zero < 3:
        yield from (f"parallel.zero={zero}" for zero in range(parallel.zero + 1, 4))
    if parallel.tensor > 1 and not parallel.sequence:
        yield "parallel.sequence=true"
    if recompute.mode == "none":
        yield from ("recompute.mode=selective", "recompute.mode=full")
    elif recompute.mode == "selective":
        yield "recompute.mode=full"
    micro = batch.micro_batch_size
    yield from (f"batch.micro_batch_size={n}" for n in sorted({micro // 2, micro // 4, 1}) if 0 < n < micro)
    yield from (f"parallel.tensor={parallel.tensor * n}" for n in (2, 4, 8))
    yield from (f"parallel.pipeline={parallel.pipeline * n}" for n in (2, 4))


def _changed(run: Run, text: str) -> Run | None:
    """The run with one value changed and what follows from it derived again; None where that is no legal run."""
    values = write.as_config(run)
    values["parallel"]["data"] = "auto"
    values["batch"].pop("accumulation")
    if text.startswith("parallel.pipeline"):
        values["parallel"]["stages"] = "balanced"
    try:
        return resolve(values, overrides=[text], world=run.parallel.world_size).run
    except UserError:
        return None


def _executed(run: Run) -> int:
    """Hardware FLOPs of one sequence."""
    layers = stages.split(run.model, run.parallel)
    return flops.hardware_flops(run.model, run.padded_vocab_size, run.recompute, layers)
