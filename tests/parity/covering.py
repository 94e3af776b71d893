"""A covering array: few cases in which every legal pair of options meets at least once."""

import itertools
import random

OPTIONS = {
    "layout": ["t1p1", "t2p1", "t1p2", "t2p2", "t4p1", "t1p4"],  # the rest of the world is data parallel
    "zero": [0, 1, 2, 3],
    "replicate": [1, 2],
    "sequence": [False, True],
    "schedule": ["1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"],
    "stages": ["balanced", "custom"],
    "recompute": ["none", "full", "full-every-2", "full-first-1", "full-shard", "attention", "all-parts"],
    "micro": [1, 2],
    "model": ["gpt2", "gpt2-untied", "llama", "llama-tied-qk-norm", "alibi-embedding-norm", "no-positions-relu2"],
    "dropout": [False, True],
    "tokens": ["plain", "masked", "documents"],
    "loss_mean": ["tokens", "micro_batches"],
    "padding_in_softmax": [False, True],
    "clip": [1.0, 0.0],
}

MODELS = {
    "gpt2": {},
    "gpt2-untied": {"tied_embeddings": False, "activation": "gelu_tanh"},
    "llama": {"kind": "llama", "num_query_groups": 4},
    "llama-tied-qk-norm": {"kind": "llama", "tied_embeddings": True, "qk_norm": True, "num_query_groups": 4,
                           "num_attention_heads": 8, "head_dim": 4, "rotary_fraction": 0.5},
    "alibi-embedding-norm": {"position": "alibi", "embedding_norm": True, "activation": "geglu"},
    "no-positions-relu2": {"position": "none", "activation": "relu2", "bias": False, "norm": "rmsnorm"},
}  # fmt: skip
RECOMPUTE = {
    "none": {},
    "full": {"mode": "full"},
    "full-every-2": {"mode": "full", "every": 2},
    "full-first-1": {"mode": "full", "layers": 1},
    "full-shard": {"mode": "full", "shard": True},
    "attention": {"mode": "selective"},
    "all-parts": {"mode": "selective", "modules": ["attention", "mlp", "norm"]},
}
VIRTUAL = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2}
DEFAULTS = {name: values[0] for name, values in OPTIONS.items()}


def sizes(case, world):
    tensor, pipeline = int(case["layout"][1]), int(case["layout"][3])
    return tensor, pipeline, world // (tensor * pipeline)


def legal(case, world):
    """The spec's rules for this small family, and no option that would have no effect and make two cases one."""
    tensor, pipeline, data = sizes(case, world)
    if tensor * pipeline > world or 4 % data:
        return False
    schedule, full = case["schedule"], case["recompute"].startswith("full")
    accumulation = 4 // (case["micro"] * data)
    return all((
        accumulation >= 1,
        pipeline > 1 or (schedule == "1f1b" and case["stages"] == "balanced"),
        pipeline == 1 or case["zero"] != 2,
        pipeline * VIRTUAL[schedule] <= 4,
        pipeline * VIRTUAL[schedule] < 4 or case["stages"] == "balanced",
        VIRTUAL[schedule] == 1 or accumulation % pipeline == 0,
        not (full and schedule in ("zero_bubble", "zbv")),
        not (case["zero"] == 3 and schedule in ("zero_bubble", "zbv")),
        not case["sequence"] or tensor > 1,
        case["recompute"] != "full-shard" or (tensor > 1 and not case["sequence"]),
        case["replicate"] == 1 or (data % 2 == 0 and data > 2 and case["zero"] != 0),
        data > 1 or case["zero"] in (0, 1),
    ))  # fmt: skip


def sections(case, world):
    """The case as the sections of a run file."""
    tensor, pipeline, _ = sizes(case, world)
    model = {**MODELS[case["model"]], "padding_in_softmax": case["padding_in_softmax"]}
    if case["dropout"]:
        model |= {"hidden_dropout": 0.1, "attention_dropout": 0.2}
    parallel = {
        "tensor": tensor, "pipeline": pipeline, "sequence": case["sequence"], "zero": case["zero"],
        "replicate": case["replicate"], "pipeline_schedule": case["schedule"], "virtual": VIRTUAL[case["schedule"]],
    }  # fmt: skip
    if case["stages"] == "custom":
        parallel["stages"] = [1, 3]
    return {
        "model": model,
        "parallel": parallel,
        "recompute": RECOMPUTE[case["recompute"]],
        "batch": {"micro_batch_size": case["micro"], "loss_mean": case["loss_mean"]},
        "optimizer": {"clip_grad": case["clip"]},
        "tokens": {"masked": case["tokens"] != "plain", "documents": case["tokens"] == "documents"},
    }


def pairs(case):
    return set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def draw(generator, world, fixed=()):
    """A random legal case with the given options, or None."""
    for _ in range(200):
        case = {name: generator.choice(values) for name, values in OPTIONS.items()} | dict(fixed)
        if legal(case, world):
            return case
    return None


def covering(worlds, seed=0):
    """[(world, case)]: greedy; each pair still missing starts a case that is the best of a few random completions."""
    generator = random.Random(seed)
    missing = set()
    for (a, values_a), (b, values_b) in itertools.combinations(sorted(OPTIONS.items()), 2):
        missing |= {((a, x), (b, y)) for x in values_a for y in values_b}
    chosen, impossible = [], set()
    for pair in sorted(missing, key=repr):
        if pair not in missing:
            continue
        drawn = [(w, draw(generator, w, pair)) for w in worlds for _ in range(6)]
        found = [(world, case) for world, case in drawn if case]
        if not found:
            impossible.add(pair)
            continue
        world, case = max(found, key=lambda entry: len(pairs(entry[1]) & missing))
        missing -= pairs(case)
        chosen.append((world, case))
    return chosen, impossible


def name(world, case):
    """The options that differ from the defaults, short enough for a test's name."""
    different = [f"{k}={v}" for k, v in case.items() if v != DEFAULTS[k]]
    return " ".join([f"w{world}", *different])
