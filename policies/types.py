"""The values policies read and return. Plain numbers only: no clock, no I/O, no project types."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

Action = Literal["local", "pull", "recompute", "none"]
Role = Literal["both", "prefill", "decode"]


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request to place.

    prompt_tokens: tokens the engine will see; 0 when the prompt could not be computed.
    draw: a number in [0, 1) that decides ties, so that a decision can be repeated bit for bit.
    number: how many turns were placed before this one.
    block_size: tokens in a KV block; 0 when not known.
    session: what its session is known by; "" if by nothing.
    head: the chain's key at the end of the prompt's head (its first 1,024 tokens or fewer); 0 when not known.
    new: of a prompt that is known: no turn of its session was seen before.
    """

    prompt_tokens: int
    draw: float
    number: int = 0
    block_size: int = 0
    session: str = ""
    head: int = 0
    new: bool = False


Confidence = tuple[float, float, float, float, float, float, float]


class Rates(msgspec.Struct, frozen=True, gc=False):
    """What a target's work takes, in seconds. The defaults are what is believed before anything was measured.

    prefill_s: computing one prompt token at the beginning of a context; 20,480 tokens a second are Qwen3-32B
    on two H100.
    growth_s: what each token of context before it adds; fitted to gpt-oss-120b on H200, 2K to 48K tokens.
    own_s, remote_s, disk_s: pulling one token from the target's own segment (26 ms a GB), from another's
    (50 ms) and from a disk (150 ms), at 256 KB a token.
    first_s: the first step, and whatever else every turn takes; others do not wait for it.
    decode_s: what each turn that decodes there adds to a step.
    confidence: how much each of the seven, in this order, rests on measurement: 0 not at all, 1 all.
    """

    prefill_s: float = 1 / 20_480
    growth_s: float = 5e-10
    own_s: float = 6.7e-6
    remote_s: float = 1.3e-5
    first_s: float = 0.02
    decode_s: float = 0.0007
    disk_s: float = 4e-5
    confidence: Confidence = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


BELIEVED = Rates()


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One target as the policy sees it, all lengths in tokens.

    excluded: why the target may not be chosen ("" if it may): down, starting, cordoned, model, failed, role,
    full, breaker (failing turns), ramp (just back, and busy for that), or a guard's name.
    local_tokens: usable leading tokens in the target's own GPU cache (engine's hit rule applied).
    pool_tokens: usable leading tokens readable from the pool.
    own_segment_tokens: of what it would pull (pool_tokens beyond local_tokens), those that lie in its own
    segment: read by a local copy, not over the network. disk_tokens: those that only a disk has.
    coming_tokens: leading tokens that turns sent there already are going to compute: no hit yet.
    queued_tokens: uncached tokens of turns already sent there whose first token is still awaited.
    queued_turns: these turns. ahead_s: for how many seconds a turn sent there now would wait for them.
    inflight: turns sent there that have not ended. foreign: those that others sent, another gateway, say.
    waiting, running: requests as the worker itself reports them (scraped, so a little old).
    recent_tokens: uncached tokens of turns whose first token has come, each counting less with every second,
    but for those of the turn's own session. queued_s, recent_s: what queued_tokens and recent_tokens were
    expected to take when they were sent there; recent_pull_s: the same for what was pulled, as if all of it
    had lain elsewhere.
    held_tokens: context of turns under way, of which decoding_tokens that of turns that decode.
    capacity_tokens: what its cache holds, 0 when not known. turn_s: seconds for which a turn decodes there.
    pressure: how likely what has to make room for this turn is to be wanted back soon, 0 to 1.
    role, rank: what the target is for, and its data-parallel rank.
    weight: its share of the load compared with others'.
    """

    target: str
    excluded: str = ""
    local_tokens: int = 0
    pool_tokens: int = 0
    own_segment_tokens: int = 0
    disk_tokens: int = 0
    coming_tokens: int = 0
    queued_tokens: int = 0
    queued_turns: int = 0
    ahead_s: float = 0.0
    inflight: int = 0
    foreign: float = 0.0
    waiting: float = 0.0
    running: float = 0.0
    recent_tokens: float = 0.0
    queued_s: float = 0.0
    recent_s: float = 0.0
    recent_pull_s: float = 0.0
    held_tokens: int = 0
    decoding_tokens: int = 0
    capacity_tokens: int = 0
    turn_s: float = 0.0
    pressure: float = 0.0
    role: Role = "both"
    rank: int | None = None
    weight: float = 1.0
    rates: Rates = BELIEVED

    @property
    def cached_tokens(self) -> int:
        return max(self.local_tokens, self.pool_tokens)


class Scored(msgspec.Struct, frozen=True):
    """A candidate with the terms that were weighed, in the unit of its policy (tokens or seconds)."""

    candidate: Candidate
    terms: Mapping[str, float]

    @property
    def cost(self) -> float:
        return sum(self.terms.values())


Unit = Literal["", "tokens", "s"]
Weigh = Callable[[Candidate], Mapping[str, float]]


class Decision(msgspec.Struct, frozen=True):
    """Target + action + why. `target` is None when no candidate may be chosen.

    action: what the target will do with the prompt, "none" where that is not known.
    candidates: all that were shown. weigh: gives a candidate's cost terms, in `unit`; None where none are
    weighed. Asked only by who reads the decision: a turn does not wait for it.
    decode: the target of the decode leg where prefill and decode are placed apart.
    rule: of the policy document that chose the policy, "" for its default. guards: those that kept some out.
    fault: how the policy failed that should have decided, "" if it did not.
    """

    target: str | None
    action: Action
    reason: str
    policy: str
    candidates: tuple[Candidate, ...]
    weigh: Weigh | None = None
    unit: Unit = ""
    decode: str | None = None
    rule: str = ""
    guards: tuple[str, ...] = ()
    fault: str = ""

    @property
    def chosen(self) -> Candidate | None:
        for candidate in self.candidates:
            if candidate.target == self.target:
                return candidate
        return None

    @property
    def scored(self) -> tuple[Scored, ...]:
        weigh = self.weigh
        return tuple(Scored(c, weigh(c) if weigh else {}) for c in self.candidates)


Policy = Callable[[Turn, Sequence[Candidate]], Decision]


def action_of(candidate: Candidate) -> Action:
    """What the target will do with this prompt: the engine takes the pool only beyond its own cache."""
    if candidate.cached_tokens == 0:
        return "recompute"
    return "local" if candidate.local_tokens >= candidate.pool_tokens else "pull"
