"""KV-cache events on the wire as vLLM publishes them: PUB with sequence numbers, ROUTER for replay.

A batch is three frames: topic, sequence (8 bytes, big-endian, from 0), and a msgpack array of time, events
(as maps) and data-parallel rank. A replay request is `["", first sequence]` from a DEALER; the answer is one
`["", topic, sequence, payload]` for each batch remembered, and `["", "", eight bytes ff, ""]` at the end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq

_END: Final = b"\xff" * 8
# vLLM's defaults.
BUFFER_STEPS: Final = 10_000
HIGH_WATER: Final = 100_000
_encode: Final = msgspec.msgpack.encode
_INBOX: Final = "inproc://batches"


class KvPublisher:
    """One life of a publisher: a new one starts again at sequence 0 and remembers nothing.

    Binds in the constructor (zmq.ZMQError when a port is taken). `publish` is called by one thread and never
    blocks; a thread of the publisher's own sends and answers replay requests.
    """

    def __init__(
        self,
        host: str,
        port: int,
        replay_port: int,
        *,
        rank: int = 0,
        topic: str = "",
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        self.endpoint: Final = f"tcp://{host}:{port}"
        self.replay_endpoint: Final = f"tcp://{host}:{replay_port}"
        self.topic: Final = topic
        self.drop = 0
        self._buffer_steps = buffer_steps
        self._rank = rank
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, self.endpoint)
            self._router = self._bound(zmq.ROUTER, self.replay_endpoint)
            self._inbox = self._bound(zmq.PULL, _INBOX)
            self._outbox = self._context.socket(zmq.PUSH)
            self._outbox.set(zmq.SNDHWM, 0)
            self._outbox.connect(_INBOX)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name="kv-publisher", daemon=True)
        self._thread.start()

    @property
    def published(self) -> int:
        """Batches so far."""
        return self._next

    def publish(self, at: float, events: Sequence[dict[str, Any]]) -> None:
        """Sends one batch; while `drop` is above 0, that batch is numbered and remembered but not sent."""
        sent = self.drop <= 0
        self.drop = max(0, self.drop - 1)
        payload = _encode([at, events, self._rank])
        self._outbox.send_multipart([self._next.to_bytes(8, "big"), payload, b"1" if sent else b""])
        self._next += 1

    def close(self) -> None:
        """Closes the sockets; the ports are free on return."""
        self._outbox.send_multipart([b"", b"", b""])
        self._thread.join()
        self._outbox.close(linger=0)
        self._context.destroy(linger=0)

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, HIGH_WATER)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.IPV6, ":" in endpoint.removeprefix("tcp:").rpartition(":")[0])
        socket.bind(endpoint)
        return socket

    def _serve(self) -> None:
        remembered: deque[tuple[bytes, bytes]] = deque(maxlen=self._buffer_steps)
        topic = self.topic.encode()
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._inbox in ready:
                sequence, payload, sent = self._inbox.recv_multipart()
                if not sequence:
                    break
                remembered.append((sequence, payload))
                if sent:
                    self._pub.send_multipart([topic, sequence, payload])
            elif self._router in ready:
                self._replay(self._router.recv_multipart(), remembered, topic)
        for socket in (self._pub, self._router, self._inbox):
            socket.close(linger=0)

    def _replay(self, request: list[bytes], remembered: deque[tuple[bytes, bytes]], topic: bytes) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            return
        client, _, first = request
        for sequence, payload in remembered:
            if sequence >= first:
                self._router.send_multipart([client, b"", topic, sequence, payload])
        self._router.send_multipart([client, b"", b"", _END, b""])
