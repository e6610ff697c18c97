"""Workers made of raw sockets that announce what they cache, and what the gateway says of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import ADMIN, Peer
from tests.store.kv_publisher import free_port

METRICS = 'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'


def announce_from(peer: Peer, root: Path) -> tuple[int, int]:
    """Make `peer` a worker of the model at `root` that publishes KV events, and return their ports."""
    peer.pages["/v1/models"] = json.dumps(
        {"object": "list", "data": [{"id": "m", "root": str(root)}]}
    ).encode()
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
    return live, replay


async def page(gate: Any, path: str) -> Any:
    async with gate.client.get(gate.url + path, headers=ADMIN) as answer:
        return await answer.json(content_type=None) if path != "/metrics" else await answer.text()


def state(gate: Any, target: str) -> Callable[[str], Callable[[], bool]]:
    return lambda wanted: lambda: gate.gateway.trusts.of(target).state == wanted
