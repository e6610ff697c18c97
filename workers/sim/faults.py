"""Faults a test can switch on in a simulated worker, and the record of what reached it.

`POST /sim/faults` takes a JSON object of these; it replaces what was set before, `{}` ends everything. Faults
of requests (`status`, `hang`, `die`) apply to `path`, or to all below it if it ends with a slash, and, with
`times`, only so often.
"""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    path: str = "/v1/"
    times: int | None = None


class Status(Fault):
    """Answer with this, without looking at the request."""

    status: int = 500
    body: str = '{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}'
    headers: dict[str, str] = {}


class Hang(Fault):
    """Stop without closing: before the headers (`after_chunks` null) or after so many chunks of the body.

    For `seconds`, then go on; null = until the client leaves.
    """

    after_chunks: int | None = None
    seconds: float | None = None


class Die(Fault):
    """End the connection: before the headers (`after_chunks` null) or after so many chunks of the body.

    A body that is one piece is cut in the middle. how: `reset` (RST) or `eof` (FIN, no end of the body).
    """

    after_chunks: int | None = None
    how: Literal["reset", "eof"] = "reset"


class Refuse(msgspec.Struct, forbid_unknown_fields=True):
    """New connections are refused (`close`: nobody listens) or accepted and reset.

    null seconds = until it is replaced. Then only the control port, if there is one, can end it.
    """

    how: Literal["close", "reset"] = "close"
    seconds: float | None = None


class Restart(msgspec.Struct, forbid_unknown_fields=True):
    """The engine's state is lost, connections are reset, nobody listens for `down_s`, then a new life begins:
    event sequence from 0, another process_start_time_seconds. What it put into the pool stays there."""

    down_s: float = 0.2


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """slow: everything takes so many times as long. drop_events: batches to number but not to send."""

    status: Status | None = None
    hang: Hang | None = None
    die: Die | None = None
    refuse: Refuse | None = None
    restart: Restart | None = None
    slow: float = 1.0
    drop_events: int = 0

    def take(self, kind: Literal["status", "hang", "die"], path: str) -> Any:
        """The fault of that kind if it applies to a request for `path`; counts it."""
        fault: Fault | None = getattr(self, kind)
        if fault is None or fault.times == 0:
            return None
        if path != fault.path and not (fault.path.endswith("/") and path.startswith(fault.path)):
            return None
        if fault.times is not None:
            fault.times -= 1
        return fault


@dataclass(slots=True)
class Seen:
    """One request as received. ended: "" while open, then done, gone (the client left) or fault."""

    number: int
    at: float
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    status: int = 0
    chunks: int = 0
    ended: str = ""


@dataclass(slots=True)
class Ledger:
    """The last requests, at most `most` and `most_bytes` of bodies, and counts of all."""

    most: int = 512
    most_bytes: int = 256 << 20
    requests: deque[Seen] = field(default_factory=deque[Seen])
    ended: dict[str, int] = field(default_factory=dict[str, int])
    total: int = 0
    open: int = 0
    _bytes: int = 0

    def begin(self, at: float, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Seen:
        seen = Seen(self.total, at, method, path, headers, body)
        self.total += 1
        self.open += 1
        self.requests.append(seen)
        self._bytes += len(body)
        while len(self.requests) > self.most or (self._bytes > self.most_bytes and len(self.requests) > 1):
            self._bytes -= len(self.requests.popleft().body)
        return seen

    def end(self, seen: Seen, how: str) -> None:
        if seen.ended:
            return
        seen.ended = how
        self.open -= 1
        self.ended[how] = self.ended.get(how, 0) + 1

    def find(self, number: int) -> Seen | None:
        return next((seen for seen in self.requests if seen.number == number), None)

    def report(self) -> dict[str, Any]:
        """JSON for GET /sim/requests; bodies in base64, exact at /sim/requests/NUMBER/body."""
        return {
            "total": self.total,
            "open": self.open,
            "ended": self.ended,
            "requests": [
                {
                    "number": seen.number,
                    "at": seen.at,
                    "method": seen.method,
                    "path": seen.path,
                    "headers": seen.headers,
                    "body_base64": base64.b64encode(seen.body).decode(),
                    "status": seen.status,
                    "chunks": seen.chunks,
                    "ended": seen.ended,
                }
                for seen in self.requests
            ],
        }
