"""Policies by name: own ones, installed ones, and what is said of those that can't be had."""

from pathlib import Path
from typing import Any

import pytest
from installing import Install, installer

from fleets import turn
from policies import registry
from policies.document import read
from policies.plan import Plan
from policies.types import Candidate


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one policy on the path, as pip would."""
    return installer(tmp_path, monkeypatch)


def test_unknown_names_and_options_say_what_exists() -> None:
    with pytest.raises(registry.UnknownPolicy, match="expected_ttft, least_loaded, longest_prefix"):
        registry.make("fastest")
    with pytest.raises(registry.BadPolicyOptions, match=r"no option margin; .*margin_tokens"):
        registry.make("longest_prefix", {"margin": 3})
    with pytest.raises(registry.BadPolicyOptions, match="margin_tokens: Expected float, got str"):
        registry.make("longest_prefix", {"margin_tokens": "many"})
    with pytest.raises(registry.BadPolicyOptions, match="pull_cost: Expected float >= 0"):
        registry.make("longest_prefix", {"pull_cost": -1})
    with pytest.raises(registry.BadPolicyOptions, match="takes none"):
        registry.make("random", {"margin": 3})


@pytest.mark.parametrize(
    ("document", "weighs"),
    [
        ({"policy": "round_robin"}, False),
        ({"policy": "random", "rules": [{"policy": "round_robin"}]}, False),
        ({"policy": "round_robin", "rules": [{"policy": "least_loaded"}]}, True),
        ({"policy": "round_robin", "guards": {"max_inflight": 3}}, True),
        ({"policy": "session"}, True),
        ({}, True),
    ],
)
def test_a_plan_says_whether_it_goes_by_more_than_who_may_be_chosen(
    document: dict[str, Any], weighs: bool
) -> None:
    assert Plan(read(document)).weighs == weighs


def test_an_installed_policy_is_found_by_name(install: Install) -> None:
    install(
        "alphabetical",
        "from policies.types import Decision\n"
        "def make(options):\n"
        "    def decide(turn, candidates):\n"
        "        chosen = min(c.target for c in candidates if not c.excluded)\n"
        "        return Decision(chosen, 'local', options['why'], 'alphabetical', tuple(candidates))\n"
        "    return decide\n",
    )
    assert "alphabetical" in registry.names()
    decision = registry.make("alphabetical", {"why": "first"})(turn(), [Candidate("b"), Candidate("a")])
    assert (decision.target, decision.reason) == ("a", "first")


def test_an_installed_policy_can_declare_its_options(install: Install) -> None:
    install(
        "declared",
        "import msgspec\n"
        "class Options(msgspec.Struct):\n"
        "    size: int = 1\n"
        "def make(options): return options\n"
        "make.Options = Options\n",
    )
    with pytest.raises(registry.BadPolicyOptions, match="declared has no option sise; it takes size"):
        registry.make("declared", {"sise": 3})


def test_a_policy_that_can_not_be_made_is_named(install: Install) -> None:
    install("broken", "raise RuntimeError('no licence')\n")
    assert "broken" in registry.names()
    with pytest.raises(registry.BrokenPolicy, match=r"broken: installed_broken:make .* no licence"):
        registry.make("broken")


def test_own_names_can_not_be_taken(install: Install) -> None:
    install("random", "def make(options): raise AssertionError\n")
    assert registry.names().count("random") == 1
    registry.make("random")


UNSOUND = {
    "raises": "raise RuntimeError('no licence')",
    "nobody": "return Decision(None, 'none', 'no idea', 'own', tuple(candidates))",
    "stranger": "return Decision('elsewhere', 'local', 'why', 'own', tuple(candidates))",
    "excluded": "return Decision('down', 'local', 'why', 'own', tuple(candidates))",
    "of its own making": "return Decision('x', 'local', 'why', 'own', (Candidate('x'),))",
    "a list": "return Decision(['a'], 'local', 'why', 'own', tuple(candidates))",
    "a name": "return 'a'",
    "nothing": "return None",
}


@pytest.mark.parametrize("fallback", ["round_robin", "unsound"])
@pytest.mark.parametrize("fault", UNSOUND)
def test_where_an_installed_policy_fails_the_fallback_decides(
    install: Install, fault: str, fallback: str
) -> None:
    install(
        "unsound",
        "from policies.types import Candidate, Decision\n"
        "def make(options):\n"
        "    def decide(turn, candidates):\n"
        f"        {UNSOUND[fault]}\n"
        "    return decide\n",
    )
    fleet = [Candidate("down", excluded="down", local_tokens=900), Candidate("a"), Candidate("b", inflight=1)]
    plan = Plan(read({"policy": "unsound", "fallback": fallback}))
    decision = plan.decide(turn(), fleet)
    assert (decision.target, decision.reason) == ("a", "the policy failed, fallback")
    assert decision.policy == ("round_robin" if fallback == "round_robin" else "least_loaded")
    assert plan.decide(turn(), fleet[:1]).target is None


def test_what_an_installed_policy_says_besides_its_choice_can_be_relied_on(install: Install) -> None:
    install(
        "careless",
        "from policies.types import Decision\n"
        "def make(options):\n"
        "    def decide(turn, candidates):\n"
        "        terms = {'a': {'work': float('nan')}, 'b': {'work': 2}}\n"
        "        return Decision('a', 'teleport', None, '', (), lambda c: terms[c.target], 'parsecs')\n"
        "    return decide\n",
    )
    fleet = [Candidate("a", local_tokens=9), Candidate("b"), Candidate("c")]
    decision = registry.make("careless")(turn(), fleet)
    assert (decision.action, decision.policy, decision.unit) == ("local", "careless", "")
    assert decision.chosen is fleet[0]
    assert [scored.terms for scored in decision.scored] == [{}, {"work": 2.0}, {}]


def test_a_policy_that_can_not_be_called_is_named(install: Install) -> None:
    install("a_number", "def make(options): return 3\n")
    with pytest.raises(registry.BrokenPolicy, match="a_number: what was made can't be called"):
        registry.make("a_number")


def test_the_example_in_the_docs_works(install: Install) -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text("utf-8")
    source = text.split("```python\n# one_by_one.py\n", 1)[1].split("```", 1)[0]
    install("one_by_one", source)
    decide = registry.make("one_by_one", {"most": 2})
    fleet = [Candidate("b"), Candidate("a", inflight=1), Candidate("0", excluded="down")]
    assert decide(turn(), fleet).target == "a"
    full = [Candidate("b", inflight=2), Candidate("a", inflight=3)]
    assert (decide(turn(), full).target, decide(turn(), full).reason) == ("b", "all full")
    assert decide(turn(), fleet[2:]).target is None
    with pytest.raises(registry.BadPolicyOptions, match="it takes most"):
        registry.make("one_by_one", {"mots": 3})
