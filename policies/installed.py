"""Policies of installed packages: whatever they return, turns see a decision that can be carried out."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import cast

from policies.spread import unplaced
from policies.types import Candidate, Decision, Policy, Turn, Unit, Weigh, action_of

_REASON_CHARACTERS = 200


class UnsoundDecision(ValueError):
    """The policy chose nobody, or somebody who may not be chosen; the message says which."""


class Installed:
    """`policy` as others may rely on it. Raises UnsoundDecision, and whatever `policy` does."""

    __slots__ = ("_name", "_policy")

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        shown = tuple(candidates)
        able = {c.target: c for c in shown if not c.excluded}
        if not able:
            return unplaced(self._name, shown)
        given = cast(object, self._policy(turn, shown))
        if not isinstance(given, Decision):
            raise UnsoundDecision(f"{self._name} returned {type(given).__name__}, no Decision")
        chosen = able.get(given.target) if isinstance(given.target, str) else None
        if chosen is None:
            raise UnsoundDecision(f"{self._name} chose {given.target!r}, which may not be chosen")
        return Decision(
            chosen.target,
            action_of(chosen),
            str(given.reason)[:_REASON_CHARACTERS],
            self._name,
            shown,
            _Terms(given.weigh) if callable(given.weigh) else None,
            cast(Unit, given.unit) if given.unit in ("tokens", "s") else "",
        )


class _Terms:
    """Cost terms as `weigh` gives them; none where it fails. Who reads a decision must not see it fail."""

    __slots__ = ("_weigh",)

    def __init__(self, weigh: Weigh) -> None:
        self._weigh = weigh

    def __call__(self, candidate: Candidate) -> Mapping[str, float]:
        try:
            terms = {str(name): float(value) for name, value in self._weigh(candidate).items()}
        except Exception:
            return {}
        return terms if all(map(isfinite, terms.values())) else {}
