"""Documents into a token file: read, check, encode in parallel, write in order."""

import fcntl
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.data import inputs as sources
from steelyard.data import manifest as manifests
from steelyard.data import tokenizer as tokenizers
from steelyard.data.documents import Bad, Reader, is_empty
from steelyard.data.inputs import STDIN, Block, Cursor, Input
from steelyard.data.manifest import MOST_EXAMPLES, Manifest
from steelyard.data.store import Position, Writer, can_resume, dtype_for
from steelyard.data.tokenizer import Tokenizer
from steelyard.spec.errors import error

SAVE_SECONDS = 10.0  # between the points from which an interrupted prepare goes on
BYTES_PER_WORKER = 4 << 20  # below it, starting a process costs more than it saves
QUEUED_PER_WORKER = 3


@dataclass(frozen=True)
class Options:
    """What is done to each document; `eod` is the id to append, None for none."""

    tokenizer: str
    field: str
    eod: int | None
    keep_empty: bool
    dtype: str


@dataclass(frozen=True)
class Progress:
    """Bytes of the inputs as they lie on disk (`total` 0 for standard input); seconds of this process."""

    done: int
    total: int
    documents: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Encoded:
    """A block's documents: tokens [all], lengths [documents]; `read` and `empty` are counts."""

    tokens: NDArray
    lengths: NDArray[np.int64]
    read: int
    empty: int
    bad: list[Bad]


def prefix_for(output: str | Path, field: str) -> str:
    """The prefix of the files for an output, as Megatron names them: data/corpus -> data/corpus_text_document."""
    ending = f"_{field}_document"
    return str(output) if str(output).endswith(ending) else f"{output}{ending}"


def prepare(
    inputs: Sequence[str | Path], output_prefix: str | Path, tokenizer: str, *, field: str = "text",
    append_eod: bool = True, workers: int | None = None, on_bad: Literal["stop", "skip"] = "stop",
    keep_empty: bool = False, dtype: str | None = None, shard: tuple[int, int] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:  # fmt: skip
    """Write OUTPUT_PREFIX.bin, .idx and .json (the manifest) from JSON-lines and text files (see `inputs`).

    Documents keep the order of the inputs, whatever the number of `workers` (processes; default: one per core where the
    inputs are large enough). Empty ones are left out and counted, or kept as a lone EOD. `shard` (i, n) takes the i-th
    of n parts. An interrupted call is continued by the same call. Existing files are replaced once all is done.
    Raises UserError D007 (tokenizer), D009 (no EOD), D010 (a bad document, unless `on_bad` is "skip"), D013 (no input),
    D020 (shard), D021 (output in use), D022 (dtype), D023 (unreadable input).
    """
    known = tokenizers.load(tokenizer)
    options, manifest = _plan(known, field, append_eod, keep_empty, dtype, shard)
    files = sources.find(inputs)
    manifest.inputs = [each.path for each in files]
    files = sources.shard(files, *shard) if shard else files
    total = sum(each.size for each in files)
    count = _workers(workers, total, any(each.path == STDIN for each in files))
    prefix = str(output_prefix)
    with _locked(prefix):
        state = _State(prefix, options, files)
        cursor, position, manifest = state.load(manifest)
        blocks = sources.blocks(files, cursor)
        head = list(islice(blocks, 2))  # one block alone is not worth a process
        encoder = _encoder(options, known, count if len(head) > 1 else 1)
        with Writer(prefix, options.dtype, position) as writer, encoder as encode:
            started = time.monotonic()
            for block, encoded in encode(chain(head, blocks)):
                _record_bad(encoded, files, on_bad, manifest)
                manifest.read += encoded.read
                manifest.empty += encoded.empty
                writer.add_sequences(encoded.tokens, encoded.lengths)
                writer.end_documents(np.arange(len(encoded.lengths))[::-1])
                state.save_sometimes(writer, block.after, manifest)
                if progress:
                    seconds = time.monotonic() - started
                    progress(Progress(block.done, total, writer.num_documents, writer.num_tokens, seconds))
            manifests.conclude(writer, prefix, manifest)
        state.remove()
    return manifest


def _plan(
    known: Tokenizer, field: str, append_eod: bool, keep_empty: bool, dtype: str | None, shard: tuple[int, int] | None
) -> tuple[Options, Manifest]:
    """Everything that can be refused before a byte is read."""
    if append_eod and known.eod is None:
        raise error("D009", "--append-eod", name=known.name)
    if shard and not 0 <= shard[0] < shard[1]:
        rule = f"there is no shard {shard[0]} of {shard[1]}"
        raise error("D020", place="--shard", rule=rule, advice="shards are numbered 0/n to n-1/n")
    chosen = np.dtype(dtype) if dtype else dtype_for(known.vocab_size)
    if chosen.kind not in "iu" or known.vocab_size - 1 > np.iinfo(chosen).max:
        raise error("D022", place="--dtype", vocab_size=known.vocab_size, dtype=chosen.name)
    eod = known.eod if append_eod else None
    options = Options(known.name, field, eod, keep_empty, chosen.name)
    manifest = Manifest(
        known.name, known.hash, known.vocab_size, known.eod, append_eod, field, chosen.name, shard=shard
    )
    return options, manifest


def _workers(asked: int | None, total: int, endless: bool) -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = available if asked is None else asked
    return max(1, most if endless else min(most, total // BYTES_PER_WORKER))


def _record_bad(encoded: Encoded, files: list[Input], on_bad: str, manifest: Manifest) -> None:
    for bad in encoded.bad:
        example = len(manifest.examples) < MOST_EXAMPLES
        place = _place(bad, files) if example or on_bad == "stop" else ""
        if on_bad == "stop":
            raise error("D010", place=place, reason=bad.reason)
        kind = bad.reason.partition(":")[0]
        manifest.skipped[kind] = manifest.skipped.get(kind, 0) + 1
        if example:
            manifest.examples.append(f"{place}: {bad.reason}")


def _place(bad: Bad, files: list[Input]) -> str:
    if not bad.line:
        return bad.path
    before = next((sources.lines_before(each) for each in files if each.path == bad.path), 0)
    return f"{'standard input' if bad.path == STDIN else bad.path}:{before + bad.line}"


# --- encoding, in this process or in others ---------------------------------------------------------------------------

Stream = Iterator[tuple[Block, Encoded]]


@contextmanager
def _encoder(options: Options, known: Tokenizer, workers: int) -> Iterator[Callable[[Iterator[Block]], Stream]]:
    """A function from blocks to encoded blocks, in the same order."""
    if workers == 1:
        encode = _Encoder(options, known)
        yield lambda blocks: ((block, encode(block)) for block in blocks)
        return
    context = multiprocessing.get_context("spawn")  # forked processes would inherit locks of the tokenizer's threads
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(options,))
    try:
        yield lambda blocks: _in_parallel(pool, blocks, workers * QUEUED_PER_WORKER)
    except BrokenProcessPool:
        raise error("D024", place="data prepare") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_parallel(pool: ProcessPoolExecutor, blocks: Iterator[Block], most: int) -> Stream:
    """At most `most` blocks are in memory, however large the input."""
    waiting: deque[tuple[Block, Future[Encoded]]] = deque()
    for block in blocks:
        waiting.append((replace(block, parts=[]), pool.submit(_encode_in_worker, block)))
        if len(waiting) >= most:
            done, future = waiting.popleft()
            yield done, future.result()
    while waiting:
        done, future = waiting.popleft()
        yield done, future.result()


_worker_encoder: "list[_Encoder]" = []


def _start_worker(options: Options) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder.append(_Encoder(options, tokenizers.load(options.tokenizer)))
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot end its workers."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _encode_in_worker(block: Block) -> Encoded:
    return _worker_encoder[0](block)


class _Encoder:
    def __init__(self, options: Options, tokenizer: Tokenizer):
        self.options, self.tokenizer = options, tokenizer
        self.reader = Reader(options.field, self.tokenizer)

    def __call__(self, block: Block) -> Encoded:
        documents, bad = self.reader.read(block)
        kept = [document for document in documents if self.options.keep_empty or not is_empty(document)]
        tokens, lengths = self._tokens(kept)
        return Encoded(tokens, lengths, len(documents) + len(bad), len(documents) - len(kept), bad)

    def _tokens(self, documents: list[Any]) -> tuple[NDArray, NDArray[np.int64]]:
        """All tokens, EOD included, and the number of each document's."""
        eod = self.options.eod
        ids = documents if self.reader.takes_ids else self.tokenizer.encode_batch(documents)
        parts = ids if eod is None else [part for each in ids for part in (each, np.array([eod]))]
        tokens = np.concatenate(parts) if parts else np.empty(0)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids)) + (eod is not None)
        return tokens.astype(self.options.dtype), lengths


# --- going on after an interruption -----------------------------------------------------------------------------------


class _State:
    """PREFIX.state.partial: how far an unfinished call has come, and for which work."""

    def __init__(self, prefix: str, options: Options, files: list[Input]):
        self.prefix, self.dtype = prefix, options.dtype
        self.path, self.beside = Path(f"{prefix}.state.partial"), Path(f"{prefix}.state.partial.new")
        self.resumable = all(each.path != STDIN for each in files)
        stamps = [os.stat(each.path).st_mtime_ns if self.resumable else 0 for each in files]
        self.work = json.loads(json.dumps([asdict(options), [asdict(each) for each in files], stamps]))
        self.saved = time.monotonic()

    def load(self, manifest: Manifest) -> tuple[Cursor, Position | None, Manifest]:
        """Where to go on: the start, unless the same work was interrupted."""
        try:
            state = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return Cursor(), None, manifest
        if not self.resumable or state["work"] != self.work:
            return Cursor(), None, manifest
        position = Position(**state["position"])
        if not can_resume(self.prefix, self.dtype, position):
            return Cursor(), None, manifest
        counts = {key: state["manifest"][key] for key in ("read", "empty", "skipped", "examples")}
        return Cursor(**state["cursor"]), position, replace(manifest, **counts)

    def save_sometimes(self, writer: Writer, cursor: Cursor, manifest: Manifest) -> None:
        if not self.resumable or time.monotonic() - self.saved < SAVE_SECONDS:
            return
        state = {"work": self.work, "cursor": asdict(cursor), "position": asdict(writer.position()),
                 "manifest": asdict(manifest)}  # fmt: skip
        self.beside.write_text(json.dumps(state), "utf-8")
        os.replace(self.beside, self.path)
        writer.keep = True
        self.saved = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.beside.unlink(missing_ok=True)


@contextmanager
def _locked(prefix: str) -> Iterator[None]:
    """Keep other processes from preparing the same output. A file system without locks is used without."""
    path = Path(f"{prefix}.lock.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115  closed below
    except OSError as failure:
        raise error("D016", place=str(path.parent), detail=failure.strerror or str(failure)) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error("D021", place=prefix) from None
        except OSError:
            pass
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
