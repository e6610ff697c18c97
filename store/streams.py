"""KV event streams: every target's batches applied in order and once, or openly not.

A thread (`store.drain`) empties the sockets, a `Sequencer` for each target (`store.sequence`) decides, and
here, on the event loop, batches are decoded and handed to the sink, a few milliseconds at a time.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from store.drain import REPLAY_SILENCE_S, Bell, Drain, EventSource, Inbox, Kind, Message
from store.events import AllBlocksCleared, BadBatch, EventBatch, decoding
from store.sequence import Action, Ask, Deliver, Mark, Reset, Sequencer, StreamState

__all__ = ["EventSink", "EventSource", "EventStreams", "StreamMark", "StreamStatus"]

logger = logging.getLogger(__name__)

# The event loop is given back after this long, however much waits (DESIGN: no step above 5 ms).
_STEP_S: Final = 0.002
# An idle stream is asked this often whether anything was published that did not arrive.
PROOF_INTERVAL_S: Final = 15.0
# A new subscription takes effect at the publisher after the first replay may have been answered already;
# what falls between the two shows in a second look.
_SECOND_LOOK_S: Final = 1.0
_RETRY_DELAY_S: Final = 0.3
_END: Final = object()


class EventSink(Protocol):
    """Takes what the streams bring. Must not block."""

    def apply(self, target: str, batch: EventBatch) -> Iterator[None]:
        """Apply the next batch of `target`, a piece with every step, a millisecond or two each.

        Raises BadBatch at the end if some of it could not be used. Nothing else of `target` comes before the
        end but a `reset`, which ends it early.
        """
        ...

    def reset(self, target: str, why: str) -> None:
        """Forget all of `target`: what follows starts from nothing."""
        ...

    def doubt(self, target: str, why: str) -> None:
        """Events of `target` are missing for good: some of what is known of it may not be so any more."""
        ...


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """How far a target's events are known.

    gaps: times that batches were missing when the next arrived; most are closed by a replay. missed: batches
    that will never be had. garbage: messages or events that could not be read. unknown: events of no known
    type. last_proof_age_s: seconds since it was certain that nothing published before was missing.
    """

    state: StreamState
    last_seq: int | None
    batches: int
    gaps: int
    garbage: int
    last_event_age_s: float | None
    unknown: int
    missed: int = 0
    resets: int = 0
    last_proof_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class StreamMark:
    """Where a stream stood, to continue from after a restart of the gateway."""

    mark: Mark
    complete: bool


@dataclass(frozen=True, slots=True)
class _Applying:
    """A batch that is being applied, and the rest of the work."""

    seq: int
    rest: Iterator[None]


@dataclass(slots=True)
class _Stream:
    source: EventSource
    sequencer: Sequencer
    inbox: Inbox
    pending: Iterator[Action] = field(default_factory=lambda: iter(()))
    applying: _Applying | None = None  # before anything pending
    connection: int = 0
    request: int = 0
    batches: int = 0
    garbage: int = 0
    unknown: int = 0
    resets: int = 0
    last_event: float | None = None
    proven: float | None = None
    next_proof: float = float("inf")
    on_same: Callable[[], None] | None = None


class EventStreams:
    """Subscribes to targets' KV events and feeds one sink. All methods belong to the event loop's thread."""

    def __init__(
        self,
        sink: EventSink,
        *,
        proof_interval_s: float = PROOF_INTERVAL_S,
        replay_silence_s: float = REPLAY_SILENCE_S,
    ) -> None:
        self._sink = sink
        self._proof_interval = proof_interval_s
        self._replay_silence = replay_silence_s
        self._streams: dict[str, _Stream] = {}
        self._requests = 0
        self._bell: Final = Bell(self._apply)
        self._drain: Drain | None = None
        self._turn = 0  # which stream comes first
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._bell.listen()
        self._drain = Drain(self._bell.ring, replay_silence_s=self._replay_silence)
        self._drain.start()
        for stream in self._streams.values():
            self._drain.open(stream.source, stream.inbox)
        self._tick()

    async def close(self) -> None:
        """Ends the thread; nothing is applied afterwards."""
        drain, self._drain = self._drain, None
        if self._timer is not None:
            self._timer.cancel()
        if drain is not None:
            await asyncio.to_thread(drain.stop)

    def subscribe(
        self,
        source: EventSource,
        since: StreamMark | None = None,
        on_same: Callable[[], None] | None = None,
    ) -> None:
        """Follow `source`, from the first batch its replay has or on from `since`, if it is still the same.

        Does nothing if it is followed already. The sink must hold nothing of the target, or with `since`
        what was known then. `on_same` is called once a replay has proven that the publisher is the one that
        `since` is of and has brought all that happened since. Before that it must not be believed; if it is
        another publisher, the sink is told to forget it.
        """
        known = self._streams.get(source.target)
        if known is not None:
            if known.source == source:
                return
            self.unsubscribe(source.target)
        sequencer = Sequencer(
            can_replay=source.replay_endpoint is not None,
            mark=since.mark if since else None,
            complete=since.complete if since else False,
        )
        stream = _Stream(source, sequencer, Inbox(), on_same=on_same if since else None)
        self._streams[source.target] = stream
        if self._drain is not None:
            self._drain.open(source, stream.inbox)

    def unsubscribe(self, target: str) -> None:
        """Stop following `target`: what is known of it would age, so the sink is told to forget it."""
        stream = self._streams.pop(target, None)
        if stream is None:
            return
        if self._drain is not None:
            self._drain.close(target)
        self._sink.reset(target, "not followed any more")

    def followed(self, worker: str) -> set[str]:
        """The targets of `worker` that are followed: itself, or its ranks (`worker@rank`)."""
        return {target for target in self._streams if target.partition("@")[0] == worker}

    def restarted(self, target: str) -> None:
        """The target is known to be a new process: forget the old one and replay from the start."""
        stream = self._streams.get(target)
        if stream is None or self._drain is None:
            return
        for action in (*stream.pending, *stream.sequencer.restarted()):
            if isinstance(action, Reset):
                self._reset(stream, action)
        stream.pending, stream.applying = iter(()), None
        stream.connection += 1
        stream.request = 0
        self._drain.reconnect(target)

    def confirmed(self, target: str) -> None:
        """Something else than the stream has just shown that what is known of `target` holds."""
        stream = self._streams.get(target)
        if stream is not None:
            stream.proven = time.monotonic()

    def state(self, target: str) -> StreamState | None:
        """None: it is not followed."""
        stream = self._streams.get(target)
        return stream.sequencer.state if stream is not None else None

    def status_of(self, target: str) -> StreamStatus | None:
        """None: it is not followed."""
        stream = self._streams.get(target)
        return None if stream is None else _status(stream, time.monotonic())

    def status(self) -> dict[str, StreamStatus]:
        now = time.monotonic()
        return {target: _status(stream, now) for target, stream in self._streams.items()}

    def marks(self) -> dict[str, StreamMark]:
        """Where each stream stands, for a snapshot taken at the same time as that of what the sink holds.

        Without those of which a batch is half applied: the next life could not go on from there.
        """
        return {
            target: StreamMark(stream.sequencer.mark, stream.sequencer.complete)
            for target, stream in self._streams.items()
            if stream.sequencer.mark is not None and stream.applying is None
        }

    # ------------------------------------------------------------------ applying

    def _apply(self) -> None:
        if self._drain is None:
            return
        until = time.perf_counter() + _STEP_S
        busy = deque(self._streams.values())
        busy.rotate(-self._turn)
        while busy:
            stream = busy.popleft()
            if self._step(stream):
                busy.append(stream)
            if busy and time.perf_counter() >= until:
                # Whose turn it would be is the first next time: each may have enough to fill all the time.
                self._turn = list(self._streams).index(busy[0].source.target)
                self._bell.ring()
                return

    def _step(self, stream: _Stream) -> bool:
        """One action of `stream`, or a piece of one. False when nothing is left to do."""
        if stream.applying is not None:
            self._go_on(stream, stream.applying)
            return True
        action = next(stream.pending, None)
        if action is None:
            message = stream.inbox.take()
            if message is None:
                return False
            stream.pending = self._interpret(stream, message)
        elif isinstance(action, Deliver):
            self._deliver(stream, action)
        elif isinstance(action, Reset):
            self._reset(stream, action)
        else:
            self._ask(stream, action)
        return True

    def _interpret(self, stream: _Stream, message: Message) -> Iterator[Action]:
        kind, number, seq, payload = message
        sequencer = stream.sequencer
        if kind is Kind.GARBAGE:
            stream.garbage += 1
        elif kind in (Kind.REPLAYED, Kind.REPLAY_ENDED, Kind.REPLAY_FAILED):
            if number != stream.request:
                return
            if kind is Kind.REPLAYED:
                yield from sequencer.replayed(seq, payload)
            elif kind is Kind.REPLAY_FAILED:
                yield from sequencer.replay_failed()
            else:
                yield from sequencer.replay_ended()
                self._replay_is_done(stream)
        elif kind is Kind.DROPPED:
            yield from sequencer.lost()
        elif number < stream.connection:
            return
        elif kind is Kind.CONNECTED:
            stream.connection = number
            stream.next_proof = time.monotonic() + min(_SECOND_LOOK_S, self._proof_interval)
            yield from sequencer.connected()
        elif kind is Kind.DISCONNECTED:
            stream.request = 0
            sequencer.disconnected()
        else:
            yield from sequencer.live(seq, payload)

    def _replay_is_done(self, stream: _Stream) -> None:
        if stream.sequencer.replaying:
            return
        stream.proven = time.monotonic()
        if stream.on_same is not None and stream.sequencer.proven:
            on_same, stream.on_same = stream.on_same, None
            on_same()

    def _deliver(self, stream: _Stream, action: Deliver) -> None:
        stream.batches += 1
        stream.last_event = time.monotonic()
        stream.applying = _Applying(action.seq, self._applied(stream, action))
        self._go_on(stream, stream.applying)

    def _applied(self, stream: _Stream, action: Deliver) -> Iterator[None]:
        """Read and apply the batch, a piece until each pause. Raises BadBatch."""
        batch = yield from decoding(action.payload)
        stream.unknown += batch.unknown
        if batch.broken:
            self._unreadable(stream, f"{batch.broken} events of batch {action.seq} cannot be read")
        yield from self._sink.apply(stream.source.target, batch)
        if any(isinstance(event, AllBlocksCleared) for event in batch.events) and not batch.broken:
            stream.sequencer.emptied()

    def _go_on(self, stream: _Stream, applying: _Applying) -> None:
        """Do a piece of the batch."""
        try:
            if next(applying.rest, _END) is not _END:
                return
            why = ""
        except BadBatch as error:
            why = f"batch {applying.seq} cannot be used: {error}"
        except Exception:
            logger.exception("events of %s could not be applied", stream.source.target)
            why = f"batch {applying.seq} could not be applied"
        stream.applying = None
        if why:
            self._unreadable(stream, why)

    def _unreadable(self, stream: _Stream, why: str) -> None:
        stream.garbage += 1
        stream.sequencer.unreadable()
        self._reset(stream, Reset(why, same=True))

    def _reset(self, stream: _Stream, reset: Reset) -> None:
        target = stream.source.target
        stream.resets += 1
        on_same, stream.on_same = stream.on_same, None
        if reset.same:
            if on_same is not None:
                on_same()
            logger.warning("the blocks of %s are in doubt: %s", target, reset.why)
            self._sink.doubt(target, reset.why)
        else:
            logger.info("forgetting the blocks of %s: %s", target, reset.why)
            self._sink.reset(target, reset.why)

    # ------------------------------------------------------------------ replays and proofs

    def _ask(self, stream: _Stream, action: Ask) -> None:
        self._requests += 1
        stream.request = request = self._requests
        if action.attempt == 0:
            self._send(stream, action.start, request)
        else:
            delay = _RETRY_DELAY_S * action.attempt
            asyncio.get_running_loop().call_later(delay, self._send, stream, action.start, request)

    def _send(self, stream: _Stream, start: int, request: int) -> None:
        if self._drain is not None and stream.request == request:
            self._drain.ask(stream.source.target, start, request)

    def _tick(self) -> None:
        """Look for streams whose proof is due."""
        if self._drain is None:
            return
        now = time.monotonic()
        for stream in self._streams.values():
            if stream.next_proof <= now:
                stream.next_proof = now + self._proof_interval
                stream.pending = _after(stream.pending, stream.sequencer.prove())
        self._bell.ring()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(1.0, self._proof_interval), self._tick)


def _after(first: Iterator[Action], then: Iterator[Action]) -> Iterator[Action]:
    yield from first
    yield from then


def _status(stream: _Stream, now: float) -> StreamStatus:
    sequencer = stream.sequencer
    return StreamStatus(
        state=sequencer.state,
        last_seq=sequencer.mark.seq if sequencer.mark else None,
        batches=stream.batches,
        gaps=sequencer.gaps,
        garbage=stream.garbage,
        last_event_age_s=None if stream.last_event is None else now - stream.last_event,
        unknown=stream.unknown,
        missed=sequencer.missed,
        resets=stream.resets,
        last_proof_age_s=None if stream.proven is None else now - stream.proven,
    )
