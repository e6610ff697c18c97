"""Which blocks each target holds, and how long a prefix of a chain that makes.

Chosen by measurement (bench/index.py): runs of up to 256 blocks with bit masks (store/runs.py) under one dict
from key to run. Every answer is exact: no search assumes that a target holds all that lies before a block.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from store.capture import Capture, IndexSnapshot
from store.events import Tier
from store.groups import NEVER, TOO_MANY
from store.holders import MOST_GROUPS, Holder, Holders, common_hit
from store.run_table import RunTable
from store.runs import LIMIT, ONES, Run, leading, numbers_of, stretches

# What a copy noted by its key takes (see store/run_table.py for what lies in runs).
_COPY_BYTES: Final = 130
# Runs given up at most for an event of no more blocks: 15 us each. Another may give up as many runs as it
# has blocks: a run may be as short as one.
_GIVEN_UP_AT_ONCE: Final = 128


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
        self._runs = RunTable()
        self._holders = Holders()
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
        holder = self._holders.named.get((target, tier, group))
        if holder is None:
            if len(self._holders.of(target)) >= MOST_GROUPS:
                if (target, tier, TOO_MANY) not in self._holders.named:
                    self._new_holder(target, tier, TOO_MANY, NEVER)
                return False
            self._new_holder(target, tier, group, need)
        elif holder.need != need:
            self._drop(holder)
            self._new_holder(target, tier, group, need)
        return True

    def describe_as(self, other: "BlockIndex", target: str) -> None:
        """What `other` knows of the KV groups of `target`."""
        for holder in other._holders.of(target):
            self.describe(target, holder.group, holder.need, tier=holder.tier)

    def forget_groups(self, target: str, groups: Iterable[int]) -> None:
        """`target` has none of those KV groups any more."""
        for holder in [h for h in self._holders.of(target) if h.group in groups]:
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
        holder = self._holders.named.get((target, tier, group)) or self._new_holder(target, tier, group)
        self._about_to_change_copies(holder)
        if holder.need is None:
            self._store(holder, keys, parent, report)
        else:
            for key in keys:
                holder.loose[key] = max(1, holder.loose.get(key, 0) + (not report))
            holder.blocks = len(holder.loose)
        self._keep_to_cap(len(keys))

    def _store(self, holder: Holder, keys: Sequence[int], parent: int | None, report: bool) -> None:
        if self._runs.slots.disjoint(keys):
            run = self._append(holder, keys, parent)
        else:
            run = self._merge(holder, keys, parent, report)
        self._runs.use(run)

    def removed(self, target: str, keys: Sequence[int], *, tier: Tier = "gpu", group: int = 0) -> None:
        """One copy less of each of `keys`; those not held are ignored."""
        holder = self._holders.named.get((target, tier, group))
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
        for holder in [h for h in self._holders.of(target) if h.tier == "gpu"]:
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
        for holder in [h for h in self._holders.of(target) if tier in (None, h.tier)]:
            self._drop(holder)
            self._new_holder(target, holder.tier, holder.group, holder.need)
        self._shrink()

    def drop(self, target: str) -> None:
        """Forget `target`, its KV groups too: it is gone."""
        for holder in self._holders.of(target):
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
            target = self._holders.numbered(number).target
            if (target, tier) not in self._holders.hybrid:
                matched[target] = blocks
        for (target, of), holders in self._holders.hybrid.items():
            if of == tier and (blocks := common_hit(holders, found, keys)):
                matched[target] = blocks
        return matched

    def holds_any(self, target: str, keys: Sequence[int], *, tier: Tier = "gpu") -> bool:
        """Whether `target` holds any block of `keys`, wherever in it: half a microsecond a key."""
        holder = self._holders.named.get((target, tier, 0))
        numbers = {self._runs.slots.get(key) for key in keys} if holder is not None and holder.blocks else ()
        for number in numbers:
            run = self._runs.numbered[number] if number is not None else None
            if holder is not None and run is not None and run in holder.runs:
                return True
        return False

    def is_hybrid(self, target: str) -> bool:
        """Whether several KV groups, or one of a sliding window, decide what `target` hits."""
        return (target, "gpu") in self._holders.hybrid

    def groups(self, target: str) -> dict[int, int | None]:
        """KV groups of `target`, and what `describe` said of each."""
        return {holder.group: holder.need for holder in self._holders.of(target) if holder.tier == "gpu"}

    def sizes(self) -> dict[tuple[str, Tier], int]:
        """Distinct blocks by (target, tier), orphans included; several groups add up."""
        sizes: dict[tuple[str, Tier], int] = {}
        for holder in self._holders:
            if holder.blocks:
                name = holder.target, holder.tier
                sizes[name] = sizes.get(name, 0) + holder.blocks
        return sizes

    def memory(self) -> int:
        """Bytes taken, estimated from counts."""
        copies = sum([len(holder.more) + len(holder.loose) for holder in self._holders])
        return self._runs.bytes() + copies * _COPY_BYTES

    def _match(self, keys: Sequence[int], end: int, tier: Tier) -> dict[int, int]:
        """Leading blocks of `keys` by holder's number."""
        found: dict[int, int] = {}
        slots, runs = self._runs.slots, self._runs.numbered
        path: list[Run] = []
        active, at = self._holders.believed.get(tier, 0), 0
        while active and at < end:
            key = keys[at]
            number = slots.get(key)
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
            self._runs.recent.move_to_end(run)
        return found

    # ------------------------------------------------------------------ snapshot

    def capture(self) -> Capture:
        """The state of this instant, to be taken piece by piece. One begun before is worth nothing then."""
        self._captures += 1
        capture = Capture(self._holders, reversed(self._runs.recent), self._captures, self._captured)
        self._capture = capture
        return capture

    def _captured(self, number: int) -> None:
        if number == self._captures:
            self._capture = None

    @classmethod
    def restore(cls, snapshot: IndexSnapshot) -> "BlockIndex":
        """An index that holds what was captured but credits none of it: see `admit`."""
        index = cls()
        holders: dict[int, Holder] = {}
        for target, tier, group, number, need, loose, more in snapshot.each_holder():
            holder = holders[number] = index._new_holder(target, tier, group, need)
            holder.loose, holder.more, holder.blocks = loose, more, len(loose)
            index._holders.believed[tier] = 0
        for packed, full, partial in snapshot.each_run():
            run = index._runs.add(array("Q", packed).tolist(), None, 0)
            for number, bits in [*((n, ONES[run.size]) for n in full), *((n, int(b)) for n, b in partial)]:
                holder = holders[number]
                run.put(holder.number, bits)
                holder.blocks += bits.bit_count()
                holder.runs.add(run)
            run.dead = run.size - run.held().bit_count()
        return index

    def admit(self, target: str) -> None:
        """Believe what was restored of `target`: it is the same still, and none of its events is missing."""
        for holder in self._holders.of(target):
            if holder.need is None:
                self._holders.believed[holder.tier] |= holder.bit

    # ------------------------------------------------------------------ holders

    def _new_holder(self, target: str, tier: Tier, group: int, need: int | None = None) -> Holder:
        return self._holders.add(target, tier, group, need, self._captures)

    def _drop(self, holder: Holder) -> None:
        self._about_to_change_copies(holder)
        for run in holder.runs:
            self._about_to_change(run)
            run.put(holder.number, 0)
            run.dead = run.size - run.held().bit_count()
            self._tidy(run)
        self._holders.remove(holder)

    # ------------------------------------------------------------------ storing and removing

    def _append(self, holder: Holder, keys: Sequence[int], parent: int | None) -> Run | None:
        """Keys that no run has. Returns the run of the last one, as `_merge` does."""
        if len(set(keys)) != len(keys):
            copies = Counter(keys)
            holder.more.update({key: n - 1 for key, n in copies.items() if n > 1})
            keys = list(copies)
        holder.blocks += len(keys)
        above = self._runs.of(parent) if parent is not None else None
        at = 0
        # A run with one holder and no branch goes on, so a conversation that grows stays in few runs.
        if above is not None and above.last == parent and above.full == holder.bit and not above.children:
            at = min(LIMIT - above.size, len(keys))
            if at and not above.partial:
                self._about_to_change(above)
                self._runs.grow(above, keys[:at])
            else:
                at = 0
        while at < len(keys):
            above = self._runs.add(keys[at : at + LIMIT], above, self._captures)
            above.full = holder.bit
            holder.runs.add(above)
            at += above.size
        return above

    def _merge(self, holder: Holder, keys: Sequence[int], parent: int | None, report: bool) -> Run | None:
        """Keys some of which are known."""
        run_of, at, end = self._runs.of, 0, len(keys)
        run: Run | None = None
        while at < end:
            start = at
            run = run_of(keys[at])
            if run is None:
                while at < end and run_of(keys[at]) is None:
                    at += 1
                run = self._append(holder, keys[start:at], keys[start - 1] if start else parent)
                continue
            offset = run.offset(keys[at])
            at += run.common(offset, keys, at)
            self._hold(holder, run, offset, keys[start:at], report)
        return run

    def _hold(self, holder: Holder, run: Run, offset: int, keys: Sequence[int], report: bool) -> None:
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

    def _remove(self, holder: Holder, keys: Sequence[int]) -> None:
        """Keys that follow one another in a run go at once."""
        slots, runs, at, end = self._runs.slots, self._runs.numbered, 0, len(keys)
        while at < end:
            number = slots.get(keys[at])
            run = runs[number] if number is not None else None
            if run is None:
                at += 1
                continue
            offset = run.offset(keys[at])
            length = run.common(offset, keys, at) if end - at > 1 else 1
            self._release(holder, run, ONES[length] << offset)
            at += length

    def _release(self, holder: Holder, run: Run, gone: int) -> None:
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
            self._runs.remove(run)
        elif run.dead * 2 > run.size:
            self._split(run)

    def _split(self, run: Run) -> None:
        """Keep the living stretches only: each a run of its own, the last one under the present identity."""
        keys, held, above = run.listed(), run.held(), run.parent
        for start, stop in stretches(held ^ ONES[run.size]):
            self._runs.slots.forget(keys[start:stop])
        *others, (last, end) = stretches(held)
        for start, stop in others:
            above = self._runs.carve(keys[start:stop], above, self._captures)
            for number, bits in run.partial.items():
                part = bits >> start & ONES[above.size]
                above.put(number, part)
                if part:
                    self._holders.numbered(number).runs.add(above)
        run.go_on_from(above)
        before = list(run.partial)
        run.cut(last, end)
        for number in before:
            if not run.bits(number):
                self._holders.numbered(number).runs.discard(run)

    def _about_to_change(self, run: Run) -> None:
        if self._capture is not None:
            self._capture.keep(run)

    def _about_to_change_copies(self, holder: Holder) -> None:
        if self._capture is not None:
            self._capture.keep_holder(holder)

    def _keep_to_cap(self, changed: int) -> None:
        """Give up the least recently used leaves, then blocks that lie in no run, until the rest fits.

        changed: blocks that the event was about. What a doubling dict brings down may take several events.
        """
        if self._max_bytes is None:
            return
        for _ in range(max(_GIVEN_UP_AT_ONCE, changed)):
            if self.memory() + self._beside() <= self._max_bytes:
                return
            if len(self._runs.recent) > 1:
                self._give_up_oldest()
            elif not self._give_up_loose():
                return
            self._shrink()

    def _give_up_oldest(self) -> None:
        """The run that was not used for longest, if no other goes on from it; else it is not old."""
        run = next(iter(self._runs.recent))
        if run.children:
            self._runs.recent.move_to_end(run)
            return
        self._about_to_change(run)
        for number in list(run.holders()):
            holder = self._holders.numbered(number)
            holder.blocks -= run.bits(number).bit_count()
            holder.runs.discard(run)
            if holder.more:
                self._about_to_change_copies(holder)
                for key in run.listed():
                    holder.more.pop(key, None)
            for window in self._holders.hybrid.get((holder.target, holder.tier), ()):
                if window.need is not None:
                    self._about_to_change_copies(window)
                    for key in run.listed():
                        window.loose.pop(key, None)
                    window.blocks = len(window.loose)
        self.evicted += run.size - run.dead
        self._runs.remove(run)

    def _give_up_loose(self) -> bool:
        """The oldest blocks of the holder that has most of them outside runs. Whether there were any."""
        holder = max(self._holders, key=lambda h: len(h.loose) + len(h.more), default=None)
        if holder is None or not (holder.loose or holder.more):
            return False
        self._about_to_change_copies(holder)
        self.evicted += holder.give_up_loose(LIMIT)
        return True

    def _shrink(self) -> None:
        if self._runs.shrink():
            for holder in self._holders:
                holder.shrink()
