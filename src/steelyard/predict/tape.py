"""Autograd in bytes: tensors that have a size and no values, and the order in which a backward pass lets them go.

A network written down in these operations (predict/network.py) allocates, saves and frees what PyTorch's does, so its
peak needs no list of moments. Memory is freed as there: when the last reference to it is gone, so a local name that
lives on, or a variable that a closure keeps, is a tensor that stays.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
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

    def become(self, term: str) -> None:
        self.ledger.add(self.term, -self.size)
        self.term = term
        self.ledger.add(term, self.size)

    def __del__(self) -> None:
        self.ledger.add(self.term, -self.size)


# From the gradients of what an operation made, those of its inputs.
Backward = Callable[..., Sequence[Storage | None]]
# The gradients of an operation's weights.
Weigh = Callable[[], list[Storage]]


@dataclass(eq=False)
class Node:
    """An operation of a forward pass: where the gradients of its inputs go, how they are made (None: as they are, for a
    view), what it saved, and how the gradients of its weights are made."""

    inputs: "tuple[Edge | None, ...]"
    backward: Backward | None
    saved: Any
    order: int
    outputs: int = 1
    weigh: Weigh | None = None

    def release(self) -> None:
        self.saved, self.backward, self.weigh = (), None, None


Edge = tuple[Node, int]  # an operation, and which of its outputs
PutOff = tuple[Node, list[Storage | None]]  # an operation with weights, and the gradients that came to it


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
    """A checkpointed function: its operations save nothing, and the first of them that a backward pass asks runs it
    again, up to the last saved tensor (as PyTorch's non-reentrant checkpoint). Passes do not share what they repeat."""

    function: Callable[..., Var]
    inputs: list[Var]
    saved: "list[weakref.ref[_Saved]]" = field(default_factory=list)
    repeats: set[int] = field(default_factory=set)
    again: int = 0  # the pass that is running it again
    made: list[tuple[Storage, ...]] = field(default_factory=list)  # of that pass so far


@dataclass(eq=False)
class _Saved:
    """What an operation of a checkpointed function would have saved: by pass, what was made again and not used yet."""

    frame: _Frame
    made: dict[int, tuple[Storage, ...]] = field(default_factory=dict)


class Tape:
    """Records the operations of a forward pass and plays them backward."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._order = self._pass = 0
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
            saved = _Saved(frame)
            frame.saved.append(weakref.ref(saved))
            return saved
        wanted = frame.saved[len(frame.made)]()
        if wanted:
            wanted.made[frame.again] = storages
        frame.made.append(storages)
        if len(frame.made) == len(frame.saved):
            raise _Stop
        return ()

    def record(
        self,
        inputs: Sequence[Var],
        made: Storage,
        size: int,
        backward: Backward | None,
        saved: Any = (),
        weigh: Weigh | None = None,
    ) -> Var:
        """The tensor an operation made; `weigh`: of an operation with weights."""
        found = self.split(inputs, [(made, size)], backward, saved)[0]
        if found.edge:
            found.edge[0].weigh = weigh
        return found

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
        if not isinstance(saved, _Saved):
            return saved
        frame = saved.frame
        if self._pass not in frame.repeats:
            frame.repeats.add(self._pass)
            frame.again, self._frame = self._pass, frame
            with suppress(_Stop):
                frame.function(*frame.inputs)
            frame.again, self._frame = 0, None
            frame.made.clear()
        return saved.made.pop(self._pass)

    def backward(self, root: Var, grad: Storage) -> None:
        """From the gradient of `root`, through operations in the reverse of their order. Gradients that meet are added
        into a new tensor."""
        walk = self._walk(root, grad)
        del root, grad
        for node, grads in walk:
            if node.weigh:
                node.weigh()
            node.release()
            del node, grads

    def inputs(self, root: Var, grad: Storage) -> list[PutOff]:
        """The first half of a backward pass, as zero-bubble schedules have it: nothing that was saved is let go of, and
        the gradients that came to operations with weights are kept for the second half, which is returned."""
        found: list[PutOff] = []
        walk = self._walk(root, grad)
        del root, grad
        for node, grads in walk:
            if node.weigh:
                found.append((node, list(grads)))
            del node, grads
        for _, grads in found:
            for one in grads:
                if one is not None:
                    one.become("held back")
        return found[::-1]

    def weights(self, put_off: list[PutOff]) -> None:
        """The second half, operation by operation; the gradients of one's weights wait for the next one's."""
        self._pass += 1
        last: list[Storage] = []
        while put_off:
            node, _grads = put_off.pop(0)
            held = self._unpack(node.saved)
            assert node.weigh
            last = node.weigh()
            del held
            node.release()
        del last

    def _walk(self, root: Var, grad: Storage) -> Iterator[tuple[Node, list[Storage | None]]]:
        """Operations whose inputs' gradients have been made, with the gradients that came to them."""
        assert root.edge
        self._pass += 1
        waiting: dict[int, tuple[Node, list[Storage | None]]] = {}
        self._arrive(waiting, root.edge, grad)
        del root, grad
        while waiting:
            node, grads = waiting.pop(max(waiting))
            held = self._unpack(node.saved)
            found = list(node.backward(*grads)) if node.backward else [*grads] * len(node.inputs)
            edges = node.inputs
            yield node, grads
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
