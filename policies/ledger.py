"""What targets have been given to do: the load that policies weigh, and the work that rates are learned from.

The one book of leases. The gateway keeps it in real time, and the replay in virtual time.
"""

from collections.abc import Iterable, KeysView, Sequence
from functools import partial
from typing import Final

from policies.cost import RECENT_WEIGHT, STEP_TOKENS
from policies.drain import UnderWay
from policies.page import Lasting, Lease, Line, Load, Others, Page
from policies.rates import Learner, Work, work_of
from policies.recent import summed
from policies.sessions import NOWHERE, Stay
from policies.types import BELIEVED, Candidate, Rates, Turn

# What one report counts in what others hold: its turns may have ended since it was made.
_REPORT_SHARE: Final = 0.5
# A target that was not there is taken to have done so many turns less than others: by RECENT_WEIGHT, to go
# there is worth the work of one turn.
_BEHIND: Final = 1 / RECENT_WEIGHT
_NOTHING = Load()
_NO_OTHERS = Others()


class Ledger:
    """One page for each target. Time is passed in, in seconds of any clock that does not go back."""

    def __init__(self, prior: Rates = BELIEVED, *, learns: bool = True, since: float = 0.0) -> None:
        """learns: else rates stay `prior`, for those who do not go by them: each turn costs half as much.

        since: now, for how fast load goes away.
        """
        self.total: Final = UnderWay(since)
        self._prior = prior
        self._learns = learns
        self._pages: dict[str, Page] = {}
        self._alike: dict[str, Learner] = {}
        self._lasting: dict[str, Lasting] = {}
        self._others: dict[str, Others] = {}
        self._touched: Final[set[str]] = set()
        # Targets that left with turns under way there.
        self._left: Final[set[str]] = set()

    def load(self, target: str, now: float) -> Load:
        page, others = self._pages.get(target), self._others.get(target, _NO_OTHERS)
        if page is not None:
            return page.load(now, others)
        if others is _NO_OTHERS:
            return _NOTHING
        used = max(0, int(others.tokens))
        return Load(foreign=max(0.0, others.turns), held_tokens=used, decoding_tokens=used)

    def line(self, target: str, now: float) -> Line:
        """Turns that wait there."""
        page = self._pages.get(target)
        return Line() if page is None else page.line(now)

    def rates(self, target: str, now: float, group: str = "") -> Rates:
        """`group`: targets of one group are taken to be alike until they prove not to be."""
        page = self._pages.get(target)
        if page is not None:
            return page.rates(now)
        alike = self._alike.get(group)
        return self._prior if alike is None else alike.rates

    def rated_at(self, target: str, now: float) -> float:
        """As of when the rates of `target` are, which are taken over once a second."""
        page = self._pages.get(target)
        return now if page is None else page.rated_at

    def coming(self, target: str, keys: Sequence[int], known: int = 0) -> int:
        """Leading blocks of `keys` that `target` does not hold yet, but was sent to compute; `known`, which
        it holds, if that is more: to look for more takes a tenth of the time where there is none."""
        page = self._pages.get(target)
        return page.coming(keys, known) if page is not None and page.queued else known

    def computing(self) -> list[str]:
        """Targets where turns wait for their first token."""
        return [target for target, page in self._pages.items() if page.queued]

    def touched(self) -> set[str]:
        """Targets whose load is another than time alone has made it since this was asked last."""
        found = self._touched.copy()
        self._touched.clear()
        return found

    def samples(self, target: str) -> int:
        page = self._pages.get(target)
        return 0 if page is None else page.learner.samples

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
        stay: Stay = NOWHERE,
    ) -> Lease:
        """`turn` goes to `chosen` now.

        streams: whether its answer comes token by token. guess: the size of a prompt that is not known.
        keys: its chain's; a reference is kept until the first token. stay: its session's, ends with it.
        """
        page = self._pages.get(chosen.target) or self._page(chosen.target, group)
        page.weight = chosen.weight
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
        if work.pulled:
            # What it pulls comes too late for those behind it: they ask the pool themselves meanwhile.
            keys = ()
        lease = Lease(page, work, keys, turn.prompt_tokens or guess, streams, clean, stay)
        page.sent(lease, now)
        return lease

    def _page(self, target: str, group: str) -> Page:
        """A new one."""
        alike = self._alike.setdefault(group, Learner(self._prior))
        lasting = self._lasting.setdefault(group, Lasting())
        page = self._pages[target] = Page(
            self.total, alike, lasting, self._learns, partial(self._touched.add, target)
        )
        alike.share(len(self._group(alike)))
        return page

    def _group(self, alike: Learner) -> list[Page]:
        return [each for each in self._pages.values() if each.alike is alike]

    def back(self, target: str, now: float, *, groups: Iterable[str] = ("",), weight: float = 1.0) -> None:
        """It takes turns from now on: for the first time, or again after a while without any.

        It is taken to have done lately what those of its group did in the mean, by `weight`, but for
        _BEHIND turns: that it was not there says nothing of how much will come. Were it nothing, all would
        come at once: with short turns half of them went to one of four, and waited there four times as long
        as elsewhere. Were it as much as others did, nobody would begin there or move there for a minute.

        groups: those that its turns may be of; the first of which anything is known counts.
        """
        group = next((each for each in groups if each in self._alike), None)
        if group is None:
            return
        page = self._pages.get(target) or self._page(target, group)
        page.weight = weight
        others = [each for each in self._group(page.alike) if each is not page]
        if others:
            did = summed([each.recent.now(now) for each in others])
            usual = did.times(weight / sum(each.weight for each in others))
            page.recent.at_least(usual.times(max(0.0, 1.0 - _BEHIND / max(usual.turns, 1.0))), now)
            self._touched.add(target)

    def reported(self, target: str, used_tokens: int, requests: float) -> None:
        """The worker says that so many requests are under way, and use so much of its cache."""
        page, before = self._pages.get(target), self._others.get(target, _NO_OTHERS)
        own_tokens = own_turns = 0
        if page is not None:
            # The report is a second old or so: turns that have ended since are in it, and are nobody else's.
            own_tokens, own_turns, page.peak = page.decoding, page.peak, page.inflight
        others = Others(
            before.tokens + (used_tokens - own_tokens - before.tokens) * _REPORT_SHARE,
            before.turns + (requests - own_turns - before.turns) * _REPORT_SHARE,
        )
        if others != before:
            self._others[target] = others
            self._touched.add(target)

    def forget(self, target: str) -> None:
        """It is gone, or another process: what it did and how fast is void. Open leases end harmlessly."""
        page = self._pages.pop(target, None)
        if page is not None:
            page.lasting.strangers.pop(page, None)
        self._others.pop(target, None)
        self._touched.add(target)

    def left(self, target: str) -> None:
        """It takes no more turns. As `forget`, but it may live on, and come back under its name at any time:
        turns under way there are counted until they end."""
        page = self._pages.get(target)
        for name in self._left.copy():
            kept = self._pages.get(name)
            if kept is None or not kept.inflight:
                self._left.discard(name)
                if kept is not None and kept.is_blank:
                    self.forget(name)
        if page is None or not page.inflight:
            self.forget(target)
            return
        page.begin_anew()
        self._left.add(target)
        self._others.pop(target, None)
        self._touched.add(target)

    def targets(self) -> KeysView[str]:
        return self._pages.keys()
