"""What the engine model does in time: admission, chunks, decoding, blocks, the pool."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim.engine import Engine, Limits, Rates
from workers.sim.turn import Effect, Finished, Load, Removed, Save, Started, Stored, Turn

SIZE = 4
RATES = Rates(prefill_tok_s=1000.0, step_s=0.01, decode_seq_s=0.001)


def turn(name: str, prompt: int, output: int = 1, *, shared: int = 0, head: str = "") -> Turn:
    """`shared`: leading blocks in common with all turns of that head."""
    blocks = (prompt + output) // SIZE
    chain = [(head if place < shared else name, place) for place in range(blocks)]
    return Turn(chain, prompt, output)


def engine(
    blocks: int = 100, *, step_tokens: int = 64, max_seqs: int = 8, stride: int = 1, **more: object
) -> Engine:
    limits = Limits(blocks, SIZE, max_seqs=max_seqs, step_tokens=step_tokens, stride=stride)
    return Engine(limits, RATES, **more)


def run(engine: Engine, until: float = math.inf) -> list[Effect]:
    effects: list[Effect] = []
    while (at := engine.next_at()) <= until and at < math.inf:
        effects += engine.advance(at)
    return effects


def of(kind: type, effects: Sequence[Effect]) -> list[tuple[object, ...]]:
    return [tuple(effect)[1:] for effect in effects if isinstance(effect, kind)]


def test_a_prompt_takes_its_chunks_and_an_answer_its_steps() -> None:
    it = engine()
    it.submit(turn("a", 100, 11), 0.0)
    effects = run(it)
    first = 2 * 0.01 + 100 / 1000
    assert of(Started, effects) == [(pytest.approx(first),)]
    assert of(Finished, effects) == [(pytest.approx(first + 10 * 0.011),)]


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize(
    ("prompt", "output", "blocks"), [(7, 1, 1), (8, 1, 2), (7, 2, 2), (6, 2, 1), (6, 47, 13)]
)
def test_the_last_generated_token_fills_no_block(prompt: int, output: int, blocks: int, stride: int) -> None:
    it = engine(stride=stride)
    it.submit(turn("a", prompt, output), 0.0)
    effects = run(it)
    stored = [effect for effect in effects if isinstance(effect, Stored)]
    assert sum(effect.end - effect.start for effect in stored) == blocks == (prompt + output - 1) // SIZE
    assert [effect.start for effect in stored] == [0, *(effect.end for effect in stored)][:-1]


@pytest.mark.parametrize(("length", "cached"), [(16, 12), (17, 16), (15, 12), (4, 0), (5, 4), (3, 0)])
def test_a_repeated_prompt_hits_all_but_what_must_be_computed(length: int, cached: int) -> None:
    it = engine()
    for _ in range(2):
        again = turn("a", length)
        it.submit(again, it.next_at() if it.running else 0.0)
        run(it)
    assert again.cached_tokens == again.local_tokens == cached
    assert (it.counters.prefix_queries, it.counters.prefix_hits) == (2 * length, cached)


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    it = engine()
    it.submit(turn("s", 10, 12), 0.0)
    run(it)
    following = turn("s", 40)
    it.submit(following, 10.0)
    run(it)
    assert following.local_tokens == 20


def test_eviction_goes_tail_first_and_spares_what_is_in_use() -> None:
    it = engine(blocks=12)
    it.submit(turn("old", 16), 0.0)
    run(it)
    it.submit(turn("used", 16, 20), 1.0)
    it.advance(1.1)
    it.submit(turn("new", 20), 1.1)
    effects = run(it, 1.3)
    removed = [
        run.chain[place]
        for run in effects
        if isinstance(run, Removed)
        for place in reversed(range(run.start, run.end))
    ]
    assert removed[:3] == [("old", 3), ("old", 2), ("old", 1)]


def test_without_blocks_the_last_admitted_gives_way_and_still_answers_in_full() -> None:
    it = engine(blocks=12)
    one, two = turn("one", 16, 24), turn("two", 16, 24)
    it.submit(one, 0.0)
    it.submit(two, 0.0)
    effects = run(it)
    assert it.counters.preemptions > 0
    assert [type(effect).__name__ for effect in effects if isinstance(effect, Started)] == ["Started"] * 2
    assert [effect.turn for effect in effects if isinstance(effect, Finished)] == [one, two]
    assert it.produced(two, 99.0) == 24
    assert it.cache.free == 12


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="fit"):
        engine(blocks=4).submit(turn("a", 16, 2), 0.0)


def test_an_empty_prompt_is_refused_and_leaves_nothing_behind() -> None:
    it = engine()
    with pytest.raises(ValueError, match="empty"):
        it.submit(turn("none", 0), 0.0)
    it.submit(turn("a", 9), 0.0)
    assert len(of(Finished, run(it))) == 1


def test_a_pool_hit_beyond_the_local_one_is_loaded_first() -> None:
    it = engine(lookup=lambda _: 6)
    it.submit(turn("a", 9), 0.0)
    run(it)
    assert it.counters.external_hits == 8
    it = engine(lookup=lambda turn: 6 if turn.prompt_tokens > 20 else 0)
    it.submit(turn("a", 12), 0.0)
    run(it)
    longer = turn("a", 30)
    it.submit(longer, 1.0)
    effects = it.advance(1.0)
    assert of(Load, effects) == [(3, 6)]
    assert (it.running, it.waiting, it.loading) == (0, 1, 1)
    assert it.next_at() == math.inf
    it.loaded(longer, 1.5)
    effects = run(it)
    assert [effect[1:] for effect in effects if isinstance(effect, Stored)] == [(3, 6, True), (6, 7, False)]
    assert of(Started, effects) == [(pytest.approx(1.5 + 0.01 + 6 / 1000),)]
    assert (longer.local_tokens, longer.pool_tokens) == (12, 12)


def test_a_load_that_fails_is_computed() -> None:
    it = engine(lookup=lambda _: 4)
    failing = turn("a", 20)
    it.submit(failing, 0.0)
    it.loaded(failing, 1.0, ok=False)
    effects = run(it)
    assert of(Started, effects) == [(pytest.approx(1.0 + 0.01 + 20 / 1000),)]
    assert [effect[1:] for effect in effects if isinstance(effect, Stored)] == [(0, 5, False)]


def test_every_chunk_may_be_saved_but_generated_blocks_are_not() -> None:
    it = engine(step_tokens=16)
    it.submit(turn("a", 40, 20), 0.0)
    assert of(Save, run(it)) == [(4,), (8,), (10,)]


def test_an_arrival_waits_for_the_step_in_progress_only() -> None:
    it = engine()
    it.submit(turn("long", 4, 300), 0.0)
    it.advance(0.5)
    late = turn("late", 4)
    it.submit(late, 0.5)
    started = [effect.at for effect in run(it, 0.6) if isinstance(effect, Started)]
    assert 0.5 < started[0] < 0.5 + 0.011 + 0.011 + 4 / 1000 + 1e-9


@pytest.mark.parametrize("moment", [0.0, 0.005, 0.05, 0.3])
def test_a_cancelled_turn_leaves_nothing(moment: float) -> None:
    it = engine()
    gone, stays = turn("a", 64, 30), turn("b", 8, 5)
    it.submit(gone, 0.0)
    it.submit(stays, 0.0)
    it.advance(moment)
    it.cancel(gone, moment)
    effects = run(it)
    assert [effect.turn for effect in effects if isinstance(effect, Finished)] == (
        [stays] if moment < 0.3 else []
    )
    assert (it.running, it.waiting, it.usage) == (0, 0, 0.0)


requests = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 3),
        st.integers(0, 4),
        st.integers(1, 60),
        st.integers(1, 30),
        st.one_of(st.none(), st.floats(0.0, 0.5)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(requests, st.booleans(), st.sampled_from([1, 3]))
def test_every_turn_ends_once_and_events_tell_exactly_what_is_cached(
    requests: list[tuple[float, int, int, int, int, float | None]], fine: bool, stride: int
) -> None:
    """Also when looked at in small steps of time: the model must not depend on when it is asked."""
    it = engine(blocks=30, max_seqs=3, step_tokens=24, stride=stride)
    turns: list[Turn] = []
    actions: list[tuple[float, str, Turn]] = []
    for at, head, shared, prompt, output, gone in requests:
        turns.append(turn(f"t{len(turns)}", prompt, output, shared=shared, head=f"h{head}"))
        actions.append((at, "submit", turns[-1]))
        if gone is not None:
            actions.append((at + gone, "cancel", turns[-1]))
    effects: list[Effect] = []
    clock = 0.0
    for at, what, one in sorted(actions, key=lambda action: action[0]):
        while fine and (following := it.next_step_at(clock)) < at:
            clock = following
            effects += it.advance(clock)
        clock = at
        effects += it.advance(at)
        if what == "submit":
            it.submit(one, at)
        elif one.state != "done":
            it.cancel(one, at)
    effects += run(it)
    held: dict[object, int] = {}
    for effect in effects:
        if isinstance(effect, Stored):
            for key in effect.turn.chain[effect.start : effect.end]:
                held[key] = held.get(key, 0) + 1
        elif isinstance(effect, Removed):
            for key in effect.chain[effect.start : effect.end]:
                held[key] -= 1
                assert held[key] >= 0
    assert all(it.cache.hit(one.chain, len(one.chain)) == leading(one, held) for one in turns)
    finished = [effect.turn for effect in effects if isinstance(effect, Finished)]
    assert len(finished) == len(set(finished))
    assert all(one.state == "done" for one in turns)
    assert (it.running, it.waiting, it.cache.free) == (0, 0, 30)


def leading(one: Turn, held: dict[object, int]) -> int:
    count = 0
    for key in one.chain:
        if not held.get(key):
            break
        count += 1
    return count
