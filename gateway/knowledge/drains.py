"""Workers on their way out: no new turns, and their share of the pool moved into the others'."""

import asyncio
import logging
from typing import Final

from msgspec.structs import replace

from gateway import errors
from store.mooncake_http import DrainJob, MasterAway, MasterRefused
from store.pool import PoolView
from workers.fleet import FleetEvent
from workers.worker import Worker

logger = logging.getLogger(__name__)

# The master looks at its jobs once a second.
_LOOK_S: Final = 1.0
# Longer than its leases by default.
_STUCK_S: Final = 30.0
_INSTEAD = (
    "the master stops none while blocks are on their way: try again when it has ended, or send "
    '{"cordoned": false} to put the worker back into service meanwhile'
)
BLOCKED: Final = (
    "blocked objects were read or looked up within the master's lease (default_kv_lease_ttl), or are being "
    "written; they move when nobody has asked for them that long"
)
STAYS_CLOSED: Final = "stays closed (DRAINED) until its process starts anew"


class Drains:
    """The master's drain jobs of registered workers, at most one each, as last heard of."""

    def __init__(self, pool: PoolView | None, look_s: float = _LOOK_S, stuck_s: float = _STUCK_S) -> None:
        """look_s: how often running ones are asked about. stuck_s: without a move until it is said."""
        self._pool = pool
        self._look_s, self._stuck_s = look_s, stuck_s
        self._jobs: dict[str, DrainJob] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
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
            logger.info("worker %s drains segment %s: job %s", worker.name, worker.segment, job)
            self._end_watch(worker.name)
            self._watches[worker.name] = asyncio.create_task(self._watch(worker.name, job))

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
                logger.info("worker %s: drain stopped: %s", worker.name, in_words(running))
            elif running.status == "SUCCEEDED":
                logger.warning("worker %s: its pool segment %s", worker.name, STAYS_CLOSED)
            self._forget(worker.name)

    async def progress(self, name: str) -> DrainJob | None:
        """How far the worker's drain is, as last heard; None if there is none."""
        last = self._jobs.get(name)
        if last is not None and self._pool is not None and not _ended(last):
            try:
                now = await self._pool.drained(last.job)
            except MasterAway:
                return last
            except MasterRefused as refused:
                # Another life of the master knows nothing of it.
                now = replace(last, status="FAILED", message=str(refused))
            if self._jobs.get(name) is last:
                self._jobs[name] = now
            return now
        return last

    def running(self) -> dict[str, str]:
        """In words for operators how far the drains are that have not ended, by worker, as last heard."""
        return {name: in_words(job) for name, job in self._jobs.items() if not _ended(job)}

    async def close(self) -> None:
        watches = list(self._watches.values())
        for name in list(self._watches):
            self._end_watch(name)
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, name: str, job: str) -> None:
        """Say how the drain ends, and once that it does not move on."""
        moved, still_s = -1, 0.0
        while True:
            await asyncio.sleep(self._look_s)
            now = await self.progress(name)
            if now is None or now.job != job:
                return
            if _ended(now):
                level = logging.INFO if now.status == "SUCCEEDED" and not now.failed else logging.WARNING
                logger.log(level, "worker %s: drain ended: %s", name, in_words(now))
                return
            waits = now.blocked > 0 and now.moved == moved
            before, still_s = still_s, still_s + self._look_s if waits else 0.0
            moved = now.moved
            if before < self._stuck_s <= still_s:
                logger.warning("worker %s: drain does not move on: %s; %s", name, in_words(now), BLOCKED)

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        """A fleet listener. A job goes on at the master when its worker is removed."""
        if event in ("removed", "restarted"):
            self._forget(worker.name)

    def _forget(self, name: str) -> None:
        self._jobs.pop(name, None)
        self._end_watch(name)

    def _end_watch(self, name: str) -> None:
        if watch := self._watches.pop(name, None):
            watch.cancel()


def in_words(drain: DrainJob) -> str:
    counts = ", ".join(f"{getattr(drain, kind)} {kind}" for kind in ("moved", "active", "blocked", "failed"))
    said = f"; {drain.message}" if drain.status == "FAILED" and drain.message else ""
    return f"{drain.status}, {counts}{said}"


def _ended(drain: DrainJob) -> bool:
    return drain.status in ("SUCCEEDED", "FAILED", "CANCELED")
