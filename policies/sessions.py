"""Which session a prompt goes on from, and when a session is expected back at the target that holds it.

Clients that name their sessions are believed. The others are recognised by their chains: a prompt that begins
with all of a session's last one is its next turn. One that leaves it later than after its first prompt is a
branch of it, a sub-agent's, say. One that leaves it earlier only has its head in common with it.

    first prompt of A   [ h h h a ]
    last prompt of A    [ h h h a b c ]
    goes on from A      [ h h h a b c d ]
    a branch of A       [ h h h a b x ]
    another session     [ h h h y ]
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from policies.cost import HALF_LIFE_S

# Every so many blocks a chain has a mark: a fork is looked for among marks first, then block by block.
_STRIDE: Final = 128
# Sessions kept; the longest unused go first. 5 KB each at 5,000 blocks.
_MOST: Final = 4096
# Seconds between a session's turns before it has shown its own, and what each gap counts in that.
_GAP_S: Final = 15.0
_GAP_SHARE: Final = 0.2
# Of recorded agent sessions one turn in 50 to 65 was the last.
_LAST: Final = 0.02
# Gaps have a long tail: half of them 2 s, one in ten 24 s, one in a hundred 11 minutes. With this exponent
# of a Lomax distribution a gap of 30 times the usual one still is one in 170.
_TAIL: Final = 1.5
# Prompts of agents add so much to a cache or less: what is displaced next is looked at so far.
_NEXT_TOKENS: Final = 32_768


class Known(msgspec.Struct, frozen=True, gc=False):
    """A turn's session. name: what to know it by, "" if by nothing. inferred: not named by its client.

    branch: it parts from what the session asked before. new: nothing of the session was seen before.
    shared_blocks: leading blocks that are at least in common with prompts seen before.
    home: where its last turn went, "" if not known. work, at: uncached tokens sent there lately, as of when.
    """

    name: str = ""
    inferred: bool = True
    branch: bool = False
    new: bool = True
    shared_blocks: int = 0
    home: str = ""
    work: float = 0.0
    at: float = 0.0

    def own(self, target: str, now: float) -> float:
        """Of what `target` did lately, the session's own: no reason for it to go elsewhere."""
        return self.work * math.exp2((self.at - now) / HALF_LIFE_S) if target == self.home else 0.0


NOBODY: Final = Known()


class _Conversation:
    """One line of prompts, each of which begins with the one before.

    first: blocks of its first prompt, which ends with the key `opening`. others: tokens of that which others
    had asked before. since: when it was last heard of. work, at: as in Known.
    """

    __slots__ = (
        "at",
        "first",
        "gap_s",
        "marks",
        "name",
        "opening",
        "others",
        "over",
        "since",
        "target",
        "tips",
        "tokens",
        "under_way",
        "work",
    )

    def __init__(self, name: str, first: int, opening: int, others: int) -> None:
        self.name = name
        self.first = first
        self.opening = opening
        self.others = others
        self.tips: Sequence[int] = ()
        self.marks: list[int] = []
        self.target = ""
        self.tokens = 0
        self.under_way = 0
        self.since = 0.0
        self.gap_s = _GAP_S
        self.over = False
        self.work = self.at = 0.0

    def back(self, now: float) -> float:
        """How likely another turn of it is to come."""
        if self.over:
            return 0.0
        if self.under_way:
            return 1.0 - _LAST
        stays = (1.0 - _LAST) * (1.0 + (now - self.since) / self.gap_s) ** -_TAIL
        return stays / (stays + _LAST)

    def back_in(self, now: float) -> float:
        """In how many seconds that turn is to be expected, if it comes."""
        idle = 0.0 if self.under_way else now - self.since
        return (idle + self.gap_s) / (_TAIL - 1.0)


# Those whose last turn went to one target, the longest unused first: as its cache would give them up.
_Residents = OrderedDict[_Conversation, None]


class Stay:
    """A turn at a target, from the decision to its end."""

    __slots__ = ("_conversation", "_last", "_residents")

    def __init__(self, conversation: _Conversation | None, residents: _Residents, last: bool) -> None:
        self._conversation = conversation
        self._residents = residents
        self._last = last

    def ended(self, now: float) -> None:
        """However it ended; any number of times."""
        conversation, self._conversation = self._conversation, None
        if conversation is None:
            return
        conversation.under_way -= 1
        conversation.since = now
        conversation.over = self._last
        if conversation in self._residents:
            self._residents.move_to_end(conversation)


NOWHERE: Final = Stay(None, OrderedDict(), False)
"""Of turns whose session is not known."""


class _Group:
    """Chains of one model: where they end now, where they ended first, and marks on the way.

    named: the last conversation of each session, for turns whose chain is not known.
    """

    __slots__ = ("firsts", "marks", "named", "tips")

    def __init__(self) -> None:
        self.tips: dict[int, _Conversation] = {}
        self.firsts: dict[int, _Conversation] = {}
        self.marks: dict[int, _Conversation] = {}
        self.named: dict[str, _Conversation] = {}

    def closest(self, keys: Sequence[int]) -> tuple[_Conversation | None, bool, int]:
        """Whom `keys` go on from or else part from, which of the two, and where."""
        blocks, marks = len(keys), self.marks
        low, high = 0, blocks // _STRIDE
        owner: _Conversation | None = None
        while low < high:
            middle = (low + high + 1) // 2
            found = marks.get(keys[middle * _STRIDE - 1])
            if found is None:
                high = middle - 1
            else:
                low, owner = middle, found
        deep = low * _STRIDE
        # A last prompt may end right at the mark, or a block before it.
        start = max(0, deep - 2)
        window = list(keys[start : deep + _STRIDE])
        tips, firsts = self.tips, self.firsts
        ends = tips.keys() & window | firsts.keys() & window
        if ends:
            place = max(map(window.index, ends))
            key = window[place]
            found = tips.get(key)
            return found or firsts[key], found is not None, start + place + 1
        if owner is not None and owner.first <= deep:
            return owner, False, deep
        return None, False, deep


class Sessions:
    """Time is passed in, in seconds of any clock that does not go back."""

    def __init__(self, most: int = _MOST) -> None:
        self._most: Final = most
        self._all: Final[OrderedDict[_Conversation, _Group]] = OrderedDict()
        self._groups: Final[dict[str, _Group]] = {}
        self._targets: Final[dict[str, _Residents]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def find(self, named: str, group: str, keys: Sequence[int]) -> Known:
        """The session of a prompt with the chain `keys`; `named`: as its client calls it. Changes nothing.

        group: chains of one group are compared. Usually the model.
        """
        found = self._groups.get(group)
        if not keys or found is None:
            name = named or (f"{keys[-1]:016x}" if keys else "")
            seen = found is not None and name in found.named
            return Known(name, not named, new=not seen) if name else NOBODY
        closest, goes_on, shared = found.closest(keys)
        if closest is None or (named and closest.name != named):
            before = found.named.get(named) if named else None
            if before is None:
                return Known(named or f"{keys[-1]:016x}", not named, shared_blocks=shared)
            # Its prompts begin otherwise each time: with the time of day, say.
            return Known(named, False, True, False, shared, before.target, before.work, before.at)
        c = closest
        return Known(c.name, not named, not goes_on, False, shared, c.target, c.work, c.at)

    def placed(
        self,
        known: Known,
        group: str,
        keys: Sequence[int],
        target: str,
        now: float,
        *,
        tokens: int = 0,
        uncached: int = 0,
        block_size: int = 0,
        last: bool = False,
    ) -> Stay:
        """A turn of `known` with `tokens` of context goes to `target` now, which computes `uncached` of them.

        keys: none where its prompt is not known; then it counts for what was last seen of its session.
        last: its client says that the session ends with it. Nobody is expected back then.
        """
        if keys:
            chains = self._groups.setdefault(group, _Group())
            conversation, kept = self._going_on(known, chains, keys)
        else:
            chains = self._groups.get(group)
            conversation, kept = (None if chains is None else chains.named.get(known.name)), 0
            if chains is None or conversation is None:
                return NOWHERE
        if conversation is None:
            others = known.shared_blocks * block_size
            conversation = _Conversation(known.name, len(keys), keys[-1], others)
            chains.firsts[conversation.opening] = conversation
        elif not conversation.under_way:
            conversation.gap_s += (now - conversation.since - conversation.gap_s) * _GAP_SHARE
        self._all[conversation] = chains
        self._all.move_to_end(conversation)
        chains.named[conversation.name] = conversation
        if keys:
            self._follow(conversation, chains, keys, kept)
            conversation.tokens = max(0, tokens - conversation.others)
        # A branch is of the session that it parts from.
        conversation.work, conversation.at = known.own(target, now) + uncached, now
        if conversation.target != target:
            self._leave(conversation)
        conversation.target, conversation.over = target, False
        conversation.under_way += 1
        residents = self._targets.setdefault(target, OrderedDict())
        residents[conversation] = None
        residents.move_to_end(conversation)
        while len(self._all) > self._most:
            self._forget(next(iter(self._all)))
        return Stay(conversation, residents, last)

    def worth(self, target: str, held_tokens: int, now: float, renewed_s: float) -> float:
        """How likely what `target` displaces next is to be wanted back in time, 0 to 1.

        held_tokens: all that its cache holds; renewed_s: seconds in which new work fills it once. What
        nobody is known to come back for goes first.
        """
        residents = self._targets.get(target)
        if not residents:
            return 0.0
        left = _NEXT_TOKENS - max(0, held_tokens - sum(c.tokens for c in residents))
        worth = 0.0
        for each in residents:
            if left <= 0:
                break
            taken = min(left, each.tokens)
            left -= taken
            # One that comes back long after would have been displaced anyway.
            worth += taken * each.back(now) * renewed_s / (renewed_s + each.back_in(now))
        return worth / _NEXT_TOKENS

    def forget(self, target: str) -> None:
        """It is gone, or another process, which holds nothing."""
        for each in self._targets.pop(target, _Residents()):
            each.target = ""

    @staticmethod
    def _going_on(known: Known, chains: _Group, keys: Sequence[int]) -> tuple[_Conversation | None, int]:
        """The conversation that goes on with this turn, and how many of its blocks are in it."""
        # Without any: a turn that is placed anew after a try that failed.
        kept = known.shared_blocks if not known.new and not known.branch else len(keys)
        found = chains.tips.get(keys[kept - 1]) if kept else None
        return (found, kept) if found is not None and found.name == known.name else (None, 0)

    @staticmethod
    def _follow(conversation: _Conversation, chains: _Group, keys: Sequence[int], kept: int) -> None:
        tips, blocks = chains.tips, len(keys)
        for key in conversation.tips:
            if tips.get(key) is conversation:
                del tips[key]
        # A template may write its last block anew: its words for an answer to come are in it. In a first
        # prompt that block is what tells sessions with the same head apart.
        conversation.tips = list(keys[blocks - (2 if blocks > conversation.first + 1 else 1) :])
        for key in conversation.tips:
            tips[key] = conversation
        marks = conversation.marks
        del marks[kept // _STRIDE :]
        marks += (keys[end - 1] for end in range((len(marks) + 1) * _STRIDE, blocks + 1, _STRIDE))
        # All of them, so that who is forgotten first takes no mark away from who shares it.
        chains.marks.update(dict.fromkeys(marks, conversation))

    def _leave(self, conversation: _Conversation) -> None:
        residents = self._targets.get(conversation.target)
        if residents is not None:
            residents.pop(conversation, None)

    def _forget(self, conversation: _Conversation) -> None:
        chains = self._all.pop(conversation)
        self._leave(conversation)
        if chains.named.get(conversation.name) is conversation:
            del chains.named[conversation.name]
        for keys, held in (
            (conversation.tips, chains.tips),
            ([conversation.opening], chains.firsts),
            (conversation.marks, chains.marks),
        ):
            for key in keys:
                if held.get(key) is conversation:
                    del held[key]
