"""What each of many instances holds of a prompt in its HBM, looked up only where that may have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from replay.chains import Pieces
from replay.instance import Instance, Job
from replay.seen import Seen
from replay.traces.types import Session

Counts = npt.NDArray[np.int64]

# Shared beginnings of which is remembered who holds how much; the agents' traces have one or six of them.
_MOST: Final = 256


class Hits:
    """Where no turn of a session ever was, nothing of it lies but what it shares with other sessions.

    So one look at an instance does for all sessions that share as much, until something happens there.
    """

    def __init__(self, instances: Sequence[Instance], sessions: Sequence[Session]) -> None:
        self._instances: Final = instances
        self._size: Final = instances[0].profile.blocks_of_tokens
        self._shared: Final = Seen()
        for number, session in enumerate(sessions):
            for asked in session.turns:
                self._shared.add(asked.chain, asked.blocks(self._size), number)
        self._were: Final[dict[int, set[int]]] = {}
        self._changes: Final = np.zeros(len(instances), dtype=np.int64)
        # By a beginning's last key: how much of it each holds, and as of which change.
        self._known: Final[dict[int, tuple[Counts, Counts]]] = {}

    def changed(self, instances: Sequence[int]) -> None:
        """Something has happened in each of these."""
        self._changes[instances] += 1

    def sent(self, session: int, instance: int) -> None:
        self._were.setdefault(session, set()).add(instance)

    def of(self, job: Job, limit: int) -> Counts:
        """How many leading blocks of its prompt each holds, at most `limit`; of shape (instances,)."""
        chain = job.asked.chain
        found = self._of_all(chain, self._shared.prefix(chain, limit, job.session))
        for number in self._were.get(job.session, ()):
            found[number] = self._hit(number, chain, limit)
        return found

    def _of_all(self, chain: Pieces, shared: int) -> Counts:
        if not shared:
            return np.zeros_like(self._changes)
        last = chain[shared - 1]
        if last not in self._known:
            if len(self._known) == _MOST:
                del self._known[next(iter(self._known))]
            self._known[last] = np.zeros_like(self._changes), np.full_like(self._changes, -1)
        held, as_of = self._known[last]
        for number in np.flatnonzero(as_of != self._changes).tolist():
            held[number] = self._hit(number, chain, shared)
        as_of[:] = self._changes
        return held.copy()

    def _hit(self, number: int, chain: Pieces, limit: int) -> int:
        return self._instances[number].prefill.engine.cache.hit(chain, limit)
