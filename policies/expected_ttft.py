"""Send a turn where its first token is expected soonest, by rates that were measured."""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from policies.columns import Columns, Numbers, Places, lightest, total_costs
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
    stay_share: Annotated[
        float,
        Meta(
            ge=0,
            description="Who has most at home is taken if it costs no more than that above the lowest.",
        ),
    ] = 0.1


_DEFAULTS = ExpectedTtftOptions()
# What columns may be off by, as they know recent work to a token or two.
_NEAR_S = 1e-4


class ExpectedTtft:
    """The lowest expected time to first token, or nearly, with most of the prompt at home; of equals by load.

    Predictions are seldom exact to a tenth, and a session misses what it leaves behind. With 2 % for it pulls
    moved 1.3 TB, not 0.7, where HBM is scarce and pulls are quick; over 1 GB/s p99 was a quarter longer.

    Use it when rates differ, between workers or over time, or when pulling, computing and waiting are all
    real choices. Where a session begins it will mostly stay, so that recent work counts in full then.
    """

    __slots__ = ("_new_recent_weight", "_recent_weight", "_stay_share", "_tie_s", "_tie_share")

    def __init__(self, options: ExpectedTtftOptions = _DEFAULTS) -> None:
        self._recent_weight = options.recent_weight
        self._new_recent_weight = options.new_recent_weight
        self._tie_s = options.tie_ms / 1e3
        self._tie_share = options.tie_share
        self._stay_share = options.stay_share

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        able = eligible(candidates)
        if not able:
            return unplaced("expected_ttft", candidates)
        weight = self._weight(turn)
        totals = [sum(costs(turn, c, weight)) for c in able]
        lowest = min(totals)
        bound = lowest + max(self._tie_s, lowest * self._stay_share)
        close = [(total, _at_home(c), c) for c, total in zip(able, totals, strict=True) if total <= bound]
        longest = max([tokens for _, tokens, _ in close])
        bound = self._equal(min([total for total, tokens, _ in close if tokens == longest]))
        equal = [c for total, tokens, c in close if tokens == longest and total <= bound]
        chosen = pick_least_loaded(equal, turn.draw)
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
        """Of those that are equals whatever more exact figures say, who has least to do; the lowest, by which
        equals are told; and all of whom such figures may decide."""
        able = fleet.able
        totals = total_costs(turn, fleet, self._weight(turn))
        lowest = totals[able].min(initial=inf)
        close, unsure = _within(lowest + max(self._tie_s, lowest * self._stay_share), totals, able)
        beyond = np.maximum(fleet.pool_tokens - fleet.local_tokens, 0.0)
        at_home = (fleet.local_tokens + np.minimum(fleet.own_segment_tokens, beyond))[close]
        longest = close[at_home == at_home.max(initial=0.0)]
        equal, may_be = _within(self._equal(totals[longest].min(initial=inf)), totals, longest)
        lowest_two = _lowest(totals, able), _lowest(totals, longest)
        return np.unique(np.concatenate((unsure, may_be, *lowest_two, lightest(fleet, equal))))

    def _equal(self, cost: float) -> float:
        """What costs no more than this costs as much as `cost`."""
        return cost + max(self._tie_s, cost * self._tie_share)

    def _terms(self, turn: Turn, candidate: Candidate) -> dict[str, float]:
        return dict(zip(TERMS, costs(turn, candidate, self._weight(turn)), strict=True))

    def _weight(self, turn: Turn) -> float:
        return self._new_recent_weight if turn.new else self._recent_weight


def _within(bound: float, totals: Numbers, among: Places) -> tuple[Places, Places]:
    """Those that cost no more, and those of whom columns can't say."""
    costs = totals[among]
    return among[costs < bound - _NEAR_S], among[np.abs(costs - bound) <= _NEAR_S]


def _lowest(totals: Numbers, among: Places) -> Places:
    """All that may be, of equals the first."""
    costs = totals[among]
    near = np.flatnonzero(costs <= costs.min(initial=inf) + _NEAR_S)
    return among[near[np.unique(costs[near], return_index=True)[1]]]


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
