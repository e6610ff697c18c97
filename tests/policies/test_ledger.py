"""What the ledger takes targets for that it knows little of."""

from fleets import turn
from policies.cost import costs, room_seconds
from policies.ledger import Ledger
from policies.types import Candidate


def answered(ledger: Ledger, target: str, *, began: float, ended: float, group: str = "m") -> None:
    ticket = ledger.sent(turn(1000), Candidate(target), began, group=group)
    ticket.first_token(began)
    ticket.ended(ended)


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
