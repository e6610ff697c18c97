"""What a target's work takes, learned from what turns took there.

A sample is an amount of work and the seconds it took. The rates are fitted to the last of them by least
squares, drawn to what was believed before as far as they leave it open: a rate that nothing was measured of
stays as it was. Errors count by share, so that a long turn is worth no more than a short one.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, cast

import msgspec
import numpy as np
from msgspec import Meta

from policies.types import BELIEVED, Candidate, Confidence, Rates, Turn

FIELDS: Final = ("prefill_s", "growth_s", "own_s", "remote_s", "first_s", "decode_s", "disk_s")
_N: Final = len(FIELDS)
_Positive = Annotated[float, Meta(gt=0)]

# What a sample leaves of those before it: the last 8 make up three quarters of what is believed.
_KEEP: Final = 0.85
# How far a sample is off by chance, as a share.
_NOISE: Final = 0.2
# Shorter times are mostly the network's and the scheduler's.
_FLOOR_S: Final = 0.005
# A sample so many times off is put aside.
_STRANGE: Final = 2.5
# The target has changed where the logarithms by which samples are off on one side, each less _CHANCE, add up
# to as much as three strange ones make, without having fallen to nothing. (Three in a row alone missed two in
# ten changes to a third of the speed: noise, and what does not get slower with the engine, broke the row.)
_CHANCE: Final = math.log(1.5)
_CHANGED: Final = 3 * (math.log(_STRANGE) - _CHANCE) - 1e-9
# The last of them that the new rates rest on.
_SINCE: Final = 8
# What a change leaves of what was measured before it.
_KEEP_AFTER_CHANGE: Final = 0.05
# How far samples are taken to be off, as logarithms, before any are known, and as if so many had been.
_SPREAD: Final = 0.3
_SPREAD_SAMPLES: Final = 2.0
# What sets a target apart from the others counts half after so long: it may be over, and nobody would know
# where turns go elsewhere for it.
_APART_S: Final = 120.0
# Measurements count half after so long.
_HALF_LIFE_S: Final = 900.0
_LEAST, _MOST = 1e-3, 1e4
# Of so many turns that waited for nobody the quickest tell what every turn takes anyway: what such a turn
# took less twice its work, as it is not known yet which of the two is which.
_ALONE: Final = 32
_WORK_TWICE: Final = 2.0
# What is usual is the mean of so many samples.
_USUAL: Final = 20
# How far, as logarithms, a target must be from the others to be no longer taken for one of them, and to be
# taken for another, beyond what chance explains: by a tenth, and by half.
_SAME: Final = math.log(1.1)
_OTHER: Final = math.log(1.5)
# Up to so many targets of a model that are taken together the more are remembered the more there are.
_TOGETHER: Final = 8
# How far what is believed may be off: by 5 times what was believed at first.
_PRIOR: Final = 1 / 5**2
_PRIOR_OF_EACH: Final = np.eye(_N) * _PRIOR
# The columns of an inverse, and one more for the estimate.
_SOUGHT: Final = np.eye(_N, _N + 1)


class Work(msgspec.Struct, frozen=True, gc=False):
    """tokens: to compute. context: tokens of context before each of them, summed.

    own, remote, disk: tokens to pull. turns: first steps. decoding: steps times the turns
    that decode in them.
    """

    tokens: float = 0.0
    context: float = 0.0
    own: float = 0.0
    remote: float = 0.0
    turns: float = 0.0
    decoding: float = 0.0
    disk: float = 0.0

    @property
    def pulled(self) -> float:
        return self.own + self.remote + self.disk

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(_amounts(self), _amounts(other), strict=True)))


def _amounts(work: Work) -> tuple[float, ...]:
    return msgspec.structs.astuple(work)


def work_of(turn: Turn, candidate: Candidate, step_tokens: int) -> Work:
    """What `turn` makes `candidate` do."""
    local = max(candidate.local_tokens, candidate.coming_tokens)
    pulled = max(0, candidate.pool_tokens - local)
    own = min(candidate.own_segment_tokens, pulled)
    disk = min(candidate.disk_tokens, pulled - own)
    computed = max(0, turn.prompt_tokens - local - pulled)
    decoding = candidate.inflight + candidate.foreign
    return Work(
        computed,
        computed * (turn.prompt_tokens - computed * 0.5),
        own,
        pulled - own - disk,
        1.0,
        decoding * (1 + computed / step_tokens),
        disk,
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
    disk_tokens_per_s: _Positive = 25_000.0

    @classmethod
    def of(cls, rates: Rates) -> "InUnits":
        return cls(
            1 / max(rates.prefill_s, 1e-12),
            1000 * rates.growth_s / max(rates.prefill_s, 1e-12),
            1 / max(rates.own_s, 1e-12),
            1 / max(rates.remote_s, 1e-12),
            1e3 * rates.first_s,
            1e3 * rates.decode_s,
            1 / max(rates.disk_s, 1e-12),
        )

    def rates(self) -> Rates:
        return Rates(
            1 / self.prefill_tokens_per_s,
            self.growth_per_1k / 1000 / self.prefill_tokens_per_s,
            1 / self.own_tokens_per_s,
            1 / self.remote_tokens_per_s,
            self.first_step_ms / 1e3,
            self.decode_ms / 1e3,
            1 / self.disk_tokens_per_s,
        )


class _Drift:
    """How far samples are off on one side, summed up (a CUSUM). side: 1 for slower than expected, -1."""

    __slots__ = ("_side", "_sum", "since")

    def __init__(self, side: int) -> None:
        self._side = side
        self._sum = 0.0
        self.since: deque[tuple[np.ndarray[Any, Any], float]] = deque(maxlen=_SINCE)

    def add(self, off: float, amounts: "np.ndarray[Any, Any]", seconds: float) -> bool:
        """Whether it is too much for chance, with this sample that is off by `off`, a logarithm."""
        self._sum += min(self._side * off, math.log(_STRANGE)) - _CHANCE
        if self._sum <= 0.0:
            self._sum = 0.0
            self.since.clear()
            return False
        self.since.append((amounts, seconds))
        return self._sum >= _CHANGED


class Learner:
    """The rates of one target. Time is passed in, in seconds of any clock that does not go back."""

    __slots__ = (
        "_alone",
        "_at",
        "_drifts",
        "_evidence",
        "_keep",
        "_known",
        "_measured",
        "_prior",
        "_seconds",
        "_square",
        "_theta",
        "_usual",
        "anyway_s",
        "rates",
        "samples",
    )

    def __init__(self, prior: Rates = BELIEVED) -> None:
        self.rates = prior
        self.samples = 0
        self._keep = _KEEP
        # Rates are fitted as multiples of the prior: numbers about 1, all uncertain by about as much.
        self._prior = np.array([max(v, 1e-12) for v in msgspec.structs.astuple(prior)[:_N]])
        self._theta = np.ones(_N)
        # As in `rates`; an array takes longer to make than to go by.
        self._seconds = np.array(msgspec.structs.astuple(prior)[:_N])
        self._known = np.zeros((_N, _N))
        self._usual = np.zeros(_N)
        # How far the last samples were off, squared, and how many these are.
        self._square = _SPREAD**2
        self._evidence = 0.0
        self._at = 0.0
        self._measured = False
        self._drifts = _Drift(1), _Drift(-1)
        self._alone: deque[float] = deque(maxlen=_ALONE)
        # What every turn takes at the least, whatever else it has to do.
        self.anyway_s = 0.0

    def alone(self, work_s: float, seconds: float) -> None:
        """A turn that waited for nobody, with work that should take `work_s`, took `seconds`."""
        self._alone.append(seconds - _WORK_TWICE * work_s)
        self.anyway_s = sorted(self._alone)[len(self._alone) // 10]

    def share(self, targets: int) -> None:
        """Samples come from so many targets."""
        self._keep = _KEEP ** (1 / min(max(targets, 1), _TOGETHER))

    def learn(self, work: Work, seconds: float, now: float) -> None:
        """`work`, alone on the target, took `seconds`."""
        work_done = np.array(_amounts(work))
        amounts = work_done * self._prior
        expected = float(amounts @ self._theta)
        self._age(now)
        self.samples += 1
        self._usual += (work_done - self._usual) / min(self.samples, _USUAL)
        off = math.log(max(seconds, _FLOOR_S) / max(expected, _FLOOR_S))
        known = self._evidence + _SPREAD_SAMPLES
        self._square += (off * off - self._square) / (known + 1.0)
        self._evidence = self._evidence * _KEEP + 1.0
        if self._measured:
            for drift in self._drifts:
                if drift.add(off, amounts, seconds):
                    self._change(drift.since)
                    return
            if abs(off) >= math.log(_STRANGE):
                return
        self._take(amounts, seconds)

    def _change(self, since: Sequence[tuple["np.ndarray[Any, Any]", float]]) -> None:
        self._known *= _KEEP_AFTER_CHANGE
        # That they were off was no chance.
        self._square, self._evidence = _SPREAD**2, float(len(since))
        for amounts, seconds in since:
            self._take(amounts, seconds)
        self._drifts = _Drift(1), _Drift(-1)

    def _age(self, now: float) -> None:
        if self._at:
            self._known *= 0.5 ** (max(0.0, now - self._at) / _HALF_LIFE_S)
            self._evidence *= 0.5 ** (max(0.0, now - self._at) / _APART_S)
        self._at = now

    def _take(self, amounts: "np.ndarray[Any, Any]", seconds: float) -> None:
        self._measured = True
        expected = float(amounts @ self._theta)
        scale = max(expected, seconds, _FLOOR_S) * _NOISE
        # A rate forgets as far as this sample tells of it: pulls are not forgotten by turns without any.
        parts = amounts * self._theta
        keep = np.sqrt(self._keep ** (parts / max(float(parts.sum()), 1e-12)))
        known = self._known * (keep[:, None] * keep)
        pull = known @ self._theta + amounts * seconds / scale**2
        self._known = known + amounts[:, None] * amounts / scale**2
        self._fit(pull)

    def _fit(self, pull: "np.ndarray[Any, Any]") -> None:
        """Least squares without negative rates: one that would be is taken for nothing."""
        information = self._known + _PRIOR_OF_EACH
        # Drawn to the last estimate, not to the first belief: else every sample would draw it back.
        target = pull + _PRIOR * self._theta
        # One call, for the estimate and for how sure it is: the calls take longer than the sums.
        sought = _SOUGHT.copy()
        sought[:, _N] = target
        solved = np.linalg.solve(information, sought)
        theta, spread = solved[:, _N], solved.diagonal()
        free = theta >= 0
        while not (theta >= 0).all():
            theta = np.zeros(_N)
            if free.any():
                theta[free] = np.linalg.solve(information[np.ix_(free, free)], target[free])
            free &= theta >= 0
        theta = np.minimum(theta, _MOST)
        theta[0] = max(theta[0], _LEAST)
        self._theta = theta
        sure = np.minimum(np.maximum(1.0 - spread * _PRIOR, 0.0), 1.0).round(4).tolist()
        self._seconds = theta * self._prior
        self.rates = _rates(self._seconds, sure)

    def among(self, alike: "Learner", now: float) -> Rates:
        """The rates to go by where `alike` has learned from this target and others like it.

        Few samples say little of one target, less the more they are off by chance, and old ones less: as long
        as its usual work takes about as long by its own rates as by the common ones, or no farther from that
        than chance explains, it has the common ones. Rates are mixed as a whole: they were fitted together.
        """
        if not self.samples:
            return alike.rates
        own, common = self._seconds, alike._seconds
        ratio = max(float(own @ self._usual), 1e-9) / max(float(common @ self._usual), 1e-9)
        evidence = self._evidence * 0.5 ** (max(0.0, now - self._at) / _APART_S)
        chance = 2.0 * math.sqrt(self._square / max(evidence, 1e-9))
        apart = (abs(math.log(ratio)) - chance - _SAME) / (_OTHER - _SAME)
        if apart <= 0.0:
            return alike.rates
        if apart >= 1.0:
            return self.rates
        confidence = np.array(self.rates.confidence) * apart + np.array(alike.rates.confidence) * (1 - apart)
        return _rates(own * apart + common * (1 - apart), confidence.round(4).tolist())


def _rates(seconds: Iterable[float], confidence: Iterable[float]) -> Rates:
    prefill, growth, own, remote, first, decode, disk = map(float, seconds)
    return Rates(prefill, growth, own, remote, first, decode, disk, cast(Confidence, tuple(confidence)))
