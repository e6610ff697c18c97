"""Simulations in processes of their own: the same results, and no silence when one fails."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
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


RAISED = r"^fails: ZeroDivisionError: of a policy \(test_at_once\.py, line \d+\)$"


@pytest.mark.parametrize(("fault", "says"), [(_raises, RAISED), (_is_killed, "its process has ended")])
def test_one_that_fails_ends_all(fault: object, says: str) -> None:
    """Also the one that would never end of itself."""
    with pytest.raises(SimulationFailed, match=says):
        simulate({"waits": _waits, "fails": fault}, 2, lambda *_: None)  # type: ignore[dict-item]


def test_one_that_fails_says_the_same_where_it_is_alone() -> None:
    with pytest.raises(SimulationFailed, match=RAISED):
        simulate({"fails": _raises}, 1, lambda *_: None)


TWO_THAT_WAIT = """
import os, signal, sys
from replay.at_once import simulate

def waits(ended):
    os.write(1, b".")
    signal.pause()

try:
    simulate({"one": waits, "other": waits}, 2, lambda *_: None)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("ends", "whom", "code"),
    [
        (signal.SIGINT, os.killpg, 130),
        (signal.SIGINT, os.kill, 130),
        (signal.SIGTERM, os.kill, -signal.SIGTERM),
        (signal.SIGKILL, os.kill, -signal.SIGKILL),
    ],
    ids=["Ctrl-C", "SIGINT", "SIGTERM", "SIGKILL"],
)
def test_none_is_left_and_none_says_a_word_when_who_started_them_is_ended(
    ends: signal.Signals, whom: Callable[[int, int], None], code: int
) -> None:
    started = subprocess.Popen(
        # Whatever started the tests in the background made them ignore SIGINT.
        ["env", "--default-signal=INT", sys.executable, "-c", TWO_THAT_WAIT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert started.stdout is not None
    assert started.stdout.read(2) == b".."
    whom(started.pid, ends)
    # Both ends of file come when none has them open any more.
    said, errors = started.communicate()
    assert (said, errors) == (b"", b"")
    assert started.returncode == code


def test_no_simulation_at_a_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="--jobs must be at least 1"):
        replay(experiment(codex(tmp_path, 2)), jobs=0)
