"""Real Claude-Code sessions: block ids of every prompt, run-length coded (WEKA's kv-cache-tester)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final

import msgspec

from replay.chains import Pieces, common
from replay.traces.types import KEY_SPACE, Asked, BadTrace, Session, Tokens

_NATIVE: Final = 64
# Keys of the answer's blocks that no later prompt has.
_UNSEEN: Final = KEY_SPACE >> 1
# All of a session's are below that, in blocks as small as they can be cut.
_Block = Annotated[int, msgspec.Meta(ge=0, lt=_UNSEEN // _NATIVE // 2)]


class _Request(msgspec.Struct):
    type: str = "n"
    inp: Tokens = msgspec.field(name="in", default=0)
    out: Tokens = 0
    hr: list[_Block] = []  # first id and count, again and again
    think_time: float = 0.0
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0
    requests: list[_Request] = []  # of a sub-agent, which its parent waits for


class _Row(msgspec.Struct):
    id: str
    requests: list[_Request]
    block_size: int
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0


def read(rows: Iterable[tuple[int, Any]], block_size: int, head: int | None = None) -> Iterator[Session]:
    """Ids are local to a session; tools and system prompt are taken for a head that sessions with equally
    long ones share."""
    if _NATIVE % block_size:
        raise BadTrace(f"blocks of {_NATIVE} tokens cannot be cut in blocks of {block_size}")
    heads: dict[tuple[int, int], int] = {}
    for number, (line, row) in enumerate(rows):
        try:
            parsed = msgspec.convert(row, _Row)
        except msgspec.ValidationError as wrong:
            raise BadTrace(f"line {line}: not a Claude-Code session: {wrong}") from None
        if parsed.block_size != _NATIVE:
            raise BadTrace(f"line {line}: block_size is {parsed.block_size}, not {_NATIVE}")
        requests: list[_Request] = []
        shared: dict[int, tuple[int, int]] = {}  # first block id of a thread → its head's place and length
        _thread(parsed.requests, (parsed.tool_tokens, parsed.system_tokens), heads, shared, requests)
        if head is not None:
            shared = {first: (at, min(length, head // _NATIVE)) for first, (at, length) in shared.items()}
        if any(len(each.hr) % 2 for each in requests):
            raise BadTrace(
                f"line {line}: hr is a list of pairs, first id and count, but one has an odd length"
            )
        if turns := _turns(requests, number, shared, block_size):
            yield Session(parsed.id, turns)


def _thread(
    requests: list[_Request],
    head: tuple[int, int],
    heads: dict[tuple[int, int], int],
    shared: dict[int, tuple[int, int]],
    found: list[_Request],
) -> None:
    for each in requests:
        if each.requests:
            _thread(each.requests, (each.tool_tokens, each.system_tokens), heads, shared, found)
        elif each.inp > 0 and len(each.hr) >= 2:
            place = heads.setdefault(head, len(heads))
            shared.setdefault(each.hr[0], (place, min(sum(head) // _NATIVE, each.hr[1])))
            found.append(each)


def _turns(
    requests: list[_Request], number: int, shared: dict[int, tuple[int, int]], block_size: int
) -> list[Asked]:
    per = _NATIVE // block_size
    own = (2 * number + 1) * KEY_SPACE
    prompts = [_prompt(each.hr, own, shared, per) for each in requests]
    turns: list[Asked] = []
    for place, (each, prompt) in enumerate(zip(requests, prompts, strict=True)):
        tokens, answer = each.inp, max(1, each.out)
        known, needed = len(prompt), (tokens + answer) // block_size + 1
        following = prompts[place + 1] if place + 1 < len(prompts) else Pieces([])
        # The answer is part of the next prompt where that goes on from this one.
        if len(following) > known and common(prompt, following, 0, known) == known:
            chain = following
        else:
            chain = prompt
        if len(chain) < needed:
            unseen = own + KEY_SPACE + _UNSEEN + place * 4096 * per
            chain = Pieces([*chain.ranges, range(unseen, unseen + needed - len(chain))])
        turns.append(Asked(chain, tokens, answer, max(0.0, each.think_time)))
    return turns


def _prompt(coded: list[int], own: int, shared: dict[int, tuple[int, int]], per: int) -> Pieces:
    place, length = shared.get(coded[0], (0, 0))
    length = min(length, coded[1])
    ranges: list[range] = []
    if length:
        # Odd spaces belong to sessions, even ones to heads.
        head = 2 * (place + 1) * KEY_SPACE + KEY_SPACE // 4
        ranges.append(range(head, head + length * per))
    for at in range(0, len(coded) - 1, 2):
        first, count = coded[at : at + 2]
        skip = length if at == 0 else 0
        ranges.append(range(own + (first + skip) * per, own + (first + count) * per))
    return Pieces(ranges)
