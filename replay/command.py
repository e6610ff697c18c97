"""`moongate replay` behind its flags: words to settings, progress, files."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.document import BadDocument, read
from policies.plan import Plan
from policies.registry import BadPolicyOptions, BrokenPolicy, UnknownPolicy
from replay import plots, report
from replay.at_once import SimulationFailed, processors
from replay.decisions import BadDecisions, as_text, decide_again
from replay.experiment import BadExperiment, Experiment, run
from replay.profile import BadProfile
from replay.traces.types import BadTrace

_EVERY_S = 0.5


class ReplayError(ValueError):
    """What the user must change."""


class ReplayFailed(RuntimeError):
    """What came of it, though nothing is wrong with how it was called."""


def replay(
    experiment: Experiment,
    *,
    figures: Sequence[str] = (),
    options: Sequence[str] = (),
    unlike: Sequence[str] = (),
    json: Path | None = None,
    page: Path | None = None,
    plot: Path | None = None,
    jobs: int | None = None,
) -> None:
    """Runs, writes the files and prints the table. Raises ReplayError, ReplayFailed.

    figures: `KEY=NUMBER` for the profile. options: `POLICY.OPTION=VALUE`. unlike: `COUNT:PROFILE` or
    `COUNT:KEY=NUMBER,...`. jobs: simulations at a time; None: one on each processor.
    """
    if jobs is not None and jobs < 1:
        raise ReplayError(f"--jobs must be at least 1, not {jobs}")
    if plot is not None and plot.suffix not in plots.SUFFIXES:
        raise ReplayError(f"{plot}: plots are written as {' or '.join(plots.SUFFIXES)}")
    if plot is not None and not plots.available():
        raise ReplayError("plots need matplotlib: pip install 'moongate[plots]'")
    _check_paths(experiment.file, [path for path in (json, page, plot) if path is not None])
    experiment = replace(
        experiment,
        figures=_figures(figures),
        options=_options(options, experiment.policies),
        unlike=[_unlike(word) for word in unlike],
    )
    progress = _Progress()
    try:
        outcome = run(experiment, progress, processors() if jobs is None else jobs)
    except SimulationFailed as wrong:
        raise ReplayFailed(f"a simulation failed: {wrong}") from wrong
    except (BadTrace, BadProfile, BadExperiment, UnknownPolicy, BadPolicyOptions, BrokenPolicy) as wrong:
        raise ReplayError(str(wrong)) from None
    finally:
        progress.end()
    unwritten = [
        *_unwritten(json, lambda: report.encoded(outcome)),
        *_unwritten(page, lambda: report.page(outcome).encode()),
        *_unwritten(plot, lambda: plots.drawn(outcome, plot.suffix if plot is not None else "")),
    ]
    print(report.table(outcome), flush=True)
    if unwritten:
        raise ReplayFailed("; ".join(unwritten))


def _check_paths(trace: str, paths: Sequence[Path]) -> None:
    """Before the run, which may take long."""
    try:
        trace.encode()
    except UnicodeEncodeError:
        raise ReplayError(f"{trace!a}: its name is not UTF-8, so that no report could hold it") from None
    taken = {Path(trace).resolve(): "is the trace"}
    for path in paths:
        if not path.parent.is_dir():
            raise ReplayError(f"{path}: there is no directory {path.parent}")
        if path.is_dir():
            raise ReplayError(f"{path}: is a directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ReplayError(f"{path}: cannot be written")
        place = path.resolve()
        if place in taken and not path.is_char_device():
            raise ReplayError(f"{path}: {taken[place]}")
        taken[place] = "is another result's file, too"


def _unwritten(path: Path | None, made: Callable[[], bytes]) -> list[str]:
    """Writes what was made, whole or not at all. Returns why it is not there."""
    if path is None:
        return []
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(made())
            return []
        place = path.resolve()
        part = place.with_name(f".{place.name}.part")
        try:
            part.write_bytes(made())
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
    except OSError as wrong:
        return [f"{path}: {wrong.strerror}"]
    return []


def replay_decisions(file: Path, *, policies: Sequence[str] = (), options: Sequence[str] = ()) -> bool:
    """Decides a recorded log again and prints what came out. Returns whether all was equal.

    policies, options: others that are tried on it; as for `replay`. Raises ReplayError.
    """
    given = _options(options, policies)
    try:
        documents = {name: read({"policy": name, "options": given.get(name, {})}) for name in policies}
        found = decide_again(file, {name: Plan(document) for name, document in documents.items()})
    except (BadDocument, BadDecisions) as wrong:
        raise ReplayError(str(wrong)) from None
    print(as_text(found))
    return found.equal == found.decisions


class _Progress:
    """One line on a terminal; nothing where stderr is a file."""

    def __init__(self) -> None:
        # There is none where it was closed.
        self._shown = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]
        self._at = 0.0

    def __call__(self, name: str, ended: int, total: int) -> None:
        now = time.monotonic()
        if self._shown and now - self._at >= _EVERY_S:
            self._at = now
            text = f"{name}: {ended:,} of {total:,} turns"
            # A line that is wrapped could not be overwritten.
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown and self._at:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _figures(words: Sequence[str], flag: str = "--set takes") -> Mapping[str, float]:
    found: dict[str, float] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key in found:
            raise ReplayError(f"{key} is set twice")
        try:
            found[key] = float(value)
        except ValueError:
            raise ReplayError(f"{flag} KEY=NUMBER, not {word!r}") from None
    return found


def _unlike(word: str) -> tuple[int, str, Mapping[str, float]]:
    count, _, what = word.partition(":")
    if not count.isdecimal() or not what:
        raise ReplayError(f"--unlike takes COUNT:PROFILE or COUNT:KEY=NUMBER,..., not {word!r}")
    if "=" not in what:
        return int(count), what, {}
    return int(count), "", _figures(what.split(","), "after COUNT: --unlike takes a profile or")


def _options(words: Sequence[str], policies: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, _, value = word.partition("=")
        policy, _, option = name.rpartition(".")
        if policy not in policies or not option:
            known = ", ".join(policies) or "the policies given"
            raise ReplayError(f"--option takes POLICY.OPTION=VALUE for one of {known}, not {word!r}")
        given = found.setdefault(policy, {})
        if option in given:
            raise ReplayError(f"{name} is given twice")
        given[option] = value
    return found
