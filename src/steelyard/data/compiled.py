"""Loops that are compiled on first use and kept on disk for every later process."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as machine code from its first call on.

    The compiler takes 80 MiB and a quarter of a second to load, so a process that only reads what another built never
    does. Where no folder can be written to keep the machine code in, each process compiles it anew.
    """

    @cache
    def machine_code() -> Callable[..., Any]:
        from numba import njit

        try:
            return njit(cache=True, nogil=True)(function)
        except RuntimeError:
            return njit(nogil=True)(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return machine_code()(*arguments)

    return call
