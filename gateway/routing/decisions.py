"""The last decisions and how they turned out: a bounded ring."""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from gateway.sessions.divergence import PrefixReport
from policies.plan import NO_FACTS, Facts, Plan
from policies.recorded import Outcome
from policies.sessions import NOBODY, Known
from policies.shadow import Shadowed
from policies.types import Decision, Turn


class DecisionRecord(msgspec.Struct):
    """One decision. `time` in Unix seconds; `timings` in milliseconds by step; `outcome` comes at the end.

    unrenderable: why the prompt's tokens could not be computed, "" if they could.
    prefix: where the prompt leaves its session's last one; None if it doesn't.
    session: the one that the turn belongs to. turn, facts: what was decided on,
    besides the decision's candidates. plan: what decided.
    shadowed: what another policy would have done.
    The policy's Decision is kept as it is; turning it into text is left to whoever reads the record.
    """

    request_id: str
    time: float
    api: str
    model: str
    prompt_tokens: int
    block_size: int
    decision: Decision
    timings: dict[str, float] = {}
    unrenderable: str = ""
    outcome: Outcome | None = None
    prefix: PrefixReport | None = None
    session: Known = NOBODY
    turn: Turn | None = None
    facts: Facts = NO_FACTS
    plan: Plan | None = None
    shadowed: Shadowed | None = None

    @property
    def predicted_cached_tokens(self) -> int:
        chosen = self.decision.chosen
        return chosen.cached_tokens if chosen else 0


class DecisionLog:
    """The newest `capacity` decisions by request id; a repeated id replaces the older record.

    keep: each is given every record when it has ended, and must return at once.
    """

    def __init__(self, *keep: Callable[[DecisionRecord], None], capacity: int = 1000) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._keep = keep
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def finish(self, record: DecisionRecord, outcome: Outcome) -> None:
        """Fill in how `record` ended, still in the ring or not. Once per record."""
        assert record.outcome is None
        record.outcome = outcome
        if record.shadowed is not None:
            record.shadowed.ended(outcome)
        for keep in self._keep:
            keep(record)

    def get(self, request_id: str) -> DecisionRecord | None:
        return self._records.get(request_id)

    def recent(self, limit: int) -> list[DecisionRecord]:
        """At most `limit` records, the newest first."""
        newest = reversed(self._records.values())
        return [record for record, _ in zip(newest, range(limit), strict=False)]
