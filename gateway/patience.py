"""Waiting for the first byte of an answer: no longer than the client would, nor on a worker gone silent."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workers.fleet import FleetEvent
from workers.worker import Worker


@dataclass(eq=False, slots=True)
class _Wait:
    clock: asyncio.Timeout
    may_leave: Callable[[], bool]


class Patience:
    """All waits for first bytes, so that those on a worker that falls silent end when another can take over.

    A worker that accepts turns and answers neither them nor its probes (a process stopped, a machine gone)
    is told from one that computes for long: that one answers probes.
    """

    def __init__(self) -> None:
        self._waits: dict[str, set[_Wait]] = {}

    @asynccontextmanager
    async def waiting(
        self, worker: str, until: float | None, may_leave: Callable[[], bool]
    ) -> AsyncGenerator[None, None]:
        """Run the body until `until` (loop time; None: no limit), or `worker` is silent and `may_leave`.

        Raises TimeoutError for either.
        """
        async with asyncio.timeout_at(until) as clock:
            wait = _Wait(clock, may_leave)
            waits = self._waits.setdefault(worker, set())
            waits.add(wait)
            try:
                yield
            finally:
                waits.discard(wait)
                if not waits and self._waits.get(worker) is waits:
                    del self._waits[worker]

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        """A fleet listener."""
        if event != "silent":
            return
        now = asyncio.get_running_loop().time()
        for wait in list(self._waits.get(worker.name, ())):
            if wait.may_leave():
                wait.clock.reschedule(now)
