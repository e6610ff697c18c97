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

    parents: list[int]  # parent of block i among 0..i-1, -1 for a root

    def key(self, block: int) -> int:
        return (block + 1) * 0x9E3779B97F4A7C15 % (1 << 64)

    def path(self, block: int) -> list[int]:
        path: list[int] = []
        while block >= 0:
            path.append(block)
            block = self.parents[block]
        return path[::-1]

    def chain(self, block: int) -> list[int]:
        return [self.key(b) for b in self.path(block)]


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
    return Tree(parents)


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
        run = [tree.key(b) for b in path[start:]]
        match data.draw(st.sampled_from(("stored",) * 6 + ("removed",) * 4 + ("cleared", "drop"))):
            case "stored":
                index.stored(target, run, tree.key(path[start - 1]) if start else None, tier=tier)
                model.of(target, tier).update(run)
            case "removed":
                gone = data.draw(st.permutations(run)) if data.draw(st.booleans()) else run[::-1]
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
