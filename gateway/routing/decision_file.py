"""The decision log on disk: one JSON line a decision and how it ended, written behind the turns' backs."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gateway.routing.decisions import DecisionRecord
from gateway.seldom import Seldom
from gateway.upstream.headers import CREDENTIALS
from policies.compare import Placed
from policies.recorded import recorded

logger = logging.getLogger(__name__)

# Decisions that wait to be written, at most; the file is behind by so many seconds.
_MOST: Final = 1000
_BEHIND_S: Final = 0.1
# How long the end of the gateway waits for a disk.
_CLOSE_S: Final = 5.0
_BACK: Final = 1 << 16


class DecisionFile:
    """Owns the file and the task that writes it; a turn never waits for either.

    A full file becomes `path` + ".1", in place of the one before it.
    """

    def __init__(self, path: str, max_bytes: int, dropped: Callable[[int], None]) -> None:
        """`path` "": nothing is written. `dropped` is told of decisions that are not."""
        self._path = Path(path) if path else None
        self._max_bytes = max_bytes
        self._dropped = dropped
        self._waiting: list[DecisionRecord] = []
        self._some = asyncio.Event()
        self._ending = asyncio.Event()
        self._seldom = Seldom()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._path is not None:
            self._task = asyncio.create_task(self._run(self._path), name="decision file")

    async def close(self) -> None:
        """Writes what waits, and ends the task."""
        if self._task is None:
            return
        self._ending.set()
        self._some.set()
        try:
            await asyncio.wait_for(self._task, _CLOSE_S)
        except TimeoutError:
            logger.warning("the last decisions could not be written to %s in time", self._path)

    def add(self, record: DecisionRecord) -> None:
        if self._path is None or record.plan is None:
            return
        # A rule by a credential would put it on disk, and without it the turn could not be decided again.
        if len(self._waiting) >= _MOST or record.plan.headers & CREDENTIALS:
            self._dropped(1)
            return
        self._waiting.append(record)
        self._some.set()

    async def _run(self, path: Path) -> None:
        ended = False
        while not ended:
            await self._some.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _BEHIND_S)
            ended = self._ending.is_set()
            self._some.clear()
            batch, self._waiting = self._waiting, []
            try:
                written, error = await asyncio.to_thread(_write, path, self._max_bytes, batch)
            except Exception:
                logger.exception("decisions could not be written to %s", path)
                written, error = 0, None
            # On a full disk some still find room: each time anew it would be news.
            if error is not None and self._seldom.due(error.errno):
                logger.warning("decisions can't be written to %s: %s", path, error.strerror)
            if written < len(batch):
                self._dropped(len(batch) - written)


def _write(path: Path, max_bytes: int, batch: Sequence[DecisionRecord]) -> tuple[int, OSError | None]:
    """How many were written, and what kept the rest out."""
    written, piece = 0, list[bytes]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = _whole(path)
        for line in filter(None, map(_line, batch)):
            if size and size + len(line) > max_bytes:
                written += _append(path, piece)
                os.replace(path, path.with_name(path.name + ".1"))
                size, piece = 0, []
            piece.append(line)
            size += len(line)
        written += _append(path, piece)
    except OSError as error:
        return written, error
    return written, None


def _line(record: DecisionRecord) -> bytes | None:
    plan, turn = record.plan, record.turn
    if plan is None or turn is None:
        return None
    # A shadow's rules may go by other headers; those are no part of this decision.
    kept = {name: value for name, value in record.facts.headers.items() if name in plan.headers}
    placed = Placed(turn, msgspec.structs.replace(record.facts, headers=kept), record.decision)
    try:
        line = recorded(record.request_id, record.time, placed, plan.as_plain, record.outcome)
        return msgspec.json.encode(line) + b"\n"
    except (TypeError, ValueError):
        logger.exception("a decision can't be written as JSON")
        return None


def _whole(path: Path) -> int:
    """The size of the file without a last line that was cut, which is taken off."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return 0
    with file:
        size = end = file.seek(0, os.SEEK_END)
        found = -1
        while end and found < 0:
            start = max(0, end - _BACK) if end < size else end - 1
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start
        whole = end + found + 1
        if whole < size:
            file.truncate(whole)
        return whole


def _append(path: Path, lines: Sequence[bytes]) -> int:
    """All of them or none."""
    if not lines:
        return 0
    content = b"".join(lines)
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise
    return len(lines)
