"""Whole runs, small: what a fleet gains by its pool, by placement, and by whom turns are sent to."""

import json
import shlex
from dataclasses import replace as dc_replace
from pathlib import Path
from typing import Any

import pytest
from installing import installer
from msgspec.structs import replace
from typer.testing import CliRunner

from gateway.cli.main import app
from replay import report
from replay.command import replay
from replay.experiment import BadExperiment, run
from small_runs import HBM, SMALL, codex, experiment, written

KEYS = {
    "hit_rate",
    "ideal_hit_rate",
    "local_share",
    "own_segment_share",
    "pool_network_bytes",
    "ttft_p50_s",
    "ttft_p99_s",
    "throughput_tok_s",
    "imbalance",
}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    file = codex(tmp_path)
    policies = ("random", "longest_prefix", "expected_ttft")
    one, two = (report.encoded(run(experiment(file, *policies, seed=7))) for _ in range(2))
    assert one == two
    other = report.encoded(run(experiment(file, *policies, seed=8)))
    for name in policies:
        assert json.loads(one)["policies"][name] != json.loads(other)["policies"][name]


def test_a_pool_holds_what_hbm_cannot_and_no_run_exceeds_the_ideal(tmp_path: Path) -> None:
    file = codex(tmp_path)
    without = run(experiment(file, "round_robin", pool=False))
    pooled = run(experiment(file, "round_robin"))
    for outcome in (without, pooled):
        for each in (*outcome.measures.values(), outcome.clairvoyant):
            assert each.hit_rate <= each.ideal_hit_rate
            assert each.local + each.own_segment + each.remote_pool == pytest.approx(each.hit_rate)
            assert each.turns == 264
    assert without.measures["round_robin"].pool_network_bytes == 0
    # Answers are not saved, so that much is missing.
    assert pooled.measures["round_robin"].hit_rate > 0.9 * pooled.clairvoyant.ideal_hit_rate
    assert without.measures["round_robin"].hit_rate < 0.6 * pooled.measures["round_robin"].hit_rate


def test_sessions_that_stay_with_their_owner_need_hardly_any_network(tmp_path: Path) -> None:
    file = codex(tmp_path)
    outcome = run(experiment(file, "round_robin", "session", placement="owner"))
    moving, staying = outcome.measures["round_robin"], outcome.measures["session"]
    assert staying.moved_share == 0 < moving.moved_share
    assert staying.pool_network_bytes < 0.1 * moving.pool_network_bytes
    assert staying.local_share > 0.9 > moving.local_share
    assert outcome.clairvoyant.local_share > moving.local_share


def test_private_dram_holds_what_hbm_cannot_for_those_who_come_back(tmp_path: Path) -> None:
    file = codex(tmp_path)
    figures = {**HBM, "dram_bytes": 16_777_216 * 4_000}
    without = run(experiment(file, "session", pool=False)).measures["session"]
    outcome = run(experiment(file, "session", "round_robin", pool=False, figures=figures))
    staying, moving = outcome.measures["session"], outcome.measures["round_robin"]
    assert without.dram == 0
    assert without.hit_rate < 0.8 * staying.hit_rate
    # Answers are not saved to it either.
    assert staying.hit_rate > 0.9 * staying.ideal_hit_rate
    assert staying.local + staying.dram == pytest.approx(staying.hit_rate)
    assert staying.local_share == 1
    assert staying.pool_network_bytes == 0
    assert moving.hit_rate < staying.hit_rate
    both = run(experiment(file, "round_robin", figures={**SMALL, **figures})).measures["round_robin"]
    assert both.hit_rate > moving.hit_rate
    assert 0 < both.remote_pool < both.local + both.dram + both.own_segment


@pytest.mark.parametrize("hbm_tokens", [12_800, 19_200])
def test_what_a_preempted_turn_finds_again_is_not_counted_again(tmp_path: Path, hbm_tokens: int) -> None:
    figures = {**SMALL, "hbm_tokens": hbm_tokens}
    each = run(experiment(codex(tmp_path), instances=1, figures=figures)).measures["round_robin"]
    assert each.preemptions > 10
    assert each.local_share == 1.0
    shares = (each.local, each.dram, each.own_segment, each.remote_pool, each.computed)
    assert sum(shares) == pytest.approx(1.0, abs=1e-9)


def test_prefill_that_grows_with_context_takes_longer_at_the_end_of_a_long_prompt(tmp_path: Path) -> None:
    file = codex(tmp_path)
    settings = {"instances": 1, "active": 1, "ramp_s": 0.0, "sessions": 1, "pool": False}
    flat, growing = (
        run(experiment(file, figures={"prefill_growth": growth}, **settings)).measures["round_robin"]
        for growth in (0.0, 1e-4)
    )
    assert flat.hit_rate == growing.hit_rate
    longer = (sum(growing.ttft_s) - sum(flat.ttft_s)) / sum(flat.ttft_s)
    assert 0.1 < longer < 0.6


def test_a_slow_network_is_seen_in_the_first_token_of_those_who_pull(tmp_path: Path) -> None:
    file = codex(tmp_path)
    slow = {**SMALL, "network_bytes_s": 1e9}
    outcome = run(experiment(file, "round_robin", "session", placement="owner", figures=slow))
    pulled, kept = outcome.measures["round_robin"], outcome.measures["session"]
    assert kept.ttft_p50_s < 0.7 * pulled.ttft_p50_s
    assert outcome.clairvoyant.ttft_p50_s < 0.7 * pulled.ttft_p50_s


def test_decode_on_its_own_instances_gets_the_prompt_over_the_network(tmp_path: Path) -> None:
    outcome = run(experiment(codex(tmp_path), profile="kimi-k2.5-gb200", figures={}))
    each = outcome.measures["round_robin"]
    assert each.turns == 264
    assert each.ttft_p50_s > outcome.profile.overhead_s.value
    # 99 steps after the first token, each as long as decode's.
    assert each.e2e_p50_s - each.ttft_p50_s == pytest.approx(99 * 0.0285, rel=0.1)
    assert each.hit_rate == pytest.approx(each.ideal_hit_rate, abs=0.01)


def test_the_json_has_every_key_for_each_policy_and_the_clairvoyant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    settings = experiment(codex(tmp_path), "round_robin", "least_loaded")
    replay(
        settings,
        figures=[f"{key}={value}" for key, value in SMALL.items()],
        json=out,
        page=page,
    )
    found = json.loads(out.read_text())
    assert set(found["policies"]) == {"round_robin", "least_loaded"}
    for each in (*found["policies"].values(), found["clairvoyant"]):
        assert each.keys() >= KEYS
    assert found["run"]["figures"]["hbm_tokens"] == {"value": 19200.0, "source": "the command line"}
    assert "clairvoyant" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    assert "http" not in page.read_text().replace("HTTP", "")


@pytest.mark.parametrize(("name", "begins"), [("out.png", b"\x89PNG"), ("out.svg", b"<?xml")])
def test_a_picture_is_written_and_is_the_same_again(tmp_path: Path, name: str, begins: bytes) -> None:
    settings = experiment(codex(tmp_path, 2), "round_robin", figures={})
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        replay(settings, plot=tmp_path / place / name)
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / name).read_bytes().startswith(begins)


def test_where_an_installed_policy_fails_the_fallback_decides_as_in_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = installer(tmp_path, monkeypatch)
    put("shaky", SHAKY)
    file = codex(tmp_path, 6)
    outcome = run(experiment(file, "shaky", "least_loaded"))
    shaky, fallback = outcome.measures["shaky"], outcome.measures["least_loaded"]
    assert (shaky.turns, shaky.policy_failures) == (84, 84)
    assert shaky.ttft_s == fallback.ttft_s
    assert "shaky failed for 84 turns" in report.table(outcome)
    assert "shaky: ZeroDivisionError: division by zero" in report.table(outcome)
    assert (fallback.policy_failures, outcome.clairvoyant.policy_failures) == (0, 0)


@pytest.mark.parametrize(
    ("profile", "key", "limit"),
    [
        ("qwen3-32b-2xh100", "hbm_tokens", "hbm_tokens = 2,200, 2,176 of them in whole blocks"),
        ("kimi-k2.5-gb200", "decode.hbm_tokens", "decode.hbm_tokens = 2,200, 2,176 of them in whole blocks"),
    ],
)
def test_a_turn_that_fits_no_whole_blocks_of_a_cache_cuts_its_session_off(
    tmp_path: Path, profile: str, key: str, limit: str
) -> None:
    def rows(*prompts: int) -> str:
        turns = [{"sid": f"s{n}", "shared": 0, "first": n, "turns": [[n, 90, 0.0]]} for n in prompts]
        return written(tmp_path / "t.jsonl", turns)

    settings: dict[str, Any] = {"profile": profile, "figures": {key: 2200}, "active": 1}
    outcome = run(experiment(rows(2086, 2087, 2110), **settings))
    assert (outcome.sessions, outcome.dropped, outcome.measures["round_robin"].turns) == (1, 2, 1)
    with pytest.raises(BadExperiment, match=f"within {limit}: the shortest has 2,177 tokens"):
        run(experiment(rows(2087), **settings))


def test_blocks_of_one_token_do(tmp_path: Path) -> None:
    figures = {**SMALL, "block_size": 1}
    each = run(experiment(codex(tmp_path, 7, 4), figures=figures)).measures["round_robin"]
    assert each.turns == 28
    assert each.hit_rate <= each.ideal_hit_rate


def test_longer_turns_than_the_model_takes_cut_their_session_off(tmp_path: Path) -> None:
    outcome = run(experiment(codex(tmp_path, 11), figures={"max_model_len": 3000}))
    assert (outcome.truncated, outcome.dropped) == (11, 0)
    assert outcome.measures["round_robin"].turns == 22


def test_sessions_that_are_left_out_whole_are_not_counted_among_those_cut_off(tmp_path: Path) -> None:
    rows = [
        {"sid": f"s{n}", "shared": 0, "first": 2000 * n, "turns": [[2000 * n, 100, 0.0], [1500, 100, 1.0]]}
        for n in (1, 2, 3)
    ]
    outcome = run(experiment(written(tmp_path / "t.jsonl", rows), figures={"max_model_len": 5000}, active=1))
    assert (outcome.sessions, outcome.truncated, outcome.dropped) == (2, 1, 1)
    assert "2 sessions, 1 of them cut off" in report.table(outcome)
    assert "(1 more left out whole)" in report.table(outcome)


def test_a_trace_of_dates_begins_with_its_first_request(tmp_path: Path) -> None:
    def rows(since: int) -> list[dict[str, Any]]:
        return [{"timestamp": since + 500 * n, "input_length": 900, "output_length": 900} for n in range(9)]

    settings: dict[str, Any] = {"format": "aiperf", "active": None, "ramp_s": None, "failures": (2.0,)}
    counted, dated = (
        run(experiment(written(tmp_path / "t.jsonl", rows(since)), **settings)).measures["round_robin"]
        for since in (0, 1_790_000_000_000)
    )
    assert (dated.failed_turns, dated.retried_turns) == (counted.failed_turns, counted.retried_turns)
    assert dated.failed_turns + dated.retried_turns > 0
    assert dated.e2e_s == counted.e2e_s


@pytest.mark.parametrize(
    "words",
    [
        "--pool off --active 4 --sessions 6 --policy random",
        "--policy session --rate 0.5 --head 512 --think 0.5 --warmup 0 --seed 3 --set hbm_tokens=19200.0",
        "--option expected_ttft.tie_share=0.2 --unlike 1:step_s=0.02,prefill_tok_s=9000 --fail 3 --fail 9.5"
        " --down 4 --ramp 2 --active 5 --policy expected_ttft --placement owner",
    ],
)
def test_a_report_says_how_to_run_it_again(tmp_path: Path, words: str) -> None:
    file, out, page = codex(tmp_path, 5, 4), tmp_path / "out.json", tmp_path / "out.html"
    given = [
        "replay",
        file,
        "--format",
        "codex_like",
        "--profile",
        "qwen3-32b-2xh100",
        "--instances",
        "3",
        "--jobs",
        "1",
    ]
    first = CliRunner().invoke(app, [*given, *words.split(), "--json", str(out), "--html", str(page)])
    assert first.exit_code == 0, first.output
    one = out.read_bytes()
    command = json.loads(one)["run"]["command"]
    assert f"Again: {command}" in first.output.splitlines()
    assert f"<code>{command}</code>" in page.read_text()
    out.unlink()
    again = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json", str(out)])
    assert again.exit_code == 0, again.output
    assert out.read_bytes() == one


SHAKY = """
def make(options):
    def decide(turn, candidates):
        return 1 / 0

    return decide
"""

DEATHS = {"failures": (6.0, 14.0, 22.0), "down_s": 5.0, "placement": "owner"}


def test_turns_of_instances_that_die_are_answered_by_others_or_asked_again(tmp_path: Path) -> None:
    file = codex(tmp_path)
    before = run(experiment(file, "session", placement="owner"))
    after = run(experiment(file, "session", **DEATHS))
    for whole, each in (
        (before.measures["session"], after.measures["session"]),
        (before.clairvoyant, after.clairvoyant),
    ):
        assert (whole.failures, whole.retried_turns, whole.failed_turns) == (0, 0, 0)
        assert each.failures == 3
        assert each.failed_turns > 0
        assert each.turns == whole.turns == 264
        # What lay in their HBM and segments has to be computed again.
        assert each.hit_rate < whole.hit_rate
    assert after.measures["session"].moved_share > 0 == before.measures["session"].moved_share
    assert "session 3 dead instances" in report.table(after)
    never = run(experiment(file, "session", failures=(1e9,), down_s=5.0, placement="owner"))
    assert "session 0 dead instances" in report.table(never)
    slow = {**SMALL, "network_bytes_s": 2e8}
    pulled = run(experiment(file, "round_robin", figures=slow, **DEATHS)).measures["round_robin"]
    assert pulled.failed_pulls > 0
    assert pulled.turns == 264
    assert report.encoded(after) == report.encoded(run(experiment(file, "session", **DEATHS)))


def test_the_bound_in_a_table_holds_for_every_row_of_it(tmp_path: Path) -> None:
    """Where turns are asked again each run measures others, so that each has a bound of its own."""
    outcome = run(experiment(codex(tmp_path), "session", "round_robin", **DEATHS))
    worse = replace(outcome.clairvoyant, ideal_hit_rate=0.1, bound_ttft_p50_s=99.0, bound_e2e_p99_s=99.0)
    rows = [line.split() for line in report.table(dc_replace(outcome, clairvoyant=worse)).splitlines()]
    named = {row[0]: row for row in rows if row}
    bound = named["lower"][2:]
    for name in ("session", "round_robin"):
        row = named[name][1:]
        assert float(row[0]) <= float(bound[0])
        assert float(row[2]) >= float(bound[1])
        assert float(row[6]) >= float(bound[5])


def test_a_turn_waits_while_the_only_instance_is_dead(tmp_path: Path) -> None:
    settings = {"instances": 1, "active": 2, "failures": [5.0], "down_s": 30.0}
    for file, profile in ((codex(tmp_path, 3), "qwen3-32b-2xh100"), (codex(tmp_path, 3), "kimi-k2.5-gb200")):
        for pool in (False, True):
            outcome = run(experiment(file, "longest_prefix", profile=profile, pool=pool, **settings))
            for each in (outcome.measures["longest_prefix"], outcome.clairvoyant):
                assert (each.turns, each.failures) == (36, 1)
                assert 20 < each.ttft_s[-1] < 40


def test_a_slower_instance_is_given_less_by_those_who_learn_how_fast_each_is(tmp_path: Path) -> None:
    file = codex(tmp_path)
    slow = [(1, "", {"prefill_tok_s": 2_000.0})]
    alike = run(experiment(file, "round_robin", "expected_ttft", pool=False))
    unlike = run(experiment(file, "round_robin", "expected_ttft", pool=False, unlike=slow))
    blind, learned = unlike.measures["round_robin"], unlike.measures["expected_ttft"]
    assert blind.ttft_p90_s > 3 * alike.measures["round_robin"].ttft_p90_s
    assert learned.ttft_p90_s < 0.5 * blind.ttft_p90_s


@pytest.mark.parametrize(
    "more",
    [
        {"figures": {**SMALL, "hbm_tokens": 60_000}},
        {"placement": "owner"},
        {"pool": False},
    ],
    ids=["room for all", "room for few", "no pool"],
)
def test_the_cost_model_keeps_the_load_even_and_finds_as_much_as_rotation(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    file = codex(tmp_path, sessions=44)
    runs = [
        run(
            experiment(file, "round_robin", "expected_ttft", instances=4, active=20, seed=seed, **more)
        ).measures
        for seed in range(3)
    ]

    def mean(policy: str, key: str) -> float:
        """One seed says little: a p99 is the sixth of 528 turns."""
        return sum(getattr(each[policy], key) for each in runs) / len(runs)

    def ratio(key: str) -> float:
        return mean("expected_ttft", key) / mean("round_robin", key)

    # Of as few as these one instance gets 1.4 times the mean with one seed in five.
    assert mean("expected_ttft", "imbalance") <= 1.3
    # Sessions this much alike are ideal for rotation.
    assert ratio("ttft_p99_s") <= 1.1 or mean("expected_ttft", "ttft_p99_s") < 0.21
    assert ratio("hit_rate") >= 0.85
    if more.get("figures"):
        assert ratio("ttft_p50_s") <= 1.05
        assert ratio("pool_network_bytes") < 0.9
