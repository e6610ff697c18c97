"""A fleet as columns says of every target what its candidate says, and leaves out nobody who could win."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleets import candidates, turn, turns
from policies import registry
from policies.columns import Columns, Shortlists, total_costs
from policies.cost import costs
from policies.types import Candidate, Turn

SHORT = [name for name in registry.names() if isinstance(registry.make(name), Shortlists)]


def test_those_that_hundreds_of_targets_are_shown_to_keep_a_shortlist() -> None:
    assert {"expected_ttft", "longest_prefix"} <= {*SHORT}


@given(fleet=candidates(), asked=turns, recent_weight=st.floats(0, 2))
def test_costs_at_once_are_the_costs_of_each(
    fleet: list[Candidate], asked: Turn, recent_weight: float
) -> None:
    together = total_costs(asked, Columns.of(fleet), recent_weight)
    for each, found in zip(fleet, together.tolist(), strict=True):
        assert found == pytest.approx(sum(costs(asked, each, recent_weight)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", SHORT)
@given(fleet=candidates(16), asked=turns, alike=st.booleans(), off=st.floats(0, 1))
def test_of_a_shortlist_the_same_one_is_chosen(
    name: str, fleet: list[Candidate], asked: Turn, alike: bool, off: float
) -> None:
    """off: recent work as columns know it is up to a token, or 0.05 ms, more than it is."""
    if alike:
        fleet = [replace(fleet[0], target=each.target) for each in fleet]
    policy = registry.make(name)
    assert isinstance(policy, Shortlists)
    told = [
        replace(each, recent_tokens=each.recent_tokens + off, recent_s=each.recent_s + off / 20_000)
        if n % 2
        else each
        for n, each in enumerate(fleet)
    ]
    listed = policy.shortlist(asked, Columns.of(told)).tolist()
    short = [fleet[place] for place in listed]
    assert policy(asked, short).target == policy(asked, fleet).target
    assert not any(each.excluded for each in short)


def test_few_are_listed_where_one_stands_out() -> None:
    idle = [
        Candidate(f"w{n}", pool_tokens=9_000, recent_tokens=1_000.0 * n, recent_s=0.05 * n)
        for n in range(200)
    ]
    fleet = [*idle, Candidate("holder", local_tokens=9_000, pool_tokens=9_000)]
    for name in SHORT:
        policy = registry.make(name)
        assert isinstance(policy, Shortlists)
        assert len(policy.shortlist(turn(9_500), Columns.of(fleet))) < 20
