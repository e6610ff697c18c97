"""Workers on their way out: no new turns, and their share of the pool moved into the others'."""

import asyncio
import contextlib

from gateway import errors
from store.mooncake_http import Drain, MasterAway, MasterRefused
from store.pool import PoolView
from workers.fleet import FleetEvent
from workers.worker import Worker

_INSTEAD = (
    "the master stops none while blocks are on their way: try again when it has ended, or send "
    '{"cordoned": false} to put the worker back into service meanwhile'
)


class Drains:
    """The master's drain jobs of registered workers, at most one each, as last heard of."""

    def __init__(self, pool: PoolView | None) -> None:
        self._pool = pool
        self._jobs: dict[str, Drain] = {}
        self._changing = asyncio.Lock()

    async def start(self, worker: Worker) -> None:
        """Ask the master to move what is in the worker's segment; again where an earlier job has ended.

        Raises errors.Conflict: no pool, no known segment, or the master refuses.
        """
        if self._pool is None:
            raise errors.Conflict("there is no pool to drain into: cordon the worker instead")
        if not worker.segment:
            raise errors.Conflict("the worker's segment is not known (workers.segments)")
        async with self._changing:
            running = await self.progress(worker.name)
            if running is not None and not _ended(running):
                return
            try:
                job = await self._pool.drain(worker.segment)
                self._jobs[worker.name] = await self._pool.drained(job)
            except KeyError:
                raise errors.Conflict(f"the master knows no segment {worker.segment}") from None
            except (ValueError, MasterAway, MasterRefused) as error:
                raise errors.Conflict(f"the segment can't be drained: {error}") from None

    async def stop(self, worker: Worker) -> None:
        """Leave what was not moved yet where it is. Raises errors.Conflict when the master refuses."""
        async with self._changing:
            running = await self.progress(worker.name)
            if self._pool is None or running is None:
                return
            if not _ended(running):
                try:
                    await self._pool.stop_draining(running.job)
                except MasterRefused as error:
                    raise errors.Conflict(f"the drain can't be stopped now: {error}; {_INSTEAD}") from None
                except MasterAway as error:
                    raise errors.Conflict(f"the drain can't be stopped: {error}") from None
            self._jobs.pop(worker.name, None)

    async def progress(self, name: str) -> Drain | None:
        """How far the worker's drain is, as last heard; None if there is none."""
        last = self._jobs.get(name)
        if last is not None and self._pool is not None and not _ended(last):
            with contextlib.suppress(MasterAway, MasterRefused):
                last = self._jobs[name] = await self._pool.drained(last.job)
        return last

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        """A fleet listener. A job goes on at the master when its worker is removed."""
        if event in ("removed", "restarted"):
            self._jobs.pop(worker.name, None)


def _ended(drain: Drain) -> bool:
    return drain.status in ("SUCCEEDED", "FAILED", "CANCELED")
