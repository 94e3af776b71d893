"""Arguments of Megatron-LM -> the values of a run file.

`read` takes a file that holds an argument list as a shell would pass it, a JSON list of strings, or a JSON object of
flags (a switch that is on is true); `values` maps such arguments to run-file values, with an `[engine]` section for
what only Megatron knows.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from steelyard.frameworks.megatron import flags
from steelyard.spec.errors import UserError, error, problem

FILES = {"GPT2BPETokenizer": 50257}  # the tokenizers whose size does not depend on a file of the user
POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rotary", "rotary": "rotary",
             "alibi": "alibi", "none": "none"}  # fmt: skip
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
DECAYS = {
    "constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_sqrt", "WSD": "wsd",
}  # fmt: skip
TAILS = ("exponential", "linear", "cosine", "minus_sqrt")
MODULES = {"core_attn": "attention", "mlp": "mlp", "layernorm": "norm"}
SPLIT = "969,30,1"  # of Megatron-LM where --split is not given
DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


@dataclass(frozen=True)
class Arguments:
    """Flags as given: today's name -> value (True for a switch). `unknown` are those that no table lists."""

    given: Mapping[str, Any]
    unknown: tuple[str, ...] = ()
    source: str = ""
    dated: bool = field(default=False)
    places: Mapping[str, str] = field(default_factory=dict)  # where each flag is written, if that is known

    def __getitem__(self, name: str) -> Any:
        """The value of a flag, or its default."""
        found = flags.find(name)
        assert found is not None and found.name == name, name
        return self.given.get(name, found.default)

    def place(self, name: str) -> str:
        return self.places.get(name, self.source)

    def has(self, name: str) -> bool:
        return name in self.given

    @cached_property
    def old(self) -> bool:
        """Whether only versions up to 2022 know these flags: before Megatron core and Transformer Engine layers."""
        return self.dated


def is_list(text: str) -> bool:
    """Whether a text looks like an argument list or a JSON form of one."""
    start = text.lstrip()[:64]
    return start.startswith("--") or (start[:1] in "[{" and start[1:].lstrip().startswith(('"--', "'--")))


def read(path: Path) -> Arguments:
    """The arguments in a file. Raises UserError F003 where there are none, F004 for a value of the wrong kind."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        detail = getattr(failure, "strerror", None) or "it is not UTF-8 text"
        raise error("F003", place=str(path), detail=detail) from None
    return parse(text, str(path))


def parse(text: str, source: str = "") -> Arguments:
    """Raises UserError F003, F004."""
    try:
        given = json.loads(text) if text.lstrip()[:1] in "[{" else shlex.split(text, comments=True)
    except (ValueError, RecursionError) as failure:
        raise error("F003", place=source, detail=f"it is neither JSON nor an argument list: {failure}") from None
    return arguments(given, source)


def arguments(given: Sequence[str] | Mapping[str, Any], source: str = "") -> Arguments:
    """From a list of strings (what stands before the first flag, a program or a launcher, is passed over) or from flags
    with their values. Raises UserError F004."""
    pairs = given.items() if isinstance(given, Mapping) else _pairs([str(word) for word in given])
    found: dict[str, Any] = {}
    unknown, dated = [], False
    for name, value in pairs:
        flag = flags.find(name)
        if value is False or value is None:
            continue
        if flag is None:
            unknown.append(str(name))
            continue
        dated = dated or "" < flag.until <= "2022"
        found[flag.name] = typed(flag, value, source)
    return Arguments(found, tuple(unknown), source, dated)


def _pairs(words: Sequence[str]) -> list[tuple[str, Any]]:
    """`--name value`, `--name=value`, `--name a b c`, `--name`."""
    found: list[tuple[str, Any]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found.append((name, value if equals else True))
        elif found:
            flag, before = found[-1]
            found[-1] = (flag, word if before is True else [*(before if isinstance(before, list) else [before]), word])
    return found


def typed(flag: flags.Flag, value: Any, source: str) -> Any:
    """A flag's value in its kind. Raises UserError F004."""
    if flag.meaning != "translated":
        return value
    try:
        if flag.kind == "switch":
            return str(value).lower() in ("true", "1")
        if flag.kind == "list":
            return [str(v) for v in value] if isinstance(value, list) else str(value).split()
        if value is True or isinstance(value, list):
            raise ValueError
        found = {"int": int, "float": float, "text": str}[flag.kind](value)
        if flag.kind == "float" and not isfinite(found):
            raise ValueError
        return found
    except (ValueError, TypeError):
        raise error("F004", f"--{flag.name}", source, flag=f"--{flag.name}", kind=flag.kind, value=value) from None


def values(given: Arguments) -> dict[str, Any]:
    """Run-file values: nested, without what was not said and has no default in Megatron.

    Raises UserError F005 for flags that a run file cannot say and F006 for a vocabulary that only a file knows.
    """
    refused = [flag for name in given.given if (flag := flags.find(name)) and flag.meaning == "refused"]
    refused = [f for f in refused if not f.plannable and str(given.given[f.name]) not in f.harmless]
    if refused:
        raise UserError(
            [problem("F005", f"--{f.name}", given.place(f.name), flag=f"--{f.name}", advice=f.why) for f in refused]
        )
    sections = {
        "model": _model(given), "parallel": _parallel(given), "batch": _batch(given), "precision": _precision(given),
        "recompute": _recompute(given), "optimizer": _optimizer(given), "learning_rate": _learning_rate(given),
        "length": _length(given), "engine": _engine(given), "data": _data(given),
        "evaluation": {"every_steps": given["eval-interval"], "steps": given["eval-iters"]},
        "checkpoint": {"every_steps": given["save-interval"] or 0},
        "stop": {"step_multiple": given["exit-interval"], "minutes": given["exit-duration-in-mins"]},
    }  # fmt: skip
    return {"seed": given["seed"], **{name: _said(section) for name, section in sections.items()}}


def _said(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _known(given: Arguments, flag: str, words: Mapping[str, Any]) -> Any:
    value = given[flag]
    if value not in words:
        advice = f"known here: {', '.join(words)}"
        raise error("F005", f"--{flag}", given.place(flag), flag=f"--{flag} {value}", advice=advice)
    return words[value]


def _needed(given: Arguments, flag: str) -> Any:
    if not given.has(flag):
        raise error("F007", f"--{flag}", given.source, flag=f"--{flag}")
    return given[flag]


def _model(given: Arguments) -> dict[str, Any]:
    hidden, bias = _needed(given, "hidden-size"), not given["disable-bias-linear"]
    gated = given["swiglu"]
    names = {"swiglu": "swiglu", "squared-relu": "relu2", "openai-gelu": "gelu_tanh", "quick-geglu": "geglu"}
    # Megatron's own default width: 4 h, or with SwiGLU the multiple of 64 below 8/3 h (arguments.py)
    ffn = given["ffn-hidden-size"] or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    activation = next((ours for flag, ours in names.items() if given[flag]), "gelu")
    return {
        "kind": "gpt2",
        "num_layers": _needed(given, "num-layers"),
        "hidden_size": hidden,
        "num_attention_heads": _needed(given, "num-attention-heads"),
        "head_dim": given["kv-channels"],
        "num_query_groups": given["num-query-groups"] if given["group-query-attention"] else None,
        "ffn_hidden_size": ffn,
        "seq_length": _needed(given, "seq-length"),
        "max_position_embeddings": given["max-position-embeddings"],
        "position": _position(given),
        "rotary_base": float(given["rotary-base"]),
        "rotary_fraction": given["rotary-percent"],
        "norm": _known(given, "normalization", NORMS),
        "norm_eps": given["norm-epsilon"],
        "activation": activation,
        "bias": bias,
        "qkv_bias": bias or given["add-qkv-bias"],
        "qk_norm": given["qk-layernorm"],
        "tied_embeddings": not given["untie-embeddings-and-output-weights"],
        "attention_dropout": given["attention-dropout"],
        "hidden_dropout": given["hidden-dropout"],
        "init_std": given["init-method-std"],
        "padding_in_softmax": True,
        **_vocabulary(given),
    }


def trained(found: dict[str, Any], given: Arguments) -> dict[str, Any]:
    """The values with what only a training needs to know: Megatron's fused bias and GELU is the tanh form. What a log
    shows and what a plan costs is the same for both forms, so elsewhere it is GELU."""
    model = found["model"]
    if model["activation"] != "gelu" or not model["bias"] or given["no-bias-gelu-fusion"]:
        return found
    return {**found, "model": {**model, "activation": "gelu_tanh"}}


def _position(given: Arguments) -> str:
    if given["use-rotary-position-embeddings"]:
        return "rotary"
    if given["no-position-embedding"] and not given.has("position-embedding-type"):
        return "none"
    return str(_known(given, "position-embedding-type", POSITIONS))


def _vocabulary(given: Arguments) -> dict[str, Any]:
    if given.has("padded-vocab-size"):
        return {"vocab_size": given["padded-vocab-size"], "vocab_multiple": 1}
    multiple = given["make-vocab-size-divisible-by"]
    padding = "megatron" if multiple == 128 else multiple * given["tensor-model-parallel-size"]
    size = given["vocab-size"] or FILES.get(given["tokenizer-type"])
    # without a size the run file has to say it: `vocab_size` is then missing, and the caller refuses (F006)
    return {"vocab_size": size, "vocab_multiple": padding}


def _parallel(given: Arguments) -> dict[str, Any]:
    pipeline, tensor = given["pipeline-model-parallel-size"], given["tensor-model-parallel-size"]
    virtual = _virtual(given)
    zero = int(given["use-distributed-optimizer"])
    if given["use-megatron-fsdp"]:
        zero = _known(given, "data-parallel-sharding-strategy", SHARDED)
    if given["deepspeed"]:
        zero = int(given["zero-stage"])  # its JSON file decides; the flag is what the script says of it
    return {
        "tensor": tensor,
        "sequence": given["sequence-parallel"] and tensor > 1,  # Megatron switches it off without tensor ranks
        "context": given["context-parallel-size"],
        "pipeline": pipeline,
        "pipeline_schedule": "interleaved" if virtual > 1 else "1f1b",
        "virtual": virtual,
        "stages": _stages(given, pipeline, virtual) if pipeline > 1 else None,
        "zero": 3 if given["use-torch-fsdp2"] else zero,
    }


def _virtual(given: Arguments) -> int:
    """Model chunks per pipeline rank."""
    pipeline, layers = given["pipeline-model-parallel-size"], _needed(given, "num-layers")
    if pipeline == 1:
        return 1
    per_stage = given["num-layers-per-virtual-pipeline-stage"]
    if per_stage:
        return max(1, layers // pipeline // per_stage)
    return given["num-virtual-stages-per-pipeline-rank"] or 1


def _stages(given: Arguments, pipeline: int, virtual: int) -> list[int] | None:
    """Layers of each stage: equal, apart from a first and last rank of their own size, or with the embedding and the
    loss counted as a layer each. None (the run file's own split) where Megatron would refuse to divide."""
    layers = given["num-layers"]
    if pipeline > layers + 2:  # more stages than layers and ends: the run's own rules say so
        return None
    first, last = given["decoder-first-pipeline-num-layers"], given["decoder-last-pipeline-num-layers"]
    ranks = [0] * pipeline
    if first or last:
        fixed = {0: first, pipeline - 1: last}
        ends = {rank: size for rank, size in fixed.items() if size}
        rest = pipeline - len(ends)
        share, over = divmod(layers - sum(ends.values()), rest) if rest else (0, 0)
        ranks = [ends.get(rank, share) for rank in range(pipeline)]
    else:
        embedding = int(given["account-for-embedding-in-pipeline-split"])
        loss = int(given["account-for-loss-in-pipeline-split"])
        share, over = divmod(layers + embedding + loss, pipeline)
        ranks = [share] * pipeline
        ranks[0] -= embedding
        ranks[-1] -= loss
    if over or any(size % virtual for size in ranks):
        return None
    # chunk c of rank r is stage c x pipeline + r
    return [ranks[rank] // virtual for _ in range(virtual) for rank in range(pipeline)]


def _ramp(given: Arguments) -> list[int] | None:
    ramp = given["rampup-batch-size"]
    try:
        return [int(n) for n in ramp] if ramp else None
    except ValueError:
        raise error("F004", "--rampup-batch-size", given.place("rampup-batch-size"), flag="--rampup-batch-size",
                    kind="three whole numbers", value=" ".join(ramp)) from None  # fmt: skip


def _batch(given: Arguments) -> dict[str, Any]:
    return {
        "micro_batch_size": given["micro-batch-size"],
        "global_batch_size": given["global-batch-size"],
        # without a global batch Megatron takes one micro-batch for each data rank
        "accumulation": None if given["global-batch-size"] else 1,
        "ramp": _ramp(given),
        "loss_mean": "tokens" if given["calculate-per-token-loss"] else "micro_batches",
    }


def _precision(given: Arguments) -> dict[str, Any]:
    compute = "bf16" if given["bf16"] else "fp16" if given["fp16"] else "fp32"
    # bf16 accumulates in fp32 unless told otherwise; fp16 in fp16 unless told otherwise
    wide = compute == "fp32" or given["accumulate-allreduce-grads-in-fp32"]
    wide = wide or (compute == "bf16" and not given["grad-reduce-in-bf16"])
    found: dict[str, Any] = {"compute": compute, "gradients": "fp32" if wide else compute}
    if given["main-grads-dtype"] != "fp32":
        found["gradients"] = DTYPES[given["main-grads-dtype"]]
    if compute == "fp16":
        initial = int(given["initial-loss-scale"])
        found["loss_scale"] = {"rule": "megatron", "window": int(given["loss-scale-window"]),
                               "hysteresis": given["hysteresis"], "minimum": given["min-loss-scale"],
                               "initial_power": max(0, initial.bit_length() - 1)}  # fmt: skip
        if given["loss-scale"]:
            found["loss_scale"] = {"static": given["loss-scale"]}
    return found


def _recompute(given: Arguments) -> dict[str, Any]:
    mode = "selective" if given["recompute-activations"] else given["recompute-granularity"]
    method, number = given["recompute-method"], given["recompute-num-layers"]
    if given["checkpoint-activations"]:
        mode, method, number = "full", "uniform", given["checkpoint-num-layers"]
    elif given["activations-checkpoint-method"]:
        mode, method = "full", given["activations-checkpoint-method"]
        number = given["activations-checkpoint-num-layers"]
    if mode not in (None, "full", "selective"):
        place = given.place("recompute-granularity")
        raise error("F005", "--recompute-granularity", place, flag=f"--recompute-granularity {mode}",
                    advice="known here: full, selective")  # fmt: skip
    found: dict[str, Any] = {"mode": mode or "none"}
    if mode == "full":
        found |= {"layers": number} if method == "block" else {"every": number}
        found["shard"] = given["distribute-saved-activations"] or given["partition-activations"]
    if mode == "selective":
        asked = given["recompute-modules"] or ["core_attn"]
        if strange := [name for name in asked if name not in MODULES]:
            advice = f"known here: {', '.join(MODULES)}"
            raise error("F005", "--recompute-modules", given.place("recompute-modules"),
                        flag=f"--recompute-modules {strange[0]}", advice=advice)  # fmt: skip
        found["modules"] = [MODULES[name] for name in asked]
    return found


def _optimizer(given: Arguments) -> dict[str, Any]:
    if given["optimizer"] != "adam":
        advice = "only Adam's states can be planned"
        raise error(
            "F005", "--optimizer", given.place("optimizer"), flag=f"--optimizer {given['optimizer']}", advice=advice
        )
    return {
        "betas": [given["adam-beta1"], given["adam-beta2"]],
        "eps": given["adam-eps"],
        "weight_decay": given["weight-decay"],
        "clip_grad": given["clip-grad"],
    }


def _learning_rate(given: Arguments) -> dict[str, Any]:
    fraction = given["lr-warmup-fraction"]
    return {
        "peak": given["lr"],
        "minimum": given["min-lr"],
        "decay": _known(given, "lr-decay-style", DECAYS),
        "decay_steps": given["lr-decay-iters"],
        "decay_samples": given["lr-decay-samples"],
        "warmup_fraction": fraction,
        "warmup_steps": given["lr-warmup-iters"] or None if fraction is None else None,
        "warmup_samples": given["lr-warmup-samples"] or None if fraction is None else None,
        **_wsd(given),
        "first_update": "zero",
    }


def _wsd(given: Arguments) -> dict[str, Any]:
    """The tail of a warm-up, stable, decay schedule: its form, and its share of the decay's length."""
    if given["lr-decay-style"] != "WSD":
        return {}
    in_steps, in_samples = given["lr-wsd-decay-iters"], given["lr-wsd-decay-samples"]
    whole = (
        given["lr-decay-samples"] or given["train-samples"]
        if in_samples
        else given["lr-decay-iters"] or given["train-iters"]
    )
    tail = in_samples or in_steps
    style = given["lr-wsd-decay-style"]
    if style not in TAILS:
        raise error("F005", "--lr-wsd-decay-style", given.place("lr-wsd-decay-style"),
                    flag=f"--lr-wsd-decay-style {style}", advice=f"known here: {', '.join(TAILS)}")  # fmt: skip
    return {"wsd_decay": style, "wsd_decay_fraction": tail / whole if tail and whole and tail <= whole else None}


def _length(given: Arguments) -> dict[str, Any]:
    return {"steps": given["train-iters"], "samples": given["train-samples"]}


def _data(given: Arguments) -> dict[str, Any]:
    return {
        "train": sources(given["data-path"] or given["train-data-path"]) or None,
        "validation": sources(given["valid-data-path"]) or None,
        "test": sources(given["test-data-path"]) or None,
        "split": given["split"] or SPLIT,
        "tokenizer": _tokenizer(given),
        "mask_loss_at_eod": given["eod-mask-loss"],
        "reset_positions": given["reset-position-ids"],
        "reset_attention": given["reset-attention-mask"],
    }


def sources(words: list[str] | None) -> list[Any]:
    """Prefixes, or weights and prefixes in turn."""
    words = words or []
    weights = [_weight(word) for word in words[::2]]
    if len(words) > 1 and len(words) % 2 == 0 and None not in weights:
        return [[weight, prefix] for weight, prefix in zip(weights, words[1::2], strict=True)]
    return list(words)


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _tokenizer(given: Arguments) -> str | None:
    """Its folder or file; of one with other names the id that ends a document, all that training needs."""
    vocabulary, merges, model = given["vocab-file"], given["merge-file"], given["tokenizer-model"]
    if vocabulary and merges:
        folder = Path(vocabulary).parent
        if (vocabulary, merges) == (str(folder / "vocab.json"), str(folder / "merges.txt")):
            return str(folder)
    if model and str(model).endswith("tokenizer.json"):
        return str(model)
    return "ids:50256" if given["tokenizer-type"] == "GPT2BPETokenizer" else None


def _engine(given: Arguments) -> dict[str, Any]:
    old = given.old
    implementation = "local" if old else given["transformer-impl"]
    return {
        "framework": "megatron_deepspeed" if given["deepspeed"] else "megatron",
        "version": "2021" if old else "",
        "implementation": implementation if implementation in ("local", "transformer_engine") else None,
        "attention": _attention(given),
        "optimizer_instances": given["num-distributed-optimizer-instances"],
        "microbatch_group": given["microbatch-group-size-per-virtual-pipeline-stage"],
        "mask_in_loader": not given["no-create-attention-mask-in-dataloader"],
        "deterministic": given["deterministic-mode"],
        "fp32_residual": given["fp32-residual-connection"],
        "cross_entropy": _cross_entropy(given),
        "master_dtype": DTYPES[given["main-params-dtype"]] if given["use-precision-aware-optimizer"] else None,
        "moment_dtypes": [DTYPES[given["exp-avg-dtype"]], DTYPES[given["exp-avg-sq-dtype"]]]
        if given["use-precision-aware-optimizer"]
        else None,
        "fp8": _fp8(given),
        "fp8_parameters": given["fp8-param-gather"] or None,
        "overlap_buffers": given["tp-comm-overlap"] or None,
    }


def _fp8(given: Arguments) -> str | None:
    if given["fp8-hybrid"] or given["fp8-e4m3"]:
        return "hybrid" if given["fp8-hybrid"] else "e4m3"
    return given["fp8-format"] if given["fp8-format"] in ("e4m3", "hybrid") else None


def _attention(given: Arguments) -> str | None:
    """The kernel that was asked for; None where Transformer Engine chooses one itself."""
    backend = given["attention-backend"]
    if given.old or given["transformer-impl"] == "local":
        return "flash" if given["use-flash-attn"] else "unfused"
    if backend in ("flash", "fused", "unfused"):
        return str(backend)
    return "unfused" if backend == "local" else "flash" if given["use-flash-attn"] else None


def _cross_entropy(given: Arguments) -> str:
    if not given["cross-entropy-loss-fusion"]:
        return "unfused"
    return "transformer_engine" if given["cross-entropy-fusion-impl"] == "te" else "native"
