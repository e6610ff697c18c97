"""How a target is shown to policies: what it holds, what it was given to do, and how full it is."""

import math
from typing import Final

import msgspec

from policies.cost import HALF_LIFE_S
from policies.ledger import Load
from policies.sessions import Sessions
from policies.types import Candidate, Rates, Role

# Blocks fill a cache over minutes: how full targets are is looked at so often.
EVERY_S: Final = 1.0


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """What a target would find of a prompt, in tokens; as in Candidate."""

    local: int = 0
    pool: int = 0
    own_segment: int = 0
    disk: int = 0
    coming: int = 0


NOTHING: Final = Prefix()


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What is fixed or changes slowly. waiting, running: as the worker itself reports them."""

    waiting: float = 0.0
    running: float = 0.0
    capacity_tokens: int = 0
    pressure: float = 0.0
    role: Role = "both"
    rank: int | None = None
    weight: float = 1.0


def candidate(
    target: str,
    load: Load,
    rates: Rates,
    standing: Standing,
    prefix: Prefix = NOTHING,
    excluded: str = "",
    own: float = 0.0,
) -> Candidate:
    """`target` as policies see it: the one place that says what of its load that is.

    own: tokens of its recent work that were the turn's own session's.
    """
    recent, recent_s = load.recent_tokens, load.recent_s
    if own:
        recent, recent_s = without(own, recent, recent_s)
    # In the order of its fields: by name it takes 1.2 us instead of 0.3, for every target of every turn.
    return Candidate(
        target,
        excluded,
        prefix.local,
        prefix.pool,
        prefix.own_segment,
        prefix.disk,
        prefix.coming,
        load.queued_tokens,
        load.queued_turns,
        load.ahead_s,
        load.inflight,
        load.foreign,
        standing.waiting,
        standing.running,
        recent,
        load.queued_s,
        recent_s,
        load.recent_pull_s,
        load.held_tokens,
        load.decoding_tokens,
        standing.capacity_tokens,
        load.turn_s,
        standing.pressure,
        standing.role,
        standing.rank,
        standing.weight,
        rates,
    )


def without(own: float, recent_tokens: float, recent_s: float) -> tuple[float, float]:
    """Recent work, in tokens and in seconds, less a session's `own` tokens of it."""
    if recent_tokens <= own:
        return 0.0, 0.0
    left = recent_tokens - own
    return left, recent_s * left / recent_tokens


def pressure(
    target: str, load: Load, sessions: Sessions, now: float, *, capacity_tokens: int, held_tokens: int
) -> float:
    """How likely what has to make room on `target` is to be wanted back soon, 0 to 1.

    held_tokens: all that its cache holds. It counts from nine tenths of `capacity_tokens` on.
    """
    full = min(1.0, max(0.0, 10 * held_tokens / capacity_tokens - 9)) if capacity_tokens else 0.0
    if not full:
        return 0.0
    added = (load.recent_tokens + load.queued_tokens + load.recent_pulled) * math.log(2) / HALF_LIFE_S
    renewed_s = capacity_tokens / max(1.0, added)
    return full * sessions.worth(target, held_tokens, now, renewed_s)
