"""How fast load goes away, measured: what a client that is turned away may be told to wait."""

import math

# Rates follow what happened in about this many seconds.
_WINDOW_S = 30.0
# Told while nothing was measured, and the most that anybody is told.
_UNKNOWN_S, _MOST_S = 5.0, 60.0


class DrainRate:
    """Turns and tokens that ended, with the past fading out. Times are seconds of any steady clock."""

    def __init__(self, now: float) -> None:
        self._started = self._at = now
        self._turns = 0.0
        self._tokens = 0.0

    def ended(self, now: float, *, turns: int, tokens: int) -> None:
        self._fade(now)
        self._turns += turns
        self._tokens += tokens

    def wait_s(self, now: float, *, turns: float = 0.0, tokens: float = 0.0) -> float:
        """Seconds in which so much more will have ended, at the rate of late."""
        self._fade(now)
        # The sums of a window that has not been lived through yet stand for less time.
        lived = _WINDOW_S * (1 - math.exp(-(now - self._started) / _WINDOW_S))
        waits = [
            amount * lived / ended if ended > 0 else _UNKNOWN_S
            for amount, ended in ((turns, self._turns), (tokens, self._tokens))
            if amount > 0
        ]
        return min(_MOST_S, max(waits, default=_UNKNOWN_S))

    def _fade(self, now: float) -> None:
        factor = math.exp(-(now - self._at) / _WINDOW_S)
        self._turns *= factor
        self._tokens *= factor
        self._at = now
