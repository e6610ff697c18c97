"""Waiting for the first byte of an answer: no longer than the client would, nor on a worker gone silent."""

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

import msgspec

from gateway.deadline import Deadline
from workers.fleet import FleetEvent
from workers.worker import Worker


class _Wait(msgspec.Struct, eq=False):
    """One wait on one worker, as a context manager. until: loop time, infinite: for ever."""

    _all: set["_Wait"]
    until: float
    may_leave: Callable[[], bool]
    deadline: Deadline

    def __enter__(self) -> None:
        self._all.add(self)
        self.deadline.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._all.discard(self)
        self.deadline.__exit__(kind, error, trace)


class Patience:
    """All waits for first bytes, so that those on a worker that falls silent end when another can take over.

    A worker that accepts turns and answers neither them nor its probes (a process stopped, a machine gone)
    is told from one that computes for long: that one answers probes.
    """

    def __init__(self) -> None:
        self._waits: dict[str, set[_Wait]] = {}
        # One timer for all of them: nearly every wait ends before its time.
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf

    def waiting(
        self, worker: str, until: float | None, may_leave: Callable[[], bool], task: asyncio.Task[None]
    ) -> _Wait:
        """Run a block of `task` until `until`, or `worker` is silent and `may_leave`.

        until: loop time, None: no limit. Raises TimeoutError for either.
        """
        waits = self._waits.get(worker)
        if waits is None:
            waits = self._waits[worker] = set()
        if until is None:
            until = math.inf
        elif until < self._looks_at:
            self._look_at(until)
        return _Wait(waits, until, may_leave, Deadline(None, task=task))

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        """A fleet listener."""
        if event == "silent":
            for wait in list(self._waits.get(worker.name, ())):
                if wait.may_leave():
                    wait.deadline.expire()
        elif event == "removed":
            # Also those of who was removed before, while turns waited there.
            self._waits = {name: waits for name, waits in self._waits.items() if waits}

    def _look_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._looks_at = at
        self._timer = loop.call_later(max(0.0, at - loop.time()), self._look)

    def _look(self) -> None:
        """End the waits whose time is up."""
        now = asyncio.get_running_loop().time()
        self._timer, self._looks_at = None, math.inf
        nearest = math.inf
        for waits in self._waits.values():
            for wait in waits:
                if wait.until <= now:
                    wait.deadline.expire()
                else:
                    nearest = min(nearest, wait.until)
        if nearest < math.inf:
            self._look_at(nearest)
