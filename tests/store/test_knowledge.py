"""What the sink does with events: index, pool announcements, reports, and what is passed on to checks."""

from collections.abc import Sequence
from random import Random
from typing import Any

from store.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from store.hashing import HashScheme, chain
from store.knowledge import Held, Knowledge

SIZE = 32
TOKENS = list(range(1000, 1000 + 3 * SIZE))


def batch(*events: Any) -> EventBatch:
    return EventBatch(1.0, list(events), 0)


def stored(keys: Sequence[int], parent: int | None = None, **more: Any) -> BlockStored:
    fields: dict[str, Any] = {"token_ids": [], "block_size": SIZE, "tier": "gpu", "group": 0, **more}
    return BlockStored(list(keys), parent, **fields)


def announced_by(scheme: HashScheme, **more: Any) -> BlockStored:
    return stored(chain(TOKENS, scheme).keys, token_ids=TOKENS, **more)


def test_pool_announcements_go_to_the_pool_and_are_no_local_blocks() -> None:
    heard: list[tuple[str, list[int], int]] = []
    knowledge = Knowledge(on_pool_stored=lambda target, keys, group: heard.append((target, [*keys], group)))
    pooled = [stored([key], tier="cpu", pool=True, group=group) for key, group in ((1, 0), (9, 1), (2, 0))]
    knowledge.batch("w", batch(*pooled, stored([1, 2])))
    assert heard == [("w", [1, 2], 0), ("w", [9], 1)]
    assert knowledge.index.sizes() == {("w", "gpu"): 2}


def test_b053_private_copies_of_another_tier_are_kept_apart() -> None:
    knowledge = Knowledge()
    knowledge.batch("w", batch(stored([1]), stored([1], tier="cpu"), BlockRemoved([1], "gpu", 0)))
    assert knowledge.index.match([1]) == {}
    assert knowledge.index.sizes() == {("w", "cpu"): 1}


def test_what_a_target_announces_is_checked_and_its_block_size_noted() -> None:
    knowledge = Knowledge()
    knowledge.expect("w", HashScheme("sha256", 16))
    knowledge.batch("w", batch(announced_by(HashScheme("sha256", SIZE))))
    assert list(knowledge.hashes.mismatches) == ["w"]
    assert knowledge.block_sizes == {"w": 32}


def test_blocks_whose_hash_cannot_be_recomputed_are_not_judged() -> None:
    knowledge = Knowledge()
    knowledge.expect("w", HashScheme("sha256", SIZE))
    tokens = {"token_ids": TOKENS}
    knowledge.batch(
        "w",
        batch(
            stored([1, 2, 3], lora_name="la", extra_keys=[["la"]] * 3, **tokens),
            stored([4, 5, 6], extra_keys=[["salt"], None, None], **tokens),
            stored([7], **tokens),  # a sliding-window group that keeps one block of three
            stored([8, 9], parent=1, **tokens),
            stored([10]),
        ),
    )
    assert knowledge.hashes.mismatches == {}


def test_b009_a_reset_forgets_blocks_and_checks_the_next_life_again() -> None:
    knowledge = Knowledge()
    scheme = HashScheme("sha256", SIZE)
    knowledge.expect("w", scheme)
    knowledge.batch("w", batch(announced_by(scheme)))
    knowledge.reset("w", "restarted")
    assert knowledge.index.sizes() == {}
    knowledge.batch("w", batch(announced_by(HashScheme("sha256", SIZE, "0"))))
    assert "w" in knowledge.hashes.mismatches
    knowledge.drop("w")
    assert knowledge.hashes.mismatches == {}
    assert knowledge.block_sizes == {}


def test_b054_a_seed_learned_before_a_restart_is_known_after_it() -> None:
    assumed, real = HashScheme("sha256", SIZE), HashScheme("sha256", SIZE, "0")
    before = Knowledge()
    for target in ("w", "set", "other"):
        before.expect(target, assumed, fixed=False)
        before.batch(target, batch(announced_by(real)))
    shown = {target: before.shown(target) for target in ("w", "set", "other", "new")}
    after = Knowledge()
    after.restore(before.index, before.certain, shown)
    assert after.shown("w") == shown["w"]
    after.expect("w", assumed, fixed=False)
    after.expect("set", assumed, fixed=True)
    after.expect("other", HashScheme("sha256_cbor", SIZE), fixed=False)
    after.expect("new", assumed, fixed=False)
    assert [after.hashes.scheme(target) for target in shown] == [
        real,
        assumed,
        HashScheme("sha256_cbor", SIZE),
        assumed,
    ]
    assert after.block_sizes == {"w": SIZE, "set": SIZE, "other": SIZE}
    after.batch("w", batch(announced_by(assumed)))  # another life of the worker has another seed
    assert after.hashes.scheme("w") == assumed


def test_b010_what_missing_events_may_have_removed_is_told_from_what_is_proven() -> None:
    knowledge = Knowledge()
    knowledge.batch("w", batch(stored([1, 2, 3, 4])))
    knowledge.batch("v", batch(stored([1, 2])))
    knowledge.doubt("w", "2 batches are missing")
    assert knowledge.match([1, 2, 3, 4, 5]) == Held({"w": 4, "v": 2}, {"w": 0, "v": 2})
    knowledge.batch("w", batch(stored([5], parent=4), BlockRemoved([4], "gpu", 0), stored([4], parent=3)))
    assert knowledge.match([1, 2, 3, 4, 5]) == Held({"w": 5, "v": 2}, {"w": 0, "v": 2})
    knowledge.answered("w", [1, 2, 3, 4, 5], held=3, promised=5, at=0)
    assert knowledge.match([1, 2, 3, 4, 5]).certain == {"w": 5, "v": 2}
    knowledge.batch("w", batch(BlockRemoved([2], "gpu", 0)))
    assert knowledge.match([1, 2, 3]) == Held({"w": 1, "v": 2}, {"w": 1, "v": 2})
    knowledge.batch("w", batch(AllBlocksCleared()))
    assert knowledge.doubts == {}
    knowledge.batch("w", batch(stored([1])))
    assert knowledge.match([1, 2]) == Held({"w": 1, "v": 2}, {"w": 1, "v": 2})


def test_b010_an_answer_ends_ghosts_and_proves_what_it_used() -> None:
    knowledge = Knowledge()
    knowledge.batch("w", batch(stored([1, 2, 3, 4])))
    knowledge.doubt("w", "a batch is missing")
    knowledge.answered("w", [1, 2, 3, 4], held=2, promised=4, at=9)
    assert knowledge.match([1, 2, 3, 4]) == Held({"w": 2}, {"w": 2})
    with knowledge.reports.probe("w", [1, 2]):
        knowledge.batch("w", batch(stored([1, 2])))
    knowledge.batch("w", batch(BlockRemoved([2], "gpu", 0)))
    assert knowledge.match([1, 2]) == Held({"w": 1}, {"w": 1})
    knowledge.reset("w", "restarted")
    assert knowledge.match([1, 2]) == Held({}, {})
    assert knowledge.doubts == {}


def test_b011_a_prefix_reported_again_on_request_is_no_second_copy() -> None:
    knowledge = Knowledge()
    knowledge.batch("w", batch(stored([1, 2, 3])))
    with knowledge.reports.probe("w", [1, 2, 3, 4]):
        knowledge.batch("w", batch(stored([1, 2, 3]), stored([1, 2, 3]), stored([4], parent=3)))
    assert knowledge.index.match([1, 2, 3, 4]) == {"w": 4}
    knowledge.batch("w", batch(BlockRemoved([3], "gpu", 0)))
    assert knowledge.index.match([1, 2, 3, 4]) == {"w": 2}
    knowledge.batch("w", batch(stored([1, 2]), BlockRemoved([2], "gpu", 0)))
    assert knowledge.index.match([1, 2]) == {"w": 2}


def test_b011_a_report_that_a_client_asked_for_is_no_second_copy_either() -> None:
    now = [100.0]
    knowledge = Knowledge(clock=lambda: now[0])
    knowledge.batch("w", batch(stored([1, 2, 3])))
    knowledge.reports.asked("w", [1, 2, 3, 4])
    now[0] += 30
    # What was found is announced from the root, what was computed after its parent; of others it means more.
    knowledge.batch("w", batch(stored([1, 2, 3]), stored([4], parent=3), stored([4], parent=3)))
    knowledge.batch("v", batch(stored([1, 2, 3]), stored([1, 2, 3])))
    knowledge.batch("w", batch(BlockRemoved([3], "gpu", 0)))
    knowledge.batch("v", batch(BlockRemoved([3], "gpu", 0)))
    assert knowledge.index.match([1, 2, 3, 4]) == {"w": 2, "v": 3}
    knowledge.batch("w", batch(stored([3], parent=2)))
    assert knowledge.index.match([1, 2, 3, 4]) == {"w": 4, "v": 3}
    # Another prompt that was computed twice is there twice.
    knowledge.batch("w", batch(stored([1, 9]), BlockRemoved([1], "gpu", 0)))
    assert knowledge.index.match([1, 2]) == {"w": 2, "v": 2}
    now[0] += 31
    knowledge.batch("w", batch(stored([1, 2]), BlockRemoved([1], "gpu", 0)))
    assert knowledge.index.match([1, 2]) == {"w": 2, "v": 2}


def test_a_report_brings_back_what_was_not_known() -> None:
    knowledge = Knowledge()
    knowledge.batch("w", batch(stored([3], parent=2)))
    with knowledge.reports.probe("w", [1, 2, 3]):
        knowledge.batch("w", batch(stored([1, 2, 3])))
    assert knowledge.index.match([1, 2, 3]) == {"w": 3}
    knowledge.batch("w", batch(BlockRemoved([3], "gpu", 0)))
    assert knowledge.index.match([1, 2, 3]) == {"w": 2}


def test_the_memory_cap_holds_for_what_is_believed_and_what_is_certain_together() -> None:
    """Of targets in doubt everything that is stored is in both indexes."""
    limit, draws = 2_000_000, Random(3)
    knowledge = Knowledge(max_bytes=limit)
    knowledge.batch("exact", batch(stored(range(1, 5000))))
    knowledge.doubt("w", "a batch is missing")
    for n in range(300):
        keys = [draws.getrandbits(64) for _ in range(100)]
        knowledge.batch("w", batch(stored(keys)))
        if n % 3 == 0:
            knowledge.answered("w", [draws.getrandbits(64) for _ in range(50)], held=50, promised=50, at=0)
        assert knowledge.memory <= limit
        assert knowledge.match(keys).certain["w"] == 100
    assert knowledge.certain.evicted > 0
    assert knowledge.index.evicted > 0
    knowledge.reset("w", "restarted")
    knowledge.batch("v", batch(stored([draws.getrandbits(64) for _ in range(10_000)])))
    assert knowledge.index.sizes()["v", "gpu"] == 10_000


def test_window_blocks_alone_are_capped_too() -> None:
    knowledge = Knowledge(max_bytes=200_000)
    window = {"group": 1, "spec_kind": "sliding_window", "window": 64}
    for n in range(100):
        knowledge.batch("w", batch(stored(range(n * 1000 + 1, n * 1000 + 101), **window)))
        assert knowledge.memory <= 200_000
    assert knowledge.index.sizes()["w", "gpu"] > 500


def test_a_batch_applied_in_pieces_comes_to_the_same_and_credits_nothing_false_meanwhile() -> None:
    """The window group is named after a long full one: half of the batch must not look like a plain model."""
    whole, pieces = Knowledge(), Knowledge()
    keys = list(range(1, 20_001))
    window = stored(keys[9_000:9_002], group=1, spec_kind="sliding_window", window=64)
    batches = [
        batch(stored(keys), window),
        batch(stored(keys), stored(keys[:10_000]), BlockRemoved(keys, "gpu", 0)),
        batch(BlockRemoved(keys, "gpu", 0)),
    ]
    credits_: list[list[int]] = []
    for each in batches:
        whole.batch("w", each)
        credits_.append([pieces.match(keys).blocks.get("w", 0) for _ in pieces.apply("w", each)])
    assert set(credits_[0]) == {0}
    assert set(credits_[1]) == {9_002}
    assert set(credits_[2]) == {9_002}
    assert min(map(len, credits_)) > 70
    assert pieces.index.sizes() == whole.index.sizes() == {("w", "gpu"): 10_002}
    with pieces.reports.probe("w", keys):
        pieces.batch("w", batch(stored(keys)))
    pieces.batch("w", batch(BlockRemoved(keys, "gpu", 0)))
    assert pieces.index.sizes() == {("w", "gpu"): 2}, "a long report is no second copy"


def test_pool_announcements_of_a_long_event_are_passed_on_in_pieces() -> None:
    heard: list[list[int]] = []
    knowledge = Knowledge(lambda _target, keys, _group: heard.append([*keys]))
    knowledge.batch("w", batch(stored(range(10_000), tier="cpu", pool=True)))
    assert max(map(len, heard)) < 1000
    assert [key for keys in heard for key in keys] == list(range(10_000))


def test_the_memory_cap_holds_after_one_huge_event_and_after_one_that_cuts_runs_up() -> None:
    limit = 20_000_000
    for long in range(2):  # with the event applied in pieces, and at once
        knowledge, draws = Knowledge(max_bytes=limit), Random(5)
        for _ in range(200):
            knowledge.batch("w", batch(stored([draws.getrandbits(64) for _ in range(1000)])))
        keys = [draws.getrandbits(64) for _ in range(200_000)]
        if long:
            knowledge.index.stored("w", keys, None)
        else:
            knowledge.batch("w", batch(stored(keys)))
        assert knowledge.memory <= limit
        assert knowledge.match(keys).blocks["w"] > 20_000
    held = keys[: knowledge.match(keys).blocks["w"]]
    knowledge.batch("w", batch(BlockRemoved([key for n, key in enumerate(held) if n % 3], "gpu", 0)))
    assert knowledge.memory <= limit


def test_a_run_that_removals_leave_full_of_holes_does_not_break_the_cap() -> None:
    """Each of the blocks that are left gets a run of its own."""
    knowledge = Knowledge(max_bytes=5_000_000)
    keys = list(range(1, 40_001))
    knowledge.batch("w", batch(stored(keys)))
    before = knowledge.memory
    assert before > 2_500_000
    for start in range(0, len(keys), 1000):
        gone = [key for key in keys[start : start + 1000] if key % 8 < 5]
        knowledge.batch("w", batch(BlockRemoved(gone, "gpu", 0)))
        assert knowledge.memory <= 5_000_000
