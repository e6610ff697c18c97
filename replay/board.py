"""What a policy's ledger and reports say of a large fleet, kept as columns from one turn to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from policies.candidates import Standing
from policies.columns import Columns, Shortlists
from policies.cost import HALF_LIFE_S
from policies.ledger import Ledger
from policies.types import Rates, Turn
from replay.pool import Places

# From so many instances on it is quicker to look at all at once first.
MANY: Final = 48
_RATES: Final = 7
_RATES_S: Final = 1.0


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
        # As of when: recent work with what waits, and since when the first one does.
        self._recent, self._pulled, self._as_of = np.zeros(count), np.zeros(count), np.zeros(count)
        self._since: Final = np.zeros(count)
        # As the ledger does: anew when something was learned of a target, and every second.
        self._rates: Final[list[Rates | None]] = [None] * count
        self._rates_at: Final = np.full(count, -math.inf)
        self._unlearned: Final = np.ones(count, dtype=bool)

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
        fleet.local_tokens[:] = 0.0
        numbers = self._numbers
        fleet.local_tokens[[numbers[name] for name in held]] = list(held.values())
        fleet.pool_tokens[:] = places.blocks * size if places is not None else 0.0
        if places is not None and places.blocks:
            own = places.each_own_or_spread(fleet.local_tokens) * size
            fleet.own_segment_tokens = np.where(fleet.local_tokens < places.blocks, own, 0.0)
        else:
            fleet.own_segment_tokens[:] = 0.0
        fleet.local_tokens *= size
        fleet.coming_tokens[:] = 0.0
        for number in np.flatnonzero(fleet.queued_turns).tolist():
            coming = self._ledger.coming(self._names[number], keys)
            fleet.coming_tokens[number] = min(limit, coming) * size
        return policy.shortlist(turn, fleet).tolist()

    def _update(self, now: float) -> None:
        fleet, ledger = self._columns, self._ledger
        touched = [self._numbers[name] for name in ledger.touched()]
        for number in touched:
            load = ledger.load(self._names[number], now)
            fleet.queued_tokens[number] = load.queued_tokens
            fleet.queued_context[number] = load.queued_context
            fleet.queued_own_tokens[number] = load.queued_own_tokens
            fleet.queued_remote_tokens[number] = load.queued_remote_tokens
            fleet.queued_disk_tokens[number] = load.queued_disk_tokens
            fleet.queued_turns[number] = load.queued_turns
            fleet.head_tokens[number] = load.head_tokens
            fleet.inflight[number] = load.inflight
            fleet.foreign[number] = load.foreign
            fleet.held_tokens[number] = load.held_tokens
            fleet.decoding_tokens[number] = load.decoding_tokens
            fleet.turn_s[number] = load.turn_s
            self._since[number] = now - load.head_s
            self._recent[number] = load.recent_tokens + load.queued_tokens
            self._pulled[number] = load.recent_pulled
            self._as_of[number] = now
        left = np.exp2((self._as_of - now) / HALF_LIFE_S)
        fleet.recent_tokens = np.maximum(0.0, self._recent * left - fleet.queued_tokens)
        fleet.recent_pulled = self._pulled * left
        fleet.head_s = np.where(fleet.queued_turns > 0, now - self._since, 0.0)
        if self._timed:
            self._rate(touched, now)

    def _rate(self, touched: Sequence[int], now: float) -> None:
        """Those of which nothing was learned yet are all taken to be as the others are now."""
        fleet, ledger, names = self._columns, self._ledger, self._names
        for number in touched:
            self._unlearned[number] = not ledger.samples(names[number])
        due = np.flatnonzero((now - self._rates_at > _RATES_S) & ~self._unlearned).tolist()
        for number in {*touched, *due}:
            rates = None if self._unlearned[number] else ledger.rates(names[number], now)
            if rates is not None and rates is not self._rates[number]:
                fleet.rates[:, number] = msgspec.structs.astuple(rates)[:_RATES]
            self._rates[number] = rates
            self._rates_at[number] = ledger.rated_at(names[number], now)
        alike = np.flatnonzero(self._unlearned)
        if len(alike):
            rates = ledger.rates(names[int(alike[0])], now)
            fleet.rates[:, alike] = np.array(msgspec.structs.astuple(rates)[:_RATES])[:, None]
