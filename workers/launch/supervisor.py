"""Keeps the processes of a fleet alive and ends them in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

# A process that fails this often without having served for a while in between will not get better.
RESTARTS = 5
SHORT_LIFE_S = 10.0
TAIL_LINES = 15


class ProcessFailed(Exception):
    """A process of the fleet is down and is not coming back; the message says which, and its last words."""


class Supervised(Protocol):
    """A process that can be started again after it died."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Returns when the process serves.

        Raises an Exception whose text tells a person what went wrong, with the log's end where that helps.
        """
        ...

    async def wait(self) -> int:
        """Returns the exit code when the running process ends (negative: the signal that killed it)."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ends the process, by force after `grace_s`. No error when it is not running or never was."""
        ...

    def last_lines(self, lines: int) -> str:
        """The end of the process's log."""
        ...


class Supervisor:
    """Starts groups of processes, restarts what dies, stops the groups in reverse order.

    `progress` gets a sentence for a person at each death and restart.
    `failure` is done, with a ProcessFailed, when a process died that may not or can not be restarted.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._groups: list[tuple[list[Supervised], float]] = []
        self._watches: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(
        self, group: Sequence[Supervised], *, grace_s: float, restart: bool = True, together: bool = True
    ) -> None:
        """Returns when every process of the group serves. `together` False starts one after the other.

        `grace_s` is what each may take to end at `stop` before it is killed. The group counts for `stop` from
        here on, also when this call is cancelled. Raises ProcessFailed for the first that does not come up.
        """
        self._groups.append((list(group), grace_s))
        for batch in [list(group)] if together else [[process] for process in group]:
            try:
                async with asyncio.TaskGroup() as starts:
                    for process in batch:
                        starts.create_task(self._start(process, restart=restart))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    async def stop(self, *, at_once: bool = False) -> None:
        """Ends all groups, the last started first, the processes of a group together; by force if `at_once`.

        Cancelled, it has ended some groups; call it again.
        """
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for group, grace_s in reversed(self._groups):
            await asyncio.gather(*(process.stop(0.0 if at_once else grace_s) for process in group))
        if self.failure.done() and not self.failure.cancelled():
            self.failure.exception()

    async def _start(self, process: Supervised, *, restart: bool) -> None:
        try:
            await process.start()
        except Exception as error:
            raise ProcessFailed(f"{process.name} did not start: {error}") from error
        self._watches.append(asyncio.create_task(self._watch(process, restart=restart)))

    async def _watch(self, process: Supervised, *, restart: bool) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            ended = _ended(await process.wait()) + _log_of(process)
            if time.monotonic() - started > SHORT_LIFE_S:
                failures = 0
            while True:
                what = f"{process.name} {ended}"
                failures += 1
                if not restart:
                    self._fail(what)
                    return
                if failures > RESTARTS:
                    self._fail(f"{what}\n{process.name} keeps failing; giving up")
                    return
                self._progress(f"{what}\nstarting {process.name} again")
                try:
                    await process.start()
                except Exception as error:  # whatever the reason, the fleet must end rather than limp or hang
                    ended = f"could not be started again: {error}"
                else:
                    self._progress(f"{process.name} is back")
                    break

    def _fail(self, what: str) -> None:
        if not self.failure.done():
            self.failure.set_exception(ProcessFailed(what))


def _ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _log_of(process: Supervised) -> str:
    lines = process.last_lines(TAIL_LINES)
    return f"; the end of its log:\n{lines}" if lines else ""
