"""A decision as it is written down, with all that is needed to make it again."""

from collections.abc import Mapping
from typing import Any

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


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a decision log.

    id: of the request. time: Unix seconds. document: the policy document that was in force, as JSON.
    candidates: as they were before rules and guards.
    """

    id: str
    time: float
    decided: Decided
    turn: Turn
    facts: Facts
    candidates: tuple[Candidate, ...]
    document: msgspec.Raw

    @property
    def placed(self) -> Placed:
        d = self.decided
        decision = Decision(d.target, d.action, d.reason, d.policy, self.candidates, decode=d.decode)
        return Placed(self.turn, self.facts, decision)


def recorded(id: str, time: float, placed: Placed, document: Mapping[str, Any]) -> Recorded:  # noqa: A002
    return Recorded(
        id=id,
        time=time,
        decided=Decided.of(placed.decision),
        turn=placed.turn,
        facts=placed.facts,
        candidates=tuple(as_given(placed.decision.candidates)),
        document=msgspec.Raw(msgspec.json.encode(document)),
    )
