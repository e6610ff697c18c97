"""When to stop believing a source that fails, and when to try it again. Pure: the caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Closed while nothing failed. After the n-th failure in a row open for `first_s * 2**(n-1)`, at most
    `most_s`; then half-open: one trial is let through, and the next after `verdict_s` if nobody says how it
    went. One success closes it.

        failed(0) -> shut until 2;  allows(2) yes, tried(2) -> shut until 12;  worked() -> open to all
    """

    first_s: float = 2.0
    most_s: float = 60.0
    verdict_s: float = 10.0
    failures: int = 0
    shut_until: float = 0.0

    @property
    def closed(self) -> bool:
        return self.failures == 0

    def allows(self, now: float) -> bool:
        """Whether to use the source. Changes nothing: call `tried` when it is really used."""
        return self.failures == 0 or now >= self.shut_until

    def tried(self, now: float) -> None:
        if self.failures:
            self.shut_until = max(self.shut_until, now + self.verdict_s)

    def failed(self, now: float) -> None:
        self.failures += 1
        self.shut_until = now + min(self.most_s, self.first_s * 2.0 ** min(self.failures - 1, 30))

    def worked(self) -> None:
        self.failures = 0
        self.shut_until = 0.0
