"""The simulated worker as an ASGI application: its life and endpoints, its ports, and fault switches."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from store.prompt.local import LocalPrompts
from store.prompt.request import Unrenderable
from workers.sim import messages
from workers.sim.bodies import Refused
from workers.sim.endpoints import Endpoints
from workers.sim.exchange import Exchange, Gone, Message, Receive, Send
from workers.sim.faults import Faults, Ledger, Refuse, Restart
from workers.sim.life import Life, Spec
from workers.sim.listener import Listener
from workers.sim.live import Pool
from workers.sim.vocabulary import Vocabulary

logger = logging.getLogger(__name__)
_encode: Final = msgspec.json.encode


class Worker:
    """The application and what it consists of. `start` and `close` own ports, threads and tasks."""

    def __init__(self, spec: Spec, pool: Pool | None) -> None:
        self._spec: Final = spec
        self._pool: Final = pool
        self._pool_thread: Final = ThreadPoolExecutor(1, "pool")
        self._prompt_thread: Final = ThreadPoolExecutor(1, "prompt")
        self._prompts: Final = LocalPrompts.load(str(spec.model), cache_bytes=64 << 20)
        self._vocabulary: Final = Vocabulary(spec.model)
        self._ledger: Final = Ledger()
        self._faults = Faults()
        self._listener: Final = Listener(self, spec.host, spec.port)
        self._control: Final = Listener(self, spec.host, spec.control_port) if spec.control_port else None
        # One change of faults at a time, and of each what takes its time after the answer.
        self._changing: Final = asyncio.Lock()
        self._switching: asyncio.Task[None] | None = None
        self._life: Life
        self._endpoints: Endpoints

    async def start(self) -> None:
        """Raises OSError or zmq.ZMQError when a port is taken."""
        self._begin_life()
        if self._control is not None:
            await self._control.open()
        await self._listener.open()

    async def close(self) -> None:
        await self._stop_switching()
        for listener in (self._listener, self._control):
            if listener is not None:
                listener.close()
                listener.reset_all()
        self._life.close()
        self._pool_thread.shutdown(wait=False, cancel_futures=True)
        self._prompt_thread.shutdown(wait=False, cancel_futures=True)

    def _begin_life(self) -> None:
        self._life = Life(self._spec, self._vocabulary, self._pool, self._pool_thread)
        self._endpoints = Endpoints(
            self._spec, self._prompts, self._vocabulary, self._life, self._prompt_thread
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        transport = self._listener.transport(tuple(scope["client"][:2]))
        exchange = Exchange(scope, receive, send, self._faults, transport)
        try:
            body = await exchange.body()
            if path.startswith("/sim/"):
                await self._switch(exchange, body)
                return
            await self._serve(exchange, body)
        except Gone:
            return
        finally:
            exchange.close()

    async def _serve(self, exchange: Exchange, body: bytes) -> None:
        served = self._endpoints.at(exchange.path)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers]
        seen = exchange.seen = self._ledger.begin(time.time(), exchange.method, exchange.path, headers, body)
        how = "fault"
        try:
            if await exchange.meet_faults():
                return
            if not served:
                await exchange.answer(404, b'{"detail":"Not Found"}')
            elif exchange.method not in served:
                allowed = ", ".join(served).encode()
                await exchange.answer(405, b'{"detail":"Method Not Allowed"}', more=[(b"allow", allowed)])
            else:
                await served[exchange.method](exchange, body)
            how = "done"
        except Refused as refused:
            await self._object(exchange, refused)
            how = "done"
        except Unrenderable as wrong:
            await self._object(exchange, Refused(str(wrong)))
            how = "done"
        except Gone as gone:
            how = gone.how
            raise
        except asyncio.CancelledError:
            how = "gone"
            raise
        except Exception:
            logger.exception("request failed")
            error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
            await exchange.answer(500, _encode({"error": error}))
        finally:
            self._ledger.end(seen, how)

    @staticmethod
    async def _object(exchange: Exchange, refused: Refused) -> None:
        body = messages.error(refused) if exchange.path.startswith("/v1/messages") else refused.body()
        await exchange.answer(refused.status, body)

    # Fault switches

    async def _switch(self, exchange: Exchange, body: bytes) -> None:
        match exchange.method, exchange.path.removeprefix("/sim/").split("/"):
            case "GET", ["requests"]:
                await exchange.answer(200, _encode(self._ledger.report()))
            case "GET", ["requests", number, "body"] if number.isdigit():
                seen = self._ledger.find(int(number))
                await exchange.answer(
                    200 if seen else 404, seen.body if seen else b"", "application/octet-stream"
                )
            case "GET", ["faults"]:
                await exchange.answer(200, _encode(self._faults))
            case "POST", ["faults"]:
                try:
                    self._faults = msgspec.json.decode(body, type=Faults)
                except msgspec.DecodeError as wrong:
                    await exchange.answer(400, _encode({"error": str(wrong)}))
                    return
                await exchange.answer(200, _encode(self._faults))
                await self._apply(self._faults)
            case _:
                await exchange.answer(404, b'{"detail":"Not Found"}')

    async def _apply(self, faults: Faults) -> None:
        async with self._changing:
            await self._stop_switching()
            if self._life.closed:
                self._begin_life()
            self._life.live.slow(faults.slow)
            self._life.publisher.drop = faults.drop_events
            self._listener.resetting = False
            await self._listener.open()
            if faults.refuse is not None:
                self._switching = asyncio.create_task(self._refuse(faults.refuse))
            elif faults.restart is not None:
                self._switching = asyncio.create_task(self._restart(faults.restart))

    async def _stop_switching(self) -> None:
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.wait([self._switching])
            self._switching = None

    async def _refuse(self, fault: Refuse) -> None:
        if fault.how == "close":
            self._listener.close()
        else:
            self._listener.resetting = True
        await asyncio.sleep(0.02)  # for the answer that said so
        self._listener.reset_all()
        if fault.seconds is not None:
            await asyncio.sleep(fault.seconds)
            self._faults.refuse = None
            self._listener.resetting = False
            await self._listener.open()

    async def _restart(self, fault: Restart) -> None:
        self._listener.close()
        await asyncio.sleep(0.02)  # for the answer that said so
        self._life.close()
        self._listener.reset_all()
        await asyncio.sleep(fault.down_s)
        self._faults.restart = None
        self._begin_life()
        await self._listener.open()
