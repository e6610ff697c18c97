"""The values policies read and return. Plain numbers only: no clock, no I/O, no project types."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["local", "pull", "recompute", "none"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to place.

    prompt_tokens: tokens the engine will see; 0 when the prompt could not be computed.
    draw: a number in [0, 1) that decides ties, so that a decision can be repeated bit for bit.
    """

    prompt_tokens: int
    draw: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One target as the policy sees it, all lengths in tokens.

    excluded: why the target may not be chosen ("" if it may): down, starting, cordoned, model, failed.
    local_tokens: usable leading tokens in the target's own GPU cache (engine's hit rule applied).
    pool_tokens: usable leading tokens readable from the pool.
    own_segment_tokens: of what it would pull (pool_tokens beyond local_tokens), those that lie in its own
    segment: read by a local copy, not over the network.
    queued_tokens: uncached tokens of turns already sent there whose first token is still awaited.
    inflight: turns sent there that have not ended.
    waiting: requests the worker itself reports as waiting (scraped, so a little old).
    """

    target: str
    excluded: str = ""
    local_tokens: int = 0
    pool_tokens: int = 0
    own_segment_tokens: int = 0
    queued_tokens: int = 0
    inflight: int = 0
    waiting: float = 0.0

    @property
    def cached_tokens(self) -> int:
        return max(self.local_tokens, self.pool_tokens)


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with the cost terms that were weighed; every term in token-equivalents of prefill."""

    candidate: Candidate
    terms: Mapping[str, float]

    @property
    def cost(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """Target + action + why. `target` is None when no candidate may be chosen."""

    target: str | None
    action: Action
    reason: str
    policy: str
    scored: tuple[Scored, ...]

    @property
    def chosen(self) -> Candidate | None:
        return next((s.candidate for s in self.scored if s.candidate.target == self.target), None)


Policy = Callable[[Turn, Sequence[Candidate]], Decision]


def action_of(candidate: Candidate) -> Action:
    """What the target will do with this prompt: the engine takes the pool only beyond its own cache."""
    if candidate.cached_tokens == 0:
        return "recompute"
    return "local" if candidate.local_tokens >= candidate.pool_tokens else "pull"
