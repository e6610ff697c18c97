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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from store.breaker import Breaker
from store.keys import KeyLayout
from store.master_watch import MasterWatch
from store.mooncake_http import Drain, MasterAway, MooncakeHttp, Replicas, Segment, queryable
from store.mooncake_rpc import MooncakeRpc
from store.segments import Segments
from store.sightings import Sighting, Sightings, Stretch, Walk

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
_MOST_KEYS: Final = 8192
# Runners at work, left behind ones included; above, the master is behind and gets no more.
_MOST_RUNNERS: Final = 32
# After the turn has gone on without it, for what is worth remembering.
_LATE_S: Final = 0.25
_MISSES: Final = 3
_ADMIN_TIMEOUT_S: Final = 5.0
_CLIENT_SETUP_S: Final = 2.0
_FAILING_SEGMENTS: Final = 3
_REMEMBERED: Final = 1 << 18
_LAYOUTS: Final = 64


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
    runs: where they are: runs of block numbers for each segment (`IP:PORT`) and each host, ascending.
    """

    blocks: int
    known: bool
    exact: bool = True
    runs: Mapping[str, Sequence[range]] = field(default_factory=dict[str, Sequence[range]])

    def held(self, place: str, start: int = 0) -> int:
        """How many of the blocks from `start` on lie in one segment (`IP:PORT`), or on one host."""
        return sum(max(0, run.stop - max(start, run.start)) for run in self.runs.get(place, ()))


_SOMEWHERE: Final = Replicas(frozenset(), elsewhere=True)
_UNKNOWN: Final = PoolPrefix(0, known=False, exact=False)


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """lost: its worker was reported dead. failing: pulls from it failed lately. Both: no credit."""

    name: str
    status: str
    size: int
    used: int
    lost: bool
    failing: bool


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """reason: why it is degraded, "" when it is not. Counts are since the start of the gateway.

    asked: turns that needed the master; late: those it did not answer in time; restarts: lives of the master
    that ended; keys: objects in the pool; remembered: blocks; checked_s: age of the last good look, or None.
    announced: blocks that workers said they stored; announced_s: how long ago the last. While the pool is in
    use and nothing is announced, every turn must ask. master_events: whether the master has some of its own.
    """

    master: str
    degraded: bool
    reason: str
    keys: int
    segments: tuple[SegmentStatus, ...]
    remembered: int
    turns: int
    asked: int
    late: int
    outages: int
    restarts: int
    pulls_failing: bool
    announced: int
    announced_s: float | None
    master_events: bool | None
    checked_s: float | None


class PoolView:
    """The pool behind one master. Never raises once it is started; one event loop.

    rpc_address: HOST:PORT as workers use it. Its admin HTTP is looked for at `http_port` of the same host,
    then at the address itself. budget_s: what a turn may wait, both rounds together.
    lookup: "rpc" asks through the store client, one round, with leases and without places;
    `store/mooncake_rpc.py` compares. ImportError when that client is not installed.
    """

    def __init__(
        self,
        rpc_address: str,
        *,
        http_port: int = 9003,
        budget_s: float = 0.005,
        lookup: Literal["http", "rpc"] = "http",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, _, port = rpc_address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"the Mooncake master is named HOST:PORT, not {rpc_address!r}")
        self._master: Final = rpc_address
        places = dict.fromkeys([(host.strip("[]"), http_port), (host.strip("[]"), int(port))])
        self._budget_s: Final = budget_s
        self._rpc = MooncakeRpc(rpc_address) if lookup == "rpc" else None
        self._first_keys = _FIRST_KEYS if self._rpc is None else _MOST_KEYS
        self._chunk_keys = _CHUNK_KEYS if self._rpc is None else _MOST_KEYS
        self._clock = clock
        self._runners: set[asyncio.Task[bool]] = set()
        self._segments = Segments()
        self._pulls = Breaker()
        self._sightings: dict[KeyLayout, Sightings] = {}
        self._forgot_at = float("-inf")
        self._misses = 0
        self._key_s = _KEY_S
        self._turns = self._asked = self._late = self._announced = 0
        self._announced_at: float | None = None
        self._watch = MasterWatch(
            rpc_address,
            list(places),
            budget_s=budget_s,
            clock=clock,
            segments=self._segments,
            forget=self._forget,
            doubt=self._doubt,
        )

    async def start(self) -> None:
        """Returns after the first look at the master, whether it answered or not; 1 s at most ("rpc": 3)."""
        await self._watch.start()
        if self._rpc is not None and not self.degraded:
            with contextlib.suppress(MasterAway):  # its set-up must not fall on the first turn
                await self._rpc.exist(["moongate"], _CLIENT_SETUP_S)

    async def close(self) -> None:
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        await self._watch.close()

    @property
    def degraded(self) -> bool:
        return self._watch.degraded

    def status(self) -> PoolStatus:
        now = self._clock()
        failing = set(self._segments.failing(now))
        return PoolStatus(
            master=self._master,
            degraded=self.degraded,
            reason=self._watch.reason,
            keys=self._watch.counters.keys if self._watch.counters is not None else 0,
            segments=tuple(
                SegmentStatus(
                    each.name,
                    each.status,
                    each.size,
                    each.used,
                    self._segments.is_lost(each),
                    each.name in failing,
                )
                for each in self._segments
            ),
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
            checked_s=None if self._watch.checked_at is None else now - self._watch.checked_at,
        )

    async def prefix(self, chain: Chain, layout: KeyLayout) -> PoolPrefix:
        """Leading blocks of `chain` that a worker with this layout can read from the pool. Takes no lease."""
        self._turns += 1
        prefixes = queryable(layout)
        if self.degraded or prefixes is None or not self._pulls.allows(self._clock()):
            return _UNKNOWN
        deadline = self._clock() + self._budget_s
        keys = list(chain.keys)
        sightings = self._of(layout)
        walk = sightings.walk(keys, self._segments, self._clock())
        if walk.stop != "unknown":
            return self._found(walk)
        self._asked += 1
        turn = _Turn(keys, chain.digests, layout.prefixes(), prefixes, sightings)
        answered = await self._ask(turn, self._first_trip(turn, walk.blocks), deadline)
        walk = sightings.walk(keys, self._segments, self._clock())
        if answered and walk.stop == "unknown":
            blocks = self._second_trip(turn, walk.blocks)
            fitting = self._fitting(turn, deadline)
            answered = await self._ask(turn, blocks[:fitting], deadline)
            walk = sightings.walk(keys, self._segments, self._clock())
            if answered and walk.stop == "unknown":
                self._start(turn, blocks[fitting:], runners=1)
        if walk.stop == "unknown":
            self._late += 1
        if self.degraded or (not answered and walk.blocks == 0):
            return _UNKNOWN
        return self._found(walk)

    def announced(self, blocks: Iterable[bytes | int], layout: KeyLayout | None = None) -> None:
        """Workers of `layout` say (`cpu` events) that these blocks are whole in the pool, by digest or key.

        Without the layout they are believed only while all turns share one, with one group: two models with
        one tokenizer give the same blocks the same digests.
        """
        now = self._clock()
        keys = [each if isinstance(each, int) else int.from_bytes(each[-8:], "big") for each in blocks]
        self._announced += len(keys)
        self._announced_at = now
        known = self._sightings if layout is None else {layout: self._of(layout)}
        for each, sightings in known.items():
            if len(known) == 1 and len(each.groups) == 1:
                sightings.announced(keys, now)
            else:
                sightings.not_absent(keys)

    def lost(self, where: str) -> None:
        """The worker that owns this segment (`IP:PORT`), or all of this host, is dead: nothing there counts.

        The master itself notices after its client_ttl only. A restarted worker's new segment counts again.
        """
        self._segments.lost(where)

    def back(self, where: str) -> None:
        """Takes `lost` back."""
        self._segments.back(where)

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

    async def drained(self, job: str) -> Drain:
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
                del self._sightings[next(iter(self._sightings))]
            self._sightings[layout] = Sightings(_REMEMBERED)
        return self._sightings[layout]

    def _found(self, walk: Walk) -> PoolPrefix:
        now = self._clock()
        runs = _by_place(walk.stretches)
        if walk.blocks:
            self._pulls.tried(now)
            self._segments.pull_tried(runs, now)
        return PoolPrefix(walk.blocks, known=True, exact=walk.stop != "unknown", runs=runs)

    def _first_trip(self, turn: _Turn, start: int) -> list[int]:
        near = max(1, self._first_keys // len(turn.prefixes))
        end = len(turn.keys)
        rest = range(start + near, end)
        far = rest[:: max(1, len(rest) // _FAR_BLOCKS)]
        blocks = [*range(start, min(start + near, end)), *far]
        return turn.sightings.unknown(turn.keys, blocks, self._segments, self._clock())

    def _second_trip(self, turn: _Turn, start: int) -> list[int]:
        """All up to the first that is known to be missing; bounded, the rest is for the next turn."""
        blocks = range(start, len(turn.keys))
        found = turn.sightings.unknown(turn.keys, blocks, self._segments, self._clock(), to_absent=True)
        return found[: max(1, _MOST_KEYS // len(turn.prefixes))]

    def _fitting(self, turn: _Turn, deadline: float) -> int:
        """How many blocks can be asked for by the deadline, by the pace of late."""
        keys = max(0.0, deadline - self._clock()) * 0.8 / self._key_s
        return max(1, max(_CHUNK_KEYS, int(keys)) // len(turn.prefixes))

    async def _ask(self, turn: _Turn, blocks: list[int], deadline: float) -> bool:
        """Whether all were answered by the deadline. What comes later is remembered for other turns."""
        if not blocks:
            return True
        left = deadline - self._clock()
        if self._watch.http is None or left <= 0 or len(self._runners) >= _MOST_RUNNERS:
            return False
        before, began = turn.answered, self._clock()
        done, pending = await asyncio.wait(self._start(turn, blocks, _RUNNERS), timeout=left)
        if turn.answered > before:
            self._misses = 0
            if not pending and len(blocks) * len(turn.prefixes) >= _FIRST_KEYS:
                each_s = (self._clock() - began) / (len(blocks) * len(turn.prefixes))
                self._key_s += 0.2 * (each_s - self._key_s)
        elif self._clock() < deadline + self._budget_s:  # else this loop was late, not the master
            self._misses += 1
            if self._misses >= _MISSES:
                self._watch.degrade("slow")
        return not pending and all(runner.result() for runner in done)

    def _start(self, turn: _Turn, blocks: list[int], runners: int) -> list[asyncio.Task[bool]]:
        """Asks for `blocks` in the order given, leaving nobody waiting."""
        if self._watch.http is None or not blocks:
            return []
        size = max(1, self._chunk_keys // len(turn.prefixes))
        queue = iter([blocks[at : at + size] for at in range(0, len(blocks), size)])
        started = [
            asyncio.create_task(self._run(self._watch.http, turn, queue))
            for _ in range(min(runners, -(-len(blocks) // size)))
        ]
        for runner in started:
            self._runners.add(runner)
            runner.add_done_callback(self._runners.discard)
        return started

    async def _run(self, http: MooncakeHttp, turn: _Turn, chunks: Iterator[list[int]]) -> bool:
        """Round trips one after the other, until the common queue is empty (True) or one fails."""
        try:
            for chunk in chunks:
                if not await self._call(http, turn, chunk):
                    return False
                turn.answered += 1
        except Exception:
            logger.exception("a look-up in the pool failed")
            return False
        return True

    async def _call(self, http: MooncakeHttp, turn: _Turn, blocks: list[int]) -> bool:
        """One round trip. False when it failed."""
        sent_at = self._clock()
        hexes = [digest.hex() for digest in _picked(turn.digests, blocks)]
        try:
            found = await self._replicas(http, turn, hexes)
        except MasterAway as away:
            if away.refused:
                self._watch.degrade(away.reason)
            return False
        if sent_at < self._forgot_at:
            return False
        alike: dict[tuple[Replicas, ...], Sighting] = {}
        missing = Sighting(sent_at, ())
        for block, text in zip(blocks, hexes, strict=True):
            parts = tuple([found[key] for prefix in turn.prefixes if (key := prefix + text) in found])
            if len(parts) < len(turn.prefixes):
                sighting = missing
            elif (sighting := alike.get(parts)) is None:
                sighting = alike[parts] = Sighting(sent_at, parts)
            turn.sightings.saw(turn.keys[block], sighting)
        return True

    async def _replicas(self, http: MooncakeHttp, turn: _Turn, hexes: list[str]) -> dict[str, Replicas]:
        if self._rpc is None:
            return await http.replicas([prefix + text for text in hexes for prefix in turn.quoted], _LATE_S)
        keys = [prefix + text for text in hexes for prefix in turn.prefixes]
        whole = await self._rpc.exist(keys, _LATE_S)
        return {key: _SOMEWHERE for key, there in zip(keys, whole, strict=True) if there}

    def _forget(self) -> None:
        """This may be another life of the master, and in that it knows no keys."""
        self._forgot_at = self._clock()
        for sightings in self._sightings.values():
            sightings.clear()

    def _doubt(self) -> None:
        for sightings in self._sightings.values():
            sightings.objects_vanished(self._clock())


@dataclass(slots=True)
class _Turn:
    """What one look-up works on.

    prefixes, quoted: of keys, as they are and as they go into a URL. answered: round trips.
    """

    keys: list[int]
    digests: Sequence[bytes]
    prefixes: tuple[str, ...]
    quoted: tuple[str, ...]
    sightings: Sightings
    answered: int = 0


def _by_place(stretches: Iterable[Stretch]) -> dict[str, list[range]]:
    runs: dict[str, list[range]] = {}
    for each in stretches:
        for place in each.places:
            runs.setdefault(place, []).append(range(each.start, each.stop))
    return runs


def _picked(digests: Sequence[bytes], blocks: list[int]) -> Sequence[bytes]:
    """Cut out at once where they lie close together: a fifth of the time of picking one by one."""
    first, last = blocks[0], blocks[-1]
    if last - first > 2 * len(blocks):
        return [digests[each] for each in blocks]
    near = list(digests[first : last + 1])
    return [near[each - first] for each in blocks]
