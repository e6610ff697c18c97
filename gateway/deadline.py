"""A limit on how long a block may wait: what `asyncio.timeout` does, at a third of its cost.

Four of them stand on every turn's way: asyncio's, two coroutines each, took a tenth of a small turn's CPU.
"""

import asyncio
from contextlib import nullcontext
from types import TracebackType

import msgspec

_NEVER = nullcontext()
# More than the passes of the loop in which a connection that the other side has taken is made, TLS included.
_LOOKS = 16


class Deadline(msgspec.Struct, eq=False):
    """Use as a context manager, once, in a task. Raises TimeoutError in place of what it interrupts.

    at: loop time, None: no limit. task: the one it is used in, None: whichever that is.
    """

    _at: float | None
    _after: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _expired: bool = False
    task: asyncio.Task[None] | None = None
    _before: int = 0
    _looks: int = 1

    @classmethod
    def after(cls, seconds: float) -> "Deadline | nullcontext[None]":
        """So many seconds after it is entered, 0: never."""
        return cls(None, seconds) if seconds else _NEVER

    @classmethod
    def after_looking(cls, seconds: float) -> "Deadline | nullcontext[None]":
        """As `after`, but what holds the loop up counts for little: nobody looked meanwhile.

        A process that was stopped, or got no core, finds its time up before what had come within it.
        """
        return cls(None, seconds / _LOOKS, _looks=_LOOKS) if seconds else _NEVER

    def __enter__(self) -> "Deadline":
        task = self.task
        if task is None:
            task = self.task = asyncio.current_task()
            assert task is not None
        self._before = task.cancelling()
        # uvloop's own `call_at` takes 1.2 us, its `call_later` 0.7.
        if self._after:
            self._timer = task.get_loop().call_later(self._after, self._look)
        elif self._at is not None:
            loop = task.get_loop()
            self._timer = loop.call_later(max(0.0, self._at - loop.time()), self.expire)
        return self

    def expire(self) -> None:
        """End the wait now."""
        if not self._expired and self.task is not None:
            self._expired = True
            self.task.cancel()

    def _look(self) -> None:
        self._looks -= 1
        if self._looks and self.task is not None:
            self._timer = self.task.get_loop().call_later(self._after, self._look)
        else:
            self.expire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (
            self._expired
            and self.task is not None
            and self.task.uncancel() <= self._before
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise TimeoutError from error
