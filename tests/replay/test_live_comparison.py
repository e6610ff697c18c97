"""What `bench/replay.py` says of a live fleet and its replay."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "replay.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_replay", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("live", "replay", "differ"),
    [
        ({"a": 0.10, "b": 0.20}, {"a": 0.30, "b": 0.40}, []),
        ({"a": 0.10, "b": 0.20}, {"a": 0.40, "b": 0.30}, [("a", "b")]),
        # Equal on both sides, whichever is ahead.
        ({"a": 1.00, "b": 1.04}, {"a": 1.04, "b": 1.00}, []),
        ({"a": 1.00, "b": 1.04}, {"a": 1.06, "b": 1.00}, [("a", "b")]),
        # The same one is ahead, here just enough and there not.
        ({"a": 1.00, "b": 1.04}, {"a": 1.00, "b": 1.06}, []),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 3.0, "c": 2.0}, [("b", "c")]),
        ({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.5}, [("a", "b")]),
    ],
)
def test_policies_are_in_another_order_when_another_one_is_ahead_by_more_than_chance(
    bench: ModuleType, live: dict[str, float], replay: dict[str, float], differ: list[tuple[str, str]]
) -> None:
    assert bench.otherwise(live, replay) == differ


def test_hits_more_than_2_points_apart_are_said_for_each_policy(bench: ModuleType) -> None:
    near, far = bench.Figures(0.519, 0.1), bench.Figures(0.521, 0.1)
    replay = {name: bench.Figures(0.5, 0.1) for name in ("round_robin", "longest_prefix")}
    assert bench.verdict({"round_robin": near, "longest_prefix": near}, replay)["hits_within_2_points"]
    assert not bench.verdict({"round_robin": near, "longest_prefix": far}, replay)["hits_within_2_points"]


def test_without_vllms_environment_one_line_says_how_to_make_it(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench/replay.py", "--engine", "vllm", "--quick"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    said = str(ended.value)
    assert "make setup-vllm" in said
    assert "\n" not in said
