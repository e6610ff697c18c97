"""The way of an answer: what a worker says, to its client, byte for byte and as it comes."""

import asyncio
import time
from collections.abc import Callable

from gateway import errors
from gateway.api.parse import ParsedTurn
from gateway.asgi import Headers
from gateway.knowledge.hot_chains import HotChains
from gateway.proxy import stored
from gateway.proxy.keep_alive import keep_alive
from gateway.proxy.patience import Patience
from gateway.proxy.stored import StoredResponses
from gateway.proxy.turn import TurnState
from gateway.routing.holders import Holders
from gateway.routing.router import Placement
from gateway.upstream.headers import for_client, unbuffered
from gateway.upstream.transport import UpstreamError, UpstreamResponse
from workers.fleet import Fleet


class Answers:
    """Passes answers back, and tells what their beginning and end say of their workers."""

    def __init__(
        self,
        *,
        holders: Holders,
        fleet: Fleet,
        patience: Patience,
        responses: StoredResponses,
        hot: HotChains | None,
        keep_alive_s: float,
    ) -> None:
        """keep_alive_s: between comments in a silent stream, 0: none."""
        self._holders = holders
        self._fleet = fleet
        self._patience = patience
        self._stored = responses
        self._hot = hot
        self._keep_alive_s = keep_alive_s

    async def pass_back(
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
        exchange, worker, fields = turn.exchange, placement.target.worker, response.fields
        stream = response.status == 200 and fields.get(b"content-type", b"").startswith(b"text/event-stream")
        plain = fields.get(b"content-encoding", b"identity") == b"identity"
        # Whether bytes of ours may stand among the body's.
        extensible = stream and plain and b"content-length" not in fields
        learner = None
        if exchange.path == stored.PATH and response.status == 200:
            session = turn.sight.session.name if turn.sight is not None else ""
            learner = self._stored.learner(worker.name, session)
        head = for_client(response.headers, _own_headers(turn, placement), worker.url)
        if stream:
            head += unbuffered(response.headers)
        if exchange.started and not extensible:
            # An earlier worker's stream was begun and came to nothing; this is none that could go on from it.
            raise as_api_error(UpstreamError(str(response.status)))
        if stream and not exchange.started:
            _start(turn, response.status, head, alone=True)
            turn.stream = extensible
            if extensible and self._keep_alive_s:
                keeping = keep_alive(exchange, turn.tail, self._keep_alive_s)
                turn.keeper = asyncio.create_task(keeping, name="keep alive")
        try:
            if response.waits:
                with self._patience.waiting(worker.name, until, may_leave, exchange.task):
                    chunk = await response.read()
            else:
                chunk = response.taken()
            if stream and not chunk:
                return UpstreamError("empty")
            if not exchange.started:
                _start(turn, response.status, head)
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
        if stream and plain and not parsed.complete(turn.tail):
            await exchange.send(chunk)
            return UpstreamError("incomplete")
        turn.outcome = "ok" if response.status < 500 else "error"
        if response.status < 400:
            worker.breaker.succeeded()
        if response.status == 200 and turn.sight is not None:
            self._holders.ended(turn.sight)
        turn.ends()
        await exchange.finish(chunk)
        return None

    def _answered(self, turn: TurnState, placement: Placement, status: int) -> None:
        """The first byte of an answer is there."""
        turn.first_byte = time.perf_counter()
        placement.lease.first_token(time.monotonic(), answered=status == 200)
        if status < 400:
            self._fleet.answered(placement.target.worker)
        if status == 200 and turn.sight is not None:
            self._holders.computed(turn.sight, placement.target)
            if self._hot is not None and turn.parsed is not None and turn.sight.reads_cache:
                self._hot.saw(turn.sight.session.name, turn.parsed, turn.sight.understood)


def as_api_error(error: UpstreamError) -> errors.ApiError:
    if "timeout" in error.kind:
        return errors.UpstreamTimeout("the worker did not answer in time")
    if error.kind in ("connect", "tls"):
        return errors.UpstreamFailed("the worker can't be connected to")
    if error.kind == "protocol":
        return errors.UpstreamFailed("the worker's answer is no HTTP/1.1")
    return errors.UpstreamFailed("the worker broke off")


def _start(turn: TurnState, status: int, head: Headers, *, alone: bool = False) -> None:
    turn.status = status
    turn.exchange.start(status, head, alone=alone)


def _own_headers(turn: TurnState, placement: Placement) -> Headers:
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
