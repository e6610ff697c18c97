"""vLLM's KV events: from msgpack payload to values.

A payload is the array `[ts, events, data_parallel_rank]`. Its events are maps with a `type` field in current
vLLM and positional arrays that start with the type's name in older ones; fields are added at the end,
defaults are left out. Both forms are read, shorter and longer than known; event types this page does not know
are counted, never fatal.
"""

from collections.abc import Generator
from typing import Any, Final, Literal, TypeAlias

import msgspec

from store.hashing import key_of

Tier: TypeAlias = Literal["gpu", "cpu", "disk"]
"""Where a target holds a block of its own. The pool is no tier: see `BlockStored.pool`."""

_KEY_LIMIT: Final = 1 << 64
_TIERS: Final[dict[str, Tier]] = {
    "gpu": "gpu",
    "cpu": "cpu",
    "cpu_pinned": "cpu",
    "host": "cpu",
    "storage": "disk",
    "disk": "disk",
    "fs": "disk",
    "nvme": "disk",
    "ssd": "disk",
}
# MooncakeStoreConnector announces what it put into the pool as "cpu"; what an engine offloads to its own
# memory comes as "CPU" (vLLM 0.32, MEDIUM_CPU). Only the spelling tells them apart.
_POOL_MEDIUM: Final = "cpu"


class BadBatch(Exception):
    """The payload is no event batch; nothing of it can be used."""


class BlockStored(msgspec.Struct, frozen=True):
    """Blocks that a target now holds, or, with `pool`, that it put into the Mooncake pool.

    keys: 64-bit keys of the listed blocks. parent: key of the block before the run, None at the root.
    token_ids: tokens of the whole run. A sliding-window group lists only the blocks it retains of that run,
    so `len(keys) * block_size` may be less than `len(token_ids)`: such keys are no chain (`sparse`).
    extra_keys: per listed block, untagged. digests: full digests where events carry bytes. session: what the
    request called its session, if it did.
    """

    keys: list[int]
    parent: int | None
    token_ids: list[int]
    block_size: int
    tier: Tier
    group: int
    pool: bool = False
    extra_keys: list[Any] | None = None
    lora_name: str | None = None
    spec_kind: str | None = None
    window: int | None = None
    digests: list[bytes] | None = None
    session: str | None = None

    @property
    def sparse(self) -> bool:
        return len(self.keys) * self.block_size < len(self.token_ids)


class BlockRemoved(msgspec.Struct, frozen=True):
    keys: list[int]
    tier: Tier
    group: int


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The target's GPU prefix cache was reset."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """unknown: events of a type or medium not known here. broken: known events that could not be read.

    A broken event may have been a removal, so what is believed of the target is unproven from there on.
    """

    ts: float
    events: list[Event]
    rank: int | None
    unknown: int = 0
    broken: int = 0


# The wire's own shapes, field order as in vLLM: it is the order of the positional form.
_Hash: TypeAlias = int | bytes


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Any = None
    ownership: Any = None
    session_id: Any = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None


class _LooseBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


class _Tagged(msgspec.Struct, gc=False):
    type: str = ""


_UNREADABLE: Final = (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Decoded in one go: 1 to 2 ms.
_AT_ONCE_BYTES: Final = 100_000
_KNOWN: Final = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))
_batch: Final = msgspec.msgpack.Decoder(_Batch)
_loose_batch: Final = msgspec.msgpack.Decoder(_LooseBatch)
_as_map: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_as_array: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_map_tag: Final = msgspec.msgpack.Decoder(_Tagged)
_any: Final = msgspec.msgpack.Decoder()


def decode(payload: bytes) -> EventBatch:
    """Read one batch. Raises BadBatch if it is none; single events that cannot be read are counted."""
    reading = decoding(payload)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


def decoding(payload: bytes) -> Generator[None, None, EventBatch]:
    """As `decode`, so many bytes of events until each pause: a batch of 10 MB takes 100 ms."""
    if len(payload) <= _AT_ONCE_BYTES:
        try:
            batch = _batch.decode(payload)
        except _UNREADABLE:
            pass
        else:
            events = [event for each in batch.events if (event := _event(each)) is not None]
            return EventBatch(batch.ts, events, batch.rank, len(batch.events) - len(events))
    return (yield from _decoding_loosely(payload))


def _decoding_loosely(payload: bytes) -> Generator[None, None, EventBatch]:
    """Event by event: long batches, positional events, unknown types, a broken event among good ones."""
    try:
        batch = _loose_batch.decode(payload)
    except _UNREADABLE as error:
        raise BadBatch(str(error)) from error
    events: list[Event] = []
    unknown = broken = size = 0
    for raw in batch.events:
        decoder = _as_array if _is_array(raw) else _as_map
        try:
            event = _event(decoder.decode(raw))
        except _UNREADABLE:
            if _type_of(raw) in _KNOWN:
                broken += 1
            else:
                unknown += 1
        else:
            if event is None:
                unknown += 1
            else:
                events.append(event)
        size += memoryview(raw).nbytes
        if size >= _AT_ONCE_BYTES:
            size = 0
            yield
    return EventBatch(batch.ts, events, batch.rank, unknown, broken)


def _event(event: _Stored | _Removed | _Cleared) -> Event | None:
    """None: of a medium that is not known here."""
    if isinstance(event, _Cleared):
        return AllBlocksCleared()
    medium = event.medium if event.medium is not None else "gpu"
    tier = _TIERS.get(medium.lower())
    if tier is None:
        return None
    if isinstance(event, _Removed):
        return BlockRemoved(_keys(event.block_hashes), tier, event.group_idx or 0)
    return _stored(event, tier, medium == _POOL_MEDIUM)


def _stored(event: _Stored, tier: Tier, pool: bool) -> BlockStored:
    hashes = event.block_hashes
    parent = event.parent_block_hash
    return BlockStored(
        keys=_keys(hashes),
        parent=None if parent is None else key_of(parent),
        token_ids=event.token_ids,
        block_size=event.block_size,
        tier=tier,
        group=event.group_idx or 0,
        pool=pool,
        extra_keys=event.extra_keys,
        lora_name=event.lora_name,
        spec_kind=event.kv_cache_spec_kind,
        window=event.kv_cache_spec_sliding_window,
        digests=[h for h in hashes if isinstance(h, bytes)] if hashes and type(hashes[0]) is bytes else None,
        session=event.session_id if isinstance(event.session_id, str) else None,
    )


def _keys(hashes: list[_Hash]) -> list[int]:
    try:
        if min(hashes) >= 0 and max(hashes) < _KEY_LIMIT:  # pyright: ignore[reportOperatorIssue]
            return hashes  # pyright: ignore[reportReturnType]
    except (TypeError, ValueError):
        pass
    return [key_of(h) for h in hashes]


def _is_array(raw: msgspec.Raw) -> bool:
    """By msgpack's first byte: fixarray, array 16, array 32."""
    first = memoryview(raw)[0]
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _type_of(raw: msgspec.Raw) -> str:
    try:
        if not _is_array(raw):
            return _map_tag.decode(raw).type
        fields = _any.decode(raw)
        return fields[0] if fields and isinstance(fields[0], str) else ""
    except _UNREADABLE:
        return ""
