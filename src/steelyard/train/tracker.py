"""Bytes of tensors by storage, from the operation that makes one until nothing refers to it: the peak of any stretch of
a program, on real tensors or fake ones."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Lap:
    """The most bytes that were alive in one phase, and which operations had made them."""

    peak: int
    alive: dict[str, int]


class Tracker(TorchDispatchMode):
    """Counts the bytes of every storage that operations make, until it is freed."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        """`there`: tensors that exist already."""
        super().__init__()
        self.current, self.peak = 0, 0
        self.by_operation: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self._known: dict[int, Any] = {}
        for tensor in there:
            self.add(tensor.untyped_storage(), "before")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let it come apart into operations on local pieces, which are seen here
        result = self.call(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.add(leaf.untyped_storage(), str(func))
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation."""
        return func(*args, **kwargs)

    def __enter__(self) -> "Tracker":
        tracker, real = self, torch.UntypedStorage.resize_
        self._resize = real

        def resize_(storage: Any, size: int) -> Any:
            """FSDP gives gathered parameters memory, and takes it back, by the size of their storage."""
            result = real(storage, size)
            if storage._cdata in tracker._known:
                tracker.add(storage, tracker._known[storage._cdata][1])
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def add(self, storage: torch.UntypedStorage, operation: str) -> None:
        """Start counting a storage, or count it again after its size has changed."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            if self._known[key][0] == size:
                return
            self._forget(key)
        self._known[key] = (size, operation, weakref.finalize(storage, self._forget, key))
        self.current += size
        self.by_operation[operation] += size
        if self.current > self.peak:
            self.peak, self.at_peak = self.current, dict(self.by_operation)

    def _forget(self, key: int) -> None:
        size, operation, finalizer = self._known.pop(key, (0, "", None))
        if finalizer is not None:
            finalizer.detach()
        self.current -= size
        self.by_operation[operation] -= size

    def lap(self) -> Lap:
        """The peak since the last call."""
        found = Lap(self.peak, {name: size for name, size in self.at_peak.items() if size})
        self.peak, self.at_peak = self.current, dict(self.by_operation)
        return found
