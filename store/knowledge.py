"""What the event streams say, put where it belongs: own blocks to the index, pool blocks to the pool view."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from store.events import AllBlocksCleared, BadBatch, BlockRemoved, BlockStored, Event, EventBatch
from store.groups import UNPROVEN, blocks_needed
from store.hash_checks import HashChecks
from store.hashing import HashScheme
from store.index import BlockIndex
from store.reports import Reports

# Announcements kept of each target, to tell whether blocks came again since a turn was placed: 0.1 MB.
_LATELY: Final = 1024
# A worker that came back has the KV groups that it had, unless so many of its events name others only: an
# engine announces a block in all of its groups within a few events.
_ALL_GROUPS_SHOWN: Final = 64
# KV groups of the pool blocks in one batch; see `BlockIndex.describe` for the others.
_MOST_POOLED: Final = 64
# Blocks applied in one go (0.5 us each; 8 where they are known already and in no order), and what an event
# itself costs.
_PIECE: Final = 256
_EVENT_COST: Final = 8


@dataclass(frozen=True, slots=True)
class Shown:
    """What a target's events have shown of it. scheme: None as long as nobody has asked.

    doubt: why it is in doubt, "" if it is not.
    """

    block_size: int
    scheme: HashScheme | None
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """Leading blocks of a chain by target. certain: those of `blocks` that are proven; never more.

    at: how many announcements had been applied by then.
    """

    blocks: dict[str, int]
    certain: dict[str, int]
    at: int = field(default=0, compare=False)


@dataclass(slots=True)
class _EarlierGroups:
    """KV groups that an earlier life of a target had and this one, of so many events, has not shown."""

    groups: set[int]
    events: int = 0


class Knowledge:
    """The event sink. Not thread-safe: belongs to the event loop.

    A target is in doubt once events of it are missing for good: blocks known by then stay in `index`, where
    they may be ghosts, and `certain` holds what was proven since.
    """

    def __init__(
        self,
        on_pool_stored: Callable[[str, Sequence[int], int], None] | None = None,
        *,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_pool_stored` gets target, keys and KV group of blocks that it has just put into the pool.

        `max_bytes`: the cap of both indexes together.
        """
        self.index = BlockIndex()
        self.certain = BlockIndex()
        self._max_bytes = max_bytes
        self._share_room()
        self.doubts: dict[str, str] = {}
        self.hashes = HashChecks()
        self.reports = Reports(clock)
        self.block_sizes: dict[str, int] = {}
        self._on_pool_stored = on_pool_stored
        self._earlier: dict[str, _EarlierGroups] = {}
        self._shown_before: dict[str, Shown] = {}
        self._announcements = 0
        # By target: number, first block and length of the latest ones.
        self._lately: dict[str, deque[tuple[int, int, int]]] = {}
        self.contradicted: set[str] = set()  # an answer refuted what they announced, and nothing came since

    def match(self, keys: Sequence[int], *, limit: int | None = None) -> Held:
        """What targets hold of the chain `keys` in their GPU caches; see `BlockIndex.match`."""
        blocks = self.index.match(keys, limit=limit)
        if not self.doubts:
            return Held(blocks, blocks, self._announcements)
        certain = blocks.copy()
        proven = self.certain.match(keys, limit=limit)
        for target in self.doubts:
            certain[target] = proven.get(target, 0)
            # A block that was given up there, for one, may be known here still.
            blocks[target] = max(blocks.get(target, 0), certain[target])
        return Held(blocks, certain, self._announcements)

    def groups(self, target: str) -> Mapping[int, int | None]:
        """KV groups that events of `target` have shown: the blocks each needs before the end of a prefix.

        None: all of them. Known also while its cache is empty.
        """
        return self.index.groups(target)

    def doubt(self, target: str, why: str) -> None:
        """Events of `target` are missing for good."""
        self.certain.cleared(target, tier=None)
        self.certain.describe_as(self.index, target)
        self.doubts[target] = why

    def _share_room(self) -> None:
        """What is certain may take half of the memory, what is believed takes the rest."""
        if self._max_bytes is not None:
            self.certain.keep_below(self._max_bytes // 2)
            self.index.keep_below(self._max_bytes, beside=self.certain.memory)

    @property
    def memory(self) -> int:
        """Bytes that both indexes take, estimated."""
        return self.index.memory() + self.certain.memory()

    def answered(self, target: str, keys: Sequence[int], held: int, promised: int, at: int) -> None:
        """An answer showed that of the chain `keys` the first `held` blocks were there, of `promised`.

        at: `Held.at` of the promise. What was promised in vain is not promised again before the target has
        announced it anew: it computed those blocks now, and announces what it keeps of them. Of a target that
        is not in doubt one block too few says nothing (a boundary), and it needs no proof of what was there.
        """
        doubtful = target in self.doubts
        if doubtful and not self.index.is_hybrid(target):
            self.certain.stored(target, keys[:held], None, report=True)
            self.index.stored(target, keys[:held], None, report=True)
        if promised - held > (0 if doubtful else 1):
            renewed = self._announced_since(target, keys, held, promised, at)
            for index in self._indexes(target):
                index.refuted(target, keys[held:promised], renewed=renewed)
            if not renewed:
                self.contradicted.add(target)

    def _announced_since(self, target: str, keys: Sequence[int], start: int, stop: int, at: int) -> bool:
        """Whether `target` announced any of the blocks `start` to `stop - 1` of the chain after `at`."""
        lately = self._lately.get(target, ())
        if len(lately) == _LATELY and lately[0][0] > at:
            return True  # may be
        since = {first: blocks for number, first, blocks in lately if number > at}
        return bool(since) and any(
            block + since.get(key, 0) > start and key in since for block, key in enumerate(keys[:stop])
        )

    def restore(self, index: BlockIndex, certain: BlockIndex, shown: Mapping[str, Shown]) -> None:
        """Go on from a snapshot; before any target is followed."""
        self.index, self.certain = index, certain
        self._share_room()
        self.doubts = {target: known.doubt for target, known in shown.items() if known.doubt}
        for target in self.doubts:
            self.certain.describe_as(self.index, target)
        self._shown_before = dict(shown)

    def admit(self, target: str) -> None:
        """What was restored of `target` was proven to be still so."""
        self.index.admit(target)
        self.certain.admit(target)

    def shown(self, target: str) -> Shown:
        """What the next life of the gateway should know of `target` beside its blocks."""
        doubt = self.doubts.get(target, "")
        before = self._shown_before.get(target)
        if before is not None:
            return Shown(before.block_size, before.scheme, doubt)
        return Shown(self.block_sizes.get(target, 0), self.hashes.scheme(target), doubt)

    def expect(self, target: str, scheme: HashScheme, *, fixed: bool = True) -> None:
        """How `target` should hash, see `HashChecks`; an earlier life of the gateway may have learned it."""
        if not self.hashes.expect(target, scheme, fixed=fixed):
            return
        before = self._shown_before.pop(target, None)
        if before is not None:
            if before.block_size:
                self.block_sizes[target] = before.block_size
            if before.scheme is not None:
                self.hashes.learned(target, before.scheme)

    def drop(self, target: str) -> None:
        """`target` is gone: forget its blocks and what was noted about it."""
        self._forget_blocks(target)
        self.index.drop(target)
        self.certain.drop(target)
        self.hashes.drop(target)
        self.reports.drop(target)
        for noted in (self.block_sizes, self._earlier, self._shown_before):
            noted.pop(target, None)

    def probed(self, target: str, keys: Sequence[int], hit: int) -> None:
        """A probe showed that of the chain `keys` only the first `hit` blocks were there.

        What the probe made the engine compute is announced, and so among what is certain.
        """
        if target in self.doubts:
            self.index.removed(target, keys[hit:])

    def reset(self, target: str, why: str) -> None:
        """Forget the blocks of `target`; a new life of it may hash differently, or have other KV groups."""
        self._forget_blocks(target)
        self._earlier[target] = _EarlierGroups(set(self.index.groups(target)))
        self.hashes.again(target)

    def _forget_blocks(self, target: str) -> None:
        self.index.cleared(target, tier=None)
        self.certain.cleared(target, tier=None)
        self.doubts.pop(target, None)
        self._lately.pop(target, None)
        self.contradicted.discard(target)

    def batch(self, target: str, batch: EventBatch) -> None:
        """Apply it all at once; see `apply`."""
        for _ in self.apply(target, batch):
            pass

    def apply(self, target: str, batch: EventBatch) -> Iterator[None]:
        """Apply it in order, about a millisecond's worth until each pause.

        In a pause is known what the target held between two of the blocks that it announced; what KV groups
        the batch names is known before the first of its blocks. Nothing else may be applied to `target`
        before the end. Raises BadBatch there if some events were of too many groups.
        """
        spent = 0
        groups, refused = set[int](), set[int]()
        for number, event in enumerate(batch.events):
            if isinstance(event, BlockStored):
                if not (self._in_pool(event, groups) if event.pool else self._described(target, event)):
                    refused.add(number)
                spent += _EVENT_COST
                if spent >= _PIECE:
                    spent = 0
                    yield
        pooled: dict[int, list[int]] = {}
        for number, event in enumerate(batch.events):
            if number in refused:
                continue
            for blocks in self._pieces(target, event, pooled):
                spent += blocks + _EVENT_COST
                if spent >= _PIECE:
                    spent = 0
                    self._tell_pool(target, pooled)
                    yield
        self._tell_pool(target, pooled)
        if refused:
            raise BadBatch(f"{len(refused)} events are of KV groups beyond any number that a model has")

    def _pieces(self, target: str, event: Event, pooled: dict[int, list[int]]) -> Iterator[int]:
        """Apply `event`, so many of its blocks until each pause."""
        if isinstance(event, AllBlocksCleared):
            self._cleared(target)
            yield 0
        elif isinstance(event, BlockRemoved):
            for _, keys in _cut(event.keys):
                for index in self._indexes(target):
                    index.removed(target, keys, tier=event.tier, group=event.group)
                yield len(keys)
        elif event.pool:
            for _, keys in _cut(event.keys):
                pooled.setdefault(event.group, []).extend(keys)
                yield len(keys)
        else:
            yield from self._stored(target, event)

    @staticmethod
    def _in_pool(event: BlockStored, groups: set[int]) -> bool:
        """Whether there is room for its KV group among those of its batch."""
        if len(groups) < _MOST_POOLED:
            groups.add(event.group)
        return event.group in groups

    def _tell_pool(self, target: str, pooled: dict[int, list[int]]) -> None:
        if self._on_pool_stored is not None:
            for group, keys in pooled.items():
                self._on_pool_stored(target, keys, group)
        pooled.clear()

    def _described(self, target: str, event: BlockStored) -> bool:
        """Note which KV group `event` is of, and of what kind that is. Whether there is room for it."""
        need = blocks_needed(event.spec_kind, event.window, event.block_size)
        described = [
            index.describe(target, event.group, need, tier=event.tier) for index in self._indexes(target)
        ]
        earlier = self._earlier.get(target)
        if earlier is not None and event.tier == "gpu":
            earlier.groups.discard(event.group)
            earlier.events += 1
            if earlier.events >= _ALL_GROUPS_SHOWN or not earlier.groups:
                del self._earlier[target]
                for index in (self.index, self.certain):
                    index.forget_groups(target, earlier.groups)
        return all(described)

    def _indexes(self, target: str) -> tuple[BlockIndex, ...]:
        return (self.certain, self.index) if target in self.doubts else (self.index,)

    def _cleared(self, target: str) -> None:
        """Nothing is left in its GPU cache, ghosts included."""
        for index in self._indexes(target):
            index.cleared(target)
        if all(holder != target for holder, _ in self.index.sizes()):
            self._forget_blocks(target)

    def _stored(self, target: str, event: BlockStored) -> Iterator[int]:
        yield from self._store(target, event)
        if event.keys:
            self._announcements += 1
            lately = self._lately.setdefault(target, deque(maxlen=_LATELY))
            lately.append((self._announcements, event.keys[0], len(event.keys)))
            self.contradicted.discard(target)
        if event.block_size:
            self.block_sizes[target] = event.block_size
        if event.parent is None and event.tier == "gpu":
            self.hashes.check(target, event)

    def _store(self, target: str, event: BlockStored) -> Iterator[int]:
        tier, group = event.tier, event.group
        need = blocks_needed(event.spec_kind, event.window, event.block_size)
        report = event.parent is None and self.reports.has(target, event.keys, event.session)
        if report and (need is not None or event.group):
            return  # engines report blocks of window groups that they do not hold (vLLM 0.32)
        if event.spec_kind in UNPROVEN:
            return
        loose = need is None and event.sparse  # which of them follow each other is not said
        for start, keys in _cut(event.keys):
            parent = event.keys[start - 1] if start else event.parent
            for index in self._indexes(target):
                if loose:
                    for key in keys:
                        index.stored(target, [key], None, tier=tier, group=group)
                else:
                    index.stored(target, keys, parent, tier=tier, group=group, report=report)
            yield len(keys)


def _cut(keys: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Pieces of `keys`, and where each starts."""
    if len(keys) <= _PIECE:
        yield 0, keys
        return
    for start in range(0, len(keys), _PIECE):
        yield start, keys[start : start + _PIECE]
