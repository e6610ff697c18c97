"""A KV-event publisher that speaks vLLM's protocol over real sockets: the peer of the streams under test."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

END = b"\xff" * 8
_encode = msgspec.msgpack.encode


def stored(hashes: list[Any], parent: Any = None, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    tokens = more.pop("token_ids", [])
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": more.pop("block_size", 32),
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def removed(hashes: list[Any], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Publisher:
    """One life of a vLLM process: sequence from 0, replay buffer, PUB and ROUTER on the given ports.

    `publish` of a lost batch numbers and remembers it but does not send it. `answering` is closed to hold
    replay requests back; `requests` counts them.
    """

    def __init__(
        self,
        port: int,
        replay_port: int | None,
        *,
        buffer: int = 10_000,
        topic: str = "",
        start: float = 0.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.requests: list[int] = []
        self.answering = threading.Event()
        self.answering.set()
        self.asked = threading.Event()
        self.dies_after: int | None = None
        self._clock = start
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._seq = 0
        self._joined = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # XPUB is PUB that also tells when a subscription has arrived.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.set(zmq.LINGER, 0)
        self._pub.set(zmq.SNDHWM, 100_000)  # vLLM's default
        self._pub.set(zmq.IPV6, 1)
        self._pub.bind(f"tcp://{host}:{port}")
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if replay_port is not None:
            router = self._context.socket(zmq.ROUTER)
            router.set(zmq.LINGER, 0)
            router.set(zmq.IPV6, 1)
            router.bind(f"tcp://{host}:{replay_port}")
            self._thread = threading.Thread(target=self._serve, args=(router,), daemon=True)
            self._thread.start()

    def publish(self, *events: Any, lost: bool = False, payload: bytes | None = None) -> int:
        with self._lock:
            seq, self._seq = self._seq, self._seq + 1
            if payload is None:
                self._clock += 1.0
                payload = _encode([self._clock, list(events), 0])
            self._buffer.append((seq, payload))
            if not lost:
                self._pub.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])
            return seq

    def wait_joined(self) -> None:
        """Blocks until the first subscription is in force."""
        while not self._stop.is_set() and not self._joined:
            with self._lock:
                self._joined = bool(self._pub.poll(5)) and self._pub.recv()[:1] == b"\x01"

    def send(self, *frames: bytes) -> None:
        with self._lock:
            self._pub.send_multipart(frames)

    def close(self) -> None:
        self._stop.set()
        self.answering.set()
        if self._thread is not None:
            self._thread.join()
        self._pub.close()
        self._context.destroy(linger=0)

    def _serve(self, router: "zmq.Socket[bytes]") -> None:
        while not self._stop.is_set():
            if not router.poll(20):
                continue
            client, empty, start = router.recv_multipart()
            assert empty == b""
            self.requests.append(int.from_bytes(start, "big"))
            self.asked.set()
            self.answering.wait()
            with self._lock:
                answer = [item for item in self._buffer if item[0] >= self.requests[-1]]
            for seq, payload in answer[: self.dies_after]:
                router.send_multipart([client, b"", self._topic, seq.to_bytes(8, "big"), payload])
            if self.dies_after is None:
                router.send_multipart([client, b"", b"", END, b""])
        router.close()


@contextmanager
def publishing(start: Callable[[], Publisher]) -> Iterator[Publisher]:
    publisher = start()
    try:
        yield publisher
    finally:
        publisher.close()
