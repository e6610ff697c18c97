"""Who may take a turn, and the reasons that give way rather than cost one."""

from gateway.routing.eligibility import Room, eased, why_nobody, within
from policies.types import Candidate


def excluded(candidates: list[Candidate]) -> list[str]:
    return [candidate.excluded for candidate in candidates]


def test_an_open_breaker_gives_way_when_nobody_else_is_left() -> None:
    failing, down, well = Candidate("a", "breaker"), Candidate("b", "down"), Candidate("c")
    assert excluded(eased([failing, down, well], [1, 1, 1])) == ["breaker", "down", ""]
    assert excluded(eased([failing, down], [1, 1])) == ["", "down"]
    missed = Candidate("d", "missed")
    assert excluded(eased([missed, down, well], [1, 1, 1])) == ["missed", "down", ""]
    assert excluded(eased([missed, down], [1, 1])) == ["", "down"]


def test_who_is_left_as_a_last_resort_has_no_more_room_than_others() -> None:
    full, failing, missed = (
        Candidate("a", inflight=2),
        Candidate("b", "breaker", inflight=2),
        Candidate("c", "missed"),
    )
    given = within(Room(requests=2), [full, failing, missed, Candidate("d", "down", inflight=2)], 0)
    assert excluded(given) == ["full", "full", "missed", "down"]
    assert excluded(eased(given, [])) == ["full", "full", "", "down"]


def test_b048_a_fresh_worker_gets_its_share_and_not_all_that_is_cold() -> None:
    busy = [Candidate(name, inflight=20) for name in "abc"]

    def fresh(inflight: int, ramp: float, local: int = 0) -> str:
        candidate = Candidate("d", inflight=inflight, local_tokens=local)
        return eased([*busy, candidate], [1, 1, 1, ramp])[-1].excluded

    assert fresh(0, 0.0) == ""
    assert fresh(1, 0.0) == "ramp"
    assert fresh(9, 0.5) == ""
    assert fresh(10, 0.5) == "ramp"
    assert fresh(19, 1.0) == ""
    assert fresh(10, 0.5, local=64) == ""


def test_a_ramp_means_nothing_where_everybody_is_new_or_nobody_else_may() -> None:
    all_new = [Candidate("a", inflight=3), Candidate("b", inflight=3)]
    assert excluded(eased(all_new, [0, 0])) == ["", ""]
    assert excluded(eased([Candidate("a", "down"), Candidate("b", inflight=9)], [1, 0])) == ["down", ""]


def test_why_nobody_counts_kinds_and_names_no_worker() -> None:
    said = why_nobody([Candidate("a", "down"), Candidate("b", "down"), Candidate("c", "model")], "m")
    assert said == "no worker can take this turn now: 2 down, 1 without the model 'm'"
