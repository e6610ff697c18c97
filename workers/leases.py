"""The load charged to targets by turns under way."""

from dataclasses import dataclass


@dataclass(slots=True)
class TargetLoad:
    """queued_tokens: uncached tokens of turns still before their first token; inflight: turns not ended."""

    queued_tokens: int = 0
    inflight: int = 0


class LeaseBook:
    """Charges and returns load. A lease is charged at the instant of the decision, with no await between."""

    def __init__(self) -> None:
        self._loads: dict[str, TargetLoad] = {}

    def load(self, target: str) -> TargetLoad:
        """The present load of `target` (zeros if nothing is under way)."""
        return self._loads.get(target) or TargetLoad()

    def take(self, target: str, uncached_tokens: int) -> "Lease":
        load = self._loads.setdefault(target, TargetLoad())
        load.inflight += 1
        load.queued_tokens += uncached_tokens
        return Lease(self, target, uncached_tokens)

    def settle(self, target: str, *, tokens: int, turns: int) -> None:
        """Return `tokens` and `turns` of `target`; a target without load is forgotten."""
        load = self._loads[target]
        load.queued_tokens -= tokens
        load.inflight -= turns
        assert load.queued_tokens >= 0
        assert load.inflight >= 0
        if load.inflight == 0:
            del self._loads[target]

    def total_inflight(self) -> int:
        return sum(load.inflight for load in self._loads.values())


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
