"""Load and rates as live turns make them: charged at once, shared by siblings, learned from first tokens."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.parse import parse
from gateway.cli.explanation import as_text
from peer import ADMIN, Connection, Peer, Received
from policies.rates import work_of
from store.pool import PoolPrefix

METRICS = 'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'


class Gate:
    """Handlers that hold every request until opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, _: Received, connection: Connection) -> None:
        await self.open.wait()
        await connection.answer(200, b'{"ok":true}', "content-type: application/json")


@pytest.fixture
def model(tiny_model: Path) -> str:
    return str(tiny_model)


def serve(peer: Peer, model: str) -> None:
    peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [{"id": "m", "root": model}]}).encode()
    peer.pages["/metrics"] = METRICS.encode()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def burst(front: Any, handlers: list[Peer], path: str, bodies: list[dict[str, Any]]) -> list[int]:
    """Send all at once; how many each worker holds when all have arrived. Prompts to render are no turns."""

    def held() -> list[int]:
        return [sum(r.target == path for r in p.received) for p in handlers]

    async def one(body: dict[str, Any]) -> None:
        async with front.client.post(front.url + path, json=body) as answer:
            await answer.read()

    running = [asyncio.create_task(one(body)) for body in bodies]
    await front.until(lambda: sum(held()) == len(bodies))
    counts = held()
    for peer in handlers:
        peer.handler.open.set()
    await asyncio.gather(*running)
    return counts


@pytest.mark.parametrize("policy", ["longest_prefix", "expected_ttft", "least_loaded"])
@pytest.mark.parametrize("known", [True, False])
async def test_b022_b043_a_burst_of_cold_prompts_spreads_before_any_answer(
    peers, front, model: str, policy: str, known: bool
) -> None:
    fleet = [await peers(Gate()) for _ in range(4)]
    for peer in fleet if known else []:
        serve(peer, model)
    gate = await front(*fleet, env={"MOONGATE_ROUTING__POLICY": policy})
    bodies = [chat(f"{i} is another question. " * 40) for i in range(32)]
    counts = await burst(gate, fleet, "/v1/chat/completions", bodies)
    assert max(counts) <= 2 * min(counts)


@pytest.mark.parametrize("policy", ["longest_prefix", "expected_ttft"])
async def test_b022_a_burst_of_siblings_meets(peers, front, model: str, policy: str) -> None:
    fleet = [await peers(Gate()) for _ in range(4)]
    for peer in fleet:
        serve(peer, model)
    gate = await front(*fleet, env={"MOONGATE_ROUTING__POLICY": policy})
    counts = await burst(gate, fleet, "/v1/chat/completions", [chat("The same head. " * 400)] * 8)
    # Together as far as that is no slower than computing the head again.
    assert max(counts) >= 3
    if policy == "longest_prefix":
        assert max(counts) == 8


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/tokenize", "/inference/v1/generate", "/v1/something/new", "/pooling"]
)
@pytest.mark.parametrize("policy", ["longest_prefix", "expected_ttft", "session", "prefix_hash"])
async def test_b042_every_path_is_load(peers, front, path: str, policy: str) -> None:
    fleet = [await peers(Gate()) for _ in range(4)]
    gate = await front(*fleet, env={"MOONGATE_ROUTING__POLICY": policy})
    bodies = [{"model": "m", "input": f"{i}"} for i in range(40)]
    counts = await burst(gate, fleet, path, bodies)
    assert min(counts) >= 5


@pytest.mark.parametrize("policy", ["longest_prefix", "expected_ttft", "least_loaded", "random"])
async def test_b021_short_prompts_one_at_a_time_go_round_an_idle_fleet(
    peers, front, model: str, policy: str
) -> None:
    async def say_ok(_: Received, connection: Connection) -> None:
        await connection.answer(200, b'{"ok":true}', "content-type: application/json")

    fleet = [await peers(say_ok) for _ in range(4)]
    for peer in fleet:
        serve(peer, model)
    gate = await front(*fleet, env={"MOONGATE_ROUTING__POLICY": policy})
    for i in range(40):
        async with gate.client.post(gate.url + "/v1/chat/completions", json=chat(f"{i}?")) as answer:
            await answer.read()
    counts = Counter({p.port: len(p.received) for p in fleet})
    assert min(counts.values()) >= (1 if policy == "random" else 5)


async def test_rates_are_learned_from_first_tokens_and_shown(peers, front, model: str) -> None:
    taken: list[float] = []

    async def stream(received: Received, connection: Connection) -> None:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(len(received.body) / 4 / 2000)  # about 2,000 tokens a second
        taken.append((asyncio.get_running_loop().time() - began) / (len(received.body) / 4 / 2000))
        await connection.start_stream()
        await connection.chunk(b"data: {}\n\n")
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    peer = await peers(stream)
    serve(peer, model)
    gate = await front(peer)

    async def turn(body: dict[str, Any]) -> None:
        async with gate.client.post(gate.url + "/v1/chat/completions", json=body) as answer:
            await answer.read()

    async def target() -> dict[str, Any]:
        async with gate.client.get(gate.url + "/admin/v1/workers", headers=ADMIN) as answer:
            return (await answer.json())["workers"][0]["targets"][0]

    await turn(chat("An answer in one piece says nothing of the first token."))
    assert (await target())["samples"] == 0
    for i in range(6):
        await turn(chat(f"{i} is new. " * 60 * (i + 1), stream=True))
    shown = await target()
    assert shown["samples"] == 6
    assert shown["recent_tokens"] > 1000
    rate = shown["rates"]["prefill_tokens_per_s"]
    # A busy machine sleeps for longer than it is told.
    assert 500 / max(taken) < rate["value"] < 6000
    assert rate["confidence"] > 0.5


async def test_b047_an_explanation_shows_every_term_its_rates_and_the_margin_and_a_change_shows(
    peers, front, model: str, tmp_path: Path
) -> None:
    fleet = [await peers(Gate()) for _ in range(2)]
    for peer in fleet:
        serve(peer, model)
    kept = {"MOONGATE_ROUTING__POLICY_PATH": str(tmp_path / "policy.json")}
    gate = await front(*fleet, env={"MOONGATE_ROUTING__POLICY": "expected_ttft", **kept})
    await gate.tokenizers()
    body = chat("Where to? " * 100)

    async def explained() -> dict[str, Any]:
        url = gate.url + "/admin/v1/explain"
        async with gate.client.post(url, json=body, headers=ADMIN) as answer:
            return await answer.json()

    shown = await explained()
    assert (shown["policy"], shown["unit"], shown["guards"]) == ("expected_ttft", "s", [])
    assert shown["margin"] == 0
    for candidate in shown["candidates"]:
        assert candidate["expected_ms"]["prefill"] > 0
        assert candidate["expected_ttft_ms"] >= candidate["expected_ms"]["prefill"] + 20
        assert candidate["rates"]["prefill_tokens_per_s"] == {"value": 20480.0, "confidence": 0.0}
    assert "ttft" in as_text(shown)
    document = {"policy": "longest_prefix", "options": {"pull_cost": 0.5}}
    url = gate.url + "/admin/v1/policy"
    async with gate.client.put(url, json=document, headers=ADMIN) as answer:
        assert answer.status == 200
    assert (await explained())["unit"] == "tokens"


async def test_sessions_without_a_name_are_recognised_and_shown(peers, front, model: str) -> None:
    gates = [Gate() for _ in range(2)]
    for gate in gates:
        gate.open.set()
    fleet = [await peers(gate) for gate in gates]
    for peer in fleet:
        serve(peer, model)
    front_ = await front(*fleet)
    asked = [{"role": "user", "content": "A first question. " * 20}]

    async def turn(messages: list[dict[str, str]], **headers: str) -> dict[str, Any]:
        body = {"model": "m", "messages": messages}
        url = front_.url + "/v1/chat/completions"
        async with front_.client.post(url, json=body, headers=headers) as answer:
            await answer.read()
            request = answer.headers["x-request-id"]
        async with front_.client.get(f"{front_.url}/admin/v1/decisions/{request}", headers=ADMIN) as answer:
            return (await answer.json())["session"]

    def more(text: str) -> list[dict[str, str]]:
        return [
            {"role": "assistant", "content": text * 20},
            {"role": "user", "content": f"And then? {text * 20}"},
        ]

    first = await turn(asked)
    assert (first["inferred"], first["new"], first["branch"]) == (True, True, False)
    longer = [*asked, *more("One answer. ")]
    second = await turn(longer)
    assert (second["name"], second["new"], second["branch"]) == (first["name"], False, False)
    agent = await turn([*asked, *more("Something else. ")])
    assert (agent["name"], agent["branch"]) == (first["name"], True)
    other = await turn([{"role": "user", "content": "Another task. " * 20}])
    assert (other["new"], other["name"] != first["name"]) == (True, True)
    named = await turn([*longer, *more("More. ")], **{"x-session-id": "mine"})
    assert (named["name"], named["inferred"]) == ("mine", False)
    # The end of a session that its client announces: nobody is expected back.
    sessions = front_.gateway.router.sessions
    alive = [c for c in sessions._all if not c.over]
    await turn(
        [*longer, *more("More. "), *more("Last. ")], **{"x-session-id": "mine", "x-session-end": "true"}
    )
    await front_.idle()
    assert [c.name for c in sessions._all if c.over] == ["mine"]
    assert len(alive) == 4


async def test_roles_come_from_settings_and_the_admin_api_and_make_pairs(peers, front) -> None:
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        gate.open.set()
    one, two, three = [await peers(gate) for gate in gates]
    env = {"MOONGATE_WORKERS__PREFILL": one.url, "MOONGATE_WORKERS__DECODE": f"127.0.0.1:{two.port}"}
    gate = await front(one, two, env=env)
    admin = f"{gate.url}/admin/v1/workers"

    async def roles() -> list[str]:
        async with gate.client.get(admin, headers=ADMIN) as answer:
            return [worker["role"] for worker in (await answer.json())["workers"]]

    assert await roles() == ["prefill", "decode"]
    async with gate.client.post(admin, json={"url": three.url, "role": "decode"}, headers=ADMIN) as answer:
        assert (answer.status, (await answer.json())["role"]) == (201, "decode")
    async with gate.client.post(gate.url + "/v1/chat/completions", json=chat("Hello")) as answer:
        request = answer.headers["x-request-id"]
    url = f"{gate.url}/admin/v1/decisions/{request}"
    async with gate.client.get(url, headers=ADMIN) as answer:
        decision = await answer.json()
    # The decision has both legs; the whole turn goes to who computes.
    assert (decision["target"], len(one.received)) == (f"127.0.0.1:{one.port}", 1)
    assert decision["decode"] in (f"127.0.0.1:{two.port}", f"127.0.0.1:{three.port}")
    for name, role, status in ((one.port, "both", 200), (one.port, "idle", 400)):
        change = {"role": role}
        async with gate.client.patch(f"{admin}/127.0.0.1:{name}", json=change, headers=ADMIN) as answer:
            assert answer.status == status
    assert (await roles())[0] == "both"


def metrics(running: int) -> bytes:
    return f'{METRICS}vllm:num_requests_running{{engine="0"}} {running}.0\n'.encode()


async def test_b045_two_gateways_see_each_others_turns_and_no_longer_than_these_last(peers, front) -> None:
    gates = [Gate() for _ in range(2)]
    one, two = [await peers(gate) for gate in gates]
    first, second = await front(one, two), await front(one, two)
    two.pages["/metrics"] = one.pages["/metrics"] = metrics(0)
    url = "http://127.0.0.1:{}/v1/chat/completions"
    first.gateway.fleet.cordon(f"127.0.0.1:{two.port}", True)
    held = [
        asyncio.create_task(first.client.post(url.format(first.port), json=chat(f"{i}?"))) for i in range(20)
    ]
    await first.until(lambda: len(one.received) == 20)
    one.pages["/metrics"] = metrics(20)
    name = f"127.0.0.1:{one.port}"

    async def seen(condition: Callable[[float], bool]) -> None:
        """Until a decision there would go by as many turns of others as `condition` wants."""
        async with asyncio.timeout(60):
            while True:
                second.gateway.router._roster._full_at = 0.0  # reports are taken over once a second
                explain = f"{second.url}/admin/v1/explain"
                async with second.client.post(explain, json=chat("Where?"), headers=ADMIN) as answer:
                    shown = (await answer.json())["candidates"]
                if condition(next(c["foreign"] for c in shown if c["target"] == name)):
                    return

    await seen(lambda turns: turns > 19)
    held.append(asyncio.create_task(second.client.post(url.format(second.port), json=chat("Where?"))))
    await second.until(lambda: len(one.received) + len(two.received) == 21)
    assert len(two.received) == 1
    for task in held:
        task.cancel()
    one.pages["/metrics"] = metrics(0)
    await seen(lambda turns: turns < 1)


@pytest.mark.parametrize("policy", ["longest_prefix", "expected_ttft", "least_loaded", "round_robin"])
async def test_b048_a_worker_that_is_new_is_not_flooded_and_the_others_do_not_starve(
    peers, front, policy: str
) -> None:
    fleet = [await peers(Gate()) for _ in range(4)]
    env = {"MOONGATE_ROUTING__POLICY": policy, "MOONGATE_WORKERS__RAMP_S": "1000"}
    gate = await front(*fleet[:3], env=env)
    for worker in gate.gateway.fleet.workers():
        worker.since -= 1000.0  # they have been up for long

    def send(count: int) -> list[asyncio.Task[Any]]:
        url = gate.url + "/v1/chat/completions"
        bodies = [chat(f"{i} is another question.") for i in range(count)]
        return [asyncio.create_task(gate.client.post(url, json=body)) for body in bodies]

    tasks = send(30)
    await gate.until(lambda: sum(len(p.received) for p in fleet) == 30)
    async with gate.client.post(
        gate.url + "/admin/v1/workers", json={"url": fleet[3].url}, headers=ADMIN
    ) as answer:
        assert answer.status == 201
    await gate.until(lambda: gate.gateway.fleet.workers()[3].state == "up")
    tasks += send(12)
    await gate.until(lambda: sum(len(p.received) for p in fleet) == 42)
    counts = [len(p.received) for p in fleet]
    assert counts[3] == 1
    assert min(counts[:3]) >= 10 + 2
    for peer in fleet:
        peer.handler.open.set()
    for answer in await asyncio.gather(*tasks):
        answer.release()


@pytest.mark.parametrize("policy", ["expected_ttft", "round_robin"])
async def test_b043_two_turns_at_the_same_instant_do_not_both_take_the_last_place(
    peers, front, policy: str
) -> None:
    fleet = [await peers(Gate()) for _ in range(4)]
    env = {"MOONGATE_LIMITS__WORKER_REQUESTS": "2", "MOONGATE_ROUTING__POLICY": policy}
    gate = await front(*fleet, env={**env, "MOONGATE_WORKERS__RAMP_S": "0"})
    url = gate.url + "/v1/chat/completions"

    async def one(i: int) -> int:
        async with gate.client.post(url, json=chat(f"{i}?")) as answer:
            await answer.read()
            return answer.status

    tasks = [asyncio.create_task(one(i)) for i in range(16)]
    await gate.until(lambda: sum(task.done() for task in tasks) == 8)
    await gate.until(lambda: sum(len(p.received) for p in fleet) >= 8)
    assert [len(p.received) for p in fleet] == [2, 2, 2, 2]
    for peer in fleet:
        peer.handler.open.set()
    assert sorted(await asyncio.gather(*tasks)) == [200] * 8 + [429] * 8


async def test_pool_blocks_are_shown_by_where_they_lie(peers, front, model: str) -> None:
    peer = await peers(Gate())
    serve(peer, model)
    gate = await front(peer)
    router = gate.gateway.router
    body = json.dumps(chat("Where do its blocks lie? " * 60)).encode()
    path = "/v1/chat/completions"
    sight = await router.look(parse("POST", path, body), path, body)
    gate.gateway.fleet.workers()[0].segment = "10.0.0.1:1"
    runs = {"10.0.0.1:1": [range(2)], "10.0.0.2:1": [range(2, 3)], "disk": [range(3, 6)]}
    pool = PoolPrefix(blocks=6, known=True, runs=runs)
    (shown,) = router.candidates(msgspec.structs.replace(sight, pool=pool))
    assert (shown.pool_tokens, shown.own_segment_tokens, shown.disk_tokens) == (192, 64, 96)
    # Two pulls of these, as the cost model sees them.
    work = work_of(sight.turn(0), shown, 8192)
    assert (work.own, work.remote, work.disk) == (64, 32, 96)
