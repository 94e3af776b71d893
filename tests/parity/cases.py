"""Running one layout next to the reference, and what the two must agree in."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from steelyard.data.loader import Batch
from steelyard.parallel import mesh
from steelyard.predict import parameters
from steelyard.spec import progress, resolve
from steelyard.train.clock import Clock
from steelyard.train.engine import Engine, share
from steelyard.train.step import step
from steelyard.train.traffic import TrafficCounter
from tests.parity.reference import Reference

STEPS, BATCH = 20, 4
TINY = {"hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 29,
        "vocab_multiple": 4, "ffn_hidden_size": 32, "init_std": 0.2}  # fmt: skip


class Tokens:
    """Samples by number, as a Split gives them: random tokens, and documents that end at id 0."""

    def __init__(self, seq_length, vocab_size, masked=False, documents=False):
        self.s, self.v, self.masked, self.documents = seq_length, vocab_size, masked, documents

    def batch(self, first, count, vocab_size=None):
        rows = [torch.randint(0, self.v, (self.s + 1,), generator=torch.Generator().manual_seed(first + n))
                for n in range(count)]  # fmt: skip
        stream = torch.stack(rows) if rows else torch.zeros(0, self.s + 1, dtype=torch.int64)
        tokens, labels = stream[:, :-1].clone(), stream[:, 1:].clone()
        ended = tokens < 6  # several ids end documents here, so that short sequences hold a few
        mask = ~ended if self.masked else torch.ones_like(ended)
        before = (ended.cumsum(1) - ended.long()).int()
        starts = torch.where(torch.nn.functional.pad(ended[:, :-1], (1, 0)), torch.arange(self.s), 0)
        positions = torch.arange(self.s) - starts.cummax(1).values
        reset = self.documents
        return Batch(tokens, labels, mask, positions if reset else None, before if reset else None,
                     torch.arange(first, first + count))  # fmt: skip


def layers(sections):
    """As many as the stages need: an operation on a sharded tensor costs the same however small it is."""
    return 4 if sections.get("parallel", {}).get("pipeline", 1) > 1 else 2


def make_run(sections, world):
    """A legal run of the tiny model in float64; `sections` override."""
    base = {
        "model": {**TINY, "num_layers": layers(sections), **sections.get("model", {})},
        "precision": {"compute": "fp64"},
        "batch": {"global_batch_size": BATCH, **sections.get("batch", {})},
        "learning_rate": {"peak": 1e-3, "warmup_steps": 3},
        "optimizer": {"clip_grad": 1.0, "weight_decay": 0.1, **sections.get("optimizer", {})},
        "length": {"steps": STEPS},
    }
    others = {k: v for k, v in sections.items() if k not in ("model", "batch", "optimizer", "tokens")}
    return resolve({**base, **others}, world=world).run


def schedule_of(run):
    return progress.schedule(run.learning_rate, run.length, run.batch, run.model.seq_length)


def train_layout(sections, steps=STEPS, count=False):
    """On every rank: train, and return (losses, norms, evaluation, whole parameters this rank speaks for). `count`: the
    second step sends exactly what is predicted."""
    run = make_run(sections, dist.get_world_size())
    where = mesh.build(run.parallel, torch.device("cpu"))
    engine, tokens = (
        Engine(run, where),
        Tokens(run.model.seq_length, run.model.vocab_size, **sections.get("tokens", {})),
    )
    losses, norms = [], []
    for number in range(steps):
        size = progress.batch_size_at(run.batch, BATCH * number)
        batches = share(tokens, size * number, size, run, where)
        counter = TrafficCounter(where, engine.tied.group) if count and number == 1 else None
        with counter or nullcontext():
            outcome = step(run, engine, batches, schedule_of(run).rate(size * number, size), number, Clock())
        if counter:
            assert not (wrong := counter.wrong_by_rank(run, len(batches))), f"(predicted, counted): {wrong}"
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    evaluation = engine.evaluate(share(tokens, 10_000, BATCH, run, where))
    return losses, norms, evaluation, whole_parameters(engine)


def whole_parameters(engine):
    """Every parameter this rank holds, whole; only the first data and tensor rank of a stage answers."""
    found = {}
    for part in engine.parts:
        for name, parameter in part.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[name] = whole.detach().numpy().copy()
    return found if engine.mesh.data_rank == engine.mesh.tensor_rank == 0 else {}


_references = {}


def train_reference(sections, steps=STEPS):
    """The same by the reference; cached, since many layouts share a model."""
    model_side = {k: v for k, v in sections.items() if k in ("model", "tokens", "optimizer")}
    mean = sections.get("batch", {}).get("loss_mean", "tokens")
    micro = sections.get("batch", {}).get("micro_batch_size", 1) if mean == "micro_batches" else 1
    key = repr((sorted(model_side.items()), mean, micro, steps, layers(sections)))
    if key not in _references:
        run = make_run({**model_side, "batch": {"loss_mean": mean, "micro_batch_size": micro}}, 1)
        run = run.model_copy(update={"model": run.model.model_copy(update={"num_layers": layers(sections)})})
        shapes = {t.name: t.shape for t in parameters.tensors(run.model)}
        reference = Reference(run, shapes)
        tokens = Tokens(run.model.seq_length, run.model.vocab_size, **sections.get("tokens", {}))
        results = [
            reference.step(tokens.batch(BATCH * n, BATCH), schedule_of(run).rate(BATCH * n, BATCH), n)
            for n in range(steps)
        ]
        with torch.no_grad():
            reference.m = reference.m.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0})
            held_out = tokens.batch(10_000, BATCH)
            total = (reference.losses(held_out, 0) * held_out.loss_mask).sum().item()
        whole = {name: p.detach().numpy().copy() for name, p in reference.w.items()}
        _references[key] = ([r[0] for r in results], [r[1] for r in results], total, whole)
    return _references[key]


def compare(answers, expected):
    """Largest differences: losses, norms (relative), evaluation (relative), parameters."""
    losses, norms, total, whole = expected
    worst = {"loss": 0.0, "norm": 0.0, "evaluation": 0.0, "weights": 0.0, "key bias": 0.0}
    seen = set()
    for rank_losses, rank_norms, evaluation, held in answers:
        worst["loss"] = max(worst["loss"], *(abs(a - b) for a, b in zip(rank_losses, losses, strict=True)))
        worst["norm"] = max(worst["norm"], *(abs(a - b) / b for a, b in zip(rank_norms, norms, strict=True)))
        worst["evaluation"] = max(worst["evaluation"], abs(evaluation[0] - total) / total)
        for name, value in held.items():
            # a tied head on a stage of its own is the word table under another name
            twin = whole["embedding.word.weight"] if name == "head.weight" and name not in whole else whole[name]
            kind = "key bias" if name.endswith("qkv.bias") else "weights"
            worst[kind] = max(worst[kind], abs(value - twin).max())
            seen.add(name)
    assert set(whole) <= seen, f"no rank speaks for {sorted(set(whole) - seen)}"
    return worst
