"""A plan in the shadow, and comparing plans on turns that were placed."""

from itertools import count

from fleets import turn
from policies.compare import Placed, compare, runner_up
from policies.document import read
from policies.plan import Facts, Plan
from policies.shadow import Shadow
from policies.types import Candidate

FLEET = [Candidate("a", local_tokens=9000, queued_tokens=100), Candidate("b")]
HOLDER, LIGHTEST = Plan(read({})), Plan(read({"policy": "least_loaded"}))


def test_agreement_and_costs_are_summed_by_model_and_size() -> None:
    ticks = count()
    shadow = Shadow(LIGHTEST, lambda: float(next(ticks)))
    for prompt, fleet in ((10_000, FLEET), (500, [Candidate("b")])):
        asked = turn(prompt)
        shadow.observe(asked, fleet, Facts(model="m"), HOLDER.decide(asked, fleet))
    assert (shadow.total.turns, shadow.total.changed, shadow.total.agreement) == (2, 1, 0.5)
    assert shadow.total.uncached_after - shadow.total.uncached_before == 9000
    assert shadow.total.ttft_after > shadow.total.ttft_before
    assert {key: part.changed for key, part in shadow.parts.items()} == {("m", "16k"): 1, ("m", "2k"): 0}
    assert shadow.seconds == 2.0


def test_models_told_apart_are_bounded() -> None:
    shadow = Shadow(LIGHTEST, lambda: 0.0)
    for i in range(200):
        shadow.observe(turn(), FLEET, Facts(model=f"m{i}"), HOLDER.decide(turn(), FLEET))
    assert len(shadow.parts) == 65
    assert shadow.parts["other", "16k"].turns == 136


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
