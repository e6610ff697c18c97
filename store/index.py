"""Which blocks each target holds, and how long a prefix of a chain that makes.

Chosen by measurement (bench/index.py): runs of up to 256 blocks with bit masks (store/runs.py) under one dict
from key to run. Every answer is exact: no search assumes that a target holds all that lies before a block.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from store.capture import Capture, IndexSnapshot
from store.events import Tier
from store.groups import NEVER, TOO_MANY, window_hit
from store.runs import LIMIT, ONES, Run, leading, numbers_of, stretches
from store.slots import Slots

# What one block and one run take beside the dict of keys, measured over a million blocks (bench/index.py):
# the key's int object and its place in the run; the run with its masks and its places in the collections.
_BLOCK_BYTES: Final = 48 + 8
_RUN_BYTES: Final = 700
_COPY_BYTES: Final = 130
# Runs given up at most for an event of no more blocks: 15 us each. Another may give up as many runs as it
# has blocks: a run may be as short as one.
_GIVEN_UP_AT_ONCE: Final = 128
# KV groups of one target, those of its tiers counted apart. The models that vLLM serves have a handful, and
# every question looks at all of them.
_MOST_GROUPS: Final = 64


@dataclass(slots=True, eq=False)
class _Holder:
    """One tier of one KV group of one target. number: its bit in the runs' masks.

    need: None for full attention. A sliding-window group needs this many blocks before the end of a prefix;
    it announces a few blocks here and there, so its copies are counted in `loose`, by key, and not in runs.
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
    taken: int = 0  # see `Run`


class BlockIndex:
    """Copies of blocks by target, tier and KV group.

    A key names a block together with everything before it, so a target's prefix of a chain is the number of
    leading keys it holds; blocks whose parents are unknown lie here uncredited until the parents arrive:

        stored("w1", [k2, k3], parent=k1)    match([k0, k1, k2, k3]) == {}
        stored("w1", [k0, k1], parent=None)  match([k0, k1, k2, k3]) == {"w1": 4}

    An engine announces every physical copy of a block, and its end, separately: a block counts as held until
    as many copies were removed as were stored. A model with several KV groups hits where all of them do (see
    `describe`). Not thread-safe, never blocks.
    """

    def __init__(self) -> None:
        self.evicted = 0
        self._max_bytes: int | None = None
        self._beside: Callable[[], int] = int
        self._slot = Slots()
        self._most = 0
        self._runs: list[Run | None] = []
        self._free: list[int] = []
        self._recent: OrderedDict[Run, None] = OrderedDict()  # the least recently used first
        self._holders: dict[tuple[str, Tier, int], _Holder] = {}
        self._groups: dict[str, dict[tuple[Tier, int], _Holder]] = {}  # the same by target
        self._by_number: list[_Holder | None] = []
        self._tiers: dict[Tier, int] = {}  # the bits of those holders in runs that are believed
        self._hybrids: dict[tuple[str, Tier], list[_Holder]] = {}
        self._captures = 0
        self._capture: Capture | None = None  # as long as one is being taken

    def keep_below(self, max_bytes: int, beside: Callable[[], int] = int) -> None:
        """Beyond `max_bytes` (an estimate of RSS, see `memory`) the least recently used leaves are given up.

        `beside`: how many of them something else takes now. What was given up is unknown, not gone: it costs
        credit, never a false one.
        """
        self._max_bytes, self._beside = max_bytes, beside

    # ------------------------------------------------------------------ events

    def describe(self, target: str, group: int, need: int | None, *, tier: Tier = "gpu") -> bool:
        """What a KV group of `target` is: full attention (None, as long as nothing is said), or a window.

        `need`: blocks that a window group must hold right before the end of a prefix, ceil((window - 1) /
        block size). A prefix counts if every full group holds all of it and every window group its end.
        Known until the target is dropped, whatever becomes of the blocks. False: `target` has too many
        groups for one more; nothing is credited to it then.
        """
        holder = self._holders.get((target, tier, group))
        if holder is None:
            if len(self._groups.get(target, ())) >= _MOST_GROUPS:
                if (target, tier, TOO_MANY) not in self._holders:
                    self._new_holder(target, tier, TOO_MANY, NEVER)
                return False
            self._new_holder(target, tier, group, need)
        elif holder.need != need:
            self._drop(holder)
            self._new_holder(target, tier, group, need)
        return True

    def describe_as(self, other: "BlockIndex", target: str) -> None:
        """What `other` knows of the KV groups of `target`."""
        for holder in list(other._groups.get(target, {}).values()):
            self.describe(target, holder.group, holder.need, tier=holder.tier)

    def forget_groups(self, target: str, groups: Iterable[int]) -> None:
        """`target` has none of those KV groups any more."""
        for holder in [h for h in self._groups.get(target, {}).values() if h.group in groups]:
            self._drop(holder)

    def stored(
        self,
        target: str,
        keys: Sequence[int],
        parent: int | None,
        *,
        tier: Tier = "gpu",
        group: int = 0,
        report: bool = False,
    ) -> None:
        """One more copy of each of `keys`, consecutive blocks after `parent` (None: from the root).

        `report`: the target only says that it holds them, so what was known to be held gains no copy.
        """
        if not keys:
            return
        holder = self._holders.get((target, tier, group)) or self._new_holder(target, tier, group)
        self._about_to_change_copies(holder)
        if holder.need is None:
            self._store(holder, keys, parent, report)
        else:
            for key in keys:
                holder.loose[key] = max(1, holder.loose.get(key, 0) + (not report))
            holder.blocks = len(holder.loose)
        self._keep_to_cap(len(keys))

    def _store(self, holder: _Holder, keys: Sequence[int], parent: int | None, report: bool) -> None:
        if self._slot.disjoint(keys):
            run = self._append(holder, keys, parent)
        else:
            run = self._merge(holder, keys, parent, report)
        # From the leaf to the root: a run is never given up before those that go on from it.
        while run is not None and run.size:
            self._recent.move_to_end(run)
            run = run.parent

    def removed(self, target: str, keys: Sequence[int], *, tier: Tier = "gpu", group: int = 0) -> None:
        """One copy less of each of `keys`; those not held are ignored."""
        holder = self._holders.get((target, tier, group))
        if holder is None:
            return
        self._about_to_change_copies(holder)
        if holder.need is None:
            self._remove(holder, keys)
        else:
            for key in keys:
                if holder.loose.get(key, 0) > 1:
                    holder.loose[key] -= 1
                else:
                    holder.loose.pop(key, None)
            holder.blocks = len(holder.loose)
        self._shrink()
        self._keep_to_cap(len(keys))  # a run full of holes becomes many

    def refuted(self, target: str, keys: Sequence[int], *, renewed: bool) -> None:
        """The target was found to hold none of `keys`, whatever it announced, in any group's GPU cache.

        renewed: it has announced some of them since then, so each may have one copy again, no more.
        """
        for holder in [h for h in self._groups.get(target, {}).values() if h.tier == "gpu"]:
            self._about_to_change_copies(holder)
            for key in keys:
                holder.more.pop(key, None)
                if key in holder.loose:
                    holder.loose[key] = 1
            if not renewed:
                self.removed(target, keys, group=holder.group)

    def cleared(self, target: str, *, tier: Tier | None = "gpu") -> None:
        """Forget all blocks of `target` in `tier`; None: in every tier. What its KV groups are stays known:

        of a model with a window group the full group alone would be credited else.
        """
        for holder in [h for h in self._groups.get(target, {}).values() if tier in (None, h.tier)]:
            self._drop(holder)
            self._new_holder(target, holder.tier, holder.group, holder.need)
        self._shrink()

    def drop(self, target: str) -> None:
        """Forget `target`, its KV groups too: it is gone."""
        for holder in list(self._groups.get(target, {}).values()):
            self._drop(holder)
        self._shrink()

    # ------------------------------------------------------------------ questions

    def match(self, keys: Sequence[int], *, tier: Tier = "gpu", limit: int | None = None) -> dict[str, int]:
        """How many leading blocks of `keys` each target holds in `tier`; targets with none are left out.

        `limit`: blocks that an engine would use at most, (prompt tokens - 1) // block size. It must be given
        where window groups may be: for them a shorter prefix may be none at all.
        """
        end = len(keys) if limit is None else min(limit, len(keys))
        found = self._match(keys, end, tier)
        matched: dict[str, int] = {}
        for number, blocks in found.items():
            target = self._named(number).target
            if (target, tier) not in self._hybrids:
                matched[target] = blocks
        for (target, of), holders in self._hybrids.items():
            if of == tier and (blocks := _common_hit(holders, found, keys)):
                matched[target] = blocks
        return matched

    def holds_any(self, target: str, keys: Sequence[int], *, tier: Tier = "gpu") -> bool:
        """Whether `target` holds any block of `keys`, wherever in it: half a microsecond a key."""
        holder = self._holders.get((target, tier, 0))
        numbers = {self._slot.get(key) for key in keys} if holder is not None and holder.blocks else ()
        for number in numbers:
            run = self._runs[number] if number is not None else None
            if holder is not None and run is not None and run in holder.runs:
                return True
        return False

    def is_hybrid(self, target: str) -> bool:
        """Whether several KV groups, or one of a sliding window, decide what `target` hits."""
        return (target, "gpu") in self._hybrids

    def groups(self, target: str) -> dict[int, int | None]:
        """KV groups of `target`, and what `describe` said of each."""
        holders = self._groups.get(target, {}).values()
        return {holder.group: holder.need for holder in holders if holder.tier == "gpu"}

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
        copies = sum(len(holder.more) + len(holder.loose) for holder in self._holders.values())
        own = len(self._slot) * _BLOCK_BYTES + len(self._recent) * _RUN_BYTES + copies * _COPY_BYTES
        return self._slot.bytes() + own

    def _match(self, keys: Sequence[int], end: int, tier: Tier) -> dict[int, int]:
        """Leading blocks of `keys` by holder's number."""
        found: dict[int, int] = {}
        slot, runs = self._slot, self._runs
        path: list[Run] = []
        active, at = self._tiers.get(tier, 0), 0
        while active and at < end:
            key = keys[at]
            number = slot.get(key)
            if number is None:
                break
            run = runs[number]
            assert run is not None
            path.append(run)
            offset = 0 if key == run.first else run.offset(key)
            span = run.shared(offset, keys, at, end)
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

    # ------------------------------------------------------------------ snapshot

    def capture(self) -> Capture:
        """The state of this instant, to be taken piece by piece. One begun before is worth nothing then."""
        self._captures += 1
        capture = Capture(self._holders.values(), reversed(self._recent), self._captures, self._captured)
        self._capture = capture
        return capture

    def _captured(self, number: int) -> None:
        if number == self._captures:
            self._capture = None

    @classmethod
    def restore(cls, snapshot: IndexSnapshot) -> "BlockIndex":
        """An index that holds what was captured but credits none of it: see `admit`."""
        index = cls()
        holders: dict[int, _Holder] = {}
        for target, tier, group, number, need, loose, more in snapshot.each_holder():
            holder = holders[number] = index._new_holder(target, tier, group, need)
            holder.loose, holder.more, holder.blocks = loose, more, len(loose)
            index._tiers[tier] = 0
        for packed, full, partial in snapshot.each_run():
            keys = array("Q", packed).tolist()
            run = index._new_run(keys, None)
            index._slot.put(keys, run.slot)
            for number, bits in [*((n, ONES[run.size]) for n in full), *((n, int(b)) for n, b in partial)]:
                holder = holders[number]
                run.put(holder.number, bits)
                holder.blocks += bits.bit_count()
                holder.runs.add(run)
            run.dead = run.size - run.held().bit_count()
        return index

    def admit(self, target: str) -> None:
        """Believe what was restored of `target`: it is the same still, and none of its events is missing."""
        for holder in self._groups.get(target, {}).values():
            if holder.need is None:
                self._tiers[holder.tier] |= holder.bit

    # ------------------------------------------------------------------ holders

    def _new_holder(self, target: str, tier: Tier, group: int, need: int | None = None) -> _Holder:
        number = next((n for n, h in enumerate(self._by_number) if h is None), len(self._by_number))
        holder = _Holder(target, tier, group, number, 1 << number, need=need, taken=self._captures)
        self._by_number[number : number + 1] = [holder]
        self._holders[target, tier, group] = holder
        self._groups.setdefault(target, {})[tier, group] = holder
        if need is None:
            self._tiers[tier] = self._tiers.get(tier, 0) | holder.bit
        self._note_hybrid(target, tier)
        return holder

    def _note_hybrid(self, target: str, tier: Tier) -> None:
        groups = [h for h in self._groups.get(target, {}).values() if h.tier == tier]
        if len(groups) > 1 or any(h.need is not None for h in groups):
            self._hybrids[target, tier] = groups
        else:
            self._hybrids.pop((target, tier), None)

    def _named(self, number: int) -> _Holder:
        holder = self._by_number[number]
        assert holder is not None
        return holder

    def _drop(self, holder: _Holder) -> None:
        self._about_to_change_copies(holder)
        for run in holder.runs:
            self._about_to_change(run)
            run.put(holder.number, 0)
            run.dead = run.size - run.held().bit_count()
            self._tidy(run)
        self._tiers[holder.tier] = self._tiers.get(holder.tier, 0) & ~holder.bit
        self._by_number[holder.number] = None
        del self._holders[holder.target, holder.tier, holder.group]
        groups = self._groups[holder.target]
        del groups[holder.tier, holder.group]
        if not groups:
            del self._groups[holder.target]
        self._note_hybrid(holder.target, holder.tier)

    # ------------------------------------------------------------------ storing and removing

    def _append(self, holder: _Holder, keys: Sequence[int], parent: int | None) -> Run | None:
        """Keys that no run has. Returns the run of the last one, as `_merge` does."""
        if len(set(keys)) != len(keys):
            copies = Counter(keys)
            holder.more.update({key: n - 1 for key, n in copies.items() if n > 1})
            keys = list(copies)
        holder.blocks += len(keys)
        number = self._slot.get(parent) if parent is not None else None
        above = self._runs[number] if number is not None else None
        at = 0
        # A run with one holder and no branch goes on, so a conversation that grows stays in few runs.
        if above is not None and above.last == parent and above.full == holder.bit and not above.children:
            at = min(LIMIT - above.size, len(keys))
            if at and not above.partial:
                self._about_to_change(above)
                above.extend(keys[:at])
                self._slot.put(list(keys[:at]), above.slot)
            else:
                at = 0
        while at < len(keys):
            above = self._new_run(keys[at : at + LIMIT], above)
            self._slot.put(list(keys[at : at + above.size]), above.slot)
            above.full = holder.bit
            holder.runs.add(above)
            at += above.size
        return above

    def _new_run(self, keys: Sequence[int], parent: Run | None) -> Run:
        number = self._free.pop() if self._free else len(self._runs)
        run = Run(keys, number, parent, self._captures)
        self._runs[number : number + 1] = [run]
        self._recent[run] = None
        return run

    def _merge(self, holder: _Holder, keys: Sequence[int], parent: int | None, report: bool) -> Run | None:
        """Keys some of which are known."""
        slot, at, end = self._slot, 0, len(keys)
        run: Run | None = None
        while at < end:
            number = slot.get(keys[at])
            start = at
            if number is None:
                while at < end and slot.get(keys[at]) is None:
                    at += 1
                run = self._append(holder, keys[start:at], keys[start - 1] if start else parent)
                continue
            run = self._runs[number]
            assert run is not None
            offset = run.offset(keys[at])
            at += run.common(offset, keys, at)
            self._hold(holder, run, offset, keys[start:at], report)
        return run

    def _hold(self, holder: _Holder, run: Run, offset: int, keys: Sequence[int], report: bool) -> None:
        """`keys` are the blocks of `run` from `offset` on."""
        new = ONES[len(keys)] << offset
        had = run.bits(holder.number)
        for again in numbers_of(0 if report else had & new):
            key = keys[again - offset]
            holder.more[key] = holder.more.get(key, 0) + 1
        has = had | new
        holder.blocks += (has ^ had).bit_count()
        self._about_to_change(run)
        if run.dead:
            run.dead -= (new & ~run.held()).bit_count()
        run.put(holder.number, has)
        holder.runs.add(run)

    def _remove(self, holder: _Holder, keys: Sequence[int]) -> None:
        """Keys that follow one another in a run go at once."""
        at, end = 0, len(keys)
        while at < end:
            number = self._slot.get(keys[at])
            if number is None:
                at += 1
                continue
            run = self._runs[number]
            assert run is not None
            offset = run.offset(keys[at])
            length = run.common(offset, keys, at) if end - at > 1 else 1
            self._release(holder, run, ONES[length] << offset)
            at += length

    def _release(self, holder: _Holder, run: Run, gone: int) -> None:
        """One copy less of those blocks of `run` that `gone` has a bit for."""
        had = run.bits(holder.number)
        gone &= had
        if holder.more:
            for place in numbers_of(gone):
                (key,) = run.listed(place, place + 1)
                copies = holder.more.get(key, 0)
                if copies:
                    gone ^= 1 << place
                    holder.more[key] = copies - 1
                    if copies == 1:
                        del holder.more[key]
        if not gone:
            return
        self._about_to_change(run)
        holder.blocks -= gone.bit_count()
        run.put(holder.number, had ^ gone)
        if had == gone:
            holder.runs.discard(run)
        if not run.full:
            run.dead += (gone & ~run.held()).bit_count()
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
            self._slot.forget(keys[start:stop])
        *others, (last, end) = stretches(held)
        for start, stop in others:
            above = self._new_run(keys[start:stop], above)
            self._slot.move(keys[start:stop], above.slot)
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

    def _about_to_change(self, run: Run) -> None:
        if self._capture is not None:
            self._capture.keep(run)

    def _about_to_change_copies(self, holder: _Holder) -> None:
        if self._capture is not None:
            self._capture.keep_holder(holder)

    def _unlink(self, run: Run) -> None:
        self._slot.forget(run.listed())
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

    def _keep_to_cap(self, changed: int) -> None:
        """Give up the least recently used leaves, then blocks that lie in no run, until the rest fits.

        changed: blocks that the event was about. What a doubling dict brings down may take several events.
        """
        if self._max_bytes is None:
            return
        for _ in range(max(_GIVEN_UP_AT_ONCE, changed)):
            if self.memory() + self._beside() <= self._max_bytes:
                return
            if len(self._recent) > 1:
                self._give_up_oldest()
            elif not self._give_up_loose():
                return
            self._shrink()

    def _give_up_oldest(self) -> None:
        """The run that was not used for longest, if no other goes on from it; else it is not old."""
        run = next(iter(self._recent))
        if run.children:
            self._recent.move_to_end(run)
            return
        self._about_to_change(run)
        for number in list(run.holders()):
            holder = self._named(number)
            holder.blocks -= run.bits(number).bit_count()
            holder.runs.discard(run)
            if holder.more:
                self._about_to_change_copies(holder)
                for key in run.listed():
                    holder.more.pop(key, None)
            for window in self._hybrids.get((holder.target, holder.tier), ()):
                if window.need is not None:
                    self._about_to_change_copies(window)
                    for key in run.listed():
                        window.loose.pop(key, None)
                    window.blocks = len(window.loose)
        self.evicted += run.size - run.dead
        self._unlink(run)

    def _give_up_loose(self) -> bool:
        """The oldest blocks of the holder that has most of them outside runs. Whether there were any."""
        holder = max(self._holders.values(), key=lambda h: len(h.loose) + len(h.more), default=None)
        if holder is None or not (holder.loose or holder.more):
            return False
        self._about_to_change_copies(holder)
        copies = holder.loose or holder.more
        for key in list(islice(copies, LIMIT)):
            del copies[key]
        if copies is holder.loose:
            self.evicted += holder.blocks - len(copies)
            holder.blocks = len(copies)
        return True

    def _shrink(self) -> None:
        """Dicts, sets and lists keep the room of their best days: rebuild them once an eighth is used."""
        self._slot.shrink()
        self._most = max(self._most, len(self._slot))
        if self._most < 1024 or len(self._slot) * 8 > self._most:
            return
        self._most = len(self._slot)
        self._recent = OrderedDict(self._recent)
        for holder in self._holders.values():
            holder.runs = set(holder.runs)
            holder.more = dict(holder.more)
            holder.loose = dict(holder.loose)
        while self._runs and self._runs[-1] is None:
            self._runs.pop()
        self._free = [number for number, run in enumerate(self._runs) if run is None]


def _common_hit(holders: Sequence[_Holder], found: dict[int, int], keys: Sequence[int]) -> int:
    """The longest prefix on which all groups of a target agree; `found`: what those in runs hold.

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
