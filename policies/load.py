"""Placing by load or by turns: the policies without knowledge of caches, and the tie-break of the others."""

from collections.abc import Sequence

from policies.spread import eligible, first, seed_of, unplaced
from policies.types import Candidate, Decision, Policy, Turn, action_of

# What each turn under way counts as in bounds on load: it decodes, and all its prompt may have been cached.
# An agent's turn computes 1,000 to 3,000 tokens. Without this all turns that share a head would stay at one.
TURN_TOKENS = 1024


def load_key(candidate: Candidate) -> tuple[float, float, float, float]:
    """Own leases first (exact and current) with the turns of others (known from reports, so only whole ones),
    what the worker has waiting (scraped), what it got lately.

    The last spreads turns that come one at a time, when nothing is ever under way to be seen.
    """
    weight = candidate.weight
    return (
        candidate.queued_tokens / weight,
        (candidate.inflight + int(candidate.foreign)) / weight,
        candidate.waiting / weight,
        candidate.recent_tokens / weight,
    )


def work(candidate: Candidate) -> float:
    """Load as bounds go by it, in tokens: uncached ones, ahead and of late, and some for each turn."""
    turns = candidate.inflight + int(candidate.foreign)
    return (candidate.queued_tokens + candidate.recent_tokens + turns * TURN_TOKENS) / candidate.weight


def pick_least_loaded(candidates: Sequence[Candidate], draw: float) -> Candidate:
    """The least loaded candidate; equals share evenly by `draw`. `candidates` must not be empty."""
    if len(candidates) == 1:
        return candidates[0]
    keys = [load_key(c) for c in candidates]
    lightest = min(keys)
    return first(seed_of(draw), [c for c, key in zip(candidates, keys, strict=True) if key == lightest])


def _load_terms(candidate: Candidate) -> dict[str, float]:
    return {"queued": float(candidate.queued_tokens), "recent": candidate.recent_tokens}


def least_loaded(turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """Ignore caches, take the least loaded target. For traffic that repeats nothing."""
    able = eligible(candidates)
    if not able:
        return unplaced("least_loaded", candidates)
    chosen = pick_least_loaded(able, turn.draw)
    return _decided(chosen, "least loaded", "least_loaded", candidates)


def power_of_two(turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """The less loaded of two targets taken at random.

    Nearly as even as the least loaded, and safe where several gateways see the same old loads: they do not
    all rush to the same target.
    """
    able = eligible(candidates)
    if not able:
        return unplaced("power_of_two", candidates)
    place = turn.draw * len(able)
    one = able.pop(int(place))
    if not able:
        return _decided(one, "the only one", "power_of_two", candidates)
    other = able[int((place - int(place)) * len(able))]
    # `one` was drawn first, so equals share evenly.
    chosen = other if load_key(other) < load_key(one) else one
    return _decided(chosen, "less loaded of two", "power_of_two", candidates)


def round_robin(turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """One after another, whatever they hold: the baseline that needs nothing, even for like turns."""
    able = eligible(candidates)
    if not able:
        return unplaced("round_robin", candidates)
    return _decided(able[turn.number % len(able)], "next in turn", "round_robin", candidates, terms=False)


def random_choice(turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """Any eligible target, each as often as its weight says: the baseline to compare with."""
    able = eligible(candidates)
    if not able:
        return unplaced("random", candidates)
    return _decided(first(seed_of(turn.draw), able), "random", "random", candidates, terms=False)


def _decided(
    chosen: Candidate, reason: str, policy: str, candidates: Sequence[Candidate], *, terms: bool = True
) -> Decision:
    weigh = _load_terms if terms else None
    unit = "tokens" if terms else ""
    return Decision(chosen.target, action_of(chosen), reason, policy, tuple(candidates), weigh, unit)


PLAIN: dict[str, Policy] = {
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "random": random_choice,
    "round_robin": round_robin,
}
"""The policies of this file, which take no options."""

BLIND = ("random", "round_robin")
"""Those of them that go by nothing but who may be chosen."""
