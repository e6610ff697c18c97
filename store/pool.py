"""How much of a prompt the Mooncake pool holds.

A turn asks once: which leading blocks of this chain are whole (every rank, every group) and readable?

    chain      b0 b1 b2 b3 b4 b5        in the pool: b0 b1 b2 .. b4 b5     (b3 was evicted)
    prefix     3 blocks                 b4 and b5 are there and of no use

The engine looks the whole chain up from block 0, so what counts is complete from there. What was seen lately
is remembered; the rest is asked of the master's HTTP in at most two round trips: the next blocks plus some
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from store.keys import KeyLayout
from store.mooncake_http import Counters, MasterAway, MooncakeHttp, Replicas, Segment, queryable
from store.segments import Segments
from store.sightings import Sighting, Sightings, Stretch, Walk

logger = logging.getLogger(__name__)

# One key takes 0.20 ms, 256 take 1.1 ms: the first round trip answers most turns at a fifth of the budget.
_FIRST_KEYS: Final = 256
_FAR_BLOCKS: Final = 32
_CHUNK_KEYS: Final = 512
_MOST_KEYS: Final = 8192
# Round trips under way, left behind ones included; above, the master is behind and gets no more.
_MOST_CALLS: Final = 32
# After the turn has gone on without it, for what is worth remembering.
_LATE_S: Final = 0.25
_MISSES: Final = 3
_WATCH_S: Final = 1.0
_FIRST_RETRY_S: Final = 0.05
_WATCH_TIMEOUT_S: Final = 0.5
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
    stretches: where they are.
    """

    blocks: int
    known: bool
    exact: bool = True
    stretches: tuple[Stretch, ...] = ()

    def held(self, place: str, start: int = 0) -> int:
        """How many of the blocks from `start` on lie in one segment (`IP:PORT`), or on one host."""
        return sum(
            max(0, each.stop - max(start, each.start)) for each in self.stretches if place in each.places
        )


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
    checked_s: float | None


class PoolView:
    """The pool behind one master. Never raises once it is started; one event loop.

    rpc_address: HOST:PORT as workers use it. Its admin HTTP is looked for at `http_port` of the same host,
    then at the address itself. budget_s: what a turn may wait, both round trips together.
    """

    def __init__(
        self,
        rpc_address: str,
        *,
        http_port: int = 9003,
        budget_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, _, port = rpc_address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"the Mooncake master is named HOST:PORT, not {rpc_address!r}")
        self._master: Final = rpc_address
        self._places = list(dict.fromkeys([(host.strip("[]"), http_port), (host.strip("[]"), int(port))]))
        self._budget_s: Final = budget_s
        self._clock = clock
        self._http: MooncakeHttp | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._line: asyncio.BaseTransport | None = None
        self._wake = asyncio.Event()
        self._calls: set[asyncio.Task[bool]] = set()
        self._segments = Segments()
        self._sightings: dict[KeyLayout, Sightings] = {}
        self._counters: Counters | None = None
        self._checked_at: float | None = None
        self._forgot_at = float("-inf")
        self._reason = "starting"
        self._misses = 0
        self._turns = self._asked = self._late = self._outages = self._restarts = 0

    async def start(self) -> None:
        """Returns after the first look at the master, whether it answered or not; 1 s at most."""
        with contextlib.suppress(MasterAway):
            await self._look()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._line is not None:
            self._line.close()
        if self._http is not None:
            await self._http.close()

    @property
    def degraded(self) -> bool:
        return self._reason != ""

    def status(self) -> PoolStatus:
        now = self._clock()
        failing = set(self._segments.failing(now))
        return PoolStatus(
            master=self._master,
            degraded=self.degraded,
            reason=self._reason,
            keys=self._counters.keys if self._counters is not None else 0,
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
            outages=self._outages,
            restarts=self._restarts,
            checked_s=now - self._checked_at if self._checked_at is not None else None,
        )

    async def prefix(self, chain: Chain, layout: KeyLayout) -> PoolPrefix:
        """Leading blocks of `chain` that a worker with this layout can read from the pool. Takes no lease."""
        self._turns += 1
        prefixes = queryable(layout)
        if self.degraded or prefixes is None:
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
            answered = await self._ask(turn, self._second_trip(turn, walk.blocks), deadline)
            walk = sightings.walk(keys, self._segments, self._clock())
        if not answered:
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

    def segments(self) -> list[Segment]:
        """What the master lists; up to a second old."""
        return list(self._segments)

    def _of(self, layout: KeyLayout) -> Sightings:
        if layout not in self._sightings:
            while len(self._sightings) >= _LAYOUTS:
                del self._sightings[next(iter(self._sightings))]
            self._sightings[layout] = Sightings(_REMEMBERED)
        return self._sightings[layout]

    def _found(self, walk: Walk) -> PoolPrefix:
        return PoolPrefix(walk.blocks, known=True, exact=walk.stop != "unknown", stretches=walk.stretches)

    def _first_trip(self, turn: _Turn, start: int) -> list[int]:
        near = max(1, _FIRST_KEYS // len(turn.prefixes))
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

    async def _ask(self, turn: _Turn, blocks: list[int], deadline: float) -> bool:
        """Whether all were answered by the deadline. What comes later is remembered for other turns."""
        size = max(1, _CHUNK_KEYS // len(turn.prefixes))
        chunks = [blocks[at : at + size] for at in range(0, len(blocks), size)]
        if not chunks:
            return True
        left = deadline - self._clock()
        if self._http is None or left <= 0 or len(self._calls) + len(chunks) > _MOST_CALLS:
            return False
        calls = [asyncio.create_task(self._call(self._http, turn, chunk)) for chunk in chunks]
        for call in calls:
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        done, pending = await asyncio.wait(calls, timeout=left)
        if done:
            self._misses = 0
        elif self._clock() < deadline + self._budget_s:  # else this loop was late, not the master
            self._misses += 1
            if self._misses >= _MISSES:
                self._degrade("slow")
        return not pending and all(call.result() for call in done)

    async def _call(self, http: MooncakeHttp, turn: _Turn, blocks: list[int]) -> bool:
        """One round trip. False when it failed."""
        sent_at = self._clock()
        hexes = [turn.digests[block].hex() for block in blocks]
        query = [prefix + text for text in hexes for prefix in turn.quoted]
        try:
            found = await http.replicas(query, _LATE_S)
        except MasterAway as away:
            if away.refused:
                self._degrade(away.reason)
            return False
        if sent_at < self._forgot_at:
            return False
        made: dict[tuple[Replicas | None, ...], Sighting] = {}
        for block, text in zip(blocks, hexes, strict=True):
            parts = tuple(found.get(prefix + text) for prefix in turn.prefixes)
            sighting = made.get(parts)
            if sighting is None:
                whole = tuple(part for part in parts if part is not None)
                sighting = made[parts] = Sighting(sent_at, whole if len(whole) == len(parts) else ())
            turn.sightings.saw(turn.keys[block], sighting)
        return True

    async def _watch(self) -> None:
        """The owner of all knowledge of the master: looks every second, more often while it is away."""
        delay = _WATCH_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()
                    delay = _FIRST_RETRY_S / 2
            self._wake.clear()
            try:
                await self._look()
                delay = _WATCH_S
            except MasterAway as away:
                self._degrade(away.reason)
                delay = min(_WATCH_S, 2 * delay)
            except Exception:
                logger.exception("the pool view could not look at the master")
                self._degrade("error")
                delay = _WATCH_S

    async def _look(self) -> None:
        """Health, segments, counters and, after an outage, one look-up within the budget."""
        http = self._http = self._http or await self._reached()
        health = await http.health(_WATCH_TIMEOUT_S)
        if not health.serving:
            raise MasterAway(f"role {health.role}, not serving")
        counters = await http.counters(_WATCH_TIMEOUT_S)
        asked_at = self._clock()
        segments = await http.segments(_WATCH_TIMEOUT_S)
        before, self._counters = self._counters, counters
        if before is not None and (counters.age < before.age or counters.losses < before.losses):
            self._restarts += 1
            self._forget()
        elif before is not None and (counters.losses > before.losses or counters.keys < before.keys):
            for sightings in self._sightings.values():
                sightings.objects_vanished(self._clock())
        self._segments.told(segments, asked_at)
        if self._line is None:
            await self._listen(http)
        if self.degraded:
            began = self._clock()
            await http.replicas(["moongate"], self._budget_s)
            if self._clock() - began > self._budget_s:
                raise MasterAway("slow")
            logger.info("the pool of master %s can be asked", self._master)
            self._reason = ""
            self._misses = 0
        self._checked_at = self._clock()

    async def _reached(self) -> MooncakeHttp:
        """The admin HTTP, wherever it answers."""
        failure = MasterAway("refused")
        for host, port in self._places:
            http = MooncakeHttp(host, port)
            try:
                await http.health(_WATCH_TIMEOUT_S)
            except MasterAway as away:
                failure = away
                await http.close()
                if not away.refused:
                    break
            else:
                return http
        raise failure

    async def _listen(self, http: MooncakeHttp) -> None:
        """An idle connection: the kernel tells at once when the master dies, the counters a second later."""
        try:
            async with asyncio.timeout(_WATCH_TIMEOUT_S):
                self._line, _ = await asyncio.get_running_loop().create_connection(
                    lambda: _Line(self._hung_up), http.host, http.port
                )
        except (OSError, TimeoutError):
            raise MasterAway("refused", refused=True) from None

    def _hung_up(self) -> None:
        self._line = None
        self._forget()
        self._degrade("hung up")

    def _forget(self) -> None:
        """This may be another life of the master, and in that it knows no keys."""
        self._forgot_at = self._clock()
        for sightings in self._sightings.values():
            sightings.clear()

    def _degrade(self, reason: str) -> None:
        if not self.degraded:
            logger.warning("the pool of master %s cannot be asked: %s", self._master, reason)
            self._outages += 1
            self._wake.set()
        self._reason = reason


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one look-up works on. `prefixes` and `quoted`: of keys, as they are and as they go into a URL."""

    keys: list[int]
    digests: Sequence[bytes]
    prefixes: tuple[str, ...]
    quoted: tuple[str, ...]
    sightings: Sightings


class _Line(asyncio.Protocol):
    """Tells when the other side ends the connection; not when this side does."""

    def __init__(self, hung_up: Callable[[], None]) -> None:
        self._hung_up = hung_up

    def eof_received(self) -> None:
        self._hung_up()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._hung_up()
