"""The way of a turn: read, place, pass on, pass back. One path for every API, every exit visible."""

import asyncio
import logging
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway import errors, stored
from gateway.aliases import Aliases
from gateway.api import ParsedTurn, is_event_stream, parse
from gateway.breaks import PrefixBreaks
from gateway.decisions import DecisionLog, DecisionRecord, Outcome, OutcomeKind
from gateway.divergence import PrefixReport
from gateway.exchange import ClientGone, Exchange, Headers, Receive, Scope, Send
from gateway.headers import for_client, for_worker
from gateway.metrics import Metrics
from gateway.parity import Parity
from gateway.router import Placement, Router, Sight
from gateway.settings import Limits
from gateway.stored import StoredResponses
from gateway.tokens_in import with_tokens
from gateway.transport import Transport, UpstreamError, UpstreamResponse
from gateway.usage import AnswerTail, parse_usage
from workers.fleet import Fleet

logger = logging.getLogger(__name__)

# The worker failed, not the request: another worker may do better.
_RETRYABLE = frozenset((500, 502, 503, 504))
# Recorded for a client that left before its answer was complete; nobody is sent it.
_CLIENT_CLOSED = 499


@dataclass(slots=True)
class TurnState:
    """What is known of one turn so far; metrics and the decision log read it when the turn ends."""

    exchange: Exchange
    debug: bool
    started: float = field(default_factory=time.perf_counter)
    parsed: ParsedTurn | None = None
    sight: Sight | None = None
    prefix: PrefixReport | None = None
    record: DecisionRecord | None = None
    first_byte: float | None = None
    status: int = 0
    outcome: OutcomeKind = "error"
    tail: AnswerTail = field(default_factory=AnswerTail)


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
        total_s: float,
        worker_key: str,
        debug_headers: bool,
        parity: Parity,
        forward_tokens: bool,
        breaks: PrefixBreaks,
        aliases: Aliases,
        responses: StoredResponses,
    ) -> None:
        self._router = router
        self._transport = transport
        self._fleet = fleet
        self._metrics = metrics
        self._decisions = decisions
        self._limits = limits
        self._total_s = total_s
        self._worker_key = worker_key
        self._debug_headers = debug_headers
        self._parity = parity
        self._forward_tokens = forward_tokens
        self._breaks = breaks
        self._aliases = aliases
        self._stored = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        turn = TurnState(exchange, self._debug_headers or scope.get("state", {}).get("caller") == "admin")
        try:
            body = await exchange.read_body(self._limits.max_body_bytes)
            content_type = exchange.header(b"content-type") or b""
            parsed = parse(exchange.method, exchange.path, body, content_type)
            turn.parsed, body = self._aliases.resolved(parsed, body, content_type)
            async with exchange.connected(), asyncio.timeout(self._total_s or None):
                await self._serve(turn, turn.parsed, body)
        except ClientGone:
            turn.status, turn.outcome = _CLIENT_CLOSED, "cancelled"
        except asyncio.CancelledError:
            turn.outcome = "cancelled"
            raise
        except TimeoutError:
            await self._refuse(turn, errors.UpstreamTimeout("the turn took longer than it may"))
        except errors.ApiError as error:
            await self._refuse(turn, error)
        finally:
            self._account(turn)

    async def _serve(self, turn: TurnState, parsed: ParsedTurn, body: bytes) -> None:
        """Place the turn and pass the answer back; other workers are tried until the first byte went out."""
        if parsed.model and self._fleet.knows_models() and not self._fleet.serves(parsed.model):
            raise errors.ModelNotFound(f"the model {parsed.model[:200]!r} does not exist", param="model")
        only = await self._stored.find(parsed.response_id) if parsed.response_id else ""
        turn.sight = await self._router.look(parsed, turn.exchange.path, body, only)
        if turn.sight.pool_seconds is not None:
            self._metrics.pool_lookup(turn.sight.pool_seconds)
        exchange = turn.exchange
        turn.prefix = self._breaks.follow(exchange.request_id, parsed, turn.sight, exchange.headers)
        failed: set[str] = set()
        reset: set[str] = set()
        for attempt in range(1, self._limits.tries + 1):
            placement = self._router.place(turn.sight, failed)
            self._note(turn, parsed, placement)
            name = placement.target.worker.name
            with placement.lease:
                try:
                    response = await self._open(turn, placement, self._body_for(turn, placement, body))
                except UpstreamError as error:
                    self._worker_failed(placement, error.kind)
                    # An idle connection closed just as it was used says nothing of the worker.
                    if error.kind == "reset" and name not in reset:
                        reset.add(name)
                    else:
                        failed.add(name)
                    if attempt < self._limits.tries and self._router.can_place(turn.sight, failed):
                        continue
                    raise _as_api_error(error) from None
                async with aclosing(response):
                    if response.status in _RETRYABLE:
                        self._worker_failed(placement, str(response.status))
                        failed.add(name)
                        if attempt < self._limits.tries and self._router.can_place(turn.sight, failed):
                            continue
                    await self._pass_back(turn, parsed, placement, response)
                    return

    async def _open(self, turn: TurnState, placement: Placement, body: bytes) -> UpstreamResponse:
        exchange, target = turn.exchange, placement.target
        headers = for_worker(
            exchange.headers, api_key=self._worker_key, request_id=exchange.request_id, rank=target.rank
        )
        return await self._transport.open(
            exchange.method, target.worker.url + exchange.url_path, headers, body
        )

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
        if kind == "connect":
            self._fleet.mark_down(worker, "connection refused")

    async def _pass_back(
        self, turn: TurnState, parsed: ParsedTurn, placement: Placement, response: UpstreamResponse
    ) -> None:
        """The worker's answer, byte for byte, as it comes; a broken stream ends with an error event."""
        exchange = turn.exchange
        turn.status = response.status
        events = is_event_stream(response.headers)
        makes = response.status == 200 and exchange.path == stored.PATH
        learner = self._stored.learner(placement.target.worker.name) if makes else None
        own = self._own_headers(turn, placement)
        await exchange.start(response.status, for_client(response.headers, own))
        try:
            async with aclosing(response.chunks()) as chunks:
                async for chunk in chunks:
                    if turn.first_byte is None:
                        turn.first_byte = time.perf_counter()
                        placement.lease.first_token()
                        if response.status == 200 and turn.sight is not None:
                            self._router.computed(turn.sight, placement.target)
                    if learner is not None and learner.feed(chunk):
                        learner = None
                    turn.tail.feed(chunk)
                    await exchange.send(chunk)
        except UpstreamError as error:
            broken = error.kind
        else:
            broken = (
                "" if not events or response.status != 200 or parsed.complete(turn.tail) else "incomplete"
            )
        if not broken:
            turn.outcome = "ok" if response.status < 500 else "error"
            if response.status == 200 and turn.sight is not None:
                self._router.ended(turn.sight)
            await exchange.finish()
            return
        self._worker_failed(placement, broken)
        if events:
            await exchange.finish(parsed.error_event(turn.tail, _as_api_error(UpstreamError(broken))))
        else:
            raise errors.ResponseCut

    async def _refuse(self, turn: TurnState, error: errors.ApiError) -> None:
        exchange = turn.exchange
        turn.status = error.status
        turn.outcome = "error"
        if exchange.started:
            raise errors.ResponseCut from None
        content = errors.body(error, errors.shape_of(exchange.path), exchange.request_id)
        await exchange.start(error.status, errors.head(error, content, exchange.request_id))
        await exchange.finish(b"" if exchange.method == "HEAD" else content)

    def _own_headers(self, turn: TurnState, placement: Placement) -> Headers:
        headers = [(b"x-request-id", turn.exchange.request_id.encode())]
        if turn.debug and turn.sight is not None:
            size = turn.sight.prompt_tokens
            for name, value in (
                (b"worker", placement.target.name),
                (b"action", placement.decision.action if size else "none"),
                (b"prompt-tokens", size),
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
        self._decisions.finish(turn.record, Outcome(turn.outcome, turn.status, cached, ttft, total))
        if cached is not None and not turn.record.unrenderable:
            self._metrics.cached_tokens(predicted=turn.record.predicted_cached_tokens, actual=cached)


def _as_api_error(error: UpstreamError) -> errors.ApiError:
    if "timeout" in error.kind:
        return errors.UpstreamTimeout("the worker did not answer in time")
    return errors.UpstreamFailed("the worker broke off")
