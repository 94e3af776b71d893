"""The parts of a run's model, each played once: what its forward and its backward pass do to memory."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from steelyard.predict.network import Network, Sizes
from steelyard.predict.tape import Storage, Var
from steelyard.predict.timeline import Span, Terms, span
from steelyard.spec.run import Run


class Played(NamedTuple):
    """The spans of a part. A group of blocks has its forward pass block by block; its backward pass, where blocks are
    run again, as that of all but the last, and then the last one's second run and all blocks' passes, in order."""

    forward: list[Span]
    backward: list[Span]


class Parts:
    """The spans of a run's parts. A backward pass is whole, or `put_off`: its halves, and what goes with the graph
    after them."""

    def __init__(self, run: Run, host: bool):
        self._run, self._host, self.size = run, host, Sizes.of(run, host)
        self._played: dict[tuple[object, ...], Played] = {}
        # a pipeline's chunks that are alike share their actions
        self.made: dict[tuple[int | bool, ...], dict[tuple[str, bool, int, bool], Span]] = {}

    def embedding(self, keep: bool) -> Played:
        return self._once(("embedding", keep), lambda net: play("embedding", net, net.embedding))

    def loss(self, keep: bool, put_off: bool = False) -> Played:
        return self._once(
            ("loss", keep, put_off), lambda net: play("loss", net, net.loss, "activations.norm", put_off=put_off)
        )

    def group(
        self,
        count: int,
        checkpointed: bool,
        keep: bool,
        received: bool = False,
        answered: bool = False,
        put_off: bool = False,
    ) -> Played:
        """`received`, `answered`: at the beginning or the end of a pipeline stage, whose schedule holds on to the input
        or to the result's gradient."""

        def run(net: Network) -> Played:
            term = "boundary" if received else "activations.norm"
            return play("block", net, partial(net.group, count, checkpointed), term, (received, answered), put_off)

        return self._once(("block", keep, count, checkpointed, received, answered, put_off), run)

    def _once(self, key: tuple[str, bool, *tuple[object, ...]], run: Callable[[Network], Played]) -> Played:
        """Played with a network of its own; `key`: the part, whether gradients of weights stay, and the rest."""
        if key not in self._played:
            self._played[key] = run(Network(self._run, self._host, key[1]))
        return self._played[key]


def play(
    name: str,
    net: Network,
    forward: Callable[..., Var],
    incoming: str = "",
    outside: tuple[bool, bool] = (False, False),
    put_off: bool = False,
) -> Played:
    """The forward and the backward pass of a part; `incoming`: the term of the hidden state it is given. `outside`:
    whether others hold on to that state, and to the gradient of what the part makes. `put_off`: the backward pass in
    its halves, and what goes with the graph after them."""
    tape, ledger, sink = net.tape, net.tape.ledger, list[Storage]()
    found: list[Span] = []
    before: Terms = {}

    def begin() -> None:
        ledger.reset()
        before.clear()
        before.update(ledger.terms)

    def end(name: str) -> None:
        def beyond(terms: Terms) -> Terms:
            return {k: v - before.get(k, 0) for k, v in terms.items() if v != before.get(k, 0)}

        found.append(span(name, beyond(ledger.terms), beyond(ledger.at_peak)))

    def between(name: str) -> None:
        end(name)
        begin()

    if name == "embedding" and net.tied_here:
        net.head = [Storage(ledger, "loss.gradients", net.size.rows * net.spec.hidden_size * net.size.width)]
    inputs = [tape.leaf(Storage(ledger, incoming, net.size.residual), sink)] if incoming else []
    held = [v.storage for v in inputs] if outside[0] else []
    net.between = partial(between, "forward")
    begin()
    made = forward(*inputs)
    inputs.clear()
    between("loss" if name == "loss" else "forward")
    passed = len(found)
    # what comes after has let go of the result by now, and its gradient is there
    made.storage = Storage(ledger, "backward", net.size.residual if name != "loss" else 0)
    grad, root = [made.storage], [made]
    held += grad if outside[1] else []
    del made.storage, made
    net.between = partial(between, "backward")
    begin()
    if not put_off:
        tape.backward(root.pop(), grad.pop())
        end("embedding" if name == "embedding" else "backward")
        return Played(found[:passed], found[passed:])
    waiting = tape.inputs(root[0], grad.pop())
    if outside[1]:
        held[-1].become("backward")
    if outside[1] or name == "loss":  # no part after it in the stage holds on to its graph
        root.clear()
    between("backward")
    tape.weights(waiting)
    between("backward")
    root.clear()
    end("backward")
    return Played(found[:passed], found[passed:])
