"""What is under way on all targets, and how fast it goes: what a client that is turned away may be told."""

import math

# Rates follow what happened in about this many seconds, to a step of that.
_WINDOW_S = 30.0
_STEP_S = 0.5
# Told while nothing was measured, and the most that anybody is told.
_UNKNOWN_S, _MOST_S = 5.0, 60.0


class UnderWay:
    """inflight: turns not ended. queued_tokens: what turns have to compute before their first token.

    Times are seconds of any steady clock. While nothing is under way none passes for the rates: an idle night
    does not make what comes after it slow.
    """

    __slots__ = ("_at", "_lived", "_tokens", "_turns", "inflight", "queued_tokens")

    def __init__(self, now: float) -> None:
        self.inflight = 0
        self.queued_tokens = 0.0
        self._at = now
        # What went, and the seconds in which it did, with the past fading out.
        self._turns = self._tokens = self._lived = 0.0

    def sent(self, tokens: float, now: float) -> None:
        if not self.inflight:
            self._at = now
        self.inflight += 1
        self.queued_tokens += tokens

    def went(self, now: float, turns: int, tokens: float) -> None:
        if now - self._at >= _STEP_S or self.inflight == turns:
            self._fade(now)
        self.inflight -= turns
        self.queued_tokens -= tokens
        assert self.inflight >= 0 <= self.queued_tokens
        self._turns += turns
        self._tokens += tokens

    def wait_s(self, now: float, *, turns: float = 0.0, tokens: float = 0.0) -> float:
        """Seconds in which so much more will have gone, at the rate of late."""
        if self.inflight:
            self._fade(now)
        waits = [
            amount * self._lived / went if went > 0 else _UNKNOWN_S
            for amount, went in ((turns, self._turns), (tokens, self._tokens))
            if amount > 0
        ]
        return min(_MOST_S, max(waits, default=_UNKNOWN_S))

    def _fade(self, now: float) -> None:
        factor = math.exp(-(now - self._at) / _WINDOW_S)
        self._turns *= factor
        self._tokens *= factor
        self._lived = self._lived * factor + _WINDOW_S * (1 - factor)
        self._at = now
