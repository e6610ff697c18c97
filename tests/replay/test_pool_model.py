"""The pool in virtual time against a plain one that knows every block."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.chains import Pieces
from replay.pool import LEASE_S, SPREAD, Part, PoolModel


def chain(session: int, blocks: int, head: int = 4) -> Pieces:
    return Pieces([range(1, head + 1), range(1000 * (session + 1), 1000 * (session + 1) + blocks - head)])


def test_owner_placement_fills_the_own_segment_then_goes_elsewhere() -> None:
    pool = PoolModel([10] * 3, "owner")
    assert pool.put(chain(0, 8), 8, writer=1, now=0) == (8, 0)
    assert pool.parts(chain(0, 8), 2, 8) == [Part(1, 6)]
    stored, moved = pool.put(chain(1, 10), 10, writer=1, now=0)
    assert (stored, moved) == (6, 4)
    assert pool.parts(chain(1, 10), 0, 10) == [Part(1, 4), Part(SPREAD, 6)]


def test_what_was_looked_up_last_goes_last_and_nothing_goes_while_leased() -> None:
    pool = PoolModel([100] * 1, "random")
    for session in range(3):
        pool.put(chain(session, 30), 30, 0, now=session)
    assert pool.lookup(chain(0, 30), 30, now=20) == 30
    pool.put(chain(3, 30), 30, 0, now=20 + LEASE_S)
    assert pool.prefix(chain(0, 30), 30) == 30
    assert pool.prefix(chain(1, 30), 30) < 30
    assert pool.evicted_blocks > 0
    full = PoolModel([40] * 1, "random")
    full.put(chain(0, 30), 30, 0, now=0)
    assert full.put(chain(1, 30), 30, 0, now=1) == (0, 0)
    assert full.refused_blocks == 26


def test_what_lies_beyond_a_look_up_in_another_segment_is_not_renewed_with_it() -> None:
    pool = PoolModel([20, 20], "owner")
    pool.put(chain(0, 10), 10, 0, now=0)
    assert pool.put(chain(0, 20), 20, 1, now=1) == (10, 0)
    pool.put(chain(1, 16), 16, 1, now=2)
    assert pool.parts(chain(0, 20), 0, 20) == [Part(0, 10), Part(1, 10)]
    assert pool.lookup(chain(0, 20), 9, now=3) == 9
    # For 10 blocks more than the 32 that are there two must go: of those that were touched longest ago.
    assert pool.put(chain(2, 14), 14, 0, now=3 + LEASE_S) == (10, 0)
    assert pool.prefix(chain(0, 20), 20) == 18
    assert pool.prefix(chain(1, 16), 16) == 16


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(5, 40),
        st.integers(0, 2),
        st.sampled_from(["put", "put", "look", "lose"]),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_it_holds_what_a_plain_pool_holds_while_there_is_room(steps: list[tuple[int, int, int, str]]) -> None:
    """Also after a segment is lost: blocks behind a gap are there, of no use, and not put again."""
    pool = PoolModel([1000] * 3, "owner")
    plain: dict[int, int] = {}
    for now, (session, blocks, writer, what) in enumerate(steps):
        asked = chain(session, blocks)
        if what == "put":
            missing = sum(key not in plain for key in asked)
            assert pool.put(asked, blocks, writer, now) == (missing, 0)
            for key in asked:
                plain.setdefault(key, writer)
        elif what == "lose":
            pool.lose(writer, Random(0))
            pool.back(writer)
            plain = {key: owner for key, owner in plain.items() if owner != writer}
        there = [plain.get(key) for key in asked]
        count = there.index(None) if None in there else len(there)
        assert pool.prefix(asked, blocks) == pool.lookup(asked, blocks, now) == count
        owners = [owner for owner, blocks in pool.parts(asked, 0, count) for _ in range(blocks)]
        assert owners == there[:count]
        assert pool.blocks == len(plain)


def test_of_what_lies_on_all_segments_a_lost_one_leaves_little_of_use() -> None:
    pool = PoolModel([1000] * 10, "random")
    for session in range(100):
        pool.put(chain(session, 40), 40, 0, 0.0)
    before = pool.blocks
    pool.lose(3, Random(0))
    assert 0.8 * before < pool.blocks < 0.95 * before
    left = [pool.prefix(chain(session, 40), 40) for session in range(100)]
    assert 5 < sum(left) / 100 < 15
    stored = sum(pool.put(chain(session, 40), 40, 0, 1.0)[0] for session in range(100))
    assert pool.blocks == before
    assert 0 < stored < 0.2 * before
    assert all(pool.prefix(chain(session, 40), 40) == 40 for session in range(100))


def test_a_lost_segment_is_no_room_until_it_is_back() -> None:
    pool = PoolModel([100, 100], "owner")
    pool.lose(1, Random(0))
    assert pool.put(chain(0, 120), 120, 0, 0.0) == (0, 0)
    pool.back(1)
    assert pool.put(chain(0, 120), 120, 0, 0.0)[0] == 120


def test_places_say_of_all_segments_at_once_what_they_say_of_each() -> None:
    pool = PoolModel([100, 30, 100, 100], "owner")
    for writer, blocks in ((0, 20), (1, 45), (2, 60), (1, 90), (3, 110)):
        pool.put(chain(0, 110), blocks, writer, 0.0)
    places = pool.places(chain(0, 110), 105)
    assert {owner for owner, _ in pool.parts(chain(0, 110), 0, 105)} == {0, 1, 2, 3, SPREAD}
    for start in (0, 15, 40, 88, 105):
        starts = np.array([start, 7.0, start, 50.0])
        each = [places.own_or_spread(segment, int(starts[segment])) for segment in range(4)]
        assert places.each_own_or_spread(starts).tolist() == each
