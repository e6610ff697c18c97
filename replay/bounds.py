"""What no schedule can be below, whoever places turns: it follows from the trace and the instances alone.

Of a turn's prompt, the tokens that nobody has seen when it comes are computed after that, one block after the
other, by whomever: nobody computes faster than the fastest instance, and no token comes without a step. So:

    first token   overhead + tokens nobody has seen / fastest prefill + first step (+ decode's, with P/D)
    last token    that + (answer - 1) * (step + what one decoding turn adds)

and for a whole run that its time is no less than any session's turns and thinking one after the other (from
when it comes on, where sessions come at times of their own), than all of them over the sessions that may be
under way at a time, and than all unseen tokens over all instances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from replay.instance import Job
from replay.profile import Profile
from replay.seen import Seen
from replay.traces.types import Asked, Session, Trace


class Least(NamedTuple):
    """Of one turn: tokens to compute, seconds to its first token and to its last, and of both to compute."""

    unseen: int
    ttft_s: float
    e2e_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """turns: by session and place. prefill_tok_s: of all instances together. active: sessions under way at a
    time; None where they come whatever is under way."""

    turns: Sequence[Sequence[Least]]
    prefill_tok_s: float
    active: int | None

    def least(self, job: Job) -> Least:
        """A turn that is asked again after its answer broke off can find its own prompt."""
        least = self.turns[job.session][job.place]
        return (
            Least(0, least.ttft_s - least.prefill_s, least.e2e_s - least.prefill_s, 0.0)
            if job.again
            else least
        )

    def duration_s(self, jobs: Sequence[Job], think: float) -> float:
        """From the first arrival to the last token of these turns, the last ones of a run."""
        unseen = 0
        paths: dict[int, float] = {}
        # When sessions come, where that does not hang on when others end.
        came: dict[int, float] = {}
        for job in jobs:
            least = self.least(job)
            unseen += least.unseen
            before = paths.get(job.session)
            if before is None and self.active is None and not job.place and not job.again:
                came[job.session] = job.arrived - jobs[0].arrived
            thought = 0.0 if job.again else job.asked.think_s * think
            waited = 0.0 if before is None else before + thought
            paths[job.session] = waited + least.e2e_s
        ends = max(came.get(session, 0.0) + path for session, path in paths.items())
        found = max(ends, unseen / self.prefill_tok_s)
        return found if self.active is None else max(found, sum(paths.values()) / self.active)


def bounds(trace: Trace, profiles: Sequence[Profile], active: int | None) -> Bounds:
    rate = max(each.prefill_tok_s.value for each in profiles)
    first = min(each.overhead_s.value + each.step_s.value for each in profiles)
    steps: list[float] = []
    for each in profiles:
        if each.decode is None:
            steps.append(each.step_s.value + each.decode_seq_s.value)
        else:
            steps.append(each.decode.step_s.value + each.decode.decode_seq_s.value)
    if profiles[0].decode is not None:
        first += min(each.decode.step_s.value for each in profiles if each.decode is not None)
    found: list[list[Least]] = [[] for _ in trace.sessions]
    for number, asked, unseen in _unseen(trace):
        prefill = unseen / rate
        rest = (asked.output_tokens - 1) * min(steps)
        found[number].append(Least(unseen, first + prefill, first + prefill + rest, prefill))
    return Bounds(found, sum(each.prefill_tok_s.value for each in profiles), active)


def _unseen(trace: Trace) -> Iterator[tuple[int, Asked, int]]:
    """Session, turn, and the turn's tokens that neither its session nor any other can have left anywhere.

    Of sessions that begin when there is room, any may come before any other; of those with a time only those
    that come no later.
    """
    size, others = trace.block_size, Seen()
    numbered = list(enumerate(trace.sessions))
    if all(session.arrives_s is not None and len(session.turns) == 1 for session in trace.sessions):
        together = groupby(sorted(numbered, key=_arrives), key=_arrives)
        groups = [list(group) for _, group in together]
    else:
        groups = [numbered]
    for group in groups:
        for number, session in group:
            for asked in session.turns:
                others.add(asked.chain, asked.blocks(size), number)
        for number, session in group:
            own = Seen()
            for asked in session.turns:
                limit = (asked.prompt_tokens - 1) // size
                known = max(own.prefix(asked.chain, limit), others.prefix(asked.chain, limit, number))
                yield number, asked, asked.prompt_tokens - known * size
                own.add(asked.chain, asked.blocks(size), number)


def _arrives(numbered: tuple[int, Session]) -> float:
    return numbered[1].arrives_s or 0.0
