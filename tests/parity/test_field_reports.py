"""What others got wrong in numerics, by report (E01 to E07, and T1's anchors)."""

import numpy as np
import pytest
import torch

from steelyard.model.dropout import Dropout, keep_mask
from steelyard.model.init import initial
from steelyard.model.position import Place
from steelyard.spec import resolve
from tests.parity.cases import train_layout
from tests.train.running import losses, train


def first_norms(pools, world, sections):
    return pools(world).run(train_layout, sections, 2)[0][1]


def test_e01_the_gradient_is_that_of_the_mean_loss_whatever_the_micro_batches(pools):
    """PyTorch's schedules divide accumulated gradients by the micro-batches unless told not to (torchtitan 1733)."""
    found = [
        first_norms(pools, 1, {"batch": {"micro_batch_size": 4}}),
        first_norms(pools, 1, {"batch": {"micro_batch_size": 1}}),
        first_norms(
            pools, 2, {"model": {"num_layers": 2}, "parallel": {"pipeline": 2}, "batch": {"micro_batch_size": 1}}
        ),
        first_norms(
            pools, 2, {"model": {"num_layers": 2}, "parallel": {"pipeline": 2}, "batch": {"micro_batch_size": 2}}
        ),
    ]
    for norms in found[1:]:
        assert norms == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize(("world", "zero"), [(2, 1), (4, 1), (4, 3)])
def test_e02_the_two_tied_tables_stay_one(pools, world, zero):
    """Reduce-scattering before the tied gradients are added leaves two different tables (Megatron-LM 844)."""
    answers = pools(world).run(train_layout, {"parallel": {"pipeline": 2, "zero": zero}}, 5)
    held = {name: value for answer in answers for name, value in answer[3].items()}
    assert np.array_equal(held["embedding.word.weight"], held["head.weight"])


@pytest.mark.parametrize("sequence", [False, True])
def test_e04_replicated_weights_count_once_in_the_norm(pools, sequence):
    """With clipping at half the norm, a wrong norm changes every update (TransformerEngine 715)."""
    one = pools(1).run(train_layout, {"batch": {"micro_batch_size": 4}}, 1)[0]
    clip = {"optimizer": {"clip_grad": 0.5 * one[1][0]}}
    one = pools(1).run(train_layout, {**clip, "batch": {"micro_batch_size": 4}}, 3)[0]
    two = pools(2).run(train_layout, {**clip, "parallel": {"tensor": 2, "sequence": sequence}}, 3)[0]
    assert two[1] == pytest.approx(one[1], rel=1e-12)
    assert max(abs(two[3][name] - value).max() for name, value in one[3].items() if "qkv.bias" not in name) < 1e-12


def place(samples, step=0):
    return Place(samples=torch.tensor(samples), step=step)


def test_e05_masks_belong_to_the_sample_not_to_the_rank():
    """The same text as two samples gets two masks; the same sample gets one mask wherever it is computed."""
    drop, hidden = Dropout(0.5, 1234, "0/mlp_out"), torch.ones(2, 8, 16)
    both = drop(hidden, place([4, 5]))
    assert not torch.equal(both[0], both[1])
    assert torch.equal(drop(hidden[1:], place([5]))[0], both[1])
    assert not torch.equal(drop(hidden[1:], place([5], step=1))[0], both[1])
    assert not torch.equal(Dropout(0.5, 1234, "1/mlp_out")(hidden[1:], place([5]))[0], both[1])


def test_masks_have_the_probability_they_say():
    axes = (torch.arange(200)[:, None], torch.arange(300)[None, :])
    for probability in (0.1, 0.5, 0.9):
        kept = keep_mask(probability, 7, "x", place(range(20)), axes).float()
        assert kept.mean().item() == pytest.approx(1 - probability, abs=2e-3)
        for dim in (0, 1, 2):  # no rows, columns or samples that are alike
            assert kept.mean(dim=[d for d in (0, 1, 2) if d != dim]).std() < 0.02


DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1", "length.steps=4")


def test_e05_a_run_with_dropout_repeats_bit_for_bit(pools, t1, tmp_path):
    runs = [train(pools(2), t1, *DROPOUT, folder=tmp_path / name)[1] for name in "ab"]
    assert losses(runs[0]) == losses(runs[1])


def test_e06_the_two_halves_of_a_sequence_have_their_own_masks():
    """Halves that share a mask looked fine for a year where nobody trained with dropout (Megatron-LM 1256)."""
    drop, hidden = Dropout(0.1, 1234, "0/mlp_out"), torch.ones(1, 32, 64)
    whole = drop(hidden, place([3]))
    drop.first_position = 16
    second = drop(hidden[:, 16:], place([3]))
    assert torch.equal(second, whole[:, 16:]) and not torch.equal(second, whole[:, :16])


@pytest.mark.parametrize("layout", [(), ("parallel.tensor=2", "parallel.sequence=true")])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_e06_recompute_replays_the_masks_bit_for_bit(pools, t1, tmp_path, layout, mode):
    _, kept = train(pools(2), t1, *DROPOUT, *layout, folder=tmp_path / "kept")
    _, repeated = train(pools(2), t1, *DROPOUT, *layout, f"recompute.mode={mode}", folder=tmp_path / "repeated")
    assert losses(kept) == losses(repeated)
    assert [s.grad_norm for s in kept.steps] == [s.grad_norm for s in repeated.steps]


def test_e07_padding_neither_moves_the_start_nor_takes_probability(pools, t1, tmp_path):
    """V = 257 on one rank, 258 rows on two: the same losses, and no probability for row 258 (Megatron-LM 1754)."""
    _, one = train(pools(1), t1, "model.vocab_multiple=1", "length.steps=20", folder=tmp_path / "one")
    _, two = train(
        pools(2), t1, "model.vocab_multiple=2", "parallel.tensor=2", "length.steps=20", folder=tmp_path / "two"
    )
    assert losses(two)[0] == pytest.approx(losses(one)[0], abs=1e-5)
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    model = resolve(
        {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 257}}
    ).run.model
    small, large = (initial(model, "embedding.word.weight", (rows, 8), 1234) for rows in (257, 384))
    assert torch.equal(small, large[:257])
