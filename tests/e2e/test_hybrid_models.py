"""Sliding-window models with small caches on real vLLM: what the index and the pool view say is what hits.

Two workers keep windows as vLLM does by default, the third keeps them all. Prompts are token ids.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import real_fleet
from gateway.cli.examination import examine
from gateway.cli.remote import RunningGateway
from hybrid_model import make_hybrid_model
from real_fleet import BLOCK, PATIENT_S, TOKEN, RealFleet, RealWorker
from workers.connecting import trusting

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 96
DENSE = "--prefix-cache-retention-interval=64"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hybrids(vllm_python: Path) -> AsyncIterator["Hybrids"]:
    home = vllm_python.parents[2] / ".moongate/e2e"
    model = make_hybrid_model(home / "models/moongate-hybrid")
    fleet = real_fleet.make(home, workers=3, model=str(model), blocks=BLOCKS)
    dense = replace(fleet.plan, fleet=replace(fleet.plan.fleet, worker_args=(DENSE,)))
    fleet.workers[2].server = dense.workers()[2]
    try:
        await fleet.start()
        async with httpx.AsyncClient(timeout=PATIENT_S, trust_env=False) as direct:
            yield Hybrids(fleet, direct)
    finally:
        await fleet.stop()


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens that a worker was said to find in its own cache and in the pool, and those that it found."""

    local: int
    pool: int
    cached: int


@dataclass(slots=True)
class Hybrids:
    """direct: a client for workers, past the gateway."""

    fleet: RealFleet
    direct: httpx.AsyncClient
    seeds: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def one(self) -> RealWorker:
        return self.fleet.workers[0]

    @property
    def two(self) -> RealWorker:
        return self.fleet.workers[1]

    @property
    def dense(self) -> RealWorker:
        return self.fleet.workers[2]

    def tokens(self, length: int) -> list[int]:
        """That nobody else has."""
        draw = random.Random(next(self.seeds))
        return [draw.randrange(300, 8000) for _ in range(length)]

    def body(self, prompt: list[int], output: int = 1) -> dict[str, Any]:
        body = {"model": self.fleet.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True}
        return {**body, "temperature": 0, "return_token_ids": True}

    async def said(self, worker: RealWorker, prompt: list[int]) -> tuple[int, int]:
        """Local and pool tokens of `prompt` on `worker`, by the gateway's knowledge."""
        candidates = (await self.fleet.explain(self.body(prompt)))["candidates"]
        found = next(c for c in candidates if c["target"] == worker.name)
        return found["local_tokens"], found["pool_tokens"]

    async def send(self, worker: RealWorker, prompt: list[int], output: int = 1) -> tuple[int, list[int]]:
        """Past the gateway: cached tokens and the answer. Then everything it announced has been heard."""
        answer = await self.direct.post(f"{worker.url}/v1/completions", json=self.body(prompt, output))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        await self.heard(worker)
        return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["choices"][0]["token_ids"]

    async def heard(self, worker: RealWorker) -> None:
        """Events come in order: when those of one more prompt are here, all others are."""
        mark = self.tokens(BLOCK + 1)
        await self.direct.post(f"{worker.url}/v1/completions", json=self.body(mark))
        await self.fleet.heard_of(worker.name, mark)

    async def pooled(self, prompt: list[int], tokens: int) -> None:
        """Wait until the pool holds that much of `prompt`."""

        async def there() -> bool:
            return (await self.said(self.one, prompt))[1] >= tokens

        await self.fleet.until(there)

    async def hit(self, worker: RealWorker, prompt: list[int]) -> Hit:
        local, pool = await self.said(worker, prompt)
        cached, _ = await self.send(worker, prompt)
        return Hit(local, pool, cached)


async def test_b052_repeats_and_extensions_hit_at_the_end_of_the_prompt_before(hybrids: Hybrids) -> None:
    one, two, prompt = hybrids.one, hybrids.two, hybrids.tokens(325)
    longer = prompt + hybrids.tokens(64)
    assert await hybrids.hit(one, prompt) == Hit(0, 0, 0)
    await hybrids.pooled(prompt, 320)
    assert await hybrids.hit(one, prompt) == Hit(320, 320, 320)
    assert await hybrids.hit(two, prompt) == Hit(0, 320, 320)
    assert await hybrids.hit(one, longer) == Hit(320, 320, 320)
    await hybrids.pooled(longer, 384)
    assert await hybrids.hit(two, longer) == Hit(320, 384, 384)
    # Tails of both prompts lie side by side: a prefix may end anywhere among them.
    between = longer[:352] + hybrids.tokens(30)
    assert await hybrids.hit(one, between) == Hit(352, 352, 352)


async def test_b052_a_shared_prefix_is_nothing_until_a_sibling_has_shown_it(hybrids: Hybrids) -> None:
    one, two, prompt = hybrids.one, hybrids.two, hybrids.tokens(325)
    siblings = [prompt[:160] + hybrids.tokens(165) for _ in range(5)]
    await hybrids.send(one, prompt)
    await hybrids.pooled(prompt, 320)
    # A router that counts the full-attention group alone promises 160 tokens.
    assert await hybrids.hit(one, siblings[0]) == Hit(0, 0, 0)
    await hybrids.pooled(siblings[0], 320)
    assert await hybrids.hit(one, siblings[1]) == Hit(160, 0, 160)
    # Where the prefixes part is kept by the worker that saw it, and not put into the pool.
    assert await hybrids.hit(two, siblings[2]) == Hit(0, 0, 0)
    assert await hybrids.hit(two, siblings[3]) == Hit(0, 0, 0)
    assert await hybrids.hit(two, siblings[4]) == Hit(160, 0, 160)


async def test_b052_what_was_generated_is_nothing(hybrids: Hybrids) -> None:
    one, prompt = hybrids.one, hybrids.tokens(70)
    _, answer = await hybrids.send(one, prompt, 300)
    await hybrids.pooled(prompt, 64)
    assert await hybrids.hit(one, prompt + answer + hybrids.tokens(30)) == Hit(64, 64, 64)


async def test_b052_a_prompt_of_whole_blocks_keeps_the_window_one_block_before_its_end(
    hybrids: Hybrids,
) -> None:
    one, two, prompt = hybrids.one, hybrids.two, hybrids.tokens(320)
    await hybrids.send(one, prompt)
    await hybrids.pooled(prompt, 288)
    assert await hybrids.hit(one, prompt) == Hit(288, 288, 288)
    assert await hybrids.hit(two, prompt) == Hit(0, 288, 288)
    assert await hybrids.hit(one, prompt + hybrids.tokens(40)) == Hit(288, 288, 288)
    short = hybrids.tokens(40)
    await hybrids.send(one, short)
    await hybrids.pooled(short, 32)
    assert await hybrids.hit(one, short) == Hit(32, 32, 32)


async def test_b052_with_all_windows_kept_prefixes_hit_as_in_a_plain_model(hybrids: Hybrids) -> None:
    dense, two, prompt = hybrids.dense, hybrids.two, hybrids.tokens(325)
    await hybrids.send(dense, prompt)
    await hybrids.pooled(prompt, 320)
    sibling = prompt[:160] + hybrids.tokens(165)
    assert await hybrids.hit(dense, sibling) == Hit(160, 160, 160)
    assert await hybrids.hit(two, prompt[:160] + hybrids.tokens(50)) == Hit(0, 160, 160)
    start = hybrids.tokens(70)
    _, answer = await hybrids.send(dense, start, 300)
    await hybrids.pooled(start, 64)
    assert await hybrids.hit(dense, start + answer + hybrids.tokens(30)) == Hit(352, 64, 352)
    whole = hybrids.tokens(320)
    await hybrids.send(dense, whole)
    await hybrids.pooled(whole, 288)
    hit = await hybrids.hit(dense, whole + hybrids.tokens(40))
    assert (hit.local, hit.cached) == (320, 320)


async def test_the_doctor_tells_which_workers_keep_too_few_windows(hybrids: Hybrids) -> None:
    def examined() -> dict[str, str]:
        with RunningGateway(hybrids.fleet.url, TOKEN) as gateway:
            return {finding.check: finding.result for finding in examine(gateway, "", trusting())}

    found = await asyncio.to_thread(examined)
    workers = (hybrids.one, hybrids.two, hybrids.dense)
    assert [found[f"sliding windows of {worker.name}"] for worker in workers] == ["warn", "warn", "ok"]
    assert found["pool keys of moongate-hybrid"] == "ok"
    assert "fail" not in found.values()


async def test_after_300_random_turns_and_many_evictions_the_index_says_what_a_repeat_hits(
    hybrids: Hybrids,
) -> None:
    """Conversations that grow, fork and are forgotten, many times as much as the three caches hold."""
    fleet, draw = hybrids.fleet, random.Random(4)
    talks = [hybrids.tokens(draw.randint(40, 200)) for _ in range(24)]
    served: list[tuple[RealWorker, list[int]]] = []
    gate = asyncio.Semaphore(6)

    async def turn() -> None:
        async with gate:
            number, chance = draw.randrange(len(talks)), draw.random()
            prompt = talks[number]
            if len(prompt) > 480 or chance < 0.1:
                prompt = hybrids.tokens(draw.randint(40, 200))
            elif chance < 0.3:
                prompt = prompt[: draw.randrange(32, len(prompt))] + hybrids.tokens(draw.randint(1, 100))
            elif chance < 0.8:
                prompt = prompt + hybrids.tokens(draw.randint(1, 100))
            body = hybrids.body(prompt, draw.choice([1, 1, 2, 40]))
            answer = await fleet.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            talks[number] = prompt + answer.json()["choices"][0]["token_ids"]
            served.append((fleet.worker(answer.headers["x-moongate-worker"]), prompt))

    await asyncio.gather(*(turn() for _ in range(300)))
    for worker in fleet.workers:
        await hybrids.heard(worker)
    evicted = await fleet.metric("moongate_kv_events_total", kind="removed")
    assert evicted > 3 * BLOCKS * len(fleet.workers)

    lately = [[turn for turn in served if turn[0] is worker][-25:] for worker in fleet.workers]
    probes: list[tuple[Hit, int]] = []
    for _ in range(60):
        worker, prompt = draw.choice(draw.choice(lately))
        if draw.random() < 0.2:
            prompt = prompt[: draw.randrange(32, len(prompt))]
        before = await worker.metric("vllm:prefix_cache_hits_total")
        hit = await hybrids.hit(worker, prompt)
        probes.append((hit, int(await worker.metric("vllm:prefix_cache_hits_total") - before)))
    print(
        f"{evicted:.0f} blocks evicted; blocks held by probes:", Counter(h.local // BLOCK for h, _ in probes)
    )
    wrong_local = [(hit, own) for hit, own in probes if hit.local != own]
    wrong = [hit for hit, _ in probes if max(hit.local, hit.pool) != hit.cached]
    assert (len(wrong_local) <= 1, len(wrong) <= 1) == (True, True), (wrong_local, wrong)
    assert len({hit.local for hit, _ in probes}) > 6
