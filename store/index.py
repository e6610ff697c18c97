"""Which blocks each target holds, and how long a prefix of a chain that makes.

Chosen by measurement (bench/index.py): runs of up to 256 blocks with bit masks (store/runs.py) under one dict
from key to run. Every answer is exact: no search assumes that a target holds all that lies before a block.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from store.events import Tier
from store.runs import LIMIT, ONES, Run, leading, numbers_of, stretches

# What one block and one run take beside the dict of keys, measured over a million blocks (bench/index.py):
# the key's int object and its place in the run; the run with its masks and its places in the collections.
_BLOCK_BYTES: Final = 48 + 8
_RUN_BYTES: Final = 700
_COPY_BYTES: Final = 130


@dataclass(slots=True, eq=False)
class _Holder:
    """One tier of one KV group of one target. number: its bit in the runs' masks."""

    target: str
    tier: Tier
    group: int
    number: int
    bit: int
    blocks: int = 0
    runs: set[Run] = field(default_factory=set["Run"])
    more: dict[int, int] = field(default_factory=dict[int, int])  # copies beyond the first, by key


class BlockIndex:
    """Copies of blocks by target, tier and KV group.

    A key names a block together with everything before it, so a target's prefix of a chain is the number of
    leading keys it holds; blocks whose parents are unknown lie here uncredited until the parents arrive:

        stored("w1", [k2, k3], parent=k1)    match([k0, k1, k2, k3]) == {}
        stored("w1", [k0, k1], parent=None)  match([k0, k1, k2, k3]) == {"w1": 4}

    An engine announces every physical copy of a block, and its end, separately: a block counts as held until
    as many copies were removed as were stored. Not thread-safe, never blocks.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        """Beyond `max_bytes` (an estimate of RSS, see `memory`) the least recently used leaves are given up.

        What was given up is unknown, not gone: it costs credit, never a false one.
        """
        self.evicted = 0
        self._max_bytes = max_bytes
        # Values are numbers, not runs, so that the garbage collector never walks through a dict of millions.
        self._slot: dict[int, int] = {}
        self._slots_room = 0
        self._runs: list[Run | None] = []
        self._free: list[int] = []
        self._recent: OrderedDict[Run, None] = OrderedDict()  # the least recently used first
        self._holders: dict[tuple[str, Tier, int], _Holder] = {}
        self._by_number: list[_Holder | None] = []
        self._tiers: dict[Tier, int] = {}

    # ------------------------------------------------------------------ events

    def stored(
        self, target: str, keys: Sequence[int], parent: int | None, *, tier: Tier = "gpu", group: int = 0
    ) -> None:
        """One more copy of each of `keys`, consecutive blocks after `parent` (None: from the root)."""
        if not keys:
            return
        holder = self._holders.get((target, tier, group)) or self._new_holder(target, tier, group)
        if self._slot.keys().isdisjoint(keys):
            run = self._append(holder, keys, parent)
        else:
            run = self._merge(holder, keys, parent)
        # From the leaf to the root: a run is never given up before those that go on from it.
        while run is not None and run.size:
            self._recent.move_to_end(run)
            run = run.parent
        if self._max_bytes is not None:
            self._keep_to(self._max_bytes)

    def removed(self, target: str, keys: Sequence[int], *, tier: Tier = "gpu", group: int = 0) -> None:
        """One copy less of each of `keys`; those not held are ignored."""
        holder = self._holders.get((target, tier, group))
        if holder is None:
            return
        for key in keys:
            self._remove(holder, key)
        self._shrink()

    def cleared(self, target: str, *, tier: Tier | None = "gpu") -> None:
        """Forget all blocks of `target` in `tier`; None: in every tier."""
        for holder in [h for h in self._holders.values() if h.target == target and tier in (None, h.tier)]:
            self._drop(holder)
        self._shrink()

    def drop(self, target: str) -> None:
        """Forget `target`: it is gone, or not believed any more."""
        self.cleared(target, tier=None)

    # ------------------------------------------------------------------ questions

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """How many leading blocks of `keys` each target holds in tier gpu; targets with none are left out."""
        return {self._named(number).target: blocks for number, blocks in self._match(keys, "gpu").items()}

    def sizes(self) -> dict[tuple[str, Tier], int]:
        """Distinct blocks by (target, tier), orphans included; several groups add up."""
        sizes: dict[tuple[str, Tier], int] = {}
        for holder in self._holders.values():
            if holder.blocks:
                name = holder.target, holder.tier
                sizes[name] = sizes.get(name, 0) + holder.blocks
        return sizes

    def memory(self) -> int:
        """Bytes taken, estimated from counts."""
        copies = sum(len(holder.more) for holder in self._holders.values())
        own = len(self._slot) * _BLOCK_BYTES + len(self._recent) * _RUN_BYTES + copies * _COPY_BYTES
        return sys.getsizeof(self._slot) + own

    def _match(self, keys: Sequence[int], tier: Tier) -> dict[int, int]:
        """Leading blocks of `keys` by holder's number."""
        found: dict[int, int] = {}
        slot, runs = self._slot, self._runs
        path: list[Run] = []
        active, at, end = self._tiers.get(tier, 0), 0, len(keys)
        while active and at < end:
            key = keys[at]
            number = slot.get(key)
            if number is None:
                break
            run = runs[number]
            assert run is not None
            path.append(run)
            offset = 0 if key == run.first else run.offset(key)
            span = run.shared(offset, keys, at)
            whole = active & run.full
            for holder, bits in run.partial.items():
                if active >> holder & 1:
                    length = leading(bits >> offset)
                    if length >= span:
                        whole |= 1 << holder
                    elif at + length:
                        found[holder] = at + length
            if at:
                for holder in numbers_of(active & ~whole):
                    found.setdefault(holder, at)
            active = whole
            at += span
        if at:
            for holder in numbers_of(active):
                found[holder] = at
        for run in reversed(path):
            self._recent.move_to_end(run)
        return found

    # ------------------------------------------------------------------ holders

    def _new_holder(self, target: str, tier: Tier, group: int) -> _Holder:
        number = next((n for n, h in enumerate(self._by_number) if h is None), len(self._by_number))
        holder = _Holder(target, tier, group, number, 1 << number)
        self._by_number[number : number + 1] = [holder]
        self._holders[target, tier, group] = holder
        self._tiers[tier] = self._tiers.get(tier, 0) | holder.bit
        return holder

    def _named(self, number: int) -> _Holder:
        holder = self._by_number[number]
        assert holder is not None
        return holder

    def _drop(self, holder: _Holder) -> None:
        for run in holder.runs:
            run.put(holder.number, 0)
            run.dead = run.size - run.held().bit_count()
            self._tidy(run)
        self._tiers[holder.tier] &= ~holder.bit
        self._by_number[holder.number] = None
        del self._holders[holder.target, holder.tier, holder.group]

    # ------------------------------------------------------------------ storing and removing

    def _append(self, holder: _Holder, keys: Sequence[int], parent: int | None) -> Run | None:
        """Keys that no run has. Returns the run of the last one, as `_merge` does."""
        once = dict.fromkeys(keys)
        if len(once) != len(keys):
            holder.more.update({key: n - 1 for key in once if (n := list(keys).count(key)) > 1})
            keys = list(once)
        holder.blocks += len(keys)
        number = self._slot.get(parent) if parent is not None else None
        above = self._runs[number] if number is not None else None
        at = 0
        # A run with one holder and no branch goes on, so a conversation that grows stays in few runs.
        if above is not None and above.last == parent and above.full == holder.bit and not above.children:
            at = min(LIMIT - above.size, len(keys))
            if at and not above.partial:
                above.extend(keys[:at])
                self._slot.update(dict.fromkeys(keys[:at], above.slot))
            else:
                at = 0
        while at < len(keys):
            above = self._new_run(keys[at : at + LIMIT], above)
            above.full = holder.bit
            holder.runs.add(above)
            at += above.size
        return above

    def _new_run(self, keys: Sequence[int], parent: Run | None) -> Run:
        number = self._free.pop() if self._free else len(self._runs)
        run = Run(keys, number, parent)
        self._runs[number : number + 1] = [run]
        self._recent[run] = None
        self._slot.update(dict.fromkeys(keys, number))
        return run

    def _merge(self, holder: _Holder, keys: Sequence[int], parent: int | None) -> Run | None:
        """Keys some of which are known."""
        slot, at, end = self._slot, 0, len(keys)
        run: Run | None = None
        while at < end:
            number = slot.get(keys[at])
            start = at
            if number is None:
                while at < end and keys[at] not in slot:
                    at += 1
                run = self._append(holder, keys[start:at], keys[start - 1] if start else parent)
                continue
            run = self._runs[number]
            assert run is not None
            offset = run.offset(keys[at])
            at += run.common(offset, keys, at)
            self._hold(holder, run, offset, keys[start:at])
        return run

    def _hold(self, holder: _Holder, run: Run, offset: int, keys: Sequence[int]) -> None:
        """`keys` are the blocks of `run` from `offset` on."""
        new = ONES[len(keys)] << offset
        had = run.bits(holder.number)
        for again in numbers_of(had & new):
            key = keys[again - offset]
            holder.more[key] = holder.more.get(key, 0) + 1
        has = had | new
        holder.blocks += (has ^ had).bit_count()
        if run.dead:
            run.dead -= (new & ~run.held()).bit_count()
        run.put(holder.number, has)
        holder.runs.add(run)

    def _remove(self, holder: _Holder, key: int) -> None:
        number = self._slot.get(key)
        if number is None:
            return
        if holder.more and key in holder.more:
            holder.more[key] -= 1
            if not holder.more[key]:
                del holder.more[key]
            return
        run = self._runs[number]
        assert run is not None
        had = run.bits(holder.number)
        gone = 1 << run.offset(key)
        if not had & gone:
            return
        holder.blocks -= 1
        run.put(holder.number, had ^ gone)
        if had == gone:
            holder.runs.discard(run)
        if not run.full and not run.held() & gone:
            run.dead += 1
            self._tidy(run)

    # ------------------------------------------------------------------ space

    def _tidy(self, run: Run) -> None:
        """Give up `run` if nobody holds any of it; rebuild it if more than half of it is dead."""
        if run.dead == run.size:
            self._unlink(run)
        elif run.dead * 2 > run.size:
            self._split(run)

    def _split(self, run: Run) -> None:
        """Keep the living stretches only: each a run of its own, the last one under the present identity."""
        keys, held, above = run.listed(), run.held(), run.parent
        for start, stop in stretches(held ^ ONES[run.size]):
            for key in keys[start:stop]:
                del self._slot[key]
        *others, (last, end) = stretches(held)
        for start, stop in others:
            above = self._new_run(keys[start:stop], above)
            for holder, bits in run.partial.items():
                part = bits >> start & ONES[above.size]
                above.put(holder, part)
                if part:
                    self._named(holder).runs.add(above)
        self._reparent(run, above)
        before = list(run.partial)
        run.cut(last, end)
        for holder in before:
            if not run.bits(holder):
                self._named(holder).runs.discard(run)

    def _unlink(self, run: Run) -> None:
        for key in run.listed():
            del self._slot[key]
        self._reparent(run, None)
        run.size = 0  # children may still name it as their parent
        self._runs[run.slot] = None
        self._free.append(run.slot)
        del self._recent[run]

    @staticmethod
    def _reparent(run: Run, parent: Run | None) -> None:
        if run.parent is not parent:
            if run.parent is not None:
                run.parent.children -= 1
            if parent is not None:
                parent.children += 1
            run.parent = parent

    def _keep_to(self, limit: int) -> None:
        """Give up the least recently used leaves until the rest fits."""
        while len(self._recent) > 1 and self.memory() > limit:
            run = next(iter(self._recent))
            if run.children:
                self._recent.move_to_end(run)
                continue
            for number in list(run.holders()):
                holder = self._named(number)
                holder.blocks -= run.bits(number).bit_count()
                holder.runs.discard(run)
                if holder.more:
                    for key in run.listed():
                        holder.more.pop(key, None)
            self.evicted += run.size - run.dead
            self._unlink(run)
            self._shrink()

    def _shrink(self) -> None:
        """Dicts, sets and lists keep the room of their best days: rebuild them once an eighth is used."""
        self._slots_room = max(self._slots_room, len(self._slot))
        if self._slots_room < 1024 or len(self._slot) * 8 > self._slots_room:
            return
        self._slots_room = len(self._slot)
        self._slot = dict(self._slot)
        self._recent = OrderedDict(self._recent)
        for holder in self._holders.values():
            holder.runs = set(holder.runs)
            holder.more = dict(holder.more)
        while self._runs and self._runs[-1] is None:
            self._runs.pop()
        self._free = [number for number, run in enumerate(self._runs) if run is None]
