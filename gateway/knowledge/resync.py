"""Probes of our own: finding out what a target holds after events of it were missed for good.

A worker's events say what changes. After a gap that no replay closed, or after a restart of the gateway whose
snapshot could not be proven, they leave the rest in doubt, or unknown. With `kv_cache_report_mode: full` in
`vllm_xargs` an engine announces a prompt's whole hit again, so a prompt of a recent turn, cut short and asked
for one token, shows how much of it is there:

    2,048 tokens of the chain     all announced: twice as many next
    4,096 tokens                  the first 100 blocks announced: that is all there is, the chain is done
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from weakref import WeakSet

import msgspec

from gateway.api.usage import cached_tokens
from gateway.knowledge.hot_chains import HotChain, HotChains
from gateway.upstream.headers import for_worker
from gateway.upstream.transport import Transport, UpstreamError
from policies.ledger import Ledger
from store.knowledge import Knowledge
from store.reports import PROBE_SESSION, Reported
from store.streams import EventStreams
from workers.fleet import Fleet, FleetEvent
from workers.worker import Target, Worker

logger = logging.getLogger(__name__)

Result = Literal["confirmed", "missing", "unsupported", "failed"]

# What the first probe of a chain may cost where nothing of it is there: a tenth of a second of prefill.
_FIRST_TOKENS: Final = 2048
# Where nothing hints at it that the target holds any of the chain.
_BLIND_TOKENS: Final = 512
# A worker that takes longer computes, or pulls: the request is cut off, and the engine drops it.
_ANSWER_S: Final = 2.0
# Of one token.
_ANSWER_BYTES: Final = 1 << 20
# Events come up to 0.2 s after the answer (see `router`), from a busy machine later.
_EVENTS_S: Final = 1.0
_LOOK_S: Final = 0.01
# For one target after one gap: probes, tokens that they made it compute, chains that it need not hold.
_MOST_PROBES: Final = 64
_MOST_COMPUTED: Final = 32_768
_MOST_BLIND: Final = 8
# Chains looked at for one target in one step: 1 ms each.
_LOOKS: Final = 3
# Answers without announcement in a row after which a worker is taken not to know the mode.
_SILENT: Final = 2


@dataclass(slots=True)
class _Episode:
    """What was done about one target since events of it were last missed.

    resets: of its stream by then. done: chains of which no more is to be found out. cold: those that nothing
    says the target holds any of. blind: how many of these it was asked for.
    """

    resets: int
    probes: int = 0
    computed: int = 0
    blind: int = 0
    done: WeakSet[HotChain] = field(default_factory=WeakSet[HotChain])
    cold: WeakSet[HotChain] = field(default_factory=WeakSet[HotChain])

    @property
    def over(self) -> bool:
        return self.probes >= _MOST_PROBES or self.computed >= _MOST_COMPUTED


@dataclass(frozen=True, slots=True)
class _Probe:
    """blocks: of `chain` to be asked for. sure: those of them that are proven, hoped: that may be there."""

    target: Target
    chain: HotChain
    blocks: int
    sure: int
    hoped: int


class Resync:
    """Owns the one task that probes: one probe at a time, at most `per_s` a second, 0 for none at all."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        ledger: Ledger,
        knowledge: Knowledge,
        streams: EventStreams,
        transport: Transport,
        counted: Callable[[str, Result], None],
        api_key: str,
        per_s: float,
    ) -> None:
        """counted: gets the worker and the result of every probe."""
        self.chains = HotChains() if per_s else None
        self._fleet = fleet
        self._ledger = ledger
        self._knowledge = knowledge
        self._streams = streams
        self._transport = transport
        self._counted = counted
        self._api_key = api_key
        self._every_s = 1 / per_s if per_s else 0.0
        self._episodes: dict[str, _Episode] = {}
        self._silent: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.chains is not None:
            self._task = asyncio.create_task(self._run(self.chains), name="resync")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        """A fleet listener: another process may know the mode, and has other blocks."""
        if event in ("restarted", "lost", "removed"):
            self._silent.pop(worker.name, None)
            for target in worker.targets:
                self._episodes.pop(target.name, None)

    async def _run(self, chains: HotChains) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._step(chains)
            except Exception:
                logger.exception("a probe failed")

    async def _step(self, chains: HotChains) -> None:
        """The probe that matters most now, if there is one."""
        unproven = [
            (target, episode)
            for target in self._fleet.targets()
            if (episode := self._episode(target)) is not None
        ]
        for choose in (self._hinted, self._blind):
            for target, episode in unproven:
                probe = choose(target, episode, chains)
                if probe is not None:
                    await self._ask(probe, episode)
                    return

    def _episode(self, target: Target) -> _Episode | None:
        """None: nothing is to be found out of `target`, or it is not the time."""
        worker, name = target.worker, target.name
        status = self._streams.status_of(name)
        unproven = status is not None and (name in self._knowledge.doubts or status.state == "degraded")
        if status is None or not unproven or worker.state != "up" or worker.cordoned:
            return None
        # Engines announce blocks of window groups that they do not hold (vLLM 0.32).
        if self._knowledge.index.is_hybrid(name) or self._silent.get(worker.name, 0) >= _SILENT:
            return None
        episode = self._episodes.get(name)
        if episode is None or episode.resets != status.resets:
            episode = self._episodes[name] = _Episode(status.resets)
        queued = self._ledger.load(name, time.monotonic()).queued_tokens or worker.report.waiting
        return None if episode.over or queued else episode

    def _hinted(self, target: Target, episode: _Episode, chains: HotChains) -> _Probe | None:
        """Of the chains used last of which the target seems to hold something. Looks at a few each time."""
        name, looks = target.name, _LOOKS
        for chain in chains.latest():
            if chain in episode.done or chain in episode.cold or not looks:
                continue
            looks -= 1
            if self._knowledge.hashes.scheme(name) != chain.scheme or target.worker.card(chain.model) is None:
                episode.done.add(chain)
                continue
            doubtful = name in self._knowledge.doubts
            held = self._knowledge.match(chain.keys)
            sure = held.certain.get(name, 0)
            hoped = held.blocks.get(name, 0) if doubtful else len(chain.keys)
            if sure >= hoped:
                episode.done.add(chain)
            # Engines evict tails first: one that holds a later block is likely to hold those before it.
            elif doubtful or sure or self._knowledge.index.holds_any(name, chain.keys):
                first = _FIRST_TOKENS // chain.scheme.block_size
                return _Probe(target, chain, min(hoped, max(sure + first, 2 * sure)), sure, hoped)
            else:
                episode.cold.add(chain)
        return None

    def _blind(self, target: Target, episode: _Episode, chains: HotChains) -> _Probe | None:
        """The beginning of a chain that nothing speaks for, but that others use now."""
        for chain in chains.latest():
            if chain in episode.cold and episode.blind < _MOST_BLIND:
                episode.cold.discard(chain)
                episode.blind += 1
                blocks = min(len(chain.keys), _BLIND_TOKENS // chain.scheme.block_size)
                return _Probe(target, chain, blocks, 0, len(chain.keys))
        return None

    async def _ask(self, probe: _Probe, episode: _Episode) -> None:
        episode.probes += 1
        name, keys = probe.target.name, probe.chain.keys[: probe.blocks]
        with self._knowledge.reports.probe(name, keys) as reported:
            result, cached = await self._asked(probe, reported)
        worker = probe.target.worker
        self._silent[worker.name] = self._silent.get(worker.name, 0) + 1 if result == "unsupported" else 0
        episode.computed += max(0, probe.blocks - cached) * probe.chain.scheme.block_size
        if result != "confirmed" or probe.blocks >= probe.hoped:
            episode.done.add(probe.chain)
        if result == "missing":
            self._knowledge.probed(name, probe.chain.keys[: probe.hoped], cached)
        self._counted(worker.name, result)

    async def _asked(self, probe: _Probe, reported: Reported) -> tuple[Result, int]:
        """The result, and how many blocks were there before."""
        worker, chain = probe.target.worker, probe.chain
        connected = self._streams.status_of(probe.target.name)
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, content = await self._post(probe)
        except (UpstreamError, TimeoutError):
            return "failed", 0
        if status != 200:
            logger.info("worker %s answered a probe with %d", worker.name, status)
            return "failed", 0
        cached = cached_tokens(content)
        blocks = probe.blocks if cached is None else cached // chain.scheme.block_size
        # Where nothing was there, all of it comes as one run from the root, like a report.
        left = int(_EVENTS_S / _LOOK_S)
        while reported.blocks < (blocks or probe.blocks) and left:
            await asyncio.sleep(_LOOK_S)
            left -= 1
        if blocks == 0:
            return "missing", 0
        if reported.blocks == 0:
            now = self._streams.status_of(probe.target.name)
            lost = connected is None or now is None or now.resets != connected.resets
            return ("failed" if lost else "unsupported"), blocks
        return ("confirmed" if reported.blocks >= probe.blocks else "missing"), reported.blocks

    async def _post(self, probe: _Probe) -> tuple[int, bytes]:
        target, chain = probe.target, probe.chain
        end = probe.blocks * chain.scheme.block_size
        # One token more than the blocks: of a prompt that ends with a block the last one would be computed.
        ids: list[int] = chain.tokens[: end + 1].tolist()
        body: dict[str, Any] = {
            "model": chain.model,
            "prompt": ids if len(ids) > end else [*ids, ids[-1]],
            "max_tokens": 1,
            "vllm_xargs": {"kv_cache_report_mode": "full", "session_id": PROBE_SESSION},
        }
        if chain.salt is not None:
            body["cache_salt"] = chain.salt
        headers = for_worker(
            [(b"content-type", b"application/json")],
            api_key=self._api_key,
            request_id=PROBE_SESSION,
            rank=target.place,
        )
        sent = msgspec.json.encode(body)
        response = await self._transport.open("POST", target.worker.url, b"/v1/completions", headers, sent)
        with closing(response):
            content = b""
            while chunk := await response.read():
                content += chunk
                if len(content) > _ANSWER_BYTES:
                    raise UpstreamError("protocol")
        return response.status, content
