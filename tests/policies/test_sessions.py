"""Sessions recognised by their chains, and when they are expected back."""

from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sessions import Known, Sessions, Stay

HEAD = list(range(1, 41))


def keys(*parts: object, length: int = 10) -> list[int]:
    """A chain after the head: a key stands for its block and all before it."""
    found = list(HEAD)
    for part in parts:
        for i in range(length):
            found.append(abs(hash((found[-1], str(part), i))))
    return found


class Book:
    """Sessions of one model, at one target unless told otherwise; a block has 10 tokens."""

    def __init__(self, most: int = 4096) -> None:
        self.sessions = Sessions(most)

    def turn(
        self, chain: list[int], now: float = 0.0, named: str = "", target: str = "w", *, last: bool = False
    ) -> tuple[Known, Stay]:
        known = self.sessions.find(named, "m", chain)
        more = {"tokens": 10 * len(chain), "block_size": 10, "last": last}
        return known, self.sessions.placed(known, "m", chain, target, now, **more)  # type: ignore[arg-type]

    def ask(self, chain: list[int], **more: object) -> Known:
        """A turn that has ended at once."""
        known, stay = self.turn(chain, **more)  # type: ignore[arg-type]
        stay.ended(float(more.get("now", 0.0)))  # type: ignore[arg-type]
        return known


def test_a_prompt_that_begins_with_a_sessions_last_one_goes_on_from_it() -> None:
    book = Book()
    first = book.ask(keys("a"))
    assert (first.new, first.inferred, first.branch) == (True, True, False)
    for turns in (("a", "b"), ("a", "b", "c"), ("a", "b", "c", *range(50))):
        known = book.ask(keys(*turns))
        assert (known.name, known.new, known.branch) == (first.name, False, False)
    assert len(book.sessions) == 1


def test_of_two_known_chains_the_deepest_counts() -> None:
    book = Book()
    name = book.ask(keys("a")).name
    book.ask(keys("a", "b"))
    assert book.ask(keys("a", "x")).branch
    # Goes on from either, and shares their beginning with both.
    for line in (("a", "b"), ("a", "x")):
        known = book.ask(keys(*line, "c"))
        assert known == Known(name, branch=False, new=False, shared_blocks=60, home="w")


def test_one_that_leaves_it_after_its_first_prompt_is_a_branch() -> None:
    book = Book()
    main = book.ask(keys("a"))
    book.ask(keys("a", "b", "c"))
    for agent in ("x", "y", "z"):
        known = book.ask(keys("a", agent))
        assert (known.name, known.new, known.branch) == (main.name, False, True)
    # Each of them is a line of its own from there on.
    again = book.ask(keys("a", "y", "y2"))
    assert (again.name, again.branch, again.shared_blocks) == (main.name, False, 60)
    assert len(book.sessions) == 4


def test_sessions_with_a_common_head_are_told_apart() -> None:
    book = Book()
    names = {book.ask(keys(f"task {i}", length=1)).name for i in range(50)}
    assert len(names) == 50
    assert book.sessions.find("", "m", keys("another")).shared_blocks >= 0
    assert book.sessions.find("", "m", keys("another")).new


def test_a_template_may_write_the_last_block_anew_but_not_of_a_first_prompt() -> None:
    book = Book()
    name = book.ask(keys("a")).name
    book.ask(keys("a", "b"))
    rewritten = [*keys("a", "b")[:-1], 700, 800, 900]
    assert book.ask(rewritten).name == name
    assert len(book.sessions) == 1
    assert book.ask([*keys("c")[:-1], 701, 801]).new
    assert book.ask([*keys("c")[:-1], 902, 802]).new


def test_what_its_client_calls_it_counts_before_its_chain() -> None:
    book = Book()
    assert book.ask(keys("a"), named="one") == Known("one", inferred=False)
    assert book.ask(keys("a", "b"), named="one").new is False
    assert book.sessions.find("two", "m", keys("a", "b", "c")) == Known("two", False, shared_blocks=60)
    # A client that leaves the name out this time is recognised all the same.
    known = book.sessions.find("", "m", keys("a", "b", "c"))
    assert (known.name, known.inferred, known.new) == ("one", True, False)


def test_a_session_that_its_client_names_is_not_new_for_a_prompt_that_begins_otherwise() -> None:
    book = Book()
    for turn in range(4):
        chain = keys(f"clock {turn}", "a")
        known = book.ask(chain, named="clocky", now=10.0 * turn, target=f"w{turn}")
        assert (known.name, known.new, known.branch) == ("clocky", turn == 0, turn > 0)
        assert known.home == (f"w{turn - 1}" if turn else "")


def test_without_blocks_only_a_name_counts() -> None:
    book = Book()
    assert book.sessions.find("", "m", []).name == ""
    assert book.sessions.find("one", "m", []).name == "one"
    book.ask([])
    assert len(book.sessions) == 0


def test_a_turn_whose_chain_is_not_known_counts_for_what_was_last_seen_of_its_session() -> None:
    """One that goes on from a stored response, say, whose prompt only its worker can make."""
    book = Book()
    name = book.ask(keys("a")).name
    known = book.ask([], named=name, now=60.0, last=True)
    assert (known.name, known.new) == (name, False)
    assert [c.over for c in book.sessions._all] == [True]
    _, stay = book.turn([], named=name, now=61.0, target="v")
    (conversation,) = book.sessions._all
    assert (conversation.under_way, conversation.target, conversation.over) == (1, "v", False)
    assert conversation.tokens == 10 * len(keys("a"))
    stay.ended(62.0)
    assert book.ask(keys("a", "b"), now=63.0).name == name
    # Nothing is kept for a name alone.
    for i in range(100):
        assert book.ask([], named=f"unseen {i}").new
    assert len(book.sessions) == 1


def test_models_have_sessions_of_their_own() -> None:
    book = Book()
    book.ask(keys("a"))
    assert book.sessions.find("", "another", keys("a", "b")).new


def test_a_turn_placed_anew_after_a_failure_is_the_same_turn() -> None:
    book = Book()
    known, stay = book.turn(keys("a"))
    stay.ended(0.1)
    again = {"tokens": 500, "block_size": 10}
    book.sessions.placed(known, "m", keys("a"), "other", 0.1, **again)  # type: ignore[arg-type]
    assert len(book.sessions) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from(["", "", "n"]), st.booleans()),
        max_size=60,
    )
)
def test_what_is_kept_is_bounded_and_consistent(turns: list[tuple[int, int, str, bool]]) -> None:
    book, lines, open_stays = Book(most=4), {i: keys(i) for i in range(6)}, list[Stay]()
    for now, (line, more, named, ends) in enumerate(turns):
        lines[line] = [*lines[line], *(hash((lines[line][-1], now, i)) for i in range(more * 60))]
        known, stay = book.turn(lines[line], float(now), named, f"w{line % 2}")
        open_stays.append(stay)
        if ends:
            open_stays.pop(0).ended(float(now))
        assert len(book.sessions) <= 4
        # What was asked last is always known.
        assert book.sessions.find("", "m", [*lines[line], 1]).name == known.name
    group = book.sessions._groups.get("m")
    if group is not None:
        kept = set(book.sessions._all)
        for held in (group.tips, group.marks, group.firsts):
            assert set(held.values()) <= kept
        assert len(group.tips) <= 2 * 4


def test_a_turn_of_80000_tokens_costs_little_more_than_one_of_1000() -> None:
    def least(blocks: int) -> float:
        """Seconds of a session's turn of so many blocks, beside 200 other sessions; 8 us."""
        book, chain = Book(), [hash(("k", i)) for i in range(5000 + blocks)]
        for i in range(200):
            book.ask([*chain[: 10 * i], *(hash((i, j)) for j in range(3000))])
        times: list[float] = []
        for turn in range(200):
            asked = chain[: blocks + 5 * turn]
            begun = perf_counter()
            book.turn(asked)
            times.append(perf_counter() - begun)
        return min(times)

    assert least(4000) < 4 * least(60)


class TestExpectation:
    """What a target displaces next, and whether that is wanted back: the cache holds 100,000 tokens."""

    def worth(self, book: Book, now: float, held: int = 0, renewed_s: float = 1e9) -> float:
        return book.sessions.worth("w", held, now, renewed_s)

    @pytest.fixture
    def book(self) -> Book:
        """One session with all that is displaced next, a turn every 10 s."""
        book = Book()
        chain = keys("a", length=4000)
        for turn in range(8):
            book.ask([*chain, *range(turn)], now=10.0 * turn)
        return book

    def test_blocks_of_a_session_that_comes_back_soon_are_worth_keeping(self, book: Book) -> None:
        assert self.worth(book, 75.0) > 0.9

    def test_and_the_less_the_longer_it_is_away(self, book: Book) -> None:
        worths = [self.worth(book, 70.0 + idle) for idle in (0, 10, 60, 300, 3600)]
        assert worths == sorted(worths, reverse=True)
        assert worths[-1] < 0.05

    def test_and_the_less_the_sooner_they_are_displaced_anyway(self, book: Book) -> None:
        assert self.worth(book, 75.0, renewed_s=10.0) < 0.5 * self.worth(book, 75.0)

    def test_its_end_releases_the_expectation(self, book: Book) -> None:
        book.ask([*keys("a", length=4000), *range(8)], now=80.0, last=True)
        assert self.worth(book, 80.0) == 0.0
        # Unless it comes back all the same.
        book.ask([*keys("a", length=4000), *range(9)], now=81.0)
        assert self.worth(book, 81.0) > 0.9

    def test_what_nobody_comes_back_for_goes_first(self, book: Book) -> None:
        assert self.worth(book, 75.0, held=40_500 + 33_000) == 0.0

    def test_a_session_that_moved_is_expected_elsewhere(self, book: Book) -> None:
        book.ask([*keys("a", length=4000), *range(9)], now=80.0, target="other")
        assert self.worth(book, 80.0) == 0.0
        assert book.sessions.worth("other", 0, 80.0, 1e9) > 0.9

    def test_a_target_that_is_gone_expects_nobody(self, book: Book) -> None:
        book.sessions.forget("w")
        assert self.worth(book, 80.0) == 0.0

    def test_the_longest_unused_is_displaced_first(self, book: Book) -> None:
        book.ask(keys("b", length=4000), now=75.0)
        quiet = self.worth(book, 700.0)
        book.ask([*keys("a", length=4000), *range(9)], now=699.0)
        # Now it is the other one's turn, which has been away as long.
        assert self.worth(book, 700.0) == pytest.approx(quiet, rel=0.5)
        book.ask([*keys("b", length=4000), 1], now=699.5)
        assert self.worth(book, 700.0) > 2 * quiet
