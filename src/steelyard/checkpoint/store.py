"""Checkpoint folders on disk: what makes one complete, which is newest, and what is thrown away.

    checkpoints/
        latest                    the name of the checkpoint sealed last; never names one that is not complete
        step-0000100/
            shard-*.safetensors   tensors by global name (weights.NAME, mean.NAME, variance.NAME), in any sharding
            state.json            what is not a tensor
            run.toml              the run that saved it
            complete.json         written last: every other file with its size and checksum, a serial number, and the
                              tensors of which ranks held unequal copies

A save is written into `.step-N.part` and renamed once it is whole. Names with a leading dot are never read, only put
right by `recover`: every state that a kill can leave has a whole checkpoint under one name or the other. Nothing that
executes is stored, and nothing is unpickled.
"""

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.spec.errors import UserError, error

COMPLETE = "complete.json"
LATEST = "latest"
BLOCK = 1 << 20


@dataclass(frozen=True)
class File:
    """A sealed file: its size, and the CRC-32 of its content (None in a checkpoint that has no checksums)."""

    bytes: int
    crc32: int | None


@dataclass(frozen=True)
class Skipped:
    """A folder that looks like a checkpoint and cannot be loaded, and why."""

    path: Path
    why: str


# --- writing ---------------------------------------------------------------------------------------------------------


def final_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def beside_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written until it is whole."""
    return folder / f".step-{step:07d}.part"


def begin(folder: Path, step: int) -> Path:
    """An empty folder for the checkpoint of a step. Raises OSError."""
    beside = beside_path(folder, step)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def write_file(path: Path, content: bytes) -> File:
    """Write a file through to the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return File(len(content), zlib.crc32(content))


def seal(beside: Path, final: Path, files: dict[str, File], texts: dict[str, str], unequal: Sequence[str] = ()) -> Path:
    """Add the texts, list everything, and give the folder its name, which is returned. `files` are on disk already;
    `unequal` are tensors of which ranks held unequal copies.

    A checkpoint of the same name is replaced: a run that went back has reached the step again. Raises OSError.
    """
    listed = {**files, **{name: write_file(beside / name, text.encode()) for name, text in texts.items()}}
    content = {
        "files": {name: {"bytes": file.bytes, "crc32": file.crc32} for name, file in sorted(listed.items())},
        "serial": 1 + max((_serial(path) for path in _candidates(final.parent)), default=0),
        "unequal": list(unequal),
    }
    write_file(beside / COMPLETE, json.dumps(content, indent=1).encode())
    _sync_folder(beside)
    _put_in_place(beside, final)
    return final


def _put_in_place(beside: Path, final: Path) -> None:
    """Rename, and point to it. Killed in between, `recover` does the rest."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    beside.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    pointer = final.parent / f".{LATEST}.new"
    write_file(pointer, f"{final.name}\n".encode())
    pointer.replace(final.parent / LATEST)
    _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def retain(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints but the `keep` sealed last."""
    for path in [path for path in _candidates(folder) if not problem(path)][:-keep]:
        removed = path.with_name(f".{path.name}.removed")
        with contextlib.suppress(OSError):  # a folder that cannot be removed is only disk space
            path.rename(removed)  # at once no checkpoint any more, however long the removal takes
            shutil.rmtree(removed)


def recover(folder: Path) -> list[str]:
    """Put right what a kill has left; what was done, in words. Only for the holder of the run folder's lock."""
    said = []
    for path in sorted(folder.glob(".step-*")):
        found = re.fullmatch(r"\.(step-\d+)\.(part|replaced|removed)", path.name)
        if not found:
            continue
        final = folder / found[1]
        newer = found[2] == "part" or (found[2] == "replaced" and not final.exists())
        if newer and not problem(path):
            _put_in_place(path, final)
            said.append(f"finished {final}: it was whole, only not renamed")
        else:
            shutil.rmtree(path, ignore_errors=True)
            said.append(f"removed {path}: {'an unfinished save' if found[2] == 'part' else 'a removal cut short'}")
    return said


# --- reading ---------------------------------------------------------------------------------------------------------


def _candidates(folder: Path) -> list[Path]:
    """Folders named like checkpoints, in the order in which they were sealed; where that cannot be read, last."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: (_serial(path) or math.inf, int(path.name.removeprefix("step-"))))


def _serial(path: Path) -> int:
    """From 1 on; 0 where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return int(json.loads((path / COMPLETE).read_text("utf-8"))["serial"])
    return 0


def files(path: Path) -> dict[str, File]:
    """What a checkpoint's complete.json lists. Raises UserError C001 where it cannot be read."""
    try:
        listed = json.loads((path / COMPLETE).read_text("utf-8"))["files"]
        return {str(name): File(int(of["bytes"]), of["crc32"]) for name, of in listed.items()}
    except FileNotFoundError:
        detail = f"{COMPLETE} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        detail = f"{COMPLETE} cannot be read"
    raise error("C001", place=str(path), path=path, detail=detail)


def unequal(path: Path) -> list[str]:
    """Tensors of a complete checkpoint of which ranks held unequal copies when it was saved; one of them is in it."""
    return [str(name) for name in json.loads((path / COMPLETE).read_text("utf-8")).get("unequal", [])]


def problem(path: Path) -> str:
    """Why a folder is not a complete checkpoint, by the sizes of its files; "" where it is."""
    try:
        for name, file in files(path).items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (actual := (path / name).stat().st_size) != file.bytes:
                return f"{name} has {actual:,} bytes instead of {file.bytes:,}"
    except UserError as failure:
        return failure.problems[0].rule.rpartition(": ")[2]
    except OSError as failure:
        return f"it cannot be read: {failure.strerror}"
    return ""


def damage(path: Path, part: int = 0, parts: int = 1) -> str:
    """The first file of a complete checkpoint whose content is not what was sealed; "" where all are.

    Readers that work together each take one of `parts`.
    """
    listed = sorted(files(path).items(), key=lambda entry: -entry[1].bytes)
    for name, file in listed[part::parts]:
        try:
            if file.crc32 is not None and checksum(path / name) != file.crc32:
                return f"the content of {name} is not what was saved (its checksum differs)"
        except OSError as failure:
            return f"{name} cannot be read: {failure.strerror}"
    return ""


def checksum(path: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


def newest_first(path: Path) -> list[Path]:
    """The folders to try for a run folder, a checkpoints folder, or one checkpoint."""
    if path.name.startswith("step-"):
        return [path]
    return _candidates(path / "checkpoints" if (path / "checkpoints").is_dir() else path)[::-1]


def sources(own: Path, asked: Path | None) -> list[Path]:
    """Where a run in the folder `own` may begin, the first choice first: its own checkpoints before those it was asked
    to load, unless these are its own too."""
    if asked is None:
        return [own]
    return [asked] if is_inside(asked, own) else [own, asked]


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it."""
    return folder.resolve() in (path.resolve(), *path.resolve().parents)


def find(path: Path) -> tuple[Path | None, list[Skipped]]:
    """The newest undamaged checkpoint of a run folder or checkpoints folder, or the one given; and what was passed
    over.

    Raises UserError C001 for a single checkpoint that is not complete or damaged.
    """
    skipped: list[Skipped] = []
    for candidate in newest_first(path):
        why = problem(candidate) or damage(candidate)
        if not why:
            return candidate, skipped
        if candidate == path:
            raise error("C001", place=str(path), path=path, detail=why)
        skipped.append(Skipped(candidate, why))
    return None, skipped


def found(path: Path) -> Path:
    """The same where there must be one. Raises UserError C001 or C002."""
    newest, skipped = find(path)
    if newest is None:
        detail = "".join(f"; {entry.path.name} was passed over: {entry.why}" for entry in skipped)
        raise error("C002", place=str(path), path=f"{path}{detail}")
    return newest


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a complete checkpoint. Raises UserError C001."""
    try:
        state = json.loads((path / "state.json").read_text("utf-8"))
        assert isinstance(state, dict)
        return state
    except (OSError, ValueError, AssertionError, RecursionError):
        raise error("C001", place=str(path), path=path, detail="state.json cannot be read") from None
