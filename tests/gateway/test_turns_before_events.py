"""A client may ask its next turn before the worker's KV events of the last one are here."""

import asyncio
import json
from pathlib import Path

import pytest

from peer import Connection, Peer, Received
from tests.store.kv_publisher import Publisher, free_port, publishing, stored
from workers.launch.tiny_model import make_tiny_model

METRICS = 'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
QUESTION = {"role": "user", "content": "Which worker holds this prefix? " * 40}


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


async def refuse(_: Received, connection: Connection) -> None:
    await connection.answer(400, b'{"error":{}}', "content-type: application/json")


@pytest.mark.parametrize("announces", [True, False])
@pytest.mark.parametrize("answers", [True, False])
async def test_an_answer_is_proof_that_its_prompt_is_held_until_events_should_be_there(
    peers, front, tmp_path: Path, announces: bool, answers: bool
) -> None:
    peer: Peer = await peers(say_ok if answers else refuse)
    card = {"id": "m", "root": str(make_tiny_model(tmp_path / "tiny"))}
    peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [card]}).encode()
    peer.pages["/metrics"] = METRICS.encode()
    live, replay = free_port(), free_port()
    source = {
        "publisher": "zmq",
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{live}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "topic": "",
    }
    peer.pages["/kv_event_sources"] = json.dumps({"0": source}).encode()

    with publishing(lambda: Publisher(live, replay)) as publisher:
        gate = await front(peer, env={"MOONGATE_ROUTING__HEADERS": "debug"})
        target = f"127.0.0.1:{peer.port}"
        if announces:
            publisher.publish(stored([1], token_ids=list(range(32))))
            await gate.until(lambda: target in gate.gateway.knowledge.block_sizes)

        async def turn(*messages: dict[str, str]) -> tuple[int, int]:
            sent = {"model": "m", "messages": [QUESTION, *messages]}
            async with gate.client.post(f"{gate.url}/v1/chat/completions", json=sent) as answer:
                await answer.read()
                found = answer.headers
            return int(found["x-moongate-prompt-tokens"]), int(found["x-moongate-local-tokens"])

        size, local = await turn()
        assert local == 0
        _, local = await turn({"role": "user", "content": "Go on."})
        assert local == (size // 32 * 32 if announces and answers else 0)

        # Events that do not come within half a second do not come: the blocks are not there.
        async with asyncio.timeout(5):
            while local:
                await asyncio.sleep(0.6)
                _, local = await turn({"role": "user", "content": "Go on."})
