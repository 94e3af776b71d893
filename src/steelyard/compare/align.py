"""Puts two records under the same words: one configuration, one unit, one axis.

Every value keeps its source: a line of a log, a default of that framework, a conclusion from the numbers. What nothing
says is absent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.record.schema import Record
from steelyard.spec import Loaded, UserError, resolve
from steelyard.spec.run import Run

# framework as people write it -> folder in frameworks/
FRAMEWORKS = {
    "megatronlm": "megatron", "megatron": "megatron", "megatroncore": "megatron", "libai": "libai",
    "megatrondeepspeed": "megatron_deepspeed", "gptneox": "gpt_neox", "neox": "gpt_neox", "torchtitan": "torchtitan",
    "nanotron": "nanotron", "nanogpt": "nanogpt", "llmc": "llm_c", "lingua": "lingua", "maxtext": "maxtext",
    "huggingface": "huggingface", "huggingfacetrainer": "huggingface", "transformers": "huggingface",
    "olmocore": "olmo_core", "steelyard": "steelyard",
}  # fmt: skip

GPT = {
    "model.vocab_multiple": "megatron", "model.position": "learned", "model.norm": "layernorm", "model.bias": True,
    "model.activation": "gelu", "model.tied_embeddings": True,
}  # fmt: skip
# What a framework does when nobody says anything. ZeRO stands here only where leaving it out means none.
DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron": {
        "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1, "parallel.zero": 0, "parallel.tensor": 1,
        "parallel.pipeline": 1, "parallel.context": 1, **GPT,
    },
    "libai": {  # its gpt2_pretrain.py: embedding and attention dropout 0.1, output dropout left at 0
        "model.attention_dropout": 0.1, "model.hidden_dropout": 0.0, "parallel.tensor": 1,
        "parallel.pipeline": 1, "parallel.context": 1, **GPT,
    },
}  # fmt: skip

# Keys of a run file that say nothing about what a run computes or costs.
SILENT = ("name", "record.", "stop.", "checkpoint.", "evaluation.", "data.cache", "hardware.devices_per_node", "bench.")
# Without these nothing can be computed about a network.
SHAPE = ("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.seq_length")

LARGEST = 10**9  # of any whole number in a configuration; what is beyond it is no size

# Kinds of memory, the one that limits a run first. They never mix.
MEMORY_KINDS = (
    "device", "reserved_peak", "reserved", "allocated_peak", "allocated", "active_peak", "tensors_peak", "rss_peak",
    "rss", "predicted",
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A value and where it comes from. `given`: written by someone; otherwise implied by a framework or inferred."""

    value: Any
    source: str
    given: bool = True


@dataclass(frozen=True)
class Side:
    """One run under canonical keys. `name`: A, B, ...; `framework`: a folder of frameworks/, or the record's word."""

    name: str
    record: Record
    framework: str
    known: Mapping[str, Known] = field(default_factory=dict)

    def value(self, key: str) -> Any:
        found = self.known.get(key)
        return None if found is None else found.value

    def size(self, key: str) -> int | None:
        """A value that is a positive whole number; None for any other."""
        value = self.value(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def source(self, key: str) -> str:
        found = self.known.get(key)
        return "unknown" if found is None else found.source

    def with_known(self, key: str, value: Any, source: str) -> "Side":
        return replace(self, known={**self.known, key: Known(value, source, given=False)})


def side(name: str, record: Record) -> Side:
    """A record under canonical keys: given values, the framework's implied ones, and what follows from both."""
    framework = framework_of(record)
    known = {key: Known(value, record.sources.get(key, record.source)) for key, value in flat(record.config)}
    known = {k: v if v.source.startswith(record.source) else replace(v, given=False) for k, v in known.items()}
    for key, value in DEFAULTS.get(framework, {}).items():
        known.setdefault(key, Known(value, f"default of {record.framework}", given=False))
    if framework in ("megatron", "libai") and known.get("precision.compute", Known("", "")).value == "fp16":
        known.setdefault("precision.gradients", Known("fp16", f"default of {record.framework}", given=False))
    known.update(_following(known))
    return Side(name, record, framework, known)


def framework_of(record: Record) -> str:
    word = "".join(c for c in record.framework.lower() if c.isalnum())
    return FRAMEWORKS.get(word, record.framework)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what matters; nested tables inside a section stay whole."""
    for key, value in config.items():
        dotted = f"{prefix}{key}"
        if dotted.startswith(SILENT) and (dotted == "name" or not isinstance(value, Mapping)):
            continue
        if isinstance(value, Mapping) and not prefix:
            yield from flat(value, f"{key}.")
        elif value is not None and not _absurd(value):
            yield dotted, list(value) if isinstance(value, tuple) else value


def _absurd(value: Any) -> bool:
    """Whether a number is beyond any setting, as a torn log has them: not known then, and nothing computes with it."""
    if isinstance(value, list | tuple):
        return any(map(_absurd, value))
    return isinstance(value, int) and abs(value) >= 2**63


def _following(known: Mapping[str, Known]) -> dict[str, Known]:
    """Values that others decide: 4 x hidden, heads for query groups, accumulation, an even split into stages."""
    found: dict[str, Known] = {}

    def number(key: str) -> int | None:
        entry = known.get(key)
        ok = (
            entry is not None and isinstance(entry.value, int) and not isinstance(entry.value, bool) and entry.value > 0
        )
        return entry.value if ok and entry is not None else None

    def follow(key: str, value: Any, why: str) -> None:
        if key not in known:
            found[key] = Known(value, why, given=False)

    hidden, heads, sequence = (
        number("model.hidden_size"),
        number("model.num_attention_heads"),
        number("model.seq_length"),
    )
    if hidden and heads and not hidden % heads:
        follow("model.head_dim", hidden // heads, "hidden_size / heads")
    if hidden and known.get("model.activation", Known("gelu", "")).value not in ("swiglu", "geglu"):
        follow("model.ffn_hidden_size", 4 * hidden, "4 x hidden_size")
    if heads:
        follow("model.num_query_groups", heads, "one for each head")
    if sequence:
        follow("model.max_position_embeddings", sequence, "the sequence length")
    micro, whole, data = number("batch.micro_batch_size"), number("batch.global_batch_size"), number("parallel.data")
    if micro and whole and data and not whole % (micro * data):
        follow("batch.accumulation", whole // (micro * data), "global / (micro x data)")
    layers, pipeline = number("model.num_layers"), number("parallel.pipeline")
    stages = known.get("parallel.stages")
    if layers and pipeline and (stages is None or stages.value == "balanced") and not layers % pipeline:
        found["parallel.stages"] = Known([layers // pipeline] * pipeline, "equal stages", given=False)
    if known.get("recompute.mode", Known("", "")).value == "none":
        for key in ("every", "layers", "modules", "shard"):
            found[f"recompute.{key}"] = Known("none", "nothing is recomputed", given=False)
    return found


def run_of(one: Side, changes: Mapping[str, Any] | None = None) -> Run | None:
    """The side as a legal run, with some keys changed; None where its shape or batch is not known, or it is not legal.
    A vocabulary that nothing says is GPT-2's, and where nothing says that the optimizer is sharded it is whole."""
    values = {key: known.value for key, known in one.known.items()} | dict(changes or {})
    if not all(isinstance(values.get(key), int) for key in SHAPE):
        return None
    if any(isinstance(value, int) and abs(value) > LARGEST for value in values.values()):
        return None
    if values.get("recompute.mode") == "none":
        values = {
            key: value for key, value in values.items() if not key.startswith("recompute.") or key.endswith("mode")
        }
    values.pop("batch.accumulation", None)
    values.setdefault("parallel.zero", 0)
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if value is None or (value == "none" and key.startswith("recompute.") and not key.endswith("mode")):
            continue
        section, dot, name = key.partition(".")
        if dot and section in ("model", "parallel", "batch", "precision", "recompute", "hardware", "engine"):
            tree.setdefault(section, {})[name] = value
    tree.setdefault("engine", {}).setdefault("framework", one.framework)
    loaded = _resolved(tree)
    return loaded.run if loaded else None


def _resolved(tree: dict[str, Any]) -> Loaded | None:
    """The run, leaving out keys that another framework's log has and a run file refuses."""
    for _ in range(4):
        try:
            return resolve(tree)
        except UserError as failure:
            keys = [p.key for p in failure.problems if p.code in ("S003", "S004", "S005", "H001") and "." in p.key]
            if not keys or len(keys) < len(failure.problems):
                return None
            for key in keys:
                section, _, name = key.partition(".")
                tree.get(section, {}).pop(name.split(".")[0], None)
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError):
            return None
    return None


def memory_kind(a: Record, b: Record) -> str | None:
    """The kind of memory that both know; None where they know different kinds or one knows none."""
    return next((kind for kind in MEMORY_KINDS if kind in a.memory and kind in b.memory), None)


def world(one: Side) -> int | None:
    """Devices of a run, where its data-parallel size is known."""
    data = one.size("parallel.data")
    if data is None:
        size = one.record.environment.get("world_size", one.record.environment.get("devices"))
        return int(size) if isinstance(size, int | str) and str(size).isdigit() and int(size) > 0 else None
    axes = [one.size(f"parallel.{axis}") or 1 for axis in ("tensor", "context", "pipeline")]
    return data * axes[0] * axes[1] * axes[2]


@dataclass(frozen=True)
class Speed:
    """Whole-run rates of one side, None where they do not follow from what is known."""

    samples_per_second: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    devices: int | None

    @property
    def tokens_per_second_per_device(self) -> float | None:
        return self.tokens_per_second / self.devices if self.tokens_per_second and self.devices else None


def speed(one: Side) -> Speed:
    """Rates from seconds per step where there are any, else as stated."""
    rates, sequence = one.record.speed, one.size("model.seq_length")
    seconds, batch = rates.get("seconds_per_step"), one.size("batch.global_batch_size")
    samples, tokens = rates.get("samples_per_second"), rates.get("tokens_per_second")
    if samples is None and seconds and batch and "batch.ramp" not in one.known:
        samples = batch / seconds
    if samples is None and tokens and sequence:
        samples = tokens / sequence
    if samples is None:
        stated = one.record.printed.get("samples_per_second")
        samples = float(stated) if isinstance(stated, int | float) and stated > 0 else None
    if tokens is None and samples and sequence:
        tokens = samples * sequence
    return Speed(samples, tokens, seconds, world(one))


@dataclass(frozen=True)
class Point:
    """Losses of both at the same amount of data."""

    at: int
    step_a: int
    step_b: int
    a: float
    b: float

    @property
    def relative(self) -> float:
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b), 1e-12)


def losses(a: Side, b: Side) -> tuple[str, list[Point]]:
    """(axis, points where both have a loss): aligned on consumed tokens or samples where both know them, on steps only
    where the global batches are known to be equal."""
    for axis in ("tokens", "samples"):
        left, right = _by(a, axis), _by(b, axis)
        if left and right:
            return axis, _paired(left, right)
    if a.value("batch.global_batch_size") == b.value("batch.global_batch_size") is not None:
        return "steps", _paired(_by(a, "step"), _by(b, "step"))
    return "", []


def _by(one: Side, axis: str) -> dict[int, tuple[int, float]]:
    printed = _second_lines(one.record)
    return {
        amount: (s.step, printed.get(s.step, s.loss))
        for s in one.record.steps
        if s.loss is not None and (amount := getattr(s, axis)) is not None
    }


def _second_lines(record: Record) -> dict[int, float]:
    """Step -> loss without the first line's share, where a version of Megatron-LM (from 2026-01) takes it along.

    The second line of a start prints the mean over all n steps since the start's first line, that one included:
    (n x printed - first) / (n - 1) is the mean of its own steps. Source: Megatron-LM `training.py`, c40b6ea070.
    """
    if record.conventions.get("first_window") != "kept":
        return {}
    found: dict[int, float] = {}
    starts = [0, *(e.detail["line"] for e in record.events if e.what == "attempt")]
    rows = list(zip(record.lines, record.steps, strict=False))
    for start in starts:
        after = [step for line, step in rows if line > start][:2]
        if len(after) == 2 and after[0].loss is not None and after[1].loss is not None:
            count = after[1].step - after[0].step + 1
            found[after[1].step] = (count * after[1].loss - after[0].loss) / (count - 1)
    return found


def _paired(left: dict[int, tuple[int, float]], right: dict[int, tuple[int, float]]) -> list[Point]:
    return [
        Point(at, left[at][0], right[at][0], left[at][1], right[at][1]) for at in sorted(left.keys() & right.keys())
    ]
