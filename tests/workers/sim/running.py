"""A simulated worker in this process, over real sockets, and what tests ask of it."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from tests.ports import ports
from tests.simulated import served, spec_of
from workers.sim.life import Spec

PORTS = ports(above=21_320)
CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class MemoryPool:
    """A pool in this process that several workers may share. `broken`: loads fail."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.broken = False

    def prefix(self, digests: Any) -> int:
        return sum(1 for _ in itertools.takewhile(lambda digest: digest in self.blocks, digests))

    def put(self, digests: Any) -> list[bool]:
        new = [digest not in self.blocks for digest in digests]
        self.blocks.update(digests)
        return new

    def get(self, digests: Any) -> list[bool]:
        return [digest in self.blocks and not self.broken for digest in digests]


class Running:
    """A worker and a client for it."""

    def __init__(self, spec: Spec, http: httpx.AsyncClient) -> None:
        self.spec = spec
        self.http = http
        self.url = str(http.base_url).rstrip("/")

    async def chat(self, **more: Any) -> httpx.Response:
        return await self.http.post(CHAT, json={**HELLO, "max_tokens": 4, **more})

    async def ids(self, tokens: list[int], output: int = 1, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": output, "ignore_eos": True, **more}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def faults(self, **faults: Any) -> None:
        answer = await self.control("POST", "/sim/faults", json=faults)
        assert answer.status_code == 200, answer.text

    async def control(self, method: str, path: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.spec.control_port}") as http:
            return await http.request(method, path, **more)

    async def report(self) -> dict[str, Any]:
        return (await self.control("GET", "/sim/requests")).json()

    async def metric(self, name: str) -> float:
        page = (await self.control("GET", "/metrics")).text
        rows = [
            line.rsplit(" ", 1)[1] for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name
        ]
        return sum(map(float, rows))

    async def idle(self) -> None:
        """Nothing runs and nobody is connected to a turn any more."""
        async with asyncio.timeout(30):
            while await self.metric("vllm:num_requests_running") + await self.metric(
                "vllm:num_requests_waiting"
            ):
                await asyncio.sleep(0.01)
            while (await self.report())["open"]:
                await asyncio.sleep(0.01)

    async def batches(self) -> list[list[dict[str, Any]]]:
        """Every batch of this life, through the replay protocol."""
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{self.spec.replay_port}")
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            found: list[list[dict[str, Any]]] = []
            while True:
                _, _, sequence, payload = await asyncio.wait_for(socket.recv_multipart(), 30)
                if sequence == b"\xff" * 8:
                    return found
                assert int.from_bytes(sequence, "big") == len(found)
                found.append(msgspec.msgpack.decode(payload)[1])

    async def events(self, kind: str, medium: str = "GPU") -> list[dict[str, Any]]:
        return [
            event
            for batch in await self.batches()
            for event in batch
            if event["type"] == kind and event.get("medium") == medium
        ]


@asynccontextmanager
async def running(model: Path, pool: MemoryPool | None = None, **more: Any) -> AsyncIterator[Running]:
    spec = spec_of(model, PORTS, control_port=next(PORTS), **more)
    async with served(spec, pool) as url, httpx.AsyncClient(base_url=url, timeout=60.0) as http:
        yield Running(spec, http)
