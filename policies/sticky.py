"""Sending what belongs together to one target, by name alone: no index is asked."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policies.load import pick_least_loaded, work
from policies.spread import eligible, number_of, rank, unplaced
from policies.types import Candidate, Decision, Turn, action_of


class StickyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    factor: Annotated[
        float,
        Meta(ge=1, description="A target may have so many times the mean load before turns pass it by."),
    ] = 1.25
    slack_tokens: Annotated[
        float, Meta(ge=0, description="Tokens of load that any target may have on top of that.")
    ] = 16384


_DEFAULTS = StickyOptions()


class Sticky:
    """Every name has its own order of targets; the first of them whose load is within bounds takes the turn.

    `session` goes by the session: for clients that name theirs, where prompts can't be computed.
    `prefix_hash` goes by the prompt's head: sessions that begin alike meet, until their target has more than
    its share. What has no name goes by load.
    """

    __slots__ = ("_by", "_factor", "_slack")

    def __init__(self, by: Literal["session", "prefix_hash"], options: StickyOptions = _DEFAULTS) -> None:
        self._by: Literal["session", "prefix_hash"] = by
        self._factor = options.factor
        self._slack = options.slack_tokens

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        able = eligible(candidates)
        if not able:
            return unplaced(self._by, candidates)
        chosen, reason = self._choose(turn, able)
        bound = self._bound(able)
        return Decision(
            chosen.target,
            action_of(chosen),
            reason,
            self._by,
            tuple(candidates),
            partial(_terms, bound),
            "tokens",
        )

    def _choose(self, turn: Turn, able: list[Candidate]) -> tuple[Candidate, str]:
        seed = number_of(turn.session) if self._by == "session" and turn.session else 0
        if self._by == "prefix_hash":
            seed = turn.head
        if not seed:
            return pick_least_loaded(able, turn.draw), "nothing to go by, least loaded"
        bound = self._bound(able)
        order = sorted(able, key=lambda c: (rank(seed, c), c.target), reverse=True)
        chosen = next((c for c in order if work(c) <= bound), None)
        if chosen is None:
            return pick_least_loaded(able, turn.draw), "all above their bound, least loaded"
        return chosen, "own target" if chosen is order[0] else "own target above its bound"

    def _bound(self, able: Sequence[Candidate]) -> float:
        return self._factor * sum(map(work, able)) / len(able) + self._slack


def _terms(bound: float, candidate: Candidate) -> dict[str, float]:
    """The load, and how much of it is beyond the bound."""
    return {"load": work(candidate), "beyond": max(0.0, work(candidate) - bound)}
