"""What can be seen of a worker from outside while it serves a fixed list of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

QUIET_S = 0.4
"""No event for this long, and nothing left to do: the worker has said everything about the last request."""
LATE_S = 20.0
"""A busy machine takes no longer for that."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request of the list: what was answered, published and counted because of it."""

    name: str
    status: int
    usage: Any
    shape: Any
    events: list[dict[str, Any]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Observation:
    steps: list[Step]
    keys: frozenset[str]
    replayed: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a worker and its pool can be watched. events, replay: ZeroMQ; pool: the master's HTTP.

    pids: their processes.
    """

    pids: tuple[int, ...]
    url: str
    events: str
    replay: str
    pool: str


METRICS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
)


def observe(worker: Endpoints, requests: list[tuple[str, str, Any]]) -> Observation:
    """Sends each request (name, path, body; a GET without body) and waits until the worker is quiet."""
    with (
        _subscribed(worker.events, worker.pids) as received,
        httpx.Client(base_url=worker.url, timeout=180.0) as client,
    ):
        steps = [_step(client, received, *request) for request in requests]
    return Observation(steps, pool_keys(worker.pool), replay(worker.replay))


def _step(
    client: httpx.Client,
    received: Callable[[], list[dict[str, Any]]],
    name: str,
    path: str,
    body: Any,
) -> Step:
    before = _metrics(client)
    answer = client.get(path) if body is None else client.post(path, json=body)
    events = received()
    after = _metrics(client)
    moved = {key: after[key] - before[key] for key in METRICS if after[key] != before[key]}
    usage, shape = _answer(answer)
    return Step(name, answer.status_code, usage, shape, events, moved)


def _answer(answer: httpx.Response) -> tuple[Any, Any]:
    """Usage, and the fields of the answer (of a stream: of every kind of chunk) with types for values."""
    text = answer.text
    if text.startswith(("data: ", "event: ")):
        lines = [line.partition("data: ")[2] for line in text.split("\n\n") if line]
        chunks = [msgspec.json.decode(line) for line in lines if line != "[DONE]"]
        usage = next((found for chunk in reversed(chunks) if (found := _usage(chunk))), None)
        shapes: list[Any] = []
        end: dict[str, Any] = {}
        for chunk in chunks:
            shape = shape_of(chunk)
            # A busy engine sends the last text, or all of it, and its end as one.
            for choice in shape.get("choices", ()):
                why = {key: choice.pop(key) for key in ("finish_reason", "stop_reason") if key in choice}
                if why.get("finish_reason") == "str":
                    end = why | {key: shape.pop(key) for key in ("system_fingerprint",) if key in shape}
            if shape not in shapes:
                shapes.append(shape)
        return usage, [*shapes, end, lines[-1] == "[DONE]"]
    try:
        content = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None, text
    return content.get("usage") if isinstance(content, dict) else None, shape_of(content)


def _usage(chunk: dict[str, Any]) -> Any:
    """Of a chunk of any API; /v1/responses has it in the response that an event carries."""
    return chunk.get("usage") or (chunk.get("response") or {}).get("usage")


def shape_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each) for each in value[:1]]
    return type(value).__name__


def _metrics(client: httpx.Client) -> dict[str, float]:
    page = client.get("/metrics").text
    found = dict.fromkeys(METRICS, 0.0)
    for line in page.splitlines():
        name = line.split("{")[0]
        if name in found:
            found[name] += float(line.rsplit(" ", 1)[1])
    return found


@contextmanager
def _subscribed(endpoint: str, pids: Sequence[int]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A function that returns the events since the last call, once there are no more."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)
        socket.connect(endpoint)
        socket.subscribe("")
        time.sleep(QUIET_S)

        def received() -> list[dict[str, Any]]:
            events: list[dict[str, Any]] = []
            until = time.monotonic() + LATE_S
            while (more := socket.poll(int(QUIET_S * 1000))) or not all(map(at_rest, pids)):
                if more:
                    _topic, _seq, payload = socket.recv_multipart()
                    events += msgspec.msgpack.decode(payload)[1]
                elif time.monotonic() > until:
                    break
            return events

        yield received


def at_rest(pid: int) -> bool:
    """Whether all threads of a process and its children wait: none runs, could run, or was stopped."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads}
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # one of them has just ended
        return False
    return states <= set("SIZ") and all(at_rest(int(child)) for child in children)


def replay(endpoint: str) -> list[dict[str, Any]]:
    """All events the worker still remembers, by the replay protocol."""
    events: list[dict[str, Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        expected = 0
        while socket.poll(60_000):
            _empty, _topic, seq, payload = socket.recv_multipart()
            if seq == b"\xff" * 8:
                return events
            assert int.from_bytes(seq, "big") == expected
            expected += 1
            events += msgspec.msgpack.decode(payload)[1]
    raise TimeoutError("no end marker")


def pool_keys(pool: str) -> frozenset[str]:
    return frozenset(httpx.get(f"{pool}/get_all_keys").text.split())
