"""What the pool holds, and where, as candidates show it: real objects, a real master, a real gateway."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Front

from announcing import announce_from
from peer import ADMIN, Connection, Peer, Received
from pool_rig import PORTS, PoolRig, explained, pool_rig, pool_view
from store.keys import KeyLayout
from tests.store.kv_publisher import Publisher, cleared, publishing, stored
from tests.store.test_dead_segments import Store, ended, met


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[PoolRig]:
    with pool_rig(tmp_path_factory.mktemp("pool"), tiny_model) as rig:
        yield rig


async def post(gate: Front, body: dict[str, Any]) -> Mapping[str, str]:
    """The headers of an answer."""
    async with gate.client.post(f"{gate.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return answer.headers


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


async def test_tokens_in_a_workers_own_segment_are_told_from_those_across_the_network(
    rig: PoolRig, peers, front
) -> None:
    workers = [await peers(say_ok) for _ in range(3)]
    for worker in workers:
        rig.serve(worker)
    gate = await front(*workers, env=rig.env(*workers))
    body = rig.body("own")
    chain = rig.prompt(body).chain
    rig.stores[0].put(chain.digests[:5])
    rig.stores[1].put(chain.digests[5:8])
    shown = list((await explained(gate, body)).values())
    assert [each["pool_tokens"] for each in shown] == [8 * 32] * 3
    assert [each["own_segment_tokens"] for each in shown] == [5 * 32, 3 * 32, 0]


@pytest.mark.parametrize("lookup", ["http", "rpc"])
async def test_blocks_that_were_looked_up_by_the_client_cannot_be_evicted_meanwhile(
    rig: PoolRig, peers, front, lookup: str
) -> None:
    worker = await peers(say_ok)
    rig.serve(worker)
    gate = await front(worker, env=rig.env(worker, MOONGATE_MOONCAKE__LOOKUP=lookup))
    body = rig.body(f"pinned {lookup}")
    chain = rig.prompt(body).chain
    rig.stores[0].put(chain.digests[:4])
    (shown,) = (await explained(gate, body)).values()
    assert shown["pool_tokens"] == 4 * 32
    client = rig.stores[0]._client()
    assert client is not None
    codes = {client.remove(KeyLayout(rig.model).keys(digest)[0]) for digest in chain.digests[:4]}
    assert codes == ({0} if lookup == "http" else {-706})  # OBJECT_HAS_LEASE


async def test_a_lost_workers_share_of_the_pool_counts_for_nothing_until_it_is_back(
    rig: PoolRig, peers, front
) -> None:
    one, two = await peers(say_ok), await peers(say_ok)
    rig.serve(one)
    rig.serve(two)
    gate = await front(one, two, env=rig.env(one, two))
    body = rig.body("lost")
    chain = rig.prompt(body).chain
    rig.stores[0].put(chain.digests[:5])
    rig.stores[1].put(chain.digests[5:8])

    async def in_pool() -> set[int]:
        return {each["pool_tokens"] for each in (await explained(gate, body)).values()}

    assert await in_pool() == {8 * 32}
    worker = gate.gateway.fleet.get(f"127.0.0.1:{two.port}")
    await two.stop()
    await gate.until(lambda: worker.state == "down")
    assert await in_pool() == {5 * 32}
    await two.start(two.port)
    await gate.until(lambda: worker.state == "up")
    assert await in_pool() == {8 * 32}
    gate.gateway.fleet.remove(worker.name)  # its memory is still there
    assert await in_pool() == {8 * 32}
    assert (await pool_view(gate))["removed"] == 0


async def test_a_turn_that_fails_over_finds_nothing_of_the_dead_worker_in_the_pool(
    rig: PoolRig, peers, front, tmp_path: Path
) -> None:
    """The worker that gets the turn would try to load those blocks for as long as the master offers them."""
    body = rig.body("dies")
    chain = rig.prompt(body).chain
    own = f"127.0.0.1:{next(PORTS)}"
    store = Store(rig.master.address, own, chain.digests, tmp_path / "store.log", model=rig.model)
    await store.stored()
    seen: list[int] = []

    async def look(_: Received, connection: Connection) -> None:
        # An engine looks again while it can't load; the turn before it waits 0.25 s for the removal at most.
        async with asyncio.timeout(30):
            while rig.stores[0].prefix(chain.digests):
                await asyncio.sleep(0.01)
        seen.append(0)
        await connection.answer(200, b'{"ok":true}', "content-type: application/json")

    async def die(_: Received, connection: Connection) -> None:
        await ended(store)
        server = dying._server  # pyright: ignore[reportPrivateUsage]
        assert server is not None
        server.close()
        connection.reset()

    healthy, dying = await peers(look), await peers(die)
    rig.serve(healthy)
    rig.serve(dying)
    segments = {healthy.url: rig.segments[0], dying.url: own}
    gate = await front(healthy, dying, env=rig.env() | {"MOONGATE_WORKERS__SEGMENTS": json.dumps(segments)})
    pool = gate.gateway.pool
    assert pool is not None
    await met(pool, own)
    gate.gateway.fleet.cordon(f"127.0.0.1:{healthy.port}", True)
    turn = asyncio.create_task(post(gate, body))
    await gate.until(lambda: bool(dying.received))
    gate.gateway.fleet.cordon(f"127.0.0.1:{healthy.port}", False)
    headers = await turn
    assert headers["x-moongate-worker"] == f"127.0.0.1:{healthy.port}"
    assert headers["x-moongate-pool-tokens"] == "0"
    assert seen == [0]


@pytest.mark.parametrize("sign", ["nothing cached", "500"])
async def test_a_pull_that_failed_costs_its_segment_the_credit(rig: PoolRig, peers, front, sign: str) -> None:
    async def without(_: Received, connection: Connection) -> None:
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
        await connection.answer(200, json.dumps({"usage": usage}).encode())

    tried: list[int] = []

    async def break_once(request: Received, connection: Connection) -> None:
        tried.append(0)
        if len(tried) == 1 and sign == "500":
            await connection.answer(500, b'{"error":{"message":"Internal server error"}}')
        else:
            await without(request, connection)

    workers = [await peers(break_once), await peers(break_once)]
    for worker in workers:
        rig.serve(worker)
    gate = await front(*workers, env=rig.env(*workers))
    body, other = rig.body(f"fails {sign}"), rig.body(f"elsewhere {sign}")
    rig.stores[0].put(rig.prompt(body).chain.digests[:5])
    rig.stores[1].put(rig.prompt(other).chain.digests[:5])

    async def in_pool(body: dict[str, Any]) -> set[int]:
        return {each["pool_tokens"] for each in (await explained(gate, body)).values()}

    assert await in_pool(body) == {5 * 32}
    headers = await post(gate, body)
    assert len(tried) == (2 if sign == "500" else 1)
    assert headers["x-moongate-pool-tokens"] == ("0" if sign == "500" else "160")
    assert await in_pool(body) == {0}
    assert await in_pool(other) == {5 * 32}
    failing = [each["name"] for each in (await pool_view(gate))["segments"] if each["failing"]]
    assert failing == [rig.segments[0]]


@pytest.fixture
def own_rig(tmp_path: Path, tiny_model: Path) -> Iterator[PoolRig]:
    with pool_rig(tmp_path, tiny_model) as rig:
        yield rig


async def test_a_drained_worker_gets_no_turns_and_hands_its_blocks_on(own_rig: PoolRig, peers, front) -> None:
    one, two = await peers(say_ok), await peers(say_ok)
    own_rig.serve(one)
    own_rig.serve(two)
    gate = await front(one, two, env=own_rig.env(one, two))
    body = own_rig.body("drained")
    own_rig.stores[0].put(own_rig.prompt(body).chain.digests[:5])
    leaving, staying = f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"

    async def ask(method: str, **more: Any) -> dict[str, Any]:
        url = f"{gate.url}/admin/v1/workers/{leaving}"
        async with gate.client.request(method, url, headers=ADMIN, **more) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def reasons() -> list[str]:
        async with gate.client.get(f"{gate.url}/ready") as ready:
            return (await ready.json())["reasons"]

    assert (await explained(gate, body))[leaving]["own_segment_tokens"] == 5 * 32
    assert (await ask("GET"))["drain"] is None
    view = await ask("PATCH", json={"drain": True})
    assert view["cordoned"]
    async with asyncio.timeout(30):
        while view["drain"]["status"] != "SUCCEEDED":
            await asyncio.sleep(0.05)
            view = await ask("GET")
    assert (view["drain"]["moved"], view["drain"]["failed"]) == (5, 0)
    async with asyncio.timeout(30):
        while (await explained(gate, body))[staying]["own_segment_tokens"] != 5 * 32:
            await asyncio.sleep(0.05)
    assert (await explained(gate, body))[leaving]["excluded"] == "cordoned"
    assert not (await ask("PATCH", json={"drain": False}))["cordoned"]
    closed = f"the pool segment of worker {leaving} stays closed (DRAINED) until its process starts anew"
    async with asyncio.timeout(30):
        while closed not in await reasons():
            await asyncio.sleep(0.05)


async def test_a_worker_without_a_pool_cannot_be_drained_and_stays_as_it_is(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    url = f"{gate.url}/admin/v1/workers/127.0.0.1:{peer.port}"
    async with gate.client.patch(url, headers=ADMIN, json={"drain": True}) as answer:
        assert answer.status == 409
        assert "there is no pool" in (await answer.json())["error"]["message"]
    async with gate.client.get(url, headers=ADMIN) as answer:
        assert not (await answer.json())["cordoned"]


async def test_b067_a_reset_of_a_workers_cache_takes_nothing_from_the_pool(
    rig: PoolRig, peers, front
) -> None:
    """Nor what the worker's events had shown of the KV groups that its blocks in the pool are made of."""
    worker: Peer = await peers(say_ok)
    live, replay = announce_from(worker, Path(rig.model))
    rig.serve(worker)
    body = rig.body("reset")
    prompt = rig.prompt(body)
    keys, end = list(prompt.chain.keys), (prompt.size - 1) // 32
    window, full = KeyLayout(rig.model, groups=(0, 1)).prefixes()
    client = rig.stores[0]._client()  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    objects = [full + digest.hex() for digest in prompt.chain.digests[:end]]
    objects += [window + digest.hex() for digest in prompt.chain.digests[end - 2 : end]]
    assert client.put_batch(objects, [b"x"] * len(objects)) == 0  # pyright: ignore
    tokens = prompt.tokens.tolist()[: 32 * len(keys)]
    sliding = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64, "group_idx": 0}
    whole = {"kv_cache_spec_kind": "full_attention", "group_idx": 1}
    with publishing(lambda: Publisher(live, replay)) as publisher:
        gate = await front(worker, env=rig.env(worker))
        publisher.publish(
            stored(keys[end - 2 : end], token_ids=tokens, **sliding), stored(keys, token_ids=tokens, **whole)
        )
        for key in keys[:end]:
            publisher.publish(stored([key], medium="cpu", group_idx=1))
        for key in keys[end - 2 : end]:
            publisher.publish(stored([key], medium="cpu", group_idx=0))
        name = f"127.0.0.1:{worker.port}"
        await gate.until(lambda: gate.gateway.pool.status().announced == end + 2)
        before = (await explained(gate, body))[name]
        assert (before["local_tokens"], before["pool_tokens"]) == (32 * end, 32 * end)
        publisher.publish(cleared())
        await gate.until(lambda: not gate.gateway.knowledge.index.sizes())
        after = (await explained(gate, body))[name]
        assert (after["local_tokens"], after["pool_tokens"]) == (0, 32 * end)
        assert (await post(gate, body))["x-moongate-action"] == "pull"
    shown = (await pool_view(gate))["layouts"]
    assert [(each["groups"], each["tp_ranks"], each["found"]) for each in shown] == [([0, 1], 1, True)]


async def test_a_prompt_too_short_to_be_cached_is_judged_while_the_pool_does_not_answer(
    rig: PoolRig, peers, front
) -> None:
    async def nothing_cached(_: Received, connection: Connection) -> None:
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        await connection.answer(200, json.dumps({"usage": usage}).encode(), "content-type: application/json")

    worker = await peers(nothing_cached)
    rig.serve(worker)
    nobody = next(PORTS)
    away = {"MOONGATE_MOONCAKE__MASTER": f"127.0.0.1:{nobody}", "MOONGATE_MOONCAKE__HTTP_PORT": str(nobody)}
    gate = await front(worker, env=rig.env(worker) | away)
    await gate.tokenizers()
    total = gate.gateway.audit.total
    for content, found in (("hi", (1, 0)), ("word " * 200, (1, 1))):
        await post(gate, {"model": "m", "messages": [{"role": "user", "content": content}]})
        await gate.idle()
        assert (total.turns, total.excused) == found
