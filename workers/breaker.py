"""Whether a worker that failed turns may be given any. Pure: times are seconds of any steady clock."""

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]
# An open breaker lets a trial through at growing intervals, up to this many times the first.
_LONGEST = 8.0


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """failures: turns failed in a row that open it, 0 never. open_s: seconds until the first trial."""

    failures: int = 5
    open_s: float = 10.0


@dataclass(slots=True)
class Breaker:
    """Opens after so many failures in a row; then one turn in a while is the trial that may close it.

    closed: all turns are allowed. open: none. half-open: the next one is the trial; another one follows if
    nothing is heard of it for as long again, so that a trial that was cancelled blocks nothing.
    """

    options: BreakerOptions
    failures: int = 0
    _trial_at: float | None = None
    _wait_s: float = 0.0
    _trying: bool = False

    @property
    def closed(self) -> bool:
        return self._trial_at is None

    def state(self, now: float) -> BreakerState:
        if self._trial_at is None:
            return "closed"
        return "half-open" if now >= self._trial_at else "open"

    def allows(self, now: float) -> bool:
        return self._trial_at is None or now >= self._trial_at

    def sent(self, now: float) -> None:
        """A turn goes to the worker: the trial, if it was half-open."""
        if self._trial_at is not None and now >= self._trial_at:
            self._trial_at = now + self._wait_s
            self._trying = True

    def failed(self, now: float) -> bool:
        """The worker failed a turn. True if that opened the breaker."""
        self.failures += 1
        if self._trial_at is not None:
            # Only the trial's failure says anything new; other turns were sent before it opened.
            if self._trying:
                self._wait_s = min(self._wait_s * 2, self.options.open_s * _LONGEST)
                self._trial_at = now + self._wait_s
                self._trying = False
            return False
        if not self.options.failures or self.failures < self.options.failures:
            return False
        self._wait_s = self.options.open_s
        self._trial_at = now + self._wait_s
        return True

    def answered(self) -> bool:
        """An answer began well: enough for a trial. True if that closed the breaker."""
        if not self._trying:
            return False
        self._trying = False
        self._trial_at = None
        # Closed on trust: the next failure opens it again.
        self.failures = max(0, self.options.failures - 1)
        return True

    def succeeded(self) -> None:
        """An answer ended well. While it is open only a trial counts."""
        if self._trial_at is None:
            self.failures = 0
