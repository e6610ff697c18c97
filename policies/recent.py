"""What a target was given to do lately. It fades: by half in HALF_LIFE_S."""

import math
from collections.abc import Sequence

import msgspec

from policies.cost import HALF_LIFE_S
from policies.rates import Work
from policies.types import Rates


class Booked(msgspec.Struct, frozen=True, gc=False):
    """The work of so many turns. tokens: to compute; pulled: to pull; both also in seconds, as they were
    expected to take when they were sent: by rates of today one hiccup would make all that was done before it
    seem slow.

    pull_s: were all of it at other targets. What a target finds in its own segment it reads in next to no
    time, but counted as such links seemed idle: over 5 GB/s mean TTFT was 0.77 s instead of 0.66 s.
    """

    tokens: float = 0.0
    pulled: float = 0.0
    seconds: float = 0.0
    pull_s: float = 0.0
    turns: float = 0.0

    def times(self, share: float) -> "Booked":
        return Booked(*(share * each for each in msgspec.structs.astuple(self)))

    @classmethod
    def of(cls, work: Work, rates: Rates) -> "Booked":
        return cls(
            work.tokens,
            work.pulled,
            work.tokens * rates.prefill_s + work.context * rates.growth_s,
            work.pulled * rates.remote_s,
            1.0,
        )


def summed(all_booked: Sequence[Booked]) -> Booked:
    return Booked(*map(sum, zip(*map(msgspec.structs.astuple, all_booked), strict=True)))


class Recent:
    """The sum of what was booked, as of `at`."""

    __slots__ = ("at", "pull_s", "pulled", "seconds", "tokens", "turns")

    def __init__(self) -> None:
        self.tokens = self.pulled = self.seconds = self.pull_s = self.turns = 0.0
        self.at = 0.0

    def add(self, booked: Booked, now: float) -> None:
        left = math.exp2((self.at - now) / HALF_LIFE_S)
        self.tokens = self.tokens * left + booked.tokens
        self.pulled = self.pulled * left + booked.pulled
        self.seconds = self.seconds * left + booked.seconds
        self.pull_s = self.pull_s * left + booked.pull_s
        self.turns = self.turns * left + booked.turns
        self.at = now

    def at_least(self, booked: Booked, now: float) -> None:
        """Whatever it is less is taken to be as much."""
        mine = self.now(now)
        self.tokens = max(mine.tokens, booked.tokens)
        self.pulled = max(mine.pulled, booked.pulled)
        self.seconds = max(mine.seconds, booked.seconds)
        self.pull_s = max(mine.pull_s, booked.pull_s)
        self.turns = max(mine.turns, booked.turns)
        self.at = now

    def take_back(self, booked: Booked, share: float, then: float) -> None:
        """So much of what was booked at `then` was not done."""
        if self.at < then:
            # Begun anew since: nothing of it is counted, and 2 to the power of 17 hours is no float.
            return
        share *= math.exp2((then - self.at) / HALF_LIFE_S)
        self.tokens = max(0.0, self.tokens - booked.tokens * share)
        self.pulled = max(0.0, self.pulled - booked.pulled * share)
        self.seconds = max(0.0, self.seconds - booked.seconds * share)
        self.pull_s = max(0.0, self.pull_s - booked.pull_s * share)
        self.turns = max(0.0, self.turns - booked.turns * share)

    def now(self, now: float) -> Booked:
        """What is left of it."""
        left = math.exp2((self.at - now) / HALF_LIFE_S)
        return Booked(
            self.tokens * left, self.pulled * left, self.seconds * left, self.pull_s * left, self.turns * left
        )
