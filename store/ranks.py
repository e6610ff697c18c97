"""Over how many ranks a block is spread: read off stored ones, since no worker says it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from store.keys import KeyLayout, observed_layouts

# Looked at again after this long: a fleet may be restarted with other ranks.
_AGAIN_S: Final = 60.0
# After a look that found nothing.
_RETRY_S: Final = 1.0


@dataclass(slots=True)
class _Seen:
    layout: KeyLayout
    due: float


class Ranks:
    """What stored blocks showed of each name's ranks; until then one rank is assumed.

    One rank's object is there whenever a block is, so looking with too few finds too much, never too little.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._retry: dict[str, float] = {}

    def of(self, layout: KeyLayout) -> KeyLayout:
        """`layout` with the ranks that its blocks were found to have."""
        seen = self._seen.get(_name(layout))
        if seen is None or layout.given:
            return layout
        found = seen.layout
        return replace(
            layout,
            tp_ranks=found.tp_ranks,
            pp_ranks=found.pp_ranks,
            pcp_ranks=found.pcp_ranks,
            dcp_ranks=found.dcp_ranks,
        )

    def known(self, layout: KeyLayout) -> bool:
        return layout.given or _name(layout) in self._seen

    def missed(self, layout: KeyLayout) -> bool:
        """Whether blocks that should have been there were looked for and none was ever found."""
        return _name(layout) in self._retry and not self.known(layout)

    def due(self, layout: KeyLayout, blocks: int) -> bool:
        """Whether to look now, at a chain whose first `blocks` are there as far as is known."""
        now, seen = self._clock(), self._seen.get(_name(layout))
        if layout.given:
            return False
        if seen is None:
            return blocks > 0
        return now >= seen.due and now >= self._retry.get(_name(layout), now)

    def learn(self, layout: KeyLayout, found: Iterable[str]) -> None:
        """Of the keys that were asked for, these are there."""
        name, now = _name(layout), self._clock()
        mine = [each for each in observed_layouts(found) if _name(each) == name]
        if mine:
            self._seen[name] = _Seen(mine[0], now + _AGAIN_S)
        else:
            self._retry[name] = now + _RETRY_S


def samples(blocks: int) -> list[int]:
    """Which of a chain's leading blocks to look at: one alone may have been evicted in part."""
    return sorted({0, blocks // 2, max(0, blocks - 1)})


def _name(layout: KeyLayout) -> str:
    return layout.name + layout.namespace
