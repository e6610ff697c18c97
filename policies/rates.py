"""What a target's work takes, learned from what turns took there.

A sample is an amount of work and the seconds it took. The rates are fitted to the last of them by least
squares, drawn to what was believed before as far as they leave it open: a rate that nothing was measured of
stays as it was. Errors count by share, so that a long turn is worth no more than a short one.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final, cast

import msgspec
import numpy as np
from msgspec import Meta

from policies.types import BELIEVED, Candidate, Rates, Turn

FIELDS: Final = ("prefill_s", "growth_s", "own_s", "remote_s", "first_s", "decode_s")
_N: Final = len(FIELDS)
_Positive = Annotated[float, Meta(gt=0)]

# What a sample leaves of those before it: the last 8 make up three quarters of what is believed.
_KEEP: Final = 0.85
# How far a sample is off by chance, as a share.
_NOISE: Final = 0.2
# Shorter times are mostly the network's and the scheduler's.
_FLOOR_S: Final = 0.005
# A sample so many times off is put aside. Several on the same side are no chance: the target has changed.
_STRANGE: Final = 2.5
_STRANGE_IN_A_ROW: Final = 3
# What a change leaves of what was measured before it.
_KEEP_AFTER_CHANGE: Final = 0.05
# Measurements count half after so long.
_HALF_LIFE_S: Final = 900.0
_LEAST, _MOST = 1e-3, 1e4
# How far what is believed may be off: by 5 times what was believed at first.
_PRIOR: Final = 1 / 5**2
_PRIOR_OF_EACH: Final = np.eye(_N) * _PRIOR


class Work(msgspec.Struct, frozen=True, gc=False):
    """tokens: to compute. context: tokens of context before each of them, summed.

    own, remote: tokens to pull. turns: first steps. decoding: steps times the turns that decode in them.
    """

    tokens: float = 0.0
    context: float = 0.0
    own: float = 0.0
    remote: float = 0.0
    turns: float = 0.0
    decoding: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(_amounts(self), _amounts(other), strict=True)))


def _amounts(work: Work) -> tuple[float, ...]:
    return msgspec.structs.astuple(work)


def work_of(turn: Turn, candidate: Candidate, step_tokens: int) -> Work:
    """What `turn` makes `candidate` do."""
    local = max(candidate.local_tokens, candidate.coming_tokens)
    pulled = max(0, candidate.pool_tokens - local)
    own = min(candidate.own_segment_tokens, pulled)
    computed = max(0, turn.prompt_tokens - local - pulled)
    decoding = max(candidate.running, candidate.inflight)
    return Work(
        computed,
        computed * (turn.prompt_tokens - computed * 0.5),
        own,
        pulled - own,
        1.0,
        decoding * (1 + computed / step_tokens),
    )


class InUnits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates in the units that people use; the defaults are those of `BELIEVED`, rounded.

    growth_per_1k: how much dearer each 1,000 tokens of context make a token, as a share.
    """

    prefill_tokens_per_s: _Positive = 20_480.0
    growth_per_1k: Annotated[float, Meta(ge=0)] = 0.01
    own_tokens_per_s: _Positive = 150_000.0
    remote_tokens_per_s: _Positive = 77_000.0
    first_step_ms: _Positive = 20.0
    decode_ms: Annotated[float, Meta(ge=0)] = 0.7

    @classmethod
    def of(cls, rates: Rates) -> "InUnits":
        return cls(
            1 / max(rates.prefill_s, 1e-12),
            1000 * rates.growth_s / max(rates.prefill_s, 1e-12),
            1 / max(rates.own_s, 1e-12),
            1 / max(rates.remote_s, 1e-12),
            1e3 * rates.first_s,
            1e3 * rates.decode_s,
        )

    def rates(self) -> Rates:
        return Rates(
            1 / self.prefill_tokens_per_s,
            self.growth_per_1k / 1000 / self.prefill_tokens_per_s,
            1 / self.own_tokens_per_s,
            1 / self.remote_tokens_per_s,
            self.first_step_ms / 1e3,
            self.decode_ms / 1e3,
        )


class Learner:
    """The rates of one target. Time is passed in, in seconds of any clock that does not go back."""

    __slots__ = ("_at", "_known", "_prior", "_sides", "_strange", "_theta", "rates", "samples")

    def __init__(self, prior: Rates = BELIEVED) -> None:
        self.rates = prior
        self.samples = 0
        # Rates are fitted as multiples of the prior: numbers about 1, all uncertain by about as much.
        self._prior = np.array([max(v, 1e-12) for v in msgspec.structs.astuple(prior)[:_N]])
        self._theta = np.ones(_N)
        self._known = np.zeros((_N, _N))
        self._at = 0.0
        self._strange: list[tuple[np.ndarray[Any, Any], float]] = []
        self._sides = 0

    def learn(self, work: Work, seconds: float, now: float) -> None:
        """`work`, alone on the target, took `seconds`."""
        amounts = np.array(_amounts(work)) * self._prior
        expected = float(amounts @ self._theta)
        self._age(now)
        self.samples += 1
        ratio = max(seconds, _FLOOR_S) / max(expected, _FLOOR_S)
        if self._known.any() and not 1 / _STRANGE < ratio < _STRANGE:
            side = 1 if ratio > 1 else -1
            if self._sides * side < 0:
                self._strange.clear()
            self._sides = side
            self._strange.append((amounts, seconds))
            if len(self._strange) < _STRANGE_IN_A_ROW:
                return
            self._known *= _KEEP_AFTER_CHANGE
            changed, self._strange = self._strange, []
            for each, took in changed:
                self._take(each, took)
            return
        del self._strange[:1]
        self._take(amounts, seconds)

    def _age(self, now: float) -> None:
        if self._at:
            self._known *= 0.5 ** (max(0.0, now - self._at) / _HALF_LIFE_S)
        self._at = now

    def _take(self, amounts: "np.ndarray[Any, Any]", seconds: float) -> None:
        expected = float(amounts @ self._theta)
        scale = max(expected, seconds, _FLOOR_S) * _NOISE
        # A rate forgets as far as this sample tells of it: pulls are not forgotten by turns without any.
        parts = amounts * self._theta
        keep = np.sqrt(_KEEP ** (parts / max(float(parts.sum()), 1e-12)))
        known = self._known * np.outer(keep, keep)
        pull = known @ self._theta + amounts * seconds / scale**2
        self._known = known + np.outer(amounts, amounts) / scale**2
        self._fit(pull)

    def _fit(self, pull: "np.ndarray[Any, Any]") -> None:
        """Least squares without negative rates: one that would be is taken for nothing."""
        information = self._known + _PRIOR_OF_EACH
        # Drawn to the last estimate, not to the first belief: else every sample would draw it back.
        target = pull + _PRIOR * self._theta
        theta = np.linalg.solve(information, target)
        free = theta >= 0
        while not (theta >= 0).all():
            theta = np.zeros(_N)
            if free.any():
                theta[free] = np.linalg.solve(information[np.ix_(free, free)], target[free])
            free &= theta >= 0
        theta = np.minimum(theta, _MOST)
        theta[0] = max(theta[0], _LEAST)
        self._theta = theta
        spread = np.diag(np.linalg.inv(information))
        sure = np.clip(1.0 - spread * _PRIOR, 0.0, 1.0).round(4).tolist()
        confidence = cast("tuple[float, float, float, float, float, float]", tuple(sure))
        prefill, growth, own, remote, first, decode = (float(v) for v in theta * self._prior)
        self.rates = Rates(prefill, growth, own, remote, first, decode, confidence)


def common(prior: Rates, others: Iterable[Rates]) -> Rates:
    """What to believe of a new target: of each rate the median of those measured elsewhere, else `prior`."""
    measured = list(others)
    values: list[float] = []
    for i, name in enumerate(FIELDS):
        known = sorted(float(getattr(r, name)) for r in measured if r.confidence[i] > 0.5)
        values.append(known[len(known) // 2] if known else float(getattr(prior, name)))
    prefill, growth, own, remote, first, decode = values
    return Rates(prefill, growth, own, remote, first, decode)
