"""Token ids equal what real vLLM renders; block hashes equal those in its KV events and its pool keys."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from conversation import Conversation, answered
from real_fleet import PATIENT_S, RealFleet
from store.events import BlockStored, EventBatch
from store.hashing import HashScheme
from store.keys import KeyLayout
from store.prompt.local import LocalPrompts
from store.prompt.request import ChatPrompt, Unrenderable
from store.streams import EventSource, EventStreams
from tests.store.prompt.corpus import bodies, request_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEME = HashScheme("sha256_cbor", 32)


async def test_b001_prompts_of_the_corpus_equal_what_the_worker_renders(fleet: RealFleet) -> None:
    prompts = LocalPrompts.load(str(fleet.model_dir))
    compared, left_out, refused = 0, 0, 0
    async with httpx.AsyncClient(base_url=fleet.workers[0].url, timeout=PATIENT_S, trust_env=False) as worker:
        for path, body in bodies():
            answer = await worker.post(f"{path}/render", json={"model": fleet.model, **body})
            try:
                ours = prompts.prompt(request_of(path, body), SCHEME).tokens.tolist()
            except Unrenderable:
                left_out += answer.is_success
                continue
            if not answer.is_success:
                refused += 1
                continue
            rendered: Any = answer.json()
            theirs = cast(Any, rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]
            assert ours == theirs, body
            compared += 1
    print(f"{compared} bodies equal, {left_out} not reproduced here, {refused} refused by the worker alone")
    assert compared >= 300
    assert left_out <= compared * 0.02


class Announced:
    """An event sink that collects keys by tier."""

    def __init__(self) -> None:
        self.gpu: list[int] = []
        self.pool: list[int] = []
        self.changed = asyncio.Event()

    def apply(self, target: str, batch: EventBatch) -> Iterator[None]:
        for event in batch.events:
            if isinstance(event, BlockStored):
                (self.pool if event.pool else self.gpu).extend(event.keys)
        self.changed.set()
        return iter(())

    def reset(self, target: str, why: str) -> None:
        self.gpu.clear()
        self.pool.clear()


async def test_b061_the_chain_is_found_in_events_and_pool(fleet: RealFleet) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=3000, tools=False)
    talk.grow()
    answer = await fleet.client.post("/v1/chat/completions", json=talk.body())
    turn = answered(answer.headers, answer.json()["usage"])
    prompts = LocalPrompts.load(str(fleet.model_dir))
    chain = prompts.prompt(ChatPrompt(messages=talk.messages), SCHEME).chain
    assert len(chain) >= 6
    worker = fleet.worker(turn.worker)

    seen = Announced()
    streams = EventStreams(seen)
    await streams.start()
    try:
        streams.subscribe(EventSource(worker.name, worker.events, worker.replay))
        async with asyncio.timeout(60):
            while not (set(chain.keys) <= set(seen.gpu) and set(chain.keys) <= set(seen.pool)):
                seen.changed.clear()
                await seen.changed.wait()
    finally:
        await streams.close()

    layout = KeyLayout(model=str(fleet.model_dir))
    wanted = {key for block in chain.digests for key in layout.keys(block)}
    async with httpx.AsyncClient(trust_env=False) as master:
        listed = (await master.get(f"http://127.0.0.1:{fleet.plan.pool_http_port}/get_all_keys")).text
    assert wanted <= set(listed.split())
