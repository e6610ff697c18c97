"""What the ledger takes targets for that it knows little of."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleets import turn
from policies.cost import costs, predicted_ttft, room_seconds
from policies.expected_ttft import ExpectedTtft
from policies.ledger import Ledger
from policies.page import Lease
from policies.types import Candidate, Rates, Turn

RATES = Rates(1e-3, growth_s=0.0, own_s=2e-5, remote_s=1e-4, first_s=0.5, decode_s=0.0)


def answered(ledger: Ledger, target: str, *, began: float, ended: float, group: str = "m") -> None:
    lease = ledger.sent(turn(1000), Candidate(target), began, group=group)
    lease.first_token(began)
    lease.ended(ended)


def test_where_no_turn_has_ended_they_are_taken_to_last_as_long_as_elsewhere() -> None:
    ledger = Ledger()
    ledger.sent(turn(1000), Candidate("new"), 0.0, group="m").first_token(0.1)
    ledger.sent(turn(1000), Candidate("other"), 0.0, group="another model").first_token(0.1)
    assert ledger.load("new", 1.0).turn_s == 0.0
    ledger.touched()
    answered(ledger, "known", began=1.0, ended=9.0)
    assert ledger.load("new", 9.0).turn_s == 8.0
    assert ledger.load("other", 9.0).turn_s == 0.0
    assert ledger.touched() == {"known", "new"}


def test_what_a_target_shows_itself_goes_before_that() -> None:
    ledger = Ledger()
    answered(ledger, "a", began=0.0, ended=8.0)
    answered(ledger, "b", began=8.0, ended=10.0)
    assert (ledger.load("a", 10.0).turn_s, ledger.load("b", 10.0).turn_s) == (8.0, 2.0)


def test_a_full_cache_that_nothing_has_left_yet_is_no_reason_to_go_there() -> None:
    ledger = Ledger()
    answered(ledger, "known", began=0.0, ended=8.0)
    ledger.sent(turn(60_000), Candidate("full"), 8.0, group="m").first_token(8.5)
    load = ledger.load("full", 9.0)
    full = Candidate(
        "full",
        held_tokens=load.held_tokens,
        decoding_tokens=load.decoding_tokens,
        capacity_tokens=65_536,
        turn_s=load.turn_s,
    )
    asked = turn(10_000)
    assert room_seconds(asked, full) > 0.5
    assert sum(costs(asked, full)) > sum(costs(asked, Candidate("empty", capacity_tokens=65_536)))


@given(decoding=st.integers(0, 20_000), waiting=st.integers(0, 40_000), prompt=st.integers(1, 16_000))
def test_room_comes_back_as_turns_end_whoever_decodes_so_far(
    decoding: int, waiting: int, prompt: int
) -> None:
    """Of a cache for 16,000 tokens, by turns that decode for 2 s."""

    def wait_s(decoding: int, waiting: int) -> float:
        held = decoding + waiting
        full = Candidate("w", held_tokens=held, decoding_tokens=decoding, capacity_tokens=16_000, turn_s=2.0)
        return room_seconds(turn(prompt), full)

    # A report may be off by a few tokens: 15 of the 4,000 that are taken to decode at least.
    assert wait_s(decoding + 15, waiting) == pytest.approx(wait_s(decoding, waiting), rel=0.004, abs=0.008)
    assert wait_s(decoding, waiting) <= wait_s(decoding, waiting + 1)


def test_b005_leases_come_back_from_every_path_and_only_once() -> None:
    ledger = Ledger()
    one, two = (ledger.sent(turn(tokens), Candidate("w"), 0.0) for tokens in (100, 50))

    def under_way() -> tuple[float, ...]:
        load, total = ledger.load("w", 0.0), ledger.total
        assert (load.queued_tokens, load.inflight) == (total.queued_tokens, total.inflight)
        return load.queued_tokens, load.inflight

    assert under_way() == (150, 2)
    one.first_token(0.0)
    one.first_token(0.0)
    assert under_way() == (50, 2)
    one.ended(0.0)
    one.ended(0.0)
    one.first_token(0.0)
    assert under_way() == (50, 1)
    two.ended(0.0)
    two.first_token(0.0)
    assert under_way() == (0, 0)


def test_what_was_sent_to_a_target_that_is_gone_comes_back_too() -> None:
    ledger = Ledger()
    lease = ledger.sent(turn(100), Candidate("w"), 0.0)
    ledger.forget("w")
    again = ledger.sent(turn(10), Candidate("w"), 0.0)
    lease.ended(1.0)
    assert (ledger.total.queued_tokens, ledger.total.inflight) == (10, 1)
    assert ledger.load("w", 1.0).inflight == 1
    again.ended(1.0)
    assert (ledger.total.queued_tokens, ledger.total.inflight) == (0, 0)


def test_a_target_that_left_and_came_back_still_has_the_turns_it_was_sent() -> None:
    ledger = Ledger()
    answered(ledger, "w", began=0.0, ended=8.0)
    lease = ledger.sent(turn(100), Candidate("w"), 8.0)
    ledger.left("w")
    load = ledger.load("w", 8.0)
    assert (load.inflight, load.recent_tokens, load.turn_s, ledger.samples("w")) == (1, 0.0, 8.0, 0)
    again = ledger.sent(turn(10), Candidate("w"), 8.0)
    load, total = ledger.load("w", 8.0), ledger.total
    assert (load.inflight, load.queued_tokens) == (total.inflight, total.queued_tokens) == (2, 110)
    for each in (lease, again):
        each.ended(9.0)
    assert (ledger.load("w", 9.0).inflight, total.inflight, total.queued_tokens) == (0, 0, 0)


@pytest.mark.parametrize("refused", [True, False])
def test_a_turn_on_a_target_that_left_ends_on_a_machine_that_is_up_for_a_day(refused: bool) -> None:
    ledger, day = Ledger(RATES), 86_400.0
    lease = ledger.sent(turn(1000), Candidate("w"), day, group="m")
    ledger.left("w")
    if refused:
        lease.first_token(day + 0.1, answered=False)
    lease.ended(day + 0.1)
    load = ledger.load("w", day + 0.1)
    assert (load.inflight, load.queued_turns, load.recent_tokens) == (0, 0, 0.0)
    assert (ledger.total.inflight, ledger.total.queued_tokens) == (0, 0.0)


def test_targets_that_left_are_forgotten_when_their_turns_have_ended() -> None:
    ledger = Ledger()
    for number in range(9):
        lease = ledger.sent(turn(100), Candidate(f"w{number}"), 0.0)
        ledger.left(f"w{number}")
        lease.ended(1.0)
    ledger.sent(turn(100), Candidate("stays"), 1.0).ended(2.0)
    ledger.left("another")
    assert set(ledger.targets()) == {"stays"}


def sent(ledger: Ledger, tokens: int, at: float, target: str = "w") -> Lease:
    return ledger.sent(turn(tokens), Candidate(target), at)


class TestAhead:
    """RATES: a turn of 1,000 tokens takes a second, and half a second that nobody waits for."""

    def test_turns_wait_for_the_work_of_those_before_them_and_for_nothing_else(self) -> None:
        ledger = Ledger(RATES)
        assert ledger.load("w", 0.0).ahead_s == 0.0
        sent(ledger, 1000, 0.0)
        assert ledger.load("w", 0.0).ahead_s == pytest.approx(1.0)
        sent(ledger, 2000, 0.2)
        assert ledger.load("w", 0.2).ahead_s == pytest.approx(2.8)
        assert ledger.load("w", 1.2).ahead_s == pytest.approx(1.8)

    def test_no_work_is_done_before_it_is_there(self) -> None:
        ledger = Ledger(RATES)
        sent(ledger, 100, 0.0)
        sent(ledger, 1000, 2.0).first_token(2.0)
        sent(ledger, 1000, 2.0)
        assert ledger.load("w", 2.0).ahead_s == pytest.approx(1.0)

    def test_the_first_token_of_one_is_when_the_next_begins(self) -> None:
        ledger = Ledger(RATES)
        first = sent(ledger, 1000, 0.0)
        sent(ledger, 2000, 0.0)
        first.first_token(2.5)
        assert ledger.load("w", 2.5).ahead_s == pytest.approx(1.5)

    def test_one_that_is_late_keeps_those_behind_it_as_long_and_one_that_hangs_as_long_again(self) -> None:
        ledger = Ledger(RATES)
        sent(ledger, 1000, 0.0)
        sent(ledger, 2000, 0.0)
        assert ledger.load("w", 2.0).ahead_s == pytest.approx(1.5)
        assert ledger.load("w", 2.4).ahead_s == pytest.approx(1.5)
        assert ledger.load("w", 11.5).ahead_s == pytest.approx(11.5)


def test_what_a_turn_pulls_is_not_coming_for_those_behind_it() -> None:
    """They come before it is there, find it in the pool, and pull it too: all at once, from one source."""
    ledger = Ledger()
    ledger.sent(turn(1000), Candidate("pulls", pool_tokens=512), 0.0, keys=[1, 2, 3])
    ledger.sent(turn(1000), Candidate("computes"), 0.0, keys=[1, 2, 3])
    assert (ledger.coming("pulls", [1, 2, 3, 4]), ledger.coming("computes", [1, 2, 3, 4])) == (0, 3)


@pytest.mark.parametrize("prior", [0.02, 1.3])
def test_what_every_turn_takes_anyway_is_learned_and_is_no_queue(prior: float) -> None:
    """1.3 s that all turns take at once (HTTP, tokenizing, a hand-over to decode), and 0.12 s one by one."""
    ledger, random = Ledger(Rates(prefill_s=4e-5, growth_s=0.0, first_s=prior, decode_s=0.0)), Random(1)
    now = free_at = 0.0
    awaited: list[tuple[float, Lease]] = []
    off: list[float] = []
    while now < 200.0:
        now += random.expovariate(2.5)
        while awaited and awaited[0][0] <= now:
            at, lease = awaited.pop(0)
            lease.first_token(at)
            lease.ended(at)
        load = ledger.load("w", now)
        shown = Candidate("w", inflight=load.inflight, ahead_s=load.ahead_s, rates=ledger.rates("w", now))
        tokens = random.randint(100, 6000)
        free_at = max(free_at, now + 1.3) + tokens * 4e-5
        asked = Turn(tokens, 0.5)
        off.append(predicted_ttft(costs(asked, shown)) - (free_at - now))
        awaited.append((free_at, ledger.sent(asked, shown, now)))
    assert len(awaited) > 1
    assert max(abs(each) for each in off[300:]) < 0.1


class Pair:
    """Two workers, of which one holds a conversation of about 1,000 tokens. Both have had some turns."""

    def __init__(self, seed: int) -> None:
        self.ledger, self.random, self.now, self.prompt = Ledger(), Random(seed), 100.0, 400
        for _ in range(3):
            self.answer("holder", 400, 1.0)
            self.answer("other", 400, 1.0)

    def answer(self, target: str, computed: int, slower: float, more_s: float = 0.0) -> None:
        self.now += 2.0
        local = max(0, self.prompt - computed)
        lease = self.ledger.sent(Turn(self.prompt, 0.0), Candidate(target, local_tokens=local), self.now)
        took = (0.04 + computed * 1e-4) * slower * self.random.uniform(0.9, 1.1) + more_s
        lease.first_token(self.now + took)
        lease.ended(self.now + took + 0.5)

    def next(self) -> str | None:
        """Where the next turn goes, 5 s later."""
        self.prompt += 100
        now = self.now + 5.0
        fleet: list[Candidate] = []
        for target, local in (("holder", self.prompt - 100), ("other", 0)):
            load = self.ledger.load(target, now)
            fleet.append(
                Candidate(
                    target,
                    local_tokens=local,
                    ahead_s=load.ahead_s,
                    recent_tokens=load.recent_tokens,
                    recent_s=load.recent_s,
                    rates=self.ledger.rates(target, now),
                )
            )
        return ExpectedTtft()(Turn(self.prompt, 0.0), fleet).target


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("hiccup_s", [0.03, 0.08, 0.3])
def test_an_idle_holder_keeps_a_short_conversation_after_a_hiccup(seed: int, hiccup_s: float) -> None:
    pair = Pair(seed)
    for _ in range(4):
        assert pair.next() == "holder"
        pair.answer("holder", 100, 1.0)
    pair.answer("holder", 100, 1.0, hiccup_s)
    assert pair.next() == "holder"


@pytest.mark.parametrize("seed", range(20))
def test_one_that_is_slower_is_left_after_some_turns_and_tried_again_after_minutes(seed: int) -> None:
    pair = Pair(seed)
    turns = 0
    while pair.next() == "holder":
        pair.answer("holder", 100, 6.0)
        turns += 1
        assert turns <= 8
    assert turns >= 2
    pair.now += 900.0
    for _ in range(5):
        pair.answer("other", 100, 1.0)
    now = pair.now + 5.0
    holder, other = (pair.ledger.rates(target, now) for target in ("holder", "other"))
    assert holder.first_s + 100 * holder.prefill_s < 1.2 * (other.first_s + 100 * other.prefill_s)


@pytest.mark.parametrize("refused", [True, False])
def test_what_was_not_done_of_a_turn_is_no_recent_work(refused: bool) -> None:
    ledger = Ledger(RATES)
    for each in range(3):
        lease = ledger.sent(turn(1000), Candidate("a"), float(each), group="m")
        if refused:
            lease.first_token(each + 0.1, answered=False)
        lease.ended(each + 0.1)
    # A tenth of a second each, at a token in a millisecond.
    assert 290 < ledger.load("a", 2.1).recent_tokens <= 300
    lease = ledger.sent(turn(1000), Candidate("a"), 3.0, group="m")
    lease.first_token(3.1)
    lease.ended(3.1)
    assert ledger.load("a", 3.1).recent_tokens > 1200


def did(ledger: Ledger, target: str, turns: int, at: float, *, group: str = "m", weight: float = 1.0) -> None:
    """So many turns of 1,000 tokens, a second of work each."""
    for _ in range(turns):
        lease = ledger.sent(turn(1000), Candidate(target, rates=RATES, weight=weight), at, group=group)
        lease.first_token(at)
        lease.ended(at)


@given(turns=st.lists(st.integers(1, 60), min_size=1, max_size=5), own=st.integers(0, 80))
def test_who_is_back_is_taken_to_have_done_ten_turns_less_than_others(turns: list[int], own: int) -> None:
    """Not nothing: it would seem idle for minutes, and all would come at once."""
    ledger = Ledger(RATES, learns=False)
    for number, count in enumerate(turns):
        did(ledger, f"w{number}", count, 0.0)
    did(ledger, "back", own, 0.0)
    did(ledger, "of another model", 500, 0.0, group="another")
    ledger.touched()
    ledger.back("back", 60.0, groups=("unheard of", "m", "another"))
    # A turn of a minute ago counts half.
    as_if_done = max(own / 2, sum(turns) / len(turns) / 2 - 10)
    load = ledger.load("back", 60.0)
    assert load.recent_s == pytest.approx(as_if_done)
    assert load.recent_tokens == pytest.approx(1000 * as_if_done)
    assert (load.inflight, load.queued_turns, ledger.samples("back")) == (0, 0, 0)
    assert ledger.touched() == {"back"}
    # It fades as what was done does.
    assert ledger.load("back", 120.0).recent_s == pytest.approx(as_if_done / 2)


def test_who_is_back_with_a_tenth_of_the_weight_is_taken_to_have_done_a_tenth() -> None:
    ledger = Ledger(RATES, learns=False)
    did(ledger, "one", 200, 0.0)
    did(ledger, "two", 400, 0.0, weight=2.0)
    ledger.back("back", 0.0, groups=("m",), weight=0.1)
    assert ledger.load("back", 0.0).recent_s == pytest.approx(20 - 10)


def test_where_nobody_did_anything_who_comes_is_idle() -> None:
    ledger = Ledger(RATES)
    ledger.back("first", 0.0, groups=("m",))
    did(ledger, "first", 1, 0.0)
    ledger.back("second", 0.0, groups=("m",))
    assert ledger.load("second", 0.0).recent_s == 0.0
