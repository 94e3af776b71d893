"""Arguments of Megatron-DeepSpeed and DeepSpeed's JSON -> the values of a run file.

The program's flags and the JSON both say batch sizes, clipping, precision and the ZeRO stage. Which of the two wins
differs from value to value, so a contradiction is an error; where one is silent the other holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from steelyard.frameworks.deepspeed import config as deepspeed
from steelyard.frameworks.deepspeed.config import Config
from steelyard.frameworks.megatron import script as megatron
from steelyard.frameworks.megatron.script import Arguments
from steelyard.frameworks.megatron_deepspeed import flags
from steelyard.spec.errors import Problem, UserError, error, problem

NAME = "Megatron-DeepSpeed"
GATES = {"swiglu": "swiglu", "geglu": "geglu"}
KNOWN_SIZES = {"gpt2": 50257, "t5-small": 32100, "bigscience/tokenizer": 250680, "bigscience/bloom": 250680}


def values(given: Arguments, config: Config | None = None) -> dict[str, Any]:
    """Run-file values. Raises UserError F005 to F007 as for Megatron-LM, F017 for contradictions."""
    own = {name: value for name, value in given.given.items() if flags.added(name)}
    plain = {name: value for name, value in given.given.items() if name not in own}
    plain = {**plain, **_as_megatron(own, plain)}
    found = megatron.values(replace(given, given=plain))
    found["engine"] = {**found["engine"], "framework": "megatron_deepspeed"}
    for key, value in _added(given, own, found):
        section, _, name = key.partition(".")
        found[section] = {k: v for k, v in {**found[section], name: value}.items() if v is not None}
    if own.get("train-tokens"):
        found["length"] = {k: v for k, v in found["length"].items() if k == "tokens" or len(found["length"]) == 1}
    if config is None and given.has("deepspeed") and found["precision"]["compute"] == "fp16":
        silent = Config({}, str)
        found["precision"] = {**found["precision"], "loss_scale": deepspeed.loss_scale(silent)}
    if config is not None:
        problems = list(contradictions(given, config))
        if problems:
            raise UserError(problems)
        _merge(found, given, config)
    return found


def _as_megatron(own: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Flags that are Megatron-LM's under another name or say the same."""
    found: dict[str, Any] = {}
    if "pad-vocab-size-to" in own:
        found["padded-vocab-size"] = own["pad-vocab-size-to"]
    elif "vocab-size" not in plain and own.get("tokenizer-name-or-path") in KNOWN_SIZES:
        found["vocab-size"] = KNOWN_SIZES[own["tokenizer-name-or-path"]]
    if "num-key-value-heads" in own:
        found |= {"group-query-attention": True, "num-query-groups": own["num-key-value-heads"]}
    style = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(str(plain.get("normalization")))
    return found | ({"normalization": style} if style else {})


def _added(given: Arguments, own: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the forks' own flags say."""
    if own.get("embed-layernorm"):
        yield "model.embedding_norm", True
    if gate := own.get("glu-activation"):
        if gate not in GATES:
            raise error("F005", "--glu-activation", given.place("glu-activation"), flag=f"--glu-activation {gate}",
                        advice=f"known here: {', '.join(GATES)}")  # fmt: skip
        yield "model.activation", GATES[gate]
    sequence = found["model"]["seq_length"]
    for flag, key in (("lr-decay-tokens", "decay_samples"), ("lr-warmup-tokens", "warmup_samples")):
        if own.get(flag):
            yield f"learning_rate.{key}", -(-own[flag] // sequence)
            yield f"learning_rate.{key.replace('samples', 'steps')}", None
    if own.get("train-tokens") and not (found["length"].get("steps") or found["length"].get("samples")):
        yield "length.tokens", own["train-tokens"]
    if own.get("kill-switch-path"):
        yield "stop.file", own["kill-switch-path"]
    if (method := own.get("pp-partition-method")) and found["parallel"]["pipeline"] > 1:
        yield "parallel.stages", _partition(given, str(method).strip("'\""), found)
    if own.get("ds-sequence-parallel-size", 1) > 1:
        yield "parallel.context", own["ds-sequence-parallel-size"]
    for name, key in (("train", "train"), ("valid", "validation"), ("test", "test")):
        flag = f"{name}-weighted-split-paths"
        if own.get(flag):
            yield f"data.{key}", _weighted(given, flag, " ".join(own[flag]))


def _partition(given: Arguments, method: str, found: Mapping[str, Any]) -> list[int] | None:
    """Layers of each stage where the embedding and the head count as a layer each. None: equal stages."""
    layers, pipeline = found["model"]["num_layers"], found["parallel"]["pipeline"]
    words = set(method.removeprefix("type:").split("|"))
    if not method.startswith("type:") or not words <= {"transformer", "embedding"} or "transformer" not in words:
        advice = "known here: type:transformer, type:transformer|embedding"
        raise error("F005", "--pp-partition-method", given.place("pp-partition-method"),
                    flag=f"--pp-partition-method {method}", advice=advice)  # fmt: skip
    counted = 2 if "embedding" in words else 0
    share, over = divmod(layers + counted, pipeline)
    if over or (counted and pipeline < 2):
        return None
    ends = counted // 2
    return [share - ends, *[share] * (pipeline - 2), share - ends]


def _weighted(given: Arguments, flag: str, text: str) -> Any:
    """`NAME: weight start:end prefix, ...` of one or more named sets. A part of a file cannot be said."""
    sets: dict[str, list[list[Any]]] = {}
    for group in text.replace('"', " ").replace("'", " ").split(", ") if ":" in text else []:
        words = group.split()
        if words and words[0].endswith(":"):
            sets[words.pop(0).rstrip(":")] = []
        if not sets or len(words) != 3 or not _is_number(words[0]) or words[1] not in ("0:1", "0.0:1.0", "0:1.0"):
            advice = "only whole files (0:1) can be said: write data.train as [weight, prefix] pairs"
            raise error("F005", f"--{flag}", given.place(flag), flag=f"--{flag}", advice=advice)
        sets[list(sets)[-1]].append([float(words[0]), words[2]])
    if flag.startswith("valid") and len(sets) > 1:
        return sets
    return [pair for pairs in sets.values() for pair in pairs]


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()


def contradictions(given: Arguments, config: Config) -> Iterator[Problem]:
    """Values that flags and JSON both say, and differently."""
    pairs = [
        ("micro-batch-size", "train_micro_batch_size_per_gpu", given.given.get("micro-batch-size")),
        ("global-batch-size", "train_batch_size", given.given.get("global-batch-size")),
        ("clip-grad", "gradient_clipping", given.given.get("clip-grad")),
        ("zero-stage", "zero_optimization.stage", given.given.get("zero-stage")),
    ]  # fmt: skip
    for flag, key, said in pairs:
        told = config.get(key)
        if said is not None and told is not None and _differs(said, told):
            yield _against(given, config, flag, key, said, told)
    for name, key in (("fp16", "fp16.enabled"), ("bf16", "bf16.enabled")):
        told = config.get(key, config.get("bfloat16.enabled") if name == "bf16" else None)
        said = bool(given.given.get(name))
        if told is not None and bool(told) != said:
            yield _against(given, config, name, key, said, told)
        elif told is None and said and config.get(name) is None and name == "fp16":
            yield problem("F017", f"--{name}", given.place(name), first=f"--{name} ({given.place(name)})",
                          second=f"DeepSpeed's JSON ({config.where('fp16')})", detail="the JSON does not enable fp16",
                          advice='add "fp16": {"enabled": true}')  # fmt: skip
    accumulation, micro, total = (
        config.get(k) for k in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    )
    if all(isinstance(n, int) and n > 0 for n in (accumulation, micro, total)) and total % (accumulation * micro):
        place = config.where("gradient_accumulation_steps")
        detail = f"{total} is no multiple of {micro} x {accumulation}"
        key = "gradient_accumulation_steps"
        yield problem("F017", key, place, first="train_batch_size", second=key, detail=detail,
                      advice="leave one of the three out")  # fmt: skip


def _differs(said: Any, told: Any) -> bool:
    try:
        return float(said) != float(told)
    except (TypeError, ValueError):
        return True


def _against(given: Arguments, config: Config, flag: str, key: str, said: Any, told: Any) -> Problem:
    here, there = given.place(flag), config.where(key)
    return problem("F017", f"--{flag}", f"{here} and {there}", first=f"--{flag} ({here})", second=f"{key} ({there})",
                   detail=f"{said} and {told}", advice="in DeepSpeed's engine the JSON counts")  # fmt: skip


def _merge(found: dict[str, Any], given: Arguments, config: Config) -> None:
    """The JSON's values, which the engine works with."""
    found["parallel"] = {**found["parallel"], "zero": deepspeed.stage(config)}
    batch = dict(found["batch"])
    for key, name in (
        ("train_micro_batch_size_per_gpu", "micro_batch_size"),
        ("train_batch_size", "global_batch_size"),
    ):
        if config.get(key) is not None:
            batch[name] = config.get(key)
            batch.pop("accumulation", None) if name == "global_batch_size" else None
    accumulation = config.get("gradient_accumulation_steps")
    if accumulation is not None and config.get("train_batch_size") is None and not given.has("global-batch-size"):
        batch["accumulation"] = accumulation
    found["batch"] = batch
    clip = config.get("gradient_clipping")
    found["optimizer"] = {**found["optimizer"], "clip_grad": float(clip or 0.0)}
    precision = dict(found["precision"])
    if precision["compute"] == "fp16":
        precision["loss_scale"] = deepspeed.loss_scale(config)
    dtype = deepspeed.DTYPES.get(str(config.get("data_types.grad_accum_dtype")))
    found["precision"] = precision | ({"gradients": dtype} if dtype else {})
    said = {key: value for key, value in deepspeed.engine(config).items() if value is not None}
    found["engine"] = {**found["engine"], **said}


def notes(given: Arguments, config: Config | None) -> Iterator[str]:
    """Traps of having two sources of truth."""
    if config is None:
        yield "DeepSpeed's JSON is not at hand: the flags stand for it, and DeepSpeed's own defaults for the rest"
        return
    if config.get("gradient_clipping") is None and given["clip-grad"]:
        yield f"DeepSpeed clips by the JSON's gradient_clipping, which is missing: nothing is clipped, whatever " \
              f"--clip-grad says ({given['clip-grad']:g})"  # fmt: skip
    for flag in ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"):
        if given.has(flag):
            yield f"{given.place(flag)}: --{flag} has no effect: DeepSpeed's scale is the one of its JSON"
    if given.has("zero-stage") and config.get("zero_optimization.stage") is None:
        yield "the JSON names no ZeRO stage, so it is 0, whatever --zero-stage says"
