"""One turn on its way: what is known of it so far, and the tries it has had."""

import asyncio
import time

import msgspec

from gateway.api.parse import ParsedTurn
from gateway.api.usage import AnswerTail
from gateway.auth import NO_KEY, ClientKey
from gateway.proxy.exchange import Exchange
from gateway.routing.decisions import DecisionRecord
from gateway.routing.sight import Sight
from gateway.sessions.divergence import PrefixReport
from policies.recorded import OutcomeKind
from workers.worker import Worker


class TurnState(msgspec.Struct, eq=False):
    """What is known of one turn so far; metrics and the decision log read it when the turn ends.

    response_id: of the response that the answer is, "" if it is none or has not said.
    stream: an event stream was begun that can take events and comments of ours; keeper sends the latter.
    """

    exchange: Exchange
    debug: bool
    key: ClientKey = NO_KEY
    started: float = msgspec.field(default_factory=time.perf_counter)
    parsed: ParsedTurn | None = None
    alias: str = ""
    sight: Sight | None = None
    prefix: PrefixReport | None = None
    record: DecisionRecord | None = None
    first_byte: float | None = None
    status: int = 0
    outcome: OutcomeKind = "error"
    tail: AnswerTail = msgspec.field(default_factory=AnswerTail)
    response_id: str = ""
    stream: bool = False
    keeper: asyncio.Task[None] | None = None

    def pass_on(self, chunk: bytes) -> bool:
        """Give the client a piece of its answer; whether it can take another one."""
        self.tail.feed(chunk)
        return self.exchange.pass_on(chunk)

    @property
    def has_all(self) -> bool:
        """Whether its client was given the last event of its stream: some leave then, before its end."""
        parsed = self.parsed
        return self.stream and parsed is not None and parsed.api != "other" and parsed.complete(self.tail)

    def ends(self) -> None:
        """Nothing but the end of the answer is sent from now on."""
        if self.keeper is not None:
            self.keeper.cancel()


class Tries(msgspec.Struct, eq=False):
    """The tries of one turn. until: loop time at which the client's patience ends, None if it never does.

    failed: workers not to be tried again. reset: those that reset a connection once, which is forgiven.
    erred: those that answered 500, by their own fault if another one answers this turn otherwise.
    """

    left: int
    until: float | None
    failed: set[str] = set()
    reset: set[str] = set()
    erred: list[Worker] = []
