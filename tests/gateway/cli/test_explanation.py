"""A decision as people read it."""

from typing import Any

from gateway.admin.views import DecisionView
from gateway.cli.explanation import as_text, refusal
from gateway.routing.decisions import DecisionRecord
from policies.cost import TERMS
from policies.types import Candidate, Decision


def view(**more: Any) -> dict[str, Any]:
    shown = (
        Candidate("w1", local_tokens=512, queued_tokens=9000, inflight=3),
        Candidate("w2", pool_tokens=512, own_segment_tokens=256, inflight=1),
        Candidate("w3", excluded="down"),
    )
    terms = {
        "w1": {"queued": 9000.0, "pull": 0.0, "compute": 88.0},
        "w2": {"queued": 0.0, "pull": 51.2, "compute": 88.0},
        "w3": {"queued": 0.0, "pull": 0.0, "compute": 600.0},
    }
    decision = Decision(
        "w2", "pull", "holder busy", "longest_prefix", shown, lambda c: terms[c.target], "tokens"
    )
    record = DecisionRecord("r", 0.0, "chat", "m", 600, 32, decision)
    return DecisionView.of(record).model_dump() | more


def test_the_explanation_is_a_table() -> None:
    assert as_text(view()).splitlines() == [
        "pull on w2: holder busy (policy longest_prefix)",
        "m (chat): 600 prompt tokens in 18 full blocks of 32, 512 of them in the pool, 88 to compute",
        "next: w1, 8948.8 tokens more",
        "",
        "    target  local  pool  own  queued tokens  in flight  queued  pull  compute   cost  excluded",
        "    w1        512     0    0           9000          3    9000     0       88   9088",
        "->  w2          0   512  256              0          1       0  51.2       88  139.2",
        "    w3          0     0    0              0          0       0     0      600    600  down",
    ]


def test_what_nobody_has_gets_no_column_and_what_has_no_unit_none() -> None:
    shown = view(unit="")
    for candidate in shown["candidates"]:
        candidate["terms"] |= {"queued": 0.0, "pull": 0.0}
    lines = as_text(shown).splitlines()
    assert lines[2] == "next: w1, 8948.8 more"
    assert lines[4].split() == "target local pool own queued tokens in flight compute cost excluded".split()


def test_costs_in_seconds_are_shown_in_milliseconds() -> None:
    in_seconds = view(unit="s")
    in_seconds["candidates"][1] |= {"terms": {"queued": 0, "pull": 0.0004, "compute": 0.0368}, "cost": 0.0372}
    lines = as_text(in_seconds).splitlines()
    assert "cost ms" in lines[4]
    assert lines[6].split()[-4:] == ["0", "0.4", "36.8", "37.2"]


def test_expected_seconds_have_a_table_of_their_own_with_what_anybody_has_of_them() -> None:
    terms = dict.fromkeys(TERMS, 0.0)
    shown = view(unit="s")
    for candidate, prefill in zip(shown["candidates"], (0.5, 0.02, 0.5), strict=True):
        candidate |= {"terms": terms | {"prefill": prefill, "first_step": 0.01}, "cost": prefill + 0.01}
        candidate |= {"expected_ms": dict.fromkeys(TERMS, 1.0), "expected_ttft_ms": 1e3 * prefill + 10}
    assert as_text(shown).splitlines()[4:] == [
        "    target  local  pool  own  queued tokens  in flight  cost ms  excluded",
        "    w1        512     0    0           9000          3      510",
        "->  w2          0   512  256              0          1       30",
        "    w3          0     0    0              0          0      510  down",
        "",
        "expected, in milliseconds, and how far by measured rates:",
        "  target  prefill  first_step  ttft  measured",
        "  w1          500          10   510  0%",
        "  w2           20          10    30  0%",
        "  w3          500          10   510  0%",
    ]


def test_an_explanation_says_whose_turn_it_is_and_who_would_decode() -> None:
    session = {"name": "mine", "inferred": False, "new": False, "branch": True}
    lines = as_text(view(session=session, decode="w9")).splitlines()
    assert lines[2:4] == [
        "session mine (as its client calls it): a branch",
        "to be decoded on w9",
    ]
    lines = as_text(view(session=session | {"inferred": True, "branch": False})).splitlines()
    assert lines[2] == "session mine (recognised by its prompts): goes on"


def test_an_explanation_without_prompt_or_target_says_so() -> None:
    assert "prompt not known (no_template), placed by load" in as_text(view(unrenderable="no_template"))
    nowhere = as_text(view(target=None, reason="no worker is up", unrenderable="no_worker"))
    assert nowhere.startswith("nowhere: no worker is up")
    assert "placed" not in nowhere


def test_why_a_turn_goes_nowhere() -> None:
    other = view()["candidates"][2] | {"excluded": "model"}
    assert refusal(view()) == ""
    assert refusal(view(target=None, candidates=[])) == "no worker is registered"
    assert refusal(view(target=None, candidates=[other])) == "no worker serves the model 'm'"
    assert refusal(view(target=None, reason="all are down")) == "all are down"
