"""Where turns' time went, and so what a run was held up by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from replay.instance import Job

Part = Literal["thinking", "fixed", "room", "pulls", "one card", "prefill", "handoff", "decode"]
_WORDS: Final[dict[Part, str]] = {
    "thinking": "the agents' thinking",
    "fixed": "fixed overhead and the engine's steps",
    "room": "waiting for room in the cache or a slot",
    "pulls": "pulls",
    "one card": "pulls over one instance's network card",
    "prefill": "computing prompts",
    "handoff": "the way to decode",
    "decode": "decode",
}
# From this share of all time spent pulling on, one instance's card is what they wait for.
_ONE_CARD: Final = 2 / 3


class Spent(msgspec.Struct, frozen=True):
    """Mean seconds of a turn, one after the other, from the end of the turn before.

    thinking_s: the agent's. fixed_s: overhead, up to two steps of the engine, and tries whose instance died.
    room_s: until there were blocks or a slot. pull_s: look-up and transfers of cached blocks. prefill_s: its
    own prompt computed, and others' before it. handoff_s: with P/D, from there to decode's first token.
    decode_s: after the first token. card_share: of all pull_s, that of turns which pulled from the one
    instance from which most did.
    """

    thinking_s: float
    fixed_s: float
    room_s: float
    pull_s: float
    prefill_s: float
    handoff_s: float
    decode_s: float
    card_share: float

    def parts(self) -> dict[Part, float]:
        return {
            "thinking": self.thinking_s,
            "fixed": self.fixed_s,
            "room": self.room_s,
            "one card" if self.card_share > _ONE_CARD else "pulls": self.pull_s,
            "prefill": self.prefill_s,
            "handoff": self.handoff_s,
            "decode": self.decode_s,
        }


def spent(jobs: Sequence[Job], think: float) -> Spent:
    """Of these turns, all of which have ended. think: of the thinking time, the share that passed."""
    sources: dict[int, float] = {}
    thinking = fixed = room = pull = prefill = handoff = decode = 0.0
    for job in jobs:
        if job.place and not job.again:
            thinking += job.asked.think_s * think
        within = job.prefilled - job.submitted - job.pull_s
        computed = min(max(0.0, job.computed_s), within)
        steps = min(within - computed, job.steps_s)
        fixed += job.submitted - job.arrived + steps
        room += within - computed - steps
        pull += job.pull_s
        prefill += computed
        handoff += job.started - job.prefilled
        decode += job.ended - job.started
        if job.source >= 0:
            sources[job.source] = sources.get(job.source, 0.0) + job.pull_s
    count = len(jobs)
    return Spent(
        thinking_s=thinking / count,
        fixed_s=fixed / count,
        room_s=room / count,
        pull_s=pull / count,
        prefill_s=prefill / count,
        handoff_s=handoff / count,
        decode_s=decode / count,
        card_share=max(sources.values(), default=0.0) / pull if pull else 0.0,
    )


def held_up_by(found: Spent) -> Part:
    """What took most of the time from turn to turn."""
    parts = found.parts()
    return max(parts, key=lambda part: parts[part])


def said(found: Spent) -> str:
    """That in words, with the figures; where it is none of what comes before the first token, also the most
    of that."""
    parts = found.parts()
    part = held_up_by(found)
    words = f"{_WORDS[part]} ({parts[part]:.2f} of {sum(parts.values()):.2f} s from turn to turn)"
    if part in ("thinking", "decode"):
        del parts["thinking"], parts["decode"]
        first, ttft_s = max(parts, key=lambda each: parts[each]), sum(parts.values())
        words += f", before the first token by {_WORDS[first]} ({parts[first]:.2f} of {ttft_s:.2f} s)"
    return words
