"""Stored responses: each lies at the worker that made it, and whatever refers to it must go there."""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

from gateway import errors
from gateway.asgi import Headers
from gateway.upstream.transport import Transport, UpstreamError
from workers.fleet import Fleet
from workers.worker import Worker

PATH = "/v1/responses"
# The id is the first thing that vLLM says of a response, whole or streamed.
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,200})"')
_HEAD_BYTES = 4096
_ASK_S = 2.0
_RETRY_AFTER_S = 2.0


class _Owner(NamedTuple):
    """Where a response lies, until when that is remembered, and the session it belongs to."""

    worker: str
    until: float
    session: str


class StoredResponses:
    """Which worker holds which response: learned from answers, asked for where it is not known.

    At most `most` are remembered, each for `ttl_s` seconds after it was last made or used.
    """

    def __init__(
        self,
        fleet: Fleet,
        transport: Transport,
        *,
        most: int,
        ttl_s: float,
        api_key: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._transport = transport
        self._most = most
        self._ttl_s = ttl_s
        self._headers: Headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self._clock = clock
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def learner(self, worker: str, session: str = "") -> "Learner":
        """What to feed with the answer of `worker` to a request that makes a response.

        session: that of the request; "" if not known: then the response is the first of one.
        """
        return Learner(lambda response_id: self.learn(response_id, worker, session or response_id))

    def learn(self, response_id: str, worker: str, session: str = "") -> None:
        now = self._clock()
        self._owners[response_id] = _Owner(worker, now + self._ttl_s, session)
        self._owners.move_to_end(response_id)
        while len(self._owners) > self._most or next(iter(self._owners.values())).until <= now:
            self._owners.popitem(last=False)

    def session(self, response_id: str) -> str:
        """The session that a response which was found belongs to."""
        known = self._owners.get(response_id)
        return known.session if known is not None else ""

    async def find(self, response_id: str) -> str:
        """The worker that holds `response_id`.

        Raises NotFound when no worker has it, NoWorker when one that may have it can't be asked.
        """
        known = self._owners.get(response_id)
        if known is not None and known.until > self._clock() and self._fleet.knows(known.worker):
            self.learn(response_id, known.worker, known.session)
            return known.worker
        workers = self._fleet.workers()
        if len(workers) == 1:
            return workers[0].name
        said = await asyncio.gather(*(self._asked(worker, response_id) for worker in workers))
        for worker, holds in zip(workers, said, strict=True):
            if holds:
                self.learn(response_id, worker.name, session=response_id)
                return worker.name
        if None in said or not workers:
            raise errors.NoWorker(
                "no worker has that response, but not all of them could be asked",
                retry_after_s=_RETRY_AFTER_S,
            )
        raise errors.NotFound(f"Response with id {response_id[:200]!r} not found.", param="response_id")

    async def _asked(self, worker: Worker, response_id: str) -> bool | None:
        """Whether the worker has it; None if it does not say."""
        if worker.state != "up":
            return None
        # A client's words become part of a path.
        target = f"{PATH}/{quote(response_id[:200].encode('utf-8', 'surrogatepass'), safe='')}".encode()
        try:
            async with asyncio.timeout(_ASK_S):
                response = await self._transport.open("GET", worker.url, target, self._headers, b"")
        except (UpstreamError, TimeoutError):
            return None
        response.close()
        return None if response.status >= 500 else response.status == 200


class Learner:
    """Reads the id of a response from the beginning of an answer; `id` is "" until it is there."""

    __slots__ = ("_found", "_head", "id")

    def __init__(self, found: Callable[[str], None]) -> None:
        self.id = ""
        self._found = found
        self._head = b""

    def feed(self, chunk: bytes) -> bool:
        """The next bytes of the answer. Whether they are all that is needed."""
        self._head += chunk[:_HEAD_BYTES]
        place = _ID.search(self._head)
        if place is not None:
            self.id = place[1].decode("utf-8", "replace")
            self._found(self.id)
        return place is not None or len(self._head) >= _HEAD_BYTES
