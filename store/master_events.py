"""The KV-event stream that a Mooncake master publishes of its own (RFC 1527), and whether it is complete.

Three ZMQ frames: an empty topic, a sequence number that begins with 1 in each life of the master, a payload
(`store.object_events`). The master replays nothing; when its queue overflows it leaves a gap in the numbers.
What was lost at the end of a burst shows in its own count of batches, which is read once a second:

    poll     9 batches     1 .. 9 are here     all that was asked of the master since is kept up to date
    10, 12                                     a gap: whatever was known is forgotten, turns ask again
    poll    13 batches     .. 12 are here      13 has a second to arrive
    poll    13 batches     .. 12 are here      13 is lost: forgotten again
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from store.drain import Bell, Drain, EventSource, Inbox, Kind, Message
from store.mooncake_http import Published
from store.object_events import BadEvents, ObjectEvents, decode

logger = logging.getLogger(__name__)

_TARGET: Final = "mooncake-master"
# The event loop is given back after this long, however much waits (DESIGN: no step above 5 ms).
_STEP_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class MasterEventsStatus:
    """state: `following` while nothing is missing; `connecting`; `lost`, of which `why` says more.

    Counts are since the start of the gateway. foreign: objects that no turn here asks for. last_s: since the
    last batch.
    """

    endpoint: str
    state: Literal["connecting", "following", "lost"]
    why: str
    stored: int
    removed: int
    cleared: int
    foreign: int
    unknown: int
    gaps: int
    last_s: float | None


class MasterEvents:
    """Subscribes to the master at `endpoint` (tcp://HOST:PORT). One event loop, one thread (`store.drain`).

    objects: gets every event. follow: called with the time from which on all that was asked of the master is
    kept up to date by events, or with None when it is no longer. forget: called when events are missing, and
    when all objects went at once.
    """

    def __init__(
        self,
        endpoint: str,
        objects: ObjectEvents,
        *,
        follow: Callable[[float | None], None],
        forget: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._source: Final = EventSource(_TARGET, endpoint, None)
        self._objects = objects
        self._follow = follow
        self._forget = forget
        self._clock = clock
        self._inbox = Inbox()
        self._drain: Drain | None = None
        self._bell: Final = Bell(self._apply)
        self._connection = 0
        self._connected = False
        self._seq: int | None = None  # of the last batch on this connection
        self._floor: int | None = None  # before there is one: all up to this one were published earlier
        self._since: float | None = None
        self._heard = True  # False: it must be heard of again before it is believed
        self._why = ""
        self._last_at: float | None = None
        self._polled: Published | None = None
        self._seq_polled: int | None = None
        self._more = 0  # sequence numbers that were given to no batch, as far as is certain
        self.gaps = 0

    @property
    def following(self) -> bool:
        return self._since is not None

    async def start(self) -> None:
        self._bell.listen()
        self._drain = Drain(self._bell.ring)
        self._drain.start()
        self._drain.open(self._source, self._inbox)

    async def close(self) -> None:
        drain, self._drain = self._drain, None
        if drain is not None:
            await asyncio.to_thread(drain.stop)

    def status(self) -> MasterEventsStatus:
        state = "following" if self.following else "lost" if self._why else "connecting"
        objects = self._objects
        return MasterEventsStatus(
            self._source.endpoint,
            state,
            self._why,
            objects.stored,
            objects.removed,
            objects.cleared,
            objects.foreign,
            objects.unknown,
            self.gaps,
            None if self._last_at is None else self._clock() - self._last_at,
        )

    def restarted(self) -> None:
        """This may be another life of the master: what still comes from the present one is of no use."""
        self._unfollow("the master may have been restarted")
        self._begin(self._connection + 1)
        self._connected = False
        if self._drain is not None:
            self._drain.reconnect(_TARGET)

    def polled(self, published: Published | None, asked_at: float) -> None:
        """What the master counted when it was asked, `asked_at` or later; None: it did not say."""
        before, self._polled = self._polled, published
        came, self._seq_polled = self._seq_polled, self._seq
        last = self._floor if self._seq is None else self._seq
        if published is None or not published.enabled:
            self._unfollow("the master publishes no events")
            return
        if not self._connected:
            return
        if before is not None and published.batches < before.batches:
            self._lost("the master counts from the start again")
            self._more = 0
        elif before is not None and published.dropped > before.dropped:
            self._lost("events were dropped in the master's queue")
        elif not self._heard:
            pass
        elif before is not None and last is not None and last < before.batches + self._more:
            self._lost(f"batches up to {before.batches + self._more} did not arrive, the last was {last}")
            self._heard = False
        else:
            if last is None:
                self._floor = published.batches
            if self._since is None:
                self._since, self._why = asked_at, ""
                self._follow(asked_at)
        if came is not None:
            self._more = max(self._more, came - published.batches)

    # ------------------------------------------------------------------ what comes in

    def _apply(self) -> None:
        until = time.perf_counter() + _STEP_S
        while self._drain is not None and (message := self._inbox.take()) is not None:
            try:
                self._take(message)
            except Exception:
                logger.exception("events of the Mooncake master could not be applied")
                self._lost("a batch could not be applied")
            if time.perf_counter() >= until:
                self._bell.ring()
                return

    def _take(self, message: Message) -> None:
        kind, connection, seq, payload = message
        if connection < self._connection:
            return
        if kind is Kind.CONNECTED:
            self._begin(connection)
            self._connected = True
        elif kind is Kind.DISCONNECTED:
            self._connected = False
            self._unfollow("disconnected")
        elif kind is Kind.LIVE:
            self._live(seq, payload)
        else:
            self._lost("a message was dropped here" if kind is Kind.DROPPED else "a message of another form")

    def _live(self, seq: int, payload: bytes) -> None:
        last, self._seq = self._seq, seq
        self._last_at = now = self._clock()
        if last is None and self._floor is not None and seq > self._floor + 1:
            last = self._floor
        if last is not None and seq != last + 1:
            self._lost(f"batch {seq} came after {last}")
        try:
            events = decode(payload)
        except BadEvents as error:
            self._lost(f"batch {seq} can't be read: {error}")
            self._heard = False
            return
        self._heard = True
        if self._objects.apply(events, now):
            self._forget()

    def _begin(self, connection: int) -> None:
        self._connection = connection
        self._seq = self._floor = self._seq_polled = self._polled = None
        self._more = 0
        self._heard = True

    def _lost(self, why: str) -> None:
        """Events are missing: which objects are still there is not known any more."""
        self.gaps += 1
        self._unfollow(why)
        self._forget()

    def _unfollow(self, why: str) -> None:
        if self._since is not None:
            logger.warning("the events of the Mooncake master are not relied on: %s", why)
            self._since = None
            self._follow(None)
        self._why = why
