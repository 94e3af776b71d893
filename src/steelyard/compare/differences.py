"""Which settings differ, which are the same, which nobody knows, and what each can change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from steelyard.compare.align import Side

Weight = Literal[0, 1, 2]  # 0: no effect; 1: an effect that can be taken out; 2: another run


@dataclass(frozen=True)
class Knob:
    """A key, what it can change, and the group that is switched with it (`recompute.every` means nothing alone).
    `asked`: a comparison is not certain while it is unknown."""

    key: str
    memory: Weight
    speed: Weight
    loss: Weight
    group: str
    asked: bool = False


def _knobs() -> Iterator[Knob]:
    """In the order in which they usually matter."""
    yield Knob("recompute.mode", 2, 1, 0, "recompute", True)
    for name in ("every", "layers", "modules", "shard"):
        yield Knob(f"recompute.{name}", 1, 1, 0, "recompute")
    yield Knob("batch.micro_batch_size", 2, 1, 0, "batch", True)
    yield Knob("batch.global_batch_size", 0, 1, 2, "batch", True)
    yield Knob("batch.accumulation", 0, 1, 0, "batch")
    yield Knob("batch.ramp", 0, 1, 2, "batch")
    yield Knob("batch.loss_mean", 0, 0, 1, "loss mean")
    yield Knob("parallel.zero", 2, 1, 0, "zero", True)
    for name in ("tensor", "pipeline", "data", "context"):
        yield Knob(f"parallel.{name}", 2, 1, 0, "layout", name != "context")
    for name in ("sequence", "virtual", "pipeline_schedule", "stages", "replicate"):
        yield Knob(f"parallel.{name}", 1, 1, 0, "layout")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        yield Knob(f"model.{name}", 2, 2, 2, "model", True)
    for name in ("ffn_hidden_size", "num_query_groups", "head_dim", "tied_embeddings", "position", "activation"):
        yield Knob(f"model.{name}", 2, 2, 2, "model")
    yield Knob("model.vocab_size", 2, 2, 2, "model", True)
    yield Knob("model.vocab_multiple", 1, 1, 1, "model")
    for name in ("norm", "bias", "qkv_bias", "qk_norm", "embedding_norm", "max_position_embeddings"):
        yield Knob(f"model.{name}", 1, 1, 2, "model")
    for name in ("norm_eps", "rotary_base", "rotary_fraction", "init_std", "padding_in_softmax", "kind"):
        yield Knob(f"model.{name}", 0, 0, 1, "model")
    for name in ("attention_dropout", "hidden_dropout"):
        yield Knob(f"model.{name}", 1, 1, 2, "dropout", True)
    yield Knob("precision.compute", 2, 2, 1, "precision", True)
    yield Knob("precision.gradients", 1, 1, 1, "precision")
    yield Knob("precision.loss_scale", 0, 0, 1, "precision")
    yield Knob("hardware.chip", 0, 2, 0, "hardware", True)
    yield Knob("engine.attention", 1, 1, 0, "kernels")
    yield Knob("engine.implementation", 1, 1, 0, "kernels")
    yield Knob("engine.framework", 0, 0, 0, "framework")  # what is compared stands in nobody's way
    for name in ("name", "betas", "eps", "weight_decay", "clip_grad"):
        yield Knob(f"optimizer.{name}", 0, 0, 2, "optimizer")
    for name in ("peak", "minimum", "decay", "decay_steps", "decay_samples", "warmup_fraction", "warmup_steps"):
        yield Knob(f"learning_rate.{name}", 0, 0, 2, "learning rate", name == "peak")
    for name in ("warmup_samples", "first_update", "wsd_decay"):
        yield Knob(f"learning_rate.{name}", 0, 0, 1, "learning rate")
    yield Knob("seed", 0, 0, 1, "seed")
    for name in ("train", "split", "tokenizer"):
        yield Knob(f"data.{name}", 0, 0, 2, "data")
    for name in ("mask_loss_at_eod", "reset_positions", "reset_attention"):
        yield Knob(f"data.{name}", 0, 0, 2, "data")


KNOBS = tuple(_knobs())


@dataclass(frozen=True)
class Effect:
    """What a setting changes, from A to B. memory_bytes and seconds (of one step) are signed and None where nothing
    predicts them; loss says in a word whether the curve can differ for it."""

    memory_bytes: int | None = None
    seconds: float | None = None
    loss: str | None = None


@dataclass(frozen=True)
class Difference:
    knob: Knob
    a: Any
    b: Any
    source_a: str
    source_b: str
    effect: Effect = Effect()


def differences(a: Side, b: Side) -> list[Difference]:
    """Knobs that both sides know and that differ, in the order of KNOBS."""
    found = []
    for knob in KNOBS:
        if knob.key in a.known and knob.key in b.known:
            left, right = a.value(knob.key), b.value(knob.key)
            if not equal(left, right) and not _follows(knob, a, b):
                if {str(left), str(right)} == {"gelu", "gelu_tanh"}:  # two forms of one function, 5e-4 apart at most
                    knob = replace(knob, memory=0, speed=0, loss=1)
                loss = {0: None, 1: "slightly", 2: "different"}[knob.loss]
                effect = Effect(loss=loss)
                found.append(Difference(knob, left, right, a.source(knob.key), b.source(knob.key), effect))
    return found


def _follows(knob: Knob, a: Side, b: Side) -> bool:
    """A difference that another one implies: nothing to report."""
    both_given = a.known[knob.key].given and b.known[knob.key].given
    if knob.key.startswith("recompute.") and knob.key != "recompute.mode":
        return a.value("recompute.mode") != b.value("recompute.mode")
    if knob.key == "model.vocab_multiple":
        return not both_given
    return knob.key in ("parallel.stages", "model.head_dim", "batch.accumulation") and not both_given


def same(a: Side, b: Side) -> dict[str, Any]:
    return {
        knob.key: a.value(knob.key)
        for knob in KNOBS
        if knob.key in a.known and knob.key in b.known and equal(a.value(knob.key), b.value(knob.key))
    }


def unknown(a: Side, b: Side) -> list[dict[str, Any]]:
    """Knobs that at least one side does not say: those that one side knows, and those that must be asked for."""
    found = []
    for knob in KNOBS:
        here, there = knob.key in a.known, knob.key in b.known
        if (here and there) or not (knob.asked or here or there):
            continue
        if knob.asked or knob.memory == 2 or knob.speed == 2 or knob.loss == 2:
            found.append({"knob": knob.key, "a": a.value(knob.key), "b": b.value(knob.key), "asked": knob.asked})
    return found


def equal(left: Any, right: Any) -> bool:
    """2 and 2.0 are one value, True and 1 are not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return abs(left - right) <= 1e-9 * max(abs(left), abs(right))
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(equal(x, y) for x, y in zip(left, right, strict=True))
    return bool(left == right)
