"""A decision as it is written down, with all that is needed to make it again."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from policies.compare import Placed
from policies.plan import Facts, as_given
from policies.types import Action, Candidate, Decision, Turn


class Decided(msgspec.Struct, frozen=True):
    """What was decided, without what it was decided on."""

    target: str | None
    action: Action
    reason: str
    policy: str
    rule: str
    guards: tuple[str, ...]
    decode: str | None

    @classmethod
    def of(cls, decision: Decision) -> "Decided":
        d = decision
        return cls(d.target, d.action, d.reason, d.policy, d.rule, d.guards, d.decode)


OutcomeKind = Literal["ok", "error", "refused", "cancelled", "moved"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn ended. moved: its worker failed, and it was placed anew. refused: by us, with a 4xx.

    status: HTTP status sent to the client, 0 if it left before one was.
    cached_tokens: what the worker reported, None if it reported nothing. ttft_s: None without a first byte;
    of an answer that does not stream, that is its end.
    """

    kind: OutcomeKind
    status: int
    cached_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    streams: bool = False


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a decision log.

    id: of the request. time: Unix seconds. document: the policy document that was in force, as JSON.
    candidates: as they were before rules and guards. outcome: None where it is not known.
    """

    id: str
    time: float
    decided: Decided
    turn: Turn
    facts: Facts
    candidates: tuple[Candidate, ...]
    document: msgspec.Raw
    outcome: Outcome | None = None

    @property
    def placed(self) -> Placed:
        d = self.decided
        decision = Decision(d.target, d.action, d.reason, d.policy, self.candidates, decode=d.decode)
        return Placed(self.turn, self.facts, decision)


def recorded(
    id: str,  # noqa: A002
    time: float,
    placed: Placed,
    document: Mapping[str, Any],
    outcome: Outcome | None = None,
) -> Recorded:
    return Recorded(
        id=id,
        time=time,
        decided=Decided.of(placed.decision),
        turn=placed.turn,
        facts=placed.facts,
        candidates=tuple(as_given(placed.decision.candidates)),
        document=msgspec.Raw(msgspec.json.encode(document)),
        outcome=outcome,
    )
