"""Our own engine's memory and traffic over random layouts, each against two steps of it on fake tensors.

    python benchmarks/rehearsals.py [--count N] [--seed S] [--from FILE] [--over PERCENT]

Draws are of the model's parts, precision, ZeRO, replicas, tensor, sequence and pipeline parallelism with every
schedule, recompute, dropout, documents, micro-batches; illegal ones are drawn again. Prints a line for every rank whose
peak is more than PERCENT off, or whose states or traffic are not exact, and then the distribution. `--from` runs the
lines of an earlier output again. Two seconds a draw.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.spec import UserError, resolve

MIB = 2**20
Drawn = tuple[int, int, dict[str, Any]]  # ranks of the world, a rank of it, sections of the run


def draw(dice: random.Random) -> Drawn:
    tensor, pipeline = dice.choice([1, 1, 2, 4]), dice.choice([1, 1, 2, 4])
    data = dice.choice([1, 2, 3, 4, 8, 16, 48])
    schedule = dice.choice(["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]) if pipeline > 1 else "1f1b"
    virtual = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule) or dice.choice([2, 2, 3, 4])
    layers = pipeline * virtual * dice.choice([1, 2]) + dice.choice([0, 0, 1]) if pipeline > 1 else dice.choice([2, 3])
    heads, head_dim = dice.choice([(8, 32), (8, 64), (16, 24)])
    model = {
        "num_layers": layers,
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_query_groups": heads // dice.choice([1, 1, 2, 4]),
        "seq_length": dice.choice([128, 256]),
        "vocab_size": dice.choice([500, 5_000, 20_000]),
        "norm": dice.choice(["layernorm", "rmsnorm"]),
        "activation": dice.choice(["gelu", "relu", "relu2", "swiglu", "geglu"]),
        "position": dice.choice(["learned", "rotary", "alibi", "none"]),
        "tied_embeddings": dice.random() < 0.5,
        "bias": dice.random() < 0.5,
        "qk_norm": dice.random() < 0.25,
        "hidden_dropout": dice.choice([0.0, 0.0, 0.1]),
        "attention_dropout": dice.choice([0.0, 0.0, 0.1]),
    }
    mode = dice.choice(["none", "none", "full", "selective"])
    recompute: dict[str, Any] = {"mode": mode}
    if mode == "full":
        recompute |= {"every": dice.choice([1, 1, 2]), "shard": dice.random() < 0.3}
        if dice.random() < 0.3:
            recompute["layers"] = 1
    if mode == "selective":
        recompute["modules"] = sorted(dice.sample(["attention", "mlp", "norm"], dice.choice([1, 2, 3])))
    apart = dice.random() < 0.25
    compute = dice.choice(["fp32", "bf16", "bf16", "fp16"])
    precision: dict[str, Any] = {"compute": compute}
    if compute != "fp32" and dice.random() < 0.2:
        precision["gradients"] = compute
    parallel: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "zero": dice.choice([0, 1, 2, 3])}
    parallel["sequence"] = tensor > 1 and dice.random() < 0.5
    if pipeline > 1:
        parallel |= {"pipeline_schedule": schedule, "virtual": virtual}
    if data % 2 == 0 and parallel["zero"] and dice.random() < 0.25:
        parallel["replicate"] = 2
    rounds = dice.choice([1, 2, 4])
    batch = {
        "micro_batch_size": dice.choice([1, 2, 3]),
        "accumulation": rounds * pipeline if pipeline > 1 and schedule not in ("gpipe", "1f1b") else dice.randint(1, 6),
    }
    world = tensor * pipeline * data
    sections = {
        "model": model,
        "precision": precision,
        "parallel": parallel,
        "recompute": recompute,
        "batch": batch,
        "data": {"reset_positions": apart, "reset_attention": apart},
    }
    return world, dice.randrange(world), sections


def drawn(count: int, seed: int) -> Iterator[Drawn]:
    dice = random.Random(seed)
    while count:
        world, rank, sections = draw(dice)
        try:
            resolve(sections, world=world)
        except UserError:
            continue
        count -= 1
        yield world, rank, sections


def said(path: Path) -> Iterator[Drawn]:
    """The lines of an earlier output."""
    for line in path.read_text().splitlines():
        if '{"world"' in line:
            given = json.loads(line[line.index('{"world"') :])
            yield given.pop("world"), given.pop("rank"), given


def main() -> None:
    from steelyard.train.rehearse import beside_prediction

    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--from", dest="path", type=Path)
    options.add_argument("--over", type=float, default=0.5)
    asked = options.parse_args()
    peaks, first, states, traffic = list[float](), list[float](), 0, 0
    for world, rank, sections in said(asked.path) if asked.path else drawn(asked.count, asked.seed):
        found = beside_prediction(resolve(sections, world=world).run, rank)
        errors = {name: entry["error"] for name, entry in found["bytes"].items()}
        wrong = {name: errors[name] for name in ("master", "optimizer") if errors[name]}
        peaks.append(abs(errors["peak"]))
        first.append(abs(errors["peak_first_step"]))
        states += bool(wrong)
        traffic += bool(found["traffic"]["wrong"])
        if max(peaks[-1], first[-1]) > asked.over / 100 or wrong or found["traffic"]["wrong"]:
            peak = found["bytes"]["peak"]["rehearsed"] / MIB
            print(
                f"peak {errors['peak']:+.2%} first {errors['peak_first_step']:+.2%} of {peak:,.1f} MiB",
                f"states {wrong}" if wrong else "",
                "traffic" if found["traffic"]["wrong"] else "",
                json.dumps({"world": world, "rank": rank, **sections}),
                flush=True,
            )
    if not peaks:
        raise SystemExit("no layouts")
    print(f"{len(peaks)} layouts; states wrong in {states}, traffic wrong in {traffic}")
    for name, errors_of in (("peak", sorted(peaks)), ("peak of the first step", sorted(first))):
        middle, ninth = errors_of[len(errors_of) // 2], errors_of[int(len(errors_of) * 0.9)]
        above = sum(error > 0.01 for error in errors_of)
        print(f"{name}: median {middle:.3%}, 90th {ninth:.3%}, most {errors_of[-1]:.2%}; {above} above 1 %")


if __name__ == "__main__":
    main()
