"""The block index, by example and against a model that is nothing but sets."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from store.events import Tier
from store.index import BlockIndex


def test_the_leading_blocks_of_each_target() -> None:
    index = BlockIndex()
    index.stored("a", [1, 2, 3], None)
    index.stored("b", [1], None)
    index.stored("c", [9], None)
    assert index.match([1, 2, 3, 4]) == {"a": 3, "b": 1}
    assert index.match([]) == {}
    assert index.sizes() == {("a", "gpu"): 3, ("b", "gpu"): 1, ("c", "gpu"): 1}


def test_b015_children_of_an_unknown_parent_wait_for_it() -> None:
    index = BlockIndex()
    index.stored("a", [3, 4], parent=2)
    assert index.match([1, 2, 3, 4]) == {}
    index.stored("a", [1, 2], parent=None)
    assert index.match([1, 2, 3, 4]) == {"a": 4}


def test_a_hole_ends_the_prefix_until_it_is_filled() -> None:
    index = BlockIndex()
    index.stored("a", [1, 2, 3, 4], None)
    index.stored("b", [1, 2, 3, 4], None)
    index.removed("a", [2])
    assert index.match([1, 2, 3, 4]) == {"a": 1, "b": 4}
    index.stored("a", [2], parent=1)
    assert index.match([1, 2, 3, 4]) == {"a": 4, "b": 4}


def test_branches_share_their_beginning() -> None:
    index = BlockIndex()
    index.stored("a", [1, 2, 3], None)
    index.stored("a", [12, 13], parent=1)
    index.stored("b", [1, 12], None)
    assert index.match([1, 2, 3]) == {"a": 3, "b": 1}
    assert index.match([1, 12, 13]) == {"a": 3, "b": 2}


def test_b011_a_block_is_held_as_long_as_one_copy_is() -> None:
    index = BlockIndex()
    index.stored("a", [1, 2], None)
    index.stored("a", [1], None)
    index.removed("a", [1])
    assert index.match([1, 2]) == {"a": 2}
    index.removed("a", [1])
    assert index.match([1, 2]) == {}


def test_b053_tiers_do_not_touch_each_other() -> None:
    index = BlockIndex()
    index.stored("a", [1], None)
    index.stored("a", [1, 2], None, tier="cpu")
    assert index.match([1, 2]) == {"a": 1}
    index.removed("a", [1])
    assert index.match([1, 2]) == {}
    assert index.sizes() == {("a", "cpu"): 2}


def test_b008_a_cleared_target_holds_nothing_in_that_tier() -> None:
    index = BlockIndex()
    index.stored("a", [1, 2], None)
    index.stored("a", [1, 2], None, tier="cpu")
    index.stored("b", [1], None)
    index.cleared("a")
    assert index.match([1, 2]) == {"b": 1}
    assert index.sizes() == {("a", "cpu"): 2, ("b", "gpu"): 1}
    index.drop("a")
    assert index.sizes() == {("b", "gpu"): 1}


def test_removing_what_is_not_held_changes_nothing() -> None:
    index = BlockIndex()
    index.removed("a", [1])
    index.stored("a", [1], None)
    index.removed("b", [1])
    index.removed("a", [2])
    index.cleared("c")
    index.drop("d")
    assert index.match([1]) == {"a": 1}


# --------------------------------------------------------------------- against a model

TARGETS = ("a", "b", "c")
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")


@dataclass
class Tree:
    """A random forest of blocks: every key has one parent, as a chained hash has."""

    parents: list[int]  # parent of stretch i among 0..i-1, -1 for a root
    length: int  # blocks in a stretch

    def keys(self, stretches: list[int]) -> list[int]:
        numbers = [stretch * self.length + n for stretch in stretches for n in range(self.length)]
        return [(number + 1) * 0x9E3779B97F4A7C15 % (1 << 64) for number in numbers]

    def path(self, block: int) -> list[int]:
        path: list[int] = []
        while block >= 0:
            path.append(block)
            block = self.parents[block]
        return path[::-1]

    def chain(self, block: int) -> list[int]:
        return self.keys(self.path(block))


@dataclass
class Model:
    """Copies by (target, tier)."""

    copies: dict[tuple[str, Tier], Counter[int]] = field(default_factory=dict)

    def of(self, target: str, tier: Tier) -> Counter[int]:
        return self.copies.setdefault((target, tier), Counter())

    def match(self, keys: list[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for target in TARGETS:
            held = self.of(target, "gpu")
            length = next((i for i, key in enumerate(keys) if not held[key]), len(keys))
            if length:
                found[target] = length
        return found

    def sizes(self) -> dict[tuple[str, Tier], int]:
        counted = {holder: sum(1 for n in held.values() if n > 0) for holder, held in self.copies.items()}
        return {holder: size for holder, size in counted.items() if size}


@st.composite
def forests(draw: st.DrawFn) -> Tree:
    """Mostly long runs with some branches, as conversations are."""
    size = draw(st.integers(1, 60))
    parents = [-1]
    for block in range(1, size):
        straight = draw(st.integers(0, 9)) < 8
        parents.append(block - 1 if straight else draw(st.integers(-1, block - 1)))
    return Tree(parents, draw(st.sampled_from((1, 1, 3, 20))))


@settings(max_examples=300, deadline=None)
@given(forests(), st.data())
def test_any_interleaving_of_events_gives_what_a_set_would(tree: Tree, data: st.DataObject) -> None:
    index, model = BlockIndex(), Model()
    blocks = st.integers(0, len(tree.parents) - 1)
    holders = st.tuples(st.sampled_from(TARGETS), st.sampled_from(TIERS + ("gpu",) * 4))
    for _ in range(data.draw(st.integers(1, 25))):
        target, tier = data.draw(holders)
        path = tree.path(data.draw(blocks))
        start = data.draw(st.integers(0, len(path) - 1))
        run = tree.keys(path[start:])
        parent = tree.keys(path[:start])[-1] if start else None
        match data.draw(st.sampled_from(("stored",) * 6 + ("removed",) * 4 + ("cleared", "drop"))):
            case "stored":
                index.stored(target, run, parent, tier=tier)
                model.of(target, tier).update(run)
            case "removed":
                gone = run[::-1][: data.draw(st.integers(1, len(run)))]
                if data.draw(st.booleans()):
                    data.draw(st.randoms(use_true_random=False)).shuffle(gone)
                index.removed(target, gone, tier=tier)
                held = model.of(target, tier)
                for key in gone:
                    held[key] = max(0, held[key] - 1)
            case "cleared":
                index.cleared(target, tier=tier)
                model.of(target, tier).clear()
            case _:
                index.drop(target)
                for every in TIERS:
                    model.of(target, every).clear()
        leaf = tree.chain(data.draw(blocks))
        assert index.match(leaf) == model.match(leaf)
        assert index.sizes() == model.sizes()
    for block in range(len(tree.parents)):
        assert index.match(tree.chain(block)) == model.match(tree.chain(block))
    for target in TARGETS:
        index.drop(target)
    assert index.sizes() == {}


@settings(max_examples=150, deadline=None)
@given(forests(), st.data())
def test_under_a_memory_cap_credit_is_lost_but_never_false(tree: Tree, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1_000, 30_000))
    index, model = BlockIndex(), Model()
    index.keep_below(limit)
    blocks = st.integers(0, len(tree.parents) - 1)
    for _ in range(data.draw(st.integers(1, 25))):
        target = data.draw(st.sampled_from(TARGETS))
        run = tree.chain(data.draw(blocks))
        if data.draw(st.booleans()):
            index.stored(target, run, None)
            model.of(target, "gpu").update(run)
        else:
            index.removed(target, run)
            model.of(target, "gpu").subtract({key: 1 for key in run if model.of(target, "gpu")[key]})
        for stretch in range(len(tree.parents)):
            truth = model.match(tree.chain(stretch))
            assert all(n <= truth.get(t, 0) for t, n in index.match(tree.chain(stretch)).items())
        assert index.memory() <= limit or len(index.sizes()) <= len(TARGETS)
    for target in TARGETS:
        index.drop(target)
    assert index.sizes() == {}


def test_the_memory_cap_gives_up_the_least_recently_used_leaf_first() -> None:
    index = BlockIndex()
    trunk, old, new = list(range(1, 301)), list(range(1001, 1301)), list(range(2001, 2301))
    index.stored("a", trunk, None)
    index.stored("a", old, trunk[-1])
    index.stored("a", new, trunk[-1])
    capped = BlockIndex()
    capped.keep_below(index.memory())
    for run, parent in ((trunk, None), (old, trunk[-1]), (new, trunk[-1])):
        capped.stored("a", run, parent)
    assert capped.match([*trunk, *old]) == {"a": 600}
    capped.match([*trunk, *new])
    capped.match([*trunk, *old])
    capped.stored("a", list(range(3001, 3301)), trunk[-1])
    assert capped.evicted >= 44
    assert capped.match([*trunk, *old]) == {"a": 600}
    assert capped.match([*trunk, *new])["a"] < 600


def test_runs_are_rebuilt_as_their_blocks_go() -> None:
    index = BlockIndex()
    keys = list(range(1, 1001))
    for target in ("a", "b"):
        index.stored(target, keys, None)
    index.removed("b", keys[500:])
    index.removed("a", keys[100:900])
    assert index.match(keys) == {"a": 100, "b": 500}
    index.removed("b", keys[:500])
    assert index.match(keys) == {"a": 100}
    index.stored("b", keys, None)
    assert index.match(keys) == {"a": 100, "b": 1000}
    index.stored("a", keys[100:900], keys[99])
    assert index.match(keys) == {"a": 1000, "b": 1000}
    assert index.sizes() == {("a", "gpu"): 1000, ("b", "gpu"): 1000}


def test_a_block_that_came_back_is_not_given_up_with_the_rest_of_its_run() -> None:
    index = BlockIndex()
    index.stored("a", [1, 2], None)
    index.removed("a", [2])
    index.stored("a", [2], 1)
    index.removed("a", [1])
    index.stored("a", [1], None)
    assert index.match([1, 2]) == {"a": 2}


def test_b052_window_groups_alone_get_no_credit() -> None:
    """A hybrid model's full group may be there and not known: what it holds was announced before a gap."""
    index = BlockIndex()
    index.describe("w", 0, 2)
    index.stored("w", [1, 2, 3, 4], None)
    assert index.match([1, 2, 3, 4], limit=4) == {}
    index.stored("w", [1, 2, 3], None, group=1)
    assert index.match([1, 2, 3, 4], limit=4) == {"w": 3}
