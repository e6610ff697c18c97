"""The way of a turn: read, place, pass on, pass back. One path for every API, every exit visible."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from gateway import errors
from gateway.api.aliases import Aliases
from gateway.api.bodies import Bodies
from gateway.api.parse import POST_ONLY, ParsedTurn, is_event_stream, parse
from gateway.api.tokens_in import with_tokens
from gateway.api.usage import AnswerTail, parse_usage
from gateway.asgi import Headers, Receive, Scope, Send
from gateway.auth import NO_KEY, ClientKey
from gateway.deadline import Deadline
from gateway.knowledge.hot_chains import HotChains
from gateway.metrics import Metrics
from gateway.prompts.parity import Parity
from gateway.proxy import stored
from gateway.proxy.exchange import ClientGone, Exchange
from gateway.proxy.keep_alive import keep_alive
from gateway.proxy.patience import Patience
from gateway.proxy.stored import StoredResponses
from gateway.routing.breaks import PrefixBreaks
from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.learning import Learning
from gateway.routing.router import Client, Placement, Router, Sight
from gateway.sessions.divergence import PrefixReport
from gateway.settings import Limits, Timeouts
from gateway.upstream.headers import for_client, for_worker, unbuffered
from gateway.upstream.transport import Transport, UpstreamError, UpstreamResponse
from policies.recorded import Outcome, OutcomeKind
from workers.fleet import Fleet

logger = logging.getLogger(__name__)

# The worker failed, not the request: another worker may do better.
_FAILED = frozenset((500, 502, 504))
# The worker has all it can take, which is no fault: another one may have room.
_BUSY = frozenset((429, 503))
_POST = {"allow": "POST"}
# Recorded for a client that left before its answer was complete; nobody is sent it.
_CLIENT_CLOSED = 499


@dataclass(slots=True)
class TurnState:
    """What is known of one turn so far; metrics and the decision log read it when the turn ends.

    response_id: of the response that the answer is, "" if it is none or has not said.
    stream: an event stream was begun that can take events and comments of ours; keeper sends the latter.
    """

    exchange: Exchange
    debug: bool
    key: ClientKey = NO_KEY
    started: float = field(default_factory=time.perf_counter)
    parsed: ParsedTurn | None = None
    alias: str = ""
    sight: Sight | None = None
    prefix: PrefixReport | None = None
    record: DecisionRecord | None = None
    first_byte: float | None = None
    status: int = 0
    outcome: OutcomeKind = "error"
    tail: AnswerTail = field(default_factory=AnswerTail)
    response_id: str = ""
    stream: bool = False
    keeper: asyncio.Task[None] | None = None

    def pass_on(self, chunk: bytes) -> bool:
        """Give the client a piece of its answer; whether it can take another one."""
        self.tail.feed(chunk)
        return self.exchange.pass_on(chunk)

    def ends(self) -> None:
        """Nothing but the end of the answer is sent from now on."""
        if self.keeper is not None:
            self.keeper.cancel()


@dataclass(slots=True)
class _Tries:
    """The tries of one turn. until: loop time at which the client's patience ends, None if it never does.

    failed: workers not to be tried again. reset: those that reset a connection once, which is forgiven.
    """

    left: int
    until: float | None
    failed: set[str] = field(default_factory=set[str])
    reset: set[str] = field(default_factory=set[str])


class TurnApp:
    """ASGI callable for every path that a worker answers."""

    def __init__(
        self,
        *,
        router: Router,
        transport: Transport,
        fleet: Fleet,
        metrics: Metrics,
        decisions: DecisionLog,
        limits: Limits,
        timeouts: Timeouts,
        worker_key: str,
        debug_headers: bool,
        parity: Parity,
        forward_tokens: bool,
        breaks: PrefixBreaks,
        aliases: Aliases,
        responses: StoredResponses,
        bodies: Bodies,
        learning: Learning,
        hot: HotChains | None,
    ) -> None:
        self._router = router
        self._transport = transport
        self._fleet = fleet
        self._metrics = metrics
        self._decisions = decisions
        self._limits = limits
        self._timeouts = timeouts
        self.patience = Patience()
        self._worker_key = worker_key
        self._debug_headers = debug_headers
        self._parity = parity
        self._forward_tokens = forward_tokens
        self._breaks = breaks
        self._aliases = aliases
        self._stored = responses
        self._bodies = bodies
        self._learning = learning
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send)
        state = scope.get("state", {})
        debug = self._debug_headers or state.get("caller") == "admin"
        turn = TurnState(exchange, debug, state.get("key", NO_KEY))
        try:
            if exchange.path in POST_ONLY and exchange.method != "POST" and not _is_preflight(exchange):
                raise errors.MethodNotAllowed(f"{exchange.method} is not allowed here", headers=_POST)
            body = await exchange.read_body(self._limits.max_body_bytes, self._timeouts.body_s)
            content_type = exchange.header(b"content-type") or b""
            parsed = parse(
                exchange.method,
                exchange.path,
                body,
                content_type,
                self._bodies,
                encoding=exchange.header(b"content-encoding") or b"",
                prompts=self._router.looks_at_prompts,
            )
            turn.parsed, body = self._aliases.resolved(parsed, body, content_type)
            turn.alias = parsed.model if turn.parsed.model != parsed.model else ""
            with exchange.connected(self._timeouts.stall_s), Deadline.after(self._timeouts.total_s):
                await self._serve(turn, turn.parsed, body)
        except ClientGone:
            turn.status, turn.outcome = _CLIENT_CLOSED, "cancelled"
            if exchange.stalled:
                exchange.abort()
                raise errors.ResponseCut from None
        except asyncio.CancelledError:
            turn.outcome = "cancelled"
            raise
        except TimeoutError:
            await self._refuse(turn, errors.UpstreamTimeout("the turn took longer than it may"))
        except errors.ApiError as error:
            if isinstance(error, errors.Overloaded):
                self._metrics.overloaded()
            await self._refuse(turn, error)
        finally:
            turn.ends()
            self._account(turn)

    async def _serve(self, turn: TurnState, parsed: ParsedTurn, body: bytes) -> None:
        """Place the turn and pass the answer back; other workers are tried until the first byte went out."""
        if parsed.model and self._fleet.knows_models() and not self._fleet.serves(parsed.model):
            raise errors.ModelNotFound.among(parsed.model, self._fleet.served())
        only = await self._stored.find(parsed.response_id) if parsed.response_id else ""
        earlier = self._stored.session(parsed.response_id) if turn.exchange.path == stored.PATH else ""
        client = Client(turn.exchange.headers, turn.alias, turn.key.name, turn.key.tenant, earlier)
        turn.sight = await self._router.look(parsed, turn.exchange.path, body, only, client)
        if turn.sight.pool_seconds is not None:
            self._metrics.pool_lookup(turn.sight.pool_seconds)
        exchange = turn.exchange
        turn.prefix = self._breaks.follow(exchange.request_id, parsed, turn.sight, exchange.headers)
        patience = self._timeouts.first_byte_s
        now = asyncio.get_running_loop().time()
        tries = _Tries(self._limits.tries, now + patience if patience else None)
        while True:
            placement = self._router.place(turn.sight, tries.failed)
            tries.left -= 1
            self._note(turn, parsed, placement)
            with placement.lease:
                error = await self._try(turn, parsed, placement, body, tries)
            if error is None:
                return
            if not tries.left or not self._router.can_place(turn.sight, tries.failed):
                raise _as_api_error(error)
            turn.sight = await self._router.again(turn.sight, placement.target.worker)

    async def _try(
        self, turn: TurnState, parsed: ParsedTurn, placement: Placement, body: bytes, tries: _Tries
    ) -> UpstreamError | None:
        """Give the turn to one worker. None: it was answered. An error: not a byte was, another may do it."""
        name = placement.target.worker.name

        def may_leave() -> bool:
            return (
                tries.left > 0
                and turn.sight is not None
                and self._router.can_place(turn.sight, tries.failed | {name})
            )

        try:
            response = await self._open(turn, parsed, placement, body, tries.until, may_leave)
        except UpstreamError as error:
            # An idle connection closed just as it was used says nothing of the worker.
            if error.kind == "reset" and name not in tries.reset:
                tries.reset.add(name)
                self._metrics.upstream_error(name, error.kind)
            else:
                tries.failed.add(name)
                self._worker_failed(placement, error.kind)
            return error
        with closing(response):
            status = response.status
            if status in _BUSY or status in _FAILED:
                tries.failed.add(name)
                if status in _BUSY:
                    self._metrics.upstream_error(name, str(status))
                else:
                    self._worker_failed(placement, str(status))
                if status == 500 and placement.decision.action == "pull" and turn.sight is not None:
                    self._learning.pull_failed(turn.sight, placement.target.name)
                    turn.sight = self._router.without_pool(turn.sight)
                if tries.left and turn.sight and self._router.can_place(turn.sight, tries.failed):
                    return UpstreamError(str(status))
            error = await self._pass_back(turn, parsed, placement, response, tries.until, may_leave)
            if error is None:
                return None
            tries.failed.add(name)
            self._worker_failed(placement, error.kind)
            if turn.first_byte is None:
                return error
            raise _as_api_error(error)

    async def _open(
        self,
        turn: TurnState,
        parsed: ParsedTurn,
        placement: Placement,
        body: bytes,
        until: float | None,
        may_leave: Callable[[], bool],
    ) -> UpstreamResponse:
        exchange, target = turn.exchange, placement.target
        headers = for_worker(
            exchange.headers, api_key=self._worker_key, request_id=exchange.request_id, rank=target.rank
        )
        failover_s = self._timeouts.failover_s
        # A stream's headers come before its prompt is computed; a whole answer's with its last token.
        if failover_s and parsed.stream and may_leave():
            soon = asyncio.get_running_loop().time() + failover_s
            until = soon if until is None else min(soon, until)
        try:
            with self.patience.waiting(target.worker.name, until, may_leave):
                return await self._transport.open(
                    exchange.method,
                    target.worker.url,
                    exchange.target,
                    headers,
                    self._body_for(turn, placement, body),
                )
        except TimeoutError:
            raise UpstreamError("timeout") from None

    def _body_for(self, turn: TurnState, placement: Placement, body: bytes) -> bytes:
        """The client's bytes; with the prompt's ids in them where this worker was proven to agree."""
        parsed, prompt = turn.parsed, turn.sight.understood.prompt if turn.sight else None
        worker = placement.target.worker
        if parsed is None or prompt is None or prompt.source != "local" or prompt.partial:
            return body
        api = parsed.api
        self._parity.sampled(worker, turn.exchange.path, api, body, prompt.tokens, random.random())
        if not self._forward_tokens or not self._parity.proven(worker.name, parsed.model, api):
            return body
        card = worker.card(parsed.model)
        spliced = with_tokens(api, body, prompt.tokens, card.max_model_len if card else 0)
        if spliced is None:
            return body
        self._metrics.tokens_forwarded(api)
        return spliced

    def _worker_failed(self, placement: Placement, kind: str) -> None:
        worker = placement.target.worker
        self._metrics.upstream_error(worker.name, kind)
        if kind == "descriptors":
            raise errors.Overloaded("the gateway can't open more connections", retry_after_s=1)
        self._fleet.failed(worker, kind)
        if kind == "connect":
            self._fleet.mark_down(worker, "connection refused")

    async def _pass_back(
        self,
        turn: TurnState,
        parsed: ParsedTurn,
        placement: Placement,
        response: UpstreamResponse,
        until: float | None,
        may_leave: Callable[[], bool],
    ) -> UpstreamError | None:
        """The worker's answer, byte for byte, as it comes. Returns what broke it off, if anything did.

        The head of a stream goes out at once, any other with its first byte, so that it can still be another
        worker's.
        """
        exchange, worker = turn.exchange, placement.target.worker
        stream = response.status == 200 and is_event_stream(response.headers)
        extensible = stream and _is_open(response.headers)
        makes = response.status == 200 and exchange.path == stored.PATH
        session = turn.sight.session.name if turn.sight is not None else ""
        learner = self._stored.learner(worker.name, session) if makes else None
        own = self._own_headers(turn, placement)
        head = for_client(response.headers, own, worker.url)
        if stream:
            head += unbuffered(response.headers)
        if exchange.started and not extensible:
            # An earlier worker's stream was begun and came to nothing; this is none that could go on from it.
            raise _as_api_error(UpstreamError(str(response.status)))
        if stream and not exchange.started:
            await self._start(turn, response.status, head, alone=True)
            turn.stream = extensible
            if extensible and self._timeouts.keep_alive_s:
                keeping = keep_alive(exchange, turn.tail, self._timeouts.keep_alive_s)
                turn.keeper = asyncio.create_task(keeping, name="keep alive")
        try:
            if response.waits:
                with self.patience.waiting(worker.name, until, may_leave):
                    chunk = await response.read()
            else:
                chunk = await response.read()
            if stream and not chunk:
                return UpstreamError("empty")
            if not exchange.started:
                await self._start(turn, response.status, head)
            self._answered(turn, placement, response.status)
            while chunk:
                if learner is not None and learner.feed(chunk):
                    turn.response_id, learner = learner.id, None
                turn.tail.feed(chunk)
                if response.read_whole:
                    # Goes out with what ends the answer.
                    break
                await exchange.send(chunk)
                if learner is None and not exchange.full:
                    await response.forward(turn.pass_on)
                chunk = await response.read()
        except TimeoutError:
            return UpstreamError("timeout")
        except UpstreamError as error:
            return error
        # A compressed stream's last event is not read here: its framing has to do.
        if stream and _is_plain(response.headers) and not parsed.complete(turn.tail):
            await exchange.send(chunk)
            return UpstreamError("incomplete")
        turn.outcome = "ok" if response.status < 500 else "error"
        if response.status < 400:
            worker.breaker.succeeded()
        if response.status == 200 and turn.sight is not None:
            self._router.ended(turn.sight)
        turn.ends()
        await exchange.finish(chunk)
        return None

    async def _start(self, turn: TurnState, status: int, head: Headers, *, alone: bool = False) -> None:
        turn.status = status
        await turn.exchange.start(status, head, alone=alone)

    def _answered(self, turn: TurnState, placement: Placement, status: int) -> None:
        """The first byte of an answer is there."""
        turn.first_byte = time.perf_counter()
        placement.lease.first_token(answered=status == 200)
        if status < 400:
            self._fleet.answered(placement.target.worker)
        if status == 200 and turn.sight is not None:
            self._router.computed(turn.sight, placement.target)
            if self._hot is not None and turn.parsed is not None and turn.sight.reads_cache:
                self._hot.saw(turn.parsed, turn.sight.understood)

    async def _refuse(self, turn: TurnState, error: errors.ApiError) -> None:
        exchange = turn.exchange
        turn.outcome = "error"
        if exchange.started:
            if turn.stream and turn.parsed is not None and not exchange.finished:
                turn.ends()
                await exchange.finish(turn.parsed.error_event(turn.tail, error, turn.response_id))
                return
            raise errors.ResponseCut from None
        turn.status = error.status
        content = errors.body(error, errors.shape_of(exchange.path), exchange.request_id)
        await exchange.start(error.status, errors.head(error, content, exchange.request_id))
        await exchange.finish(b"" if exchange.method == "HEAD" else content)

    def _own_headers(self, turn: TurnState, placement: Placement) -> Headers:
        headers = [(b"x-request-id", turn.exchange.request_id.encode())]
        if turn.debug and turn.sight is not None:
            for name, value in (
                (b"worker", placement.target.name),
                (b"action", placement.decision.action),
                (b"prompt-tokens", turn.sight.prompt_tokens),
                (b"local-tokens", placement.chosen.local_tokens),
                (b"pool-tokens", placement.chosen.pool_tokens),
                (b"policy", placement.decision.policy),
                (b"decision-ms", f"{turn.sight.seconds * 1e3:.2f}"),
            ):
                headers.append((b"x-moongate-" + name, str(value).encode()))
        return headers

    def _note(self, turn: TurnState, parsed: ParsedTurn, placement: Placement) -> None:
        """Put the decision on record; a turn that is placed anew keeps only its last one."""
        sight, decision, chosen = turn.sight, placement.decision, placement.chosen
        assert sight is not None
        if turn.record is not None:
            elapsed = time.perf_counter() - turn.started
            self._decisions.finish(turn.record, Outcome(kind="moved", status=0, total_s=elapsed))
        turn.record = DecisionRecord(
            turn.exchange.request_id,
            time.time(),
            parsed.api,
            parsed.model,
            sight.prompt_tokens,
            sight.block_size,
            decision,
            {"look": sight.seconds * 1e3},
            sight.understood.unknown,
            prefix=turn.prefix,
            session=sight.session,
            turn=placement.turn,
            facts=sight.facts,
            plan=placement.plan,
            shadowed=placement.shadowed,
        )
        self._decisions.add(turn.record)
        seconds = time.perf_counter() - turn.started
        self._metrics.decision(decision.policy, decision.action, decision.reason, seconds)
        self._metrics.prompt_tokens(
            local=chosen.local_tokens,
            pool=chosen.cached_tokens - chosen.local_tokens,
            computed=sight.prompt_tokens - chosen.cached_tokens,
        )
        if sight.understood.unknown:
            self._metrics.unrenderable(parsed.model, sight.understood.unknown)

    def _account(self, turn: TurnState) -> None:
        """The end of every turn: metrics, and how it turned out for the decision log."""
        parsed = turn.parsed
        self._metrics.request(parsed.api if parsed else "other", parsed.model if parsed else "", turn.outcome)
        if turn.record is None or parsed is None:
            return
        ttft = None if turn.first_byte is None else turn.first_byte - turn.started
        if ttft is not None:
            self._metrics.ttft(ttft)
        usage = parse_usage(turn.tail.content()) if turn.outcome == "ok" and parsed.one_sequence else None
        cached = usage.cached_tokens if usage else None
        total = time.perf_counter() - turn.started
        outcome = Outcome(
            kind=turn.outcome,
            status=turn.status,
            cached_tokens=cached,
            ttft_s=ttft,
            total_s=total,
            streams=parsed.stream,
        )
        self._decisions.finish(turn.record, outcome)
        target = turn.record.decision.target
        if cached is not None and turn.sight is not None and target is not None:
            self._learning.answered(turn.record.request_id, turn.sight, target, cached)


def _is_preflight(exchange: Exchange) -> bool:
    """A browser asks whether a page may; that is for the workers to say."""
    return exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None


def _as_api_error(error: UpstreamError) -> errors.ApiError:
    if "timeout" in error.kind:
        return errors.UpstreamTimeout("the worker did not answer in time")
    if error.kind == "protocol":
        return errors.UpstreamFailed("the worker's answer is no HTTP/1.1")
    return errors.UpstreamFailed("the worker broke off")


def _is_plain(headers: Headers) -> bool:
    return all(name != b"content-encoding" or value == b"identity" for name, value in headers)


def _is_open(headers: Headers) -> bool:
    """Whether bytes of ours may stand among the body's: not in a compressed one, nor one of a set length."""
    return _is_plain(headers) and all(name != b"content-length" for name, _ in headers)
