"""Policies of installed packages: whatever they return, turns see a decision that can be carried out."""

import inspect
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final

from policies.spread import unplaced
from policies.types import Candidate, Decision, Policy, Turn, Weigh, action_of

# A reason is a label in metrics and a word in logs.
_REASON_CHARACTERS: Final = 100


class UnsoundDecision(ValueError):
    """The policy raised, or chose nobody, or somebody who may not be chosen; the message says which."""


class Installed:
    """`policy` as others may rely on it. Raises UnsoundDecision, whatever `policy` raises or returns."""

    __slots__ = ("_name", "_policy")

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        shown = tuple(candidates)
        able = {c.target: c for c in shown if not c.excluded}
        if not able:
            return unplaced(self._name, shown)
        try:
            given: object = self._policy(turn, shown)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # SystemExit and CancelledError, too: neither gateway nor turn is the policy's to end.
            raise UnsoundDecision(f"{self._name}: {said(error)}") from error
        if inspect.iscoroutine(given):
            given.close()
        # No subclass of it either: that could raise or change under whoever reads it later.
        if type(given) is not Decision:
            raise UnsoundDecision(f"{self._name} returned {type(given).__name__}, no Decision")
        chosen = able.get(given.target) if type(given.target) is str else None
        if chosen is None:
            raise UnsoundDecision(f"{self._name} chose one that may not be chosen, or nobody")
        return Decision(
            chosen.target,
            action_of(chosen),
            _in_words(given.reason),
            self._name,
            shown,
            _Terms(given.weigh) if callable(given.weigh) else None,
            given.unit if type(given.unit) is str and given.unit in ("tokens", "s") else "",
        )


def said(error: BaseException) -> str:
    """In one line of bounded length; also of an error that can't say what it is."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text.encode("utf-8", "replace").decode().replace("\n", " ")[:200]


def _in_words(reason: object) -> str:
    if type(reason) is not str or not reason.isprintable():
        return "no reason that can be shown"
    return reason[:_REASON_CHARACTERS]


class _Terms:
    """Cost terms as `weigh` gives them; none where it fails. Who reads a decision must not see it fail."""

    __slots__ = ("_weigh",)

    def __init__(self, weigh: Weigh) -> None:
        self._weigh = weigh

    def __call__(self, candidate: Candidate) -> Mapping[str, float]:
        try:
            terms = {str(name): float(value) for name, value in self._weigh(candidate).items()}
        except KeyboardInterrupt:
            raise
        except BaseException:
            return {}
        return terms if all(map(isfinite, terms.values())) else {}
