"""A real Mooncake master with real objects behind a real gateway, whose workers are raw sockets."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import Front

from peer import ADMIN, Peer
from store.hashing import HashScheme
from store.keys import KeyLayout
from store.prompt.local import LocalPrompts
from store.prompt.request import ChatPrompt, Prompt
from tests.ports import ports
from tests.store.pools import patient_watches
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool

PORTS = ports(above=23_600)
SCHEME = HashScheme("sha256_cbor", 32)
METRICS = 'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'


@dataclass(frozen=True)
class PoolRig:
    """`stores[n]` is the pool side of the n-th worker: its segment, and objects put there."""

    master: MooncakeMaster
    stores: tuple[SimPool, ...]
    segments: tuple[str, ...]
    model: str
    prompts: LocalPrompts

    def body(self, name: str, words: int = 200) -> dict[str, Any]:
        """A chat whose prompt nobody else has."""
        content = " ".join(f"{name} {number}" for number in range(words))
        return {"model": "m", "messages": [{"role": "user", "content": content}]}

    def prompt(self, body: dict[str, Any]) -> Prompt:
        return self.prompts.prompt(ChatPrompt(messages=body["messages"]), SCHEME)

    def serve(self, peer: Peer) -> None:
        """Make `peer` a worker of the rig's model."""
        card = {"id": "m", "root": self.model}
        peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [card]}).encode()
        peer.pages["/metrics"] = METRICS.encode()

    def env(self, *peers: Peer, **more: str) -> dict[str, str]:
        """Settings of a gateway where each of `peers` has the segment of the same number."""
        segments = {peer.url: segment for peer, segment in zip(peers, self.segments, strict=False)}
        return {
            "MOONGATE_MOONCAKE__MASTER": self.master.address,
            "MOONGATE_MOONCAKE__HTTP_PORT": str(self.master.http_port),
            # What is true is asked here, not how fast: this machine may be busy.
            "MOONGATE_MOONCAKE__BUDGET_MS": "2000",
            "MOONGATE_WORKERS__SEGMENTS": json.dumps(segments),
            "MOONGATE_ROUTING__HEADERS": "debug",
            **more,
        }


@contextmanager
def pool_rig(directory: Path, tiny_model: Path, stores: int = 2, **master: Any) -> Iterator[PoolRig]:
    """Blocking: for fixtures."""
    started = MooncakeMaster(
        rpc_port=next(PORTS), http_port=next(PORTS), log=directory / "master.log", **master
    )
    asyncio.run(started.start())
    model = str(tiny_model)
    segments = tuple(f"127.0.0.1:{next(PORTS)}" for _ in range(stores))
    pools = tuple(
        SimPool(started.address, segment, KeyLayout(model), block_bytes=1024, segment_bytes=16 << 20)
        for segment in segments
    )
    try:
        assert all(pool.connect() for pool in pools)
        with patient_watches():
            yield PoolRig(started, pools, segments, model, LocalPrompts.load(model))
    finally:
        for pool in pools:
            pool.close()
        asyncio.run(started.stop())


async def explained(gate: Front, body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The candidates for `body`, by target."""
    async with gate.client.post(f"{gate.url}/admin/v1/explain", json=body, headers=ADMIN) as answer:
        assert answer.status == 200, await answer.text()
        return {each["target"]: each for each in (await answer.json())["candidates"]}


async def pool_view(gate: Front) -> dict[str, Any]:
    async with gate.client.get(f"{gate.url}/admin/v1/pool", headers=ADMIN) as answer:
        return (await answer.json())["details"]
