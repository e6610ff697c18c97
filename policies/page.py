"""What one target was given to do: leases of turns under way there, and what is learned from them."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from policies.drain import UnderWay
from policies.rates import Learner, Work
from policies.recent import Booked, Recent
from policies.sessions import NOWHERE, Stay
from policies.types import Rates

# Where turns never stop queueing, so many of them make a sample; each alone would be off by how they overlap.
_SAMPLE_TURNS: Final = 8
# A first token that comes so soon after another one is of the same step, which computed both turns: no sample
# begins between them. Where one did, 800 tokens took no time, and all turns went to that target.
_STEP_S: Final = 0.005
# A turn is held up when it is so much later than expected; less is the network, or a rate not yet learned.
LATE_S: Final = 1.0
# What others teach of a target is taken over so often: 10 us each.
_RATES_S: Final = 1.0
# What one turn counts in how long turns decode.
_TURN_SHARE: Final = 0.1
# An answer in one piece must have its first token after so many times the time expected.
_PATIENCE: Final = 1.5
_NO_WORK: Final = Work()
_NOTHING: Final = Booked()


class Load(msgspec.Struct, frozen=True, gc=False):
    """What a Candidate says of its load."""

    queued_tokens: int = 0
    queued_turns: int = 0
    ahead_s: float = 0.0
    inflight: int = 0
    foreign: float = 0.0
    recent_tokens: float = 0.0
    recent_pulled: float = 0.0
    queued_s: float = 0.0
    recent_s: float = 0.0
    recent_pull_s: float = 0.0
    held_tokens: int = 0
    decoding_tokens: int = 0
    turn_s: float = 0.0


class Line(msgspec.Struct, frozen=True, gc=False):
    """Turns that wait for their first token. ends: when the last of them is expected to have it; head: when
    the first of them is. turns: how many; tokens: that they compute, seconds: in which they should."""

    ends: float = -math.inf
    head: float = math.inf
    turns: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def ahead(self, now: float, first_s: float) -> float:
        """For how many seconds more than `first_s` a turn sent now would wait for its first token.

        One that takes longer than expected has not had more than all its work, nor have those behind it. What
        keeps it (a stalled engine, a load that hangs) is taken to last as long again.
        """
        late = max(0.0, now - self.head)
        if late > LATE_S:
            late += late
        return max(0.0, self.ends + late - now - first_s)


class Others(msgspec.Struct, frozen=True, gc=False):
    """What a target has under way beyond what was sent from here, as its last reports say.

    tokens: of its cache; below 0 where turns sent from here share some. turns: not ended; below 0 where the
    report was made before some of ours were sent.
    """

    tokens: float = 0.0
    turns: float = 0.0


class Lease:
    """One turn's load on one target, from the decision to its end: given back once, from any exit path.

    keys: the prompt's chain, until the first token. prompt: its tokens. since: when its prefill was over.
    clean: how long its prefill takes teaches something. done_by: when that must be over. over_at: from when
    on it is taken to be: an answer in one piece says so only at its end. stay: its session's.
    at: when it was sent. due: when it would have its first token if all its work were none, and nobody before
    it. booked: its work, in seconds, too; seconds: what all of it is expected to take. alone: nobody waited
    there when it was sent.
    """

    __slots__ = (
        *("_page", "alone", "at", "booked", "clean", "done_by", "due", "keys", "over_at", "prompt"),
        *("seconds", "since", "stay", "streams", "work"),
    )

    def __init__(
        self,
        page: "Page",
        work: Work,
        keys: Sequence[int],
        prompt: int,
        streams: bool,
        clean: bool,
        stay: Stay = NOWHERE,
    ) -> None:
        self._page: Page | None = page
        self.work = work
        self.keys = keys
        self.prompt = prompt
        self.streams = streams
        self.clean = clean
        self.stay = stay
        self.since: float | None = None
        self.done_by = self.at = self.due = self.seconds = 0.0
        self.over_at = math.inf
        self.booked = _NOTHING
        self.alone = False

    def first_token(self, now: float, *, answered: bool = True) -> None:
        """Its prefill is over. `answered`: by a token, so that the time says something."""
        if self._page is not None:
            self._page.first_token(self, now, answered)

    def ended(self, now: float) -> None:
        """However it ended; any number of times."""
        page, self._page = self._page, None
        if page is not None:
            page.ended(self, now)
            self.stay.ended(now)


class Lasting:
    """For how long turns decode on targets that are taken to be alike.

    On one where none has ended yet they are taken to last as long as elsewhere: not counted at all, they drew
    turns to where the cache was full. strangers: what to call when that changes, for each such target.
    """

    __slots__ = ("seconds", "strangers")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.strangers: dict[Page, Callable[[], None]] = {}

    def learn(self, took: float) -> None:
        self.seconds = _moved(self.seconds, took)
        for touched in self.strangers.values():
            touched()


def _moved(mean: float, took: float) -> float:
    return mean + (took - mean) * _TURN_SHARE if mean else took


class Page:
    """One target's page."""

    __slots__ = (
        "_rates",
        "_rates_at",
        "alike",
        "decoding",
        "done",
        "free_at",
        "held",
        "inflight",
        "lasting",
        "learner",
        "learns",
        "opens",
        "peak",
        "queued",
        "recent",
        "since",
        "total",
        "touched",
        "turn_s",
        "weight",
    )

    def __init__(
        self,
        total: UnderWay,
        alike: Learner,
        lasting: Lasting,
        learns: bool,
        touched: Callable[[], None],
    ) -> None:
        """total: of all targets. alike, lasting: learn from all that are taken to be like this one.

        touched: told of changes.
        """
        self.total = total
        self.alike = alike
        self.lasting = lasting
        self.touched = touched
        self.learns = learns
        # Its share of the load, compared with others'.
        self.weight = 1.0
        self.inflight = 0
        # The most turns at once since the worker's report was last taken over.
        self.peak = 0
        self.queued: dict[Lease, None] = {}
        self.done = _NO_WORK
        # First steps in that time. They overlap: what comes while others are under way waits for no more of
        # them, and a target that is busy would seem the faster for it.
        self.opens = 0.0
        # When it was done with the last turn that waited.
        self.free_at = -math.inf
        # Context of turns under way, and that of those which decode.
        self.held = self.decoding = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Whatever it did before, and how fast, says nothing any more; what is under way is still so."""
        self.learner = Learner(self.alike.rates)
        self._rates, self._rates_at = self.alike.rates, (-1, -math.inf)
        self.recent = Recent()
        # Since when the work in `done` was being done; None while nothing tells how long it took.
        self.since: float | None = None
        # Seconds for which a turn decodes.
        self.turn_s = 0.0
        self.lasting.strangers[self] = self.touched

    @property
    def is_blank(self) -> bool:
        """Whether one that is made anew would be the same."""
        return not (self.inflight or self.recent.tokens or self.learner.samples)

    def rates(self, now: float) -> Rates:
        if not self.learner.samples:
            # At once: else it would seem faster for a second than the one that the others were learned from.
            return self.alike.rates
        samples, at = self._rates_at
        if samples != self.learner.samples or now - at > _RATES_S:
            self._rates, self._rates_at = self.learner.among(self.alike, now), (self.learner.samples, now)
        return self._rates

    @property
    def rated_at(self) -> float:
        return self._rates_at[1]

    def sent(self, lease: Lease, now: float) -> None:
        self.touched()
        work, queued = lease.work, self.queued
        self.total.sent(work.tokens, now)
        self.inflight += 1
        if self.inflight > self.peak:
            self.peak = self.inflight
        self.held += lease.prompt
        if queued:
            # Each was to be over after all before it.
            before = next(reversed(queued)).done_by
            begins = before if before > now else now
        else:
            begins = now
            self.since, self.done, self.opens = now, _NO_WORK, 1.0
        rates = self.rates(now)
        lease.at, lease.booked = now, Booked.of(work, rates)
        lease.seconds = lease.booked.seconds + _pulling_s(work, rates)
        self.recent.add(lease.booked, now)
        lease.due = now + max(rates.first_s, self.alike.anyway_s)
        lease.alone = not queued
        lease.done_by = begins + _PATIENCE * (lease.seconds + rates.first_s)
        if not lease.streams:
            lease.over_at = lease.done_by
        if not lease.clean:
            self.since = None
        queued[lease] = None

    def first_token(self, lease: Lease, now: float, answered: bool) -> None:
        if lease not in self.queued:
            return
        self.touched()
        self._leave(lease, now)
        self.total.went(now, 0, lease.work.tokens)
        lease.since = now
        self.decoding += lease.prompt
        if not answered:
            self._take_back(lease, now)
        if not (answered and lease.clean):
            self.since = None
        elif lease.alone and self.learns:
            self.alike.alone(lease.seconds, now - lease.at)
        # Prompts are computed one after the other, but for what each takes anyway: was the next one waiting?
        following = next(iter(self.queued), None)
        waits = following is not None and following.due <= now
        if self.since is not None and (self.opens or now - self.since >= _STEP_S):
            self.done += lease.work
            if waits and self.done.turns < _SAMPLE_TURNS:
                return
            if self.learns:
                work = msgspec.structs.replace(self.done, turns=self.opens)
                for learner in (self.learner, self.alike):
                    learner.learn(work, now - self.since, now)
        clear = answered and (following is None or all(t.clean or now > t.over_at for t in self.queued))
        start, self.opens = (now, 0.0) if waits or following is None else (following.at, 1.0)
        self.since, self.done = (start if clear else None), _NO_WORK

    def ended(self, lease: Lease, now: float) -> None:
        self.touched()
        self.inflight -= 1
        self.held -= lease.prompt
        if lease.since is not None:
            self.decoding -= lease.prompt
            took = now - lease.since
            self.lasting.strangers.pop(self, None)
            self.turn_s = _moved(self.turn_s, took)
            self.lasting.learn(took)
        waiting = lease in self.queued
        if waiting:
            # How much of it was done nobody knows; no more than there was time for.
            self._leave(lease, now)
            self.since = None
            self._take_back(lease, now)
        self.total.went(now, 1, lease.work.tokens if waiting else 0)

    def _leave(self, lease: Lease, now: float) -> None:
        del self.queued[lease]
        lease.keys = ()
        self.free_at = now

    def _take_back(self, lease: Lease, now: float) -> None:
        """What was not done of it is no recent work: else prompts that are refused would keep others away."""
        done = min(1.0, (now - lease.at) / lease.seconds) if lease.seconds > 0 else 1.0
        self.recent.take_back(lease.booked, 1.0 - done, lease.at)

    def coming(self, keys: Sequence[int], known: int = 0) -> int:
        """Leading blocks of `keys` that turns queued here will compute, or `known` if that is more."""
        most, length = known, len(keys)
        for lease in reversed(self.queued):
            theirs = lease.keys
            # Most share a head and no more: one key tells that a chain is equal no farther than those before.
            if most < length and most < len(theirs) and theirs[most] == keys[most]:
                most = _shared(theirs, keys)
        return most

    def line(self, now: float) -> Line:
        free, head = self.free_at, math.inf
        turns, tokens, seconds = 0, 0.0, 0.0
        for lease in self.queued:
            if now > lease.over_at:
                continue
            # They are computed one after the other; what each takes anyway passes while others are.
            free = (lease.due if lease.due > free else free) + lease.seconds
            if not turns:
                head = free
            turns += 1
            tokens += lease.work.tokens
            seconds += lease.booked.seconds
        return Line(free, head, turns, tokens, seconds)

    def load(self, now: float, others: "Others") -> Load:
        recent = self.recent.now(now)
        decoding = max(0, self.decoding + int(others.tokens))
        if not self.queued:
            return Load(
                inflight=self.inflight,
                foreign=max(0.0, others.turns),
                recent_tokens=recent.tokens,
                recent_pulled=recent.pulled,
                recent_s=recent.seconds,
                recent_pull_s=recent.pull_s,
                held_tokens=decoding,
                decoding_tokens=decoding,
                turn_s=self.turn_s or self.lasting.seconds,
            )
        line = self.line(now)
        return Load(
            int(line.tokens),
            line.turns,
            line.ahead(now, self.rates(now).first_s),
            self.inflight,
            max(0.0, others.turns),
            max(0.0, recent.tokens - line.tokens),
            recent.pulled,
            line.seconds,
            max(0.0, recent.seconds - line.seconds),
            recent.pull_s,
            decoding + self.held - self.decoding,
            decoding,
            self.turn_s or self.lasting.seconds,
        )


def _pulling_s(work: Work, rates: Rates) -> float:
    return work.own * rates.own_s + work.remote * rates.remote_s + work.disk * rates.disk_s


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading keys are equal. A key stands for all blocks before it, too."""
    shorter = min(len(one), len(other))
    if not shorter or one[0] != other[0]:
        return 0
    if one[shorter - 1] == other[shorter - 1]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda block: one[block] != other[block])
