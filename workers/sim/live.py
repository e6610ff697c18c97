"""The engine model in real time: by the event loop's clock, with its events published and a real pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

import numpy as np

from store.hashing import Chain, HashScheme, chain
from store.prompt.request import Ids
from workers.sim.engine import Engine, Limits, Rates
from workers.sim.turn import Effect, Finished, Load, Removed, Save, Started, Stored, Turn
from workers.sim.vocabulary import Answer


class Pool(Protocol):
    """What is used of `workers.sim.pool.SimPool`; calls block and never raise."""

    def prefix(self, digests: Sequence[bytes]) -> int: ...
    def put(self, digests: Sequence[bytes]) -> list[bool]: ...
    def get(self, digests: Sequence[bytes]) -> list[bool]: ...


class Publisher(Protocol):
    def publish(self, at: float, events: Sequence[dict[str, Any]]) -> None: ...


@dataclass(frozen=True, slots=True)
class PullRates:
    """What a pull from the pool is made to last: a floor, and the bytes the model's KV would have.

    0.45 ms and 40 GB/s: Mooncake's transfer engine over TCP reaches 36 to 41 GB/s. 128 KiB a token is
    Llama-3.1-8B in 16 bits.
    """

    floor_s: float = 0.00045
    gb_s: float = 40.0
    kv_bytes_per_token: int = 131_072

    def seconds(self, tokens: int) -> float:
        return self.floor_s + tokens * self.kv_bytes_per_token / (self.gb_s * 1e9)


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and the answer it will get. report_all: announce the local hit again (resync probe)."""

    tokens: Ids
    chain: Chain
    answer: Answer
    salt: str | None = None
    session: str | None = None
    report_all: bool = False
    reads: bool = True


class Observer(Protocol):
    """Is told of every turn's first token, and of its end unless it was cancelled."""

    def started(self, stream: Stream) -> None: ...
    def finished(self, stream: Stream) -> None: ...


class Stream:
    """One turn in the engine: `produced` of its answer's tokens are there. `changed` is shared by a request's
    streams and set at every change."""

    def __init__(self, asked: Asked, blocks: Chain, changed: asyncio.Event) -> None:
        self.asked: Final = asked
        self.blocks: Final = blocks
        self.turn: Final = Turn(
            blocks.digests,
            len(asked.tokens) - len(asked.answer.ids),
            len(asked.answer.ids),
            reads=asked.reads,
            owner=self,
        )
        self.changed: Final = changed
        self.produced = 0
        self.done = False
        self.lost = False
        self.saved = 0


class LiveEngine:
    """One life of an engine. Everything happens on one event loop; pool calls go to `pool_thread`."""

    def __init__(
        self,
        limits: Limits,
        rates: Rates,
        pull: PullRates,
        scheme: HashScheme,
        publisher: Publisher,
        pool: Pool | None,
        pool_thread: Executor,
        observer: Observer,
    ) -> None:
        self._scheme: Final = scheme
        self._rates: Final = rates
        self._pull: Final = pull
        self._publisher: Final = publisher
        self._pool: Final = pool
        self._pool_thread: Final = pool_thread
        self._observer: Final = observer
        self._found: dict[Turn, int] = {}
        self._streams: dict[Turn, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._slow = 1.0
        self._closed = False
        self._unsaid: list[dict[str, Any]] = []
        self.engine: Final = Engine(limits, rates, lookup=None if pool is None else self._lookup)

    @property
    def open(self) -> int:
        return len(self._streams)

    async def submit(self, asked: Asked, changed: asyncio.Event) -> Stream:
        """Raises ValueError when prompt and answer never fit the cache."""
        ids = np.concatenate((asked.tokens, np.asarray(asked.answer.ids, dtype=np.uint32)))
        blocks = chain(ids, self._scheme, cache_salt=asked.salt, resume=asked.chain.digests)
        stream = Stream(replace(asked, tokens=ids), blocks, changed)
        turn = stream.turn
        if self._pool is not None:
            prompt = blocks.digests[: len(asked.tokens) // self._scheme.block_size]
            self._found[turn] = await self._loop.run_in_executor(self._pool_thread, self._pool.prefix, prompt)
        self._streams[turn] = stream
        now = self._loop.time()
        try:
            self._advance(now)
            self.engine.submit(turn, now)
        except ValueError:
            self._found.pop(turn, None)
            del self._streams[turn]
            raise
        self._schedule()
        return stream

    def cancel(self, stream: Stream) -> None:
        """Ends the turn, wherever it is; does nothing when it has ended."""
        if self._closed:
            return
        now = self._loop.time()
        self._advance(now)
        if self._streams.pop(stream.turn, None) is not None:
            self.engine.cancel(stream.turn, now)
            self._found.pop(stream.turn, None)
            stream.done = True
        self._schedule()

    def clear(self) -> bool:
        """Empties the cache; refused (False) while turns run. Announced with the next step, as in vLLM."""
        if not self.engine.cache.clear():
            return False
        self._unsaid.append({"type": "AllBlocksCleared"})
        return True

    def slow(self, factor: float) -> None:
        """Everything takes `factor` times as long from now on."""
        self._slow = factor
        self.engine.rates = replace(
            self._rates,
            prefill_tok_s=self._rates.prefill_tok_s / factor,
            step_s=self._rates.step_s * factor,
            decode_seq_s=self._rates.decode_seq_s * factor,
        )

    def close(self) -> None:
        """The end of this life: all turns are lost."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for stream in self._streams.values():
            stream.done = stream.lost = True
            stream.changed.set()
        self._streams.clear()

    def _tick(self) -> None:
        self._advance(self._loop.time())
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self.engine.next_step_at(self._loop.time())
        self._timer = self._loop.call_at(at, self._tick) if at < float("inf") else None

    def _advance(self, now: float) -> None:
        effects = self.engine.advance(now)
        if effects:
            self._apply(effects)
        produced = self.engine.produced
        for turn, stream in self._streams.items():
            count = produced(turn, now)
            # A turn that had to give way keeps what it has; it never gets less.
            if count > stream.produced:
                stream.produced = count
                stream.changed.set()

    def _apply(self, effects: Sequence[Effect]) -> None:
        events, self._unsaid = self._unsaid, []
        for effect in effects:
            if isinstance(effect, Removed):
                gone = cast(Sequence[bytes], effect.chain[effect.start : effect.end])
                events += map(_removed, reversed(gone))
                continue
            stream = cast(Stream, effect.turn.owner)
            match effect:
                case Stored(_, start, end):
                    events.append(self._stored(stream, start, end))
                case Load(_, start, end):
                    self._spawn(self._load(stream, start, end))
                case Save(_, end):
                    if self._pool is not None:
                        self._spawn(self._save(self._pool, stream, end))
                case Started(turn, _):
                    self._found.pop(turn, None)
                    self._observer.started(stream)
                    if stream.asked.report_all and turn.local_tokens:
                        events.append(self._stored(stream, 0, turn.local_tokens // self._scheme.block_size))
                case Finished(turn, _):
                    if self._streams.pop(turn, None) is not None:
                        stream.produced = turn.output_tokens
                        stream.done = True
                        stream.changed.set()
                        self._observer.finished(stream)
        if events:
            self._publisher.publish(time.time(), events)

    def _stored(self, stream: Stream, start: int, end: int) -> dict[str, Any]:
        asked = stream.asked
        extra: list[list[str] | None] = [None] * (end - start)
        if start == 0 and asked.salt is not None:
            extra[0] = [asked.salt]
        event = self._event(stream, start, end, "GPU")
        event["extra_keys"] = extra
        event["group_idx"] = 0
        event["kv_cache_spec_kind"] = "full_attention"
        if asked.session is not None:
            event["session_id"] = asked.session
        return event

    def _event(self, stream: Stream, start: int, end: int, medium: str) -> dict[str, Any]:
        size = self._scheme.block_size
        return {
            "type": "BlockStored",
            "block_hashes": list(stream.blocks.keys[start:end]),
            "parent_block_hash": stream.blocks.keys[start - 1] if start else None,
            "token_ids": stream.asked.tokens[start * size : end * size].tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }

    def _lookup(self, turn: Turn) -> int:
        return self._found.get(turn, 0)

    async def _load(self, stream: Stream, start: int, end: int) -> None:
        assert self._pool is not None
        ready_at = self._loop.time() + self._slow * self._pull.seconds(
            (end - start) * self._scheme.block_size
        )
        digests = stream.blocks.digests[start:end]
        got = await self._loop.run_in_executor(self._pool_thread, self._pool.get, digests)
        await asyncio.sleep(ready_at - self._loop.time())
        now = self._loop.time()
        self._advance(now)
        self.engine.loaded(stream.turn, now, ok=all(got))
        self._schedule()

    async def _save(self, pool: Pool, stream: Stream, end: int) -> None:
        start, stream.saved = stream.saved, max(stream.saved, end)
        if start >= end:
            return
        digests = stream.blocks.digests[start:end]
        put = await self._loop.run_in_executor(self._pool_thread, pool.put, digests)
        events = [
            {**self._event(stream, start + place, start + place + 1, "cpu"), "group_idx": 0}
            for place, stored in enumerate(put)
            if stored
        ]
        if events:
            self._publisher.publish(time.time(), events)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _removed(digest: bytes) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [int.from_bytes(digest[-8:], "big")],
        "medium": "GPU",
        "group_idx": 0,
    }
