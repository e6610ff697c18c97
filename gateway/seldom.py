"""What comes up again and again is said once a minute, where it counts with how often it came up."""

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Final, Protocol

_AGAIN_S: Final = 60.0
# Subjects that are remembered.
_MOST: Final = 256


class Seldom:
    """Whether something is to be said that may come up at any moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[Hashable, float] = {}

    def due(self, subject: Hashable) -> bool:
        """It came up: whether to say it now, since it was not said for a minute."""
        now = self._clock()
        if now - self._said.get(subject, float("-inf")) < _AGAIN_S:
            return False
        self._said.pop(subject, None)
        self._said[subject] = now
        if len(self._said) > _MOST:
            del self._said[next(iter(self._said))]
        return True


class Handle(Protocol):
    def cancel(self) -> None: ...


def _later(delay_s: float, act: Callable[[str], None], subject: str) -> Handle:
    return asyncio.get_running_loop().call_later(delay_s, act, subject)


class Gathered:
    """Says at once what comes up, and after a minute how often it came up meanwhile: no number is lost.

    One event loop. say: told a subject, how often it came up since it was last said, and whether those are
    more than were said within the last minute.
    """

    def __init__(
        self,
        say: Callable[[str, int, bool], None],
        later: Callable[[float, Callable[[str], None], str], Handle] = _later,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._later = later
        self._clock = clock
        self._last: dict[str, float] = {}
        # Said within the minute: how often they came up since then, and what looks when it is over.
        self._counts: dict[str, int] = {}
        self._timers: dict[str, Handle] = {}

    def came(self, subject: str) -> None:
        self._last[subject] = self._clock()
        if subject in self._counts:
            self._counts[subject] += 1
            return
        if len(self._counts) >= _MOST:
            self._forget(next(iter(self._counts)))
        self._tell(subject, 1, more=False)

    def lately(self) -> dict[str, float]:
        """What came up within the last minute or two, and how many seconds ago it last did."""
        now = self._clock()
        return {subject: now - self._last[subject] for subject in self._counts}

    def close(self) -> None:
        """Say the rest."""
        for subject in list(self._counts):
            self._forget(subject)

    def _tell(self, subject: str, count: int, *, more: bool) -> None:
        self._say(subject, count, more)
        self._counts[subject] = 0
        self._timers[subject] = self._later(_AGAIN_S, self._over, subject)

    def _over(self, subject: str) -> None:
        del self._timers[subject]
        if count := self._counts.pop(subject):
            self._tell(subject, count, more=True)
        else:
            del self._last[subject]

    def _forget(self, subject: str) -> None:
        self._timers.pop(subject).cancel()
        del self._last[subject]
        if count := self._counts.pop(subject):
            self._say(subject, count, True)
