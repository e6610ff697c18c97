"""What is known of the workers' caches is written to disk now and then, and taken up again at a start."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from store.knowledge import Knowledge
from store.snapshot import BadSnapshot, TargetState, load, save
from store.streams import EventStreams, StreamMark

logger = logging.getLogger(__name__)

# What was restored of a target that nobody registers again is given up after this long.
_CLAIM_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """age_s: since what is on disk was true, None if nothing was written or read. failures: writes in vain.

    unclaimed: targets of the last snapshot that did not come back yet; unclaimed_blocks: what the index
    holds of them, credited to nobody.
    """

    path: str
    age_s: float | None
    bytes: int
    failures: int
    unclaimed: int
    unclaimed_blocks: int


class Snapshots:
    """Owns the file and the task that writes it. `start` before any target is followed, `close` after."""

    def __init__(
        self,
        path: str,
        interval_s: float,
        knowledge: Knowledge,
        streams: EventStreams,
    ) -> None:
        """`path` "": nothing is read or written."""
        self._path = Path(path) if path else None
        self._interval_s = interval_s
        self._knowledge = knowledge
        self._streams = streams
        self._unclaimed: dict[str, TargetState] = {}
        self._restored_at = 0.0
        self._written: dict[str, TargetState] | None = None
        self._written_at: float | None = None
        self._bytes = 0
        self._failures = 0
        self._failing = False
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take up what was written. A file that can't be used costs what it held, never the start."""
        if self._path is None:
            return
        await self._restore(self._path)
        self._task = asyncio.create_task(self._run(), name="snapshots")

    async def _restore(self, path: Path) -> None:
        try:
            restored, file = await asyncio.to_thread(lambda: (load(path), path.stat()))
        except FileNotFoundError:
            return
        except (OSError, BadSnapshot) as error:
            logger.warning("the snapshot %s is not used: %s", path, error)
            return
        except Exception:
            logger.exception("the snapshot %s is not used", path)
            return
        states = self._unclaimed = restored.targets
        shown = {name: state.shown for name, state in states.items()}
        self._knowledge.restore(restored.index, restored.certain, shown)
        self._restored_at = time.monotonic()
        self._bytes = file.st_size
        self._written_at = self._restored_at - max(0.0, time.time() - file.st_mtime)
        blocks = sum(restored.index.sizes().values())
        logger.info("%d blocks of %d targets restored, to be proven", blocks, len(states))

    async def close(self) -> None:
        """Ends the task, and writes what is known now."""
        if self._task is not None:
            self._ending.set()
            await self._task

    def claim(self, target: str) -> StreamMark | None:
        """Where the stream of `target` stood; it is followed from now on. None: begin from nothing."""
        state = self._unclaimed.pop(target, None)
        return state.mark if state is not None else None

    def status(self) -> SnapshotStatus:
        at = self._written_at
        age = None if at is None else time.monotonic() - at
        sizes = self._knowledge.index.sizes() if self._unclaimed else {}
        blocks = sum(count for (target, _), count in sizes.items() if target in self._unclaimed)
        unclaimed = len(self._unclaimed)
        return SnapshotStatus(str(self._path or ""), age, self._bytes, self._failures, unclaimed, blocks)

    def waits_for(self, target: str) -> bool:
        """Whether something was restored of `target` that nobody has claimed yet."""
        return target in self._unclaimed

    async def _run(self) -> None:
        ended = False
        while not ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._interval_s)
            ended = self._ending.is_set()
            try:
                self._give_up_unclaimed()
                await self._write()
            except Exception:
                self._failures += 1
                logger.exception("no snapshot could be made")

    def _give_up_unclaimed(self) -> None:
        if self._unclaimed and time.monotonic() - self._restored_at > _CLAIM_S:
            for target in self._unclaimed:
                self._knowledge.drop(target)
            self._unclaimed = {}

    async def _write(self) -> None:
        """One snapshot, unless the last one holds the same."""
        assert self._path is not None
        # All begun in one step of the loop: a mark says of which batches the index knows.
        states = self._states()
        if states == self._written:
            self._written_at = time.monotonic()
            return
        captures = self._knowledge.index.capture(), self._knowledge.certain.capture()
        at = time.monotonic()
        for capture in captures:
            while not capture.advance():  # noqa: ASYNC110 - gives way between two pieces of work
                await asyncio.sleep(0)
        index, certain = (capture.whole() for capture in captures)
        try:
            self._bytes = await asyncio.to_thread(save, self._path, index, certain, states)
        except OSError as error:
            self._failures += 1
            if not self._failing:
                logger.warning("the snapshot %s can't be written: %s", self._path, error.strerror or error)
            self._failing = True
        else:
            if self._failing:
                logger.info("the snapshot %s can be written again", self._path)
            self._written, self._written_at, self._failing = states, at, False

    def _states(self) -> dict[str, TargetState]:
        states = {
            target: TargetState(mark, self._knowledge.shown(target))
            for target, mark in self._streams.marks().items()
        }
        return self._unclaimed | states
