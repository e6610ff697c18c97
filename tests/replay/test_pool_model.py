"""The pool in virtual time against a plain one that knows every block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from replay.chains import Pieces
from replay.pool import LEASE_S, SPREAD, Part, PoolModel


def chain(session: int, blocks: int, head: int = 4) -> Pieces:
    return Pieces([range(1, head + 1), range(1000 * (session + 1), 1000 * (session + 1) + blocks - head)])


def test_owner_placement_fills_the_own_segment_then_goes_elsewhere() -> None:
    pool = PoolModel(3, 10, "owner")
    assert pool.put(chain(0, 8), 8, writer=1, now=0) == (8, 0)
    assert pool.parts(chain(0, 8), 2, 8) == [Part(1, 6)]
    stored, moved = pool.put(chain(1, 10), 10, writer=1, now=0)
    assert (stored, moved) == (6, 4)
    assert pool.parts(chain(1, 10), 0, 10) == [Part(1, 4), Part(SPREAD, 6)]


def test_what_was_looked_up_last_goes_last_and_nothing_goes_while_leased() -> None:
    pool = PoolModel(1, 100, "random")
    for session in range(3):
        pool.put(chain(session, 30), 30, 0, now=session)
    assert pool.lookup(chain(0, 30), 30, now=20) == 30
    pool.put(chain(3, 30), 30, 0, now=20 + LEASE_S)
    assert pool.prefix(chain(0, 30), 30) == 30
    assert pool.prefix(chain(1, 30), 30) < 30
    assert pool.evicted_blocks > 0
    full = PoolModel(1, 40, "random")
    full.put(chain(0, 30), 30, 0, now=0)
    assert full.put(chain(1, 30), 30, 0, now=1) == (0, 0)
    assert full.refused_blocks == 26


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(5, 40), st.integers(0, 2), st.booleans()), max_size=25)
)
def test_it_holds_what_a_plain_pool_holds_while_there_is_room(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    pool = PoolModel(3, 1000, "owner")
    plain: dict[int, int] = {}
    for now, (session, blocks, writer, put) in enumerate(steps):
        asked = chain(session, blocks)
        if put:
            pool.put(asked, blocks, writer, now)
            for key in asked:
                plain.setdefault(key, writer)
        there = [plain.get(key) for key in asked]
        count = there.index(None) if None in there else len(there)
        assert pool.prefix(asked, blocks) == pool.lookup(asked, blocks, now) == count
        owners = [owner for owner, blocks in pool.parts(asked, 0, count) for _ in range(blocks)]
        assert owners == there[:count]
    assert pool.blocks == len(plain)
