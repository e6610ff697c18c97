"""The way of a turn: read, place, pass on, pass back. One path for every API, every exit visible."""

import asyncio
import random
import time
from collections.abc import Callable

from gateway import errors
from gateway.api.aliases import Aliases, alias_of
from gateway.api.bodies import Bodies
from gateway.api.parse import POST_ONLY, WORKERS_OWN, ParsedTurn, parse
from gateway.api.tokens_in import with_tokens
from gateway.asgi import Receive, Scope, Send
from gateway.auth import Caller, ClientKey, is_preflight
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
from gateway.routing.router import Placement, Router, Unplaced
from gateway.routing.sight import Client, Sight
from gateway.settings import Limits, Timeouts
from gateway.upstream.headers import for_worker
from gateway.upstream.transport import Transport, UpstreamError, UpstreamResponse
from workers.fleet import Fleet

# The worker failed, not the request: another worker may do better.
_FAILED = frozenset((500, 502, 504))
# The worker has all it can take, which is no fault: another one may have room.
_BUSY = frozenset((429, 503))
_POST = {"allow": "POST"}
_DOTS = frozenset((".", ".."))
# Workers are probed every second or so: by then one may have come up.
_RETRY_AFTER_S = 2.0
# Recorded for a client that left before its answer was complete; nobody is sent it.
_CLIENT_CLOSED = 499


class TurnApp:
    """ASGI callable for every path that a worker answers."""

    def __init__(
        self,
        *,
        admit: Callable[[Scope], tuple[Caller, ClientKey]],
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
        """admit: who it is that a request comes from; raises ApiError for who may not."""
        self._admit = admit
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
        """The server has to give a `gateway.asgi.Client` along: `receive` and `send` are not used."""
        exchange = Exchange(scope)
        try:
            caller, key = self._admit(scope)
        except errors.ApiError as error:
            await _answer(exchange, error)
            return
        turn = TurnState(exchange, self._debug_headers or caller == "admin", key)
        try:
            _check_path(exchange)
            body = await exchange.read_body(self._limits.max_body_bytes, self._timeouts.body_s)
            content_type = exchange.fields.get(b"content-type", b"")
            parsed = parse(
                exchange.method,
                exchange.path,
                body,
                content_type,
                self._bodies,
                encoding=exchange.fields.get(b"content-encoding", b""),
                prompts=self._router.looks_at_prompts,
            )
            turn.parsed, body = self._aliases.resolved(parsed, body, content_type)
            turn.alias = alias_of(parsed, turn.parsed)
            exchange.interrupts(self._timeouts.stall_s)
            try:
                with Deadline.after(self._timeouts.total_s):
                    await self._serve(turn, turn.parsed, body)
            except asyncio.CancelledError:
                exchange.raise_if_gone()
                raise
            finally:
                exchange.lets_be()
        except ClientGone:
            if turn.has_all:
                turn.outcome = "ok"
            else:
                turn.status, turn.outcome = _CLIENT_CLOSED, "cancelled"
            if exchange.stalled:
                exchange.abort()
        except asyncio.CancelledError:
            turn.outcome = "cancelled"
            raise
        except TimeoutError:
            await self._refuse(turn, errors.UpstreamTimeout("the turn took longer than it may"))
        except errors.ApiError as error:
            await self._refuse(turn, error)
        except Exception as error:
            errors.log_fault(error, exchange.method)
            await self._refuse(turn, errors.fault())
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
        client = Client(exchange.fields, turn.alias, turn.key.name, turn.key.tenant, earlier)
        sight = turn.sight = await self._router.look(parsed, exchange.path, body, only, client)
        if sight.pool_seconds is not None:
            self._metrics.pool_lookup(sight.pool_seconds)
        if sight.understood.prompt is not None:
            turn.prefix = self._breaks.follow(exchange.request_id, parsed, sight)
        patience = self._timeouts.first_byte_s
        tries = Tries(self._limits.tries, exchange.now + patience if patience else None)
        try:
            await self._serve_by_any(turn, sight, parsed, body, tries)
        finally:
            # Where several did, it is most likely the request that no worker bears.
            if len(tries.erred) == 1:
                self._blame_erred(tries)

    async def _serve_by_any(
        self, turn: TurnState, sight: Sight, parsed: ParsedTurn, body: bytes, tries: Tries
    ) -> None:
        """Let workers try until one has answered. Raises ApiError where none does."""
        while True:
            try:
                placement = self._router.place(sight, tries.failed)
            except Unplaced as nobody:
                self._accounts.unplaced(turn, sight, nobody)
                raise errors.NoWorker(str(nobody), retry_after_s=_RETRY_AFTER_S) from None
            tries.left -= 1
            try:
                self._accounts.decided(turn, sight, placement)
                error = await self._try(turn, parsed, placement, body, tries)
            finally:
                placement.lease.ended(time.monotonic())
            if error is None:
                return
            assert turn.sight is not None
            if not tries.left or not self._router.can_place(turn.sight, tries.failed):
                raise as_api_error(error)
            sight = turn.sight = await self._router.again(turn.sight, placement.target.worker)

    async def _try(
        self, turn: TurnState, parsed: ParsedTurn, placement: Placement, body: bytes, tries: Tries
    ) -> UpstreamError | None:
        """Give the turn to one worker. None: it was answered. An error: not a byte was, another may do it."""
        name = placement.target.worker.name
        # Nobody else has that response; but what is kept is there at once or not at all.
        looks_up = bool(parsed.response_id) and turn.exchange.path != stored.PATH

        def may_leave() -> bool:
            return looks_up or (
                tries.left > 0
                and turn.sight is not None
                and self._router.can_place(turn.sight, tries.failed | {name})
            )

        soon = (parsed.stream or looks_up) and may_leave()
        try:
            response = await self._open(turn, placement, body, tries.until, may_leave, soon=soon)
        except UpstreamError as error:
            # An idle connection closed just as it was used says nothing of the worker.
            if error.kind == "reset" and name not in tries.reset:
                tries.reset.add(name)
                self._metrics.upstream_error(name, error.kind)
            else:
                tries.failed.add(name)
                self._worker_failed(placement, error)
            return error
        try:
            status = response.status
            if status in _BUSY or status in _FAILED:
                tries.failed.add(name)
                if status in (502, 504):
                    self._worker_failed(placement, UpstreamError(str(status)))
                else:
                    self._metrics.upstream_error(name, str(status))
                if status == 500:
                    tries.erred.append(placement.target.worker)
                if status == 500 and placement.decision.action == "pull" and turn.sight is not None:
                    self._learning.pull_failed(turn.sight, placement.target.name)
                    turn.sight = turn.sight.without_pool()
                if tries.left and turn.sight and self._router.can_place(turn.sight, tries.failed):
                    return UpstreamError(str(status))
            if status < 500 and status not in _BUSY:
                self._blame_erred(tries)
            error = await self._answers.pass_back(turn, parsed, placement, response, tries.until, may_leave)
        finally:
            response.close()
        if error is None:
            return None
        tries.failed.add(name)
        self._worker_failed(placement, error)
        if turn.first_byte is None:
            return error
        raise as_api_error(error)

    async def _open(
        self,
        turn: TurnState,
        placement: Placement,
        body: bytes,
        until: float | None,
        may_leave: Callable[[], bool],
        *,
        soon: bool,
    ) -> UpstreamResponse:
        """soon: the head of its answer has no reason to be long in coming."""
        exchange, target = turn.exchange, placement.target
        headers = for_worker(
            exchange.headers, api_key=self._worker_key, request_id=exchange.request_id, rank=target.place
        )
        failover_s = self._timeouts.failover_s
        # A stream's headers come before its prompt is computed; a whole answer's with its last token.
        if failover_s and soon:
            given_up = exchange.now + failover_s
            until = given_up if until is None else min(given_up, until)
        try:
            with self._patience.waiting(target.worker.name, until, may_leave, exchange.task):
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

    def _worker_failed(self, placement: Placement, error: UpstreamError) -> None:
        worker = placement.target.worker
        self._metrics.upstream_error(worker.name, error.kind)
        if error.kind == "descriptors":
            self._metrics.overloaded("descriptors")
            raise errors.Overloaded("the gateway can't open more connections", retry_after_s=1)
        self._fleet.failed(worker, error.kind)
        if error.kind in ("connect", "tls"):
            self._fleet.mark_down(worker, error.why or "no connection")

    def _blame_erred(self, tries: Tries) -> None:
        for worker in tries.erred:
            self._fleet.failed(worker, "500")
        tries.erred.clear()

    async def _refuse(self, turn: TurnState, error: errors.ApiError) -> None:
        exchange = turn.exchange
        turn.outcome = "error"
        if not exchange.started:
            turn.outcome = "refused" if error.status < 500 else "error"
            turn.status = error.status
            await _answer(exchange, error)
        elif turn.stream and turn.parsed is not None and not exchange.finished:
            turn.ends()
            await exchange.finish(turn.parsed.error_event(turn.tail, error, turn.response_id))
        else:
            raise errors.ResponseCut from None


async def _answer(exchange: Exchange, error: errors.ApiError) -> None:
    content = errors.body(error, errors.shape_of(exchange.path), exchange.request_id)
    exchange.start(error.status, errors.head(error, content, exchange.request_id))
    await exchange.finish(content)


def _check_path(exchange: Exchange) -> None:
    """Raises ApiError for a path that is not passed on, or not with that method."""
    path, method = exchange.path, exchange.method
    if path in POST_ONLY and method != "POST" and not is_preflight(method, exchange.fields):
        raise errors.MethodNotAllowed(f"{method} is not allowed here", headers=_POST)
    if path in WORKERS_OWN:
        raise errors.Forbidden("this changes a worker: ask each worker itself")
    # Whoever resolves them on the way to the worker would make another path of it, one not for clients.
    if "/." in path and not _DOTS.isdisjoint(path.split("/")):
        raise errors.InvalidRequest("a path with . or .. in it is not passed on")
