"""Answers that contradict what a target announced: what they end, and what they must leave alone."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from store.events import BlockRemoved, BlockStored, Event, EventBatch
from store.knowledge import Held, Knowledge

CHAIN = list(range(1, 9))


def stored(start: int, stop: int, group: int = 0, **more: str | int) -> BlockStored:
    parent = CHAIN[start - 1] if start else None
    return BlockStored(CHAIN[start:stop], parent, [], 32, "gpu", group, **more)  # pyright: ignore


def tell(knowledge: Knowledge, *events: Event) -> None:
    knowledge.batch("w", EventBatch(0.0, list(events), 0))


def predicted(knowledge: Knowledge) -> int:
    return knowledge.match(CHAIN, limit=8).blocks.get("w", 0)


def answered(knowledge: Knowledge, there: int, held: Held | None = None) -> None:
    held = held or knowledge.match(CHAIN, limit=8)
    knowledge.answered("w", CHAIN, there, held.blocks.get("w", 0), held.at)


def test_b014_what_an_answer_refutes_is_not_promised_again() -> None:
    knowledge = Knowledge()
    tell(knowledge, stored(0, 8), stored(0, 8))  # of two copies, none is there
    answered(knowledge, 2)
    assert predicted(knowledge) == 2
    assert knowledge.contradicted == {"w"}
    tell(knowledge, stored(2, 5))
    assert predicted(knowledge) == 5
    assert knowledge.contradicted == set()


def test_one_block_too_few_is_no_contradiction() -> None:
    knowledge = Knowledge()
    tell(knowledge, stored(0, 8))
    answered(knowledge, 7)
    assert predicted(knowledge) == 8


def test_blocks_that_were_computed_for_the_answer_itself_stay() -> None:
    """Evicted after the decision, missed, computed, announced: all of it was known before the answer was."""
    knowledge = Knowledge()
    tell(knowledge, stored(0, 8))
    held = knowledge.match(CHAIN)
    tell(knowledge, *(BlockRemoved([key], "gpu", 0) for key in reversed(CHAIN[3:])), stored(3, 8))
    answered(knowledge, 3, held)
    assert predicted(knowledge) == 8
    tell(knowledge, BlockRemoved([CHAIN[7]], "gpu", 0))
    assert predicted(knowledge) == 7


def test_a_ghost_is_no_second_copy_of_what_was_computed_in_its_place() -> None:
    knowledge = Knowledge()
    tell(knowledge, stored(0, 8))
    held = knowledge.match(CHAIN)
    tell(knowledge, stored(0, 8))
    answered(knowledge, 0, held)
    assert predicted(knowledge) == 8
    tell(knowledge, *(BlockRemoved([key], "gpu", 0) for key in reversed(CHAIN[3:])))
    assert predicted(knowledge) == 3


def test_blocks_loaded_as_one_run_from_the_root_count_as_announced() -> None:
    knowledge = Knowledge()
    tell(knowledge, stored(0, 5))
    held = knowledge.match(CHAIN)
    tell(knowledge, stored(0, 8))
    answered(knowledge, 2, held)
    assert predicted(knowledge) == 8


def test_an_answer_that_is_too_old_to_be_judged_ends_nothing() -> None:
    knowledge = Knowledge()
    tell(knowledge, stored(0, 8))
    held = knowledge.match(CHAIN)
    for key in range(100, 1300):
        tell(knowledge, BlockStored([key], None, [], 32, "gpu", 0))
    answered(knowledge, 0, held)
    assert predicted(knowledge) == 8


def test_all_groups_of_a_hybrid_model_lose_what_they_promised_together() -> None:
    knowledge = Knowledge()
    full = stored(0, 8, spec_kind="full_attention")
    window = stored(0, 8, group=1, spec_kind="sliding_window", window=64)
    tell(knowledge, full, window)
    assert predicted(knowledge) == 8
    answered(knowledge, 4)
    assert predicted(knowledge) == 4


class Engine:
    """Holds each block once, announces what it stores and drops; announcements take their time."""

    def __init__(self) -> None:
        self.knowledge = Knowledge()
        self.held: set[int] = set()
        self.flying: deque[Event] = deque()
        self.turns: deque[Held] = deque()
        self.answers: deque[tuple[int, Held]] = deque()

    def evict(self, block: int) -> None:
        if CHAIN[block] in self.held:
            self.held.remove(CHAIN[block])
            self.flying.append(BlockRemoved([CHAIN[block]], "gpu", 0))

    def arrive(self, many: int) -> None:
        while self.flying and many:
            tell(self.knowledge, self.flying.popleft())
            many -= 1

    def decide(self) -> None:
        self.turns.append(self.knowledge.match(CHAIN))

    def run(self) -> None:
        if not self.turns:
            return
        hit = next((block for block, key in enumerate(CHAIN) if key not in self.held), len(CHAIN))
        self.answers.append((hit, self.turns.popleft()))
        for block in range(hit, len(CHAIN)):
            # A block that was there beyond the miss is computed again in a copy that replaces it.
            self.evict(block)
        if hit < len(CHAIN):
            self.held.update(CHAIN[hit:])
            self.flying.append(stored(hit, len(CHAIN)))

    def answer(self) -> None:
        if self.answers:
            there, held = self.answers.popleft()
            answered(self.knowledge, there, held)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("evict"), st.integers(0, 7)),
        st.tuples(st.just("arrive"), st.integers(1, 9)),
        st.sampled_from([("decide", 0), ("run", 0), ("answer", 0)]),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=500, deadline=None)
def test_an_honest_target_loses_nothing_to_answers_whatever_overtakes_what(
    steps: list[tuple[str, int]],
) -> None:
    engine = Engine()
    for what, number in steps:
        if what in ("evict", "arrive"):
            getattr(engine, what)(number)
        else:
            getattr(engine, what)()
    engine.arrive(1000)
    # An answer given before the last events were applied may come after them, too.
    while engine.answers:
        engine.answer()
    truth = next((block for block, key in enumerate(CHAIN) if key not in engine.held), len(CHAIN))
    assert predicted(engine.knowledge) == truth
    assert engine.knowledge.index.sizes().get(("w", "gpu"), 0) == len(engine.held)
