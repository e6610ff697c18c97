"""What targets have been given to do: the load that policies weigh, and the work that rates are learned from.

The same book is kept by the gateway, in real time, and by the replay, in virtual time.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, KeysView, Sequence
from functools import partial
from typing import Final

import msgspec

from policies.cost import HALF_LIFE_S, STEP_TOKENS
from policies.rates import Learner, Work, work_of
from policies.types import BELIEVED, Candidate, Rates, Turn

# Where turns never stop queueing, so many of them make a sample; each alone would be off by how they overlap.
_SAMPLE_TURNS: Final = 8
# What others teach of a target is taken over so often: 10 us each.
_RATES_S: Final = 1.0
# What one turn counts in how long turns decode, and one report in what others hold: its turns may have ended
# since it was made.
_TURN_SHARE: Final = 0.1
_REPORT_SHARE: Final = 0.5


class Load(msgspec.Struct, frozen=True, gc=False):
    """What a Candidate says of its load."""

    queued_tokens: int = 0
    queued_context: float = 0.0
    queued_own_tokens: int = 0
    queued_remote_tokens: int = 0
    queued_disk_tokens: int = 0
    queued_turns: int = 0
    head_tokens: int = 0
    head_s: float = 0.0
    inflight: int = 0
    foreign: float = 0.0
    recent_tokens: float = 0.0
    recent_pulled: float = 0.0
    held_tokens: int = 0
    decoding_tokens: int = 0
    turn_s: float = 0.0


class Ticket:
    """One turn on one target, from the decision to its end."""

    __slots__ = ("_book", "clean", "done_by", "keys", "prompt", "since", "streams", "work")

    def __init__(
        self,
        book: "_Book",
        work: Work,
        *,
        keys: Sequence[int],
        prompt: int,
        streams: bool,
        clean: bool,
        done_by: float,
    ) -> None:
        self._book: _Book | None = book
        self.work = work
        self.keys = keys
        self.prompt = prompt
        self.since: float | None = None
        self.streams = streams
        self.clean = clean
        self.done_by = done_by

    def over(self, now: float) -> bool:
        """Its prefill must be: an answer in one piece says so only at its end."""
        return not self.streams and now > self.done_by

    def first_token(self, now: float, *, answered: bool = True) -> None:
        """Its prefill is over. `answered`: by a token, so that the time says something."""
        if self._book is not None:
            self._book.first_token(self, now, answered)

    def ended(self, now: float) -> None:
        """However it ended; any number of times."""
        book, self._book = self._book, None
        if book is not None:
            book.ended(self, now)


class _Lasting:
    """For how long turns decode on targets that are taken to be alike.

    On one where none has ended yet they are taken to last as long as elsewhere: not counted at all, they drew
    turns to where the cache was full. strangers: what to call when that changes, for each such target.
    """

    __slots__ = ("seconds", "strangers")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.strangers: dict[_Book, Callable[[], None]] = {}

    def learn(self, took: float) -> None:
        self.seconds = _moved(self.seconds, took)
        for touched in self.strangers.values():
            touched()


def _moved(mean: float, took: float) -> float:
    return mean + (took - mean) * _TURN_SHARE if mean else took


class _Book:
    """One target's page."""

    __slots__ = (
        "_rates",
        "_rates_at",
        "alike",
        "decoding",
        "done",
        "head_since",
        "held",
        "inflight",
        "lasting",
        "learner",
        "learns",
        "opens",
        "peak",
        "queued",
        "recent",
        "recent_at",
        "recent_pulled",
        "since",
        "touched",
        "turn_s",
    )

    def __init__(self, alike: Learner, lasting: _Lasting, learns: bool, touched: Callable[[], None]) -> None:
        """alike, lasting: learn from all targets taken to be like this one. touched: told of changes."""
        self.alike = alike
        self.lasting = lasting
        lasting.strangers[self] = touched
        self.touched = touched
        self.learns = learns
        self.learner = Learner(alike.rates)
        self._rates, self._rates_at = alike.rates, (-1, -math.inf)
        self.inflight = 0
        # The most turns at once since the worker's report was last taken over.
        self.peak = 0
        self.queued: dict[Ticket, None] = {}
        # Uncached and pulled tokens sent here, as of `recent_at`; both fade from then on.
        self.recent = self.recent_pulled = 0.0
        self.recent_at = 0.0
        # Since when the work in `done` was being done; None while nothing tells how long it took.
        self.since: float | None = None
        self.done = Work()
        # First steps in that time. They overlap: what comes while others are under way waits for no more of
        # them, and a target that is busy would seem the faster for it.
        self.opens = 0.0
        self.head_since = 0.0
        # Context of turns under way, and that of those which decode; seconds for which one decodes.
        self.held = self.decoding = 0
        self.turn_s = 0.0

    def rates(self, now: float) -> Rates:
        if not self.learner.samples:
            # At once: else it would seem faster for a second than the one that the others were learned from.
            return self.alike.rates
        samples, at = self._rates_at
        if samples != self.learner.samples or now - at > _RATES_S:
            self._rates, self._rates_at = self.learner.among(self.alike), (self.learner.samples, now)
        return self._rates

    @property
    def rated_at(self) -> float:
        return self._rates_at[1]

    def sent(self, ticket: Ticket, now: float) -> None:
        self.touched()
        left = self._left(now)
        self.recent = self.recent * left + ticket.work.tokens
        self.recent_pulled = self.recent_pulled * left + ticket.work.pulled
        self.recent_at = now
        self.inflight += 1
        self.peak = max(self.peak, self.inflight)
        self.held += ticket.prompt
        if not self.queued:
            self.since, self.done, self.head_since, self.opens = now, Work(), now, 1.0
        if not ticket.clean:
            self.since = None
        self.queued[ticket] = None

    def first_token(self, ticket: Ticket, now: float, answered: bool) -> None:
        if ticket not in self.queued:
            return
        self.touched()
        self._leave(ticket, now)
        ticket.since = now
        self.decoding += ticket.prompt
        if not (answered and ticket.clean):
            self.since = None
        if self.since is not None:
            self.done += ticket.work
            if self.queued and self.done.turns < _SAMPLE_TURNS:
                return
            if self.learns:
                work = msgspec.structs.replace(self.done, turns=self.opens)
                for learner in (self.learner, self.alike):
                    learner.learn(work, now - self.since, now)
        # Prompts are computed one after the other: now the next one's turn has come.
        clear = answered and all(t.clean or t.over(now) for t in self.queued)
        self.since, self.done, self.opens = (now if clear else None), Work(), 0.0

    def ended(self, ticket: Ticket, now: float) -> None:
        self.touched()
        self.inflight -= 1
        self.held -= ticket.prompt
        if ticket.since is not None:
            self.decoding -= ticket.prompt
            took = now - ticket.since
            self.lasting.strangers.pop(self, None)
            self.turn_s = _moved(self.turn_s, took)
            self.lasting.learn(took)
        if ticket in self.queued:
            # How much of it was done nobody knows.
            self._leave(ticket, now)
            self.since = None

    def _leave(self, ticket: Ticket, now: float) -> None:
        del self.queued[ticket]
        ticket.keys = ()
        self.head_since = now

    def _left(self, now: float) -> float:
        return math.exp2((self.recent_at - now) / HALF_LIFE_S)

    def coming(self, keys: Sequence[int]) -> int:
        """Leading blocks of `keys` that turns queued here will compute."""
        most, length = 0, len(keys)
        for ticket in reversed(self.queued):
            theirs = ticket.keys
            # Most share a head and no more: one key tells that a chain is equal no farther than those before.
            if most < length and most < len(theirs) and theirs[most] == keys[most]:
                most = _shared(theirs, keys)
        return most

    def load(self, now: float, others: "_Others") -> Load:
        left = self._left(now)
        recent, pulled = self.recent * left, self.recent_pulled * left
        decoding = max(0, self.decoding + int(others.tokens))
        if not self.queued:
            return Load(
                inflight=self.inflight,
                foreign=max(0.0, others.turns),
                recent_tokens=recent,
                recent_pulled=pulled,
                held_tokens=decoding,
                decoding_tokens=decoding,
                turn_s=self.turn_s or self.lasting.seconds,
            )
        tokens = context = own = remote = disk = 0.0
        turns = head = 0
        for ticket in self.queued:
            if ticket.over(now):
                continue
            work = ticket.work
            tokens += work.tokens
            context += work.context
            own += work.own
            remote += work.remote
            disk += work.disk
            if not turns:
                head = work.tokens
            turns += 1
        return Load(
            int(tokens),
            context,
            int(own),
            int(remote),
            int(disk),
            turns,
            int(head),
            max(0.0, now - self.head_since),
            self.inflight,
            max(0.0, others.turns),
            max(0.0, recent - tokens),
            pulled,
            decoding + self.held - self.decoding,
            decoding,
            self.turn_s or self.lasting.seconds,
        )


class _Others(msgspec.Struct, frozen=True, gc=False):
    """What a target has under way beyond what was sent from here, as its last reports say.

    tokens: of its cache; below 0 where turns sent from here share some. turns: not ended; below 0 where the
    report was made before some of ours were sent.
    """

    tokens: float = 0.0
    turns: float = 0.0


_NOTHING = Load()
_NO_OTHERS = _Others()


class Ledger:
    """One page for each target. Time is passed in, in seconds of any clock that does not go back."""

    def __init__(self, prior: Rates = BELIEVED, *, learns: bool = True) -> None:
        """learns: else rates stay `prior`, for those who do not go by them: each turn costs half as much."""
        self._prior = prior
        self._learns = learns
        self._books: dict[str, _Book] = {}
        self._alike: dict[str, Learner] = {}
        self._lasting: dict[str, _Lasting] = {}
        self._others: dict[str, _Others] = {}
        self._touched: Final[set[str]] = set()

    def load(self, target: str, now: float) -> Load:
        book, others = self._books.get(target), self._others.get(target, _NO_OTHERS)
        if book is not None:
            return book.load(now, others)
        if others is _NO_OTHERS:
            return _NOTHING
        used = max(0, int(others.tokens))
        return Load(foreign=max(0.0, others.turns), held_tokens=used, decoding_tokens=used)

    def rates(self, target: str, now: float, group: str = "") -> Rates:
        """`group`: targets of one group are taken to be alike until they prove not to be."""
        book = self._books.get(target)
        if book is not None:
            return book.rates(now)
        alike = self._alike.get(group)
        return self._prior if alike is None else alike.rates

    def rated_at(self, target: str, now: float) -> float:
        """As of when the rates of `target` are, which are taken over once a second."""
        book = self._books.get(target)
        return now if book is None else book.rated_at

    def coming(self, target: str, keys: Sequence[int]) -> int:
        """Leading blocks of `keys` that `target` does not hold yet, but was sent to compute."""
        book = self._books.get(target)
        return book.coming(keys) if book is not None and book.queued else 0

    def touched(self) -> set[str]:
        """Targets whose load is another than time alone has made it since this was asked last."""
        found = self._touched.copy()
        self._touched.clear()
        return found

    def samples(self, target: str) -> int:
        book = self._books.get(target)
        return 0 if book is None else book.learner.samples

    def sent(
        self,
        turn: Turn,
        chosen: Candidate,
        now: float,
        *,
        group: str = "",
        streams: bool = True,
        guess: int = 0,
        keys: Sequence[int] = (),
    ) -> Ticket:
        """`turn` goes to `chosen` now.

        streams: whether its answer comes token by token. guess: the size of a prompt that is not known.
        keys: its chain's; a reference is kept until the first token.
        """
        book = self._books.get(chosen.target)
        if book is None:
            alike = self._alike.setdefault(group, Learner(self._prior))
            lasting = self._lasting.setdefault(group, _Lasting())
            book = self._books[chosen.target] = _Book(
                alike, lasting, self._learns, partial(self._touched.add, chosen.target)
            )
            alike.share(sum(each.alike is alike for each in self._books.values()))
        known = turn.prompt_tokens > 0
        work = work_of(turn, chosen, STEP_TOKENS) if known else Work(tokens=guess, turns=1.0)
        # Nothing is learned of a guess, of a head that is only coming, nor behind what others sent. What
        # the worker reports is a little old: turns of ours may have been waiting then.
        clean = (
            known
            and streams
            and chosen.coming_tokens <= chosen.cached_tokens
            and chosen.waiting <= chosen.inflight + 1
        )
        seconds = _seconds(work, book.rates(now))
        last = max([ticket.done_by for ticket in book.queued]) if book.queued else now
        ticket = Ticket(
            book,
            work,
            keys=keys,
            prompt=turn.prompt_tokens or guess,
            streams=streams,
            clean=clean,
            done_by=max(now, last) + 1.5 * seconds,
        )
        book.sent(ticket, now)
        return ticket

    def reported(self, target: str, used_tokens: int, requests: float) -> None:
        """The worker says that so many requests are under way, and use so much of its cache."""
        book, before = self._books.get(target), self._others.get(target, _NO_OTHERS)
        own_tokens = own_turns = 0
        if book is not None:
            # The report is a second old or so: turns that have ended since are in it, and are nobody else's.
            own_tokens, own_turns, book.peak = book.decoding, book.peak, book.inflight
        others = _Others(
            before.tokens + (used_tokens - own_tokens - before.tokens) * _REPORT_SHARE,
            before.turns + (requests - own_turns - before.turns) * _REPORT_SHARE,
        )
        if others != before:
            self._others[target] = others
            self._touched.add(target)

    def forget(self, target: str) -> None:
        """It is gone, or another process: what it did and how fast is void. Open tickets end harmlessly."""
        book = self._books.pop(target, None)
        if book is not None:
            book.lasting.strangers.pop(book, None)
        self._others.pop(target, None)
        self._touched.add(target)

    def targets(self) -> KeysView[str]:
        return self._books.keys()


def _seconds(work: Work, rates: Rates) -> float:
    return (
        work.tokens * rates.prefill_s
        + work.context * rates.growth_s
        + work.own * rates.own_s
        + work.remote * rates.remote_s
        + work.disk * rates.disk_s
        + rates.first_s
    )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading keys are equal. A key stands for all blocks before it, too."""
    shorter = min(len(one), len(other))
    if not shorter or one[0] != other[0]:
        return 0
    if one[shorter - 1] == other[shorter - 1]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda block: one[block] != other[block])
