"""Plausible mistakes, planted one at a time: the parity suite must see every one, and nothing without one."""

from unittest import mock

import pytest
import torch

from steelyard.model import dropout
from steelyard.parallel import apply, norm, pipeline, shard, tensor
from steelyard.parallel.mesh import Mesh
from steelyard.train import engine, optimizer
from tests.parity.cases import compare, train_layout, train_reference

STEPS = 4
LIMIT = 1e-9
DROPOUT = {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}


def tied_gradients_are_not_summed():
    return mock.patch.object(pipeline.TiedTable, "sum_gradients", lambda self: None)


def data_ranks_average_instead_of_adding():
    true = shard.shard

    def averaging(model, *arguments):
        true(model, *arguments)
        for module in shard.units(model):
            module.set_gradient_divide_factor(2.0)

    return mock.patch.object(apply, "shard", averaging)


def the_norm_is_each_stage_s_own():
    true_norm, true_reduce = norm.gradient_norm, Mesh.all_reduce

    def not_over_stages(self, values, axes, op="sum"):
        return values if axes == ("pipeline",) else true_reduce(self, values, axes, op)

    def per_stage(*arguments):
        with mock.patch.object(Mesh, "all_reduce", not_over_stages):
            return true_norm(*arguments)

    return mock.patch.object(norm, "gradient_norm", per_stage)


def replicated_weights_count_once_per_tensor_rank():
    true = norm._cut_over
    return mock.patch.object(norm, "_cut_over", lambda p, axis: axis == "tensor" or true(p, axis))


def every_tensor_rank_has_the_first_heads_masks():
    true = tensor._place_block

    def placed(block, *arguments):
        true(block, *arguments)
        block.attention.core.first_head = 0

    return mock.patch.object(tensor, "_place_block", placed)


def sequence_parts_share_one_dropout_mask():
    true = tensor._place_block

    def placed(block, *arguments):
        true(block, *arguments)
        block.attention_dropout.first_position = block.mlp_dropout.first_position = 0

    return mock.patch.object(tensor, "_place_block", placed)


def data_ranks_share_one_dropout_mask():
    true = dropout.keep_mask

    def masks(probability, seed, site, place, axes):
        local = torch.arange(place.samples.shape[0])
        return true(probability, seed, site, type(place)(samples=local, step=place.step), axes)

    return mock.patch.object(dropout, "keep_mask", masks)


def the_loss_is_a_mean_of_micro_batch_means():
    true = engine.Engine.begin

    def begin(self, batches):
        given = true(self, batches)
        share = 1 / (len(given) * self.run.parallel.data)
        return [engine.Micro(m.batch, m.batch.loss_mask * share / m.batch.loss_mask.sum()) for m in given]

    return mock.patch.object(engine.Engine, "begin", begin)


def the_pipeline_divides_by_its_micro_batches():
    true = pipeline.SCHEDULES["1f1b"]
    scaling = lambda *a, **k: true(*a, **{**k, "scale_grads": True})  # noqa: E731
    return mock.patch.dict(pipeline.SCHEDULES, {"1f1b": scaling})


def partial_gradients_are_left_partial():
    return mock.patch.object(norm, "settle", lambda parameters: None)


def every_data_rank_reads_the_same_samples():
    return mock.patch.object(Mesh, "data_rank", 0)


def norms_and_biases_decay():
    true = optimizer.AdamW.__init__

    def build(self, parameters, rule):
        true(self, parameters, rule)
        for group in self._adam.param_groups:
            group["weight_decay"] = rule.weight_decay

    return mock.patch.object(optimizer.AdamW, "__init__", build)


def every_vocabulary_shard_begins_at_row_0():
    return mock.patch.object(Mesh, "tensor_rank", 0)


def only_the_last_micro_batch_counts():
    true = engine.Engine.forward_backward
    return mock.patch.object(engine.Engine, "forward_backward", lambda self, micro, step: true(self, micro[-1:], step))


MASKED = {"tokens": {"masked": True}}
BUGS = [
    (tied_gradients_are_not_summed, 2, {"parallel": {"pipeline": 2}}),
    (data_ranks_average_instead_of_adding, 2, {}),
    (the_norm_is_each_stage_s_own, 2, {"parallel": {"pipeline": 2}}),
    (replicated_weights_count_once_per_tensor_rank, 2, {"parallel": {"tensor": 2}}),
    (every_tensor_rank_has_the_first_heads_masks, 2, {**DROPOUT, "parallel": {"tensor": 2}}),
    (sequence_parts_share_one_dropout_mask, 2, {**DROPOUT, "parallel": {"tensor": 2, "sequence": True}}),
    (data_ranks_share_one_dropout_mask, 2, DROPOUT),
    (the_loss_is_a_mean_of_micro_batch_means, 2, {**MASKED, "batch": {"micro_batch_size": 1}}),
    (the_pipeline_divides_by_its_micro_batches, 2, {"parallel": {"pipeline": 2}}),
    (partial_gradients_are_left_partial, 2, {"parallel": {"tensor": 2, "sequence": True}}),
    (every_data_rank_reads_the_same_samples, 2, {}),
    (norms_and_biases_decay, 2, {}),
    (every_vocabulary_shard_begins_at_row_0, 2, {"parallel": {"tensor": 2}}),
    (only_the_last_micro_batch_counts, 2, {"batch": {"micro_batch_size": 1}}),
]


def train_with(bug, sections):
    if bug is None:
        return train_layout(sections, STEPS)
    with bug():
        return train_layout(sections, STEPS)


@pytest.mark.slow
def test_every_planted_bug_is_killed(pools, capsys):
    survived = []
    for bug, world, sections in BUGS:
        expected = train_reference(sections, STEPS)
        clean = compare(pools(world).run(train_with, None, sections), expected)
        assert max(clean.values()) < LIMIT, (bug.__name__, clean)
        try:
            worst = max(compare(pools(world).run(train_with, bug, sections), expected).values())
        except AssertionError:  # the bug ends the run, which is one way to be seen
            worst = float("inf")
        if not worst > LIMIT:
            survived.append(bug.__name__)
    with capsys.disabled():
        print(f"\nplanted bugs: {len(BUGS) - len(survived)} of {len(BUGS)} killed")
    assert not survived
