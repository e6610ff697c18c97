"""Decisions that went wrong or took long: said in the log, seldom enough not to fill it."""

import logging
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

# Our own take well below a millisecond with 100 targets. All turns wait while one is decided.
SLOW_S: Final = 0.02
_AGAIN_S: Final = 60.0


class DecisionWatch:
    """`slow` is told of each decision that took long, by the name of its policy."""

    def __init__(self, slow: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._slow = slow
        self._clock = clock
        self._said: dict[str, float] = {}

    def decided(self, policy: str, seconds: float, fault: str = "") -> None:
        """A decision is made. fault: how the policy failed that should have made it."""
        if fault and self._may_say("fault"):
            logger.warning("the policy failed and %s decided: %s", policy, fault)
        if seconds < SLOW_S:
            return
        self._slow(policy)
        if self._may_say("slow"):
            logger.warning("the policy %s took %.0f ms, all turns waited", policy, seconds * 1e3)

    def _may_say(self, kind: str) -> bool:
        """Once a minute for each kind."""
        now = self._clock()
        if now - self._said.get(kind, float("-inf")) < _AGAIN_S:
            return False
        self._said[kind] = now
        return True
