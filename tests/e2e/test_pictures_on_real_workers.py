"""A model that takes images: their hashes are in the chain, and no image is taken for another."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from picture_model import make_picture_model, picture

import real_fleet
from conversation import Answered, answered
from gateway.api.parse import parse
from gateway.prompts.rendering import WorkerRenderer
from real_fleet import BLOCK, RealFleet
from store.events import BlockStored, EventBatch
from store.hashing import Chain, HashScheme, chain
from store.keys import KeyLayout
from store.prompt.local import LocalPrompts
from store.prompt.request import Unrenderable
from store.streams import EventSource, EventStreams
from workers.connecting import trusting

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEME = HashScheme("sha256_cbor", BLOCK)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
RED, GREEN, WIDE = picture((200, 0, 0)), picture((0, 200, 0)), picture((0, 0, 200), width=200)
BEFORE, AFTER = "What is there before the picture? " * 12, "And what is there after it? " * 12


@pytest.fixture(scope="module")
def home(vllm_python: Path) -> Path:
    return vllm_python.parents[2] / ".moongate/e2e"


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return make_picture_model(home / "models/pictures")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pictures(home: Path, model: Path) -> AsyncIterator[RealFleet]:
    """One worker that takes up to four images a prompt, with a pool and a gateway."""
    limit = '--limit-mm-per-prompt={"image":4}'
    started = real_fleet.make(home, workers=1, model=str(model), worker_args=(limit,))
    try:
        await started.start()
        yield started
    finally:
        await started.stop()


def chat(*urls: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """A chat with images in the middle of a message's text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": BEFORE}, *images, {"type": "text", "text": AFTER}]
    messages = [{"role": "system", "content": BEFORE}, {"role": "user", "content": content}]
    return CHAT, {"messages": messages, "max_tokens": 1, **more}


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Images in every API that takes them; twice the same, of another shape, named by the client, salted."""
    named = {"type": "image_url", "image_url": {"url": RED}, "uuid": "mine"}
    data = {"type": "base64", "media_type": "image/png", "data": GREEN.partition(",")[2]}
    image = {"type": "image", "source": data}
    look = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}
    seen = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": AFTER}, image]}
    shown = [
        {"type": "input_text", "text": BEFORE},
        {"type": "input_image", "image_url": RED, "detail": "auto"},
        {"type": "input_text", "text": AFTER},
    ]
    looked = [
        {"role": "user", "content": BEFORE},
        {"role": "assistant", "content": [look]},
        {"role": "user", "content": [seen]},
    ]
    return [
        chat(RED),
        chat(WIDE, RED, RED),
        chat(RED, cache_salt="tenant"),
        (CHAT, {"messages": [{"role": "user", "content": [named, {"type": "text", "text": BEFORE}, named]}]}),
        (MESSAGES, {"messages": looked, "system": BEFORE, "max_tokens": 1}),
        (RESPONSES, {"input": [{"role": "user", "content": shown}], "max_output_tokens": 16}),
    ]


class Announced:
    """An event sink that keeps the tokens of every block by its key, and which of them are in the pool."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.pooled: set[int] = set()
        self.changed = asyncio.Event()

    def apply(self, target: str, batch: EventBatch) -> Iterator[None]:
        for event in batch.events:
            if isinstance(event, BlockStored) and event.pool:
                self.pooled.update(event.keys)
            elif isinstance(event, BlockStored):
                for number, key in enumerate(event.keys):
                    self.tokens[key] = event.token_ids[number * BLOCK : (number + 1) * BLOCK]
        self.changed.set()
        return iter(())

    def reset(self, target: str, why: str) -> None:
        self.tokens.clear()

    async def hold(self, keys: set[int]) -> None:
        async with asyncio.timeout(60):
            while not (keys <= self.tokens.keys() and keys <= self.pooled):
                self.changed.clear()
                await self.changed.wait()


async def test_b018_b058_chains_with_images_are_those_of_events_and_pool(
    pictures: RealFleet, model: Path
) -> None:
    prompts = LocalPrompts.load(str(model))
    worker = pictures.workers[0]
    renderer, seen = WorkerRenderer("", trusting()), Announced()
    chains: list[Chain] = []
    known = 0
    streams = EventStreams(seen)
    await streams.start()
    try:
        streams.subscribe(EventSource(worker.name, worker.events, worker.replay))
        for path, body in bodies():
            answer = await pictures.client.post(path, json={"model": pictures.model, **body})
            assert answer.status_code == 200, answer.text
            raw = answer.request.content
            rendered = await renderer.rendered(worker.url, path, raw)
            assert rendered.media
            whole = chain(rendered.tokens, SCHEME, media=rendered.media, cache_salt=body.get("cache_salt"))
            await seen.hold(set(whole.keys))
            for number, key in enumerate(whole.keys):
                assert seen.tokens[key] == rendered.tokens[number * BLOCK : (number + 1) * BLOCK].tolist()
            chains.append(whole)

            # What is known without the worker is the beginning of it, and never reaches into an image.
            request = parse("POST", path, raw).prompt
            assert request is not None
            with suppress(Unrenderable):
                beginning = prompts.prefix(request, SCHEME)
                assert 0 < len(beginning.tokens) <= rendered.media[0].offset
                assert beginning.tokens.tolist() == rendered.tokens[: len(beginning.tokens)].tolist()
                assert list(beginning.chain.keys) == list(whole.keys)[: len(beginning.chain)]
                known += 1
    finally:
        await streams.close()
        await renderer.close()

    assert known >= 4
    layout = KeyLayout(model=str(model))
    listed = (await pictures.client.get(f"http://127.0.0.1:{pictures.plan.pool_http_port}/get_all_keys")).text
    wanted = {key for each in chains for digest in each.digests for key in layout.keys(digest)}
    assert wanted <= set(listed.split())


async def test_b018_turns_with_images_are_predicted_exactly(pictures: RealFleet) -> None:
    async def ask(*urls: str) -> Answered:
        path, body = chat(*urls, model=pictures.model, cache_salt="predicted")
        answer = await pictures.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        turn = answered(answer.headers, answer.json()["usage"])

        async def heard_of() -> bool:
            (candidate,) = (await pictures.explain(body))["candidates"]
            return candidate["local_tokens"] >= (turn.prompt_tokens - 1) // BLOCK * BLOCK

        await pictures.until(heard_of)
        return turn

    first, other, both, again = [await ask(*urls) for urls in ((GREEN,), (WIDE,), (GREEN, RED), (GREEN,))]
    for turn in (first, other, both, again):
        assert turn.predicted == turn.cached
    # Another image shares what comes before it, a second one what comes before that, the same one all.
    assert 0 == first.cached < other.cached < both.cached < again.cached
    assert again.prompt_tokens - again.cached <= BLOCK
