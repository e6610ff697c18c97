"""The owner of all knowledge of a Mooncake master: whether it can be asked, what it says of its segments."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from store.mooncake_http import Counters, MasterAway, MooncakeHttp, Published
from store.segments import Segments

logger = logging.getLogger(__name__)

_WATCH_S: Final = 1.0
_FIRST_RETRY_S: Final = 0.05
_TIMEOUT_S: Final = 0.5
_STARTING: Final = "starting"


class MasterWatch:
    """Looks at the master every second, and more often while it is away. One task, one event loop.

    places: HOST and PORT where its admin HTTP may be, tried in order. budget_s: what a look-up may take for
    the master to count as well again. segments: kept up to date here. forget: called when this may be another
    life of the master, all objects lost; doubt: when some objects were lost, or may have been; looked: after
    every good look. published: gets at every look what the master says of its own events, None when it does
    not, and when it was asked; without it only a recovered master is asked.
    """

    def __init__(
        self,
        master: str,
        places: list[tuple[str, int]],
        *,
        budget_s: float,
        clock: Callable[[], float],
        segments: Segments,
        forget: Callable[[], None],
        doubt: Callable[[], None],
        looked: Callable[[], None],
        published: Callable[[Published | None, float], None] | None = None,
    ) -> None:
        self._master = master
        self._places = places
        self._budget_s = budget_s
        self._clock = clock
        self._segments = segments
        self._forget = forget
        self._doubt = doubt
        self._on_look = looked
        self._on_published = published
        self._task: asyncio.Task[None] | None = None
        self._line: asyncio.BaseTransport | None = None
        self._wake = asyncio.Event()
        self.http: MooncakeHttp | None = None
        self.counters: Counters | None = None
        self.checked_at: float | None = None
        self.reason = _STARTING
        self.publishes_events: bool | None = None
        self.outages = 0
        self.restarts = 0

    @property
    def degraded(self) -> bool:
        """Whether the master is not to be asked; `reason` says why not."""
        return self.reason != ""

    @property
    def places(self) -> tuple[str, ...]:
        """HOST:PORT of the admin HTTP; all where it is looked for until it has answered."""
        places = self._places if self.http is None else [(self.http.host, self.http.port)]
        return tuple(f"{host}:{port}" for host, port in places)

    async def start(self) -> None:
        """Returns after the first look, whether the master answered or not; 1 s at most."""
        await self._looked()
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._line is not None:
            self._line.close()
        if self.http is not None:
            await self.http.close()

    def degrade(self, reason: str) -> None:
        if self.reason in ("", _STARTING):
            logger.warning(
                "the pool of master %s cannot be asked: %s; its admin HTTP (mooncake.http_port) was tried "
                "at %s",
                *(self._master, reason, ", ".join(self.places)),
            )
        if not self.degraded:
            self.outages += 1
            self._wake.set()
        self.reason = reason

    async def _watch(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_s if self.degraded else _WATCH_S):
                    await self._wake.wait()
            self._wake.clear()
            retry_s = _FIRST_RETRY_S if await self._looked() else min(_WATCH_S, 2 * retry_s)

    async def _looked(self) -> bool:
        try:
            await self._look()
        except MasterAway as away:
            self.degrade(away.reason)
        except Exception:
            logger.exception("the Mooncake master could not be looked at")
            self.degrade("error")
        return not self.degraded

    async def _look(self) -> None:
        """Health, segments, counters and, after an outage, one look-up within the budget."""
        http = self.http = self.http or await self._reached()
        health = await http.health(_TIMEOUT_S)
        if not health.serving:
            raise MasterAway(f"role {health.role}, not serving")
        counters = await http.counters(_TIMEOUT_S)
        asked_at = self._clock()
        segments = await http.segments(_TIMEOUT_S)
        before, self.counters = self.counters, counters
        if before is not None and (counters.age < before.age or counters.losses < before.losses):
            self.restarts += 1
            self._forget()
        elif before is not None and (counters.losses > before.losses or counters.keys < before.keys):
            self._doubt()
        self._segments.told(segments, asked_at)
        if self._line is None:
            await self._listen(http)
        if self.degraded or self._on_published is not None:
            await self._ask_for_events(http)
        if self.degraded:
            began = self._clock()
            await http.replicas(["moongate"], self._budget_s)
            if self._clock() - began > self._budget_s:
                raise MasterAway("slow")
            logger.info("the pool of master %s can be asked", self._master)
            self.reason = ""
        self.checked_at = self._clock()
        self._on_look()

    async def _ask_for_events(self, http: MooncakeHttp) -> None:
        asked_at, published = self._clock(), None
        with contextlib.suppress(MasterAway):  # older masters do not know the path
            published = await http.published(_TIMEOUT_S)
            self.publishes_events = published.enabled
        if self._on_published is not None:
            self._on_published(published, asked_at)

    async def _reached(self) -> MooncakeHttp:
        """The admin HTTP, wherever it answers."""
        failure = MasterAway("refused")
        for host, port in self._places:
            http = MooncakeHttp(host, port)
            try:
                await http.health(_TIMEOUT_S)
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
            async with asyncio.timeout(_TIMEOUT_S):
                self._line, _ = await asyncio.get_running_loop().create_connection(
                    lambda: _Line(self._hung_up), http.host, http.port
                )
        except (OSError, TimeoutError):
            raise MasterAway("refused", refused=True) from None

    def _hung_up(self) -> None:
        self._line = None
        self._forget()
        self.degrade("hung up")


class _Line(asyncio.Protocol):
    """Tells when the other side ends the connection; not when this side does."""

    def __init__(self, hung_up: Callable[[], None]) -> None:
        self._hung_up = hung_up

    def eof_received(self) -> None:
        self._hung_up()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._hung_up()
