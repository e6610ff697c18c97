"""How much of a prompt the Mooncake pool holds.

A turn asks once: which leading blocks of this chain are whole (every rank, every group) and readable?

    chain      b0 b1 b2 b3 b4 b5        in the pool: b0 b1 b2 .. b4 b5     (b3 was evicted)
    prefix     3 blocks                 b4 and b5 are there and of no use

The engine looks the whole chain up from block 0, so what counts is complete from there. What was seen lately
is remembered; the rest is asked of the master's HTTP in at most two rounds: the next blocks plus some
far ones first, then everything up to the first that is missing. 2.6 to 4 us a key on the master's side make
the second one exceed the budget for very long chains: then the blocks proven by the deadline count, and the
rest is remembered when it arrives.

The master may be dead, slow, deaf or new at any time: a turn then goes without the pool, within the budget,
and soon without even trying, until the owner task finds the master well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from store.breaker import Breaker
from store.dead_segments import DeadSegments
from store.keys import KeyLayout
from store.lookups import MOST_KEYS, Lookups, Part, Query
from store.master_events import MasterEvents, MasterEventsStatus
from store.master_watch import MasterWatch
from store.mooncake_http import DrainJob, MasterAway, MooncakeHttp, Segment, queryable, quoted
from store.mooncake_rpc import MooncakeRpc
from store.object_events import ObjectEvents
from store.pool_status import LayoutStatus, PoolStatus, SegmentStatus
from store.ranks import Ranks, samples
from store.segments import Segments
from store.sightings import DISK as DISK
from store.sightings import Sightings, Stretch, Walk

logger = logging.getLogger(__name__)

_ADMIN_TIMEOUT_S: Final = 5.0
_CLIENT_SETUP_S: Final = 2.0
_FAILING_SEGMENTS: Final = 3
_REMEMBERED: Final = 1 << 18
_LAYOUTS: Final = 64
# The turns that an engine may still be loading blocks for, when a segment dies.
_RECENT_TURNS: Final = 64
_RECENT_S: Final = 10.0


class Chain(Protocol):
    """`store.hashing.Chain`: full digest and 64-bit key of each leading block."""

    @property
    def digests(self) -> Sequence[bytes]: ...
    @property
    def keys(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class PoolPrefix:
    """blocks: how many leading blocks can be read from the pool.

    known: False when the pool could not be asked; blocks is 0 then, and neither to be believed nor blamed.
    exact: False when the budget ended first; there may be more than `blocks`.
    runs: where they are: runs of block numbers for each segment (`IP:PORT`) and each host, ascending, and
    under DISK those that no memory holds whole.
    """

    blocks: int
    known: bool
    exact: bool = True
    runs: Mapping[str, Sequence[range]] = field(default_factory=dict[str, Sequence[range]])

    def held(self, place: str, start: int = 0) -> int:
        """How many of the blocks from `start` on lie in one segment (`IP:PORT`), or on one host."""
        return sum(max(0, run.stop - max(start, run.start)) for run in self.runs.get(place, ()))

    def place(self, start: int) -> str | None:
        """The segment, or host, that holds all blocks from `start` on; None if there is none or not known."""
        whole = [place for place in self.runs if self.held(place, start) == self.blocks - start]
        return max(whole, key=len, default=None)


_UNKNOWN: Final = PoolPrefix(0, known=False, exact=False)


class PoolView:
    """The pool behind one master. Never raises once it is started; one event loop.

    rpc_address: HOST:PORT as workers use it. Its admin HTTP is looked for at `http_port` of the same host,
    then at the address itself. budget_s: what a turn may wait, both rounds together.
    lookup: "rpc" asks through the store client, one round, with leases and without places;
    `store/mooncake_rpc.py` compares. ImportError when that client is not installed.
    events: where the master publishes KV events of its own, tcp://HOST:PORT; "": they are not followed.
    remove_dead: take objects that only a dead worker holds out of the pool when a turn needs them, so that
    engines need not try to load them; `store/dead_segments.py` says when that is safe.
    """

    def __init__(
        self,
        rpc_address: str,
        *,
        http_port: int = 9003,
        budget_s: float = 0.005,
        lookup: Literal["http", "rpc"] = "http",
        remove_dead: bool = True,
        events: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, _, port = rpc_address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"the Mooncake master is named HOST:PORT, not {rpc_address!r}")
        self._master: Final = rpc_address
        places = dict.fromkeys([(host.strip("[]"), http_port), (host.strip("[]"), int(port))])
        self._budget_s: Final = budget_s
        self._rpc = MooncakeRpc(rpc_address) if lookup == "rpc" else None
        self._clock = clock
        self._segments = Segments()
        self._dead = (
            DeadSegments(rpc_address, self._segments, clock=clock, died=self._died, client=self._rpc)
            if remove_dead
            else None
        )
        self._recent: deque[tuple[float, Query]] = deque(maxlen=_RECENT_TURNS)
        self._pulls = Breaker()
        self._sightings: dict[KeyLayout, Sightings] = {}  # by layouts of one group
        self._ranks = Ranks(clock)
        self._asked_for: dict[str, KeyLayout] = {}
        self._learning: asyncio.Task[None] | None = None
        self._turns = self._asked = self._late = self._announced = 0
        self._announced_at: float | None = None
        self._followed_since = float("inf")
        self._objects = ObjectEvents(lambda: not self._lookups.idle)
        self._events = (
            MasterEvents(events, self._objects, follow=self._follow, forget=self._forget_objects, clock=clock)
            if events
            else None
        )
        self._watch = MasterWatch(
            rpc_address,
            list(places),
            budget_s=budget_s,
            clock=clock,
            segments=self._segments,
            forget=self._forget,
            doubt=self._doubt,
            looked=self._dead.meet if self._dead is not None else lambda: None,
            published=self._events.polled if self._events is not None else None,
        )
        self._lookups = Lookups(
            self._watch, self._segments, rpc=self._rpc, dead=self._dead, budget_s=budget_s, clock=clock
        )

    async def start(self) -> None:
        """Returns after the first look at the master, whether it answered or not; 1 s at most ("rpc": 3)."""
        if self._events is not None:
            await self._events.start()
        await self._watch.start()
        if self._rpc is not None and not self.degraded:
            with contextlib.suppress(MasterAway):  # its set-up must not fall on the first turn
                await self._rpc.exist(["moongate"], _CLIENT_SETUP_S)

    async def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        await self._lookups.close()
        if self._dead is not None:
            await self._dead.close()
        await self._watch.close()
        if self._events is not None:
            await self._events.close()

    @property
    def degraded(self) -> bool:
        return self._watch.degraded

    @property
    def reason(self) -> str:
        """Why it is degraded, "" when it is not."""
        return self._watch.reason

    @property
    def places(self) -> tuple[str, ...]:
        """HOST:PORT of the master's admin HTTP; all where it is looked for until it has answered."""
        return self._watch.places

    @property
    def removed(self) -> int:
        """Objects that only dead workers held, taken out of the pool since the start."""
        return self._dead.removed if self._dead is not None else 0

    @property
    def events(self) -> MasterEventsStatus | None:
        """How far the master's own events are followed; None when they are not."""
        return self._events.status() if self._events is not None else None

    def status(self) -> PoolStatus:
        now = self._clock()
        failing = set(self._segments.failing(now))
        return PoolStatus(
            master=self._master,
            degraded=self.degraded,
            reason=self._watch.reason,
            places=self.places,
            keys=self._watch.counters.keys if self._watch.counters is not None else 0,
            segments=tuple(
                SegmentStatus(
                    each.name,
                    each.status,
                    each.size,
                    each.used if each.status == "OK" else None,
                    self._segments.is_lost(each.endpoint),
                    each.name in failing,
                )
                for each in self._segments
            ),
            layouts=tuple(map(self._layout_status, self._asked_for.values())),
            remembered=sum(map(len, self._sightings.values())),
            turns=self._turns,
            asked=self._asked,
            late=self._late,
            outages=self._watch.outages,
            restarts=self._watch.restarts,
            pulls_failing=not self._pulls.allows(now),
            announced=self._announced,
            announced_s=None if self._announced_at is None else now - self._announced_at,
            master_events=self._watch.publishes_events,
            events=self.events,
            removed=self.removed,
            checked_s=None if self._watch.checked_at is None else now - self._watch.checked_at,
        )

    def _layout_status(self, layout: KeyLayout) -> LayoutStatus:
        found = self._ranks.of(layout)
        return LayoutStatus(
            found.name + found.namespace,
            found.groups,
            found.tp_ranks,
            found.pp_ranks,
            found.pcp_ranks,
            found.dcp_ranks,
            self._ranks.known(layout),
            self._ranks.missed(layout),
        )

    async def prefix(self, chain: Chain, layout: KeyLayout, *, limit: int | None = None) -> PoolPrefix:
        """Leading blocks of `chain` that a worker with this layout can read from the pool. Takes no lease.

        Over how many ranks a block is spread is read off stored blocks, whatever `layout` says. limit: blocks
        that an engine would use at most; a shorter prefix of a model with window groups may be none.
        """
        self._turns += 1
        if self.degraded or not queryable(layout) or not self._pulls.allows(self._clock()):
            return _UNKNOWN
        if self._dead is not None:
            await self._dead.settled(self._budget_s)
        deadline = self._clock() + self._budget_s
        if len(self._asked_for) < _LAYOUTS:
            self._asked_for[layout.name + layout.namespace] = layout
        end = len(chain.keys) if limit is None else min(limit, len(chain.keys))
        before = self._ranks.of(layout)
        found = await self._look(chain, end, before, deadline)
        if found is not None and end and self._ranks.due(layout, found.blocks):
            digests = [chain.digests[block] for block in samples(found.blocks)]
            await asyncio.wait({self._learn(layout, digests)}, timeout=max(0.0, deadline - self._clock()))
            if found.blocks and not self._ranks.known(layout):
                return _UNKNOWN
            if self._ranks.of(layout) != before:
                found = await self._look(chain, end, self._ranks.of(layout), deadline)
        return _UNKNOWN if found is None else self._found(found)

    def _learn(self, layout: KeyLayout, digests: Sequence[bytes]) -> asyncio.Task[None]:
        """Finds the ranks of a layout out from blocks that may be there. One at a time, others join it."""

        async def learn() -> None:
            keys = await self._lookups.stored(layout.probes(), digests)
            if keys is not None:
                self._ranks.learn(layout, keys)

        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(learn())
        return self._learning

    async def _look(self, chain: Chain, end: int, layout: KeyLayout, deadline: float) -> Walk | None:
        """What is there of the first `end` blocks; None if the master does not say."""
        parts = tuple(
            Part(prefixes, tuple(map(quoted, prefixes)), self._of(group), need)
            for group, need in layout.by_group()
            for prefixes in [group.prefixes()]
        )
        query = Query(list(chain.keys)[:end], chain.digests, parts)
        self._recent.append((self._clock(), query))
        walk = self._lookups.walk(query)
        answered = True
        if walk.stop == "unknown":
            self._asked += 1
            answered = await self._lookups.look(query, walk.blocks, deadline)
            walk = self._lookups.walk(query)
            self._late += walk.stop == "unknown"
        if self.degraded or (not answered and walk.blocks == 0):
            return None
        self._lookups.locate(query, walk)
        return walk

    def announced(self, blocks: Iterable[bytes | int], layout: KeyLayout, group: int = 0) -> None:
        """Workers of `layout` say (`cpu` events) that these blocks of a KV group are whole in the pool.

        By digest or key. A worker says so once all of its ranks have put theirs.
        """
        now = self._clock()
        keys = [each if isinstance(each, int) else int.from_bytes(each[-8:], "big") for each in blocks]
        self._announced += len(keys)
        self._announced_at = now
        if self._events is not None and self._events.following:
            return  # the master said so earlier, and may have said since that they are gone
        for each, _ in self._ranks.of(layout).by_group():
            if each.groups == (group,):
                self._of(each).announced(keys, now)

    def lost(self, where: str) -> None:
        """The worker that owns this segment (`IP:PORT`), or all of this host, is dead: nothing there counts.

        The master itself notices after its client_ttl only. A restarted worker's new segment counts again.
        """
        self._segments.lost(where, self._clock())
        self.suspect(where)

    def back(self, where: str) -> None:
        """Takes `lost` back, but not for memory of an earlier life of the worker."""
        self._segments.back(where)
        self.suspect(where)

    def suspect(self, where: str) -> None:
        """The worker there may be dead: nothing there counts as soon as that is certain."""
        if self._dead is not None:
            self._dead.suspect(where)

    def _died(self) -> None:
        """Engines may be trying to load from there now, for turns that were looked up a while ago."""
        since, blocks = self._clock() - _RECENT_S, MOST_KEYS
        for at, query in reversed(self._recent):
            blocks -= len(query.keys)
            if at < since or blocks < 0:
                return
            self._lookups.refresh(query, all_blocks=True)

    def pull_failed(self, where: str | None = None) -> None:
        """A worker did not get what was promised: it answered 500, or far fewer tokens came from the cache.

        where: the segment or host that the blocks were in, None when several or unknown. No credit for it
        until a trial (2 s later, then 4, up to 60) works; the same for the whole pool when three segments
        fail at a time, or the place is not known.
        """
        now = self._clock()
        if where is not None:
            self._segments.pull_failed(where, now)
        if where is None or len(self._segments.failing(now)) >= _FAILING_SEGMENTS:
            self._pulls.failed(now)

    def pull_worked(self, where: str | None = None) -> None:
        """The promised blocks came. Ends the doubt of `pull_failed`."""
        self._pulls.worked()
        if where is not None:
            self._segments.pull_worked(where)

    async def drain(self, where: str) -> str:
        """Starts moving all objects of a segment into the others, so that its worker can go; the job's id.

        Its blocks get no credit until they have arrived. Raises MasterAway, MasterRefused, KeyError when no
        segment is called so, ValueError when no other could take its objects.
        """
        leaving = [each.name for each in self._segments if where in (each.name, each.host)]
        staying = [each.name for each in self._segments if each.name not in leaving and each.status == "OK"]
        if not leaving:
            raise KeyError(where)
        if not staying:
            raise ValueError(f"no other segment could take what is in {where}")
        return await self._admin().drain(leaving, staying, _ADMIN_TIMEOUT_S)

    async def drained(self, job: str) -> DrainJob:
        """How far a drain is. Raises MasterAway, MasterRefused."""
        return await self._admin().drained(job, _ADMIN_TIMEOUT_S)

    async def stop_draining(self, job: str) -> None:
        """Raises MasterAway, MasterRefused."""
        await self._admin().stop_draining(job, _ADMIN_TIMEOUT_S)

    def segments(self) -> list[Segment]:
        """What the master lists; up to a second old."""
        return list(self._segments)

    def _admin(self) -> MooncakeHttp:
        if self._watch.http is None:
            raise MasterAway(self._watch.reason)
        return self._watch.http

    def _of(self, layout: KeyLayout) -> Sightings:
        if layout not in self._sightings:
            while len(self._sightings) >= _LAYOUTS:
                oldest = next(iter(self._sightings))
                del self._sightings[oldest]
                self._objects.leave(oldest)
            sightings = self._sightings[layout] = Sightings(_REMEMBERED)
            sightings.followed_since = self._followed_since
            self._objects.follow(layout, sightings)
        return self._sightings[layout]

    def _found(self, walk: Walk) -> PoolPrefix:
        now = self._clock()
        runs = _by_place(walk.stretches)
        if walk.blocks:
            self._pulls.tried(now)
            self._segments.pull_tried(runs, now)
        return PoolPrefix(walk.blocks, known=True, exact=walk.stop != "unknown", runs=runs)

    def _forget(self) -> None:
        """This may be another life of the master, and in that it knows no keys."""
        self._forget_objects()
        if self._events is not None:
            self._events.restarted()

    def _forget_objects(self) -> None:
        self._lookups.forget()
        self._objects.forget()
        for sightings in self._sightings.values():
            sightings.clear()

    def _follow(self, since: float | None) -> None:
        """All that was asked for from `since` on is kept up to date by the master's events; None: no more."""
        self._followed_since = float("inf") if since is None else since
        for sightings in self._sightings.values():
            sightings.followed_since = self._followed_since

    def _doubt(self) -> None:
        for sightings in self._sightings.values():
            sightings.objects_vanished(self._clock())


def _by_place(stretches: Iterable[Stretch]) -> dict[str, list[range]]:
    runs: dict[str, list[range]] = {}
    for each in stretches:
        for place in each.places:
            runs.setdefault(place, []).append(range(each.start, each.stop))
    return runs
