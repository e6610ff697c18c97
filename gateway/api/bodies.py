"""Bodies of conversations seen before: what a new one repeats of them, byte for byte, is not read again.

A turn's body is the last one's with some messages more. Two bodies that are equal up to the end of a message
have a parser in the same state there; so what follows is read as if the messages before it were none, and
those are put in front.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from store.prompt.kept import Kept

ListField = Literal["messages", "input"]
T = TypeVar("T", bound=msgspec.Struct)

# Shorter bodies are read in less time than it takes to look for them.
_WORTHWHILE: Final = 16_384
# Longer ones than any conversation: taking them apart would cost four times what reading them does.
_LARGEST: Final = 16 << 20
# Taken apart by `rest`, whoever sent them: nobody has counted their parts.
_LARGEST_UNCOUNTED: Final = 1 << 19
# A body is looked for among this many, 0.1 us each.
_MOST: Final = 512
# The last messages may be written in another way once others follow (cache_control moves on, for one): bodies
# are recognised by what comes before those.
_LATEST: Final = 4
# Bytes before that place which tell bodies apart.
_MARK: Final = 64
# Objects made anew for one body, 6 us each; with more it is read as if it were the only one.
_MOST_ITEMS: Final = 4096
# Bodies of the same mark that a new one is compared with, 50 us each.
_COMPARED: Final = 4
# Memory for an object of a body besides its text, which is there twice: in the body and decoded.
_OBJECT_BYTES: Final = 1500


class Read(NamedTuple, Generic[T]):
    """What a body says of the prompt; `rest` is the body without its long lists, for all else it says."""

    prompt: T
    rest: bytes


class _WithTools(Protocol):
    tools: list[Any] | None


class _Lists(msgspec.Struct):
    """The long parts of a body, unread."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Unread(msgspec.Struct):
    """A body of whose prompt nothing is wanted."""

    messages: list[msgspec.Raw] = []
    input: list[msgspec.Raw] = []
    tools: list[msgspec.Raw] | None = None


_NOTHING: Final = Kept({}, 0)


@dataclass(frozen=True, slots=True)
class _Tools:
    """Tools with the bytes they were read from; nothing where they are no list of objects."""

    raw: bytes = b""
    objects: Sequence[Kept] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """A body as it came and as it was read.

    start: where its list of items begins, behind the bracket. ends: where each item ends. mark: the bytes
    before `marked`, the end of one of the last items.
    """

    body: bytes
    start: int
    items: Sequence[Kept]
    ends: Sequence[int]
    marked: int
    mark: bytes
    tools: _Tools
    read: Read[Any]

    @property
    def size(self) -> int:
        return 2 * len(self.body) + _OBJECT_BYTES * (len(self.items) + len(self.tools.objects))

    def resembles(self, body: bytes, kind: type[Any]) -> bool:
        return body.startswith(self.mark, self.marked - len(self.mark)) and type(self.read.prompt) is kind


class Bodies:
    """The last body of each conversation; the longest unused go first. Use from one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._bodies: Final[OrderedDict[int, _Body]] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def read(self, body: bytes, kind: type[T], name: ListField) -> Read[T]:
        """`body` as `msgspec.json.decode` would have it, not strict; raises what that raises.

        Messages (or input items) and tools that an earlier body of the conversation had, too, are the same
        objects; of an equal body it is the same prompt. Nothing of it may be modified.
        """
        if not self._max_bytes or not _WORTHWHILE <= len(body) <= _LARGEST:
            return Read(msgspec.json.decode(body, type=kind, strict=False), body)
        known, shared = self._closest(body, kind)
        if known is not None and shared == len(body) == len(known.body):
            self._bodies.move_to_end(id(known))
            return known.read
        found = _read(body, kind, name, known, shared)
        if found is None and known is not None:
            found = _read(body, kind, name, None, 0)
        if found is None:
            return Read(msgspec.json.decode(body, type=kind, strict=False), body)
        if known is not None:
            self._forget(known)
        self._keep(found)
        return found.read

    def rest(self, body: bytes, name: ListField) -> bytes:
        """`body` without its long lists, as `read` has it, for who wants nothing of them.

        `body` itself where it is read in less time than it takes to look for it, or is another case.
        """
        if not self._max_bytes or not _WORTHWHILE <= len(body) <= _LARGEST_UNCOUNTED:
            return body
        try:
            return self.read(body, _Unread, name).rest
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return body

    def _closest(self, body: bytes, kind: type[Any]) -> tuple[_Body | None, int]:
        """The body that this one goes on from, and how many leading bytes they share."""
        alike = (each for each in reversed(self._bodies.values()) if each.resembles(body, kind))
        for each in islice(alike, _COMPARED):
            shared = _shared_bytes(each.body, body)
            if shared >= each.marked:
                return each, shared
        return None, 0

    def _keep(self, body: _Body) -> None:
        self._bodies[id(body)] = body
        self._bytes += body.size
        while self._bytes > self._max_bytes or len(self._bodies) > _MOST:
            self._forget(next(iter(self._bodies.values())))

    def _forget(self, body: _Body) -> None:
        del self._bodies[id(body)]
        self._bytes -= body.size


def _read(body: bytes, kind: type[T], name: ListField, known: _Body | None, shared: int) -> _Body | None:
    """`body` taken apart; None where it is not the plain case, or does not go on from `known`.

    shared: leading bytes that are those of `known`.
    """
    items: Sequence[Kept] = ()
    ends: Sequence[int] = ()
    short, start, skipped = body, -1, 0
    if known is not None:
        count = bisect_right(known.ends, shared)
        follows = _after_comma(body, known.ends[count - 1])
        if follows < 0:
            return None
        items, ends, start = known.items[:count], known.ends[:count], known.start
        skipped = follows - start
        short = body[:start] + body[follows:]
    try:
        lists = msgspec.json.decode(short, type=_Lists)
        array = bytes(given if (given := getattr(lists, name)) is not msgspec.UNSET else b"[]")
        raws = msgspec.json.decode(array, type=list[msgspec.Raw])
        tools = _tools(lists.tools, known)
        # A long text is looked for as slowly as it is long: its beginning does.
        start = start if known is not None else short.find(array[:_MARK]) + 1
        # Behind a comma there has to be an item.
        if not 0 < len(raws) <= _MOST_ITEMS or not short.startswith(array, start - 1):
            return None
        rest = short[: start - 1] + b"[]" + short[start - 1 + len(array) :]
        if tools.objects:
            rest = _without(rest, tools.raw)
        prompt = msgspec.json.decode(rest, type=kind, strict=False)
        # They are not, if something else was taken for them: of two of a name the last one counts.
        if getattr(prompt, name) or (tools.objects and cast(_WithTools, prompt).tools):
            return None
        fresh = [_NOTHING] * len(raws) if kind is _Unread else [_kept(raw) for raw in raws]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    items = [*items, *fresh]
    ends = list(ends)
    place = start
    for raw in raws:  # only blanks and a comma are before it
        place = short.index(memoryview(raw)[:1], place) + len(raw)
        ends.append(place + skipped)
    setattr(prompt, name, items)
    if tools.objects:
        cast(_WithTools, prompt).tools = list(tools.objects)
    # One message alone, the system's, tells no conversations apart.
    marked = ends[max(min(1, len(ends) - 1), len(ends) - 1 - _LATEST)]
    mark = body[max(0, marked - _MARK) : marked]
    return _Body(body, start, items, ends, marked, mark, tools, Read(prompt, rest))


def _kept(raw: msgspec.Raw) -> Kept:
    return Kept(msgspec.json.decode(raw, type=dict[str, Any]), len(raw))


def _tools(given: msgspec.Raw | msgspec.UnsetType, known: _Body | None) -> _Tools:
    if isinstance(given, msgspec.UnsetType):
        return _Tools()
    raw = bytes(given)
    if known is not None and known.tools.raw == raw:
        return known.tools
    try:
        each = msgspec.json.decode(raw, type=list[msgspec.Raw])
        if len(each) > _MOST_ITEMS:
            return _Tools()
        return _Tools(raw, [_kept(tool) for tool in each])
    except msgspec.ValidationError:
        return _Tools()


def _without(rest: bytes, raw: bytes) -> bytes:
    """`rest` with an empty list for the list `raw` in it."""
    at = rest.find(raw[:_MARK])
    return rest[:at] + b"[]" + rest[at + len(raw) :] if rest.startswith(raw, at) else rest


def _shared_bytes(one: bytes, other: bytes) -> int:
    """How many leading bytes are equal."""
    shorter = min(len(one), len(other))
    unequal = _words(one, shorter // 8) != _words(other, shorter // 8)
    place = 8 * (int(unequal.argmax()) if unequal.any() else len(unequal))
    while place < shorter and one[place] == other[place]:
        place += 1
    return place


def _words(buffer: bytes, count: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(buffer, dtype=np.uint64, count=count)


def _after_comma(body: bytes, place: int) -> int:
    """The place behind the comma that comes next, blanks aside; -1 if something else does."""
    while body[place : place + 1] in (b" ", b"\n", b"\r", b"\t"):
        place += 1
    return place + 1 if body[place : place + 1] == b"," else -1
