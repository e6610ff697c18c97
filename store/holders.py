"""Who may hold blocks: each tier of each KV group of each target, a bit in the runs' masks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from store.events import Tier
from store.groups import window_hit
from store.runs import Run

# KV groups of one target, those of its tiers counted apart. The models that vLLM serves have a handful, and
# every question looks at all of them.
MOST_GROUPS: Final = 64


@dataclass(slots=True, eq=False)
class Holder:
    """One tier of one KV group of one target. number: its bit in the runs' masks.

    need: None for full attention. A sliding-window group needs this many blocks before the end of a prefix;
    it announces a few blocks here and there, so its copies are counted in `loose`, by key, and not in runs.
    taken: the number of the last capture that has this holder, or did not need it (store/capture.py).
    """

    target: str
    tier: Tier
    group: int
    number: int
    bit: int
    blocks: int = 0
    runs: set[Run] = field(default_factory=set["Run"])
    more: dict[int, int] = field(default_factory=dict[int, int])  # copies beyond the first, by key
    need: int | None = None
    loose: dict[int, int] = field(default_factory=dict[int, int])
    taken: int = 0

    def give_up_loose(self, most: int) -> int:
        """Forget the oldest blocks in no run, or copies beyond the first. How many blocks that were."""
        copies = self.loose or self.more
        for key in list(islice(copies, most)):
            del copies[key]
        if copies is self.more:
            return 0
        before, self.blocks = self.blocks, len(copies)
        return before - self.blocks

    def shrink(self) -> None:
        """Give back the room of its best days."""
        self.runs, self.more, self.loose = set(self.runs), dict(self.more), dict(self.loose)


class Holders:
    """All holders, by (target, tier, group).

    believed: by tier, the bits of those whose runs are credited. hybrid: by (target, tier), all holders where
    several groups, or one of a window, decide together what is hit.
    """

    def __init__(self) -> None:
        self.named: dict[tuple[str, Tier, int], Holder] = {}
        self.believed: dict[Tier, int] = {}
        self.hybrid: dict[tuple[str, Tier], list[Holder]] = {}
        self._of: dict[str, dict[tuple[Tier, int], Holder]] = {}
        self._numbered: list[Holder | None] = []

    def __iter__(self) -> Iterator[Holder]:
        return iter(self.named.values())

    def of(self, target: str) -> list[Holder]:
        return list(self._of.get(target, {}).values())

    def numbered(self, number: int) -> Holder:
        holder = self._numbered[number]
        assert holder is not None
        return holder

    def add(self, target: str, tier: Tier, group: int, need: int | None, taken: int) -> Holder:
        """One that is not there yet, with the lowest number that is free."""
        number = next((n for n, h in enumerate(self._numbered) if h is None), len(self._numbered))
        holder = Holder(target, tier, group, number, 1 << number, need=need, taken=taken)
        self._numbered[number : number + 1] = [holder]
        self.named[target, tier, group] = holder
        self._of.setdefault(target, {})[tier, group] = holder
        if need is None:
            self.believed[tier] = self.believed.get(tier, 0) | holder.bit
        self._note_hybrid(target, tier)
        return holder

    def remove(self, holder: Holder) -> None:
        """It must be in no run any more."""
        self.believed[holder.tier] = self.believed.get(holder.tier, 0) & ~holder.bit
        self._numbered[holder.number] = None
        del self.named[holder.target, holder.tier, holder.group]
        groups = self._of[holder.target]
        del groups[holder.tier, holder.group]
        if not groups:
            del self._of[holder.target]
        self._note_hybrid(holder.target, holder.tier)

    def _note_hybrid(self, target: str, tier: Tier) -> None:
        groups = [holder for holder in self.of(target) if holder.tier == tier]
        if len(groups) > 1 or any(holder.need is not None for holder in groups):
            self.hybrid[target, tier] = groups
        else:
            self.hybrid.pop((target, tier), None)


def common_hit(holders: Sequence[Holder], found: dict[int, int], keys: Sequence[int]) -> int:
    """The longest prefix on which all groups of a target agree; `found`: what those in runs hold, by number.

    None without a full group: after a gap a window's end may be announced long before any full block.
    """
    full = [holder for holder in holders if holder.need is None]
    hit = min((found.get(holder.number, 0) for holder in full), default=0)
    listed = list(keys[:hit])
    before = -1
    while hit and hit != before:
        before = hit
        for holder in holders:
            if holder.need is not None:
                hit = window_hit(holder.loose, listed, hit, holder.need)
    return hit
