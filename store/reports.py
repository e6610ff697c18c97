"""Announcements that a request asked for: what an engine holds already, not new copies.

A request with `kv_cache_report_mode: full` has the engine announce its whole hit again, in events that look
like those of new copies (vLLM 0.32). Taken for reports, copies counted too low cost credit, not truth.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

# What a probe calls its session: its events say so, replayed later or seen by another gateway as well.
PROBE_SESSION: Final = "moongate-probe"
# How long a client's request may wait in an engine's queue and still be known to have asked for a report.
_ASKED_S: Final = 60.0
_ASKED: Final = 64


@dataclass(slots=True, eq=False)
class Reported:
    """What a target has announced again of the chain `keys`: so many leading blocks."""

    keys: Sequence[int]
    blocks: int = 0


class Reports:
    """Which requests asked targets to report. clock: steady seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._probed: dict[str, list[Reported]] = {}
        self._asked: dict[str, deque[tuple[float, Sequence[int]]]] = {}

    @contextmanager
    def probe(self, target: str, keys: Sequence[int]) -> Generator[Reported]:
        """While a request of the gateway's own for the chain `keys` runs on `target`."""
        reported = Reported(list(keys))
        probed = self._probed.setdefault(target, [])
        probed.append(reported)
        try:
            yield reported
        finally:
            probed.remove(reported)
            if not probed:
                self._probed.pop(target, None)

    def asked(self, target: str, keys: Sequence[int]) -> None:
        """A client's request for the chain `keys`, sent to `target` now, asks for a report.

        When it runs, and whether it does, is not known: for a while, whatever repeats the beginning of that
        chain is taken for the report.
        """
        asked = self._asked.setdefault(target, deque(maxlen=_ASKED))
        asked.append((self._clock() + _ASKED_S, keys))

    def has(self, target: str, keys: Sequence[int], session: str | None) -> bool:
        """Whether `target` announces `keys`, from the root, because it was asked to; noted for its probe."""
        found = session == PROBE_SESSION
        for reported in self._probed.get(target, ()):
            if _begins(reported.keys, keys):
                reported.blocks = max(reported.blocks, len(keys))
                found = True
        asked, now = self._asked.get(target), self._clock()
        while asked and asked[0][0] < now:
            asked.popleft()
        return found or any(_begins(asked_for, keys) for _, asked_for in asked or ())

    def drop(self, target: str) -> None:
        self._asked.pop(target, None)


def _begins(whole: Sequence[int], keys: Sequence[int]) -> bool:
    """Whether `keys` are the beginning of the chain `whole`: a key names all that lies before its block."""
    return bool(keys) and len(keys) <= len(whole) and whole[len(keys) - 1] == keys[-1]
