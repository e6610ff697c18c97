"""Requests seen last, so that an identical one need not be rendered again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

ENTRY_BYTES: Final = 500


@dataclass(frozen=True, slots=True)
class Known:
    """A request in a form equal only to its own (`body`), and where its tokens are found.

    `keys` name its cached segments; `tail` is the text after them.
    """

    body: bytes
    keys: tuple[bytes, ...]
    tail: str

    @property
    def size(self) -> int:
        return len(self.body) + 8 * len(self.keys) + len(self.tail) + ENTRY_BYTES


class Repeats:
    """The newest request of each conversation, told apart by how it begins; bounded in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._lock: Final = threading.Lock()
        self._known: Final[OrderedDict[Hashable, Known]] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def find(self, conversation: Hashable, body: bytes) -> Known | None:
        with self._lock:
            known = self._known.get(conversation)
            if known is None or known.body != body:
                return None
            self._known.move_to_end(conversation)
            return known

    def put(self, conversation: Hashable, known: Known) -> None:
        with self._lock:
            if (old := self._known.pop(conversation, None)) is not None:
                self._bytes -= old.size
            self._known[conversation] = known
            self._bytes += known.size
            while self._bytes > self._max_bytes:
                self._bytes -= self._known.popitem(last=False)[1].size
