"""A prefix that no event will ever tell of again is found by probes, on the real engine."""

from contextlib import AsyncExitStack

import numpy as np
import pytest

from gateway.api.parse import ParsedTurn
from gateway.knowledge.hot_chains import HotChains
from gateway.knowledge.resync import Result, Resync
from gateway.prompts.prompts import Understood
from gateway.upstream.connections import Connections
from policies.ledger import Ledger
from real_fleet import BLOCK, RealFleet, RealWorker
from store.hashing import HashScheme, chain
from store.knowledge import Knowledge
from store.prompt.request import Ids, Prompt
from store.streams import EventSource, EventStreams
from workers.connecting import trusting
from workers.fleet import Fleet
from workers.launch.vllm import BLOCKS
from workers.worker import EngineReport, KvEndpoint, ModelCard

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEME = HashScheme("sha256_cbor", BLOCK)


def prompt(seed: int, blocks: int) -> Ids:
    """Ends within a block."""
    return np.random.default_rng(seed).integers(5, 900, blocks * BLOCK + 7, dtype=np.uint32)


async def cached(fleet: RealFleet, worker: RealWorker, tokens: Ids) -> int:
    """Blocks that the worker finds of a prompt."""
    body = {"model": fleet.model, "prompt": tokens.tolist(), "max_tokens": 1}
    answer = await fleet.client.post(f"{worker.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] // BLOCK


async def test_b015_what_no_event_tells_of_any_more_is_found_by_probes(fleet: RealFleet) -> None:
    """As after a restart of the gateway without a snapshot, at a worker that can't replay."""
    worker = fleet.workers[0]
    held, gone = prompt(41, 120), prompt(42, 40)
    await cached(fleet, worker, held)
    knowledge = Knowledge()
    streams, known = EventStreams(knowledge), Fleet()
    transport = Connections(tls=trusting(), connect_s=2, between_chunks_s=10)
    results: list[tuple[str, Result]] = []
    resync = Resync(
        fleet=known,
        ledger=Ledger(),
        knowledge=knowledge,
        streams=streams,
        transport=transport,
        counted=lambda name, result: results.append((name, result)),
        api_key="",
        per_s=20,
    )
    known.mark_up(
        known.add(worker.url),
        EngineReport(),
        (ModelCard(fleet.model),),
        (KvEndpoint(0, worker.events, None),),
    )
    assert isinstance(resync.chains, HotChains)
    keys = {name: chain(tokens, SCHEME).keys for name, tokens in (("held", held), ("gone", gone))}
    knowledge.expect(worker.name, SCHEME)
    await transport.start()
    await streams.start()
    try:
        streams.subscribe(EventSource(worker.name, worker.events, None))
        await fleet.until(lambda: degraded(streams, worker))
        for session, tokens in (("gone", gone), ("held", held)):
            understood = Understood(Prompt(tokens, chain(tokens, SCHEME), "ids"), SCHEME)
            resync.chains.saw(session, ParsedTurn("completions", fleet.model), understood)
        resync.start()

        async def found() -> bool:
            return knowledge.match(keys["held"]).certain.get(worker.name) == 120 and len(results) >= 4

        try:
            await fleet.until(found)
        except TimeoutError:
            raise AssertionError(f"{results}, {knowledge.index.sizes()}") from None
        assert [result for _, result in results] == ["confirmed"] * 3 + ["missing"]
        # Of what was not there the beginning was computed for the probe, and is there now.
        assert knowledge.match(keys["gone"]).certain[worker.name] == 16
        await resync.close()
        assert [await cached(fleet, worker, tokens) for tokens in (held, gone)] == [120, 16]
    finally:
        await resync.close()
        await streams.close()
        await transport.close()


async def degraded(streams: EventStreams, worker: RealWorker) -> bool:
    return streams.state(worker.name) == "degraded"


async def test_b011_what_clients_have_announced_again_leaves_no_ghosts(fleet: RealFleet) -> None:
    worker = fleet.workers[0]
    tokens = prompt(43, 20)
    body = {"model": fleet.model, "prompt": tokens.tolist(), "max_tokens": 1}
    reporting = body | {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    async with AsyncExitStack() as stack:
        for other in fleet.workers[1:]:
            await stack.enter_async_context(fleet.cordoned(other.name))
        for _ in range(3):
            answer = await fleet.client.post("/v1/completions", json=reporting)
            assert answer.status_code == 200, answer.text
        await fleet.heard_of(worker.name, tokens.tolist())
        for seed in range(BLOCKS // 100 + 2):
            await cached(fleet, worker, prompt(1000 + seed, 100))

        async def forgotten() -> bool:
            candidates = (await fleet.explain(body))["candidates"]
            return all(c["local_tokens"] == 0 for c in candidates if c["target"] == worker.name)

        await fleet.until(forgotten)
