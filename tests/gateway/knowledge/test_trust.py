"""What is not proven, or contradicted by answers, counts in part: through a real gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from announcing import announce_from, page, state
from peer import ADMIN, Connection, Peer, Received
from store.hashing import HashScheme, chain
from tests.store.kv_publisher import Publisher, cleared, publishing, removed, stored

TOKENS = [n % 90 + 5 for n in range(32 * 8 + 1)]
KEYS = list(chain(TOKENS, HashScheme("sha256_cbor", 32)).keys)
WHOLE = stored(KEYS, token_ids=TOKENS[: 32 * 8])


@dataclass
class Site:
    """One worker that announces what a test wants and reports as many cached tokens, and the gateway."""

    peer: Peer
    publisher: Publisher
    cached: int = 0
    gate: Any = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.peer.port}"

    async def announced(self, message: bytes, blocks: int) -> None:
        """Publish, and wait until the index has so many blocks."""
        self.publisher.publish(message)
        index = self.gate.gateway.knowledge.index
        await self.gate.until(lambda: index.sizes() == {(self.target, "gpu"): blocks})

    async def answer(self, _: Received, connection: Connection) -> None:
        details = {"cached_tokens": self.cached}
        usage = {"prompt_tokens": len(TOKENS), "completion_tokens": 1, "prompt_tokens_details": details}
        content = json.dumps({"choices": [], "usage": usage}).encode()
        await connection.answer(200, content, "content-type: application/json")


@pytest.fixture
async def site(peers, front, tiny_model: Path) -> AsyncIterator[Site]:
    async def answer(received: Received, connection: Connection) -> None:
        await site.answer(received, connection)

    peer: Peer = await peers(answer)
    live, replay = announce_from(peer, tiny_model)
    with publishing(lambda: Publisher(live, replay, buffer=2)) as publisher:
        site = Site(peer, publisher)
        site.gate = await front(peer)
        yield site


async def credit(gate: Any) -> int:
    """Local tokens for the prompt; explaining it has no effect on anything."""
    url = f"{gate.url}/admin/v1/explain?api=/v1/completions"
    async with gate.client.post(url, json={"model": "m", "prompt": TOKENS}, headers=ADMIN) as answer:
        return (await answer.json())["candidates"][0]["local_tokens"]


async def turn(gate: Any, tokens: list[int] = TOKENS, **more: Any) -> None:
    """One turn, and what its answer teaches."""
    total = gate.gateway.audit.total
    before = total.turns + total.excused
    async with gate.client.post(
        f"{gate.url}/v1/completions", json={"model": "m", "prompt": tokens, **more}
    ) as answer:
        assert answer.status == 200
        await answer.read()
    await gate.until(lambda: total.turns + total.excused > before)


async def test_a_worker_whose_answers_contradict_its_events_is_believed_in_part(site: Site) -> None:
    gate, target = site.gate, site.target
    await site.announced(WHOLE, 8)
    assert await credit(gate) == 256
    for _ in range(8):
        await turn(gate)
        # What was not there is announced again, and is not there again.
        await site.announced(WHOLE, 8)
    assert await credit(gate) == 128
    entry = (await page(gate, "/admin/v1/index"))["targets"][0]
    assert (entry["trust"], entry["stream"], entry["believed"]) == ("degraded", "exact", 0.5)
    assert "2048 tokens" in entry["why"]
    assert f"index of {target}: of 2048 tokens" in str((await page(gate, "/ready"))["reasons"])
    audit = await page(gate, "/admin/v1/audit")
    assert audit["demoted"].keys() == {target}
    assert audit["series"][0]["errors"] == {
        **dict.fromkeys(("0", "16", "64", "1024", "4096", "16384", "65536", "more"), 0),
        "256": 8,
    }
    metrics = await page(gate, "/metrics")
    labels = f'{{kind="over",model="m",tier="local",worker="{target}"}}'
    assert f"moongate_mispredicted_tokens_total{labels} 2048.0" in metrics
    assert f'moongate_index_trust{{worker="{target}"}} 0.5' in metrics

    site.cached = 256
    for _ in range(8):
        await turn(gate)
    assert await credit(gate) == 256
    assert (await page(gate, "/admin/v1/index"))["targets"][0]["why"] == ""


async def test_b014_what_an_answer_refuted_is_not_promised_again_before_it_is_announced_again(
    site: Site,
) -> None:
    gate = site.gate
    await site.announced(WHOLE, 8)
    for _ in range(3):
        await turn(gate)
    audit = await page(gate, "/admin/v1/audit")
    assert [(each["predicted"], each["excused"]) for each in audit["mismatches"]] == [(256, "")]
    assert await credit(gate) == 0
    await site.announced(stored(KEYS[:4], token_ids=TOKENS[: 32 * 4]), 4)
    async with asyncio.timeout(60):
        # It announces again: for half a second what it has just computed counts, too.
        while await credit(gate) != 128:
            await asyncio.sleep(0.02)


async def test_b011_a_report_that_a_client_asks_for_leaves_no_ghost(site: Site) -> None:
    gate, publisher, target = site.gate, site.publisher, site.target
    index = gate.gateway.knowledge.index
    await site.announced(WHOLE, 8)
    site.cached = 256
    await turn(gate, vllm_xargs={"kv_cache_report_mode": "full"})
    publisher.publish(WHOLE)
    publisher.publish(removed(KEYS[6:]))
    await gate.until(lambda: index.sizes() == {(target, "gpu"): 6})


async def test_hits_that_nothing_foresaw_show_that_the_worker_hashes_otherwise(site: Site) -> None:
    gate = site.gate
    await site.announced(stored([1, 2, 3]), 3)
    site.cached = 256
    for number in range(8):
        await turn(gate, [number + 5, *TOKENS])
    assert "hash seed" in (await page(gate, "/admin/v1/index"))["targets"][0]["why"]


@pytest.mark.parametrize("how", ["answer", "cleared"])
async def test_b010_what_missing_events_may_have_removed_counts_in_part_until_it_is_proven(
    site: Site, how: str
) -> None:
    gate, publisher, target = site.gate, site.publisher, site.target
    is_in = state(gate, target)
    publisher.publish(WHOLE)
    await gate.until(is_in("exact"))
    assert await credit(gate) == 256
    publisher.publish(removed([KEYS[-1]]), lost=True)
    for key in range(4):
        publisher.publish(stored([key]), lost=key < 3)
    await gate.until(is_in("degraded"))
    assert await credit(gate) == 128
    assert "cannot be replayed" in (await page(gate, "/admin/v1/index"))["targets"][0]["why"]
    if how == "answer":
        site.cached = 224
        await turn(gate)
        held = gate.gateway.knowledge.match(KEYS)
        assert (held.blocks[target], held.certain[target]) == (7, 7)
        audit, metrics = await page(gate, "/admin/v1/audit"), await page(gate, "/metrics")
        assert (audit["turns"], audit["excused"], audit["exact_ratio"]) == (0, 1, None)
        assert [m["excused"] for m in audit["mismatches"]] == ["events_missing"]
        assert 'moongate_excused_predictions_total{reason="events_missing"} 1.0' in metrics
        assert "moongate_prediction_error_tokens_count 0.0" in metrics
    else:
        publisher.publish(cleared(), WHOLE)
        await gate.until(is_in("exact"))
        assert await credit(gate) == 256
