"""The hit rule of hybrid models, on the table measured on real vLLM (window 64, block size 32)."""

import time
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.events import AllBlocksCleared, BadBatch, BlockStored, EventBatch
from store.index import BlockIndex
from store.knowledge import Knowledge

SIZE, WINDOW, NEED = 32, 64, 2
SWA, FULL = 0, 1


def hybrid(full: Iterable[int], window: Iterable[int]) -> BlockIndex:
    index = BlockIndex()
    index.describe("w", SWA, NEED)
    index.stored("w", list(full), None, group=FULL)
    index.stored("w", list(window), None, group=SWA)
    return index


def cached(index: BlockIndex, prompt_tokens: int, keys: list[int]) -> int:
    """Tokens an engine would report for a prompt whose full blocks are `keys`."""
    return index.match(keys, limit=(prompt_tokens - 1) // SIZE).get("w", 0) * SIZE


A = list(range(1, 100))  # one conversation's blocks
B = [*A[:5], *range(201, 260)]  # another that shares its first 160 tokens


@pytest.mark.parametrize(
    ("full", "window", "tokens", "keys", "expected"),
    [
        pytest.param(A[:10], A[8:10], 325, A[:10], 320, id="repeat of a 325-token prompt"),
        pytest.param(A[:10], A[8:10], 389, A[:12], 320, id="the same and 64 tokens more"),
        pytest.param(A[:10], A[8:10], 325, B[:10], 0, id="a sibling sharing 160, the first time"),
        pytest.param(
            A[:10], [*A[8:10], *A[3:5]], 325, B[:10], 160, id="the second sibling, after a junction"
        ),
        pytest.param(A[:11], A[:2], 400, A[:12], 64, id="turn 2 after 70 prompt and 300 generated tokens"),
        pytest.param(A[:10], A[7:9], 320, A[:10], 288, id="repeat of exactly 320 tokens"),
        pytest.param(A[:10], A[7:9], 360, A[:11], 288, id="40 tokens after exactly 320"),
        pytest.param(A[:12], A[8:12], 380, A[:11], 352, id="any end within consecutive window blocks"),
        pytest.param(A[:1], A[:1], 40, A[:1], 32, id="a prefix of one block"),
        pytest.param(A[:10], A[:10], 325, B[:10], 160, id="dense retention"),
        pytest.param(A[:10], [], 325, A[:10], 0, id="no window blocks at all"),
        pytest.param(A[:4], A[8:10], 325, A[:10], 0, id="window blocks beyond what the full group has"),
    ],
)
def test_b052_a_hybrid_model_hits_where_all_groups_do(
    full: list[int], window: list[int], tokens: int, keys: list[int], expected: int
) -> None:
    assert cached(hybrid(full, window), tokens, keys) == expected


def test_b052_groups_are_removed_separately() -> None:
    index = hybrid(A[:10], A[8:10])
    index.removed("w", [A[9]], group=FULL)
    assert cached(index, 325, A[:10]) == 0
    index.stored("w", [A[9]], A[8], group=FULL)
    assert cached(index, 325, A[:10]) == 320
    index.removed("w", [A[8]], group=SWA)
    assert cached(index, 325, A[:10]) == 0
    index.drop("w")
    assert index.sizes() == {}


def test_b052_all_full_groups_must_hold_a_prefix_and_other_targets_are_not_touched() -> None:
    index = BlockIndex()
    index.stored("w", A[:5], None, group=0)
    index.stored("w", A[:3], None, group=1)
    index.stored("v", A[:4], None)
    assert index.match(A[:5]) == {"w": 3, "v": 4}


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.integers(1, 4), st.integers(0, 12))
def test_b052_the_longest_prefix_by_definition(
    first: set[int], second: set[int], need: int, full: int
) -> None:
    keys = A[:12]
    index = BlockIndex()
    index.describe("w", 0, need)
    index.describe("w", 1, 1)
    index.stored("w", [keys[i] for i in first], None, group=0)
    index.stored("w", [keys[i] for i in second], None, group=1)
    index.stored("w", keys[:full], None, group=2)

    def holds(n: int) -> bool:
        return all(
            set(range(max(0, n - wanted), n)) <= group for group, wanted in ((first, need), (second, 1))
        )

    assert index.match(keys).get("w", 0) == max(n for n in range(full + 1) if holds(n))


def event(keys: list[int], group: int, kind: str, window: int | None = None, blocks: int = 10) -> BlockStored:
    tokens = list(range(blocks * SIZE))
    return BlockStored(keys, None, tokens, SIZE, "gpu", group, spec_kind=kind, window=window)


def test_b052_events_say_which_group_is_which() -> None:
    knowledge = Knowledge()
    window = event(A[8:10], SWA, "sliding_window", WINDOW)
    knowledge.batch("w", EventBatch(1.0, [window, event(A[:10], FULL, "full_attention")], 0))
    assert cached(knowledge.index, 325, A[:10]) == 320
    assert cached(knowledge.index, 325, B[:10]) == 0


def test_b052_a_window_group_that_keeps_nothing_yet_promises_nothing() -> None:
    knowledge = Knowledge()
    window = event([], SWA, "sliding_window", WINDOW)
    knowledge.batch("w", EventBatch(1.0, [window, event(A[:10], FULL, "full_attention")], 0))
    assert cached(knowledge.index, 325, A[:10]) == 0


def test_b052_kinds_whose_hits_are_not_understood_get_no_credit() -> None:
    knowledge = Knowledge()
    events = [event(A[:10], 0, "full_attention"), event(A[:10], 1, "mamba")]
    knowledge.batch("w", EventBatch(1.0, [*events], 0))
    assert cached(knowledge.index, 325, A[:10]) == 0


def test_window_blocks_are_given_up_with_their_run_for_want_of_memory() -> None:
    index = BlockIndex()
    index.keep_below(60_000)
    index.describe("w", SWA, NEED)
    for start in range(0, 20_000, 200):
        keys = list(range(start + 1, start + 201))
        index.stored("w", keys, None, group=FULL)
        index.stored("w", keys, None, group=SWA)
    assert index.memory() <= 100_000
    assert index.evicted > 19_000


def of(knowledge: Knowledge) -> int:
    return cached(knowledge.index, 325, A[:10])


FULL_EVENT = event(A[:10], FULL, "full_attention")


@pytest.mark.parametrize("kind", ["sliding_window", "mamba"])
@pytest.mark.parametrize("how", ["cleared", "reset", "doubt", "doubt of a snapshot"])
def test_b052_what_a_group_is_outlives_its_blocks(kind: str, how: str) -> None:
    """The full group alone is no hit, before or after all blocks were forgotten."""
    knowledge = Knowledge()
    knowledge.batch("w", EventBatch(1.0, [FULL_EVENT, event(A[8:10], SWA, kind, WINDOW)], 0))
    before = of(knowledge)
    if how == "cleared":
        knowledge.batch("w", EventBatch(2.0, [AllBlocksCleared()], 0))
    elif how == "reset":
        knowledge.reset("w", "restarted")
    else:
        knowledge.doubt("w", "a batch is missing")
    if how == "doubt of a snapshot":
        restored = Knowledge()
        index, shown = knowledge.index.capture().whole(), {"w": knowledge.shown("w")}
        restored.restore(BlockIndex.restore(index), BlockIndex(), shown)
        restored.admit("w")
        knowledge = restored
    knowledge.batch("w", EventBatch(3.0, [FULL_EVENT], 0))
    assert knowledge.match(A[:10], limit=10).certain.get("w", 0) == 0
    assert set(knowledge.groups("w")) == {SWA, FULL}
    knowledge.batch("w", EventBatch(4.0, [event(A[8:10], SWA, kind, WINDOW)], 0))
    assert knowledge.match(A[:10], limit=10).certain.get("w", 0) * SIZE == before


def test_b052_a_second_full_group_is_missed_after_a_clear_as_well() -> None:
    knowledge = Knowledge()
    both = [event(A[:10], 0, "full_attention"), event(A[:10], 1, "full_attention")]
    knowledge.batch("w", EventBatch(1.0, [*both, AllBlocksCleared(), both[0]], 0))
    assert of(knowledge) == 0


def test_b052_another_configuration_after_a_restart_is_noticed() -> None:
    """A publisher that never names the old window group does not have it; one that is gone takes it along."""
    knowledge = Knowledge()
    events = [FULL_EVENT, event(A[8:10], SWA, "sliding_window", WINDOW)]
    knowledge.batch("w", EventBatch(1.0, [*events], 0))
    knowledge.reset("w", "restarted")
    knowledge.batch("w", EventBatch(2.0, [FULL_EVENT] * 63, 0))
    assert of(knowledge) == 0
    knowledge.batch("w", EventBatch(2.0, [FULL_EVENT], 0))
    assert (of(knowledge), knowledge.groups("w")) == (320, {FULL: None})
    knowledge.batch("w", EventBatch(3.0, [*events], 0))
    knowledge.drop("w")
    knowledge.batch("w", EventBatch(4.0, [FULL_EVENT], 0))
    assert (of(knowledge), knowledge.groups("w")) == (320, {FULL: None})


def test_a_target_of_countless_groups_gets_no_credit_and_costs_no_more_than_others() -> None:
    knowledge = Knowledge()
    knowledge.batch("v", EventBatch(1.0, [FULL_EVENT], 0))
    flood = [event([key], key, "full_attention") for key in range(1, 20_001)]
    started = time.process_time()
    with pytest.raises(BadBatch, match="19936 events"):
        knowledge.batch("w", EventBatch(1.0, [*flood, FULL_EVENT], 0))
    assert time.process_time() - started < 3, "quadratic: it takes minutes"
    assert len(knowledge.groups("w")) == 65
    assert knowledge.match(A[:10]).blocks == {"v": 10}
    pooled: list[int] = []
    knowledge = Knowledge(lambda _target, _keys, group: pooled.append(group))
    with pytest.raises(BadBatch):
        knowledge.batch("w", EventBatch(1.0, [msgspec.structs.replace(e, pool=True) for e in flood], 0))
    assert len(pooled) == 64
