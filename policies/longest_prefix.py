"""Send a turn to the holder of its longest local prefix, unless that holder is too busy to be the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.load import eligible, load_key, pick_least_loaded, unplaced
from policies.types import Candidate, Decision, Scored, Turn, action_of


@dataclass(frozen=True, slots=True)
class LongestPrefixOptions:
    """pull_cost: cost of pulling one token from the pool, as a fraction of computing it.
    margin_tokens: how much uncached work (tokens) the holder must be behind before a turn leaves it.
    """

    pull_cost: float = 0.1
    margin_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class LongestPrefix:
    """Holder first; the pool is the way out when the holder is busy.

    Use it when conversations grow and come back: it needs no measured rates. Ties and misses go by load.
    """

    options: LongestPrefixOptions = LongestPrefixOptions()

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        able = eligible(candidates)
        if not able:
            return unplaced("longest_prefix", candidates)
        scored = tuple(Scored(c, self._terms(turn, c)) for c in candidates)
        chosen, reason = self._choose(turn, able)
        return Decision(chosen.target, action_of(chosen), reason, "longest_prefix", scored)

    def _choose(self, turn: Turn, able: list[Candidate]) -> tuple[Candidate, str]:
        longest = max(c.local_tokens for c in able)
        lightest = pick_least_loaded(able, turn.draw)
        if longest == 0:
            return lightest, "no local prefix, least loaded"
        holders = [c for c in able if c.local_tokens == longest]
        holder = pick_least_loaded(holders, turn.draw)
        if load_key(lightest) >= load_key(holder):
            return holder, "longest local prefix"
        behind = sum(self._terms(turn, holder).values()) - sum(self._terms(turn, lightest).values())
        if behind > self.options.margin_tokens:
            return lightest, "holder busy"
        return holder, "longest local prefix"

    def _terms(self, turn: Turn, candidate: Candidate) -> dict[str, float]:
        pulled = max(0, candidate.pool_tokens - candidate.local_tokens)
        return {
            "queued": float(candidate.queued_tokens),
            "pull": pulled * self.options.pull_cost,
            "compute": float(max(0, turn.prompt_tokens - candidate.cached_tokens)),
        }
