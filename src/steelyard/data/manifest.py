"""What a token file was made from: `PREFIX.json` beside `PREFIX.bin` and `PREFIX.idx`."""

import dataclasses
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steelyard.data.store import Writer
from steelyard.spec.errors import UserError, error

VERSION = 1
MOST_EXAMPLES = 10


@dataclass
class Manifest:
    """Counts are of this file; `skipped` counts bad inputs by reason, `examples` names the first few."""

    tokenizer: str
    tokenizer_hash: str
    vocab_size: int
    eod: int | None
    append_eod: bool
    field: str
    dtype: str
    documents: int = 0
    tokens: int = 0
    read: int = 0  # lines and text files that hold something, bad ones and empty documents included
    empty: int = 0  # documents without text, left out
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: list[str] = dataclasses.field(default_factory=list)
    inputs: list[str] = dataclasses.field(default_factory=list)
    shard: tuple[int, int] | None = None
    highest_id: int = -1  # that occurs; -1 without a token
    bin_sha256: str = ""
    version: int = VERSION

    @property
    def num_skipped(self) -> int:
        return sum(self.skipped.values())

    def describe(self) -> str:
        """One line for people, one more per reason for which inputs were skipped."""
        lines = [f"{self.read:,} read, {self.empty:,} empty skipped, {self.num_skipped:,} bad skipped: "
                 f"{self.documents:,} documents, {self.tokens:,} tokens ({self.dtype})"]  # fmt: skip
        lines += [f"  {count:,} skipped: {reason}" for reason, count in sorted(self.skipped.items())]
        lines += [f"    {example}" for example in self.examples]
        return "\n".join(lines)


def conclude(writer: Writer, prefix: str | Path, manifest: Manifest | None) -> None:
    """Complete a manifest from what was written, and have it written before the index is; None removes an old one."""
    if manifest is None:
        writer.before_index = lambda: path(prefix).unlink(missing_ok=True)
        return
    manifest.documents, manifest.tokens = writer.num_documents, writer.num_tokens
    manifest.highest_id, manifest.bin_sha256 = writer.highest_id, writer.sha256
    writer.before_index = partial(write, prefix, manifest)


def path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def read(prefix: str | Path) -> Manifest:
    """The manifest beside a token file. Raises UserError D019 when there is none or it cannot be read."""
    place = path(prefix)
    try:
        values: dict[str, Any] = json.loads(place.read_text("utf-8"))
        if values.get("version") != VERSION:
            raise error("D019", place=str(place), detail=f"it is of version {values.get('version')}, not {VERSION}")
        shard = values.pop("shard")
        return Manifest(**values, shard=tuple(shard) if shard else None)
    except OSError as failure:
        raise error("D019", place=str(place), detail=failure.strerror or str(failure)) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise error("D019", place=str(place), detail="it is not a manifest") from None


def find(prefix: str | Path) -> Manifest | None:
    """The same, None where there is none that can be read."""
    try:
        return read(prefix)
    except UserError:
        return None


def write(prefix: str | Path, manifest: Manifest) -> None:
    """Replace the manifest at once."""
    partial = Path(f"{prefix}.json.partial")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(manifest), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path(prefix))
