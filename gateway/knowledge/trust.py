"""How far what is known of each target's cache is believed, and what that makes of its credit."""

from dataclasses import dataclass
from typing import Literal

from gateway.knowledge.audit import Audit
from store.knowledge import Held, Knowledge
from store.streams import EventStreams

State = Literal["exact", "catching-up", "degraded", "none"]


@dataclass(frozen=True, slots=True)
class Trust:
    """exact: every event is known. catching-up: events may be missing, for now. degraded: some are missing
    for good, or answers contradict it; `why` says which. none: the target publishes no events.

    believed: the share that is believed of what is not proven, 0 to 1.
    """

    state: State
    believed: float
    why: str = ""


class Trusts:
    """Judges targets by their streams, by what is in doubt, and by how their answers compare."""

    def __init__(
        self, streams: EventStreams, knowledge: Knowledge, audit: Audit, *, doubtful_share: float
    ) -> None:
        """`doubtful_share`: how much is believed of what is not proven, 0 to 1."""
        self._streams = streams
        self._knowledge = knowledge
        self._audit = audit
        self._share = doubtful_share

    def of(self, target: str) -> Trust:
        state = self._streams.state(target)
        if state is None:
            return Trust("none", 0.0)
        demoted, doubt = self._audit.demoted(target), self._knowledge.doubts.get(target, "")
        if demoted or doubt:
            return Trust("degraded", self._share, demoted or doubt)
        if state == "degraded":
            return Trust("degraded", self._share, "its first events are not known")
        return Trust(state, 1.0 if state == "exact" else self._share)

    def credit(self, target: str, held: Held) -> int:
        """The leading blocks to count on, of those that `held` says `target` has."""
        blocks = held.blocks.get(target, 0)
        if not blocks:
            return 0
        proven = held.certain.get(target, 0)
        if self._audit.demoted(target) or self._streams.state(target) == "catching-up":
            proven = 0
        return proven + int((blocks - proven) * self._share)
