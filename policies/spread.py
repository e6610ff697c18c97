"""Choosing among equals: the same number always prefers the same target, and all targets get their share."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import filterfalse
from operator import attrgetter

from policies.types import Candidate, Decision

_MASK = (1 << 64) - 1
_target, _excluded = attrgetter("target"), attrgetter("excluded")


@lru_cache(maxsize=8192)
def number_of(text: str) -> int:
    """64 bits of `text`, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(a: int, b: int) -> int:
    """The finaliser of splitmix64 over both numbers: every bit of the result depends on all of theirs."""
    z = (a ^ (b * 0x9E3779B97F4A7C15)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def rank(seed: int, candidate: Candidate) -> float:
    """Where `candidate` stands in the order that `seed` gives all targets; the highest is first.

    Rendezvous hashing: a target that comes or goes moves only what it takes or held. Each target is first for
    a share of seeds that goes by its weight.
    """
    drawn = (_mixed(seed, number_of(candidate.target)) + 1) / (_MASK + 2)
    return drawn if candidate.weight == 1.0 else drawn ** (1 / max(candidate.weight, 1e-6))


def first(seed: int, candidates: Sequence[Candidate]) -> Candidate:
    """The first of `candidates`, which must not be empty, in the order of `seed`."""
    if len(candidates) == 1:
        return candidates[0]
    return max(candidates, key=lambda c: (rank(seed, c), c.target))


def seed_of(draw: float) -> int:
    """`draw` in [0, 1) as a seed."""
    return int(draw * (1 << 53))


def eligible(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that may be chosen, in an order that does not depend on how they were given."""
    return sorted(filterfalse(_excluded, candidates), key=_target)


def unplaced(policy: str, candidates: Sequence[Candidate]) -> Decision:
    """The decision when nobody may be chosen."""
    return Decision(None, "none", "no eligible target", policy, tuple(candidates))
