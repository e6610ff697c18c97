"""A limit on how long a block may wait: what `asyncio.timeout` does, at a third of its cost.

Four of them stand on every turn's way: asyncio's, two coroutines each, took a tenth of a small turn's CPU.
"""

import asyncio
from types import TracebackType


class Deadline:
    """Use as a context manager, once, in a task. Raises TimeoutError in place of what it interrupts.

    at: loop time, None: no limit.
    """

    __slots__ = ("_at", "_before", "_expired", "_task", "_timer")

    def __init__(self, at: float | None) -> None:
        self._at = at
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        self._before = 0

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """In so many seconds from now, 0: never."""
        return cls(asyncio.get_running_loop().time() + seconds if seconds else None)

    def __enter__(self) -> "Deadline":
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        if self._at is not None:
            self._timer = loop.call_at(self._at, self.expire)
        return self

    def expire(self) -> None:
        """End the wait now."""
        if not self._expired:
            self._expired = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (
            self._expired
            and self._task.uncancel() <= self._before
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise TimeoutError from error
