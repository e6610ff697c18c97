"""Send a turn to the holder of its longest local prefix, unless that holder is too busy to be the fastest."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from policies.columns import Columns, Places, lightest
from policies.load import load_key, pick_least_loaded
from policies.spread import eligible, unplaced
from policies.types import Candidate, Decision, Turn, action_of


class LongestPrefixOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pull_cost: Annotated[
        float, Meta(ge=0, description="Cost of pulling one token from the pool, as a share of computing it.")
    ] = 0.1
    margin_tokens: Annotated[
        float, Meta(ge=0, description="Tokens of work the holder must be behind before a turn leaves it.")
    ] = 8192
    recent_weight: Annotated[
        float, Meta(ge=0, description="How much a token of recent work counts, as a share of a queued one.")
    ] = 0.1
    turn_tokens: Annotated[
        float, Meta(ge=0, description="Tokens of work that each turn under way counts as: it decodes.")
    ] = 256
    sibling_margin_tokens: Annotated[
        float,
        Meta(
            ge=0,
            description="margin_tokens for a session's first turn, behind turns that compute its head. "
            "Where its head is there already it has none.",
        ),
    ] = 2048
    new_recent_weight: Annotated[
        float, Meta(ge=0, description="recent_weight for the first turn of a session.")
    ] = 1.0


_DEFAULTS = LongestPrefixOptions()


class LongestPrefix:
    """Holder first; the pool is the way out when the holder is busy.

    Use it when conversations grow and come back: it needs no measured rates. Ties and misses go by load.
    Where a session begins is where it will stay, so a new one goes by load sooner: a head that it shares with
    others is computed once on each target, while all sessions on one would wait there for good.
    """

    __slots__ = ("_options",)

    def __init__(self, options: LongestPrefixOptions = _DEFAULTS) -> None:
        self._options = options

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        able = eligible(candidates)
        if not able:
            return unplaced("longest_prefix", candidates)
        chosen, reason = self._choose(turn, able)
        weigh = partial(self._terms, turn)
        return Decision(
            chosen.target, action_of(chosen), reason, "longest_prefix", tuple(candidates), weigh, "tokens"
        )

    def shortlist(self, turn: Turn, fleet: Columns) -> Places:
        """The holders of the longest prefix that have least to do, and who else has least to do."""
        able = fleet.able
        prefixes = np.maximum(fleet.local_tokens, fleet.coming_tokens)[able]
        holders = able[prefixes == prefixes.max(initial=0.0)]
        return np.array(
            sorted({*lightest(fleet, holders).tolist(), *lightest(fleet, able).tolist()}), dtype=np.intp
        )

    def _choose(self, turn: Turn, able: list[Candidate]) -> tuple[Candidate, str]:
        prefixes = [max(c.local_tokens, c.coming_tokens) for c in able]
        longest = max(prefixes)
        lightest = pick_least_loaded(able, turn.draw)
        if longest == 0:
            return lightest, "no local prefix, least loaded"
        holders = [c for c, prefix in zip(able, prefixes, strict=True) if prefix == longest]
        holder = pick_least_loaded(holders, turn.draw)
        if load_key(lightest) >= load_key(holder):
            return holder, "longest local prefix"
        ours, theirs = self._terms(turn, holder), self._terms(turn, lightest)
        behind = sum(ours.values()) - sum(theirs.values())
        if turn.new:
            # Those that come together are spread, whoever did less for sessions before them, which may be
            # over: else of 24 at once 12 went to one of four workers, which had room for five.
            behind = max(behind, behind - ours["recent"] + theirs["recent"])
        if behind > self._margin(turn, holder):
            return lightest, "holder busy"
        return holder, "longest local prefix"

    def _margin(self, turn: Turn, holder: Candidate) -> float:
        if not turn.new:
            return self._options.margin_tokens
        computing = holder.coming_tokens > holder.local_tokens
        return self._options.sibling_margin_tokens if computing else 0.0

    def _terms(self, turn: Turn, candidate: Candidate) -> dict[str, float]:
        options, weight = self._options, candidate.weight
        recent_weight = options.new_recent_weight if turn.new else options.recent_weight
        local = max(candidate.local_tokens, candidate.coming_tokens)
        pulled = max(0, candidate.pool_tokens - local)
        return {
            "queued": candidate.queued_tokens / weight,
            "inflight": candidate.inflight / weight * options.turn_tokens,
            "recent": candidate.recent_tokens / weight * recent_weight,
            "pull": pulled * options.pull_cost,
            "compute": float(max(0, turn.prompt_tokens - max(local, candidate.pool_tokens))),
        }
