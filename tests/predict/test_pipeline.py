"""The predicted bubble against PyTorch's own orders, played through with equal passes."""

import pytest

from steelyard.predict.pipeline import actions, bubble
from steelyard.predict.stages import chunks
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel

CASES = [("interleaved", 2), ("interleaved", 4), ("zero_bubble", 2), ("zbv", 2)]


def pytorchs(parallel, micro_batches):
    """PyTorch's own schedule over stages that compute nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from steelyard.parallel.pipeline import SCHEDULES

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=parallel.pipeline)
    try:
        nothing = torch.empty(1, device="meta")
        stages = [
            PipelineStage(torch.nn.Identity(), n, parallel.num_stages, torch.device("cpu"), input_args=(nothing,))
            for n in chunks(parallel, 0)
        ]
        return SCHEDULES[parallel.pipeline_schedule](stages, micro_batches, loss_fn=max)
    finally:
        dist.destroy_process_group()


def one_forward_one_backward(ranks, micro_batches):
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - rank)
        order = [("FORWARD", rank, n) for n in range(ahead)]
        for n in range(micro_batches):
            order.append(("FULL_BACKWARD", rank, n))
            if n + ahead < micro_batches:
                order.append(("FORWARD", rank, n + ahead))
        yield order


def all_forward_all_backward(ranks, micro_batches):
    for rank in range(ranks):
        yield [(kind, rank, n) for kind in ("FORWARD", "FULL_BACKWARD") for n in range(micro_batches)]


def waiting(order, costs):
    """The mean share of the time that ranks wait, when stage s takes costs[s] for each of the three passes."""
    done, clock = {}, [0.0] * len(order)
    left = [list(actions) for actions in order]
    while any(left):
        moved = False
        for rank, todo in enumerate(left):
            while todo:
                kind, stage, micro = todo[0]
                needs = {
                    "FORWARD": [("forward", stage - 1, micro)] if stage else [],
                    "BACKWARD_WEIGHT": [("input", stage, micro)],
                }.get(kind, [("forward", stage, micro), *([("input", stage + 1, micro)] * (stage < len(costs) - 1))])
                if any(need not in done for need in needs):
                    break
                length = costs[stage] * (2 if kind == "FULL_BACKWARD" else 1)
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + length
                made = {"FORWARD": "forward", "BACKWARD_WEIGHT": "weight"}.get(kind, "input")
                done[made, stage, micro] = clock[rank]
                todo.pop(0)
                moved = True
        assert moved, "the order waits for itself"
    busy = 3 * sum(costs) * len({micro for _, _, micro in done}) / len(order)
    return 1 - busy / max(clock)


def equal_stages(ranks, schedule, virtual):
    model = Model(num_layers=ranks * virtual, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=2)
    return model, Parallel(pipeline=ranks, pipeline_schedule=schedule, virtual=virtual)


@pytest.mark.parametrize(("schedule", "virtual"), CASES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_the_schedules_of_pytorch(schedule, virtual, ranks, micro_batches):
    model, parallel = equal_stages(ranks, schedule, virtual)
    played = [
        [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in actions if a is not None]
        for _, actions in sorted(pytorchs(parallel, micro_batches).pipeline_order.items())
    ]
    assert bubble(model, parallel, micro_batches).schedule == pytest.approx(
        waiting(played, [1.0] * parallel.num_stages), abs=1e-12
    )


@pytest.mark.parametrize(("schedule", "virtual"), CASES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 6), (4, 8), (4, 20)])
def test_the_orders_of_pytorch(schedule, virtual, ranks, micro_batches):
    """Action by action, on every rank, with what is received from others and when."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "RECV_F": "RF",
             "RECV_B": "RB", "REDUCE_GRAD": "R", "UNSHARD": "U", "RESHARD": "D"}  # fmt: skip
    parallel = equal_stages(ranks, schedule, virtual)[1]
    ours = actions(parallel, micro_batches)
    for rank, theirs in pytorchs(parallel, micro_batches).pipeline_order_with_comms.items():
        held = chunks(parallel, rank)
        known = [(kinds.get(a.computation_type.name), held.index(a.stage_index)) for a in theirs]
        known = [action for action in known if action[0]]
        while known[-1][0] == "D":  # everything is dropped at the end, which the reductions have done
            known.pop()
        assert ours[rank] == known


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 64)])
@pytest.mark.parametrize(
    ("schedule", "played"), [("1f1b", one_forward_one_backward), ("gpipe", all_forward_all_backward)]
)
def test_unequal_stages(schedule, played, ranks, micro_batches):
    from steelyard.predict import stages

    model = Model(num_layers=2 * ranks, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=3000)
    parallel = Parallel(pipeline=ranks, stages=(2,) * ranks, pipeline_schedule=schedule)
    costs = [float(cost) for cost in stages.costs(model, parallel)]
    assert max(costs) > 1.2 * min(costs)
    expected = waiting(list(played(ranks, micro_batches)), costs)
    assert bubble(model, parallel, micro_batches).fraction == pytest.approx(expected, abs=1e-12)


def test_no_pipeline_waits_for_nothing():
    assert bubble(*equal_stages(1, "1f1b", 1), 4).fraction == 0
