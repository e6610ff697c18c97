"""A front for Dynamo's selection service, which chooses a worker for a prompt and passes nothing on itself.

    python bench/wire/dynamo_front.py PORT SERVICE_PORT WORKER...

WORKER is what the service is told of one: the body of its `POST /workers`. A turn's token ids come from a
worker's /tokenize, its answer from the worker that the service chose; the service is told when the answer
begins and when it ends. It has no health checks: a worker with which a connection fails is taken out of its
catalogue until that answers again, and turns of which the client has seen nothing go to another one.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

import aiohttp
import msgspec
import uvloop
from aiohttp import web

_JSON = {"content-type": "application/json"}
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
_PAUSE_S = 0.1


class Worker(msgspec.Struct, frozen=True):
    worker_id: int
    model_name: str
    endpoint: str


class Tokenized(msgspec.Struct):
    """The ids stay as they came: they are only passed on."""

    tokens: msgspec.Raw


class Wanted(msgspec.Struct):
    model_name: str
    token_ids: msgspec.Raw


class Chosen(msgspec.Struct):
    worker_id: int
    selection_id: str


class Front:
    def __init__(self, http: aiohttp.ClientSession, service: str, records: Sequence[bytes]) -> None:
        self._http, self._service = http, service
        self._records = {msgspec.json.decode(record, type=Worker): record for record in records}
        self._workers = {worker.worker_id: worker for worker in self._records}
        self._admitted: list[Worker] = []
        self._leaving = asyncio.Lock()
        self._tasks = {asyncio.create_task(self._admit(worker)) for worker in self._records}

    async def turn(self, request: web.Request) -> web.StreamResponse:
        body, response = await request.read(), web.StreamResponse()
        for _ in range(2 * len(self._workers)):
            if not self._admitted:
                break
            worker = self._admitted[0]
            self._admitted.append(self._admitted.pop(0))
            try:
                ids = msgspec.json.decode(
                    await self._post(f"{worker.endpoint}/tokenize", body), type=Tokenized
                )
                wanted = msgspec.json.encode(Wanted(worker.model_name, ids.tokens))
                told = await self._post(f"{self._service}/select_and_reserve", wanted)
                chosen = msgspec.json.decode(told, type=Chosen)
                worker = self._workers[chosen.worker_id]
                await self._pass_on(request, body, response, worker, chosen.selection_id)
            except _LOST:
                await self._leave_out(worker)
                if response.prepared:
                    raise
            else:
                return response
        return web.Response(status=503, text="no worker answers")

    async def _pass_on(
        self, request: web.Request, body: bytes, response: web.StreamResponse, worker: Worker, selection: str
    ) -> None:
        begun: asyncio.Task[int] | None = None
        try:
            url = f"{worker.endpoint}/v1/chat/completions"
            async with self._http.post(url, data=body, headers=_JSON) as answer:
                async for chunk in answer.content.iter_any():
                    if begun is None:
                        path = f"/reservations/{selection}/prefill_complete"
                        begun = asyncio.create_task(self._tell("POST", path))
                        response.set_status(answer.status)
                        response.content_type = answer.content_type
                        await response.prepare(request)
                    await response.write(chunk)
            await response.write_eof()
        finally:
            if begun is not None:
                await begun
            await self._tell("DELETE", f"/reservations/{selection}")

    async def _post(self, url: str, body: bytes) -> bytes:
        async with self._http.post(url, data=body, headers=_JSON) as answer:
            told = await answer.read()
            if answer.status >= 300:
                raise web.HTTPServiceUnavailable(text=f"{answer.url.path}: {answer.status} {told[:200]!r}")
            return told

    async def _tell(self, method: str, path: str, body: bytes = b"") -> int:
        async with self._http.request(method, self._service + path, data=body, headers=_JSON) as answer:
            await answer.read()
            return answer.status

    async def _admit(self, worker: Worker) -> None:
        """Once the worker answers, and the service too."""
        while True:
            with suppress(aiohttp.ClientError):
                async with self._http.get(f"{worker.endpoint}/health") as answer:
                    answer.raise_for_status()
                if await self._tell("POST", "/workers", self._records[worker]) < 300:
                    break
            await asyncio.sleep(_PAUSE_S)
        self._admitted.append(worker)

    async def _leave_out(self, worker: Worker) -> None:
        """The service then also forgets what the worker held and how far its events were read."""
        async with self._leaving:
            if worker in self._admitted:
                self._admitted.remove(worker)
                await self._tell("DELETE", f"/workers/{worker.worker_id}")
                self._tasks.add(asyncio.create_task(self._admit(worker)))


async def serve(port: int, service: str, records: Sequence[bytes]) -> None:
    # Below the 5 s after which vLLM closes idle connections.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as http:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", Front(http, service, records).turn)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    records = [word.encode() for word in sys.argv[3:]]
    uvloop.run(serve(int(sys.argv[1]), f"http://127.0.0.1:{sys.argv[2]}", records))
