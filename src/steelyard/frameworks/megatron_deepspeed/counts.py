"""What Megatron-DeepSpeed prints about parameters, and the eras of its FLOPs."""

from steelyard.frameworks.deepspeed import counts as deepspeed
from steelyard.frameworks.megatron.counts import network, vocabulary
from steelyard.frameworks.papers.counts import narayanan
from steelyard.frameworks.views import Printed, View, tokens
from steelyard.predict.parameters import Tensor
from steelyard.spec.run import Run

NAME = "Megatron-DeepSpeed"


def estimated(run: Run) -> list[tuple[int, int]] | None:
    """(with, without) embeddings as extrapolated from one rank of each stage: its own parameters x tensor x pipeline.

    "Without embeddings" subtracts the word and position tables of that rank; embedding norms stay in, and the final
    norm is in only where that rank has it. None with virtual stages. Source: `get_parameters_in_billions`.
    """
    layers, tensor = deepspeed.placement(run), run.parallel.tensor
    if layers is None:
        return None
    ranks = tensor * run.parallel.pipeline
    found = []
    for stage in deepspeed.stages(run, network(run), layers):
        local = deepspeed.local(stage.tensors, tensor)
        tables = deepspeed.local(tuple(entry for entry in stage.tensors if _is_table(entry)), tensor)
        found.append((local * ranks, (local - tables) * ranks))
    return found


def _is_table(entry: Tensor) -> bool:
    return entry.part in ("embedding", "position", "head")


def printed(run: Run) -> tuple[Printed, ...]:
    found = estimated(run)
    if found is None:
        why = "Megatron-DeepSpeed's pipeline has no virtual stages."
        keys = ("estimated_billions", "without_embeddings_billions", "table_billions", "2021_billions")
        return tuple(Printed(f"megatron_deepspeed_{key}", None, why) for key in keys)
    whole, without = found[0]
    return (
        Printed(
            "megatron_deepspeed_estimated_billions",
            whole / 1e9,
            "The first rank's parameters times tensor x pipeline: every stage is taken for the first one, embeddings "
            "and all.",
            (f"estimated model parameters: {whole / 1e9}",),
        ),
        Printed(
            "megatron_deepspeed_without_embeddings_billions",
            without / 1e9,
            "The same without word and position tables: wrong when stages have unequal layers, and replicated tensors "
            "count once per tensor rank.",
            (f"estimated model parameters without embeddings: {without / 1e9}",),
        ),
        _table(run, found),
        _spring_2021(run, whole),
    )


def _table(run: Run, rows: list[tuple[int, int]]) -> Printed:
    """The `[tensor-pipeline] with / without` table of pull request 202, one row per stage."""
    return Printed(
        "megatron_deepspeed_table_billions",
        [[whole / 1e9, without / 1e9] for whole, without in rows],
        "The same two estimates from each stage's own rank; none of them is the model's size.",
        tuple(
            f"[{tensor:03d}-{stage:03d}] {whole / 1e9:.4f}B / {without / 1e9:.4f}B"
            for stage, (whole, without) in enumerate(rows)
            for tensor in range(run.parallel.tensor)
        ),
    )


def _spring_2021(run: Run, whole: int) -> Printed:
    key = "megatron_deepspeed_2021_billions"
    if run.parallel.pipeline > 1:
        return Printed(key, None, "The spring 2021 script printed its total without a pipeline only.")
    return Printed(
        key,
        whole / 1e9,
        "Spring 2021, no pipeline: one rank's parameters times tensor, replicated tensors once per rank.",
        tuple(
            f" > number of parameters on model parallel rank {rank}            {whole / 1e9:.3f} Billion"
            for rank in range(run.parallel.tensor)
        ),
    )


def views(run: Run) -> tuple[View, ...]:
    """The `TFLOPs` field of its log through the years, and the TensorBoard's gigaflos."""
    found = estimated(run)
    first, last = (found[0], found[-1]) if found else (None, None)
    factor = 3 if run.recompute.mode == "none" else 4
    count, model = tokens(run), run.model
    paper = narayanan(run, vocabulary(run), factor)
    gated = paper * 4 / 3 if model.gated else paper
    return (
        View(
            "megatron_deepspeed_2021_spring",
            8 * count * first[0] if first and run.parallel.pipeline == 1 else None,
            "Spring 2021, `Effective Tera Flops per GPU`: 8 x parameters x tokens with replicated tensors counted once "
            "per tensor rank; attention left out, recomputation always counted.",
        ),
        View(
            "megatron_deepspeed_2021_12",
            8 * count * last[1] if last else None,
            "2021-12-06 to 2022-02-21: 8 x parameters x tokens with the last rank's estimate without embeddings; the "
            "log's figure is 1000 times too large until 2022-01-05.",
        ),
        View(
            "megatron_deepspeed_2022_02",
            paper,
            "2022-02-21 on: the 2021 paper's formula, factor 4 with activation checkpointing and 3 without; full score "
            "matrices, MLP taken for 4 x hidden, the head recomputed too.",
        ),
        View(
            "megatron_deepspeed_2022_06",
            round(gated),
            "2022-06-05 on: the same with coefficient 32 instead of 24 for gated MLPs, taken for 4 x hidden too.",
        ),
        View(
            "megatron_deepspeed_gigaflos",
            6 * count * first[1] if first else None,
            "TensorBoard's gigaflos: 6 x tokens x the first rank's estimate without embeddings; no head, no attention.",
        ),
    )
