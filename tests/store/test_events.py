"""Decoding of KV events as vLLM encodes them, now and in other versions."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from store.events import AllBlocksCleared, BadBatch, BlockRemoved, BlockStored, decode, decoding

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": 9,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "la",
    "extra_keys": [["la"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 64,
}


def batch(*events: Any, rank: Any = 3) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def positional(event: dict[str, Any], fields: int | None = None) -> list[Any]:
    return list(event.values())[:fields]


def test_b013_map_and_positional_events_say_the_same() -> None:
    as_map, as_array = decode(batch(STORED)), decode(batch(positional(STORED)))
    assert as_map == as_array
    assert as_map.ts == 1.5
    assert as_map.rank == 3
    (event,) = as_map.events
    assert event == BlockStored(
        keys=[1, 2],
        parent=9,
        token_ids=[5, 6, 7, 8],
        block_size=2,
        tier="gpu",
        group=1,
        extra_keys=[["la"], None],
        lora_name="la",
        spec_kind="sliding_window",
        window=64,
    )


@pytest.mark.parametrize("fields", range(2, len(STORED) + 1))
def test_b013_short_positional_events_are_read(fields: int) -> None:
    (event,) = decode(batch(positional(STORED, fields))).events
    assert isinstance(event, BlockStored)
    assert event.keys == [1, 2]
    assert event.parent == (9 if fields > 2 else None)
    assert event.tier == "gpu"
    assert event.group == (1 if fields > 9 else 0)


def test_b013_unknown_trailing_fields_and_map_keys_are_passed_over() -> None:
    longer = [*positional(STORED), "local", "owner", "s", {"new": 1}, 7]
    wider = {**STORED, "locality": "LOCAL", "session_id": "s", "novelty": [1]}
    payload = msgspec.msgpack.encode([1.5, [longer, wider, ["AllBlocksCleared", 1, 2]], 0, "more", 2])
    decoded = decode(payload)
    assert decoded.unknown == decoded.broken == 0
    first, second, third = decoded.events
    assert first == second == replace(decode(batch(STORED)).events[0], session="s")
    (odd,) = decode(msgspec.msgpack.encode([1.5, [[*positional(STORED), 1, {}, [3]]], 0])).events
    assert odd == decode(batch(STORED)).events[0]
    assert third == AllBlocksCleared()


def test_b013_defaults_left_out_of_a_map_and_a_batch_without_rank() -> None:
    payload = msgspec.msgpack.encode([1.5, [{"type": "BlockRemoved", "block_hashes": [4], "medium": None}]])
    decoded = decode(payload)
    assert decoded.rank is None
    assert decoded.events == [BlockRemoved([4], "gpu", 0)]


def test_b013_an_unknown_type_among_known_ones_is_counted() -> None:
    decoded = decode(
        batch(
            {"type": "BlockMoved", "block_hashes": [1]},
            STORED,
            ["BlockMoved", [1]],
            {"no": "type"},
            7,
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
        )
    )
    assert decoded.unknown == 4
    assert decoded.broken == 0
    assert len(decoded.events) == 2


def test_b014_a_known_event_that_cannot_be_read_is_not_taken_for_an_unknown_one() -> None:
    decoded = decode(
        batch({"type": "BlockRemoved"}, ["BlockRemoved", "x"], {**STORED, "token_ids": "x"}, STORED)
    )
    assert decoded.broken == 3
    assert decoded.unknown == 0
    assert len(decoded.events) == 1


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode({"ts": 1}), msgspec.msgpack.encode([1])]
)
def test_b014_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(BadBatch):
        decode(payload)


@given(st.binary(max_size=200))
def test_b014_any_bytes_are_decoded_or_refused(payload: bytes) -> None:
    with suppress(BadBatch):
        decode(payload)


def test_b054_hashes_of_every_form_give_the_same_keys() -> None:
    digest = bytes(range(32))
    key = int.from_bytes(digest[-8:], "big")
    high = (1 << 64) - 5
    decoded = decode(
        batch(
            {**STORED, "block_hashes": [digest, digest], "parent_block_hash": digest},
            {**STORED, "block_hashes": [key, high], "parent_block_hash": high},
            {**STORED, "block_hashes": [key, -5], "parent_block_hash": -5},
            {**STORED, "block_hashes": [digest[16:], -5], "parent_block_hash": None},
        )
    )
    in_bytes, unsigned, signed, mixed = decoded.events
    assert isinstance(in_bytes, BlockStored)
    assert in_bytes.keys == [key, key]
    assert in_bytes.parent == key
    assert in_bytes.digests == [digest, digest]
    assert isinstance(unsigned, BlockStored)
    assert isinstance(signed, BlockStored)
    assert unsigned.keys == signed.keys == [key, high]
    assert unsigned.parent == signed.parent == high
    assert unsigned.digests is None
    assert isinstance(mixed, BlockStored)
    assert mixed.keys == [key, high]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "gpu"),
        ("GPU", "gpu"),
        ("gpu", "gpu"),
        ("CPU", "cpu"),
        ("CPU_PINNED", "cpu"),
        ("STORAGE", "disk"),
    ],
)
def test_b053_media_by_any_of_their_names(medium: str | None, tier: str) -> None:
    event, gone = decode(
        batch({**STORED, "medium": medium}, {"type": "BlockRemoved", "block_hashes": [1], "medium": medium})
    ).events
    assert isinstance(event, BlockStored)
    assert isinstance(gone, BlockRemoved)
    assert event.tier == gone.tier == tier
    assert not event.pool


def test_b053_what_was_put_into_the_pool_is_told_from_a_private_copy() -> None:
    pool, private = decode(batch({**STORED, "medium": "cpu"}, {**STORED, "medium": "CPU"})).events
    assert isinstance(pool, BlockStored)
    assert isinstance(private, BlockStored)
    assert pool.pool
    assert not private.pool


def test_an_unknown_medium_is_counted_and_left_out() -> None:
    decoded = decode(batch({**STORED, "medium": "TAPE"}))
    assert decoded.events == []
    assert decoded.unknown == 1


def test_b052_a_sliding_window_event_that_lists_some_blocks_of_its_run_is_no_chain() -> None:
    dense, sparse = decode(batch(STORED, {**STORED, "block_hashes": [2], "extra_keys": [None]})).events
    assert isinstance(dense, BlockStored)
    assert isinstance(sparse, BlockStored)
    assert not dense.sparse
    assert sparse.sparse


def test_a_long_batch_is_read_in_pieces_and_as_a_short_one_is() -> None:
    events: list[Any] = [
        {"type": "BlockStored", "block_hashes": list(range(n, n + 50)), "medium": "GPU"} for n in range(1000)
    ]
    strange = [{"type": "BlockStored", "block_hashes": 1}, {"type": "New"}, {"type": "AllBlocksCleared"}]
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "elsewhere"}
    payload = msgspec.msgpack.encode([1.5, [*events, *strange, removed], 3])
    reading, pauses = decoding(payload), 0
    try:
        while True:
            next(reading)
            pauses += 1
    except StopIteration as end:
        batch = end.value
    singles = [decode(msgspec.msgpack.encode([1.5, [event], 3])) for event in [*events, *strange, removed]]
    assert pauses == len(payload) // 100_000
    assert batch == decode(payload)
    assert batch.events == [event for single in singles for event in single.events]
    assert (len(batch.events), batch.ts, batch.rank, batch.broken, batch.unknown) == (1001, 1.5, 3, 1, 2)
