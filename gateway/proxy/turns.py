"""The way of a turn: read, place, pass on, pass back. One path for every API, every exit visible."""

import asyncio
import random
from collections.abc import Callable
from contextlib import closing

from gateway import errors
from gateway.api.aliases import Aliases
from gateway.api.bodies import Bodies
from gateway.api.parse import POST_ONLY, ParsedTurn, parse
from gateway.api.tokens_in import with_tokens
from gateway.asgi import Receive, Scope, Send
from gateway.auth import NO_KEY
from gateway.deadline import Deadline
from gateway.metrics import Metrics
from gateway.prompts.parity import Parity
from gateway.proxy import stored
from gateway.proxy.accounts import Accounts
from gateway.proxy.answers import Answers, as_api_error
from gateway.proxy.exchange import ClientGone, Exchange
from gateway.proxy.patience import Patience
from gateway.proxy.stored import StoredResponses
from gateway.proxy.turn import Tries, TurnState
from gateway.routing.breaks import PrefixBreaks
from gateway.routing.learning import Learning
from gateway.routing.router import Client, Placement, Router
from gateway.settings import Limits, Timeouts
from gateway.upstream.headers import for_worker
from gateway.upstream.transport import Transport, UpstreamError, UpstreamResponse
from workers.fleet import Fleet

# The worker failed, not the request: another worker may do better.
_FAILED = frozenset((500, 502, 504))
# The worker has all it can take, which is no fault: another one may have room.
_BUSY = frozenset((429, 503))
_POST = {"allow": "POST"}
# Recorded for a client that left before its answer was complete; nobody is sent it.
_CLIENT_CLOSED = 499


class TurnApp:
    """ASGI callable for every path that a worker answers."""

    def __init__(
        self,
        *,
        router: Router,
        transport: Transport,
        fleet: Fleet,
        metrics: Metrics,
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
        patience: Patience,
        answers: Answers,
        accounts: Accounts,
    ) -> None:
        self._router = router
        self._transport = transport
        self._fleet = fleet
        self._metrics = metrics
        self._limits = limits
        self._timeouts = timeouts
        self._worker_key = worker_key
        self._debug_headers = debug_headers
        self._parity = parity
        self._forward_tokens = forward_tokens
        self._breaks = breaks
        self._aliases = aliases
        self._stored = responses
        self._bodies = bodies
        self._learning = learning
        self._patience = patience
        self._answers = answers
        self._accounts = accounts

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
            self._accounts.ended(turn)

    async def _serve(self, turn: TurnState, parsed: ParsedTurn, body: bytes) -> None:
        """Place the turn and pass the answer back; other workers are tried until the first byte went out."""
        if not self._fleet.serves(parsed.model) and parsed.model and self._fleet.knows_models():
            raise errors.ModelNotFound.among(parsed.model, self._fleet.served())
        exchange = turn.exchange
        only = await self._stored.find(parsed.response_id) if parsed.response_id else ""
        earlier = self._stored.session(parsed.response_id) if exchange.path == stored.PATH else ""
        client = Client(exchange.headers, turn.alias, turn.key.name, turn.key.tenant, earlier)
        sight = turn.sight = await self._router.look(parsed, exchange.path, body, only, client)
        if sight.pool_seconds is not None:
            self._metrics.pool_lookup(sight.pool_seconds)
        if sight.understood.prompt is not None:
            turn.prefix = self._breaks.follow(exchange.request_id, parsed, sight)
        patience = self._timeouts.first_byte_s
        now = asyncio.get_running_loop().time()
        tries = Tries(self._limits.tries, now + patience if patience else None)
        while True:
            placement = self._router.place(turn.sight, tries.failed)
            tries.left -= 1
            self._accounts.decided(turn, turn.sight, placement)
            with placement.lease:
                error = await self._try(turn, parsed, placement, body, tries)
            if error is None:
                return
            if not tries.left or not self._router.can_place(turn.sight, tries.failed):
                raise as_api_error(error)
            turn.sight = await self._router.again(turn.sight, placement.target.worker)

    async def _try(
        self, turn: TurnState, parsed: ParsedTurn, placement: Placement, body: bytes, tries: Tries
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
            error = await self._answers.pass_back(turn, parsed, placement, response, tries.until, may_leave)
            if error is None:
                return None
            tries.failed.add(name)
            self._worker_failed(placement, error.kind)
            if turn.first_byte is None:
                return error
            raise as_api_error(error)

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
            with self._patience.waiting(target.worker.name, until, may_leave):
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


def _is_preflight(exchange: Exchange) -> bool:
    """A browser asks whether a page may; that is for the workers to say."""
    return exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None
