"""The policy document: what it says, what it refuses, and what decides in its place."""

import tomllib
from typing import Any

import pytest

from fleets import turn
from policies import registry
from policies.document import BadDocument, Document, plain, read, schema
from policies.plan import Facts, Plan
from policies.types import Candidate, Decision

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"polcy": "random"}, "polcy", "allowed: policy, options, rules, guards, fallback"),
    ({"policy": "fastest"}, "policy", "allowed: expected_ttft, least_loaded"),
    ({"policy": 3}, "policy", "Expected str, got int"),
    (
        {"policy": "longest_prefix", "options": {"margin": 1}},
        "options.margin",
        "it takes margin_tokens, new_recent_weight, pull_cost",
    ),
    ({"policy": "longest_prefix", "options": {"pull_cost": -1}}, "options.pull_cost", "Expected float >= 0"),
    ({"rules": [{}, {"polcy": "x"}]}, "rules[1].polcy", "allowed: name, match, policy"),
    ({"rules": [{"policy": "x"}]}, "rules[0].policy", "allowed: expected_ttft"),
    ({"rules": [{"match": {"modell": []}}]}, "rules[0].match.modell", "allowed: model, alias"),
    (
        {"rules": [{"match": {"api": ["chat", "smtp"]}}]},
        "rules[0].match.api[1]",
        "allowed: chat, completions",
    ),
    ({"rules": [{"match": {"key": ["a", 3]}}]}, "rules[0].match.key[1]", "Expected str, got int"),
    ({"rules": [{"match": {"tenant": [""]}}]}, "rules[0].match.tenant[0]", "length >= 1"),
    (
        {"rules": [{"match": {"header": {"X-Tenant": "a"}}}]},
        "rules[0].match.header.X-Tenant",
        "allowed: lower-case letters",
    ),
    (
        {"rules": [{"match": {"min_prompt_tokens": 9, "max_prompt_tokens": 8}}]},
        "rules[0].match.min_prompt_tokens",
        "allowed: up to 8",
    ),
    ({"rules": [{"workers": "big-*"}]}, "rules[0].workers", "Expected array"),
    ({"rules": [{"spill": "no"}]}, "rules[0].spill", "allowed: true, false"),
    ({"rules": [{"options": {"x": 1}}]}, "rules[0].options.x", "has no option x"),
    ({"guards": {"max_inflight": 0}}, "guards.max_inflight", "Expected int >= 1"),
    ({"fallback": "nobody"}, "fallback", "allowed: expected_ttft"),
    ({"rules": {}}, "rules", "Expected array"),
]


@pytest.mark.parametrize(("given", "path", "says"), WRONG, ids=[w[1] for w in WRONG])
def test_what_is_wrong_is_named_with_what_is_allowed(given: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(BadDocument) as caught:
        read(given)
    assert caught.value.path == path
    assert says in str(caught.value)


def test_anything_but_a_table_is_refused() -> None:
    for given in ([], "random", None, 3):
        with pytest.raises(BadDocument):
            read(given)


def test_what_was_read_reads_the_same_again() -> None:
    given = {
        "policy": "expected_ttft",
        "rules": [{"name": "long", "match": {"min_prompt_tokens": 50_000}, "workers": ["big-*"]}],
        "guards": {"max_inflight": 8},
    }
    document = read(given)
    assert read(plain(document)) == document
    assert plain(read({})) == {"policy": "expected_ttft"}
    # What is kept must mean the same after the default has changed.
    assert plain(read({"policy": "random", "rules": [{"name": "x"}]})) == {
        "policy": "random",
        "rules": [{"name": "x", "policy": "expected_ttft"}],
    }


def test_the_schema_names_policies_and_their_options() -> None:
    found = schema()
    assert "expected_ttft" in found["$defs"]["Rule"]["properties"]["policy"]["enum"]
    assert "margin_tokens" in found["$defs"]["LongestPrefixOptions"]["properties"]
    assert found["$defs"]["Guards"]["additionalProperties"] is False


FLEET = [Candidate("big-1"), Candidate("big-2"), Candidate("small-1", local_tokens=64)]


def decide(toml: str, prompt: int = 100, fleet: list[Candidate] = FLEET, **facts: Any) -> Decision:
    document = {"policy": "longest_prefix", **tomllib.loads(toml)}
    return Plan(read(document)).decide(turn(prompt), fleet, Facts(**facts))


RULES = """
policy = "longest_prefix"
[[rules]]
name = "long"
match = {min_prompt_tokens = 1000}
policy = "least_loaded"
workers = ["big-*"]
[[rules]]
match = {model = ["q*"], api = ["chat"], header = {x-tenant = "gold*"}}
policy = "random"
workers = ["big-2"]
[[rules]]
name = "acme"
match = {tenant = ["acme"], key = ["ci-*", "sha256:0123456789ab"]}
policy = "random"
workers = ["big-1"]
[[rules]]
name = "closed"
match = {alias = ["fast"]}
workers = ["none-*"]
spill = false
"""


@pytest.mark.parametrize(
    ("prompt", "facts", "policy", "rule", "targets"),
    [
        (100, {}, "longest_prefix", "", {"small-1"}),
        (1000, {}, "least_loaded", "long", {"big-1", "big-2"}),
        (
            100,
            {"model": "qwen", "api": "chat", "headers": {"x-tenant": "gold-7"}},
            "random",
            "rules[1]",
            {"big-2"},
        ),
        (100, {"model": "qwen", "api": "chat"}, "longest_prefix", "", {"small-1"}),
        (
            100,
            {"model": "qwen", "api": "messages", "headers": {"x-tenant": "gold"}},
            "longest_prefix",
            "",
            {"small-1"},
        ),
        (100, {"model": "x", "alias": "fast"}, "expected_ttft", "closed", {None}),
        (100, {"tenant": "acme", "key": "sha256:0123456789ab"}, "random", "acme", {"big-1"}),
        (100, {"tenant": "acme", "key": "ci-2"}, "random", "acme", {"big-1"}),
        (100, {"tenant": "acme", "key": "other"}, "longest_prefix", "", {"small-1"}),
        (100, {"tenant": "b", "key": "ci-2"}, "longest_prefix", "", {"small-1"}),
    ],
)
def test_the_first_rule_that_matches_decides(
    prompt: int, facts: dict[str, Any], policy: str, rule: str, targets: set[str | None]
) -> None:
    decision = decide(RULES, prompt, **facts)
    assert (decision.policy, decision.rule) == (policy, rule)
    assert decision.target in targets


def test_a_rules_workers_that_can_not_be_chosen_let_others_in() -> None:
    fleet = [Candidate("big-1", excluded="down"), Candidate("small-1")]
    assert decide(RULES, 1000, fleet).target == "small-1"


def test_a_rank_goes_by_its_workers_name() -> None:
    assert decide(RULES, 1000, [Candidate("big-1@3"), Candidate("other@0")]).target == "big-1@3"


GUARDS = [
    ("max_queue_tokens = 500", {"queued_tokens": 501}, True),
    ("max_queue_tokens = 500", {"queued_tokens": 500}, False),
    ("max_inflight = 4", {"inflight": 4}, True),
    ("max_inflight = 4", {"inflight": 3}, False),
    ("max_imbalance = 1.5\nimbalance_slack_tokens = 0", {"recent_tokens": 100.0}, True),
    ("max_imbalance = 1.5", {"recent_tokens": 100.0}, False),
]


@pytest.mark.parametrize(("guard", "load", "fires"), GUARDS)
def test_a_guard_keeps_turns_from_a_target_beyond_its_bound(
    guard: str, load: dict[str, Any], fires: bool
) -> None:
    fleet = [Candidate("a", local_tokens=90, **load), Candidate("b")]
    decision = decide(f"[guards]\n{guard}", fleet=fleet)
    assert decision.target == ("b" if fires else "a")
    name = guard.split(" ", 1)[0]
    assert decision.guards == ((name,) if fires else ())
    assert decision.candidates[0].excluded == (name if fires else "")


@pytest.mark.parametrize("name", registry.names())
def test_what_happens_to_a_prompt_that_is_not_known_is_not_said(name: str) -> None:
    plan = Plan(read({"policy": name}))
    assert plan.decide(turn(0), FLEET).action == "none"
    assert plan.decide(turn(100), FLEET[:2]).action == "recompute"
    assert plan.decide(turn(100), FLEET[2:]).action == "local"


def test_a_guard_that_would_leave_nobody_lets_go() -> None:
    fleet = [Candidate("a", local_tokens=90, inflight=9), Candidate("b", inflight=8)]
    assert decide("[guards]\nmax_inflight = 4", fleet=fleet).target == "a"


def test_rules_and_guards_let_go_rather_than_leave_nobody_who_decodes() -> None:
    apart = [Candidate("big-1", role="prefill"), Candidate("small-1", role="decode", inflight=9)]
    placed = decide(RULES, 1000, apart)
    assert (placed.target, placed.decode) == ("big-1", "small-1")
    guarded = decide("[guards]\nmax_inflight = 4", fleet=apart)
    assert (guarded.target, guarded.decode, guarded.guards) == ("big-1", "small-1", ())


def test_a_prefix_too_short_to_follow_is_shown_but_does_not_count() -> None:
    fleet = [Candidate("a", local_tokens=90, queued_tokens=1), Candidate("b")]
    decision = decide("[guards]\nmin_prefix_tokens = 91", fleet=fleet)
    assert decision.target == "b"
    assert decision.candidates[0].local_tokens == 90
    assert decision.scored[0].terms["compute"] == 100
    assert decide("[guards]\nmin_prefix_tokens = 90", fleet=fleet).target == "a"


def test_a_policy_that_fails_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(Document())

    def fail(*_: object) -> Decision:
        raise RuntimeError

    monkeypatch.setattr(plan, "_default", fail)
    decision = plan.decide(turn(), FLEET)
    assert decision.target is not None
    assert (decision.policy, decision.reason) == ("least_loaded", "the policy failed, fallback")
