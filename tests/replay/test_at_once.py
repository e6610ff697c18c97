"""Simulations in processes of their own: the same results, and no silence when one fails."""

import os
import signal
from pathlib import Path

import pytest

from replay import report
from replay.at_once import Ended, SimulationFailed, simulate
from replay.command import ReplayError, replay
from replay.experiment import run
from replay.measure import Measures
from small_runs import codex, experiment


def test_so_many_at_a_time_make_no_difference(tmp_path: Path) -> None:
    settings = experiment(codex(tmp_path), "round_robin", "longest_prefix", "expected_ttft")
    told: dict[str, int] = {}

    def progress(name: str, ended: int, total: int) -> None:
        told[name] = ended
        assert 0 < ended <= total == 264

    alone = run(settings)
    together = run(settings, progress, jobs=3)
    assert report.encoded(together) == report.encoded(alone)
    assert {*told} > {"round_robin", "longest_prefix", "expected_ttft"}


def _raises(ended: Ended) -> Measures:
    ended(1)
    raise ZeroDivisionError("of a policy")


def _is_killed(ended: Ended) -> Measures:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _waits(ended: Ended) -> Measures:
    signal.pause()
    raise AssertionError


@pytest.mark.parametrize(("fault", "says"), [(_raises, "of a policy"), (_is_killed, "its process has ended")])
def test_one_that_fails_ends_all(fault: object, says: str) -> None:
    """Also the one that would never end of itself."""
    with pytest.raises(SimulationFailed, match=says):
        simulate({"waits": _waits, "fails": fault}, 2, lambda *_: None)  # type: ignore[dict-item]


def test_no_simulation_at_a_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="--jobs must be at least 1"):
        replay(experiment(codex(tmp_path, 2)), jobs=0)
