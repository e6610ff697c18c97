"""Turns with images: placed by what is known of their prompts, forwarded as they came."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from announcing import announce_from
from gateway.api.parse import parse
from gateway.prompts.rendering import NotRendered, WorkerRenderer
from peer import Connection, Peer, Received
from store.hashing import HashScheme, Media, chain
from tests.store.kv_publisher import Publisher, publishing, stored
from workers.connecting import trusting

CHAT = "/v1/chat/completions"
METRICS = b'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
SCHEME = HashScheme("sha256_cbor", 32)
HEAD = {"role": "user", "content": "Which worker holds this prefix? " * 40}


def body(picture: str) -> bytes:
    """One text, with a picture of the caller's choice."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    question = {"role": "user", "content": [{"type": "text", "text": "What is this? " * 40}, image]}
    answer = {"role": "assistant", "content": "Some thing or other. " * 40}
    messages = [HEAD, question, answer, {"role": "user", "content": "Really?"}]
    return json.dumps({"model": "m", "messages": messages}).encode()


class Renders:
    """A worker that renders a body to 320 ids, its picture in 100 to 180, or refuses to."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.turns: list[bytes] = []
        self.rendered: list[dict[str, Any]] = []

    async def __call__(self, request: Received, connection: Connection) -> None:
        if not request.target.endswith("/render"):
            self.turns.append(request.body)
            usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
            await connection.answer(200, json.dumps({"usage": usage}).encode())
        elif not self.enabled:
            await connection.answer(403, b"{}")
        else:
            sent = json.loads(request.body)
            self.rendered.append(sent)
            url = sent["messages"][1]["content"][1]["image_url"]["url"]
            features = {
                "mm_hashes": {"image": [f"hash of {url}"]},
                "mm_placeholders": {"image": [{"offset": 100, "length": 80}]},
            }
            answer = {"token_ids": list(range(320)), "features": features}
            await connection.answer(200, json.dumps(answer).encode())


@pytest.fixture
def model(tiny_model: Path) -> str:
    return str(tiny_model)


def introduce(peer: Peer, model: str) -> None:
    peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [{"id": "m", "root": model}]}).encode()
    peer.pages["/metrics"] = METRICS


@pytest.mark.parametrize("source", ["local", "auto"])
async def test_b018_of_two_images_in_one_text_only_what_is_before_them_is_shared(
    peers, front, model: str, source: str
) -> None:
    renders = Renders(enabled=source == "auto")
    peer = await peers(renders)
    introduce(peer, model)
    gate = await front(peer, env={"MOONGATE_PROMPT__SOURCE": source})

    async def prompt(picture: str):
        parsed = parse("POST", CHAT, body(picture))
        return await gate.gateway.prompts.understand(parsed, CHAT, body(picture))

    cat, dog = await prompt("cat"), await prompt("dog")
    if source == "auto":
        assert not cat.unknown
        assert not cat.prompt.partial
        expected = chain(np.arange(320), SCHEME, media=[Media("hash of data:image/png;base64,cat", 100, 80)])
        assert cat.prompt.chain == expected
        equal = [a == b for a, b in zip(cat.prompt.chain.keys, dog.prompt.chain.keys, strict=True)]
        assert equal == [True] * 3 + [False] * 7
        assert all(sent["mm_payload"] == "none" for sent in renders.rendered if len(sent["messages"]) == 4)
    else:
        assert cat.unknown == "multimodal"
        assert cat.prompt.partial
        assert cat.prompt.chain == dog.prompt.chain
        parsed = parse("POST", CHAT, json.dumps({"model": "m", "messages": [HEAD]}).encode())
        text = await gate.gateway.prompts.understand(parsed, CHAT, b"")
        assert len(text.prompt.chain) - 1 <= len(cat.prompt.chain) <= len(text.prompt.chain)
        assert list(cat.prompt.chain.keys) == list(text.prompt.chain.keys)[: len(cat.prompt.chain)]


async def test_a_known_beginning_may_be_held_whole_and_its_turn_goes_on_as_it_came(
    peers, front, tiny_model: Path
) -> None:
    renders = Renders(enabled=False)
    peer = await peers(renders)
    live, replay = announce_from(peer, tiny_model)
    with publishing(lambda: Publisher(live, replay)) as publisher:
        gate = await front(
            peer, env={"MOONGATE_ROUTING__HEADERS": "debug", "MOONGATE_PROMPT__SOURCE": "auto"}
        )
        parsed = parse("POST", CHAT, body("cat"))
        prompt = (await gate.gateway.prompts.understand(parsed, CHAT, body("cat"))).prompt
        # What the worker holds goes beyond what is known of the prompt: an image of its own, say.
        blocks = len(prompt.chain)
        keys = [*prompt.chain.keys, 1, 2, 3]
        publisher.publish(stored(keys, token_ids=list(range(32 * len(keys)))))
        target = f"127.0.0.1:{peer.port}"
        index = gate.gateway.knowledge.index
        await gate.until(lambda: index.match(prompt.chain.keys).get(target) == blocks)
        async with gate.client.post(f"{gate.url}{CHAT}", data=body("cat")) as answer:
            await answer.read()
            assert answer.headers["x-moongate-local-tokens"] == str(32 * blocks)
            identity = answer.headers["x-request-id"]
        assert renders.turns == [body("cat")]
        (record,) = [r for r in gate.gateway.decisions.recent(10) if r.request_id == identity]
        assert record.unrenderable == "multimodal"


async def test_features_without_a_place_for_every_item_are_not_taken(peers) -> None:
    async def half(_: Received, connection: Connection) -> None:
        features = {"mm_hashes": {"image": ["a", "b"]}, "mm_placeholders": {"image": []}}
        await connection.answer(200, json.dumps({"token_ids": [1], "features": features}).encode())

    peer = await peers(half)
    renderer = WorkerRenderer("", trusting())
    with pytest.raises(NotRendered, match="unreadable"):
        await renderer.rendered(peer.url, CHAT, body("cat"))
    await renderer.close()
