"""A large fleet as one array for each field of its candidates: who of them can be chosen at all.

To show hundreds of targets to a policy takes longer than to look at all of them at once. A policy that has a
`shortlist` need be shown only those targets that it could choose: it decides on them as it does on all.
"""

from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from policies.cost import BUSY, FOREIGN_TOKENS, MOST_BUSY, SOON_DECODING, STEP_TOKENS, TWICE
from policies.types import Candidate, Turn

Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

_RATES: Final = ("prefill_s", "growth_s", "own_s", "remote_s", "first_s", "decode_s", "disk_s")
# Recent work is that of a target's last change, less what waits, which is whole tokens: so it is off by one.
_OFF_TOKENS: Final = 2.0


class Columns:
    """Each of shape (targets,), named as in Candidate and Rates; rates: of shape (7, targets)."""

    __slots__ = (
        *("ahead_s", "capacity_tokens", "coming_tokens", "decoding_tokens", "disk_tokens", "excluded"),
        *("foreign", "held_tokens", "inflight", "local_tokens", "own_segment_tokens", "pool_tokens"),
        *("pressure", "queued_s", "queued_tokens", "queued_turns", "rates"),
        *("recent_pull_s", "recent_s", "recent_tokens", "running", "turn_s", "waiting", "weight"),
    )

    def __init__(self, targets: int) -> None:
        """Idle ones that hold nothing, of no speed."""

        def nothing() -> Numbers:
            return np.zeros(targets)

        self.excluded: npt.NDArray[np.bool_] = np.zeros(targets, dtype=bool)
        self.rates: Numbers = np.zeros((len(_RATES), targets))
        self.weight: Numbers = np.ones(targets)
        self.local_tokens, self.pool_tokens, self.own_segment_tokens = nothing(), nothing(), nothing()
        self.disk_tokens, self.coming_tokens = nothing(), nothing()
        self.queued_tokens, self.queued_turns, self.ahead_s = nothing(), nothing(), nothing()
        self.inflight, self.foreign, self.waiting, self.running = nothing(), nothing(), nothing(), nothing()
        self.recent_tokens, self.recent_pull_s = nothing(), nothing()
        self.recent_s, self.queued_s = nothing(), nothing()
        self.held_tokens, self.decoding_tokens, self.capacity_tokens = nothing(), nothing(), nothing()
        self.turn_s, self.pressure = nothing(), nothing()

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> "Columns":
        found = cls(len(candidates))
        for place, each in enumerate(candidates):
            found.excluded[place] = bool(each.excluded)
            found.rates[:, place] = [getattr(each.rates, name) for name in _RATES]
            for name in cls.__slots__:
                if name not in ("excluded", "rates"):
                    getattr(found, name)[place] = getattr(each, name)
        return found

    @property
    def able(self) -> Places:
        """Those that may be chosen."""
        return np.flatnonzero(~self.excluded)


@runtime_checkable
class Shortlists(Protocol):
    """A policy that knows whom it could choose. Shown those alone, it decides as if shown all."""

    def shortlist(self, turn: Turn, fleet: Columns) -> Places: ...


def lightest(fleet: Columns, among: Places) -> Places:
    """Those of `among` that `pick_least_loaded` could choose."""
    weight = fleet.weight
    for load in (fleet.queued_tokens, fleet.inflight + np.trunc(fleet.foreign), fleet.waiting):
        loads = load[among] / weight[among]
        among = among[loads == loads.min(initial=np.inf)]
    recent = fleet.recent_tokens[among] / weight[among]
    return among[recent <= recent.min(initial=np.inf) + _OFF_TOKENS / weight[among].min(initial=1.0)]


def total_costs(turn: Turn, fleet: Columns, recent_weight: float) -> Numbers:
    """The sum of `cost.costs` for each target, of shape (targets,), in seconds."""
    prefill_s, growth_s, own_s, remote_s, first_s, decode_s, disk_s = fleet.rates
    prompt, pool = turn.prompt_tokens, fleet.pool_tokens
    local = np.maximum(fleet.local_tokens, fleet.coming_tokens)
    pulled = np.maximum(pool - local, 0.0)
    own = np.minimum(fleet.own_segment_tokens, pulled)
    disk = np.minimum(fleet.disk_tokens, pulled - own)
    pull = own * own_s + disk * disk_s + (pulled - own - disk) * remote_s
    computed = np.maximum(prompt - np.maximum(pool, local), 0.0)
    prefill = computed * (prefill_s + growth_s * (prompt - computed * 0.5))
    decoding = fleet.inflight + fleet.foreign
    found: Numbers = prefill + pull + first_s + decoding * decode_s * (1 + computed / STEP_TOKENS)
    given = fleet.recent_s + fleet.queued_s if turn.new else fleet.recent_s
    found += prefill * _waiting(fleet.recent_s) + given * recent_weight / fleet.weight
    found += pull * _waiting(fleet.recent_pull_s)
    # What is displaced is brought back from the pool if there is one, else computed again.
    back_s: Numbers = remote_s * (pool > 0) + prefill_s * (pool <= 0)
    found += fleet.pressure * np.maximum(prompt - fleet.local_tokens, 0.0) * back_s
    return found + _waited(fleet) / fleet.weight + _room(turn, fleet)


def _waiting(recent_s: Numbers) -> Numbers:
    busy = np.minimum(recent_s * BUSY, MOST_BUSY)
    return np.maximum(busy / (1 - busy), TWICE)


def _waited(fleet: Columns) -> Numbers:
    foreign = np.maximum(np.minimum(fleet.waiting - fleet.queued_turns, fleet.foreign), 0.0)
    return fleet.ahead_s + foreign * FOREIGN_TOKENS * fleet.rates[0]


def _room(turn: Turn, fleet: Columns) -> Numbers | float:
    missing = fleet.held_tokens + turn.prompt_tokens - fleet.capacity_tokens
    short = (missing > 0) & (fleet.capacity_tokens > 0)
    if not short.any():
        return 0.0
    back = np.maximum(fleet.decoding_tokens, fleet.capacity_tokens * SOON_DECODING)
    return np.where(short, missing * fleet.turn_s / np.where(short, back, 1.0), 0.0)
