"""A LiBai configuration (Python, with overrides) -> the values of a run file.

The file is read with `ast` and never executed: assignments of literals, arithmetic and references to what is already
set. Everything else stays unknown, which is an error where the run depends on it.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.frameworks.fates import Fate, Row, Told
from steelyard.frameworks.libai import flags, memory
from steelyard.spec.errors import Problem, error, problem

NAME = "LiBai"
ROOTS = ("train", "model", "optim", "graph", "dataloader", "tokenization")
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
MOST = 10**15
DEEPEST = 8
Load = Callable[[str], tuple[str, str] | None]  # a relative module's path -> (text, place)


@dataclass(frozen=True)
class Set:
    """A value and where it is set; `unknown` says what it is where it cannot be read."""

    value: Any
    place: str
    unknown: str = ""


@dataclass
class Settings:
    """Dotted keys as the configuration sets them; `notes` what a reader should know."""

    keys: dict[str, Set] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, found: Set) -> None:
        """A table replaces what it holds key by key."""
        if isinstance(found.value, Mapping) and not found.unknown:
            for name, value in found.value.items():
                self.put(f"{key}.{name}", Set(value, found.place))
        else:
            self.keys[key] = found

    def get(self, key: str) -> Any:
        found = self.keys.get(key)
        if found is not None and found.unknown:
            raise _Unknown(found.unknown)
        return flags.DEFAULTS.get(key) if found is None else found.value


class _Unknown(Exception):
    """An expression that cannot be read without running it."""


def read(
    text: str, place: str, load: Load = lambda path: None, settings: Settings | None = None, depth: int = 0
) -> Settings:
    """Raises UserError F018."""
    found = settings or Settings()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
        for statement in tree.body:
            _statement(statement, place, load, found, depth)
    except (SyntaxError, ValueError) as failure:
        detail = f"it is no Python that can be read: {getattr(failure, 'msg', failure)}"
        line = getattr(failure, "lineno", None) or 1
        raise error(
            "F018", place=f"{place}:{line}", path=place, detail=detail, advice="give a LiBai configuration"
        ) from None
    except (RecursionError, MemoryError):
        raise error("F018", place=place, path=place, detail="it is nested too deeply", advice="flatten it") from None
    return found


def _statement(node: ast.stmt, place: str, load: Load, found: Settings, depth: int) -> None:
    where = f"{place}:{node.lineno}"
    if isinstance(node, ast.ImportFrom):
        _import(node, where, load, found, depth)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            _assign(target, node.value, where, found)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        _assign(node.target, node.value, where, found)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        _update(node.value, where, found)
    elif isinstance(node, ast.For | ast.If | ast.While | ast.With | ast.Try):
        inner = {
            ast.unparse(n)[:60] for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        for name in sorted(inner):
            if _key(name) is not None:
                found.put(
                    str(_key(name)), Set(None, where, f"{where} sets it in a {type(node).__name__.lower()} statement")
                )
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            found.keys.pop(ast.unparse(target), None)


def _import(node: ast.ImportFrom, where: str, load: Load, found: Settings, depth: int) -> None:
    """The common files are known; another configuration is read if it is at hand."""
    module = node.module or ""
    if not node.level or module.partition(".")[0] == "common" or ".common." in f".{module}.":
        kind = module.rpartition("models.")[2] if "models." in module else "gpt"
        if kind not in ("gpt", "graph"):
            found.put("model._target_", Set(kind, where))
        return
    if depth >= DEEPEST:
        raise error("F018", place=where, path=module, detail="configurations import each other", advice="flatten them")
    text = load("/".join([*[".."] * (node.level - 1), *module.split(".")]) + ".py")
    if text is None:
        found.notes.append(f"{where} begins from {module}, which is not at hand: LiBai's common files stand for it")
    else:
        read(text[0], text[1], load, found, depth + 1)


def _assign(target: ast.expr, value: ast.expr, where: str, found: Settings) -> None:
    name = ast.unparse(target)
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("get_config"):
        return
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Call):  # get_config("common/train.py").train
        return
    try:
        result = Set(_value(value, found), where)
    except _Unknown as unknown:
        result = Set(None, where, str(unknown) or f"`{ast.unparse(value)[:40]}` is not read without running it")
    key = _key(name)
    if key is not None:
        found.put(key, result)
    elif isinstance(target, ast.Name):
        found.local[name] = result.value if not result.unknown else _Unknown(result.unknown)
        if isinstance(result.value, Mapping) and name == "cfg":
            found.put("model.cfg", result)


def _key(name: str) -> str | None:
    """A dotted key of the configuration: `train["amp"]["enabled"]` is train.amp.enabled."""
    plain = name.replace('["', ".").replace("['", ".").replace('"]', "").replace("']", "")
    root = plain.partition(".")[0].partition("[")[0]
    return plain if root in ROOTS and plain != root else root if plain in ROOTS else None


def _update(call: ast.Call, where: str, found: Settings) -> None:
    """`train.update(dict(...))` and `train.update(a=1)`."""
    name = ast.unparse(call.func)
    if not name.endswith(".update"):
        return
    key = _key(name.removesuffix(".update"))
    if key is None:
        return
    for given in [*call.args, *[ast.Call(ast.Name("dict"), [], call.keywords)]]:
        try:
            found.put(key, Set(_value(given, found), where))
        except _Unknown as unknown:
            found.put(key, Set(None, where, str(unknown) or f"{where} is not read without running it"))


def _value(node: ast.expr, found: Settings) -> Any:
    """Raises _Unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, found) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(_value(k, found)): _value(v, found)
            for k, v in zip(node.keys, node.values, strict=True)
            if k is not None
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(_value(node.operand, found))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _number(_value(node.left, found)), _number(_value(node.right, found))
        try:
            return _number(OPERATORS[type(node.op)](left, right))
        except ArithmeticError:
            raise _Unknown from None
    if isinstance(node, ast.Call):
        return _called(node, found)
    name = ast.unparse(node)
    key = _key(name)
    if key is not None and (key in found.keys or key in flags.DEFAULTS):
        return found.get(key)
    if name in found.local:
        if isinstance(found.local[name], _Unknown):
            raise found.local[name]
        return found.local[name]
    raise _Unknown


def _called(node: ast.Call, found: Settings) -> Any:
    """dict(a=1), OmegaConf.create(dict(...)), LazyCall(f)(a=1): a table of the keywords."""
    name = ast.unparse(node.func)
    if name.endswith("create") and len(node.args) == 1:
        return _value(node.args[0], found)
    if name != "dict" and not name.startswith("LazyCall("):
        raise _Unknown
    values: dict[str, Any] = {}
    if name != "dict":
        values["_target_"] = name.removeprefix("LazyCall(").removesuffix(")").rsplit(".", 1)[-1]
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _Unknown
        try:
            values[keyword.arg] = _value(keyword.value, found)
        except _Unknown:
            if name == "dict":
                raise
    return values


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MOST:
        raise _Unknown
    return value


def override(found: Settings, words: Sequence[Told]) -> list[Row]:
    """Dotted overrides behind the configuration, and rows for the words that are none."""
    rows = []
    for word in words:
        name, equals, value = word.text.partition("=")
        key = _key(name)
        if not equals or key is None:
            alone = name.startswith("--") or not equals
            why = (
                "an option of the launcher's program"
                if name in ("--resume", "--eval-only")
                else "no key of a configuration"
            )
            fate: Fate = "irrelevant" if name == "--resume" else "refused"
            rows.append(Row(word.text if alone else name, "" if alone else value, fate, "", why, word.place))
            continue
        result = Set(None, word.place, word.unknown) if word.unknown else Set(_literal(value), word.place)
        found.put(key, result)
    return rows


def _literal(text: str) -> Any:
    """An override's value, in Hydra's grammar as far as it is Python's or YAML's."""
    plain = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def rows(found: Settings) -> list[Row]:
    """What becomes of every key that is set."""
    dropout = _get(found, "model.cfg.output_dropout_prob", 0.0)
    known = dropout if isinstance(dropout, int | float) else 0.0
    return [flags.row(key, "unknown" if s.unknown else s.value, s.place, known) for key, s in found.keys.items()]


def problems(found: Settings) -> list[Problem]:
    """Keys that the run depends on and that cannot be read."""
    return [
        problem(
            "F014",
            key,
            s.place,
            flag=key,
            value="unknown",
            why=s.unknown,
            advice=f"give it behind the script as {key}=...",
        )
        for key, s in found.keys.items()
        if s.unknown and key in flags.TRANSLATED and not key.startswith("dataloader.")
    ]


def other_model(found: Settings) -> Problem | None:
    """F005 where the configuration is of another model than GPT."""
    target = found.keys.get("model._target_")
    if target is None or "gpt" in str(target.value).lower():
        return None
    return problem(
        "F005", "model", target.place, flag=f"LiBai's {target.value}", advice="only GPT pretraining is known here"
    )


def _get(found: Settings, key: str, default: Any = None) -> Any:
    try:
        value = found.get(key)
    except _Unknown:
        return default
    return default if value is None else value


def world(found: Settings) -> int | None:
    """The ranks that a configuration is written for, where no launcher says it."""
    data = _get(found, "train.dist.data_parallel_size")
    axes = [_get(found, f"train.dist.{axis}_parallel_size", 1) for axis in ("tensor", "pipeline")]
    sizes = [n for n in (data, *axes) if isinstance(n, int) and n > 0]
    return sizes[0] * sizes[1] * sizes[2] if len(sizes) == 3 else None


def values(found: Settings, world: int | None) -> dict[str, Any]:
    """Run-file values. `world` sets the first loss scale and clamps the layout, as LiBai does."""

    def get(key: str) -> Any:
        return _get(found, key, flags.DEFAULTS.get(key))

    layers = (
        get("model.cfg.num_layers")
        if "model.cfg.num_layers" in found.keys and "model.cfg.hidden_layers" not in found.keys
        else get("model.cfg.hidden_layers")
    )
    tensor, pipeline = (get(f"train.dist.{axis}_parallel_size") for axis in ("tensor", "pipeline"))
    fp16 = bool(get("train.amp.enabled"))
    steps, peak = get("train.train_iter"), float(get("optim.lr"))
    evaluates = bool(get("train.evaluation.enabled"))
    prefix = _get(found, "dataloader.train.dataset[0].data_prefix")
    zero = get("train.zero_optimization.stage") if get("train.zero_optimization.enabled") else 0
    return {
        "seed": get("train.seed"),
        "model": {
            "kind": "gpt2", "num_layers": layers, "hidden_size": get("model.cfg.hidden_size"),
            "ffn_hidden_size": get("model.cfg.ffn_hidden_size"),
            "num_attention_heads": get("model.cfg.num_attention_heads"), "seq_length": get("model.cfg.max_seq_length"),
            "max_position_embeddings": get("model.cfg.max_seq_length"), "vocab_size": get("model.cfg.vocab_size"),
            "vocab_multiple": "megatron", "padding_in_softmax": True, "position": "learned", "norm": "layernorm",
            "norm_eps": float(get("model.cfg.layernorm_epsilon")), "activation": "gelu",
            "attention_dropout": float(get("model.cfg.attention_dropout_prob")),
            "hidden_dropout": float(get("model.cfg.output_dropout_prob")),
            "init_std": float(get("model.cfg.initializer_range")),
        },
        "parallel": {"tensor": tensor, "pipeline": pipeline, "zero": zero}
        | _stages(found, layers, pipeline),
        "batch": _batch(found) | {"loss_mean": "micro_batches"},
        "precision": {"compute": "fp16", "gradients": "fp16", "loss_scale": _scale(world, tensor, pipeline)}
        if fp16 else {"compute": "fp32", "gradients": "fp32"},
        "recompute": {"mode": "full" if get("train.activation_checkpoint.enabled") else "none"},
        "optimizer": {"betas": list(get("optim.betas")), "eps": float(get("optim.eps")),
                      "weight_decay": float(get("optim.weight_decay")),
                      "clip_grad": float(get("optim.params.clip_grad_max_norm"))},
        "learning_rate": {"peak": peak, "minimum": peak * float(get("train.scheduler.alpha")), "decay": "cosine",
                          "warmup_fraction": float(get("train.warmup_ratio")), "first_update": "zero"},
        "length": {"steps": steps},
        "data": {"train": [prefix]} if isinstance(prefix, str) else {},
        "evaluation": {"every_steps": get("train.evaluation.eval_period") if evaluates else 0,
                       "steps": int(get("train.evaluation.eval_iter")) if evaluates else 0},
        "checkpoint": {"every_steps": get("train.checkpointer.period"), "keep": get("train.checkpointer.max_to_keep")},
        "engine": {"framework": "libai", "inputs_on_device": get("train.input_placement_device") != "cpu"},
    }  # fmt: skip


def _stages(found: Settings, layers: int, pipeline: int) -> dict[str, Any]:
    """Layers per stage: given one by one, or LiBai's own uneven split."""
    given = _get(found, "train.dist.custom_pipeline_stage_id")
    if isinstance(given, list) and pipeline > 1:
        return {"stages": [given.count(stage) for stage in range(pipeline)]}
    return {"stages": list(memory.stages(layers, pipeline))} if pipeline > 1 and layers >= pipeline else {}


def _batch(found: Settings) -> dict[str, Any]:
    whole, accumulation = _get(found, "train.global_batch_size"), _get(found, "train.num_accumulation_steps")
    micro = _get(found, "train.train_micro_batch_size", 32)
    if whole is None:
        return {"micro_batch_size": micro, "accumulation": accumulation or 1}
    if "train.train_micro_batch_size" not in found.keys and accumulation:
        return {"global_batch_size": whole, "accumulation": accumulation}
    return {"global_batch_size": whole, "micro_batch_size": micro}


def _scale(world: int | None, tensor: int, pipeline: int) -> dict[str, Any]:
    """Dynamic from 65536 x data ranks, doubled every 2000 good steps, halved at once. Source: LiBai `graph_base.py`."""
    data = max(1, (world or tensor * pipeline) // (tensor * pipeline))
    return {
        "initial_power": 16 + (data.bit_length() - 1),
        "window": 2000,
        "hysteresis": 1,
        "minimum": 1.0,
        "rule": "megatron",
    }


def notes(found: Settings) -> list[str]:
    said = list(found.notes)
    if "model.cfg.num_layers" in found.keys:
        place = found.keys["model.cfg.num_layers"].place
        said.append(f"{place}: LiBai reads model.cfg.hidden_layers since December 2022 and adds model.cfg.num_layers "
                    "without a word: a model of 6 layers then")  # fmt: skip
    if "model.cfg.vocab_size" not in found.keys:
        said.append("the vocabulary is that of LiBai's GPT-2 tokenizer, 50,257, padded to 128 x tensor when it starts")
    said.append("LiBai's warm-up begins at a thousandth of the peak, here at 0")
    return said
