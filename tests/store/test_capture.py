"""A snapshot is of one instant, however long it takes and whatever happens meanwhile."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import capture as pieces
from store.events import Tier
from store.index import BlockIndex

KEYS = [n * 0x9E3779B97F4A7C15 % (1 << 64) for n in range(1, 2001)]
TIERS: tuple[Tier, ...] = ("gpu", "cpu")


def apply(index: BlockIndex, step: tuple[str, str, Tier, int, int, int]) -> None:
    what, target, tier, start, length, stride = step
    keys: Sequence[int] = KEYS[start : start + length * stride : stride]
    if what == "stored":
        index.stored(target, keys, KEYS[start - 1] if start else None, tier=tier)
    elif what == "window":
        index.describe(target, 1, 2, tier=tier)
        index.stored(target, keys, None, tier=tier, group=1)
    elif what == "removed":
        for group in (0, 1):
            index.removed(target, keys, tier=tier, group=group)
    elif what == "cleared":
        index.cleared(target, tier=tier)
    else:
        index.drop(target)


def state(index: BlockIndex) -> dict[str, Any]:
    """Everything that can be asked of an index, copies included."""
    found: dict[str, Any] = {"sizes": index.sizes()}
    for tier in TIERS:
        for start in (0, 40, 300):
            found[f"{tier} {start}"] = index.match(KEYS[start:], tier=tier, limit=1500)
    for holder in index._holders:
        name = f"{holder.target} {holder.tier} {holder.group}"
        found[name] = sorted(holder.loose.items()), sorted(holder.more.items()), holder.need
    return found


steps = st.tuples(
    st.sampled_from(("stored",) * 5 + ("removed",) * 4 + ("window", "cleared", "drop")),
    st.sampled_from("abc"),
    st.sampled_from(TIERS),
    st.sampled_from((0, 0, 0, 37, 300, 700)),
    st.integers(1, 600),
    st.sampled_from((1, 1, 1, 2)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=15), st.lists(st.lists(steps, max_size=3), max_size=12), st.booleans())
def test_what_changes_while_it_is_taken_is_not_in_it(
    before: list[Any], meanwhile: list[list[Any]], capped: bool
) -> None:
    index, twin = BlockIndex(), BlockIndex()
    for step in before:
        for each in (index, twin):
            apply(each, step)
    if capped:
        index.keep_below(20_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE", 1)
        patch.setattr(pieces, "_STEP_S", 1e-9)
        capture = index.capture()
        for events in meanwhile:
            capture.advance()
            for step in events:
                apply(index, step)
        restored = BlockIndex.restore(capture.whole())
    for target in "abc":
        restored.admit(target)
    assert state(restored) == state(twin)
    assert index._capture is None


def test_it_is_taken_in_pieces_that_do_not_grow_with_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    index = BlockIndex()
    for start in range(0, 1 << 64, 1 << 54):
        index.stored("a", range(start, start + 256), None)
    monkeypatch.setattr(pieces, "_STEP_S", 0.0)
    capture = index.capture()
    steps = 1
    while not capture.advance():
        steps += 1
    assert len(capture.whole().runs) == len(index._runs.recent) / pieces._PIECE == 32
    assert steps == 1 + 32, "a step without time takes one holder, or one piece"


def test_one_begun_later_is_not_ended_by_one_begun_before() -> None:
    index = BlockIndex()
    index.stored("a", KEYS[:10], None)
    stale, fresh = index.capture(), index.capture()
    stale.whole()
    index.stored("a", KEYS[10:20], KEYS[9])
    assert BlockIndex.restore(fresh.whole()).sizes() == {("a", "gpu"): 10}
