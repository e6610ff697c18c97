"""Whether a worker that failed turns may be given any. Pure: times are seconds of any steady clock."""

import math
from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]
# An open breaker lets a trial through at growing intervals, up to this many times the first.
_LONGEST = 8.0
# A worker's recent turns: so many, so many at least for a share of them, failures among them that are said.
_RECENT = 20
_FEWEST = 10
_NOTABLE = 3
_ALL_RECENT = (1 << _RECENT) - 1
# Seconds after a failure in which it counts as recent, and between two times that they are said.
_RECENT_S = 300.0
_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """failures: turns failed in a row that open it. share: of the recent turns, failed. 0: that never does.

    open_s: seconds until the first trial.
    """

    failures: int = 5
    share: float = 0.5
    open_s: float = 10.0


@dataclass(slots=True)
class Breaker:
    """Opens after so many failures in a row or of late; then one turn in a while is the closing trial.

    closed: all turns are allowed. open: none. half-open: the next one is the trial; another one follows if
    nothing is heard of it for as long again, so that a trial that was cancelled blocks nothing.
    last: how it failed last, in a word.
    """

    options: BreakerOptions
    failures: int = 0
    last: str = ""
    _trial_at: float | None = None
    _wait_s: float = 0.0
    _trying: bool = False
    # A bit for each of the recent turns, the last one lowest, 1 where it failed; and how many they are.
    _recent: int = 0
    _turns: int = 0
    _failed_at: float = -math.inf
    _said_at: float = -math.inf
    _by_share: bool = False

    @property
    def closed(self) -> bool:
        return self._trial_at is None

    def state(self, now: float) -> BreakerState:
        if self._trial_at is None:
            return "closed"
        return "half-open" if now >= self._trial_at else "open"

    def allows(self, now: float) -> bool:
        return self._trial_at is None or now >= self._trial_at

    def rest_s(self, now: float) -> float:
        """Seconds until the next trial; 0 where a turn may go there now."""
        return 0.0 if self._trial_at is None else max(0.0, self._trial_at - now)

    def said(self, now: float) -> str:
        """What it failed, in words; "" if it is closed and that is not worth a word."""
        failed = self._recent.bit_count()
        if self._by_share or (self.closed and failed >= _NOTABLE and now - self._failed_at < _RECENT_S):
            return f"failed {failed} of its last {self._turns} turns (the last: {self.last})"
        return "" if self.closed else f"failed {self.failures} turns in a row (the last: {self.last})"

    def sent(self, now: float) -> None:
        """A turn goes to the worker: the trial, if it was half-open."""
        if self._trial_at is not None and now >= self._trial_at:
            self._trial_at = now + self._wait_s
            self._trying = True

    def failed(self, now: float, kind: str = "") -> bool:
        """The worker failed a turn. True if that is news.

        It opened the breaker, or was its trial (it rests anew), or is one of several of late (once a minute).
        """
        self.failures += 1
        self.last = kind
        if self.closed and now - self._failed_at >= _RECENT_S:
            self._recent = 0
        self._failed_at = now
        self._ended(failed=True)
        if self._trial_at is not None:
            # Only the trial's failure says anything new; other turns were sent before it opened.
            if not self._trying:
                return False
            self._wait_s = min(self._wait_s * 2, self.options.open_s * _LONGEST)
            self._trial_at = now + self._wait_s
            self._trying = False
            return True
        in_a_row = bool(self.options.failures) and self.failures >= self.options.failures
        if in_a_row or self._too_often():
            self._by_share = not in_a_row
            self._wait_s = self.options.open_s
            self._trial_at = now + self._wait_s
            return True
        if self._recent.bit_count() < _NOTABLE or now - self._said_at < _AGAIN_S:
            return False
        self._said_at = now
        return True

    def _too_often(self) -> bool:
        share = self.options.share
        return bool(share) and self._turns >= _FEWEST and self._recent.bit_count() >= share * self._turns

    def _ended(self, *, failed: bool) -> None:
        self._recent = (self._recent << 1 | failed) & _ALL_RECENT
        if self._turns < _RECENT:
            self._turns += 1

    def _forget(self) -> None:
        self._recent = self._turns = 0

    def renewed(self, now: float) -> None:
        """Another process is there, which failed nothing yet: its first turn is the trial."""
        if self._trial_at is None:
            self._forget()
        else:
            self._trial_at, self._wait_s, self._trying = now, self.options.open_s, False

    def answered(self) -> bool:
        """An answer began well: enough for a trial. True if that closed the breaker."""
        if not self._trying:
            return False
        self._trying = self._by_share = False
        self._trial_at = None
        self._forget()
        # Closed on trust: the next failure opens it again.
        self.failures = max(0, self.options.failures - 1)
        return True

    def succeeded(self) -> None:
        """An answer ended well. While it is open only a trial counts."""
        if self._trial_at is None:
            self.failures = 0
            self._ended(failed=False)
