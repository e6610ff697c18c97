"""Credit for what a target was just sent to compute."""

from store.placements import Placements

TRUNK = list(range(1, 101))
LEFT, RIGHT = [*TRUNK, *range(201, 221)], [*TRUNK, *range(301, 321)]


def test_a_burst_of_siblings_meets() -> None:
    placements = Placements(ttl_s=10)
    placements.place("a", LEFT, now=0.0)
    assert placements.extend(RIGHT, {}, now=1.0) == {"a": 100}
    assert placements.extend(LEFT, {}, now=1.0) == {"a": 120}
    assert placements.extend([7, 8], {}, now=1.0) == {}


def test_only_more_than_what_is_held_is_reported() -> None:
    placements = Placements()
    placements.place("a", LEFT, now=0.0)
    assert placements.extend(LEFT, {"a": 120}, now=1.0) == {}
    assert placements.extend(RIGHT, {"a": 110}, now=1.0) == {}
    assert placements.extend(LEFT, {"a": 60, "b": 10}, now=1.0) == {"a": 120}


def test_the_longest_of_several_counts() -> None:
    placements = Placements()
    placements.place("a", TRUNK[:10], now=0.0)
    placements.place("a", LEFT, now=0.0)
    placements.place("a", RIGHT, now=0.0)
    assert placements.extend(LEFT, {}, now=1.0) == {"a": 120}


def test_a_placement_that_nothing_confirms_expires() -> None:
    placements = Placements(ttl_s=10)
    placements.place("a", LEFT, now=0.0)
    placements.place("a", TRUNK, now=5.0)
    assert placements.extend(LEFT, {}, now=9.9) == {"a": 120}
    assert placements.extend(LEFT, {}, now=10.0) == {"a": 100}
    assert placements.extend(LEFT, {}, now=15.0) == {}
    assert len(placements) == 0


def test_a_target_that_is_gone_gets_no_credit_and_the_oldest_make_room() -> None:
    placements = Placements(per_target=2)
    for now, keys in enumerate((LEFT, [5], [6])):
        placements.place("a", keys, float(now))
    assert placements.extend(LEFT, {}, now=3.0) == {}
    assert len(placements) == 2
    placements.drop("a")
    assert placements.extend([5], {}, now=3.0) == {}


def test_a_whole_placement_serves_only_what_goes_on_from_its_end() -> None:
    placements = Placements()
    placements.place("a", TRUNK, now=0.0, whole=True)
    assert placements.extend(LEFT, {}, now=1.0) == {"a": 100}
    assert placements.extend(TRUNK[:99], {}, now=1.0) == {}
    assert placements.extend([*TRUNK[:50], 500], {}, now=1.0) == {}
    assert placements.extend(LEFT, {"a": 40}, now=1.0) == {"a": 100}
