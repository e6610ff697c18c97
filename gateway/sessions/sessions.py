"""Which session a turn belongs to, and the prompts its session was last seen with.

A session goes by what the client calls it; without that, by its first user message, or by the first block of
its prompt. Several conversations may go by one name (sub-agents, parallel branches): the one that a turn has
most blocks in common with is the one it goes on from.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from store.prompt.request import ChatPrompt, Ids, MessagesPrompt, PromptRequest, ResponsesPrompt

Name = tuple[Hashable, ...]

# Headers that name a session, the most specific first. One that names every request anew (x-correlation-id,
# traceparent) would tear sessions apart.
_HEADERS: Final = (
    # A sub-agent of Claude Code, whose session id is that of all of them; since 2.1.86.
    *(b"x-claude-code-agent-id", b"x-claude-code-session-id"),
    # Codex: one conversation, where sub-agents share the session; then as it was before.
    *(b"thread-id", b"session-id", b"session_id"),
    # Clients of Dynamo; anybody, and OpenCode; LiteLLM's clients.
    *(b"x-dynamo-session-id", b"x-session-id", b"x-session-affinity", b"x-litellm-session-id"),
    *(b"conversation_id", b"x-opencode-session"),
)
_RANK: Final = {name: rank for rank, name in enumerate(_HEADERS)}
_NAMING: Final = frozenset(_HEADERS)
# Say that no turn of the session comes after this one; the second is Dynamo's.
_LAST: Final = frozenset((b"x-session-end", b"x-dynamo-session-final"))
# metadata.user_id of Claude Code before 2.1.78; later ones write a JSON object with a session_id there.
_USER_ID: Final = re.compile(r"_session_([0-9a-fA-F-]{36})$")
# A longer name is cut: it is kept in memory, and clients choose it.
_NAME_CHARACTERS: Final = 200
# Of a long first message; packing and hashing all of 20 KB took 5 us more.
_END_CHARACTERS: Final = 500
# 16 million tokens: 200 sessions of 80K.
_MAX_BYTES: Final = 64 << 20
# Conversations by one name that a turn is compared with; 2 to 5 us each.
_PER_NAME: Final = 16
# What an entry costs besides its tokens and keys.
_ENTRY_BYTES: Final = 600


def hint(headers: Mapping[bytes, bytes], named: str) -> str:
    """What the client calls its session: by a header, else as `named` in the body; "" if by nothing."""
    found = [name for name in _NAMING.intersection(headers) if headers[name]]
    if not found:
        return named[:_NAME_CHARACTERS]
    return headers[min(found, key=_RANK.__getitem__)].decode("latin-1")[:_NAME_CHARACTERS]


def says_it_ends(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client says that its session ends with this turn."""
    return not _LAST.isdisjoint(headers) and any(
        headers.get(name, b"").strip().lower() in (b"1", b"true") for name in _LAST
    )


def named_in_body(
    metadata: object, session_id: object, prompt_cache_key: object, litellm_session_id: object = None
) -> str:
    """The session as fields of a request body name it, "" if they don't."""
    if metadata is session_id is prompt_cache_key is litellm_session_id is None:
        return ""
    fields: dict[str, Any] = cast(dict[str, Any], metadata) if isinstance(metadata, dict) else {}
    named = (
        _session_of_user(fields.get("user_id")),
        *(fields.get("session_id"), session_id),
        *(fields.get("litellm_session_id"), litellm_session_id),
        prompt_cache_key,
    )
    name = next((name for name in named if isinstance(name, str) and name), "")
    # Python's parser lets lone surrogates through, which can't be written anywhere.
    return name[:_NAME_CHARACTERS].encode("utf-8", "replace").decode()


class _User(msgspec.Struct):
    session_id: Any = None


def _session_of_user(user: object) -> str:
    if not isinstance(user, str):
        return ""
    if user.startswith("{"):
        try:
            session = msgspec.json.decode(user, type=_User).session_id
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return ""
        return session if isinstance(session, str) else ""
    match = _USER_ID.search(user)
    return match[1] if match else ""


class Seen(msgspec.Struct, frozen=True, eq=False):
    """A prompt of a session. `names`: all it may be found by, the surest first. `keys`: its chain's.

    named: whether its client named the session. tools: how many tools it had. system: whether it had a system
    prompt of its client's own, None if not known.
    """

    request_id: str
    names: Sequence[Name]
    named: bool
    tokens: Ids
    keys: Sequence[int]
    block_size: int
    tools: int
    system: bool | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tokens.nbytes + 8 * len(self.keys) + _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Departure:
    """`current` has only its first `blocks` blocks in common with `previous`, less than it might have."""

    previous: Seen
    current: Seen
    blocks: int

    @property
    def lost_tokens(self) -> int:
        """Full blocks of the previous prompt, as many as the current one has, that can't be used again."""
        full = min(len(self.previous.keys), len(self.current.keys))
        return (full - self.blocks) * self.current.block_size


def names(
    model: str, block_size: int, session: str, request: PromptRequest, keys: Sequence[int]
) -> list[Name]:
    """What the session of a prompt may be found by, the surest first."""
    found: list[Name] = [("named", model, block_size, session)] if session else []
    opening = _opening(request)
    if opening is not None:
        found.append(("opening", model, block_size, request.cache_salt, hash(_outline(opening))))
    if keys:
        found.append(("head", model, block_size, keys[0]))
    return found


def _opening(request: PromptRequest) -> object:
    """The first thing a user said."""
    if isinstance(request, ResponsesPrompt):
        if isinstance(request.input, str):
            return request.input
        items = request.input
    elif isinstance(request, ChatPrompt | MessagesPrompt):
        items = request.messages
    else:
        return None
    objects = (cast("dict[str, Any]", item) for item in items if isinstance(item, dict))
    return next((item.get("content") for item in objects if item.get("role") == "user"), None)


def _outline(content: object) -> Hashable:
    """What tells a message's content from others, mostly: its ends stand for a long text."""
    if isinstance(content, str):
        return len(content), content[:_END_CHARACTERS], content[-_END_CHARACTERS:]
    if isinstance(content, list):
        blocks = cast(list[Any], content)
        return tuple(
            _outline(cast(dict[str, Any], block).get("text")) for block in blocks if isinstance(block, dict)
        )
    return None


class Sessions:
    """The last prompts of sessions, at most `max_bytes` of them; the longest unused go first."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes: Final = max_bytes
        self._by_name: Final[dict[Name, list[Seen]]] = {}
        self._all: Final[OrderedDict[int, Seen]] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._all)

    def follow(self, current: Seen) -> Departure | None:
        """As `find`; `current` is remembered, instead of the prompt that it goes on from."""
        previous, blocks = self._closest(current)
        # By their heads alone, one may be a new session that begins like the other.
        goes_on = previous is not None and blocks >= len(previous.keys) - 1
        if previous is not None and goes_on and previous.names[0] == current.names[0]:
            self._forget(previous)
        self._remember(current)
        return _departure(previous, current, blocks)

    def find(self, current: Seen) -> Departure | None:
        """Where `current` leaves its session's last prompt; None if it loses no more than one block of it.

        One block is what a template may write anew at the end of a prompt. Remembers nothing.
        """
        previous, blocks = self._closest(current)
        return _departure(previous, current, blocks)

    def _closest(self, current: Seen) -> tuple[Seen | None, int]:
        """The prompt with most leading blocks in common, the newest of equals, and how many."""
        best: Seen | None = None
        most = -1
        # A named session is looked for by that name only, others by the first that anything is known by.
        for name in current.names[:1] if current.named else current.names:
            for seen in reversed(self._by_name.get(name, ())):
                if most < 0 or _have_in_common(seen.keys, current.keys, most):
                    best, most = seen, _shared(seen.keys, current.keys)
            if best is not None:
                break
        return best, most

    def _remember(self, current: Seen) -> None:
        if not current.names:
            return
        self._all[id(current)] = current
        self._bytes += current.size
        for name in current.names:
            seen = self._by_name.setdefault(name, [])
            seen.append(current)
            if len(seen) > _PER_NAME:
                if seen[0].names[0] == name:
                    self._forget(seen[0])
                else:
                    del seen[0]
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._all.values())))

    def _forget(self, seen: Seen) -> None:
        del self._all[id(seen)]
        self._bytes -= seen.size
        for name in seen.names:
            others = self._by_name.get(name, [])
            if seen in others:
                others.remove(seen)
                if not others:
                    del self._by_name[name]


def _departure(previous: Seen | None, current: Seen, blocks: int) -> Departure | None:
    if previous is None or min(len(previous.keys), len(current.keys)) - blocks < 2:
        return None
    return Departure(previous, current, blocks)


def _have_in_common(one: Sequence[int], other: Sequence[int], block: int) -> bool:
    return block < min(len(one), len(other)) and one[block] == other[block]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading keys are equal. A key stands for all blocks before it, too."""
    shorter = min(len(one), len(other))
    if shorter and one[shorter - 1] == other[shorter - 1]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda block: one[block] != other[block])
