"""Token files made by formula, runs on them, and how the golden facts hash arrays."""

import hashlib

import numpy as np
import pytest

from steelyard.data.store import Dataset, Writer
from steelyard.spec.load import resolve


@pytest.fixture
def write_dataset(tmp_path):
    """write_dataset(name, lengths) -> Dataset whose token at position p of the file is (7 p + 3) mod vocab_size."""

    def write(name, lengths, vocab_size=50000, dtype="uint16", sequences_per_document=None):
        position, left = 0, iter(lengths)
        with Writer(tmp_path / name, dtype) as writer:
            for count in sequences_per_document or [1] * len(lengths):
                document = []
                for length in (next(left) for _ in range(count)):
                    document.append((7 * np.arange(position, position + length) + 3) % vocab_size)
                    position += length
                writer.add_document(document)
        return Dataset(tmp_path / name)

    return write


@pytest.fixture
def lengths_by_formula():
    def lengths(n, lo, hi, seed):
        found, x = [], seed
        for _ in range(n):
            x = (1103515245 * x + 12345) % 2**31
            found.append(lo + (x // 65536) % (hi - lo + 1))
        return found

    return lengths


@pytest.fixture
def digest():
    """SHA-256 over an array as little-endian int64, row-major."""
    return lambda array: hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()


@pytest.fixture
def make_run(tmp_path):
    """make_run({"train": [...]}, steps=3) -> a small Run on that data: batch 4, sequence length 16."""

    def make(data, evaluation=None, batch=None, seq_length=16, **length):
        values = {
            "model": {
                "num_layers": 1,
                "hidden_size": 8,
                "num_attention_heads": 1,
                "seq_length": seq_length,
                "vocab_size": 500,
            },
            "batch": batch or {"global_batch_size": 4, "micro_batch_size": 1},
            "length": length or {"steps": 3},
            "evaluation": evaluation or {"steps": 0},
            "data": {"cache": str(tmp_path / "cache"), **data},
        }
        return resolve(values).run

    return make


@pytest.fixture
def code_of():
    """code_of(call, ...) -> (code, text) of the one user error that the call raises."""
    from steelyard.spec.errors import UserError

    def code(call, *arguments, **named):
        with pytest.raises(UserError) as raised:
            call(*arguments, **named)
        assert len(raised.value.problems) == 1
        return raised.value.problems[0].code, str(raised.value)

    return code
