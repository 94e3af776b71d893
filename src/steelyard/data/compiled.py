"""Loops that are compiled on first use and kept on disk for every later process."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as machine code. Where no folder can be written to keep it in, each process compiles it anew."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)
