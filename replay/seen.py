"""What has been computed anywhere, ever, and whether by more than one session."""

from __future__ import annotations

from typing import Final

from replay.chains import Pieces, common

_MANY: Final = -1


class _Stretch:
    """Blocks `start` to `end - 1` of `chain`, seen by the session `who`, or by MANY."""

    __slots__ = ("chain", "end", "start", "who")

    def __init__(self, chain: Pieces, start: int, end: int, who: int) -> None:
        self.chain, self.start, self.end, self.who = chain, start, end, who


class Seen:
    """Which blocks were seen, and whether by more than one session: stretches by their first keys."""

    def __init__(self) -> None:
        self._first: Final[dict[int, _Stretch]] = {}

    def add(self, chain: Pieces, end: int, who: int) -> None:
        at, last = 0, None
        while at < end:
            found = self._first.get(chain[at])
            if found is None:
                if last is not None and last.end == at and last.who == who and last.chain is chain:
                    last.end = end
                else:
                    self._first[chain[at]] = _Stretch(chain, at, end, who)
                return
            reached = common(chain, found.chain, at, min(end, found.end))
            if reached < found.end and (reached < end or found.who not in (who, _MANY)):
                self._first[found.chain[reached]] = _Stretch(found.chain, reached, found.end, found.who)
                found.end = reached
            if found.who != who:
                found.who = _MANY
            at, last = reached, found

    def prefix(self, chain: Pieces, limit: int, but: int | None = None) -> int:
        """How many leading blocks of `chain` were seen, at most `limit`, not by session `but` alone."""
        at = 0
        while at < limit:
            found = self._first.get(chain[at])
            if found is None or found.who == but:
                break
            at = common(chain, found.chain, at, min(limit, found.end))
        return at
