"""A pipeline's schedule: how long ranks wait for each other, and what every rank does in a step, action by action."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from steelyard.predict import stages
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel

# Of a micro-batch's forward, input-gradient and weight-gradient passes, how many a rank waits for per rank before it
# while the pipeline fills and drains. Where weight gradients are put off they fill the gap, and one pass is left.
# Source: the orders of torch.distributed.pipelining.schedules, played through with equal passes (a test repeats it).
WAITS = {"gpipe": 3, "1f1b": 3, "interleaved": 3, "zero_bubble": 1, "zbv": 1}
PASSES = 3


@dataclass(frozen=True)
class Bubble:
    """`fraction`: the share of a step's compute time that the average rank waits, transfers not counted.
    `schedule` is the part that filling and draining makes; the rest comes from stages of unequal cost."""

    fraction: float
    schedule: float


def bubble(model: Model, parallel: Parallel, micro_batches: int) -> Bubble:
    """Of one step of `micro_batches` micro-batches a rank.

    A rank's cost is that of its stages in model FLOPs (forward and backward). The steady state takes micro_batches
    times the slowest rank; filling and draining take every other rank's cost once, divided by the stages on a rank.
    """
    ranks = parallel.pipeline
    if ranks == 1:
        return Bubble(0.0, 0.0)
    costs = stages.costs(model, parallel)
    by_rank = [sum(costs[stage] for stage in stages.chunks(parallel, rank)) for rank in range(ranks)]
    virtual, waits = parallel.num_stages // ranks, WAITS[parallel.pipeline_schedule] / PASSES
    steady = micro_batches * max(by_rank)
    fill = (sum(by_rank) - max(by_rank)) / virtual * waits
    busy = micro_batches * sum(by_rank) / ranks
    equal = (ranks - 1) / virtual * waits
    return Bubble(1 - busy / (steady + fill), equal / (micro_batches + equal))


# What a rank does, and for which chunk of the model it holds: "F" forward, "B" backward, or its halves "I" (gradients
# of inputs) and "W" (of weights); "RF" and "RB" receive the input of a forward and the gradient of a backward pass; "R"
# reduces the gradients of weights when they are whole; "U" gathers weights ahead, and "D" drops them.
Action = tuple[str, int]
ON_DEMAND = ("gpipe", "1f1b")  # schedules of one stage a rank, which receive when they need to
ROUNDS = 3  # of as many micro-batches as there are ranks
AT_ONCE = 3  # chunks whose weights PyTorch's schedules keep gathered


@lru_cache(maxsize=16)
def actions(parallel: Parallel, micro_batches: int) -> list[list[Action]]:
    """What every rank does in a step. GPipe and 1F1B receive when they need to, the others as soon as the sender is
    done, by a clock that lets every rank act once a round. Source: `_add_send_recv` of
    torch.distributed.pipelining.schedules; a test holds the two together."""
    held = [stages.chunks(parallel, rank) for rank in range(parallel.pipeline)]
    where = {stage: (rank, number) for rank, mine in enumerate(held) for number, stage in enumerate(mine)}
    plain = [_with_turns(order(parallel, rank, micro_batches), micro_batches) for rank in range(parallel.pipeline)]
    found: list[list[Action]] = [[] for _ in plain]
    ahead = parallel.pipeline_schedule not in ON_DEMAND
    done, waits = [0] * len(plain), dict.fromkeys(((kind, stage) for kind in "FB" for stage in where), 0)
    while (before := sum(done)) < sum(map(len, plain)):
        for rank, mine in enumerate(plain):
            if done[rank] == len(mine):
                continue
            kind, chunk = mine[done[rank]]
            stage, passed = held[rank][chunk], "F" if kind == "F" else "B"
            from_stage, to_stage = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            passes = kind in "FBI"
            if passes and from_stage in where:
                if not waits[passed, stage]:
                    continue
                waits[passed, stage] -= 1
                if not ahead:
                    found[rank].append(("R" + passed, chunk))
            if kind != "U" or ahead:
                found[rank].append((kind, chunk))
            done[rank] += 1
            if passes and to_stage in where:
                waits[passed, to_stage] += 1
                receiver, to_chunk = where[to_stage]
                if ahead and receiver != rank:
                    found[receiver].append(("R" + passed, to_chunk))
        assert sum(done) > before, "a schedule whose ranks wait for each other"
    return found


def gathers(parallel: Parallel, pipeline_rank: int, micro_batches: int) -> list[int]:
    """How often a step gathers the weights of each chunk that a rank holds, where FSDP shards them. At zero 3 a forward
    pass drops them when it is through, and a backward pass leaves them. More chunks than are kept AT_ONCE are fetched
    anew whenever they come near."""
    held = len(stages.chunks(parallel, pipeline_rank))
    if held <= AT_ONCE:
        return [micro_batches + 1 if parallel.zero == 3 else 1] * held
    found, there = [0] * held, [False] * held
    for kind, chunk in actions(parallel, micro_batches)[pipeline_rank]:
        first = stages.chunks(parallel, pipeline_rank)[chunk] == 0  # whose backward pass is all in the second half
        if kind in "UFB" or (kind in "IW" and first == (kind == "W")):
            found[chunk] += not there[chunk]
            there[chunk] = kind != "F" or parallel.zero < 3
        elif kind in "DR":
            there[chunk] = False
    return found


def few(parallel: Parallel, micro_batches: int) -> bool:
    """Whether 1F1B has too few micro-batches to alternate, so that all forward passes go before all backward ones."""
    return parallel.pipeline_schedule == "1f1b" and micro_batches < parallel.pipeline


def enough(parallel: Parallel, micro_batches: int) -> int:
    """Micro-batches in whose step every rank reaches the peak that it has with all of them: those that fill the
    pipeline, and some rounds of the steady state after that. GPipe has no steady state."""
    rounds = micro_batches // parallel.pipeline
    if parallel.pipeline_schedule == "gpipe" or rounds <= ROUNDS:
        return micro_batches
    return micro_batches // rounds * ROUNDS


def _with_turns(plain: list[Action], micro_batches: int) -> list[Action]:
    """The turns that fetching and dropping of weights take, and the reductions."""
    soon: list[list[int]] = [[]]  # the next chunks from each action on
    for _, chunk in reversed(plain):
        soon.append([chunk, *(other for other in soon[-1] if other != chunk)][:AT_ONCE])
    found: list[Action] = []
    active: list[int] = []
    done: Counter[int] = Counter()
    for (kind, chunk), wanted in zip(plain, reversed(soon), strict=False):
        found += [("D", other) for other in active if other not in wanted]
        found += [("U", other) for other in wanted if other not in active]
        found.append((kind, chunk))
        active = wanted
        done[chunk] += kind in "BW"
        if kind in "BW" and done[chunk] == micro_batches:
            found.append(("R", chunk))
    return found


def order(parallel: Parallel, rank: int, micro_batches: int) -> list[Action]:
    """What a rank does in a step, chunk by chunk of the model it holds. Source: the orders of
    torch.distributed.pipelining.schedules; a test holds the two together."""
    schedule, ranks, chunks = parallel.pipeline_schedule, parallel.pipeline, parallel.num_stages // parallel.pipeline
    if schedule == "gpipe" or few(parallel, micro_batches):
        return [("F", 0)] * micro_batches + [("B", 0)] * micro_batches
    if schedule == "zbv":
        return _zbv(ranks, rank, micro_batches)
    put_off = schedule == "zero_bubble"
    total = micro_batches * chunks
    a_round = micro_batches // max(1, micro_batches // ranks)
    behind = ranks - 1 - rank
    warmup = min(total, (chunks - 1) * a_round + (2 if chunks > 1 and not put_off else 1) * behind)
    forward = [(number // a_round) % chunks for number in range(total)]
    backward = [chunks - 1 - chunk for chunk in forward]
    found: list[Action] = [("F", chunk) for chunk in forward[:warmup]]
    for number, chunk in enumerate(backward):
        if warmup + number < total:
            found.append(("F", forward[warmup + number]))
        found.append(("I" if put_off else "B", chunk))
        if put_off and number >= rank:
            found.append(("W", backward[number - rank]))
    return found + [("W", chunk) for chunk in backward[total - min(rank, total) :] if put_off]


def _zbv(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    """Down the ranks on the first chunk and up again on the second. Played for as many micro-batches as fill the
    pipeline, and what is beyond the given ones left out."""
    total, done = max(2 * ranks - 1, micro_batches), dict.fromkeys([k + c for k in "FIW" for c in "01"], 0)
    found: list[Action] = []

    def play(*actions: str) -> None:
        for action in actions:
            if done[action] < micro_batches:
                found.append((action[0], int(action[1])))
            done[action] += 1

    play(*["F0"] * (2 * (ranks - rank) - 1))
    play(*["F1", "F0"] * rank)
    play(*["F1", "I1", "W1"] * (ranks - rank))
    while done["F1"] < done["F0"] or done["F0"] < total:
        play(*["F0"] * (done["F0"] < total), "I0", "W0", "F1", "I1", "W1")
    play(*["I0", "I1"] * rank)
    play(*["I0", "W0"] * (ranks - rank))
    play(*["W1"] * (done["I1"] - done["W1"]), *["W0"] * (done["I0"] - done["W0"]))
    return found
