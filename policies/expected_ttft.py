"""Send a turn where its first token is expected soonest, by rates that were measured."""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from policies.columns import Columns, Places, lightest, total_costs
from policies.cost import RECENT_WEIGHT, TERMS, costs
from policies.load import pick_least_loaded
from policies.spread import eligible, unplaced
from policies.types import Candidate, Decision, Turn, action_of


class ExpectedTtftOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    recent_weight: Annotated[
        float,
        Meta(ge=0, description="How much a second of recent work counts, as a share of one still ahead."),
    ] = RECENT_WEIGHT
    new_recent_weight: Annotated[
        float, Meta(ge=0, description="recent_weight for the first turn of a session.")
    ] = 1.0
    tie_ms: Annotated[
        float, Meta(ge=0, description="Targets whose costs differ by less, in milliseconds, are equals.")
    ] = 2.0
    tie_share: Annotated[
        float, Meta(ge=0, description="The same as a share of the lowest cost; the larger of both counts.")
    ] = 0.02


_DEFAULTS = ExpectedTtftOptions()
# What columns may be off by, as they know recent work to a token or two.
_NEAR_S = 1e-4


class ExpectedTtft:
    """The lowest expected time to first token; of equals who has most of the prompt at home, then by load.

    Use it when rates differ, between workers or over time, or when pulling, computing and waiting are all
    real choices. Where a session begins it will mostly stay, so that recent work counts in full then.
    """

    __slots__ = ("_new_recent_weight", "_recent_weight", "_tie_s", "_tie_share")

    def __init__(self, options: ExpectedTtftOptions = _DEFAULTS) -> None:
        self._recent_weight = options.recent_weight
        self._new_recent_weight = options.new_recent_weight
        self._tie_s = options.tie_ms / 1e3
        self._tie_share = options.tie_share

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        able = eligible(candidates)
        if not able:
            return unplaced("expected_ttft", candidates)
        weight = self._weight(turn)
        totals = [sum(costs(turn, c, weight)) for c in able]
        lowest = min(totals)
        bound = lowest + max(self._tie_s, lowest * self._tie_share)
        close = [c for c, total in zip(able, totals, strict=True) if total <= bound]
        if len(close) > 1:
            at_home = [_at_home(c) for c in close]
            longest = max(at_home)
            close = [c for c, tokens in zip(close, at_home, strict=True) if tokens == longest]
        chosen = pick_least_loaded(close, turn.draw)
        return Decision(
            chosen.target,
            action_of(chosen),
            _reason(chosen, able),
            "expected_ttft",
            tuple(candidates),
            partial(self._terms, turn),
            "s",
        )

    def shortlist(self, turn: Turn, fleet: Columns) -> Places:
        """Of those that are equals whatever more exact figures say, who has the longest prefix and least to
        do; the lowest itself, by which equals are told; and all of whom such figures may decide."""
        able = fleet.able
        totals = total_costs(turn, fleet, self._weight(turn))[able]
        lowest = totals.min(initial=inf)
        bound = lowest + max(self._tie_s, lowest * self._tie_share)
        unsure = able[np.abs(totals - bound) <= _NEAR_S]
        equal = able[totals < bound - _NEAR_S]
        near = np.flatnonzero(totals <= lowest + _NEAR_S)
        first = near[np.unique(totals[near], return_index=True)[1]]
        beyond = np.maximum(fleet.pool_tokens - fleet.local_tokens, 0.0)
        at_home = (fleet.local_tokens + np.minimum(fleet.own_segment_tokens, beyond))[equal]
        longest = equal[at_home == at_home.max(initial=0.0)]
        return np.unique(np.concatenate((unsure, able[first], lightest(fleet, longest))))

    def _terms(self, turn: Turn, candidate: Candidate) -> dict[str, float]:
        return dict(zip(TERMS, costs(turn, candidate, self._weight(turn)), strict=True))

    def _weight(self, turn: Turn) -> float:
        return self._new_recent_weight if turn.new else self._recent_weight


def _at_home(c: Candidate) -> int:
    """Tokens in its own cache and own segment: what it has without the network that others share."""
    beyond = c.pool_tokens - c.local_tokens
    return c.local_tokens + min(c.own_segment_tokens, beyond) if beyond > 0 else c.local_tokens


def _reason(chosen: Candidate, able: Sequence[Candidate]) -> str:
    if chosen.local_tokens and chosen.local_tokens >= max(c.local_tokens for c in able):
        return "longest local prefix is soonest"
    if chosen.coming_tokens > chosen.cached_tokens:
        return "soonest behind a turn with the same head"
    if any(c.local_tokens > chosen.local_tokens for c in able):
        return "sooner than the holder"
    return "soonest"
