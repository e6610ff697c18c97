"""Predicted against reported cached tokens: how far off, where, and whose knowledge is believed less."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

Tier = Literal["local", "pool", "none"]
"""Where the larger part of the predicted tokens was to come from; none: none were predicted."""

Excuse = Literal["", "pool_unknown", "events_missing", "in_doubt", "events_on_their_way"]
"""Why a prediction is not to be judged; "": it is.

pool_unknown: the pool did not answer in time. events_missing: the target's stream was not exact. in_doubt:
what was known of it was found not to hold. events_on_their_way: it held more than was known, and its events
said so by the time of its answer.
"""

# Upper bounds of the error's size in tokens; the last bucket is open.
BUCKETS: Final = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
_WINDOW: Final = 16
# Answers it takes to judge a target, and to take it back: a single wrong one is an eviction in between.
_LEAST: Final = 8
# An error is forgotten after this long, so that a target that gets no turns any more is tried again.
_FORGET_S: Final = 600.0
_TOO_WRONG: Final = 0.25
_RIGHT_AGAIN: Final = 0.1
_MISMATCHES: Final = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer that reported its cached tokens, to a prompt that was known as a whole."""

    request_id: str
    target: str
    model: str
    tier: Tier
    predicted: int
    actual: int
    block_size: int
    excused: Excuse = ""


@dataclass(slots=True)
class Series:
    """One target, model and tier. over: tokens predicted and not cached; under: cached and not predicted.

    errors: answers by the size of their error, one count more than BUCKETS. excused: answers that were
    predicted without all that is needed; they count in nothing else here.
    """

    turns: int = 0
    exact: int = 0
    predicted_tokens: int = 0
    actual_tokens: int = 0
    over_tokens: int = 0
    under_tokens: int = 0
    excused: int = 0
    errors: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def add(self, sample: Sample) -> None:
        if sample.excused:
            self.excused += 1
            return
        error = abs(sample.predicted - sample.actual)
        self.turns += 1
        self.exact += error == 0
        self.predicted_tokens += sample.predicted
        self.actual_tokens += sample.actual
        self.over_tokens += max(0, sample.predicted - sample.actual)
        self.under_tokens += max(0, sample.actual - sample.predicted)
        self.errors[next((n for n, most in enumerate(BUCKETS) if error <= most), len(BUCKETS))] += 1


@dataclass(slots=True)
class _Judgement:
    """The last fair answers of a target: time, tokens wrong, tokens in all."""

    over: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    under: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    why: str = ""


class Audit:
    """All answers since the start, the last mismatches, and the targets that are demoted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = Series()
        self.series: dict[tuple[str, str, Tier], Series] = {}
        self.mismatches: deque[Sample] = deque(maxlen=_MISMATCHES)
        self._clock = clock
        self._judged: dict[str, _Judgement] = {}

    def add(self, sample: Sample) -> None:
        key = sample.target, sample.model, sample.tier
        for series in (self.total, self.series.setdefault(key, Series())):
            series.add(sample)
        if sample.predicted != sample.actual:
            self.mismatches.append(sample)
        if not sample.excused:
            self._judge(sample)

    def acquit(self, target: str) -> None:
        """`target` is another process now, or out of reach: what was wrong with it may not be any more."""
        self._judged.pop(target, None)

    def forget(self, target: str) -> None:
        """`target` is registered no longer."""
        self.acquit(target)
        for key in [key for key in self.series if key[0] == target]:
            del self.series[key]

    def demoted(self, target: str) -> str:
        """Why `target` is to be believed less; "" if it is not."""
        judged = self._judged.get(target)
        if judged is None or not judged.why:
            return ""
        self._review(judged)
        return judged.why

    def all_demoted(self) -> dict[str, str]:
        return {target: why for target in self._judged if (why := self.demoted(target))}

    def _judge(self, sample: Sample) -> None:
        judged = self._judged.setdefault(sample.target, _Judgement())
        now, off = self._clock(), sample.predicted - sample.actual
        # Within a block nothing is wrong with the knowledge: an eviction, a boundary.
        off = 0 if abs(off) <= sample.block_size else off
        # What the pool fails to give is the pool's to answer for.
        if sample.tier == "local":
            judged.over.append((now, max(0, off), sample.predicted))
        if sample.actual:
            judged.under.append((now, max(0, -off), sample.actual))
        self._review(judged)

    def _review(self, judged: _Judgement) -> None:
        oldest = self._clock() - _FORGET_S
        for window in (judged.over, judged.under):
            while window and window[0][0] < oldest:
                window.popleft()
        over = _wrong(judged.over, bool(judged.why))
        under = _wrong(judged.under, bool(judged.why))
        if over is not None:
            judged.why = (
                f"of {over[1]} tokens that its last {over[2]} answers should have found cached, "
                f"{over[0]} were not: block size, KV groups or events do not fit"
            )
        elif under is not None:
            judged.why = (
                f"{under[0]} of {under[1]} cached tokens of its last {under[2]} answers were not foreseen: "
                "hash seed, template, block size or the pool's key prefix do not fit"
            )
        else:
            judged.why = ""


def _wrong(window: Iterable[tuple[float, int, int]], already: bool) -> tuple[int, int, int] | None:
    """Tokens wrong, tokens in all and answers, if the share is too large; None if it is not."""
    last = list(window)[-_LEAST:] if already else list(window)
    wrong, total = sum(w for _, w, _ in last), sum(t for _, _, t in last)
    if len(last) < _LEAST or not total:
        return None
    return (wrong, total, len(last)) if wrong > total * (_RIGHT_AGAIN if already else _TOO_WRONG) else None
