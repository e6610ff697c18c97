"""Decisions that went wrong or took long, turns refused, answers that broke off: in the log, but seldom."""

import logging
from collections.abc import Callable
from typing import Final

from gateway.routing.decisions import DecisionRecord
from gateway.seldom import Gathered, Seldom

logger = logging.getLogger(__name__)

# Our own take well below a millisecond with 100 targets. All turns wait while one is decided.
SLOW_S: Final = 0.02


class DecisionWatch:
    """`slow` is told of each decision that took long, by the name of its policy."""

    def __init__(self, slow: Callable[[str], None], seldom: Seldom) -> None:
        self._slow = slow
        self._seldom = seldom

    def decided(self, policy: str, seconds: float, fault: str = "") -> None:
        """A decision is made. fault: how the policy failed that should have made it."""
        if fault and self._seldom.due("fault"):
            logger.warning("the policy failed and %s decided: %s", policy, fault)
        if seconds < SLOW_S:
            return
        self._slow(policy)
        if self._seldom.due("slow"):
            logger.warning("the policy %s took %.0f ms, all turns waited", policy, seconds * 1e3)


class RefusalWatch:
    """Tells of turns that nobody may take or has room for. full: told of the limit that one met."""

    def __init__(self, full: Callable[[str], None]) -> None:
        self._full = full
        self._limits: Final = Gathered(_say_full)
        self._unplaced: Final = Gathered(_say_unplaced)

    def full(self, limit: str) -> None:
        self._full(limit)
        self._limits.came(limit)

    def unplaced(self, why: str) -> None:
        self._unplaced.came(why)

    def lately(self) -> list[str]:
        """Why turns were refused within the last minute or two, in words for operators."""
        limits = self._limits.lately().items()
        why = [(f"429 for want of room: limits.{limit}", ago_s) for limit, ago_s in limits]
        why += [(f"503: {said}", ago_s) for said, ago_s in self._unplaced.lately().items()]
        return [f"turns were refused, the last {ago_s:.0f} s ago, with {said}" for said, ago_s in why]

    def close(self) -> None:
        """Say the rest."""
        self._limits.close()
        self._unplaced.close()


def _say_full(limit: str, count: int, more: bool) -> None:
    _say_turns("429 for want of room", f"limits.{limit}", count, more)


def _say_unplaced(why: str, count: int, more: bool) -> None:
    _say_turns("503", why, count, more)


def _say_turns(answer: str, why: str, count: int, more: bool) -> None:
    turns, when = _counted("turn", count, more)
    were = "was" if count == 1 else "were"
    logger.warning("%s %s refused with %s%s: %s", turns, were, answer, when, why)


def say_broken(target: str, count: int, more: bool) -> None:
    answers, when = _counted("answer", count, more)
    logger.warning("%s of worker %s broke off before the end%s", answers, target, when)


def _counted(what: str, count: int, more: bool) -> tuple[str, str]:
    """How many, and when: those after the first are told once their minute is over."""
    things = what if count == 1 else f"{what}s"
    return (f"{count} more {things}", " in the last minute") if more else (f"{count} {things}", "")


class AnswerWatch:
    """Tells of each target when an answer broke off that a client had begun to get."""

    def __init__(self, broken: Gathered) -> None:
        self._broken = broken

    def ended(self, record: DecisionRecord) -> None:
        outcome, target = record.outcome, record.decision.target
        # Another status is one that the client was told: an error that is an answer.
        if outcome is None or target is None or outcome.kind != "error" or outcome.status >= 400:
            return
        self._broken.came(target)

    def close(self) -> None:
        """Say the rest."""
        self._broken.close()
