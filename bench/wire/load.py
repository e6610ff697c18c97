"""A closed-loop load generator: so many connections, each sends its next body once it has its answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"x-session-id: %b\r\ncontent-length: %d\r\n\r\n"
)
_SENT_AT = re.compile(rb'"created":(\d{17})\b')


@dataclass(slots=True)
class Timing:
    """Seconds from the request to the first byte of its answer and to the last; failed: not a 200.

    delays: seconds that each paced chunk took from the worker, but for those cut in two by a read.
    """

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    failed: int = 0


class Client(asyncio.Protocol):
    """One connection that works through `bodies`. `done` is set after the last, or when the server leaves."""

    def __init__(self, session: bytes, bodies: Iterator[bytes], timing: Timing, pause_s: float) -> None:
        self.session = session
        self.pause_s = pause_s
        self.bodies = bodies
        self.timing = timing
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        transport.set_write_buffer_limits(high=1 << 22)  # type: ignore[attr-defined]
        self.next()

    def next(self) -> None:
        body = next(self.bodies, None)
        if body is None:
            self.transport.close()
            if not self.done.done():
                self.done.set_result(None)
            return
        self.received = b""
        self.length = -1
        self.have = 0
        self.tail = b""
        self.started = time.perf_counter()
        self.transport.write(_HEAD % (self.session, len(body)) + body)

    def data_received(self, data: bytes) -> None:
        if not self.have:
            self.timing.first.append(time.perf_counter() - self.started)
        self.have += len(data)
        if self.length < 0:
            self.received += data
            end = self.received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.received[:end].lower()
            if not head.startswith(b"http/1.1 200"):
                self.timing.failed += 1
            at = head.find(b"content-length:")
            if at >= 0:
                self.length = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
            else:
                self.length = 0
        if not self.length:
            now = time.monotonic_ns()
            self.timing.delays += ((now - int(sent)) / 1e9 for sent in _SENT_AT.findall(data))
        self.tail = (self.tail + data)[-5:]
        if self.have >= self.length if self.length else self.tail == b"0\r\n\r\n":
            self.timing.whole.append(time.perf_counter() - self.started)
            if self.pause_s:
                asyncio.get_running_loop().call_later(self.pause_s, self.next)
            else:
                self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.timing.failed += 1
            self.done.set_result(None)


async def drive(
    port: int,
    lanes: Sequence[Sequence[bytes]],
    pause_s: float = 0.0,
    apart_s: float = 0.0,
    timeout_s: float = 120.0,
) -> Timing:
    """Each lane's bodies over a connection of its own, `pause_s` before each next one.

    apart_s: between the lanes' beginnings.
    """
    timing = Timing()
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    for number, lane in enumerate(lanes):
        client = Client(b"s%d" % number, iter(lane), timing, pause_s)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
        clients.append(client)
        if apart_s:
            await asyncio.sleep(apart_s)
    async with asyncio.timeout(timeout_s):
        await asyncio.gather(*(client.done for client in clients))
    return timing


def cpu_s(pid: int) -> float:
    """CPU seconds that all threads of a process have used, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)


def rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6
