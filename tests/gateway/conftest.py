"""A real gateway on a real port in front of workers made of raw sockets."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
import uvicorn
import uvloop

from gateway.app import Gateway
from gateway.protocol import Room, speaking
from gateway.settings import Settings, load
from peer import Handler, Peer
from tests.clock import LeapingLoop

# Raw-socket workers can't render: prompts stay unknown, and nothing but the turns of a test reaches them.
QUICK = {
    "MOONGATE_WORKERS__HEALTH_INTERVAL_S": "0.05",
    # Of a busy machine: no peer here is slow on purpose.
    "MOONGATE_WORKERS__HEALTH_TIMEOUT_S": "20",
    "MOONGATE_PROMPT__SOURCE": "local",
    # Nor is anything here to go on from what an earlier gateway left in this directory.
    "MOONGATE_INDEX__SNAPSHOT_PATH": "",
    "MOONGATE_ROUTING__POLICY_PATH": "",
    # Of what workers are sent tests expect to see every request.
    "MOONGATE_INDEX__PROBES_PER_S": "0",
}

WITHOUT_SOCKETS = ("test_http1", "test_cycle", "test_deadline")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The transport has to work on the server's event loop, too; what needs no sockets needs no time."""
    if item.path.stem in WITHOUT_SOCKETS:
        return {"leaping": LeapingLoop}
    loops = {"asyncio": asyncio.new_event_loop}
    if item.path.name == "test_connections.py":
        loops["uvloop"] = uvloop.new_event_loop
    return loops


class Front:
    """The gateway under test and a client for it."""

    def __init__(self, gateway: Gateway, url: str, client: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.url = url
        self.client = client

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def until(self, condition: Callable[[], bool], budget_s: float = 60.0) -> None:
        """Wait until an observable condition holds; if it does not, say what is under way."""
        try:
            async with asyncio.timeout(budget_s):
                while not condition():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            running = Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
            held = self.gateway.ledger.total.inflight
            async with self.client.get(f"{self.url}/metrics") as page:
                ended = re.findall(r"^moongate_(?:requests|upstream_errors)_total.*", await page.text(), re.M)
            pytest.fail(f"not within {budget_s:g} s; {held} leases are held, tasks: {dict(running)}, {ended}")

    async def tokenizers(self) -> None:
        """Load the workers': on a busy machine that takes longer than a turn waits for its prompt."""
        prompts = self.gateway.prompts
        for worker in self.gateway.fleet.workers():
            for card in worker.models:
                await prompts.source(worker, card).loaded()

    async def idle(self) -> None:
        """Wait until no lease is held."""
        await self.until(lambda: self.gateway.ledger.total.inflight == 0)


@asynccontextmanager
async def serving(settings: Settings, keep_alive_s: int = 5) -> AsyncIterator[Front]:
    gateway = Gateway(settings)
    server = uvicorn.Server(
        uvicorn.Config(
            gateway,
            host="127.0.0.1",
            port=0,
            http=speaking(settings, Room()),
            log_level="warning",
            lifespan="on",
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=2,
        )
    )
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done(), "the gateway did not start"
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with aiohttp.ClientSession(
        auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
    ) as client:
        try:
            yield Front(gateway, url, client)
        finally:
            server.should_exit = True
            await running


@pytest.fixture
async def peers() -> AsyncIterator[Callable[[Handler], Awaitable[Peer]]]:
    started: list[Peer] = []

    async def start(handler: Handler, model: str = "m") -> Peer:
        peer = await Peer(handler, model).start()
        started.append(peer)
        return peer

    yield start
    for peer in started:
        await peer.stop()


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Front]]]:
    """Start a gateway: `await front(peer, peer, env={...})`; all peers are up on return.

    Turns wait for their prompts however long a busy machine takes to load a tokenizer.
    """
    monkeypatch.setattr("gateway.prompts.prompts._BUDGET_S", 60.0)
    async with AsyncExitStack() as stack:

        async def start(*workers: Peer, env: dict[str, str] | None = None, keep_alive_s: int = 5) -> Front:
            flags = {"workers.urls": [w.url for w in workers], "admin.token": "admin-token"}
            settings = load(None, {**QUICK, **(env or {})}, flags)
            entered = await stack.enter_async_context(serving(settings, keep_alive_s))
            await entered.until(lambda: all(w.state == "up" for w in entered.gateway.fleet.workers()))
            return entered

        yield start
