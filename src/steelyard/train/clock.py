"""Where the time goes: phases of a step, rates, and the time left."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Beat = Callable[[str], None]


class Clock:
    """Wall time by phase since the last `lap`. `beat` is told the name of every phase that begins."""

    def __init__(self, beat: Beat | None = None):
        self.started = time.monotonic()
        self._beats = [beat] if beat else []
        self._phases: dict[str, float] = defaultdict(float)
        self._recent: deque[float] = deque(maxlen=20)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        for beat in self._beats:
            beat(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] += time.perf_counter() - began

    @contextmanager
    def told(self, beat: Beat) -> Iterator[None]:
        """Another one is told of phases for a while."""
        self._beats.append(beat)
        try:
            yield
        finally:
            self._beats.remove(beat)

    def lap(self, seconds: float) -> dict[str, float]:
        """Close a step that took `seconds`: its seconds by phase."""
        phases, self._phases = dict(self._phases), defaultdict(float)
        self._recent.append(seconds)
        return phases

    def remaining(self, steps: int) -> float:
        """Seconds for `steps` more steps at the median pace of the recent ones; 0 before the first."""
        if not self._recent:
            return 0.0
        return steps * sorted(self._recent)[len(self._recent) // 2]

    @property
    def minutes(self) -> float:
        """Minutes since the run began."""
        return (time.monotonic() - self.started) / 60
