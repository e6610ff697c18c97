"""The thread that empties the workers' event sockets.

vLLM's publisher drops batches once a subscriber's queue is full, so nothing that decodes, waits or shares
the event loop's load stands between the socket and memory: this thread only moves raw messages to bounded
inboxes. SUB for the live stream; DEALER, one per request, for replays (a REQ socket reads one reply of many);
a ZMQ monitor for connections. A connection that ends takes its sockets with it: what lies in their queues may
be another publisher's.
"""

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

# Raw messages of one target that wait for the event loop: beyond it they are dropped and replayed later.
INBOX_MESSAGES: Final = 50_000
INBOX_BYTES: Final = 256 << 20
# A publisher answers replay requests between batches, within 0.1 s when idle (vLLM 0.32).
REPLAY_SILENCE_S: Final = 3.0

_BURST: Final = 1000  # messages taken from one socket before the next one gets its turn
_HEARTBEAT_MS: Final = 5_000
_END: Final = b"\xff" * 8


class Kind(IntEnum):
    CONNECTED = 0
    DISCONNECTED = 1
    LIVE = 2
    REPLAYED = 3
    REPLAY_ENDED = 4
    REPLAY_FAILED = 5
    DROPPED = 6
    GARBAGE = 7


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a target publishes: addresses that can be reached from here. replay_endpoint None: no replay."""

    target: str
    endpoint: str
    replay_endpoint: str | None
    topic: str = ""


Message: TypeAlias = tuple[Kind, int, int, bytes]
"""kind, number of the connection (of the request for replays), sequence number, payload."""


class Inbox:
    """What one target sent and the event loop has not taken yet. Written by the thread, read by the loop."""

    def __init__(self, messages: int = INBOX_MESSAGES, size: int = INBOX_BYTES) -> None:
        self._limits = messages, size
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, message: Message) -> None:
        with self._lock:
            full = len(self._messages) >= self._limits[0] or self._bytes >= self._limits[1]
            if not full or message[0] not in (Kind.LIVE, Kind.REPLAYED):
                self._messages.append(message)
                self._bytes += len(message[3])
            elif self._messages[-1][0] is not Kind.DROPPED:
                self._messages.append((Kind.DROPPED, message[1], 0, b""))

    def take(self) -> Message | None:
        with self._lock:
            if not self._messages:
                return None
            message = self._messages.popleft()
            self._bytes -= len(message[3])
            return message


class Bell:
    """Has `answer` called in the event loop soon, once for however often it was rung until then."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = False

    def listen(self) -> None:
        """From now on, in the loop that runs."""
        self._loop = asyncio.get_running_loop()

    def ring(self) -> None:
        """From any thread."""
        if self._loop is not None and not self._rung:
            self._rung = True
            # A closed loop raises: nobody waits for events any more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answered)

    def _answered(self) -> None:
        self._rung = False
        self._answer()


@dataclass(slots=True)
class _Link:
    """The sockets of one source. connection: counts them, so that what a former one sent can be told."""

    source: EventSource
    inbox: Inbox
    connection: int = 0
    connected: bool = False
    live: "zmq.Socket[bytes] | None" = None
    monitor: "zmq.Socket[bytes] | None" = None
    replay: "zmq.Socket[bytes] | None" = None
    request: int = 0
    deadline: float = field(default=float("inf"))


class Drain:
    """Owns every socket. Methods may be called from the event loop's thread; they only queue a command."""

    def __init__(self, notify: Callable[[], None], *, replay_silence_s: float = REPLAY_SILENCE_S) -> None:
        """`notify` is called in the thread after messages were put into inboxes."""
        self._notify = notify
        self._silence = replay_silence_s
        self._commands: deque[Callable[[], None]] = deque()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._running = True
        self._links: dict[str, _Link] = {}
        self._by_socket: dict[zmq.Socket[bytes], tuple[_Link, Callable[[_Link], bool]]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Blocks until the thread has closed its sockets."""

        def end() -> None:
            self._running = False

        self._command(end)
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def open(self, source: EventSource, inbox: Inbox) -> None:
        self._command(lambda: self._open(source, inbox))

    def close(self, target: str) -> None:
        self._command(lambda: self._close(target))

    def reconnect(self, target: str) -> None:
        """Give up the present connection and make another."""
        self._command(lambda: self._reconnect(target))

    def ask(self, target: str, start: int, request: int) -> None:
        """Have the target replay from `start`; what an earlier request still brings is thrown away."""
        self._command(lambda: self._ask(target, start, request))

    # ------------------------------------------------------------------ in the thread

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        # Full means that so many wake-ups wait already that one more says nothing.
        with suppress(BlockingIOError):
            self._wake.send(b"x")

    def _run(self) -> None:
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        try:
            while self._running:
                try:
                    self._turn()
                except Exception:
                    # A thread that ended would leave every stream silent and seemingly exact.
                    logger.exception("KV events: a turn of the draining thread failed")
                    time.sleep(0.1)
        finally:
            for target in list(self._links):
                self._close(target)
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._patience_ms()))
        moved = False
        if ready.pop(self._woken.fileno(), None):
            while self._woken_bytes():
                pass
        while self._commands:
            self._commands.popleft()()
        # Monitors first: a connection's end must be known before what follows it is read.
        for sock in sorted(ready, key=lambda s: not self._is_monitor(s)):
            link_and_reader = self._by_socket.get(sock)
            if link_and_reader is not None:
                link, read = link_and_reader
                moved |= read(link)
        moved |= self._expire()
        if moved:
            self._notify()

    def _woken_bytes(self) -> bytes:
        try:
            return self._woken.recv(4096)
        except BlockingIOError:
            return b""

    def _is_monitor(self, sock: Any) -> bool:
        found = self._by_socket.get(sock)
        return found is not None and found[0].monitor is sock

    def _patience_ms(self) -> int | None:
        first = min((link.deadline for link in self._links.values()), default=float("inf"))
        return None if first == float("inf") else max(0, int((first - time.monotonic()) * 1000) + 1)

    def _expire(self) -> bool:
        now = time.monotonic()
        late = [link for link in self._links.values() if link.deadline <= now]
        for link in late:
            self._end_replay(link, Kind.REPLAY_FAILED)
        return bool(late)

    def _open(self, source: EventSource, inbox: Inbox) -> None:
        self._close(source.target)
        link = self._links[source.target] = _Link(source, inbox)
        self._connect(link)

    def _close(self, target: str) -> None:
        link = self._links.pop(target, None)
        if link is not None:
            self._disconnect(link)

    def _reconnect(self, target: str) -> None:
        link = self._links.get(target)
        if link is not None:
            self._disconnect(link)
            self._connect(link)

    def _connect(self, link: _Link) -> None:
        link.connection += 1
        link.connected = False
        live = self._context.socket(zmq.SUB)
        live.set(zmq.LINGER, 0)
        live.set(zmq.IPV6, 1)
        live.set(zmq.RCVHWM, INBOX_MESSAGES)
        live.set(zmq.RECONNECT_IVL, 100)
        live.set(zmq.RECONNECT_IVL_MAX, 2_000)
        # Without it a peer that vanished without closing looks like one that has nothing to say.
        live.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        live.set(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        live.set(zmq.SUBSCRIBE, link.source.topic.encode())
        link.live = live
        link.monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._watch(link.monitor, link, self._read_monitor)
        self._watch(live, link, self._read_live)
        try:
            live.connect(link.source.endpoint)
        except zmq.ZMQError as error:
            logger.warning("cannot subscribe to the KV events of %s: %s", link.source.target, error)

    def _disconnect(self, link: _Link) -> None:
        self._drop_replay(link)
        if link.live is not None and link.monitor is not None:
            self._forget(link.monitor)
            link.live.disable_monitor()
            link.monitor.close(linger=0)
            self._forget(link.live)
            link.live.close(linger=0)
        link.live = link.monitor = None

    def _watch(self, sock: "zmq.Socket[bytes]", link: _Link, read: Callable[[_Link], bool]) -> None:
        self._by_socket[sock] = link, read
        self._poller.register(sock, zmq.POLLIN)

    def _forget(self, sock: "zmq.Socket[bytes]") -> None:
        self._by_socket.pop(sock, None)
        self._poller.unregister(sock)

    def _read_monitor(self, link: _Link) -> bool:
        while link.monitor is not None:
            try:
                event = recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                break
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.connected = True
                link.inbox.put((Kind.CONNECTED, link.connection, 0, b""))
            elif event == zmq.EVENT_DISCONNECTED and link.connected:
                link.inbox.put((Kind.DISCONNECTED, link.connection, 0, b""))
                self._disconnect(link)
                self._connect(link)
        return True

    def _read_live(self, link: _Link) -> bool:
        for _ in range(_BURST):
            if link.live is None:
                break
            try:
                frames = link.live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 3 and len(frames[1]) == 8:
                seq = int.from_bytes(frames[1], "big")
                link.inbox.put((Kind.LIVE, link.connection, seq, frames[2]))
            else:
                link.inbox.put((Kind.GARBAGE, link.connection, 0, b""))
        return True

    # ------------------------------------------------------------------ replays

    def _ask(self, target: str, start: int, request: int) -> None:
        link = self._links.get(target)
        if link is None or link.source.replay_endpoint is None:
            return
        self._drop_replay(link)
        replay = self._context.socket(zmq.DEALER)
        replay.set(zmq.LINGER, 0)
        replay.set(zmq.IPV6, 1)
        replay.set(zmq.RCVHWM, 0)  # a full queue makes the ROUTER drop replies; the inbox is the bound
        link.replay = replay
        link.request = request
        link.deadline = time.monotonic() + self._silence
        self._watch(replay, link, self._read_replay)
        try:
            replay.connect(link.source.replay_endpoint)
            replay.send_multipart([b"", start.to_bytes(8, "big")])
        except zmq.ZMQError as error:
            logger.warning("cannot ask %s for a replay of its KV events: %s", target, error)

    def _read_replay(self, link: _Link) -> bool:
        for _ in range(_BURST):
            if link.replay is None:
                break
            try:
                frames = link.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            link.deadline = time.monotonic() + self._silence
            if len(frames) != 4 or len(frames[2]) != 8:
                link.inbox.put((Kind.GARBAGE, link.connection, 0, b""))
            elif frames[2] == _END:
                self._end_replay(link, Kind.REPLAY_ENDED)
            else:
                seq = int.from_bytes(frames[2], "big")
                link.inbox.put((Kind.REPLAYED, link.request, seq, frames[3]))
        return True

    def _end_replay(self, link: _Link, how: Kind) -> None:
        link.inbox.put((how, link.request, 0, b""))
        self._drop_replay(link)

    def _drop_replay(self, link: _Link) -> None:
        link.deadline = float("inf")
        if link.replay is not None:
            self._forget(link.replay)
            link.replay.close(linger=0)
            link.replay = None
