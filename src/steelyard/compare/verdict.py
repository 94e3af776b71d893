"""May two runs be compared in memory, in speed, in loss; and if not, what would have to change."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from steelyard.compare import align, attribute, inferred
from steelyard.compare.align import Point, Side
from steelyard.compare.attribute import Explained
from steelyard.compare.differences import Difference, Effect, differences, same, unknown
from steelyard.compare.inferred import Inference
from steelyard.record.schema import Record
from steelyard.record.writer import finite
from steelyard.spec.errors import error

Word = Literal["comparable", "after_adjustment", "not_comparable", "no_data"]
SCHEMA = 1
SMALL = 0.02  # a share of the memory that differing settings may move before the figures are no longer comparable
CLOSE = 1e-3  # relative difference of two losses from which on the curves have parted
# what a log prints as its loss -> how far it is from the loss of one step
SMOOTHED = ("median", "moving", "exponential")


@dataclass(frozen=True)
class Verdict:
    """`word`, why in one sentence, and the knobs that stand in the way."""

    word: Word
    why: str
    knobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side. `memory`, `speed` and `loss` are JSON values; the verdict has one entry for each."""

    a: Side
    b: Side
    verdict: dict[str, Verdict]
    differences: list[Difference]
    inferred: list[Inference]
    same: dict[str, Any]
    unknown: list[dict[str, Any]]
    memory: dict[str, Any]
    speed: dict[str, Any]
    loss: dict[str, Any]
    smallest_change: list[dict[str, Any]]
    points: list[Point] = field(default_factory=list)

    @property
    def comparable(self) -> bool:
        """Nothing that both runs measured is out of reach, and they measured something, or have only been planned."""
        words = {v.word for v in self.verdict.values()}
        return "not_comparable" not in words and (words != {"no_data"} or not self.differences)


def compare(records: Sequence[Record]) -> list[Comparison]:
    """The first record with each of the others. Raises UserError K004 for fewer than two."""
    if len(records) < 2:
        raise error("K004", count=len(records))
    names = [chr(ord("A") + number) if number < 26 else f"run {number + 1}" for number in range(len(records))]
    sides = [align.side(name, record) for name, record in zip(names, records, strict=True)]
    return [pair(sides[0], other) for other in sides[1:]]


def pair(a: Side, b: Side) -> Comparison:
    a, said_a = inferred.conclude(a)
    b, said_b = inferred.conclude(b)
    if _only_planned(a) and _only_planned(b):
        a, b = _with_prediction(a), _with_prediction(b)
    found = differences(a, b)
    kind = align.memory_kind(a.record, b.record)
    explained = attribute.memory(a, b, kind, found) if kind else None
    times = attribute.seconds(a, b, found, align.speed(a).seconds_per_step)
    found = _ranked([_with_effect(d, explained, times, found) for d in found])
    missing = unknown(a, b)
    axis, points = align.losses(a, b)
    verdict = {
        "memory": _memory_verdict(a, b, kind, found, missing, explained),
        "speed": _speed_verdict(a, b, found, missing),
        "loss": _loss_verdict(a, b, found, axis, points),
    }
    return Comparison(
        a=a,
        b=b,
        verdict=verdict,
        differences=found,
        inferred=[*said_a, *said_b, *inferred.between(a, b, found)],
        same=same(a, b),
        unknown=missing,
        memory=_memory_json(a, b, kind, explained),
        speed=_speed_json(a, b),
        loss=_loss_json(a, b, axis, points),
        smallest_change=_smallest_change(a, b, found, verdict),
        points=points,
    )


def _only_planned(one: Side) -> bool:
    """A run file or a script: nothing has been measured."""
    return not (one.record.steps or one.record.memory or one.record.speed or one.record.printed)


def _with_prediction(one: Side) -> Side:
    """With the predicted peak of the largest rank's tensors in place of a measured one, where there is a model."""
    size = attribute.tensor_bytes(one, "predicted")
    return one if size is None else replace(one, record=replace(one.record, memory={"predicted": size}))


def _with_effect(
    one: Difference, explained: Explained | None, times: dict[str, float], found: Sequence[Difference]
) -> Difference:
    """The share of a group stands at its first knob; the others of the group say so by having none."""
    first = next(d for d in found if d.knob.group == one.knob.group) is one
    memory = seconds = None
    if first and explained is not None:
        share = explained.shares.get(one.knob.group)
        memory = round(share) if share is not None else None
    if first:
        seconds = times.get(one.knob.group)
    return replace(one, effect=Effect(memory, seconds, one.effect.loss))


def _ranked(found: list[Difference]) -> list[Difference]:
    """By predicted bytes where they are known, the settings of a group together; else in the order of the knobs."""
    size: dict[str, float] = {}
    first: dict[str, int] = {}
    for number, d in enumerate(found):
        size[d.knob.group] = max(size.get(d.knob.group, 0), abs(d.effect.memory_bytes or 0))
        first.setdefault(d.knob.group, number)
    return sorted(found, key=lambda d: (-size[d.knob.group], first[d.knob.group]))


# --- memory --------------------------------------------------------------------------------------------------------
def _memory_verdict(
    a: Side,
    b: Side,
    kind: str | None,
    found: list[Difference],
    missing: list[dict[str, Any]],
    explained: Explained | None,
) -> Verdict:
    if not a.record.memory or not b.record.memory:
        lacking = " and ".join(one.name for one in (a, b) if not one.record.memory)
        return Verdict("no_data", f"{lacking} {'has' if len(lacking) == 1 else 'have'} no memory figure")
    if kind is None:
        kinds = [", ".join(one.record.memory) for one in (a, b)]
        return Verdict(
            "not_comparable", f"{a.name} has {kinds[0]}, {b.name} has {kinds[1]}: different kinds of memory never mix"
        )
    knobs = tuple(d.knob.key for d in found if d.knob.memory == 2)
    minor = tuple(d.knob.key for d in found if d.knob.memory == 1)
    moments = a.value("memory.moment") != b.value("memory.moment")
    if knobs or moments:
        largest = max(abs(s) for s in explained.shares.values()) if explained and explained.shares else None
        whole = max(a.record.memory[kind], b.record.memory[kind])
        what = [*_short(knobs), *(["the moment of reading"] if moments else [])]
        if largest is not None and largest < SMALL * whole:
            return Verdict("after_adjustment", f"{_differ(what)}, with little effect", knobs)
        return Verdict("not_comparable", f"{_differ(what)}: the figures are of different runs", knobs)
    if minor:
        return Verdict("after_adjustment", _differ(_short(minor)), minor)
    asked = [m["knob"] for m in missing if m["asked"] and _weight(m["knob"]) == 2]
    if asked:
        return Verdict("after_adjustment", f"only if {_agree(_short(asked))}, which is not known", tuple(asked))
    return Verdict("comparable", f"same settings, same kind ({kind})")


def _memory_json(a: Side, b: Side, kind: str | None, explained: Explained | None) -> dict[str, Any]:
    sides = {name: dict(one.record.memory) for name, one in (("a", a), ("b", b))}
    if kind is None:
        return {"kind": None, **sides, "gap_bytes": None, "explained": {}, "unexplained_bytes": None, "model": None}
    gap = b.record.memory[kind] - a.record.memory[kind]
    shares = {name: round(share) for name, share in explained.shares.items()} if explained else {}
    shares = dict(sorted(shares.items(), key=lambda item: -abs(item[1])))
    return {
        "kind": kind,
        **sides,
        "gap_bytes": gap,
        "explained": {_lead(name): share for name, share in shares.items()},
        "unexplained_bytes": gap - sum(shares.values()) if explained else None,
        "model": explained.model if explained else None,
        "ranks": {name: _ranks(one, kind) for name, one in (("a", a), ("b", b))},
    }


def _ranks(one: Side, kind: str) -> dict[str, int]:
    """Bytes of every rank that reported that kind."""
    return {str(rank): kinds[kind] for rank, kinds in sorted(one.record.ranks.items()) if rank >= 0 and kind in kinds}


LEADS = {
    "recompute": "recompute.mode", "batch": "batch.micro_batch_size", "zero": "parallel.zero", "layout": "parallel",
    "precision": "precision.compute", "model": "model", "dropout": "model.hidden_dropout",
    "kernels": "engine.attention", "moment": "memory.moment", "framework": "engine.framework",
    "hardware": "hardware.chip",
}  # fmt: skip


def _lead(group: str) -> str:
    """The knob that a group of settings is known by."""
    return LEADS.get(group, group)


# --- speed ---------------------------------------------------------------------------------------------------------
def _speed_verdict(a: Side, b: Side, found: list[Difference], missing: list[dict[str, Any]]) -> Verdict:
    rates = [align.speed(one) for one in (a, b)]
    lacking = [
        one.name
        for one, rate in zip((a, b), rates, strict=True)
        if not (rate.samples_per_second or rate.tokens_per_second)
    ]
    if lacking:
        timed = all(rate.seconds_per_step for rate in rates)
        why = f"{_and(lacking)} has no rate" if len(lacking) == 1 else f"{_and(lacking)} have no rate"
        if not timed:
            return Verdict("no_data", why)
    block = tuple(d.knob.key for d in found if d.knob.speed == 2)
    adjust = tuple(d.knob.key for d in found if d.knob.speed == 1)
    if block:
        return Verdict("not_comparable", f"{_differ(_short(block))}: not the same work on the same device", block)
    if adjust:
        return Verdict(
            "after_adjustment", f"{_differ(_short(adjust))}: compare tokens/s a device, one cause at a time", adjust
        )
    asked = [m["knob"] for m in missing if m["asked"] and _weight(m["knob"], "speed") == 2]
    if asked:
        return Verdict("after_adjustment", f"only if {_agree(_short(asked))}, which is not known", tuple(asked))
    return Verdict("comparable", "same work on the same devices")


def _speed_json(a: Side, b: Side) -> dict[str, Any]:
    sides = {name: _rates(one) for name, one in (("a", a), ("b", b))}
    left, right = (align.speed(one).samples_per_second for one in (a, b))
    return {
        **sides,
        "ratio_samples_per_second": right / left if left and right else None,
        "convention": "whole run; model FLOPs: forward and backward, causal attention, nothing recomputed; hardware "
        "FLOPs: with recomputation",
    }


def _rates(one: Side) -> dict[str, Any]:
    rate = align.speed(one)
    work, executed = attribute.model_flops_per_sample(one), attribute.hardware_flops_per_device(one)
    known = rate.samples_per_second and rate.devices
    found: dict[str, Any] = {
        "samples_per_second": rate.samples_per_second,
        "tokens_per_second": rate.tokens_per_second,
        "tokens_per_second_per_device": rate.tokens_per_second_per_device,
        "seconds_per_step": rate.seconds_per_step,
        "devices": rate.devices,
        "model_flops_per_second_per_device": None,
        "hardware_flops_per_second_per_device": None,
    }
    if known and work and rate.samples_per_second and rate.devices:
        reached = work * rate.samples_per_second / rate.devices
        found["model_flops_per_second_per_device"] = reached
        batch = one.size("batch.global_batch_size")
        if executed and batch:
            found["hardware_flops_per_second_per_device"] = executed * rate.samples_per_second / batch
    for name in ("steps_counted", "seconds_per_step_p10", "seconds_per_step_p90"):
        if name in one.record.speed:
            found[name] = one.record.speed[name]
    return found


# --- loss ----------------------------------------------------------------------------------------------------------
def _loss_verdict(a: Side, b: Side, found: list[Difference], axis: str, points: list[Point]) -> Verdict:
    lacking = [one.name for one in (a, b) if not any(s.loss is not None for s in one.record.steps)]
    broken = [f"{one.name} from step {first}" for one in (a, b) if (first := _first_nan(one)) is not None]
    if broken:
        return Verdict("not_comparable", f"the loss or gradient norm is not finite in {_and(broken)}")
    if lacking:
        return Verdict("no_data", f"{_and(lacking)} {'has' if len(lacking) == 1 else 'have'} no loss")
    block = tuple(d.knob.key for d in found if d.knob.loss == 2)
    if block:
        return Verdict("not_comparable", f"{_differ(_short(block))}: other curves are expected", block)
    if not axis:
        return Verdict(
            "not_comparable", "neither samples nor tokens are known on both sides, and global batches differ"
        )
    if not points:
        return Verdict("not_comparable", f"no step of the two has the same {axis}")
    smoothed = [one.name for one in (a, b) if one.record.conventions.get("loss", "").startswith(SMOOTHED)]
    slight = tuple(d.knob.key for d in found if d.knob.loss == 1)
    if len(smoothed) == 1:
        return Verdict("after_adjustment", f"{smoothed[0]} prints a smoothed loss")
    if slight:
        return Verdict("after_adjustment", _differ(_short(slight)), slight)
    return Verdict("comparable", f"same training settings as far as known, {len(points):,} points aligned on {axis}")


def _first_nan(one: Side) -> int | None:
    return next((s.step for s in one.record.steps if s.nan), None)


def _loss_json(a: Side, b: Side, axis: str, points: list[Point]) -> dict[str, Any]:
    parted = next((p for p in points if p.relative > CLOSE), None)
    differ = next((p for p in points if p.a != p.b), None)
    before = [p for p in points if parted is None or p.at < parted.at]
    return {
        "aligned_on": axis or None,
        "points": len(points),
        "equal_points": len(before),
        "tolerance": CLOSE,
        "first_divergence": _point(parted, axis),
        "first_difference": _point(differ, axis),
        "last_common": _point(points[-1] if points else None, axis),
        "restarts": {name: _seams(one) for name, one in (("a", a), ("b", b))},
        "not_finite": {name: sum(1 for s in one.record.steps if s.nan) for name, one in (("a", a), ("b", b))},
        "conventions": {name: one.record.conventions.get("loss") for name, one in (("a", a), ("b", b))},
    }


def _point(point: Point | None, axis: str) -> dict[str, Any] | None:
    if point is None:
        return None
    return {axis: point.at, "step_a": point.step_a, "step_b": point.step_b, "a": point.a, "b": point.b}


def _seams(one: Side) -> list[dict[str, Any]]:
    return [{"step": e.step, **e.detail} for e in one.record.events if e.what == "restart"]


# --- the way out ---------------------------------------------------------------------------------------------------
def _smallest_change(a: Side, b: Side, found: list[Difference], verdict: dict[str, Verdict]) -> list[dict[str, Any]]:
    """Settings of A that would have to be B's (or the other way round), for the verdicts that are not `comparable`."""
    wanted = {knob for v in verdict.values() if v.word in ("not_comparable", "after_adjustment") for knob in v.knobs}
    changes = [{"knob": d.knob.key, "a": d.a, "b": d.b} for d in found if d.knob.key in wanted]
    if a.value("memory.moment") != b.value("memory.moment"):
        early = a.name if a.value("memory.moment") else b.name
        changes.append({"knob": "memory.moment", "a": a.value("memory.moment"), "b": b.value("memory.moment"),
                        "do": f"read {early}'s memory after an update that was not skipped"})  # fmt: skip
    return changes


def _weight(key: str, what: str = "memory") -> int:
    from steelyard.compare.differences import KNOBS

    return next((getattr(knob, what) for knob in KNOBS if knob.key == key), 0)


def _short(keys: Sequence[str]) -> list[str]:
    """Names without their section, model shapes as one."""
    names = dict.fromkeys("the model" if k.startswith("model.") and "dropout" not in k else k for k in keys)
    return list(names)


def _and(words: Sequence[str]) -> str:
    if len(words) > 5:
        return f"{', '.join(words[:4])} and {len(words) - 4} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _differ(words: Sequence[str]) -> str:
    return f"{_and(words)} {'differs' if len(words) == 1 else 'differ'}"


def _agree(words: Sequence[str]) -> str:
    return f"{_and(words)} {'agrees' if len(words) == 1 else 'agree'}"


def as_json(one: Comparison) -> dict[str, Any]:
    """The contract that programs read; bytes, seconds and nats throughout. A number that is not finite is null."""
    found = {
        "schema": SCHEMA,
        "a": _side_json(one.a),
        "b": _side_json(one.b),
        "comparable": one.comparable,
        "verdict": {name: verdict.word for name, verdict in one.verdict.items()},
        "reasons": {name: verdict.why for name, verdict in one.verdict.items()},
        "differences": [
            {
                "knob": d.knob.key, "a": d.a, "b": d.b, "source_a": d.source_a, "source_b": d.source_b,
                "effect": {"memory_bytes": d.effect.memory_bytes, "seconds": d.effect.seconds, "loss": d.effect.loss},
            }
            for d in one.differences
        ],
        "inferred": [{"side": i.side, "text": i.text, "knob": i.knob or None, "value": i.value} for i in one.inferred],
        "same": one.same,
        "unknown": one.unknown,
        "memory": one.memory,
        "speed": one.speed,
        "loss": one.loss,
        "smallest_change": one.smallest_change,
    }  # fmt: skip
    whole: dict[str, Any] = finite(found)
    return whole


def _side_json(one: Side) -> dict[str, Any]:
    record = one.record
    return {
        "source": record.source,
        "framework": record.framework,
        "steps": len(record.steps),
        "notes": record.notes,
        "conventions": record.conventions,
        "printed": record.printed,
        "sources": {k: v for k, v in record.sources.items() if k.startswith(("memory.", "printed."))},
    }
