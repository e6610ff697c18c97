"""Existence checks through the Mooncake store client, for those who want their leases or their speed; and
removal of objects, which the admin HTTP does not have.

A whole turn's look-up against one through the admin HTTP (two busy cores, medians in ms, nothing remembered):

    blocks, all there     100    1,000    5,000        all missing    100    1,000    5,000
    HTTP                  0.9      9.0       28                       0.6      2.3      2.4
    client                0.4      2.3       12                       0.4      1.7      8.8

The price: each check gives the objects a lease (`default_kv_lease_ttl`, 10 s), so what is asked for is kept
from eviction as if it were used; it does not say where replicas are, so blocks of a dead worker count until
the master notices; and the client is native code in this process. Choose it where prompts are long and new to
the gateway, or where a pull that waits in an engine's queue must still find its blocks; HTTP otherwise: most
turns are remembered (0.8 ms for 5,000 blocks) and ask for their new blocks only.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from store.mooncake_http import MasterAway

logger = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 16 << 20
_RPC_FAIL: Final = -900
# Behind a call that hangs; a frozen master holds one for as long as it is frozen (8 s seen, no end).
_MOST_WAITING: Final = 8


class _Client(Protocol):
    def setup(
        self, hostname: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str
    ) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...


_Act = Callable[[_Client], list[int]]
_Call = tuple[_Act, asyncio.AbstractEventLoop, "asyncio.Future[list[int]]"]


class MooncakeRpc:
    """One client of the master that gives no memory to the pool. Calls run in a thread of its own.

    Thread and client end with the process: a call may hang for as long as the master does, and the client's
    own way to end holds the interpreter for two seconds. Raises ImportError without the `mooncake` extra.
    """

    def __init__(self, master: str) -> None:
        import mooncake.store as mooncake  # pyright: ignore[reportMissingImports]

        self._make = cast(Any, mooncake).MooncakeDistributedStore
        self._master = master
        self._calls: queue.Queue[_Call] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._serve, name="mooncake-rpc", daemon=True)
        self._thread.start()

    async def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        """Whether each object is whole in the pool; takes leases. Raises MasterAway."""
        asked = list(keys)
        return [
            code == 1 for code in await self._call(lambda client: client.batch_is_exist(asked), timeout_s)
        ]

    async def remove(self, keys: Sequence[str], before: float, timeout_s: float) -> int:
        """Removes objects though they have leases; how many were there. Raises MasterAway.

        before: in the seconds of `time.monotonic`; from then on it is not done any more.
        """
        doomed = list(keys)

        def act(client: _Client) -> list[int]:
            return client.batch_remove(doomed, True) if time.monotonic() < before else []

        return (await self._call(act, timeout_s)).count(0)

    async def _call(self, act: _Act, timeout_s: float) -> list[int]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[int]] = loop.create_future()
        try:
            self._calls.put_nowait((act, loop, answer))
            async with asyncio.timeout(timeout_s):
                return await answer
        except queue.Full:
            raise MasterAway(f"{_MOST_WAITING} calls wait for the master already") from None
        except TimeoutError:
            raise MasterAway("timeout") from None

    def _serve(self) -> None:
        client: _Client | None = None
        while True:
            act, loop, answer = self._calls.get()
            if answer.done():
                continue
            found: list[int] | MasterAway
            try:
                client = client or self._connected()
                codes = act(client)
                found = MasterAway("refused") if _RPC_FAIL in codes else codes
            except MasterAway as away:
                found = away
            except Exception:
                logger.exception("the Mooncake store client failed")
                found = MasterAway("error")
            try:
                loop.call_soon_threadsafe(_settle, answer, found)
            except RuntimeError:  # the loop is closed: nobody waits any more
                continue

    def _connected(self) -> _Client:
        client = cast(_Client, self._make())
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", self._master)
        if code != 0:
            raise MasterAway(f"client set-up {code}")
        return client


def _settle(answer: asyncio.Future[list[int]], found: list[int] | MasterAway) -> None:
    if answer.done():
        return
    if isinstance(found, MasterAway):
        answer.set_exception(found)
    else:
        answer.set_result(found)
