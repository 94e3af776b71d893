"""Autograd in bytes: tensors that have a size and no values, and the order in which a backward pass lets them go.

A network written down in these operations (predict/network.py) allocates, saves and frees what PyTorch's does, so its
peak needs no list of moments. Memory is freed as there: when the last reference to it is gone, so a local name that
lives on, or a variable that a closure keeps, is a tensor that stays.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


class Ledger:
    """Bytes alive by term, and what they were when there were most of them since `reset`."""

    def __init__(self) -> None:
        self.now, self.peak = 0, 0
        self.terms: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}

    def add(self, term: str, size: int) -> None:
        self.now += size
        self.terms[term] = self.terms.get(term, 0) + size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.terms)

    def reset(self) -> None:
        self.peak, self.at_peak = self.now, dict(self.terms)


class Storage:
    """Bytes that are alive as long as something refers to them."""

    __slots__ = ("ledger", "size", "term")

    def __init__(self, ledger: Ledger, term: str, size: int):
        self.ledger, self.term, self.size = ledger, term, size
        ledger.add(term, size)

    def __del__(self) -> None:
        self.ledger.add(self.term, -self.size)


# From the gradients of what an operation made, those of its inputs.
Backward = Callable[..., Sequence[Storage | None]]


@dataclass(eq=False)
class Node:
    """An operation of a forward pass: where the gradients of its inputs go, how they are made (None: as they are, for a
    view), and what it saved for that."""

    inputs: "tuple[Edge | None, ...]"
    backward: Backward | None
    saved: Any
    order: int
    outputs: int = 1


Edge = tuple[Node, int]  # an operation, and which of its outputs


@dataclass(eq=False)
class Var:
    """A tensor: its storage, its size (a view's may differ from its storage's), and what made it."""

    storage: Storage
    size: int
    edge: Edge | None = None


class _Stop(Exception):
    """A repeated forward pass has made all that is saved."""


@dataclass(eq=False)
class _Frame:
    """A checkpointed function: its operations save nothing, and the first of them that asks runs it again, up to the
    last saved tensor (as PyTorch's non-reentrant checkpoint)."""

    function: Callable[..., Var]
    inputs: list[Var]
    total: int = 0
    made: dict[int, tuple[Storage, ...]] = field(default_factory=dict)
    again: bool = False


class Tape:
    """Records the operations of a forward pass and plays them backward."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._order = 0
        self._frame: _Frame | None = None

    def new(self, term: str, size: int) -> Storage:
        if self._frame and self._frame.again and term.startswith("activations."):
            term = "recomputed"
        return Storage(self.ledger, term, size)

    def touch(self, *sizes: int, term: str = "backward") -> None:
        """Short-lived tensors of an operation: sizes that come (positive) and go (negative), in order."""
        for size in sizes:
            self.ledger.add(term, size)
        self.ledger.add(term, -sum(sizes))

    def save(self, *storages: Storage) -> Any:
        """What an operation keeps for its backward pass; to be called before it makes what it does not keep."""
        frame = self._frame
        if frame is None or not storages:
            return storages
        if not frame.again:
            frame.total += 1
            return frame, frame.total - 1
        frame.made[len(frame.made)] = storages
        if len(frame.made) == frame.total:
            raise _Stop
        return ()

    def record(
        self, inputs: Sequence[Var], made: Storage, size: int, backward: Backward | None, saved: Any = ()
    ) -> Var:
        """The tensor an operation made."""
        return self.split(inputs, [(made, size)], backward, saved)[0]

    def split(
        self, inputs: Sequence[Var], made: Sequence[tuple[Storage, int]], backward: Backward | None, saved: Any = ()
    ) -> list[Var]:
        """All tensors of an operation that makes several."""
        if self._frame and self._frame.again:
            return [Var(storage, size) for storage, size in made]
        self._order += 1
        node = Node(tuple(v.edge for v in inputs), backward, saved, self._order, len(made))
        return [Var(storage, size, (node, index)) for index, (storage, size) in enumerate(made)]

    def leaf(self, storage: Storage, sink: list[Storage]) -> Var:
        """An input of the network, whose gradient ends in `sink`."""

        def arrive(grad: Storage) -> Sequence[Storage | None]:
            sink.append(grad)
            return ()

        return Var(storage, storage.size, (Node((), arrive, (), 0), 0))

    def checkpoint(self, function: Callable[..., Var], *inputs: Var) -> Var:
        """Run a function that keeps its inputs only and is run again in the backward pass."""
        self._frame = _Frame(function, [Var(v.storage, v.size) for v in inputs])
        made = function(*inputs)
        self._frame = None
        return made

    def _unpack(self, saved: Any) -> Any:
        if not saved or not isinstance(saved[0], _Frame):
            return saved
        frame, number = saved
        if not frame.again:
            frame.again, self._frame = True, frame
            with suppress(_Stop):
                frame.function(*frame.inputs)
            self._frame = None
        return frame.made.pop(number)

    def backward(self, root: Var, grad: Storage) -> None:
        """From the gradient of `root`, through operations in the reverse of their order. Gradients that meet are added
        into a new tensor."""
        assert root.edge
        waiting: dict[int, tuple[Node, list[Storage | None]]] = {}
        self._arrive(waiting, root.edge, grad)
        del root, grad
        while waiting:
            node, grads = waiting.pop(max(waiting))
            held = self._unpack(node.saved)
            found = list(node.backward(*grads)) if node.backward else [*grads] * len(node.inputs)
            edges, node.saved, node.backward = node.inputs, (), None
            del held, node
            grads.clear()
            for edge in edges:
                mine = found.pop(0)
                if edge is not None and mine is not None:
                    self._arrive(waiting, edge, mine)
                del mine

    def _arrive(self, waiting: dict[int, tuple[Node, list[Storage | None]]], edge: Edge, grad: Storage) -> None:
        node, index = edge
        slots = waiting.setdefault(node.order, (node, [None] * node.outputs))[1]
        there = slots[index]
        slots[index] = grad if there is None else self.new("backward", grad.size)
