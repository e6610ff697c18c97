"""What trace files become: prompts as chains of which equal keys mean equal beginnings."""

import gzip
import json
import re
from pathlib import Path

import pytest

from replay.chains import Pieces
from replay.traces.files import load
from replay.traces.types import BadTrace, Trace
from small_runs import codex, written


def shared(trace: Trace, one: tuple[int, int], other: tuple[int, int]) -> int:
    """Leading tokens that two prompts, (session, turn) each, have in common as far as whole blocks show."""
    prompts = []
    for session, turn in (one, other):
        asked = trace.sessions[session].turns[turn]
        prompts.append(list(asked.chain[: asked.prompt_tokens // trace.block_size]))
    common = 0
    for left, right in zip(*prompts, strict=False):
        if left != right:
            break
        common += 1
    return common * trace.block_size


def test_a_codex_like_prompt_holds_all_turns_before_it_and_the_common_head(tmp_path: Path) -> None:
    trace = load(codex(tmp_path, sessions=2), "codex_like", 64)
    first, second = trace.sessions[0].turns[:2]
    assert (first.prompt_tokens, second.prompt_tokens) == (2048, 2048 + 100 + 600)
    assert second.think_s == pytest.approx(4.0 - 1.0 - 100 / 70)
    assert shared(trace, (0, 0), (0, 1)) == 2048
    assert shared(trace, (0, 1), (1, 1)) == 1024
    assert shared(load(codex(tmp_path), "codex_like", 64, head=128), (0, 1), (1, 1)) == 128


def test_copies_share_the_head_and_nothing_else(tmp_path: Path) -> None:
    trace = load(codex(tmp_path, sessions=2), "codex_like", 64, sessions=5)
    assert [each.name for each in trace.sessions] == ["s0", "s1", "s0 (2)", "s1 (2)", "s0 (3)"]
    assert shared(trace, (0, 1), (2, 1)) == 1024


def test_claude_code_answers_are_found_in_the_next_prompt_and_heads_by_their_length(tmp_path: Path) -> None:
    def session(name: str, tools: int) -> dict[str, object]:
        requests = [
            {"t": 0, "type": "n", "in": 640, "out": 128, "hr": [1, 10], "think_time": 0},
            {"t": 9, "type": "n", "in": 1290, "out": 10, "hr": [1, 16, 40, 4], "think_time": 3},
        ]
        return {"id": name, "block_size": 64, "tool_tokens": tools, "system_tokens": 0, "requests": requests}

    rows = [session("a", 256), session("b", 256), session("c", 320)]
    trace = load(written(tmp_path / "t", rows), "claude_code", 64)
    one, two = trace.sessions[0].turns
    assert list(one.chain[:12]) == list(two.chain[:12])
    assert two.think_s == 3
    assert shared(trace, (0, 0), (0, 1)) == 640
    assert shared(trace, (0, 0), (1, 0)) == 256
    assert shared(trace, (0, 0), (2, 0)) == 0


def test_mooncake_blocks_are_cut_smaller_and_batches_spread_over_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 9, "hash_ids": [0, 2, 3]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 9, "hash_ids": [0, 2, 4]},
    ]
    trace = load(written(tmp_path / "t", rows), "mooncake", 64)
    assert [each.arrives_s for each in trace.sessions] == [0, 1.5, 3]
    assert shared(trace, (0, 0), (1, 0)) == 512
    assert shared(trace, (1, 0), (2, 0)) == 1024


def test_aiperf_turns_add_to_their_session(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 500, "input_length": 640, "output_length": 64},
        {"session_id": "b", "timestamp": 900, "input_length": 100, "output_length": 1},
        {"session_id": "a", "delay": 2000, "input_length": 128, "output_length": 64},
    ]
    trace = load(written(tmp_path / "t", rows), "aiperf", 64)
    assert [each.name for each in trace.sessions] == ["a", "b"]
    assert trace.sessions[0].arrives_s == 0.5
    assert [each.prompt_tokens for each in trace.sessions[0].turns] == [640, 640 + 64 + 128]
    assert trace.sessions[0].turns[1].think_s == 2
    assert shared(trace, (0, 0), (0, 1)) == 640
    assert shared(trace, (0, 0), (1, 0)) == 0


def test_copies_of_aiperf_sessions_are_sessions_of_their_own_and_of_those_with_ids_there_are_none(
    tmp_path: Path,
) -> None:
    rows: list[dict[str, object]] = [
        {"session_id": "a", "input_length": 640, "output_length": 64},
        {"input_length": 640, "output_length": 1},
        {"session_id": "a", "input_length": 64, "output_length": 1, "delay": 500},
    ]
    trace = load(written(tmp_path / "t", rows), "aiperf", 64, sessions=5)
    assert [each.name for each in trace.sessions] == ["a", "line 2", "a (2)", "line 2 (2)", "a (3)"]
    assert [len(each.turns) for each in trace.sessions] == [2, 1, 2, 1, 2]
    assert trace.copies == 3
    assert shared(trace, (0, 1), (2, 1)) == 0
    named = [{"session_id": "a", "input_length": 512, "hash_ids": [1]}, *rows[1:2]]
    trace = load(written(tmp_path / "n", named), "aiperf", 64, sessions=4)
    assert [each.name for each in trace.sessions] == ["a", "line 2", "line 2 (2)"]


DOCS = Path(__file__).parents[2] / "docs" / "evaluation.md"
# Of the samples: sessions, their prompts in tokens, and pauses of the last one that has any.
SAMPLES = {
    "aiperf": ([[9000, 10500], [7000]], 4.0),
    "codex_like": ([[9000, 10500]], 8.5 - 1 - 300 / 70),
    "mooncake": ([[1200], [1600]], 0.0),
    "claude_code": ([[6400, 6720]], 2.5),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_in_the_docs_are_traces(tmp_path: Path, name: str) -> None:
    prompts, pause_s = SAMPLES[name]
    (sample,) = re.findall(rf"^```jsonl {name}\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    (tmp_path / "t").write_text(sample)
    trace = load(str(tmp_path / "t"), name, 64)
    assert [[turn.prompt_tokens for turn in each.turns] for each in trace.sessions] == prompts
    assert max(turn.think_s for each in trace.sessions for turn in each.turns) == pytest.approx(pause_s)


def test_ids_of_blocks_may_be_any_numbers(tmp_path: Path) -> None:
    plain = [
        {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [0, n]} for n in (1, 2, 1)
    ]
    strange = {0: -5, 1: 1 << 63, 2: 1 << 70}
    rows = [{**row, "hash_ids": [strange[each] for each in row["hash_ids"]]} for row in plain]
    for name in ("mooncake", "aiperf"):
        for given in (plain, rows):
            trace = load(written(tmp_path / "t", given), name, 64)
            assert [shared(trace, (0, 0), (other, 0)) for other in (1, 2)] == [512, 1024]


def test_a_batch_that_a_trace_begins_with_comes_at_its_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1_800_000, "input_length": 9, "output_length": 9, "hash_ids": [n]} for n in range(3)
    ]
    trace = load(written(tmp_path / "t", rows), "mooncake", 64)
    assert [each.arrives_s for each in trace.sessions] == [1800, 1800, 1800]


def test_sessions_of_which_only_some_say_when_they_begin_are_refused(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 500, "input_length": 640},
        {"session_id": "a", "input_length": 640},
        {"session_id": "b", "input_length": 640},
    ]
    for ordered in (rows, [rows[2], *rows[:2]]):
        with pytest.raises(BadTrace, match=r"line [23]: some sessions have a timestamp and others have none"):
            load(written(tmp_path / "t", ordered), "aiperf", 64)


CLAUDE = {"id": "a", "block_size": 64, "requests": [{"in": 9, "hr": [1, 1]}]}
CODEX = {"sid": "a", "shared": 6, "first": 9, "turns": [[9, 3, 0]]}
REQUEST = {"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [0]}


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("codex_like", {**CODEX, "shared": -1}, "shared"),
        ("codex_like", {**CODEX, "turns": [[9, -3, 0]]}, r"turns\[0\]\[1\]"),
        ("codex_like", {**CODEX, "turns": [[1 << 70, 3, 0]]}, r"turns\[0\]\[0\]"),
        ("claude_code", {**CLAUDE, "tool_tokens": -1}, "tool_tokens"),
        ("claude_code", {**CLAUDE, "requests": [{"in": -9, "hr": [1, 1]}]}, r"requests\[0\]\.in"),
        ("claude_code", {**CLAUDE, "requests": [{"in": 9, "hr": [1, -1]}]}, r"hr\[1\]"),
        ("claude_code", {**CLAUDE, "requests": [{"in": 9, "hr": [1 << 40, 1]}]}, r"hr\[0\]"),
        ("claude_code", {**CLAUDE, "requests": [{"in": 9, "hr": [1, 1, 2]}]}, "hr is a list of pairs"),
        ("mooncake", {**REQUEST, "output_length": -9}, "output_length"),
        ("mooncake", {**REQUEST, "timestamp": -9}, "timestamp"),
        ("mooncake", {**REQUEST, "timestamp": 1e300}, "timestamp"),
        ("aiperf", {**REQUEST, "output_length": 1 << 70}, "output_length"),
        ("aiperf", {**REQUEST, "delay": -9}, "delay"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_their_line(
    tmp_path: Path, name: str, row: dict[str, object], says: str
) -> None:
    with pytest.raises(BadTrace, match=rf"line 1: .*{says}"):
        load(written(tmp_path / "t", [row]), name, 64)


@pytest.mark.parametrize("name", ["claude_code", "codex_like", "mooncake", "aiperf"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1: not JSON"),
        ('{"a": 1}', "line 1: "),
        ("", "no lines"),
        ("[" * 200_000, "line 1: not JSON: maximum recursion"),
    ],
    ids=["cut off", "something else", "empty", "too deep"],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    with pytest.raises(BadTrace, match=says):
        load(str(file), name, 64)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        load(str(tmp_path / "none"), "aiperf", 64)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(json.dumps({}).encode() * 99)[:20])
    with pytest.raises(BadTrace, match=r"broken\.gz"):
        load(str(broken), "aiperf", 64)
    row = {"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [0]}
    short = written(tmp_path / "t", [row])
    with pytest.raises(BadTrace, match="do not have 1 blocks"):
        load(short, "mooncake", 64)


def test_pieces_are_the_list_of_their_numbers() -> None:
    pieces = Pieces([range(5, 9), range(0), range(100, 102), range(7, 8)])
    listed = [5, 6, 7, 8, 100, 101, 7]
    assert list(pieces) == listed
    assert len(pieces) == 7
    for start in range(-8, 9):
        for stop in range(-8, 9):
            assert list(pieces[start:stop]) == listed[start:stop]
    assert [pieces[at] for at in range(-7, 7)] == [*listed, *listed]
    with pytest.raises(IndexError):
        pieces[7]


@pytest.mark.parametrize(
    ("file", "name", "turns"),
    [
        ("codex_like_sessions", "codex_like", 20_867),
        ("claude_code_excerpt", "claude_code", 465),
        ("mooncake_conversation_excerpt", "mooncake", 600),
    ],
)
def test_the_traces_that_come_with_the_project_are_read(file: str, name: str, turns: int) -> None:
    path = Path(__file__).parents[2] / "bench" / "traces" / f"{file}.jsonl.gz"
    trace = load(str(path), name, 64)
    assert sum(len(session.turns) for session in trace.sessions) == turns
    for session in trace.sessions:
        for asked in session.turns:
            assert len(asked.chain) >= (asked.prompt_tokens + asked.output_tokens - 1) // 64
