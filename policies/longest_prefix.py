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


_DEFAULTS = LongestPrefixOptions()


class LongestPrefix:
    """Holder first; the pool is the way out when the holder is busy.

    Use it when conversations grow and come back: it needs no measured rates. Ties and misses go by load.
    """

    __slots__ = ("_margin", "_pull_cost", "_recent_weight")

    def __init__(self, options: LongestPrefixOptions = _DEFAULTS) -> None:
        self._pull_cost = options.pull_cost
        self._margin = options.margin_tokens
        self._recent_weight = options.recent_weight

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
        return np.union1d(lightest(fleet, holders), lightest(fleet, able))

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
        behind = sum(self._terms(turn, holder).values()) - sum(self._terms(turn, lightest).values())
        if behind > self._margin:
            return lightest, "holder busy"
        return holder, "longest local prefix"

    def _terms(self, turn: Turn, candidate: Candidate) -> dict[str, float]:
        local = max(candidate.local_tokens, candidate.coming_tokens)
        pulled = max(0, candidate.pool_tokens - local)
        return {
            "queued": candidate.queued_tokens / candidate.weight,
            "recent": candidate.recent_tokens / candidate.weight * self._recent_weight,
            "pull": pulled * self._pull_cost,
            "compute": float(max(0, turn.prompt_tokens - max(local, candidate.pool_tokens))),
        }
