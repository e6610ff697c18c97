"""Prompts, block hashes and pool keys computed here are those of the real engine, one by one."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from conversation import Answered, answered
from real_fleet import RealFleet
from store.events import BlockStored, EventBatch
from store.hashing import HashScheme
from store.keys import KeyLayout
from store.prompt.local import LocalPrompts
from store.prompt.request import Prompt, Unrenderable
from store.streams import EventSource, EventStreams
from tests.store.prompt.corpus import CHAT, Body, bodies, request_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEME = HashScheme("sha256_cbor", 32)


@pytest.fixture(scope="session")
def prompts(fleet: RealFleet) -> LocalPrompts:
    return LocalPrompts.load(str(fleet.model_dir))


@dataclass
class Published:
    """Everything a worker has announced since it started: tokens of a block by its key."""

    computed: dict[int, list[int]] = field(default_factory=dict)
    pooled: set[int] = field(default_factory=set)
    resets: list[str] = field(default_factory=list)

    def batch(self, target: str, batch: EventBatch) -> None:
        assert (batch.unknown, batch.broken) == (0, 0)
        for event in batch.events:
            if isinstance(event, BlockStored) and event.pool:
                self.pooled.update(event.keys)
            elif isinstance(event, BlockStored):
                for number, key in enumerate(event.keys):
                    start = number * event.block_size
                    self.computed[key] = event.token_ids[start : start + event.block_size]

    def reset(self, target: str, why: str) -> None:
        self.resets.append(why)


async def test_every_prompt_is_rendered_as_by_the_worker(fleet: RealFleet, prompts: LocalPrompts) -> None:
    compared, refused = 0, 0
    async with httpx.AsyncClient(base_url=fleet.workers[0].url, timeout=60, trust_env=False) as worker:
        for path, body in bodies():
            answer = await worker.post(f"{path}/render", json={"model": fleet.model, **body})
            mine = locally(prompts, path, body)
            if answer.status_code == 200 and isinstance(mine, Prompt):
                theirs = answer.json()
                theirs = theirs[0] if isinstance(theirs, list) else theirs
                assert mine.tokens.tolist() == theirs["token_ids"], body
                compared += 1
            else:
                # Only here may the worker know more than we: the gateway lets it render these.
                assert answer.status_code >= 400 or mine == "developer_tools", body
                refused += 1
    assert compared >= 300
    assert refused <= compared / 10


def locally(prompts: LocalPrompts, path: str, body: Body) -> Prompt | str:
    """The prompt, or the reason why it is not rendered here."""
    try:
        return prompts.prompt(request_of(path, body), SCHEME)
    except Unrenderable as why:
        return why.reason


async def test_block_hashes_and_pool_keys_are_those_of_the_worker(
    fleet: RealFleet, prompts: LocalPrompts
) -> None:
    """Also proves that a follower who comes late gets everything by replay."""
    asked: list[tuple[str, Prompt]] = []
    for path, body in varied_bodies(fleet.model, every=12):
        prompt = prompts.prompt(request_of(path, body), SCHEME)
        response = await fleet.client.post(path, json=body)
        assert response.status_code == 200, response.text
        asked.append((answered(response.headers, response.json()["usage"]).worker, prompt))
    assert sum(len(prompt.chain) for _, prompt in asked) > 100

    found = {worker.name: Published() for worker in fleet.workers}
    for worker in fleet.workers:
        streams = EventStreams(found[worker.name])
        await streams.start()
        try:
            streams.subscribe(EventSource(worker.name, worker.events, worker.replay))
            wanted = {key for name, prompt in asked if name == worker.name for key in prompt.chain.keys}

            async def published(got: Published = found[worker.name], keys: set[int] = wanted) -> bool:
                return keys <= got.computed.keys()

            await fleet.until(published, budget_s=10)
        finally:
            await streams.close()
    for name, prompt in asked:
        for number, key in enumerate(prompt.chain.keys):
            block = prompt.tokens[number * SCHEME.block_size : (number + 1) * SCHEME.block_size]
            assert found[name].computed[key] == block.tolist()

    layout = KeyLayout(fleet.model_dir.name)
    needed = {key for _, prompt in asked for digest in prompt.chain.digests for key in layout.keys(digest)}

    async def in_the_pool() -> bool:
        async with httpx.AsyncClient(trust_env=False) as master:
            page = await master.get(f"http://127.0.0.1:{fleet.plan.pool_http_port}/get_all_keys")
        return needed <= set(page.text.split("\n"))

    await fleet.until(in_the_pool, budget_s=10)


async def test_varied_bodies_are_predicted_exactly(fleet: RealFleet) -> None:
    wrong: list[tuple[Body, Answered]] = []
    hits = turns = 0
    for path, body in varied_bodies(fleet.model, every=4):
        for _ in range(2):
            response = await fleet.client.post(path, json=body)
            assert response.status_code == 200, response.text
            turn = answered(response.headers, response.json()["usage"])
            turns += 1
            hits += turn.cached > 0
            if turn.predicted != turn.cached:
                wrong.append((body, turn))
    for body, turn in wrong:
        print(f"{turn}: {body}")
    assert not wrong
    assert hits >= turns / 2 > 40


def varied_bodies(model: str, every: int) -> Iterator[tuple[str, Body]]:
    """Bodies of the corpus that any worker answers, long enough for a block of their own."""
    refused_somewhere = ("truncation_side", "add_generation_prompt", "tool_choice")
    usable = ((path, body) for path, body in bodies() if not any(name in body for name in refused_somewhere))
    for number, (path, body) in enumerate(itertools.islice(usable, 0, None, every)):
        yield path, lengthened(path, body, number) | {"model": model, "max_tokens": 2, "temperature": 0}


def lengthened(path: str, body: Body, number: int) -> dict[str, Any]:
    """The body with a head that makes it several blocks long and unlike the others."""
    head = f"conversation {number} of an agent that works on the cache of a fleet. " * 8
    if path == CHAT:
        return {**body, "messages": [{"role": "user", "content": head}, *body["messages"]]}
    if isinstance(body["prompt"], str):
        return {**body, "prompt": head + body["prompt"]}
    return {**body, "prompt": [1000 + number] * 70 + body["prompt"]}
