"""Arrays that are built once, under a key of everything that determines them, and read by every rank."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.spec.errors import error

STALE_SECONDS = 86400


def arrays(folder: str | Path, facts: dict[str, Any], build: Callable[[Path], None] | None) -> dict[str, NDArray]:
    """The arrays (memory-mapped, read-only) that `facts` determine, by name; `build(folder)` writes them as .npy.

    A build goes to a folder of its own, which is renamed when everything is in it: a killed build leaves nothing that
    is read later. Without `build` they must be there: UserError D015 if not.
    """
    text = json.dumps(facts, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    place = Path(folder) / key
    if not place.is_dir():
        if build is None:
            raise error("D015", "data.cache", place=str(place))
        _build(place, text, build)
    return {path.stem: np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)) for path in place.glob("*.npy")}


def _build(place: Path, text: str, build: Callable[[Path], None]) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"{place.name}.building-", dir=place.parent))
    except OSError as failure:
        raise error("D016", "data.cache", place=str(place.parent), detail=failure.strerror or str(failure)) from None
    try:
        work.chmod(0o755)
        build(work)
        (work / "facts.json").write_text(text + "\n")
        try:
            os.rename(work, place)
        except OSError:
            if not place.is_dir():  # another process was faster: its arrays are equal
                raise
    except OSError as failure:
        raise error("D016", "data.cache", place=str(place.parent), detail=failure.strerror or str(failure)) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for left in place.parent.glob("*.building-*"):  # by builds that were killed
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
