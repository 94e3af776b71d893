"""How fast tokens are ordered, read and made, against what people use today.

    python benchmarks/data.py                              # everything, against loops of our own
    python benchmarks/data.py --megatron-python PATH       # a Python that has megatron-core (0.16.1 was used)

The index is built by one process per repetition, the two sides in turn; times are of the build alone, the compiled code
loaded, the files' pages warm. Peak memory is of the build alone, pages of mapped files included.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

DOCUMENTS, MEAN_TOKENS, SEQ_LENGTH = 10_000_000, 1000, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron-python", default="", help="a Python in which `import megatron.core` works")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("index", "blend", "tokenise", "memory", "sample", "open"))
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        run_arm(*options.arm)
        return
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "index": index,
            "blend": blend,
            "tokenise": tokenise,
            "memory": memory,
            "sample": sample,
            "open": opening,
        }
        for name, part in parts.items():
            if options.only in (None, name):
                part(Path(folder), options)


def spread(values: list[float], unit: str, digits: int = 3) -> str:
    return f"{statistics.median(values):.{digits}f} {unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


# --- the index --------------------------------------------------------------------------------------------------------


def sparse_dataset(folder: Path, documents: int, mean: int) -> Path:
    """A data set of random lengths whose tokens are a hole in the file: only lengths matter to the order."""
    from steelyard.data.store import HEADER, MAGIC

    prefix = folder / f"sparse-{documents}"
    lengths = np.random.default_rng(0).integers(1, 2 * mean, documents, dtype=np.int32)
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        file.write(lengths.tobytes() + offsets.tobytes() + np.arange(documents + 1, dtype=np.int64).tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * 2)
    return prefix


def index(folder: Path, options: argparse.Namespace) -> None:
    prefix = sparse_dataset(folder, options.documents, MEAN_TOKENS)
    other = "megatron" if options.megatron_python else "loop"
    python = {"steelyard": sys.executable, other: options.megatron_python or sys.executable}
    found: dict[str, list[dict]] = {name: [] for name in python}
    for repetition in range(options.repeat + 1):  # the first warms pages and compiles
        for name, executable in python.items():
            cache = folder / "cache"
            command = [executable, __file__, "--arm", name, json.dumps([str(prefix), str(cache)])]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if repetition:
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
            shutil.rmtree(cache)
    digests = {arm["sha256"] for arms in found.values() for arm in arms}
    assert len(digests) == 1, "the two sides built different indices"
    tokens = int(os.path.getsize(f"{prefix}.bin")) // 2
    print(f"index of {options.documents:,} documents, {tokens:,} tokens, sequence {SEQ_LENGTH}: files equal in content")
    for name, arms in found.items():
        seconds, peak = [arm["seconds"] for arm in arms], max(arm["peak"] for arm in arms)
        print(f"  {name:10} {spread(seconds, 's')}, peak {peak / 2**20:.0f} MiB = {peak / arms[0]['arrays']:.2f} x the "
              f"arrays ({arms[0]['arrays'] / 2**20:.0f} MiB)")  # fmt: skip
    ratio = [b["seconds"] / a["seconds"] for a, b in zip(found["steelyard"], found[other], strict=True)]
    print(f"  steelyard is {spread(ratio, 'x as fast', 2)}, pair by pair")


def run_arm(name: str, arguments: str) -> None:
    prefix, cache = json.loads(arguments)
    build = {"steelyard": build_steelyard, "megatron": build_megatron, "loop": build_loop, "prepare": run_prepare}[name]
    print(json.dumps(build(prefix, cache)))


class Measured:
    """Seconds, and the growth of resident memory at its peak, of a block."""

    def __enter__(self) -> "Measured":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.before, self.start = memory_of("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.peak = time.perf_counter() - self.start, memory_of("VmHWM") - self.before


def memory_of(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def report(measured: Measured, arrays: list[np.ndarray]) -> dict:
    """The three indices are compared by content, document, sample, shuffle in this order."""
    import hashlib

    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    size = sum(array.nbytes for array in arrays)
    return {"seconds": measured.seconds, "peak": measured.peak, "arrays": size, "sha256": digest.hexdigest()}


def warm(prefix: str) -> None:
    Path(f"{prefix}.idx").read_bytes()


def samples_asked(prefix: str) -> int:
    """One epoch."""
    return (os.path.getsize(f"{prefix}.bin") // 2 - 1) // SEQ_LENGTH


def build_steelyard(prefix: str, cache: str) -> dict:
    from steelyard.data.order import Order
    from steelyard.data.store import Dataset

    warm(prefix)
    small = sparse_dataset(Path(prefix).parent, 10_000, 10)
    for samples in (10, 100_000):  # loads the compiled code
        Order(Dataset(small), (0, 10_000), 16, 1, samples, f"{cache}-warm", True)
    shutil.rmtree(f"{cache}-warm")
    with Measured() as measured:
        dataset = Dataset(prefix)
        built = Order(dataset, (0, len(dataset)), SEQ_LENGTH, 1234, samples_asked(prefix), cache, True)
    return report(measured, [built.document_index, built.sample_index, built.shuffle_index])


def build_loop(prefix: str, cache: str) -> dict:
    """What a direct translation of the rules does: NumPy's shuffles and one compiled sequential loop."""
    from numba import njit

    from steelyard.data.store import Dataset

    @njit
    def rows(lengths, documents, seq_length, samples):  # type: ignore[no-untyped-def]
        found = np.zeros((samples + 1, 2), np.int32)
        place = offset = 0
        for j in range(1, samples + 1):
            left = seq_length
            while left:
                here = min(left, lengths[documents[place]] - offset)
                left, offset = left - here, offset + here
                if offset == lengths[documents[place]]:
                    place, offset = place + 1, 0
            found[j, 0], found[j, 1] = place, offset
        return found

    warm(prefix)
    rows(np.full(9, 9, np.int32), np.arange(9, dtype=np.int32), 4, 2)
    Path(cache).mkdir()
    with Measured() as measured:
        lengths = np.array(Dataset(prefix).lengths)
        random = np.random.RandomState(1234)
        documents = np.arange(len(lengths), dtype=np.int32)
        random.shuffle(documents)
        samples = rows(lengths, documents, SEQ_LENGTH, samples_asked(prefix))
        shuffle = np.arange(len(samples) - 1, dtype=np.uint32)
        random.shuffle(shuffle)
        for name, array in (("documents", documents), ("samples", samples), ("shuffle", shuffle)):
            np.save(f"{cache}/{name}.npy", array)
    return report(measured, [documents, samples, shuffle])


def build_megatron(prefix: str, cache: str) -> dict:
    import warnings

    warnings.simplefilter("ignore")
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        unique_identifiers = {"class": "none"}
        eod, eos, pad, vocab_size = 0, 0, 1, 50000

    def build(path: str, sequences: int, samples: int, length: int, folder: str) -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=1234, sequence_length=length, blend=([path], None), split="1,0,0", path_to_cache=folder,
            tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        )  # fmt: skip
        data = IndexedDataset(path, multimodal=False, mmap=True)
        return GPTDataset(data, path, np.arange(sequences, dtype=np.int32), samples, Split.train, config)

    warm(prefix)
    small = str(Path(prefix).parent / "sparse-10000")
    build(small, 10_000, 10, 16, f"{cache}-warm")
    shutil.rmtree(f"{cache}-warm")
    documents = (os.path.getsize(f"{prefix}.idx") - 42) // 20
    with Measured() as measured:
        built = build(prefix, documents, samples_asked(prefix), SEQ_LENGTH, cache)
    return report(measured, [built.document_index, built.sample_index, built.shuffle_index])


def blend(folder: Path, options: argparse.Namespace) -> None:
    from steelyard.data.mixture import choices

    weights = [0.19, 0.17, 0.15, 0.13, 0.11, 0.09, 0.07, 0.05, 0.03, 0.01]
    choices(weights, 10)
    seconds = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        choices(weights, 200_000)
        seconds.append(time.perf_counter() - start)
    print(f"blend of 200,000 samples from 10 data sets: {spread(seconds, 's', 4)}")


# --- tokenising -------------------------------------------------------------------------------------------------------


def corpus(folder: Path, pattern: str = "*.py", repeat: int = 1) -> Path:
    """JSON lines of at most 3,000 characters, from this Python's own sources; `repeat` times over."""
    path = folder / f"corpus-{repeat}.jsonl"
    sources = sorted(Path(os.__file__).parent.glob(pattern))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(repeat):
            for source in sources:
                text = source.read_text("utf-8", errors="replace")
                for start in range(0, len(text), 3000):
                    file.write(json.dumps({"text": text[start : start + 3000]}) + "\n")
    return path


def tokenise(folder: Path, options: argparse.Namespace) -> None:
    """Both sides on one core; ours includes checking, writing and syncing the files."""
    import tokenizers

    from steelyard.data.documents import texts
    from steelyard.data.inputs import find
    from steelyard.data.prepare import prepare
    from steelyard.data.store import Dataset
    from steelyard.data.tokenizer import train_bpe

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    path, name = corpus(folder, "[!s]*/*.py"), str(folder / "tokenizer.json")
    train_bpe(texts(find([path]), "text"), 32000, name)
    engine = tokenizers.Tokenizer.from_file(name)
    ratios, plain, ours, documents = [], [], [], 0
    for _ in range(options.repeat):
        start = time.perf_counter()
        with open(path, encoding="utf-8") as file:
            expected = [engine.encode(json.loads(line)["text"]).ids for line in file]
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        prepare([path], folder / "made", name, append_eod=False, workers=1)
        ours.append(time.perf_counter() - start)
        ratios.append(plain[-1] / ours[-1])
        made = Dataset(folder / "made")
        documents = len(expected)
        assert len(made) == documents and all(np.array_equal(made[i], ids) for i, ids in enumerate(expected)), (
            "the ids differ"
        )
    print(
        f"tokenising {documents:,} documents, {path.stat().st_size / 2**20:.1f} MiB, BPE of 32,000, one core, ids equal"
    )
    print(f"  plain loop {spread([documents / s for s in plain], 'documents/s', 0)}")
    print(f"  steelyard  {spread([documents / s for s in ours], 'documents/s', 0)}, files written")
    print(f"  steelyard is {spread(ratios, 'x as fast', 2)}, pair by pair")
    start = time.perf_counter()
    prepare([path], folder / "made", name)
    print(
        f"  all {os.cpu_count()} cores: {documents / (time.perf_counter() - start):,.0f} documents/s, starting included"
    )


def run_prepare(path: str, folder: str) -> dict:
    from steelyard.data.prepare import prepare

    prepare([f"{folder}/corpus-1.jsonl"], f"{folder}/made", "byte", workers=1)
    with Measured() as measured:
        prepare([path], f"{folder}/made", "byte", workers=1)
    return {"peak": measured.peak}


def memory(folder: Path, _: argparse.Namespace) -> None:
    corpus(folder)
    for repeat in (4, 16, 64):
        path = corpus(folder, repeat=repeat)
        command = [sys.executable, __file__, "--arm", "prepare", json.dumps([str(path), str(folder)])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak = json.loads(done.stdout)["peak"]
        print(
            f"preparing {path.stat().st_size / 2**20:6.0f} MiB takes {peak / 2**20:5.1f} MiB more than one pass before"
        )
        path.unlink()


# --- reading ----------------------------------------------------------------------------------------------------------


def sample(folder: Path, options: argparse.Namespace) -> None:
    from steelyard.data.order import Order
    from steelyard.data.store import Dataset, Writer

    random = np.random.default_rng(0)
    for mean in (1000, 50):
        with Writer(folder / "real", np.uint16) as writer:
            for length in random.integers(1, 2 * mean, 20_000_000 // mean):
                writer.add_document([random.integers(0, 50000, length, dtype=np.uint16)])
        dataset = Dataset(folder / "real")
        order = Order(dataset, (0, len(dataset)), SEQ_LENGTH, 1, None, folder / "orders", True)
        out = np.empty(SEQ_LENGTH + 1, np.int64)
        for number in range(len(order)):
            order.read(number, out)
        seconds = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            for number in range(len(order)):
                order.read(number, out)
            seconds.append((time.perf_counter() - start) / len(order) * 1e6)
        print(f"a sample of {SEQ_LENGTH} tokens, documents of {mean} on average, warm file: {spread(seconds, 'us', 1)}")


def opening(folder: Path, options: argparse.Namespace) -> None:
    from steelyard.data.order import Order
    from steelyard.data.store import Dataset

    prefix = sparse_dataset(folder, 1_000_000, MEAN_TOKENS)
    Order(Dataset(prefix), (0, 1_000_000), SEQ_LENGTH, 1, None, folder / "opened", True)
    seconds = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        dataset = Dataset(prefix)
        order = Order(dataset, (0, 1_000_000), SEQ_LENGTH, 1, None, folder / "opened", False)
        order.read(0, np.empty(SEQ_LENGTH + 1, np.int64))
        seconds.append(time.perf_counter() - start)
    print(
        f"opening {len(dataset.tokens):,} tokens in 1,000,000 documents to the first sample: {spread(seconds, 's', 4)}"
    )


if __name__ == "__main__":
    main()
