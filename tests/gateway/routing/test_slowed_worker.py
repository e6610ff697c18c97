"""A worker that slows down, seen from outside: its rates in the admin API, and where turns go."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Front, serving

from gateway.settings import load
from peer import ADMIN
from tests.ports import ports
from tests.simulated import simulated

PORTS = ports(above=24_300)
# 1,000 tokens take 120 ms: long beside what a busy machine adds.
RATES = {"prefill_tok_s": 8_000.0, "growth_s": 0.0}


class Fleet:
    """A gateway with its defaults in front of two workers; every turn is a prompt that nobody has seen."""

    def __init__(self, front: Front, urls: list[str]) -> None:
        self.front = front
        self.names = [url.removeprefix("http://") for url in urls]
        self._random = random.Random(1)

    async def turn(self) -> str:
        """Who answered it."""
        ids = [self._random.randrange(300, 900) for _ in range(self._random.randrange(400, 1200))]
        body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "stream": True}
        async with self.front.client.post(f"{self.front.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
            return answer.headers["x-moongate-worker"]

    async def turns(self, count: int) -> Counter[str]:
        return Counter([await self.turn() for _ in range(count)])

    async def seconds(self) -> dict[str, float]:
        """What 1,000 tokens take on each, by the rates that the admin API shows."""
        async with self.front.client.get(f"{self.front.url}/admin/v1/workers", headers=ADMIN) as answer:
            targets = [t for w in (await answer.json())["workers"] for t in w["targets"]]
        return {t["name"]: _of_1000(t["rates"]) for t in targets}

    async def slow(self, name: str, factor: float) -> None:
        async with self.front.client.post(f"http://{name}/sim/faults", json={"slow": factor}) as answer:
            assert answer.status == 200


def _of_1000(rates: dict[str, Any]) -> float:
    value = {name: rate["value"] for name, rate in rates.items()}
    prefill = 1000 / value["prefill_tokens_per_s"] * (1 + value["growth_per_1k"] / 2)
    return prefill + value["first_step_ms"] / 1e3


@pytest.fixture
async def fleet(tiny_model: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(
                simulated(tiny_model, PORTS, blocks=4000, max_model_len=4000, **RATES)
            )
            for _ in range(2)
        ]
        flags: dict[str, Any] = {"workers.urls": urls, "admin.token": "admin-token"}
        env = {"MOONGATE_WORKERS__HEALTH_INTERVAL_S": "0.1", "MOONGATE_ROUTING__HEADERS": "debug"}
        kept = {"MOONGATE_INDEX__SNAPSHOT_PATH": "", "MOONGATE_ROUTING__POLICY_PATH": ""}
        front = await stack.enter_async_context(serving(load(None, {**env, **kept}, flags)))
        await front.until(lambda: all(w.state == "up" for w in front.gateway.fleet.workers()))
        yield Fleet(front, urls)


async def test_b047_a_worker_that_slows_to_a_third_is_seen_within_20_turns_and_turns_leave_it(
    fleet: Fleet,
) -> None:
    await fleet.turns(14)
    before = await fleet.seconds()
    # Where turns go, if a busy machine has made the other one look slower.
    one, other = sorted(fleet.names, key=lambda name: before[name])
    await fleet.slow(one, 3.0)
    # Turns leave it for less than this says; here it keeps them, so that there is something to see.
    fleet.front.gateway.fleet.cordon(other, True)
    assert await fleet.turns(20) == {one: 20}
    fleet.front.gateway.fleet.cordon(other, False)
    after = await fleet.seconds()
    assert after[one] > 1.6 * before[one]
    assert after[one] > after[other]
    # A busy machine may slow the other one, too, for as long as a few turns take.
    found = [await fleet.turns(12) for _ in range(3)]
    assert any(counts[other] >= 2 * counts[one] for counts in found), found
