"""A conversation that goes on: the template is not shown again what it has shown already.

A template writes something, then message by message in a loop, then something more. If what it writes of a
message depends on nothing but that message, the ones next to it and names that have the values they had the
last time, then it would write the same again, and the loop may begin with the first message that is new. That
it depends on nothing else is found by reading the loop's body: of what Jinja knows only what is listed here
may stand there. Any other template is rendered whole every time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import attrgetter, is_not, ne
from typing import Any, Final, TypeAlias, cast

import msgspec
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Namespace, missing

from store.prompt.kept import Kept

PROGRESS: Final = " progress"
"""The name a render's Progress has in its context: one that no template can say."""

_STATEMENTS: Final = (nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign)
_EXPRESSIONS: Final = (
    *(nodes.Name, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.CondExpr, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Call),
    nodes.Concat,
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod, nodes.FloorDiv, nodes.Neg, nodes.Pos),
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
)
_FILTERS: Final = frozenset(
    "tojson trim string length count replace upper lower join default d first last list int title".split()
)
_METHODS: Final = frozenset(
    "startswith endswith split rsplit strip lstrip rstrip replace lower upper join get items keys".split()
)
_OF_LOOPS: Final = frozenset(("first", "last", "index", "index0", "previtem", "nextitem"))
_RAISES: Final = "raise_exception"
_made, _number = attrgetter("made"), attrgetter("number")


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """What the body of the loop over the messages reads.

    names: of the template's. back, ahead: it reads messages up to so many places before and after its own.
    """

    names: Sequence[str]
    back: int
    ahead: int


class Shown(msgspec.Struct, frozen=True):
    """What a render was of, message by message, and where in its text (UTF-8) each one begins.

    keys: name the messages of the loop, None where one has no name. values: of the names that its body reads.
    """

    source: str
    keys: Sequence[int | None]
    values: Hashable
    marks: Sequence[int]


class Past(msgspec.Struct, frozen=True):
    """An earlier render and (the beginning of) its text."""

    shown: Shown
    text: bytes


def mark_loop(tree: nodes.Template, lists: Sequence[str]) -> LoopFacts | None:
    """Find the loop over one of `lists` that may begin late, and mark it for the code generator."""
    macros = _macros(tree)
    for loop in (node for node in tree.body if isinstance(node, nodes.For)):
        sliced = isinstance(loop.iter, nodes.Getitem)
        over = loop.iter.node if isinstance(loop.iter, nodes.Getitem) else loop.iter
        if not (isinstance(over, nodes.Name) and over.name in lists and isinstance(loop.target, nodes.Name)):
            continue
        if loop.else_ or loop.test is not None or loop.recursive:
            continue
        reading = _Reading(macros, loop.target.name, over.name, indexed=not sliced)
        if reading.of(loop.body):
            # Jinja makes an object of the loop only where the body speaks of it.
            nothing = nodes.Output([nodes.TemplateData("")])
            first = nodes.Getattr(nodes.Name("loop", "load"), "first", "load")
            loop.body.append(nodes.If(first, [nothing], [], []))
            cast(Any, loop).may_begin_late = True
            return LoopFacts(sorted(reading.names), reading.back, reading.ahead)
    return None


def _macros(tree: nodes.Template) -> dict[str, nodes.Macro]:
    """Those whose names never stand for anything else."""
    every = list(tree.find_all(nodes.Macro))
    taken = [macro.name for macro in every] + [n.name for n in tree.find_all(nodes.Name) if n.ctx != "load"]
    return {macro.name: macro for macro in every if taken.count(macro.name) == 1}


class _Reading:
    """Reads a loop's body, and the macros it calls."""

    def __init__(
        self, macros: Mapping[str, nodes.Macro], message: str, messages: str, *, indexed: bool
    ) -> None:
        """indexed: whether `messages[loop.index0]` is the loop's own message."""
        self._macros: Final = macros
        self._message: Final = message
        self._messages: Final = messages
        self._indexed: Final = indexed
        self._read: Final[set[str]] = set()
        self.names: Final[set[str]] = set()
        self.back, self.ahead = 0, 1

    def of(self, body: Sequence[nodes.Node]) -> bool:
        """Whether nothing is in it but what is known to depend on nothing else."""
        return all(map(self._may_stand, body))

    def _may_stand(self, node: nodes.Node) -> bool:
        if not isinstance(node, _STATEMENTS + _EXPRESSIONS):
            return False
        if isinstance(node, nodes.For) and (node.recursive or node.test is not None):
            return False
        if isinstance(node, nodes.Assign) and not isinstance(node.target, nodes.Name):
            return False
        if isinstance(node, nodes.Filter) and node.name not in _FILTERS:
            return False
        if isinstance(node, nodes.Call):
            return self._may_call(node)
        if isinstance(node, nodes.Name):
            return self._may_read(node)
        if isinstance(node, nodes.Getattr) and _is(node.node, "loop"):
            return node.attr in _OF_LOOPS
        if isinstance(node, nodes.Getitem) and self._indexed and _is(node.node, self._messages):
            return self._is_near(node.arg)
        return self.of(list(node.iter_child_nodes()))

    def _may_read(self, node: nodes.Name) -> bool:
        if node.name in ("loop", "self", "caller", "varargs", "kwargs") or node.name == self._messages:
            return False
        if node.ctx == "load" and node.name != self._message:
            self.names.add(node.name)
        return True

    def _may_call(self, call: nodes.Call) -> bool:
        if call.dyn_args is not None or call.dyn_kwargs is not None:
            return False
        if not self.of([*call.args, *call.kwargs]):
            return False
        called = call.node
        if isinstance(called, nodes.Getattr):
            return called.attr in _METHODS and self._may_stand(called.node)
        if not isinstance(called, nodes.Name):
            return False
        return called.name == _RAISES or self._may_call_macro(called.name)

    def _may_call_macro(self, name: str) -> bool:
        self.names.add(name)
        if name in self._read:
            return True
        self._read.add(name)
        macro = self._macros.get(name)
        # What is called the messages may be something else there.
        if macro is None or any(argument.name == self._messages for argument in macro.args):
            return False
        inner = _Reading(self._macros, "", self._messages, indexed=False)
        inner._read.update(self._read)
        good = inner.of([*macro.defaults, *macro.body])
        self.names.update(inner.names)
        self._read.update(inner._read)
        return good

    def _is_near(self, place: nodes.Node) -> bool:
        """Whether `place` is `loop.index0`, or that plus or minus a number."""
        if _is_index(place):
            return True
        if not isinstance(place, nodes.Add | nodes.Sub) or not _is_index(place.left):
            return False
        distance = place.right.value if isinstance(place.right, nodes.Const) else None
        if type(distance) is not int or distance < 0:
            return False
        if isinstance(place, nodes.Sub):
            self.back = max(self.back, distance)
        else:
            self.ahead = max(self.ahead, distance)
        return True


def _is(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_index(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getattr) and _is(node.node, "loop") and node.attr == "index0"


class Progress:
    """One render, as it goes."""

    def __init__(self, source: str, facts: LoopFacts, past: Past | None, keys: Sequence[int | None]) -> None:
        self._source: Final = source
        self._facts: Final = facts
        self._past: Final = past if past is not None and past.shown.source == source else None
        self._keys: Final = keys
        self._parts: Final[list[bytes | memoryview]] = []
        self._size = 0
        self.shown: Shown | None = None

    def text(self, parts: Iterator[str]) -> bytes:
        """All that the template writes."""
        for part in parts:
            self._write(part.encode())
        return b"".join(self._parts)

    def loop(
        self, context: Context, messages: Sequence[Any], undefined: type[Undefined]
    ) -> Iterator[tuple[Any, LoopContext]]:
        """The messages, each with the loop's object; of those whose text is known only that is written."""
        loop = LoopContext(messages, undefined)
        shown = self._begun(context, messages)
        if shown is None:
            yield from loop
            return
        marks = cast(list[int], shown.marks)
        first, end = self._facts.back, self._known(shown)
        while True:
            if len(marks) == first < end:
                self._skip(loop, messages, marks, end)
            marks.append(self._size)
            try:
                pair = next(loop)
            except StopIteration:
                break
            yield pair
        self.shown = shown

    def _begun(self, context: Context, messages: Sequence[Any]) -> Shown | None:
        """Nothing is written yet; None where it can't be told what the messages or the names are."""
        given = cast(Sequence[Any], context.parent["messages"])
        start = len(given) - len(messages) if isinstance(messages, list) else -1
        if start < 0 or len(given) != len(self._keys):
            return None
        if any(map(is_not, messages, given[start:])):
            return None
        values = [frozen(context.resolve_or_missing(name)) for name in self._facts.names]
        if None in values:
            return None
        return Shown(self._source, self._keys[start:], tuple(values), [])

    def _known(self, shown: Shown) -> int:
        """How many messages to begin with have the text that they had the last time."""
        past = self._past
        if past is None or past.shown.values != shown.values:
            return 0
        keys = shown.keys
        if None in keys:
            keys = keys[: keys.index(None)]
        least = min(len(keys), len(past.shown.keys))
        alike = next(compress(count(), map(ne, keys, past.shown.keys)), least)
        return min(alike - self._facts.ahead, bisect_right(past.shown.marks, len(past.text)) - 1)

    def _skip(self, loop: LoopContext, messages: Sequence[Any], marks: list[int], end: int) -> None:
        """Write the known text of the messages from here to `end`, and let the loop go on with that one."""
        assert self._past is not None
        known = self._past.shown.marks
        start = known[len(marks)]
        moved = self._size - start
        kept = known[len(marks) : end]
        marks += [mark + moved for mark in kept] if moved else kept
        self._write(memoryview(self._past.text)[start : known[end]])
        inside: Any = loop
        inside._iterator = iter(messages[end:])
        inside._after, inside._current, inside.index0 = missing, messages[end - 1], end - 1

    def _write(self, part: bytes | memoryview) -> None:
        self._parts.append(part)
        self._size += len(part)


Frozen: TypeAlias = tuple[Hashable, ...]


def frozen(value: Any) -> Frozen | None:
    """What two values have in common if they are the same to a template; None where that is unclear.

    A macro is the same in every render: what it reads is among the names.
    """
    if value is missing or isinstance(value, Undefined):
        return (missing,)
    if value is None or isinstance(value, str | int | float):
        return (cast(object, type(value)), value)
    if isinstance(value, Macro):
        return (Macro,)
    if isinstance(value, Namespace):
        inner = cast(dict[str, Any], cast(Any, value)._Namespace__attrs)
        parts = [(name, frozen(each)) for name, each in sorted(inner.items())]
        return None if any(part is None for _, part in parts) else (Namespace, *parts)
    return None


def keys_of(given: Sequence[Any], made: Sequence[Any]) -> Sequence[int | None]:
    """A number for each message that another body may have, too, as far as `made` is made of it alone.

    Empty where none may be in another one.
    """
    kinds = set(map(type, given))
    if len(given) != len(made) or Kept not in kinds:
        return ()
    # Most bodies: without a step for each of 100 messages.
    if len(kinds) == 1 and not any(map(is_not, map(_made, given), made)):
        return list(map(_number, given))
    return [
        one.number if type(one) is Kept and one.made is other else None
        for one, other in zip(given, made, strict=True)
    ]
