"""The newest prompt of each conversation: the next turn's text is compared with its text instead of being
hashed, and the same request, should it come again, need not even be rendered."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final

import msgspec

from store.prompt.resuming import Past, Shown

ENTRY_BYTES: Final = 500


class Recent(msgspec.Struct, frozen=True):
    """A request, as long as whoever made it keeps it, and its rendered text, UTF-8.

    `ends` are the places it is cut at. `keys` name the pieces kept in the cache of segments, which may be one
    more; `tail` is the text after those. `shown`: what rendering the next turn may take from the text.
    """

    request: weakref.ref[Any]
    text: bytes
    ends: Sequence[int]
    keys: Sequence[bytes]
    tail: str
    shown: Shown | None = None

    @property
    def past(self) -> Past | None:
        return Past(self.shown, self.text) if self.shown is not None else None

    @property
    def size(self) -> int:
        marks = len(self.shown.marks) if self.shown is not None else 0
        return len(self.text) + len(self.tail) + 40 * len(self.ends) + 80 * marks + ENTRY_BYTES

    def common(self, text: bytes, token: bytes) -> int:
        """How many leading pieces `text` begins with, too, and is cut at: `token` comes after each."""
        # A conversation mostly goes on as its prompt ended: found without a copy of all that.
        if text.startswith(self.text):
            return len(self.ends)
        if text.startswith(self.text[: self.ends[-1] + len(token)]):
            return len(self.ends)
        return bisect_left(
            self.ends, True, key=lambda end: not text.startswith(self.text[: end + len(token)])
        )


class RecentRequests:
    """One per conversation, told apart by how it begins; bounded in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._lock: Final = threading.Lock()
        self._recent: Final[OrderedDict[Hashable, Recent]] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def get(self, conversation: Hashable) -> Recent | None:
        with self._lock:
            recent = self._recent.get(conversation)
            if recent is not None:
                self._recent.move_to_end(conversation)
            return recent

    def put(self, conversation: Hashable, recent: Recent) -> None:
        with self._lock:
            if (old := self._recent.pop(conversation, None)) is not None:
                self._bytes -= old.size
            self._recent[conversation] = recent
            self._bytes += recent.size
            while self._bytes > self._max_bytes:
                self._bytes -= self._recent.popitem(last=False)[1].size
