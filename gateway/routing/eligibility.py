"""Who may take a turn: why each target may not be chosen, and what a client is told if none may."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from msgspec.structs import replace

from policies.types import Candidate
from workers.fleet import Fleet
from workers.worker import Worker

_why = attrgetter("excluded")
_IN_WORDS = {
    "elsewhere": "without the response it goes on from",
    "failed": "failed at this turn",
    "missed": "not answering",
    "starting": "not up yet",
    "breaker": "failing",
    "ramp": "just back",
}

# Better than nobody.
_DOUBTED = ("breaker", "missed")
# What `why_not` says of who takes a turn where nobody else can.
LAST_RESORTS = frozenset(("", *_DOUBTED))


def why_not(fleet: Fleet, worker: Worker, model: str, failed: Collection[str], only: str = "") -> str:
    """Why a turn for `model` may not go to `worker`, "" if it may.

    failed: who failed this turn. only: the one worker that holds what it goes on from, if there is such.
    """
    if not worker.may_answer:
        return worker.state
    if only and only != worker.name:
        return "elsewhere"
    # A cordon keeps new work away; what only this worker can answer is none.
    if worker.cordoned and not only:
        return "cordoned"
    if model and not worker.card(model):
        return "model"
    if worker.name in failed:
        return "failed"
    if worker.missed:
        return "missed"
    return "" if fleet.breaker_state(worker) != "open" else "breaker"


Lack = Literal["", "requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Room:
    """How much may be under way at once, 0: no limit; turns, and uncached tokens before their first token."""

    requests: int = 0
    tokens: int = 0

    @property
    def endless(self) -> bool:
        return not (self.requests or self.tokens)

    def lacks(self, uncached: int, *, inflight: int, queued_tokens: float) -> Lack:
        """What there is too little of for a turn more, "" if it fits.

        One that is larger than all the room there is fits where nothing waits.
        """
        if self.requests and inflight >= self.requests:
            return "requests"
        fits = not self.tokens or not queued_tokens or queued_tokens + uncached <= self.tokens
        return "" if fits else "tokens"


def within(room: Room, candidates: Sequence[Candidate], prompt_tokens: int) -> Sequence[Candidate]:
    """The candidates, those without `room` for the turn excluded as full: last resorts as well."""
    if room.endless:
        return candidates

    return [
        replace(c, excluded="full") if c.excluded in LAST_RESORTS and lack(room, c, prompt_tokens) else c
        for c in candidates
    ]


def lack(room: Room, candidate: Candidate, prompt_tokens: int) -> Lack:
    """What the candidate has too little of for the turn, "" if it has room."""
    return room.lacks(
        uncached(candidate, prompt_tokens),
        inflight=candidate.inflight,
        queued_tokens=candidate.queued_tokens,
    )


def uncached(candidate: Candidate, prompt_tokens: int) -> int:
    return max(0, prompt_tokens - candidate.cached_tokens)


def can_take(candidates: Iterable[Candidate]) -> bool:
    """Whether anybody may be chosen."""
    return "" in map(_why, candidates)


def eased(candidates: Sequence[Candidate], ramps: Sequence[float]) -> Sequence[Candidate]:
    """The candidates after the reasons that never cost a turn: they hold while anybody else can take it.

    breaker, missed: dropped where nobody is left otherwise. ramp: a target that came back lately (its share
    of an ordinary load in `ramps`, same order, is below 1; none: nobody did) has as much as it may have;
    turns whose prefix it holds go there all the same.
    """
    if not can_take(candidates):
        return [replace(c, excluded="") if c.excluded in _DOUBTED else c for c in candidates]
    if not ramps or min(ramps) >= 1:
        return candidates
    settled = [c.inflight for c, ramp in zip(candidates, ramps, strict=True) if ramp >= 1 and not c.excluded]
    if not settled or len(settled) == len(candidates):
        return candidates
    ordinary = sum(settled) / len(settled)

    def full(candidate: Candidate, ramp: float) -> bool:
        allowed = max(1, math.ceil(ramp * ordinary))
        return ramp < 1 and not candidate.local_tokens and candidate.inflight >= allowed

    return [
        replace(c, excluded="ramp") if not c.excluded and full(c, ramp) else c
        for c, ramp in zip(candidates, ramps, strict=True)
    ]


def why_nobody(candidates: Sequence[Candidate], model: str) -> str:
    """Why no candidate may be chosen, by kinds and without names: clients are told this."""
    if not candidates:
        return "no worker is registered"
    counts = Counter(candidate.excluded for candidate in candidates if candidate.excluded != "model")
    others = sum(candidate.excluded == "model" for candidate in candidates)
    kinds = [f"{count} {_IN_WORDS.get(why, why)}" for why, count in sorted(counts.items())]
    if others:
        kinds.append(f"{others} without the model {model[:200]!r}")
    return f"no worker can take this turn now: {', '.join(kinds)}"
