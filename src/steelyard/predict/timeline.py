"""Stretches of a step put one after the other: what is alive at each, and the most of all."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Terms = dict[str, int]


@dataclass(frozen=True)
class Span:
    """A stretch of a step in bytes: what it leaves (or takes away) by term, and what there is beyond its start where it
    is widest. `left` and `most` are their sums."""

    name: str
    net: Mapping[str, int]
    peak: Mapping[str, int]
    left: int
    most: int


def span(name: str, net: Mapping[str, int], peak: Mapping[str, int] | None = None) -> Span:
    peak = net if peak is None else peak
    return Span(name, net, peak, sum(net.values()), max(0, sum(peak.values())))


def moves(name: str, *steps: tuple[str, int]) -> Span:
    """Tensors that come (positive) and go (negative), in order."""
    terms: Terms = {}
    now = most = 0
    widest: Terms = {}
    for term, size in steps:
        terms[term] = terms.get(term, 0) + size
        now += size
        if now > most:
            most, widest = now, dict(terms)
    return Span(name, {k: v for k, v in terms.items() if v}, widest, now, most)


def chain(spans: Iterable[Span]) -> Span:
    """One after the other, as one; it bears the name of the widest."""
    line = Timeline()
    for one in spans:
        line.add(one)
    name, peak = line.widest()
    return Span(name, line.left(), peak, line.now, max(0, sum(peak.values())))


class Timeline:
    """Spans in order. Only sums are kept while it grows; the terms at a peak are added up when asked for."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.now = 0
        self._most: dict[str, tuple[int, int]] = {}  # name -> bytes, index of the span

    def add(self, one: Span) -> None:
        reached = self.now + one.most
        if reached > self._most.get(one.name, (-1, 0))[0]:
            self._most[one.name] = reached, len(self.spans)
        self.spans.append(one)
        self.now += one.left

    def widest(self) -> tuple[str, Terms]:
        """The name of the widest span and the terms alive there; nothing of an empty line."""
        if not self.spans:
            return "", {}
        name = max(self._most, key=lambda name: self._most[name][0])
        return name, self._terms(self._most[name][1])

    def moments(self) -> dict[str, Terms]:
        """What is alive where the spans of each name are widest."""
        return {name: self._terms(index) for name, (_, index) in self._most.items()}

    def left(self) -> Terms:
        """What is alive at the end."""
        found: Terms = {}
        for one in self.spans:
            _merge(found, one.net)
        return {term: size for term, size in found.items() if size}

    def _terms(self, index: int) -> Terms:
        counted: dict[int, tuple[Span, int]] = {}
        for one in self.spans[:index]:
            counted[id(one)] = one, counted.get(id(one), (one, 0))[1] + 1
        found: Terms = {}
        for one, count in counted.values():
            _merge(found, one.net, count)
        _merge(found, self.spans[index].peak)
        return {term: size for term, size in found.items() if size}


def _merge(into: Terms, terms: Mapping[str, int], count: int = 1) -> None:
    for term, size in terms.items():
        into[term] = into.get(term, 0) + count * size
