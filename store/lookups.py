"""Asking the master for the blocks of one chain: at most two round trips that a turn waits for.

First the next blocks that are not known, and some far ones; then everything up to the first that is missing,
as far as the deadline allows. What comes later is remembered for other turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Final

from store.dead_segments import DeadSegments
from store.groups import window_hit
from store.master_watch import MasterWatch
from store.mooncake_http import MasterAway, MooncakeHttp, Replicas, quoted
from store.mooncake_rpc import MooncakeRpc
from store.segments import Segments
from store.sightings import Sighting, Sightings, Stop, Stretch, Walk

logger = logging.getLogger(__name__)

# One key takes 0.20 ms, 256 take 1.1 ms: the first round trip answers most turns at a fifth of the budget.
_FIRST_KEYS: Final = 256
_FAR_BLOCKS: Final = 32
# Sent by up to 4 runners at once (the master has 4 threads); each works on an answer for 0.5 ms, so that
# deadlines are kept.
_CHUNK_KEYS: Final = 320
_RUNNERS: Final = 4
# A key's share of a round trip, both sides on two cores: the first guess, measured as we go.
_KEY_S: Final = 6e-6
MOST_KEYS: Final = 8192
# Runners at work, left behind ones included; above, the master is behind and gets no more.
_MOST_RUNNERS: Final = 32
# After the turn has gone on without it, for what is worth remembering.
_LATE_S: Final = 0.25
# For what every turn of a model waits to know: an answer that comes late serves the next one.
_STORED_S: Final = 2.0
_MISSES: Final = 3
# Removal takes 1 ms; without it the engine tries to load for seconds.
_BURIAL_S: Final = 0.25
# Of a window group in one round trip: 1 ms.
_WINDOW_KEYS: Final = 320

_SOMEWHERE: Final = Replicas(frozenset(), elsewhere=True)


@dataclass(frozen=True, slots=True)
class Part:
    """The objects of one KV group that a block is made of.

    prefixes, quoted: of keys, as they are and as they go into a URL.
    need: how many blocks before the end of a prefix must be there; None: all of them.
    """

    prefixes: tuple[str, ...]
    quoted: tuple[str, ...]
    sightings: Sightings
    need: int | None = None


@dataclass(slots=True, eq=False)
class Query:
    """What one look-up works on. answered: round trips that were."""

    keys: list[int]
    digests: Sequence[bytes]
    parts: tuple[Part, ...]
    answered: int = 0
    burials: set[asyncio.Task[int]] = field(default_factory=set[asyncio.Task[int]])


Wanted = list[tuple[Part, list[int]]]


class Lookups:
    """All look-ups at one master. Never raises; one event loop.

    rpc: ask through the store client, everything in one round trip. dead: takes from every answer what only
    dead workers hold.
    """

    def __init__(
        self,
        watch: MasterWatch,
        segments: Segments,
        *,
        rpc: MooncakeRpc | None,
        dead: DeadSegments | None,
        budget_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._watch = watch
        self._segments = segments
        self._rpc = rpc
        self._dead = dead
        self._budget_s = budget_s
        self._clock = clock
        self._first_keys = _FIRST_KEYS if rpc is None else MOST_KEYS
        self._chunk_keys = _CHUNK_KEYS if rpc is None else MOST_KEYS
        self._runners: set[asyncio.Task[bool]] = set()
        self._burials: set[asyncio.Task[int]] = set()
        self._forgot_at = float("-inf")
        self._misses = 0
        self._key_s = _KEY_S

    @property
    def idle(self) -> bool:
        return not self._runners

    def forget(self) -> None:
        """Answers to what was asked before now are worth nothing."""
        self._forgot_at = self._clock()

    async def close(self) -> None:
        for task in (*self._runners, *self._burials):
            task.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        await asyncio.gather(*self._burials, return_exceptions=True)

    def walk(self, query: Query) -> Walk:
        """The leading blocks that are there, as far as known now. No credit without a full group."""
        now, keys = self._clock(), query.keys
        full = [part.sightings.walk(keys, self._segments, now) for part in query.parts if part.need is None]
        walk = reduce(_both, full) if full else Walk(0, "absent", ())
        before = -1
        while walk.blocks and walk.blocks != before:
            before = walk.blocks
            for part in query.parts:
                if part.need is not None:
                    states = part.sightings.states(keys[: walk.blocks], self._segments, now)
                    walk = _windowed(walk, keys, part.need, states)
        return walk

    async def look(self, query: Query, known: int, deadline: float) -> bool:
        """Asks for what is not known after `known` leading blocks; whether all answers came in time."""
        answered = await self._ask(query, self._first_trip(query, known), deadline)
        walk = self.walk(query)
        if answered and walk.stop == "unknown":
            wanted = self._second_trip(query, walk.blocks)
            now, later = _split(wanted, self._fitting(deadline))
            answered = await self._ask(query, now, deadline)
            if answered and later and self.walk(query).stop == "unknown":
                self._start(query, later, runners=1)
        if query.burials:
            await asyncio.wait(query.burials, timeout=_BURIAL_S)
            self.refresh(query)
        return answered

    async def stored(self, prefixes: Sequence[str], digests: Sequence[bytes]) -> set[str] | None:
        """Which keys made of these exist, for nobody who waits; None when the master does not say."""
        http = self._watch.http
        if http is None:
            return None
        part = Part(tuple(prefixes), tuple(map(quoted, prefixes)), Sightings(1))
        hexes = [digest.hex() for digest in digests]
        try:
            return set(await self._replicas(http, part, hexes, _STORED_S))
        except MasterAway:
            return None

    def refresh(self, query: Query, *, all_blocks: bool = False) -> None:
        """Asks for the blocks that are not known, or all, with nobody waiting."""
        blocks = range(len(query.keys))
        wanted = [
            (part, list(blocks) if all_blocks else self._unknown(query, part, blocks)) for part in query.parts
        ]
        self._start(query, _split(wanted, MOST_KEYS)[0], runners=1)

    def locate(self, query: Query, walk: Walk) -> None:
        """Asks where the blocks are that are known from announcements only, with nobody waiting."""
        if self._rpc is None and self.idle and any(not each.places for each in walk.stretches):
            keys = query.keys[: walk.blocks]
            wanted = [(part, part.sightings.unplaced(keys)) for part in query.parts if part.need is None]
            self._start(query, _split(wanted, self._chunk_keys)[0], runners=1)

    def _unknown(
        self, query: Query, part: Part, blocks: Sequence[int], *, to_absent: bool = False
    ) -> list[int]:
        now = self._clock()
        return part.sightings.unknown(query.keys, blocks, self._segments, now, to_absent=to_absent)

    def _first_trip(self, query: Query, start: int) -> Wanted:
        end = len(query.keys)
        wanted: Wanted = []
        for part in query.parts:
            near = max(1, self._first_keys // len(part.prefixes))
            if part.need is None:
                rest = range(start + near, end)
                far = rest[:: max(1, len(rest) // _FAR_BLOCKS)]
                blocks: Sequence[int] = [*range(start, min(start + near, end)), *far]
            else:
                blocks = _signs(end, part.need)[-max(1, _WINDOW_KEYS // len(part.prefixes)) :]
            wanted.append((part, self._unknown(query, part, blocks)))
        return wanted

    def _second_trip(self, query: Query, start: int) -> Wanted:
        """All up to the first that is known to be missing; bounded, the rest is for the next turn."""
        wanted: Wanted = []
        stop = end = len(query.keys)
        for part in query.parts:
            if part.need is None:
                wanted.append((part, self._unknown(query, part, range(start, end), to_absent=True)))
        if len(wanted) < len(query.parts):
            stop = min((self._absent(query, part) for part, _ in wanted), default=0)
        for part in query.parts:
            if part.need is not None:
                wanted.append((part, self._unknown(query, part, self._near(query, part, stop))))
        return _split(wanted, MOST_KEYS)[0]

    def _absent(self, query: Query, part: Part) -> int:
        """The first block that is known to be missing."""
        states = part.sightings.states(query.keys, self._segments, self._clock())
        return states.index("absent") if "absent" in states else len(states)

    def _near(self, query: Query, part: Part, stop: int) -> list[int]:
        """The blocks around the signs of a window before `stop`, the last ones first to be kept."""
        need = part.need or 1
        signs = _signs(stop, need)
        states = part.sightings.states([query.keys[sign] for sign in signs], self._segments, self._clock())
        found: set[int] = set()
        for sign, state in zip(reversed(signs), reversed(states), strict=True):
            if state == "end":
                found.update(range(max(0, sign - need + 1), min(stop, sign + need)))
            if len(found) * len(part.prefixes) >= MOST_KEYS // 2:
                break
        return sorted(found)

    def _fitting(self, deadline: float) -> int:
        """How many keys can be asked for by the deadline, by the pace of late."""
        return max(_CHUNK_KEYS, int(max(0.0, deadline - self._clock()) * 0.8 / self._key_s))

    async def _ask(self, query: Query, wanted: Wanted, deadline: float) -> bool:
        """Whether all were answered by the deadline. What comes later is remembered for other turns."""
        keys = sum(len(blocks) * len(part.prefixes) for part, blocks in wanted)
        if not keys:
            return True
        left = deadline - self._clock()
        if self._watch.http is None or left <= 0 or len(self._runners) >= _MOST_RUNNERS:
            return False
        before, began = query.answered, self._clock()
        done, pending = await asyncio.wait(self._start(query, wanted, _RUNNERS), timeout=left)
        if query.answered > before:
            self._misses = 0
            if not pending and keys >= _FIRST_KEYS:
                self._key_s += 0.2 * ((self._clock() - began) / keys - self._key_s)
        elif self._clock() < deadline + self._budget_s:  # else this loop was late, not the master
            self._misses += 1
            if self._misses >= _MISSES:
                self._watch.degrade("slow")
        return not pending and all(runner.result() for runner in done)

    def _start(self, query: Query, wanted: Wanted, runners: int) -> list[asyncio.Task[bool]]:
        """Asks for `wanted` in the order given, leaving nobody waiting."""
        chunks = [
            (part, blocks[at : at + size])
            for part, blocks in wanted
            for size in [max(1, self._chunk_keys // len(part.prefixes))]
            for at in range(0, len(blocks), size)
        ]
        if self._watch.http is None or not chunks:
            return []
        queue = iter(chunks)
        started = [
            asyncio.create_task(self._run(self._watch.http, query, queue))
            for _ in range(min(runners, len(chunks)))
        ]
        for runner in started:
            self._runners.add(runner)
            runner.add_done_callback(self._runners.discard)
        return started

    async def _run(self, http: MooncakeHttp, query: Query, chunks: Iterator[tuple[Part, list[int]]]) -> bool:
        """Round trips one after the other, until the common queue is empty (True) or one fails."""
        try:
            for part, blocks in chunks:
                if not await self._call(http, query, part, blocks):
                    return False
                query.answered += 1
        except Exception:
            logger.exception("a look-up in the pool failed")
            return False
        return True

    async def _call(self, http: MooncakeHttp, query: Query, part: Part, blocks: list[int]) -> bool:
        """One round trip. False when it failed."""
        sent_at = self._clock()
        hexes = [digest.hex() for digest in _picked(query.digests, blocks)]
        try:
            found = await self._replicas(http, part, hexes, _LATE_S)
        except MasterAway as away:
            if away.refused:
                self._watch.degrade(away.reason)
            return False
        if sent_at < self._forgot_at:
            return False
        if self._dead is not None and self._segments.dead and found:
            self._bury(self._dead, query, found, sent_at)
        alike: dict[tuple[Replicas, ...], Sighting] = {}
        missing = Sighting(sent_at, ())
        for block, text in zip(blocks, hexes, strict=True):
            copies = tuple([found[key] for prefix in part.prefixes if (key := prefix + text) in found])
            if len(copies) < len(part.prefixes):
                sighting = missing
            elif (sighting := alike.get(copies)) is None:
                sighting = alike[copies] = Sighting(sent_at, copies)
            part.sightings.saw(query.keys[block], sighting)
        return True

    def _bury(self, dead: DeadSegments, query: Query, found: dict[str, Replicas], asked_at: float) -> None:
        burial = asyncio.create_task(dead.bury(found, asked_at))
        for tasks in (self._burials, query.burials):
            tasks.add(burial)
            burial.add_done_callback(tasks.discard)

    async def _replicas(
        self, http: MooncakeHttp, part: Part, hexes: list[str], timeout_s: float
    ) -> dict[str, Replicas]:
        if self._rpc is None:
            keys = [prefix + text for text in hexes for prefix in part.quoted]
            return await http.replicas(keys, timeout_s)
        keys = [prefix + text for text in hexes for prefix in part.prefixes]
        whole = await self._rpc.exist(keys, timeout_s)
        return {key: _SOMEWHERE for key, there in zip(keys, whole, strict=True) if there}


def _both(one: Walk, other: Walk) -> Walk:
    """Blocks that are there in two groups, in places where both are."""
    shorter, longer = (one, other) if one.blocks <= other.blocks else (other, one)
    stop: Stop = shorter.stop
    if one.blocks == other.blocks and "absent" in (one.stop, other.stop):
        stop = "absent"
    stretches = tuple(
        Stretch(start, end, a.places & b.places)
        for a in shorter.stretches
        for b in longer.stretches
        if (start := max(a.start, b.start)) < (end := min(a.stop, b.stop))
    )
    return Walk(shorter.blocks, stop, stretches)


def _windowed(walk: Walk, keys: Sequence[int], need: int, states: Sequence[Stop]) -> Walk:
    """`walk`, cut to the longest prefix before whose end the `need` blocks of a window group are there, too.

    states: of the walk's blocks in that group. Where they lie is not looked at: they are few.
    """
    near = keys[: walk.blocks]
    there = {key for key, state in zip(near, states, strict=True) if state == "end"}
    blocks = window_hit(there, near, len(near), need)
    if blocks == walk.blocks:
        return walk
    possible = {key for key, state in zip(near, states, strict=True) if state != "absent"}
    more = walk.stop == "unknown" or window_hit(possible, near, len(near), need) > blocks
    stretches = tuple(
        replace(each, stop=min(each.stop, blocks)) for each in walk.stretches if each.start < blocks
    )
    return Walk(blocks, "unknown" if more else "absent", stretches)


def _signs(end: int, need: int) -> list[int]:
    """Blocks, one of which any window of `need` blocks before `end` has; the first for shorter prefixes."""
    return sorted({0, *range(need - 1, end, need)}) if end else []


def _split(wanted: Wanted, keys: int) -> tuple[Wanted, Wanted]:
    """The first of `wanted`, as many as `keys` object keys allow (at least one block), and the others."""
    now: Wanted = []
    later: Wanted = []
    for part, blocks in wanted:
        fits = max(0 if now else 1, keys // len(part.prefixes))
        if blocks[:fits]:
            now.append((part, blocks[:fits]))
        if blocks[fits:]:
            later.append((part, blocks[fits:]))
        keys -= len(blocks[:fits]) * len(part.prefixes)
    return now, later


def _picked(digests: Sequence[bytes], blocks: list[int]) -> Sequence[bytes]:
    """Cut out at once where they lie close together: a fifth of the time of picking one by one."""
    first, last = blocks[0], blocks[-1]
    if last - first > 2 * len(blocks):
        return [digests[each] for each in blocks]
    near = list(digests[first : last + 1])
    return [near[each - first] for each in blocks]
