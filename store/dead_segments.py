"""Objects that a dead worker's memory held, taken out of the pool before an engine tries to load them.

The master offers them until its client_ttl has passed (10 s by default), and an engine that finds one in its
look-up tries to load it again and again all that time instead of computing. Once they are removed it computes
at once, and stores them anew in living memory (a removed object can be put again; without removal the put is
skipped, and the block is lost when the master notices).

Removing an object that somebody reads would give that reader other bytes. So it happens only when its bytes
are gone already, and only in this order: all complete copies are in segments of dead processes, says the
master; their endpoints refuse connections now, though they took one before; the removal is sent at once.
An endpoint that takes no connection from here, or whose host does not answer, is never called dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Final, Literal

from store.mooncake_http import MasterAway, Replicas
from store.mooncake_rpc import MooncakeRpc
from store.segments import Segments

logger = logging.getLogger(__name__)

_CONNECT_S: Final = 0.2
_AGAIN_S: Final = (0.02, 0.1, 0.5, 2.0)
# From the master's answer to the removal. Until then no engine can have put the object anew and another be
# reading it: that takes a look-up, a prefill and a look-up.
_FRESH_S: Final = 0.05
_SETUP_S: Final = 5.0
# A turn rather waits for the client than for an engine that tries to load from a dead worker.
_READY_S: Final = 0.25
_REMOVE_S: Final = 1.0

Heard = Literal["listens", "refuses", "silent"]


class DeadSegments:
    """Which segments' processes are dead, and the removal of what only they hold. One event loop.

    Never raises. Without the store client (the `mooncake` extra) segments are found dead and nothing is
    removed. died: called when a segment was found dead and removals can begin. client: one there is anyway.
    """

    def __init__(
        self,
        master: str,
        segments: Segments,
        *,
        clock: Callable[[], float],
        died: Callable[[], None],
        client: MooncakeRpc | None = None,
    ) -> None:
        self._master = master
        self._segments = segments
        self._clock = clock
        self._died = died
        self._client = client
        self._client_lock = asyncio.Lock()
        self._unavailable = False
        self._met: set[str] = set()
        self._listened: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._checks: set[asyncio.Task[None]] = set()
        self._setups: set[asyncio.Task[None]] = set()
        self.removed = 0
        # Objects that were to be removed and could not, since one last could.
        self._kept = 0

    def meet(self) -> None:
        """The master may have listed new segments: make sure that their endpoints can be heard from here.

        Connections are closed at once: an idle one keeps a client from all its peers for 5 s, and every one
        costs two lines of its log.
        """
        endpoints = set(self._segments.endpoints())
        new = endpoints - self._met
        self._met = endpoints
        self._listened &= endpoints
        for endpoint in new:
            self._start(self._meet(endpoint), self._tasks)

    def suspect(self, where: str) -> None:
        """The worker that owns this segment, or this host, may be dead."""
        for endpoint in self._segments.endpoints(where):
            self._start(self._check(endpoint), self._checks)
            self._start(self._check_again(endpoint), self._tasks)

    async def settled(self, timeout_s: float) -> None:
        """Returns when no suspicion is open, or after the timeout; `_READY_S` later if one was true."""
        if self._checks:
            await asyncio.wait(self._checks, timeout=timeout_s)
        if self._setups:
            await asyncio.wait(self._setups, timeout=_READY_S)

    async def bury(self, found: Mapping[str, Replicas], asked_at: float) -> int:
        """Removes those of `found` that only the dead hold; how many.

        found: the master's answer, asked for at `asked_at`.
        """
        dead = self._segments.dead
        doomed = {
            key: copies
            for key, copies in found.items()
            if copies.endpoints and copies.endpoints <= dead and not copies.elsewhere
        }
        if not doomed:
            return 0
        client = await self._store_client()
        if client is None:
            return 0
        # A new process may have taken the port; its objects carry the same endpoint.
        endpoints = frozenset[str]().union(*(copies.endpoints for copies in doomed.values()))
        heard = await asyncio.gather(*map(_heard, endpoints))
        for endpoint, answer in zip(endpoints, heard, strict=True):
            if answer != "refuses":
                dead.discard(endpoint)
        keys = [key for key, copies in doomed.items() if copies.endpoints <= dead]
        left_s = asked_at + _FRESH_S - self._clock()
        if not keys or left_s <= 0:
            return 0
        try:
            removed = await client.remove(keys, time.monotonic() + left_s, _REMOVE_S)
        except MasterAway as away:
            # Many turns find some at once: said once, and once more when it works again.
            if not self._kept:
                names = ", ".join(sorted({self._segments.name(each) for each in endpoints & dead}))
                logger.warning(
                    "objects of which the dead pool segment %s had the last copy can't be removed now (%s): "
                    "the next turn that finds some tries again",
                    *(names, away.reason),
                )
            self._kept += len(keys)
            return 0
        if self._kept:
            logger.info("objects of dead pool segments are removed again, which failed for %d", self._kept)
            self._kept = 0
        self.removed += removed
        return removed

    async def close(self) -> None:
        tasks = self._tasks | self._checks | self._setups
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _meet(self, endpoint: str) -> None:
        if await _heard(endpoint) == "listens":
            self._listened.add(endpoint)

    async def _check_again(self, endpoint: str) -> None:
        """A server's processes end one after the other, the one that holds the memory not always first."""
        for delay_s in _AGAIN_S:
            await asyncio.sleep(delay_s)
            if self._segments.is_lost(endpoint) and endpoint not in self._segments.dead:
                await self._check(endpoint)

    async def _check(self, endpoint: str) -> None:
        answer = await _heard(endpoint)
        if answer == "listens":
            self._segments.dead.discard(endpoint)
        elif answer == "refuses" and endpoint in self._listened and endpoint not in self._segments.dead:
            logger.info("the process of pool segment %s is gone", self._segments.name(endpoint))
            self._segments.died(endpoint, self._clock())
            self._start(self._ready(), self._setups)

    async def _ready(self) -> None:
        """Set the client up (60 to 80 ms) before a removal has to wait for it."""
        client = await self._store_client()
        if client is not None:
            with contextlib.suppress(MasterAway):
                await client.exist(["moongate"], _SETUP_S)
            self._died()

    async def _store_client(self) -> MooncakeRpc | None:
        async with self._client_lock:
            if self._client is None and not self._unavailable:
                try:
                    self._client = await asyncio.to_thread(MooncakeRpc, self._master)
                except ImportError:
                    logger.warning("no Mooncake store client: objects of dead workers can't be removed")
                    self._unavailable = True
            return self._client

    def _start(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _heard(endpoint: str) -> Heard:
    """Whether a process listens at `IP:PORT`, in 0.2 s at most."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            loop = asyncio.get_running_loop()
            line, _ = await loop.create_connection(asyncio.Protocol, host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return "refuses"
    except (OSError, ValueError, OverflowError, TimeoutError):
        return "silent"
    line.abort()
    return "listens"
