"""Bodies of every kind: their blocks are the engine's, one by one, and their cached tokens as predicted."""

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
from store.prompt.request import Prompt
from store.streams import EventSource, EventStreams
from tests.store.prompt.corpus import CHAT, TEXT, bodies, request_of
from tests.store.prompt.pieces import Body

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEME = HashScheme("sha256_cbor", 32)


@pytest.fixture(scope="session")
def prompts(session_fleet: RealFleet) -> LocalPrompts:
    return LocalPrompts.load(str(session_fleet.model_dir))


@dataclass
class Published:
    """Everything a worker has announced since it started: tokens of a block by its key."""

    computed: dict[int, list[int]] = field(default_factory=dict)
    pooled: set[int] = field(default_factory=set)
    resets: list[str] = field(default_factory=list)

    def apply(self, target: str, batch: EventBatch) -> Iterator[None]:
        assert (batch.unknown, batch.broken) == (0, 0)
        for event in batch.events:
            if isinstance(event, BlockStored) and event.pool:
                self.pooled.update(event.keys)
            elif isinstance(event, BlockStored):
                for number, key in enumerate(event.keys):
                    start = number * event.block_size
                    self.computed[key] = event.token_ids[start : start + event.block_size]
        return iter(())

    def reset(self, target: str, why: str) -> None:
        self.resets.append(why)


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

            await fleet.until(published)
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

    await fleet.until(in_the_pool)


async def test_varied_bodies_are_predicted_exactly(fleet: RealFleet) -> None:
    wrong: list[tuple[Body, Answered]] = []
    turns: list[Answered] = []

    async def ask(path: str, body: Body) -> None:
        response = await fleet.client.post(path, json=body)
        assert response.status_code == 200, response.text
        turns.append(answered(response.headers, response.json()["usage"]))
        if turns[-1].predicted != turns[-1].cached:
            wrong.append((body, turns[-1]))

    asked = list(varied_bodies(fleet.model, every=4))
    for _ in range(2):
        for path, body in asked:
            await ask(path, body)
    for body, turn in wrong:
        print(f"{turn}: {body}")
    assert not wrong
    assert sum(turn.cached > 0 for turn in turns) >= len(turns) / 2 > 40


def varied_bodies(model: str, every: int) -> Iterator[tuple[str, Body]]:
    """Bodies of the corpus that this model answers, long enough for blocks of their own."""
    refused_somewhere = ("truncation_side", "add_generation_prompt", "tool_choice")
    usable = [
        (path, body)
        for path, body in bodies()
        if path in (CHAT, TEXT) and not any(name in body for name in refused_somewhere)
    ]
    for number, (path, body) in enumerate(usable[::every]):
        yield path, lengthened(path, body, number) | {"model": model, "max_tokens": 2, "temperature": 0}


def lengthened(path: str, body: Body, number: int) -> dict[str, Any]:
    """The body with a head that makes it several blocks long and unlike the others."""
    head = f"conversation {number} of an agent that works on the cache of a fleet. " * 8
    if path == CHAT:
        return {**body, "messages": [{"role": "user", "content": head}, *body["messages"]]}
    if isinstance(body["prompt"], str):
        return {**body, "prompt": head + body["prompt"]}
    return {**body, "prompt": [1000 + number] * 70 + body["prompt"]}
