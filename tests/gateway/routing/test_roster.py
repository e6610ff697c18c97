"""What is kept of targets from one turn to the next is what would be made of them now."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.roster import Roster
from policies.ledger import Ledger
from policies.page import Lease
from policies.sessions import Sessions
from policies.types import Candidate, Turn
from store.knowledge import Knowledge
from workers.breaker import BreakerOptions
from workers.fleet import Fleet
from workers.worker import EngineReport, KvEndpoint, ModelCard

NOW = 100.0
REPORT = EngineReport(block_size=16, blocks=1000)
CARDS = (ModelCard("m"),)
RANKS = tuple(KvEndpoint(rank, f"tcp://h:{rank}", None) for rank in (1, 2))


class Rig:
    def __init__(self) -> None:
        self.now = NOW
        self.fleet = Fleet(breaker=BreakerOptions(failures=2), clock=lambda: self.now)
        self.ledger = Ledger()
        self.leases: list[Lease] = []
        self.kept, self.anew, self.blind = (
            Roster(self.fleet, self.ledger, Knowledge(), Sessions()) for _ in range(3)
        )
        for number in range(3):
            self.up(number)

    def up(self, number: int) -> None:
        name = f"w{number}"
        worker = (
            self.fleet.get(name) if self.fleet.knows(name) else self.fleet.add(f"http://h:{number + 1}", name)
        )
        self.fleet.mark_up(worker, REPORT, CARDS, ())

    def sent(self, target: str, tokens: int = 100) -> None:
        self.leases.append(self.ledger.sent(Turn(tokens, 0.0), Candidate(target), self.now))

    def check(self) -> tuple[Candidate, ...]:
        shown = self.kept.shown("m", self.now)
        self.anew._shown.clear()
        # Else they would take the workers' reports over once more.
        for other in (self.anew, self.blind):
            other._full, other._full_at = self.kept._full, self.kept._full_at
        assert shown == self.anew.shown("m", self.now)
        able = self.blind.shown("m", self.now, loads=False)
        assert [c.excluded for c in able] == [c.excluded for c in shown]
        return shown


EVENTS: dict[str, Callable[[Rig, str], object]] = {
    "sent": lambda rig, name: rig.sent(name),
    "first token": lambda rig, _: rig.leases and rig.leases[0].first_token(rig.now),
    "ended": lambda rig, _: rig.leases and rig.leases.pop().ended(rig.now),
    "reported": lambda rig, name: rig.ledger.reported(name, 500, 3.0),
    "forgotten": lambda rig, name: rig.ledger.forget(name),
    "left": lambda rig, name: rig.ledger.left(name),
    "cordoned": lambda rig, name: rig.fleet.cordon(name, True),
    "uncordoned": lambda rig, name: rig.fleet.cordon(name, False),
    "weighed": lambda rig, name: rig.fleet.weigh(name, 2.0),
    "given a role": lambda rig, name: rig.fleet.give_role(name, "decode"),
    "failed": lambda rig, name: rig.fleet.failed(rig.fleet.get(name), "500"),
    "tried": lambda rig, name: rig.fleet.sent(rig.fleet.get(name)),
    "answered": lambda rig, name: rig.fleet.answered(rig.fleet.get(name)),
    "down": lambda rig, name: rig.fleet.mark_down(rig.fleet.get(name), "away"),
    "missed": lambda rig, name: rig.fleet.mark_down(rig.fleet.get(name), "slow", sure=False),
    "up": lambda rig, name: rig.up(int(name[1:])),
    "another model": lambda rig, name: rig.fleet.mark_up(rig.fleet.get(name), REPORT, (ModelCard("n"),), ()),
    "ranks": lambda rig, name: rig.fleet.mark_up(rig.fleet.get(name), REPORT, CARDS, RANKS),
    "added again": lambda rig, name: (rig.fleet.remove(name), rig.up(int(name[1:]))),
    "later": lambda rig, _: setattr(rig, "now", rig.now + 11.0),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.sampled_from(("w0", "w1", "w2"))), max_size=12))
def test_whatever_happens_it_is_shown_to_the_next_turn(events: list[tuple[str, str]]) -> None:
    rig = Rig()
    rig.check()
    for kind, name in events:
        EVENTS[kind](rig, name)
        rig.check()


def test_a_worker_that_failed_is_tried_when_its_time_has_come() -> None:
    rig = Rig()
    rig.check()
    for _ in range(2):
        rig.fleet.failed(rig.fleet.get("w0"), "500")
    assert [c.excluded for c in rig.check()] == ["breaker", "", ""]
    rig.now += BreakerOptions().open_s
    assert [c.excluded for c in rig.check()] == ["", "", ""]
    rig.fleet.sent(rig.fleet.get("w0"))
    assert [c.excluded for c in rig.check()] == ["breaker", "", ""]


def test_a_worker_that_missed_one_probe_is_itself_again_after_the_next() -> None:
    rig = Rig()
    rig.fleet.mark_down(rig.fleet.get("w0"), "slow", sure=False)
    assert [c.excluded for c in rig.check()] == ["missed", "", ""]
    rig.up(0)
    assert [c.excluded for c in rig.check()] == ["", "", ""]


def test_for_how_long_a_turn_waits_is_shown_to_the_moment() -> None:
    rig = Rig()
    rig.sent("w1", 10_000)
    before = [c.ahead_s for c in rig.check()]
    assert before[1] > before[0] == before[2] == 0
    rig.now += 0.03
    assert [c.ahead_s for c in rig.kept.shown("m", rig.now)] == [0, pytest.approx(before[1] - 0.03), 0]


def test_what_passes_with_time_and_what_workers_report_is_shown_a_tenth_of_a_second_later_at_most() -> None:
    rig = Rig()
    rig.sent("w1", 1000)
    rig.leases[0].first_token(NOW)  # its prompt was computed
    rig.leases[0].ended(NOW)
    assert rig.check()[1].recent_tokens == 1000
    rig.fleet.mark_up(rig.fleet.get("w2"), EngineReport(block_size=16, blocks=1000, waiting=4.0), CARDS, ())
    rig.now += 0.11
    _, spent, busy = rig.kept.shown("m", rig.now)
    assert spent.recent_tokens < 1000
    assert busy.waiting == 4.0


def test_where_nobody_goes_by_loads_they_may_be_a_tenth_of_a_second_old() -> None:
    rig = Rig()

    def inflight(**how: bool) -> int:
        return rig.kept.shown("m", rig.now, **how)[1].inflight

    assert inflight(loads=False) == 0
    rig.sent("w1")
    assert inflight(loads=False) == 0
    assert inflight() == 1
    rig.sent("w1")
    rig.now += 0.11
    assert inflight(loads=False) == 2


def test_who_decodes_what_another_computed_goes_by_loads_under_any_policy() -> None:
    rig = Rig()
    rig.fleet.give_role("w0", "prefill")
    rig.kept.shown("m", NOW, loads=False)
    rig.sent("w1")
    assert rig.kept.shown("m", NOW, loads=False)[1].inflight == 1


def test_turns_of_each_model_are_shown_who_serves_it() -> None:
    rig = Rig()
    rig.fleet.mark_up(rig.fleet.get("w0"), REPORT, (ModelCard("n"),), ())
    for _ in range(2):
        assert [c.excluded for c in rig.kept.shown("m", NOW)] == ["model", "", ""]
        assert [c.excluded for c in rig.kept.shown("n", NOW)] == ["", "model", "model"]
        rig.sent("w0")
    assert [rig.kept.shown(model, NOW)[0].inflight for model in "mn"] == [2, 2]


def test_no_more_models_are_kept_than_a_bound_allows() -> None:
    rig = Rig()
    for number in range(1000):
        rig.kept.shown(f"m{number}", NOW)
    assert len(rig.kept._shown) <= 64
