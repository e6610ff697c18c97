"""What an installed policy can do wrong, and who decides then."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fleets import turn
from policies import plan as plans
from policies.document import Document
from policies.installed import Installed, UnsoundDecision
from policies.plan import Plan
from policies.types import Candidate, Decision

FLEET = [Candidate("cordoned", excluded="cordoned"), Candidate("busy", queued_tokens=9), Candidate("idle")]


def given(**more: Any) -> Callable[..., Any]:
    """A policy whose decision is right but for `more`."""

    def decide(_: Any, candidates: Any) -> Decision:
        fields = {"target": "busy", "action": "recompute", "reason": "so", "policy": "p"}
        return Decision(**fields | {"candidates": candidates} | more)  # type: ignore[arg-type]

    return decide


def raising(error: BaseException) -> Callable[..., Any]:
    def decide(*_: Any) -> Decision:
        raise error

    return decide


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("no name")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Child(Decision):
    pass


async def later(*_: Any) -> None: ...


def clearing(_: Any, candidates: Any) -> Decision:
    candidates.clear()
    return given()(_, candidates)


BAD: dict[str, Callable[..., Any]] = {
    "none": lambda *_: None,
    "dict": lambda *_: {"target": "busy"},
    "coroutine": later,
    "hostile": lambda *_: Hostile(),
    "subclass": lambda _, c: Child("busy", "recompute", "so", "p", c),
    "unset": lambda *_: object.__new__(Decision),
    "raises": raising(RuntimeError("boom")),
    "raises without words": raising(Speechless()),
    "SystemExit": raising(SystemExit(3)),
    "CancelledError": raising(asyncio.CancelledError()),
    "GeneratorExit": raising(GeneratorExit()),
    "unknown target": given(target="nobody:1"),
    "target is no text": given(target=5),
    "cordoned target": given(target="cordoned"),
    "nobody": given(target=None),
    "cleared candidates": clearing,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_decision_for_the_turn_is_a_bad_decision(name: str) -> None:
    with pytest.raises((UnsoundDecision, AttributeError)):
        Installed("bad", BAD[name])(turn(), FLEET)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """A plan whose policy and fallback are installed ones."""
    own = plans.registry.make

    def make(policy: Callable[..., Any], fallback: Callable[..., Any] | None = None) -> Plan:
        bad = {"bad": policy, "worse": fallback}
        monkeypatch.setattr(
            plans.registry,
            "make",
            lambda name, *more: Installed(name, found) if (found := bad.get(name)) else own(name, *more),
        )
        return Plan(Document(policy="bad", fallback="worse" if fallback else "least_loaded"))

    return make


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("fallback_too", [False, True])
def test_a_built_in_policy_decides_where_others_fail(
    made: Callable[..., Plan], name: str, fallback_too: bool
) -> None:
    fleet = list(FLEET)
    decision = made(BAD[name], BAD[name] if fallback_too else None).decide(turn(), fleet)
    assert (decision.target, decision.policy) == ("idle", "least_loaded")
    assert decision.reason == "the policy failed, fallback"
    assert decision.fault
    assert fleet == FLEET


def test_a_good_decision_is_taken_and_carries_the_name_it_is_installed_by(made: Callable[..., Plan]) -> None:
    decision = made(given(policy="p\r\nx: 1", rule=5, guards=None)).decide(turn(), FLEET)
    assert (decision.target, decision.policy, decision.reason, decision.fault) == ("busy", "bad", "so", "")
    assert (decision.rule, decision.guards, decision.candidates) == ("", (), tuple(FLEET))


@pytest.mark.parametrize(
    "more",
    [
        {"action": "fly\r\nx: y"},
        {"action": None},
        {"reason": "so\r\nx: y"},
        {"reason": "\ud800"},
        {"reason": 12345},
        {"reason": Hostile()},
        {"unit": ["s"]},
        {"candidates": ()},
        {"candidates": None},
        {"candidates": (Candidate("busy", local_tokens=-5),)},
    ],
)
def test_what_it_says_besides_its_choice_is_put_right(made: Callable[..., Plan], more: Any) -> None:
    decision = made(given(**more)).decide(turn(), FLEET)
    assert (decision.target, decision.action, decision.unit) == ("busy", "recompute", "")
    assert decision.reason == ("no reason that can be shown" if "reason" in more else "so")
    assert decision.candidates == tuple(FLEET)


def test_reasons_are_cut(made: Callable[..., Plan]) -> None:
    assert made(given(reason="x" * 999)).decide(turn(), FLEET).reason == "x" * 100


@pytest.mark.parametrize(
    "weigh",
    [5, raising(ValueError()), lambda _: None, lambda _: {"a": float("nan")}, lambda _: {"a": "x"}],
)
def test_terms_that_can_not_be_said_are_left_out(made: Callable[..., Plan], weigh: Any) -> None:
    decision = made(given(weigh=weigh)).decide(turn(), FLEET)
    assert decision.target == "busy"
    assert [each.terms for each in decision.scored] == [{}, {}, {}]
