"""What can't be run, read or written is refused before the run, in a line that says why."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from replay import profile as profiles
from replay import report
from replay.command import ReplayError, ReplayFailed, replay
from replay.experiment import BadExperiment, run
from small_runs import codex, experiment, written


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"policies": ["fastest"]}, "no policy is called 'fastest'"),
        ({"policies": ["random", "random"]}, "named twice"),
        ({"profile": "h100"}, "no profile is called 'h100'"),
        ({"instances": 0}, "instances must be at least 1"),
        ({"warmup": 1.0}, "warmup must be"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"format": "mooncake"}, r"read as mooncake \(--format\): line 1: not a Mooncake request"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(tmp_path: Path, more: dict[str, object], says: str) -> None:
    with pytest.raises(ReplayError, match=says):
        replay(experiment(codex(tmp_path, 2), **more))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"figures": ["hbm_tokens"]}, "--set takes KEY=NUMBER"),
        ({"figures": ["speed=1"]}, "no figure 'speed'"),
        ({"figures": ["hbm_tokens=0"]}, "hbm_tokens must be above 0"),
        ({"options": ["margin=1"]}, "--option takes POLICY.OPTION=VALUE"),
        ({"options": ["round_robin.margin=1"]}, "round_robin has no option margin"),
        ({"figures": ["step_s=1", "step_s=2"]}, "step_s is set twice"),
        ({"options": ["expected_ttft.tie_share=0", "expected_ttft.tie_share=1"]}, "tie_share is given twice"),
        ({"json": Path("nowhere/out.json")}, "there is no directory nowhere"),
        ({"page": Path("/")}, "/: is a directory"),
        ({"json": Path("out"), "page": Path("out")}, "out: is another result's file, too"),
        ({"plot": Path("out.pdf")}, "plots are written as .png or .svg"),
    ],
)
def test_words_that_say_nothing_are_refused(tmp_path: Path, words: dict[str, object], says: str) -> None:
    settings = experiment(codex(tmp_path, 2), "round_robin", "expected_ttft")
    with pytest.raises(ReplayError, match=says):
        replay(settings, **words)  # type: ignore[arg-type]


def test_a_result_does_not_overwrite_the_trace(tmp_path: Path) -> None:
    file = codex(tmp_path, 2)
    (tmp_path / "link").symlink_to(file)
    before = Path(file).read_bytes()
    with pytest.raises(ReplayError, match="link: is the trace"):
        replay(experiment(file), json=tmp_path / "link")
    assert Path(file).read_bytes() == before


def test_what_cannot_be_written_after_all_is_said_and_the_rest_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    out.write_text("of the run before")
    (tmp_path / ".out.json.part").mkdir()  # stands in its way
    with pytest.raises(ReplayFailed, match=r"out\.json: Is a directory"):
        replay(experiment(codex(tmp_path, 2)), json=out, page=page)
    assert "clairvoyant" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    assert out.read_text() == "of the run before"
    with pytest.raises(ReplayFailed, match="/dev/full: No space left on device"):
        replay(experiment(codex(tmp_path, 2)), json=Path("/dev/full"))


def test_a_name_that_no_report_could_hold_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="its name is not UTF-8"):
        replay(experiment(os.fsdecode(b"trace-\xff.jsonl")))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--pool off --placement random", "without a pool --placement would have no effect"),
        ("--down 9", "without --fail --down would have no effect"),
    ],
)
def test_flags_that_would_change_nothing_are_refused(tmp_path: Path, words: str, says: str) -> None:
    given = ["replay", codex(tmp_path, 2), "--format", "codex_like", *words.split()]
    found = CliRunner().invoke(app, given)
    assert (found.exit_code, found.stderr) == (2, f"moongate: {says}\n")


def test_who_wants_no_more_of_the_table_gets_no_traceback(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [codex(tmp_path, 2), "--format", "codex_like", "--policy", "random", "--json", out, "--jobs", "1"]
    started = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "replay", *words, "--instances", "1", "--active", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert started.stdout is not None
    started.stdout.close()
    _, errors = started.communicate()
    assert (started.returncode, errors) == (1, b"")
    assert json.loads(out.read_bytes())["policies"].keys() == {"random"}


def test_a_trace_without_a_turn_that_fits_is_refused(tmp_path: Path) -> None:
    for key in ("max_model_len", "hbm_tokens"):
        with pytest.raises(BadExperiment, match=rf"within {key} = 128: the shortest has 2,148 tokens"):
            run(experiment(codex(tmp_path, 2), figures={key: 128}))


@pytest.mark.parametrize("dram_bytes", [0, 16_777_216 * 500])
@pytest.mark.parametrize("profile", ["qwen3-32b-2xh100", "kimi-k2.5-gb200"])
def test_without_a_pool_those_figures_are_refused_that_would_change_nothing(
    tmp_path: Path, profile: str, dram_bytes: int
) -> None:
    """Others may change nothing here, as they limit what does not happen in so small a run."""
    file = codex(tmp_path, sessions=9, turns=4)
    given = {"hbm_tokens": 6_400, "dram_bytes": dram_bytes}
    settings: dict[str, Any] = {"profile": profile, "pool": False, "instances": 1}

    def measured(more: dict[str, float]) -> bytes:
        outcome = run(experiment(file, figures={**given, **more}, **settings))
        return report.encoded(outcome).partition(b'"policies"')[2]

    plain = measured({})
    refused: dict[str, str] = {}
    changing: set[str] = set()
    for key, value in _figures(profile).items():
        try:
            found = measured({key: 1 - value if key == "saves_decode" else 2 * value})
        except BadExperiment as wrong:
            refused[key] = str(wrong)
        else:
            changing |= {key} if found != plain else set()
    transfers = {"host_bytes_s", "pull_setup_s", "lookup_s", "lookup_block_s", "saves_decode"}
    idle = {"segment_bytes", "network_bytes_s"}
    if not dram_bytes:
        idle |= transfers | ({"block_bytes"} if profile.startswith("qwen") else set())
    assert refused == {key: f"without a pool {key} would have no effect" for key in idle}
    assert changing >= {"prefill_tok_s", "step_s", "overhead_s"} | (transfers - idle)


def test_flags_that_set_a_pace_are_refused_where_they_would_have_no_effect(tmp_path: Path) -> None:
    rows = [{"timestamp": 500 * n, "input_length": 900, "output_length": 9} for n in range(9)]
    file = written(tmp_path / "timed.jsonl", rows)
    nothing: dict[str, Any] = {"format": "aiperf", "active": None, "ramp_s": None}
    for flag, given in (("--active", {"active": 2}), ("--ramp", {"ramp_s": 9.0}), ("--rate", {"rate": 2.0})):
        with pytest.raises(BadExperiment, match=f"says when its sessions begin: {flag} would have no effect"):
            run(experiment(file, **{**nothing, **given}))
    found = report.document(run(experiment(file, **nothing)))["run"]
    assert (found["active"], found["ramp_s"], found["rate"]) == (None, None, None)
    for given in ({"active": 2}, {"ramp_s": 9.0}):
        with pytest.raises(BadExperiment, match="with --rate sessions come whatever is under way"):
            run(experiment(codex(tmp_path, 3), **{"active": None, "ramp_s": None, "rate": 2.0, **given}))
    found = report.document(run(experiment(codex(tmp_path, 3), active=None, ramp_s=None, rate=2.0)))["run"]
    assert (found["active"], found["ramp_s"], found["rate"]) == (None, None, 2.0)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"unlike": ["many:h100"]}, "--unlike takes COUNT:PROFILE"),
        ({"unlike": ["1:speed"]}, "no profile is called 'speed'"),
        ({"unlike": ["1:block_size=16"]}, "block_size must be the same"),
        ({"unlike": ["4:step_s=1"]}, "4 instances are to be unlike, but there are 3"),
        ({"unlike": ["1:step_s=x"]}, "a profile or KEY=NUMBER"),
    ],
)
def test_fleets_that_cannot_be_are_refused(tmp_path: Path, more: dict[str, list[str]], says: str) -> None:
    with pytest.raises(ReplayError, match=says):
        replay(experiment(codex(tmp_path, 2)), **more)


def _figures(profile: str) -> dict[str, float]:
    found = profiles.load(profile)
    return {
        name: getattr(found, name).value
        for name in found.__struct_fields__
        if isinstance(getattr(found, name), profiles.Figure)
        and name not in ("gpus", "block_size", "dram_bytes", "decode_seq_s")
    } | ({} if found.decode is None else {"decode.step_s": found.decode.step_s.value})
