"""All runs of an index: which one has a block, and when each was used last."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from store.runs import Run
from store.slots import Slots

# What one block and one run take beside the dict of keys, measured over a million blocks (bench/index.py):
# the key's int object and its place in the run; the run with its masks and its places in the collections.
_BLOCK_BYTES: Final = 48 + 8
_RUN_BYTES: Final = 700
_SMALL: Final = 1024  # blocks of a table that is not worth rebuilding


class RunTable:
    """Every block that is known lies in one run.

    slots: the number of a block's run. numbered: the runs, None where one is gone. recent: the least recently
    used first; a run comes before those that it goes on from, so that leaves are given up first.
    """

    def __init__(self) -> None:
        self.slots = Slots()
        self.numbered: list[Run | None] = []
        self.recent: OrderedDict[Run, None] = OrderedDict()
        self._free: list[int] = []
        self._most = 0

    def of(self, key: int) -> Run | None:
        """The run that has the block `key`."""
        number = self.slots.get(key)
        return None if number is None else self.numbered[number]

    def add(self, keys: Sequence[int], parent: Run | None, taken: int) -> Run:
        """A run of `keys`, each once, that no run has."""
        run = self._make(keys, parent, taken)
        self.slots.put(list(keys), run.slot)
        return run

    def carve(self, keys: Sequence[int], parent: Run | None, taken: int) -> Run:
        """A run of `keys` that another run has had."""
        run = self._make(keys, parent, taken)
        self.slots.move(list(keys), run.slot)
        return run

    def grow(self, run: Run, keys: Sequence[int]) -> None:
        """Append `keys`, each once, that no run has."""
        run.extend(keys)
        self.slots.put(list(keys), run.slot)

    def use(self, run: Run | None) -> None:
        """`run` and those that it goes on from were used."""
        while run is not None and run.size:
            self.recent.move_to_end(run)
            run = run.parent

    def remove(self, run: Run) -> None:
        """Nobody knows of its blocks any more."""
        self.slots.forget(run.listed())
        run.go_on_from(None)
        run.size = 0  # children may still name it as their parent
        self.numbered[run.slot] = None
        self._free.append(run.slot)
        del self.recent[run]

    def bytes(self) -> int:
        """What it takes, estimated from counts."""
        return self.slots.bytes() + len(self.slots) * _BLOCK_BYTES + len(self.recent) * _RUN_BYTES

    def shrink(self) -> bool:
        """Collections keep the room of their best days: rebuild them once an eighth is used. Whether so."""
        self.slots.shrink()
        self._most = max(self._most, len(self.slots))
        if self._most < _SMALL or len(self.slots) * 8 > self._most:
            return False
        self._most = len(self.slots)
        self.recent = OrderedDict(self.recent)
        while self.numbered and self.numbered[-1] is None:
            self.numbered.pop()
        self._free = [number for number, run in enumerate(self.numbered) if run is None]
        return True

    def _make(self, keys: Sequence[int], parent: Run | None, taken: int) -> Run:
        number = self._free.pop() if self._free else len(self.numbered)
        run = Run(keys, number, parent, taken)
        self.numbered[number : number + 1] = [run]
        self.recent[run] = None
        return run
