"""Files, orders and blends against megatron-core itself, where it is installed (0.16.1 was used)."""

import random

import numpy as np
import pytest

from steelyard.data.mixture import Mixture
from steelyard.data.order import SPLITS, Order, split_bounds
from steelyard.data.store import Dataset, Writer

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """Megatron asks which rank it is before it builds a blend."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


class Tokenizer:
    unique_identifiers = {"class": "none"}
    eod, eos, pad, vocab_size = 0, 0, 60000, 60001


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_files_are_equal_both_ways(dtype, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    documents = [[np.arange(i % 7 + j + 1) for j in range(i % 3 + 1)] for i in range(20)]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for document in documents:
        builder.add_document(torch.tensor(np.concatenate(document)), [len(s) for s in document])
    builder.finalize(str(tmp_path / "theirs.idx"))
    with Writer(tmp_path / "ours", dtype) as writer:
        for document in documents:
            writer.add_document(document)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    theirs, ours = IndexedDataset(str(tmp_path / "ours"), multimodal=False, mmap=True), Dataset(tmp_path / "theirs")
    assert len(ours) == len(theirs) and all(np.array_equal(ours[i], theirs[i]) for i in range(len(ours)))


@pytest.mark.parametrize("seed", range(60))
def test_samples_are_equal(seed, tmp_path):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    drawn = random.Random(seed)
    count, seq_length = drawn.randint(1, 5), drawn.choice([4, 16, 33, 64])
    split, asked = drawn.choice(["90,5,5", "80,10,10", "1,1,1"]), [drawn.randint(1, n) for n in (2000, 300, 60)]
    weights = [drawn.choice([drawn.random(), 0.5, 1.0, 3.0]) for _ in range(count)] if drawn.random() < 0.7 else None
    prefixes = [str(tmp_path / f"data{i}") for i in range(count)]
    for prefix in prefixes:
        with Writer(prefix, np.uint16) as writer:
            for _ in range(drawn.randint(30, 120)):
                writer.add_document([[drawn.randrange(50000) for _ in range(drawn.randint(1, 60))]])
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, blend=(prefixes, weights), split=split, tokenizer=Tokenizer(),
        path_to_cache=str(tmp_path / "theirs"), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False,
    )  # fmt: skip
    try:
        theirs = BlendedMegatronDatasetBuilder(GPTDataset, asked, lambda: True, config).build()
    except (IndexError, AssertionError) as failure:
        pytest.skip(f"Megatron cannot build this case: {failure!r}")
    datasets = [Dataset(prefix) for prefix in prefixes]
    for i in range(len(SPLITS)):

        def order(number, samples, i=i):
            bounds = split_bounds(split, len(datasets[number]))[i]
            return Order(datasets[number], bounds, seq_length, seed, samples, tmp_path / "ours", True)

        plain = weights is None and count == 1
        ours = order(0, asked[i]) if plain else Mixture(weights, asked[i], count, order, tmp_path / "ours", True)
        assert len(ours) == len(theirs[i])
        stream = np.empty(seq_length + 1, np.int64)
        for number in range(0, len(ours), 7):
            part, inside = ours.at(number)
            part.read(inside, stream)
            assert np.array_equal(theirs[i][number]["tokens"].numpy(), stream[:-1])
            assert np.array_equal(theirs[i][number]["labels"].numpy(), stream[1:])
