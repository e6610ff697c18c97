"""A plan in the shadow, and comparing plans on turns that were placed."""

from itertools import count
from typing import Any

import pytest

from fleets import turn
from policies.compare import Placed, compare, runner_up
from policies.cost import costs, predicted_ttft
from policies.document import read
from policies.plan import Facts, Plan
from policies.recorded import Outcome
from policies.shadow import Measured, Shadow
from policies.types import Candidate

FLEET = [Candidate("a", local_tokens=9000, queued_tokens=100), Candidate("b")]
HOLDER, LIGHTEST = (Plan(read({"policy": name})) for name in ("longest_prefix", "least_loaded"))


def test_agreement_and_costs_are_summed_by_model_and_size() -> None:
    ticks = count()
    shadow = Shadow(LIGHTEST, lambda: float(next(ticks)))
    for prompt, fleet in ((10_000, FLEET), (500, [Candidate("b")])):
        asked = turn(prompt)
        shadow.observe(asked, fleet, Facts(model="m"), HOLDER.decide(asked, fleet))
    assert (shadow.total.turns, shadow.total.changed, shadow.total.agreement) == (2, 1, 0.5)
    assert shadow.total.uncached_after - shadow.total.uncached_before == 9000
    assert shadow.total.ttft_after > shadow.total.ttft_before
    assert {key: part.changed for key, (part, _) in shadow.parts.items()} == {("m", "16k"): 1, ("m", "2k"): 0}
    assert shadow.seconds == 2.0


def test_what_was_measured_is_held_against_what_the_shadow_expects() -> None:
    shadow = Shadow(LIGHTEST, lambda: 0.0)
    asked, alone = turn(10_000), [Candidate("a")]
    expected = predicted_ttft(costs(asked, alone[0]))

    def ended(fleet: list[Candidate], cached: int | None = 0, **more: Any) -> None:
        shadowed = shadow.observe(asked, fleet, Facts("m"), HOLDER.decide(asked, fleet))
        assert shadowed is not None
        outcome = {"kind": "ok", "status": 200, "ttft_s": 2 * expected, "streams": True} | more
        shadowed.ended(Outcome(cached_tokens=cached, **outcome))

    # Of what can't be measured nothing counts.
    ended(alone, streams=False)
    ended(alone, cached=None)
    ended(alone, kind="error")
    assert shadow.measured == Measured()
    for _ in range(9):
        ended(alone)
    ended(FLEET, cached=8000)
    assert (shadow.measured.same, shadow.measured.moved, shadow.measured.off) == (9, 1, None)
    assert shadow.measured.difference_s is None
    ended(alone)
    assert shadow.measured.off == pytest.approx(2.0)
    # The holder took twice as long as computing all of it elsewhere is expected to take: as long as it would.
    assert shadow.measured.difference_s == pytest.approx(2 * expected - 2 * expected, abs=1e-9)
    assert (shadow.measured.uncached, shadow.measured.uncached_after) == (2000, 10_000)
    ended(FLEET, cached=8000, ttft_s=0.5 * expected)
    assert shadow.measured.difference_s == pytest.approx((2 - 1.25) * expected)
    assert shadow.parts["m", "16k"][1] == shadow.measured


def test_models_told_apart_are_bounded() -> None:
    shadow = Shadow(LIGHTEST, lambda: 0.0)
    for i in range(200):
        shadow.observe(turn(), FLEET, Facts(model=f"m{i}"), HOLDER.decide(turn(), FLEET))
    assert len(shadow.parts) == 65
    assert shadow.parts["other", "16k"][0].turns == 136


def test_turns_are_decided_anew_on_what_their_plan_was_given() -> None:
    guarded = Plan(read({"guards": {"max_queue_tokens": 50}}))
    decision = guarded.decide(turn(), FLEET)
    assert (decision.target, decision.guards) == ("b", ("max_queue_tokens",))
    placed = [Placed(turn(), Facts(), decision)]
    assert compare(placed, guarded).changed == 0
    assert compare(placed, HOLDER).changed == 1


def test_the_runner_up_and_how_far_it_is_behind() -> None:
    decision = HOLDER.decide(turn(), FLEET)
    assert decision.target == "a"
    assert runner_up(decision) == ("b", 10_000 - 1100)
    assert runner_up(HOLDER.decide(turn(), FLEET[:1])) is None
