"""The tiny run T1 of the field reports, on text that the tests write themselves."""

import random

import pytest

T1 = """
name = "t1"
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
seq_length = 64
vocab_size = 257
[batch]
global_batch_size = 8
micro_batch_size = 2
[learning_rate]
peak = 1e-3
warmup_steps = 4
decay_steps = 100
[length]
steps = 6
[data]
train = ["{data}"]
split = "949,50,1"
cache = "{folder}/cache"
[evaluation]
steps = 1
[record]
folder = "{folder}/run"
tensorboard = false
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of 40 documents of byte tokens, each ended by id 256."""
    from steelyard.data.prepare import prepare

    folder = tmp_path_factory.mktemp("corpus")
    words = ["the", "run", "that", "a", "plan", "weighs", "is", "the", "run", "that", "a", "rank", "trains"]
    generator = random.Random(0)
    for number in range(40):
        text = " ".join(generator.choice(words) for _ in range(generator.randint(20, 120)))
        (folder / f"{number:02d}.txt").write_text(text)
    prepare([folder], folder / "corpus_text_document", "byte", workers=1)
    return folder / "corpus_text_document"


@pytest.fixture
def t1(tmp_path, corpus):
    """Path of T1's run file; its record goes to tmp_path/run."""
    path = tmp_path / "t1.toml"
    path.write_text(T1.format(data=corpus, folder=tmp_path))
    return path
