"""Virtual time: what happens next, in order, and in order of entry where times are equal."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final


class Clock:
    """`now` in seconds from the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: Final[list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]] = []
        self.entries = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self.entries += 1
        heappush(self._heap, (max(when, self.now), self.entries, call, args))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, call, args = heappop(heap)
            call(*args)
