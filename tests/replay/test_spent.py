"""What a run is said to be held up by is what it was made to lack."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from replay import report
from replay.experiment import run
from replay.spent import Part, held_up_by
from small_runs import HBM, SMALL, codex, experiment, written


def held_up(file: str, **more: Any) -> Part:
    return held_up_by(run(experiment(file, **more)).measures["round_robin"].spent)


@pytest.mark.parametrize(
    ("lacks", "more"),
    [
        ("decode", {"think": 0.0}),
        ("thinking", {"think": 10.0}),
        ("room", {"instances": 1, "active": 20, "pool": False, "figures": {"hbm_tokens": 12_800}}),
        ("room", {"active": 20, "think": 0.0, "figures": {"max_seqs": 2}}),
        ("pulls", {"figures": {**SMALL, "network_bytes_s": 2e8}}),
        ("prefill", {"pool": False, "think": 0.0, "figures": {**HBM, "prefill_tok_s": 1000}}),
        ("fixed", {"think": 0.0, "figures": {**SMALL, "overhead_s": 9.0}}),
        (
            "handoff",
            {"profile": "kimi-k2.5-gb200", "active": 20, "think": 0.0, "figures": {"decode.max_seqs": 2}},
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_run_is_held_up_by_what_it_lacks(tmp_path: Path, lacks: Part, more: dict[str, Any]) -> None:
    outcome = run(experiment(codex(tmp_path), **more))
    measures = outcome.measures["round_robin"]
    assert held_up_by(measures.spent) == lacks
    parts = measures.spent.parts()
    assert all(each >= 0 for each in parts.values())
    before = sum(parts.values()) - parts["thinking"] - parts["decode"]
    assert before == pytest.approx(measures.ttft_mean_s)
    assert report.document(outcome)["policies"]["round_robin"]["held_up_by"] == lacks


def test_a_burst_waits_for_the_prompts_before_it(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 20_000, "output_length": 9} for _ in range(40)]
    nothing: dict[str, Any] = {"format": "aiperf", "active": None, "ramp_s": None, "pool": False}
    assert held_up(written(tmp_path / "t.jsonl", rows), figures={}, **nothing) == "prefill"


def test_prompts_that_are_computed_while_a_turn_pulls_do_not_hold_it_up(tmp_path: Path) -> None:
    figures = {**SMALL, "network_bytes_s": 2e8}
    found = run(experiment(codex(tmp_path), figures=figures)).measures["round_robin"]
    prompts = found.throughput_tok_s * found.duration_s / found.turns - 100
    own_s = prompts * found.computed / 20_480
    assert own_s <= found.spent.prefill_s < 1.5 * own_s  # in a step may be others, too


def test_the_card_that_all_pull_from_is_told_from_a_slow_network(tmp_path: Path) -> None:
    """All share a head that the first one computed, and with owner placement it alone has it."""
    rows = [
        {"sid": f"s{n}", "shared": 12_000, "first": 12_100, "turns": [[12_100, 9, 0.0]]} for n in range(60)
    ]
    settings = experiment(
        written(tmp_path / "t.jsonl", rows),
        instances=30,
        active=60,
        ramp_s=20.0,
        figures={"network_bytes_s": 1e8},
    )
    owner = run(replace(settings, placement="owner"))
    assert held_up_by(owner.measures["round_robin"].spent) == "one card"
    assert "round_robin is held up by pulls over one instance's network card" in report.table(owner)
    assert held_up_by(run(settings).measures["round_robin"].spent) == "pulls"


def test_turns_of_instances_that_die_are_accounted_for_whole(tmp_path: Path) -> None:
    figures = {**SMALL, "network_bytes_s": 2e8}
    settings = experiment(codex(tmp_path), figures=figures, failures=(6.0, 14.0, 22.0), down_s=5.0)
    found = run(settings).measures["round_robin"]
    assert found.retried_turns > 0
    spent = asdict(found.spent)
    assert all(each >= 0 for each in spent.values())
    before = sum(found.spent.parts().values()) - spent["thinking_s"] - spent["decode_s"]
    assert before == pytest.approx(found.ttft_mean_s)
