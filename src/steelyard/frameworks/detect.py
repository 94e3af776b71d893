"""Finds out by content what wrote a log, and reads it as a record."""

import re
from importlib import import_module
from pathlib import Path
from typing import Protocol

from steelyard.frameworks.lines import lines
from steelyard.frameworks.megatron import script
from steelyard.frameworks.reading import Reading
from steelyard.frameworks.tensorboard import log as tensorboard
from steelyard.record import read as own
from steelyard.record.schema import Record
from steelyard.spec.errors import error

# Of two that know a log equally well the first reads it.
FOLDERS = (
    "megatron", "megatron_deepspeed", "libai", "gpt_neox", "torchtitan", "nanotron", "nanogpt", "llm_c", "lingua",
    "huggingface", "maxtext", "olmo_core", "litgpt", "nanochat", "llm_foundry", "deepspeed",
)  # fmt: skip
ARGUMENTS = re.compile(r"\s{0,200}(?:--[a-z]|[\[{]\s{0,200}[\"']--[a-z])")
TELLING = 2000  # characters of a line in which a mark stands
SILENCE = 3000  # lines without a new kind of mark after which the answer will not change
# what stands in a folder that another framework left, best source first
FILES = ("log.txt", "output.log", "trainer_state.json", "metrics.jsonl", "train.log", "main.log", "metrics.json")


class LogReader(Protocol):
    """The face of a reader: `feed` takes each line, `finish` what is still held."""

    reading: Reading

    def __init__(self, source: str) -> None: ...
    def feed(self, line: int, text: str) -> None: ...
    def finish(self) -> None: ...


class LogModule(Protocol):
    """The face of a `log.py`: MARKS are patterns that only such a log has."""

    NAME: str
    MARKS: tuple[re.Pattern[str], ...]
    Reader: type[LogReader]


def modules() -> dict[str, LogModule]:
    here = Path(__file__).parent
    return {
        name: import_module(f"steelyard.frameworks.{name}.log")
        for name in FOLDERS
        if (here / name / "log.py").is_file()
    }


def read(path: str | Path) -> Record:
    """A run folder, a one-line record, a run file, Megatron's arguments, or any framework's log or log folder.

    Raises UserError K001 (cannot be opened), K002 (no framework's log), K003 (nothing in it), R001 to R003, S001.
    """
    if isinstance(path, str) and path.lstrip().startswith("{"):
        return own.read_line(path, "command line")
    path = Path(path)
    if own.is_run_folder(path) and (path / "run.toml").is_file():
        return own.read_folder(path)
    if path.is_dir():
        return _folder(path)
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
        if path.suffix == ".toml":
            return _run_file(path)
        if (record := _record(head, path)) is not None:
            return record
        if ARGUMENTS.match(head.decode("utf-8", errors="replace")):
            return _arguments(path)
        return log(path)
    except OSError as failure:
        raise error("K001", place=str(path), path=path, detail=failure.strerror or str(failure)) from None
    except EOFError:
        raise error("K001", place=str(path), path=path, detail="it is cut in the middle of its compression") from None


def _record(head: bytes, path: Path) -> Record | None:
    """The record of a file whose first line is one."""
    first = head.lstrip().split(b"\n", 1)[0]
    if not (first.startswith(b"{") and b'"config"' in first):
        return None
    text = first.decode("utf-8", errors="replace")
    return own.read_line(text, str(path))


def _run_file(path: Path) -> Record:
    """A run before launch: its configuration, each value with its line."""
    from steelyard.spec import load

    loaded = load(path)
    config = loaded.run.model_dump(exclude_none=True)
    given = set(loaded.origins)
    sources = {key: str(loaded.origins[key]) for key in given}
    return Record(loaded.run.engine.framework, str(path), config, sources=sources)


def _arguments(path: Path) -> Record:
    """The arguments of a Megatron-LM run before launch."""
    given = script.read(path)
    notes = [f"{name} is not known and left out" for name in given.unknown]
    return Record("Megatron-LM", str(path), script.values(given), notes=notes)


def _folder(path: Path) -> Record:
    for name in FILES:
        if (path / name).is_file():
            return log(path / name)
    logs = sorted(p for p in path.iterdir() if p.suffix in (".log", ".out", ".txt") and p.is_file())
    if len(logs) == 1:
        return log(logs[0])
    if tensorboard.files(path):
        return tensorboard.read(path)
    found = f"{len(logs)} files that may be logs" if logs else "no log"
    raise error("K001", place=str(path), path=path, detail=f"the folder has {found} and is no run folder")


def log(path: Path) -> Record:
    """A log as a record, one line at a time. Raises UserError K002, K003."""
    if path.suffix == ".json":
        from steelyard.frameworks.huggingface import log as huggingface

        if (record := huggingface.trainer_state(path)) is not None:
            return record
    module = modules()[recognise(path)]
    reader = module.Reader(str(path))
    for number, text in lines(path):
        reader.feed(number, text)
    reader.finish()
    record = reader.reading.record()
    if not (record.steps or record.config.keys() - {"engine"} or record.memory or record.printed):
        raise error("K003", place=str(path), path=path, framework=module.NAME)
    return record


def recognise(path: Path) -> str:
    """The folder of the framework that wrote a log: the one with the most different marks in it. Raises K002."""
    known = modules()
    seen: dict[str, dict[int, int]] = {name: {} for name in known}
    last = 0
    for number, text in lines(path):
        text = text[:TELLING]
        if len(text) < 12 and not text.strip():
            continue
        for name, module in known.items():
            for mark, pattern in enumerate(module.MARKS):
                if seen[name].get(mark, 0) < 3 and pattern.search(text):
                    seen[name][mark] = seen[name].get(mark, 0) + 1
                    last = number
        if last and number - last > SILENCE:
            break
    best = max(known, key=lambda name: (len(seen[name]), sum(seen[name].values())))
    if not seen[best]:
        raise error("K002", place=str(path), path=path, known=", ".join(m.NAME for m in known.values()))
    return best
