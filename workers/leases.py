"""The load charged to targets by turns under way."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.drain import DrainRate


@dataclass(slots=True)
class TargetLoad:
    """queued_tokens: uncached tokens of turns still before their first token; inflight: turns not ended."""

    queued_tokens: int = 0
    inflight: int = 0


class LeaseBook:
    """Charges and returns load. A lease is charged at the instant of the decision, with no await between.

    total: over all targets. clock: steady seconds, for how fast load goes away.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = TargetLoad()
        self._loads: dict[str, TargetLoad] = {}
        self._clock = clock
        self._drain = DrainRate(clock())

    def load(self, target: str) -> TargetLoad:
        """The present load of `target` (zeros if nothing is under way)."""
        return self._loads.get(target) or TargetLoad()

    def take(self, target: str, uncached_tokens: int) -> "Lease":
        load, total = self._loads.get(target), self.total
        if load is None:
            load = self._loads[target] = TargetLoad()
        load.inflight += 1
        load.queued_tokens += uncached_tokens
        total.inflight += 1
        total.queued_tokens += uncached_tokens
        return Lease(self, target, uncached_tokens)

    def settle(self, target: str, *, tokens: int, turns: int) -> None:
        """Return `tokens` and `turns` of `target`; a target without load is forgotten."""
        load, total = self._loads[target], self.total
        load.inflight -= turns
        load.queued_tokens -= tokens
        total.inflight -= turns
        total.queued_tokens -= tokens
        self._drain.ended(self._clock(), turns=turns, tokens=tokens)
        assert load.queued_tokens >= 0
        assert load.inflight >= 0
        if load.inflight == 0:
            del self._loads[target]

    def total_inflight(self) -> int:
        return self.total.inflight

    def wait_s(self, *, turns: int = 0, tokens: int = 0) -> float:
        """Seconds until so many turns and queued tokens will have gone, as fast as they went of late."""
        return self._drain.wait_s(self._clock(), turns=turns, tokens=tokens)


class Lease:
    """One turn's charge on a target. `release` may be called any number of times, from any exit path."""

    __slots__ = ("_book", "_held", "_tokens", "target")

    def __init__(self, book: LeaseBook, target: str, tokens: int) -> None:
        self.target = target
        self._book = book
        self._tokens = tokens
        self._held = True

    def first_token(self) -> None:
        """The prefill is over: its tokens queue no longer, the turn still runs."""
        if self._held and self._tokens:
            self._book.settle(self.target, tokens=self._tokens, turns=0)
            self._tokens = 0

    def release(self) -> None:
        if self._held:
            self._held = False
            self._book.settle(self.target, tokens=self._tokens, turns=1)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
