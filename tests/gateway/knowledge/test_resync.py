"""What events left in doubt, or never said, is found out by probes of our own: few, small, soon given up."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import gateway.knowledge.resync as resync
from announcing import announce_from, page, state
from peer import Connection, Peer, Received
from store.hashing import HashScheme, chain
from tests.store.kv_publisher import Publisher, publishing, removed, stored

BLOCK = 32
PROBING = {"MOONGATE_INDEX__PROBES_PER_S": "100"}


def prompt(blocks: int, seed: int = 5) -> list[int]:
    return [(n * n + seed) % 90 + 5 for n in range(BLOCK * blocks + 1)]


def keys_of(tokens: list[int]) -> list[int]:
    return list(chain(tokens, HashScheme("sha256_cbor", BLOCK)).keys)


class Engine:
    """Caches as vLLM does: a hit is announced again on request only, what is computed always."""

    def __init__(self, publisher: Publisher | None = None) -> None:
        self.publisher = publisher
        self.held: set[int] = set()
        self.knows_mode = True
        self.hangs = False
        self.endless = False
        self.evicts = False  # all, after every turn that hit all
        self.probes: list[int] = []  # blocks asked for
        self.cut = 0
        self.sent = 0  # MiB of an answer without end

    async def answer(self, received: Received, connection: Connection) -> None:
        body = json.loads(received.body)
        tokens: list[int] = body["prompt"]
        keys = keys_of(tokens)[: (len(tokens) - 1) // BLOCK]
        hit = next((n for n, key in enumerate(keys) if key not in self.held), len(keys))
        if self.evicts and "vllm_xargs" not in body:
            hit = len(keys)
        events: list[Any] = []
        mode = body.get("vllm_xargs", {})
        session = {"session_id": mode.get("session_id"), "group_idx": 0}
        if mode.get("kv_cache_report_mode") == "full":
            self.probes.append(len(keys))
            if self.hangs:
                await connection.gone.wait()
                self.cut += 1
                return
            if self.endless:
                await connection.start_stream("application/json")
                with suppress(ConnectionError):
                    for _ in range(64):
                        await connection.chunk(bytes(1 << 20))
                        self.sent += 1
                return
            assert (body["max_tokens"], len(tokens) % BLOCK) == (1, 1)
            if self.knows_mode and hit:
                events.append(stored(keys[:hit], token_ids=tokens[: hit * BLOCK], **session))
        if keys[hit:]:
            parent = keys[hit - 1] if hit else None
            computed = tokens[hit * BLOCK : len(keys) * BLOCK]
            events.append(stored(keys[hit:], parent, token_ids=computed, **session))
            self.held.update(keys)
        if self.evicts:
            self.held.clear()
        if events and self.publisher:
            self.publisher.publish(*events)
        details = {"cached_tokens": hit * BLOCK}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "prompt_tokens_details": details}
        content = json.dumps({"choices": [], "usage": usage}).encode()
        await connection.answer(200, content, "content-type: application/json")


async def turn(gate: Any, tokens: list[int]) -> None:
    async with gate.client.post(f"{gate.url}/v1/completions", json={"model": "m", "prompt": tokens}) as it:
        assert it.status == 200
        await it.read()
    await gate.idle()


async def probed(gate: Any, target: str, **results: int) -> None:
    """Wait until the metric shows these results and no others."""
    wanted = {
        f'moongate_index_probes_total{{result="{result}",worker="{target}"}} {count}.0'
        for result, count in results.items()
    }
    async with asyncio.timeout(60):
        while {
            line
            for line in (await page(gate, "/metrics")).splitlines()
            if line.startswith("moongate_index_probes_total{")
        } != wanted:
            await asyncio.sleep(0.01)


async def quiet(gate: Any, engine: Engine) -> None:
    """Several times as long as one probe takes: none is made any more."""
    before = len(engine.probes)
    await asyncio.sleep(0.2)
    assert len(engine.probes) == before


Site = tuple[Engine, Peer, str, Callable[[int], Publisher]]


@pytest.fixture
async def site(peers, tiny_model: Path) -> Site:
    engine = Engine()
    peer: Peer = await peers(engine.answer)
    live, replay = announce_from(peer, tiny_model)
    return engine, peer, f"127.0.0.1:{peer.port}", lambda buffer: Publisher(live, replay, buffer=buffer)


def with_a_past(engine: Engine, publisher: Publisher, tokens: list[int]) -> None:
    """`tokens` were cached so long ago that no replay tells of it."""
    engine.publisher = publisher
    engine.held.update(keys_of(tokens))
    publisher.publish(stored(keys_of(tokens), token_ids=tokens[:-1]))
    for seed in (50, 51, 52):
        publisher.publish(stored(keys_of(prompt(1, seed)), token_ids=prompt(1, seed)[:-1]))


@asynccontextmanager
async def in_doubt(
    site: Site, front: Any, *past: list[int], env: dict[str, str] = PROBING
) -> AsyncIterator[tuple[Any, Publisher]]:
    """A gateway that came too late for the events of what its worker holds, the prompts of `past`."""
    engine, peer, target, start = site
    with publishing(lambda: start(2)) as publisher:
        for tokens in past:
            with_a_past(engine, publisher, tokens)
        gate = await front(peer, env=env)
        await gate.until(state(gate, target)("degraded"))
        yield gate, publisher


async def test_b015_blocks_older_than_any_event_are_found_by_probes_after_a_restart(
    site: Site, front
) -> None:
    engine, _, target, _ = site
    tokens = prompt(200)
    async with in_doubt(site, front, tokens) as (gate, publisher):
        await turn(gate, tokens)
        # A turn that hits says nothing by its events.
        await gate.until(lambda: gate.gateway.knowledge.match(keys_of(tokens)).certain.get(target) == 200)
        assert await credit_of(gate, tokens) >= 200 * BLOCK // 2
        # From little to all of it: what nothing speaks for may cost 512 tokens, then twice what was there.
        assert engine.probes == [16, 80, 160, 200]
        await probed(gate, target, confirmed=4)
        await quiet(gate, engine)
        publisher.publish(removed(keys_of(tokens)[150:]))
        await gate.until(lambda: gate.gateway.knowledge.match(keys_of(tokens)).certain.get(target) == 150)


async def credit_of(gate: Any, tokens: list[int]) -> int:
    url = f"{gate.url}/admin/v1/explain?api=/v1/completions"
    headers = {"authorization": "Bearer admin-token"}
    async with gate.client.post(url, json={"model": "m", "prompt": tokens}, headers=headers) as answer:
        return (await answer.json())["candidates"][0]["local_tokens"]


@pytest.mark.parametrize("left", [0, 90, 200])
async def test_b010_after_a_gap_probes_tell_what_is_still_there_from_what_is_not(
    site: Site, front, left: int
) -> None:
    engine, peer, target, start = site
    tokens = prompt(200)
    keys = keys_of(tokens)
    with publishing(lambda: start(2)) as publisher:
        engine.publisher = publisher
        gate = await front(peer, env=PROBING)
        await gate.until(state(gate, target)("exact"))
        await turn(gate, tokens)
        await gate.until(lambda: gate.gateway.knowledge.index.sizes() == {(target, "gpu"): 200})
        await quiet(gate, engine)
        assert engine.probes == []
        engine.held.difference_update(keys[left:])
        publisher.publish(removed(keys[left:][::-1]), lost=True)
        for n in range(4):
            publisher.publish(stored(keys_of(prompt(1, 50 + n))), lost=n < 3)
        await gate.until(lambda: bool(engine.probes))
        proven = {0: 64, 90: 128, 200: 200}[left]
        await gate.until(lambda: gate.gateway.knowledge.match(keys).certain[target] == proven)
        await gate.until(lambda: gate.gateway.knowledge.match(keys).blocks[target] == proven)
        await quiet(gate, engine)
        assert engine.probes == {0: [64], 90: [64, 128], 200: [64, 128, 200]}[left]
        # What was computed again is counted once: its end is the end of it.
        engine.publisher.publish(removed(keys[:proven][::-1]))
        await gate.until(lambda: gate.gateway.knowledge.match(keys).blocks.get(target, 0) == 0)


async def test_a_worker_that_announces_nothing_again_is_left_alone(site: Site, front, monkeypatch) -> None:
    monkeypatch.setattr(resync, "_EVENTS_S", 0.05)
    engine, _, target, _ = site
    engine.knows_mode = False
    async with in_doubt(site, front, *(prompt(20, n) for n in range(6))) as (gate, _):
        for n in range(6):
            await turn(gate, prompt(20, n))
        await probed(gate, target, unsupported=2)
        await quiet(gate, engine)
        assert len(engine.probes) == 2


async def test_a_worker_that_does_not_answer_in_time_is_cut_off_and_not_asked_for_that_again(
    site: Site, front, monkeypatch
) -> None:
    monkeypatch.setattr(resync, "_ANSWER_S", 0.05)
    engine, _, target, _ = site
    engine.hangs = True
    async with in_doubt(site, front, prompt(20)) as (gate, _):
        await turn(gate, prompt(20))
        await probed(gate, target, failed=1)
        await gate.until(lambda: engine.cut == 1)
        await quiet(gate, engine)
        await turn(gate, prompt(20))


async def test_b098_the_answer_to_a_probe_is_not_read_without_end(
    site: Site, front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resync, "_ANSWER_S", 20)
    engine, peer, target, _ = site
    engine.endless = True
    async with in_doubt(site, front, prompt(20)) as (gate, _):
        await turn(gate, prompt(20))
        await probed(gate, target, failed=1)
        await gate.until(lambda: not peer.open)
    assert engine.sent < 32


async def test_of_chains_that_nothing_speaks_for_a_few_beginnings_are_asked_for(site: Site, front) -> None:
    engine, _, target, _ = site
    async with in_doubt(site, front, prompt(1)) as (gate, _):
        engine.evicts = True
        for n in range(20):
            await turn(gate, prompt(40, n))
        await probed(gate, target, missing=8)
        await quiet(gate, engine)
        assert engine.probes == [16] * 8


async def test_workers_of_hybrid_models_are_not_asked_what_they_do_not_say_truly(site: Site, front) -> None:
    engine, peer, target, start = site
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64, "group_idx": 1}
    with publishing(lambda: start(1)) as publisher:
        with_a_past(engine, publisher, prompt(20))
        publisher.publish(stored(keys_of(prompt(2, 9)), token_ids=prompt(2, 9)[:-1], **window))
        gate = await front(peer, env=PROBING)
        await gate.until(state(gate, target)("degraded"))
        await gate.until(lambda: gate.gateway.knowledge.index.is_hybrid(target))
        await turn(gate, prompt(20))
        await quiet(gate, engine)
        assert engine.probes == []


async def test_without_probes_nothing_is_asked(site: Site, front) -> None:
    engine, _, _, _ = site
    async with in_doubt(site, front, prompt(20), env={}) as (gate, _):
        await turn(gate, prompt(20))
        await quiet(gate, engine)
        assert engine.probes == []
