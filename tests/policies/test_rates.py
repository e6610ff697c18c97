"""Rates are learned from turns on the engine model, in virtual time, through the ledger."""

from random import Random

import pytest

from policies.ledger import Ledger
from policies.page import Lease
from policies.rates import InUnits, Learner, Work
from policies.types import BELIEVED, Candidate, Rates, Turn
from workers.sim.engine import Engine, Limits
from workers.sim.engine import Rates as EngineRates
from workers.sim.turn import Started
from workers.sim.turn import Turn as EngineTurn

SLOW = EngineRates(prefill_tok_s=5_000.0, step_s=0.007, decode_seq_s=0.0)
LIMITS = Limits(blocks=100_000, block_size=16)


class Worker:
    """The engine model with a ledger beside it, one turn after another or several at once."""

    def __init__(self, rates: EngineRates, name: str = "w", ledger: Ledger | None = None) -> None:
        self.engine = Engine(LIMITS, rates)
        self.ledger = ledger or Ledger()
        self.name = name
        self.now = 100.0
        self.numbers = iter(range(0, 10**9, 10_000))

    def turns(self, *sizes: int) -> None:
        """All sent at once; returns when each has its first token."""
        leases = {}
        for size in sizes:
            turn = Turn(size, 0.0)
            load = self.ledger.load(self.name, self.now)
            chosen = Candidate(self.name, inflight=load.inflight, queued_turns=load.queued_turns)
            leases[size] = self.ledger.sent(turn, chosen, self.now)
            first = next(self.numbers)
            chain = range(first, first + size // 16 + 2)
            self.engine.advance(self.now)
            self.engine.submit(EngineTurn(chain, size, 1, owner=size), self.now)
        while leases:
            self.now = self.engine.next_at()
            for effect in self.engine.advance(self.now):
                if isinstance(effect, Started):
                    lease = leases.pop(effect.turn.owner)
                    lease.first_token(self.now)
                    lease.ended(self.now)
        self.now += 1.0

    @property
    def rates(self) -> Rates:
        return self.ledger.rates(self.name, self.now)


def seconds(rates: Rates, tokens: int) -> float:
    return tokens * rates.prefill_s + tokens * tokens / 2 * rates.growth_s + rates.first_s


def true_seconds(rates: EngineRates, tokens: int) -> float:
    return tokens / rates.prefill_tok_s + rates.step_s * -(-tokens // LIMITS.step_tokens)


def test_a_workers_prefill_is_known_after_a_few_turns() -> None:
    worker, random = Worker(SLOW), Random(1)
    assert worker.rates == BELIEVED
    for _ in range(12):
        worker.turns(random.randint(500, 9000))
    assert seconds(worker.rates, 4000) == pytest.approx(true_seconds(SLOW, 4000), rel=0.1)
    assert worker.rates.confidence[0] > 0.9
    assert worker.rates.confidence[2] == 0.0
    assert worker.rates.own_s == BELIEVED.own_s


def test_turns_that_queue_behind_each_other_teach_the_same() -> None:
    worker, random = Worker(SLOW), Random(2)
    for _ in range(10):
        worker.turns(*{random.randint(500, 9000) for _ in range(random.randint(2, 20))})
    assert seconds(worker.rates, 4000) == pytest.approx(true_seconds(SLOW, 4000), rel=0.15)


@pytest.mark.parametrize("before", [20, 300])
def test_a_worker_that_slows_to_a_third_is_seen_within_20_turns(before: int) -> None:
    worker, random = Worker(SLOW), Random(3)
    for _ in range(before):
        worker.turns(random.randint(300, 6000))
    slower = EngineRates(SLOW.prefill_tok_s / 3, SLOW.step_s, 0.0)
    worker.engine.rates = slower
    for _ in range(20):
        worker.turns(random.randint(300, 6000))
    assert seconds(worker.rates, 4000) == pytest.approx(true_seconds(slower, 4000), rel=0.15)


def test_of_several_alike_the_one_that_slows_to_a_third_is_seen_within_20_turns_and_only_that() -> None:
    ledger, random = Ledger(), Random(8)
    fleet = [Worker(SLOW, f"w{i}", ledger) for i in range(4)]
    for _ in range(40):
        for worker in fleet:
            worker.turns(random.randint(300, 6000))
    slower = EngineRates(SLOW.prefill_tok_s / 3, SLOW.step_s, 0.0)
    fleet[2].engine.rates = slower
    for _ in range(20):
        for worker in fleet:
            worker.turns(random.randint(300, 6000))
    now = max(worker.now for worker in fleet) + 2.0
    found = [seconds(ledger.rates(worker.name, now), 4000) for worker in fleet]
    assert found.pop(2) == pytest.approx(true_seconds(slower, 4000), rel=0.15)
    assert found == pytest.approx([true_seconds(SLOW, 4000)] * 3, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_a_change_that_noise_hides_in_part_is_seen_as_soon(seed: int) -> None:
    """A third of the speed, but the network is as quick as before: few turns in a row are far off."""
    learner, random = Learner(), Random(seed)

    def turns(count: int, slower: float) -> float:
        for _ in range(count):
            tokens = random.randint(300, 6000)
            took = (0.01 + tokens * 1e-4) * slower * random.lognormvariate(0, 0.2)
            learner.learn(Work(tokens, tokens * tokens / 2, turns=1), took, 1.0)
        return seconds(learner.rates, 4000)

    before = turns(60, 1.0)
    assert turns(12, 2.6) == pytest.approx(before * 2.6, rel=0.25)


def test_one_turn_that_took_long_changes_little() -> None:
    learner, random = Learner(), Random(4)
    for i in range(20):
        tokens = random.randint(500, 9000)
        learner.learn(Work(tokens, tokens * tokens / 2, turns=1), 0.01 + tokens * 1e-4, float(i))
    before = learner.rates.prefill_s
    learner.learn(Work(2000, 2e6, turns=1), 30.0, 21.0)
    assert learner.rates.prefill_s == before


def test_growth_with_context_and_pulls_by_source_are_told_apart() -> None:
    learner, random = Learner(), Random(5)
    true = Rates(1e-4, 2e-9, 3e-5, 9e-5, 0.03, 0.0)
    for i in range(200):
        prompt = random.randint(5_000, 90_000)
        computed = random.randint(200, 4000)
        own = random.choice([0, random.randint(0, prompt - computed)])
        remote = random.choice([0, prompt - computed - own])
        work = Work(computed, computed * (prompt - computed / 2), own, remote, 1.0, 0.0)
        exact = (
            computed * true.prefill_s
            + work.context * true.growth_s
            + own * true.own_s
            + remote * true.remote_s
            + true.first_s
        )
        learner.learn(work, exact * random.uniform(0.95, 1.05), float(i))
    learned = learner.rates
    assert learned.own_s == pytest.approx(true.own_s, rel=0.15)
    assert learned.remote_s == pytest.approx(true.remote_s, rel=0.15)
    # Of a token at 50,000 tokens of context: the two are one where contexts differ little.
    assert learned.prefill_s + 50_000 * learned.growth_s == pytest.approx(2e-4, rel=0.2)


def test_what_is_not_measured_is_not_forgotten() -> None:
    learner = Learner()
    for i in range(30):
        learner.learn(Work(100, 5000, 0, 50_000, 1), 5.0, float(i))
    pulled = learner.rates
    for i in range(200):
        learner.learn(Work(3000, 4.5e6, 0, 0, 1), 0.2, 30.0 + i)
    assert learner.rates.remote_s == pytest.approx(pulled.remote_s, rel=0.02)
    assert learner.rates.confidence[3] > 0.5


def test_rates_are_never_negative() -> None:
    learner, random = Learner(), Random(6)
    for i in range(300):
        tokens = random.randint(1, 9000)
        learner.learn(Work(tokens, tokens * random.random() * 1e5, turns=1), random.expovariate(5), float(i))
        assert min(learner.rates.prefill_s, learner.rates.growth_s, learner.rates.first_s) >= 0
        assert learner.rates.prefill_s > 0


def test_a_new_target_is_taken_to_be_like_the_measured_ones_of_its_model() -> None:
    worker, random = Worker(SLOW), Random(7)
    for _ in range(12):
        worker.turns(random.randint(500, 9000))
    learned = worker.rates
    assert worker.ledger.rates("new", worker.now) == learned
    assert worker.ledger.rates("new", worker.now, "another model") == BELIEVED
    assert learned.prefill_s == pytest.approx(1 / 5000, rel=0.2)


def taught(seed: int, slower: float, alike: Learner, samples: int = 40) -> Learner:
    """A target `slower` times as slow as 10,000 tokens a second, measured 20 % off each time."""
    learner, random = Learner(), Random(seed)
    for i in range(samples):
        tokens = random.randint(500, 9000)
        seconds = (0.02 + tokens * 1e-4) * slower * random.uniform(0.8, 1.2)
        work = Work(tokens, tokens * tokens / 2, turns=1)
        for each in (learner, alike):
            each.learn(work, seconds, float(i))
    return learner


def test_targets_that_are_alike_have_the_same_rates_though_chance_gives_each_its_own() -> None:
    alike = Learner()
    alike.share(8)
    learners = [taught(seed, 1.0, alike) for seed in range(8)]
    assert len({learner.rates for learner in learners}) == 8
    assert {learner.among(alike, 40.0) for learner in learners} == {alike.rates}


def test_one_that_is_slower_has_its_own_and_does_not_make_the_others_look_slow() -> None:
    alike = Learner()
    alike.share(8)
    learners = [taught(seed, 3.0 if seed == 5 else 1.0, alike) for seed in range(8)]
    slow = learners.pop(5)
    assert slow.among(alike, 40.0) == slow.rates
    assert seconds(slow.rates, 4000) == pytest.approx(3 * 0.42, rel=0.2)
    for learner in learners:
        assert seconds(learner.among(alike, 40.0), 4000) == pytest.approx(0.42, rel=0.15)


def test_between_the_two_its_rates_are_mixed() -> None:
    alike = Learner()
    alike.share(8)
    learners = [taught(seed, 1.65 if seed == 5 else 1.0, alike) for seed in range(8)]
    mixed = seconds(learners[5].among(alike, 40.0), 4000)
    assert seconds(alike.rates, 4000) < mixed < seconds(learners[5].rates, 4000)


def test_priors_are_given_in_peoples_units() -> None:
    rates = InUnits(prefill_tokens_per_s=1000, growth_per_1k=0.02, first_step_ms=50).rates()
    assert (rates.prefill_s, rates.growth_s, rates.first_s) == pytest.approx((1e-3, 2e-8, 0.05))


class TestLedger:
    def test_load_is_charged_at_once_and_returned_whatever_the_end(self) -> None:
        ledger = Ledger()
        turn = Turn(1000, 0.0)
        one = ledger.sent(turn, Candidate("w", local_tokens=200), 0.0)
        two = ledger.sent(turn, Candidate("w", pool_tokens=600, own_segment_tokens=100), 0.0)
        load = ledger.load("w", 0.5)
        assert (load.queued_tokens, load.queued_turns, load.inflight) == (1200, 2, 2)
        one.first_token(1.0)
        assert ledger.load("w", 1.5).queued_tokens == 400
        two.ended(2.0)
        two.ended(2.0)
        one.ended(2.0)
        load = ledger.load("w", 2.0)
        assert (load.queued_tokens, load.queued_turns, load.inflight) == (0, 0, 0)

    def test_recent_work_stays_when_nothing_is_in_flight_and_fades(self) -> None:
        ledger = Ledger()
        ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.0).ended(1.0)
        assert ledger.load("w", 60.0).recent_tokens == pytest.approx(500)
        assert ledger.load("w", 120.0).recent_tokens == pytest.approx(250)

    def test_b021_a_prompt_that_is_not_known_is_load_all_the_same(self) -> None:
        ledger = Ledger()
        ledger.sent(Turn(0, 0.0), Candidate("w"), 0.0, guess=300)
        assert ledger.load("w", 0.0).queued_tokens == 300

    def test_an_answer_in_one_piece_is_not_taken_for_a_queue_as_long_as_it_decodes(self) -> None:
        ledger = Ledger()
        ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.0, streams=False)
        assert ledger.load("w", 0.01).queued_tokens == 1000
        assert ledger.load("w", 5.0).queued_tokens == 0
        assert ledger.load("w", 5.0).inflight == 1

    def test_nothing_is_learned_where_nobody_knows_how_long_the_work_took(self) -> None:
        ledger = Ledger()
        ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.0).ended(1.0)  # cancelled
        ledger.sent(Turn(1000, 0.0), Candidate("w"), 2.0).first_token(3.0, answered=False)  # refused
        ledger.sent(Turn(0, 0.0), Candidate("w"), 4.0, guess=10).first_token(5.0)  # prompt not known
        ledger.sent(Turn(9, 0.0), Candidate("w", waiting=9.0), 6.0).first_token(7.0)  # others before it
        assert ledger.samples("w") == 0

    def test_after_that_learning_goes_on_with_the_next_clean_turn(self) -> None:
        ledger = Ledger()
        gone = ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.0)
        leases = [ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.1) for _ in range(3)]
        gone.ended(0.5)
        for i, lease in enumerate(leases):
            lease.first_token(1.0 + i)
        assert ledger.samples("w") == 1
        assert ledger.rates("w", 3.0).prefill_s > 5e-4

    def test_a_target_that_is_forgotten_starts_anew_and_old_leases_do_no_harm(self) -> None:
        ledger = Ledger()
        old = ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.0)
        ledger.forget("w")
        assert ledger.load("w", 0.0).inflight == 0
        old.first_token(1.0)
        old.ended(1.0)
        assert ledger.load("w", 1.0).inflight == 0

    def test_b022_what_a_target_was_sent_to_compute_is_coming_until_its_first_token(self) -> None:
        ledger = Ledger()
        lease = ledger.sent(Turn(100, 0.0), Candidate("w"), 0.0, keys=[1, 2, 3, 4])
        assert ledger.coming("w", [1, 2, 3, 9, 10]) == 3
        assert ledger.coming("w", [5, 2]) == 0
        assert ledger.coming("other", [1]) == 0
        # Who knows what is held there already asks for what is more.
        assert [ledger.coming("w", [1, 2, 3, 9], known) for known in (2, 3, 4)] == [3, 3, 4]
        assert ledger.coming("other", [1, 2], 2) == 2
        lease.first_token(1.0)
        assert ledger.coming("w", [1, 2, 3]) == 0

    def test_b045_what_other_gateways_sent_is_known_from_the_workers_reports(self) -> None:
        gateways = [Ledger(), Ledger()]
        stays = [[g.sent(Turn(1000, 0.0), Candidate("w"), 0.0) for _ in range(20)] for g in gateways]
        for lease in (*stays[0], *stays[1]):
            lease.first_token(1.0)

        def reports(requests: int) -> None:
            for _ in range(20):
                for gateway in gateways:
                    gateway.reported("w", 1000 * requests, requests)

        reports(40)
        for gateway in gateways:
            load = gateway.load("w", 2.0)
            assert load.inflight + load.foreign == pytest.approx(40, abs=0.1)
            assert load.held_tokens == pytest.approx(40_000, rel=0.01)
        # A gateway that is killed tells nobody; its turns end with its connections, and what is known too.
        reports(20)
        load = gateways[0].load("w", 3.0)
        assert load.inflight + load.foreign == pytest.approx(20, abs=0.1)
        # Who has sent nothing there sees it all the same.
        newcomer = Ledger()
        for _ in range(20):
            newcomer.reported("w", 20_000, 20)
        assert newcomer.load("w", 3.0).foreign == pytest.approx(20, abs=0.1)
        assert newcomer.load("w", 3.0).held_tokens == pytest.approx(20_000, rel=0.01)

    def test_b045_own_turns_that_ended_after_a_report_was_made_are_nobody_elses(self) -> None:
        ledger = Ledger()
        for second in range(5):
            ledger.sent(Turn(1000, 0.0), Candidate("w"), second).ended(second + 0.9)
            # Made while the turn was under way, heard of when it had ended.
            ledger.reported("w", 1000, 1)
            assert ledger.load("w", second + 1.0).foreign == 0

    def test_a_head_that_turns_share_is_held_once(self) -> None:
        ledger = Ledger()
        for _ in range(10):
            ledger.sent(Turn(1000, 0.0), Candidate("w", local_tokens=900), 0.0).first_token(0.1)
        assert ledger.load("w", 0.2).held_tokens == 10_000
        for _ in range(20):
            ledger.reported("w", 1900, 10)
        assert ledger.load("w", 0.2).held_tokens == pytest.approx(1900, rel=0.01)
        ledger.sent(Turn(1000, 0.0), Candidate("w", local_tokens=900), 0.2)
        assert ledger.load("w", 0.2).held_tokens == pytest.approx(2900, rel=0.01)


def test_turns_that_one_step_computes_with_one_that_teaches_nothing_teach_nothing_either() -> None:
    """Their first tokens come at once, whichever of them took how long."""
    ledger = Ledger()
    head = ledger.sent(Turn(1000, 0.0), Candidate("w", coming_tokens=800), 0.0)
    others = [ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.0) for _ in range(4)]
    head.first_token(0.5)
    for number, lease in enumerate(others):
        lease.first_token(0.5 + number * 1e-4)
    assert ledger.samples("w") == 0
    assert ledger.rates("w", 0.6) == BELIEVED
    ledger.sent(Turn(1000, 0.0), Candidate("w"), 0.6).first_token(1.1)
    assert ledger.samples("w") == 1


def test_what_was_learned_of_one_holds_for_its_like_at_once_as_long_as_nothing_is_known_of_them() -> None:
    ledger = Ledger()
    for target in ("slow", "other"):
        ledger.sent(Turn(1000, 0.0), Candidate(target), 0.0).ended(0.1)
    assert ledger.rates("slow", 0.2) == ledger.rates("other", 0.2) == BELIEVED
    ledger.sent(Turn(1000, 0.0), Candidate("slow"), 0.2).first_token(0.9)
    assert ledger.rates("other", 0.95) == ledger.rates("slow", 0.95) != BELIEVED


def test_a_busy_target_does_not_seem_faster_for_first_steps_that_overlap() -> None:
    """1.3 s that every turn takes, many at once: HTTP, tokenizing, a hand-over to decode."""
    ledger = Ledger(Rates(prefill_s=4e-5, growth_s=0.0, first_s=1.3, decode_s=0.0))
    expected: dict[str, float] = {}
    for target, every in (("idle", 5.0), ("busy", 0.4)):
        events: list[tuple[float, bool, Lease | None]] = [(every * n, True, None) for n in range(80)]
        free_at = 0.0
        while events:
            now, comes, lease = events.pop(0)
            if comes:
                turn, chosen = Turn(3000, 0.5, block_size=16), Candidate(target)
                free_at = max(free_at, now + 1.3) + 3000 * 4e-5
                events.append((free_at, False, ledger.sent(turn, chosen, now, group=target)))
                events.sort(key=lambda event: event[0])
            elif lease is not None:
                lease.first_token(now)
                lease.ended(now)
        rates = ledger.rates(target, 400.0)
        expected[target] = rates.first_s + 3000 * rates.prefill_s
    assert expected["busy"] > 0.9 * expected["idle"]
