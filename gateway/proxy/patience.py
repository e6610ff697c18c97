"""Waiting for the first byte of an answer: no longer than the client would, nor on a worker gone silent."""

from collections.abc import Callable
from types import TracebackType

from gateway.deadline import Deadline
from workers.fleet import FleetEvent
from workers.worker import Worker


class _Wait:
    """One wait on one worker, as a context manager."""

    __slots__ = ("_all", "deadline", "may_leave")

    def __init__(self, waits: set["_Wait"], until: float | None, may_leave: Callable[[], bool]) -> None:
        self._all = waits
        self.deadline = Deadline(until)
        self.may_leave = may_leave

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

    def waiting(self, worker: str, until: float | None, may_leave: Callable[[], bool]) -> _Wait:
        """Run a block until `until` (loop time; None: no limit), or `worker` is silent and `may_leave`.

        Raises TimeoutError for either.
        """
        return _Wait(self._waits.setdefault(worker, set()), until, may_leave)

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        """A fleet listener."""
        if event == "silent":
            for wait in list(self._waits.get(worker.name, ())):
                if wait.may_leave():
                    wait.deadline.expire()
        elif event == "removed" and not self._waits.get(worker.name, True):
            del self._waits[worker.name]
