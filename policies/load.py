"""Placing by load: the policy without knowledge of caches, and the tie-break of the others."""

from collections.abc import Sequence

from policies.types import Candidate, Decision, Scored, Turn, action_of


def eligible(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that may be chosen, in an order that does not depend on how they were given."""
    return sorted((c for c in candidates if not c.excluded), key=lambda c: c.target)


def load_key(candidate: Candidate) -> tuple[float, float, float]:
    """Own leases first (exact and current), then what the worker reports (scraped)."""
    return (candidate.queued_tokens, candidate.inflight, candidate.waiting)


def pick_least_loaded(candidates: Sequence[Candidate], draw: float) -> Candidate:
    """The least loaded candidate; equals share evenly by `draw`. `candidates` must not be empty."""
    lightest = min(load_key(c) for c in candidates)
    ties = [c for c in candidates if load_key(c) == lightest]
    return ties[int(draw * len(ties))]


def unplaced(policy: str, candidates: Sequence[Candidate]) -> Decision:
    """The decision when nobody may be chosen."""
    return Decision(None, "none", "no eligible target", policy, tuple(Scored(c, {}) for c in candidates))


def least_loaded(turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """Ignore caches, take the least loaded target. For traffic that repeats nothing."""
    able = eligible(candidates)
    if not able:
        return unplaced("least_loaded", candidates)
    chosen = pick_least_loaded(able, turn.draw)
    scored = tuple(Scored(c, {"queued": float(c.queued_tokens)}) for c in candidates)
    return Decision(chosen.target, action_of(chosen), "least loaded", "least_loaded", scored)


def random_choice(turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """Any eligible target with equal probability: the baseline to compare with."""
    able = eligible(candidates)
    if not able:
        return unplaced("random", candidates)
    chosen = able[int(turn.draw * len(able))]
    scored = tuple(Scored(c, {}) for c in candidates)
    return Decision(chosen.target, action_of(chosen), "random", "random", scored)
