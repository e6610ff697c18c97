"""What a policy's ledger and reports say of a large fleet, kept as columns from one turn to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec.structs import astuple

from policies.candidates import Standing
from policies.columns import Columns, Numbers, Shortlists
from policies.cost import HALF_LIFE_S
from policies.ledger import Ledger
from policies.page import LATE_S, Load
from policies.types import Rates, Turn
from replay.pool import Places

# From so many instances on it is quicker to look at all at once first.
MANY: Final = 48
_RATES: Final = 7
_FIRST: Final = 4
_RATES_S: Final = 1.0
# Of a load, what time alone does not change.
_LASTS: Final = (
    *("queued_tokens", "queued_s", "queued_turns", "inflight", "foreign", "held_tokens", "decoding_tokens"),
    "turn_s",
)


class Board:
    """timed: rates are gone by. Loads are as of a target's last change and fade from then on."""

    def __init__(self, names: Sequence[str], ledger: Ledger, block_size: int, timed: bool) -> None:
        self._names: Final = names
        self._numbers: Final = {name: number for number, name in enumerate(names)}
        self._ledger: Final = ledger
        self._size: Final = block_size
        self._timed: Final = timed
        self._columns: Final = Columns(len(names))
        count = len(names)
        # As of when something last changed there. Most of a load stays as it is until then.
        self._as_of = np.zeros(count)
        self._loads: Final = np.zeros((len(Load.__struct_fields__), count))
        self._lines: Final = np.tile([[-math.inf], [math.inf]], count)
        for name in _LASTS:
            setattr(self._columns, name, self._at(name))
        # As the ledger does: anew when something was learned of a target, and every second.
        self._rates: Final[list[Rates | None]] = [None] * count
        self._rates_at: Final = np.full(count, -math.inf)
        self._unlearned: Final = np.ones(count, dtype=bool)

    def _at(self, name: str) -> Numbers:
        """A field of all loads."""
        return self._loads[Load.__struct_fields__.index(name)]

    def stand(self, standings: Sequence[Standing]) -> None:
        fleet = self._columns
        fleet.waiting[:] = [each.waiting for each in standings]
        fleet.running[:] = [each.running for each in standings]
        fleet.capacity_tokens[:] = [each.capacity_tokens for each in standings]
        fleet.pressure[:] = [each.pressure for each in standings]

    def exclude(self, instance: int, excluded: bool) -> None:
        self._columns.excluded[instance] = excluded

    def shortlist(
        self,
        policy: Shortlists,
        turn: Turn,
        keys: Sequence[int],
        held: Mapping[str, int],
        places: Places | None,
        limit: int,
        now: float,
    ) -> list[int]:
        """Whom the policy could choose. held: blocks by name; limit: blocks that can be hit."""
        fleet, size = self._columns, self._size
        self._update(now)
        numbers = self._numbers
        local = np.zeros(len(numbers), dtype=np.int64)
        local[[numbers[name] for name in held]] = list(held.values())
        fleet.local_tokens[:] = local * size
        fleet.pool_tokens[:] = places.blocks * size if places is not None else 0.0
        if places is not None and places.blocks:
            own = places.each_own_or_spread(local) * size
            fleet.own_segment_tokens[:] = np.where(local < places.blocks, own, 0)
        else:
            fleet.own_segment_tokens[:] = 0.0
        fleet.coming_tokens[:] = 0.0
        for number in np.flatnonzero(fleet.queued_turns).tolist():
            coming = self._ledger.coming(self._names[number], keys, int(local[number]))
            fleet.coming_tokens[number] = min(limit, coming) * size
        return policy.shortlist(turn, fleet).tolist()

    def _update(self, now: float) -> None:
        fleet, ledger = self._columns, self._ledger
        touched = [self._numbers[name] for name in ledger.touched()]
        if touched:
            names = [self._names[number] for number in touched]
            self._loads[:, touched] = np.array([astuple(ledger.load(name, now)) for name in names]).T
            lines = [ledger.line(name, now) for name in names]
            self._lines[:, touched] = np.array([(line.ends, line.head) for line in lines]).T
            self._as_of[touched] = now
        left = np.exp2((self._as_of - now) / HALF_LIFE_S)
        recent, recent_s = self._at("recent_tokens"), self._at("recent_s")
        fleet.recent_tokens = np.maximum(0.0, (recent + fleet.queued_tokens) * left - fleet.queued_tokens)
        fleet.recent_s = np.maximum(0.0, (recent_s + fleet.queued_s) * left - fleet.queued_s)
        fleet.recent_pull_s = self._at("recent_pull_s") * left
        if self._timed:
            self._rate(touched, now)
            ends, head = self._lines
            late = np.maximum(0.0, now - head)
            late += np.where(late > LATE_S, late, 0.0)
            fleet.ahead_s = np.maximum(0.0, ends + late - now - fleet.rates[_FIRST])

    def _rate(self, touched: Sequence[int], now: float) -> None:
        """Those of which nothing was learned yet are all taken to be as the others are now."""
        fleet, ledger, names = self._columns, self._ledger, self._names
        for number in touched:
            self._unlearned[number] = not ledger.samples(names[number])
        due = np.flatnonzero((now - self._rates_at > _RATES_S) & ~self._unlearned).tolist()
        for number in {*touched, *due}:
            rates = None if self._unlearned[number] else ledger.rates(names[number], now)
            if rates is not None and rates is not self._rates[number]:
                fleet.rates[:, number] = astuple(rates)[:_RATES]
            self._rates[number] = rates
            self._rates_at[number] = ledger.rated_at(names[number], now)
        alike = np.flatnonzero(self._unlearned)
        if len(alike):
            rates = ledger.rates(names[int(alike[0])], now)
            fleet.rates[:, alike] = np.array(astuple(rates)[:_RATES])[:, None]
