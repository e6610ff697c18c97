"""Stored responses are at one worker each: what refers to them goes there, and nowhere else."""

import asyncio
import json
from typing import Any

import openai
import pytest

from gateway.proxy.stored import Learner, StoredResponses
from peer import ADMIN, Connection, Received
from workers.fleet import Fleet

ASK = {"model": "m", "input": "hi"}


class Keeper:
    """A worker with a store of its own; `split` streams the beginning byte by byte."""

    def __init__(self, name: str, split: bool = False) -> None:
        self.name = name
        self.split = split
        self.ids: set[str] = set()
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, request: Received, connection: Connection) -> None:
        self.asked.append((request.method, request.target))
        if request.target == "/v1/responses":
            body = json.loads(request.body)
            earlier = body.get("previous_response_id")
            if earlier and earlier not in self.ids:
                await connection.answer(404, b'{"error":{"message":"not mine"}}')
                return
            made = f"resp_{self.name}{len(self.ids)}"
            self.ids.add(made)
            if body.get("stream"):
                await self._stream(connection, made)
            else:
                await connection.answer(200, b'{"id":"%s","object":"response"}' % made.encode())
            return
        found = request.target.removeprefix("/v1/responses/").split("/")[0].split("?")[0]
        status = 200 if found in self.ids else 404
        await connection.answer(status, json.dumps({"at": self.name, "id": found}).encode())

    async def _stream(self, connection: Connection, made: str) -> None:
        first = b'event: response.created\ndata: {"response":{"id":"%s"}}\n\n' % made.encode()
        await connection.start_stream()
        for part in [first[i : i + 1] for i in range(len(first))] if self.split else [first]:
            await connection.chunk(part)
        await connection.chunk(b'event: response.completed\ndata: {"type":"response.completed"}\n\n')
        await connection.end_stream()


async def made(gate: Any, **more: Any) -> str:
    """The id of a new response, made by any worker."""
    async with gate.client.post(f"{gate.url}/v1/responses", json={**ASK, **more}) as answer:
        assert answer.status == 200
        text = await answer.text()
        return text.partition('"id":"')[2].partition('"')[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_b089_b090_everything_about_a_response_goes_to_the_worker_that_made_it(
    peers, front, stream: bool
) -> None:
    keepers = [Keeper("a", split=True), Keeper("b", split=True), Keeper("c", split=True)]
    gate = await front(*[await peers(keeper) for keeper in keepers])
    for _ in range(6):
        response_id = await made(gate, stream=stream)
        owner = next(keeper for keeper in keepers if response_id in keeper.ids)
        for method, path in (
            ("GET", f"/v1/responses/{response_id}"),
            ("GET", f"/v1/responses/{response_id}?stream=true"),
            ("POST", f"/v1/responses/{response_id}/cancel"),
            ("GET", f"/v1/responses/{response_id}/input_items?limit=3"),
            ("DELETE", f"/v1/responses/{response_id}"),
        ):
            async with gate.client.request(method, gate.url + path) as answer:
                assert (answer.status, json.loads(await answer.read())["at"]) == (200, owner.name)
            assert owner.asked[-1] == (method, path)
        following = await made(gate, previous_response_id=response_id, stream=stream)
        assert following in owner.ids
    # Nobody was asked about what was known.
    assert sum(len(keeper.asked) for keeper in keepers) == 6 * 7
    await gate.idle()


async def test_responses_that_go_on_from_each_other_are_one_session(peers, front) -> None:
    keepers = [Keeper("a", split=True), Keeper("b", split=True)]
    gate = await front(*[await peers(keeper) for keeper in keepers])

    async def session(**more: Any) -> tuple[str, dict[str, Any]]:
        """The id of a new response, and the session of the turn that made it."""
        made_ = await made(gate, **more)
        async with gate.client.get(f"{gate.url}/admin/v1/decisions?limit=1", headers=ADMIN) as answer:
            return made_, (await answer.json())["decisions"][0]["session"]

    first, _ = await session()
    second, following = await session(previous_response_id=first)
    third, last = await session(previous_response_id=second, stream=True)
    assert following["name"] == last["name"] == first
    assert [(s["new"], s["inferred"]) for s in (following, last)] == [(False, False)] * 2
    # What the client calls it goes before, and holds for what goes on from there.
    named, own = await session(previous_response_id=third, prompt_cache_key="mine")
    assert own["name"] == "mine"
    assert (await session(previous_response_id=named))[1]["name"] == "mine"
    assert (await session(previous_response_id=second))[1]["name"] == first
    url = f"{gate.url}/admin/v1/explain?api=/v1/responses"
    async with gate.client.post(url, json={**ASK, "previous_response_id": named}, headers=ADMIN) as answer:
        assert (await answer.json())["session"]["name"] == "mine"


async def test_a_worker_that_is_cordoned_still_answers_for_what_it_holds(peers, front) -> None:
    keepers = [Keeper("a"), Keeper("b")]
    gate = await front(*[await peers(keeper) for keeper in keepers])
    response_id = await made(gate)
    owner = next(keeper for keeper in keepers if response_id in keeper.ids)
    worker = gate.gateway.fleet.workers()[keepers.index(owner)]
    gate.gateway.fleet.cordon(worker.name, True)
    assert await made(gate, previous_response_id=response_id) in owner.ids
    assert await made(gate) not in owner.ids


async def test_b090_a_response_nobody_told_us_of_is_looked_for(peers, front) -> None:
    keepers = [Keeper("a"), Keeper("b"), Keeper("c")]
    keepers[1].ids.add("resp_old")
    gate = await front(*[await peers(keeper) for keeper in keepers])
    assert await made(gate, previous_response_id="resp_old") in keepers[1].ids
    asked = [len(keeper.asked) for keeper in keepers]
    async with gate.client.get(f"{gate.url}/v1/responses/resp_old") as answer:
        assert (await answer.json(content_type=None))["at"] == "b"
    assert [len(keeper.asked) - before for keeper, before in zip(keepers, asked, strict=True)] == [0, 1, 0]


async def test_b085_a_response_that_no_worker_has_is_a_404_in_openai_shape(peers, front) -> None:
    keepers = [Keeper("a"), Keeper("b")]
    gate = await front(*[await peers(keeper) for keeper in keepers])
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0) as client:
        for call in (
            client.responses.retrieve("resp_no"),
            client.responses.cancel("resp_no"),
            client.responses.create(model="m", input="x", previous_response_id="resp_no"),
        ):
            with pytest.raises(openai.NotFoundError, match="'resp_no' not found") as raised:
                await call
            assert raised.value.param == "response_id"
    assert gate.gateway.ledger.total.inflight == 0


async def test_b085_an_id_that_is_no_text_is_one_that_nobody_has(peers, front) -> None:
    gate = await front(*[await peers(Keeper(name)) for name in "ab"])
    body = json.dumps({**ASK, "previous_response_id": "\ud800"})
    async with gate.client.post(f"{gate.url}/v1/responses", data=body) as answer:
        assert answer.status == 404


@pytest.mark.parametrize("word", ["render", "compact", "input_tokens"])
async def test_b089_what_is_posted_beside_the_responses_is_placed_by_load(peers, front, word: str) -> None:
    keepers = [Keeper("a"), Keeper("b")]
    gate = await front(*[await peers(keeper) for keeper in keepers])
    async with gate.client.post(f"{gate.url}/v1/responses/{word}?x=1", json=ASK) as answer:
        assert json.loads(await answer.read())["id"] == word
    assert [one for keeper in keepers for one in keeper.asked] == [("POST", f"/v1/responses/{word}?x=1")]


async def test_an_id_is_no_way_to_another_path(peers, front) -> None:
    keepers = [Keeper("a"), Keeper("b")]
    gate = await front(*[await peers(keeper) for keeper in keepers])
    odd = "../../admin?x=/\r\nhost: y"
    async with gate.client.post(
        f"{gate.url}/v1/responses", json={**ASK, "previous_response_id": odd}
    ) as answer:
        assert answer.status == 404
    assert {target for keeper in keepers for _, target in keeper.asked} == {
        "/v1/responses/..%2F..%2Fadmin%3Fx%3D%2F%0D%0Ahost%3A%20y"
    }


async def test_b090_no_other_worker_answers_while_the_holder_is_away(peers, front) -> None:
    keepers = [Keeper("a"), Keeper("b")]
    workers = [await peers(keeper) for keeper in keepers]
    gate = await front(*workers)
    response_id = await made(gate)
    owner = next(at for at, keeper in enumerate(keepers) if response_id in keeper.ids)
    await workers[owner].stop()
    asked = len(keepers[1 - owner].asked)
    for _ in range(2):
        async with gate.client.get(f"{gate.url}/v1/responses/{response_id}") as answer:
            assert answer.status in (502, 503)
            assert (await answer.json())["error"]["type"] == "server_error"
    # Also where it is not known who holds it, as after a restart of the gateway.
    gate.gateway.responses._owners.clear()
    async with gate.client.get(f"{gate.url}/v1/responses/{response_id}") as answer:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
    assert len(keepers[1 - owner].asked) == asked + 1
    await gate.idle()


@pytest.mark.parametrize("gone", ["deaf", "stopped"])
async def test_what_is_asked_of_a_worker_that_hangs_ends_before_a_turn_would(peers, front, gone: str) -> None:
    keeper = Keeper("a")

    async def hangs(request: Received, connection: Connection) -> None:
        if request.target == "/v1/responses":
            await keeper(request, connection)
        else:
            await connection.gone.wait()

    worker = await peers(hangs)
    budget = {"deaf": "TIMEOUTS__FAILOVER_S", "stopped": "WORKERS__HEALTH_TIMEOUT_S"}[gone]
    gate = await front(worker, env={f"MOONGATE_{budget}": "0.1"})
    response_id = await made(gate)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        worker.silent = False
        await gate.until(lambda: gate.gateway.fleet.workers()[0].state == "up")
        asked = gate.client.request(method, f"{gate.url}/v1/responses/{response_id}{path}")
        answered = asyncio.create_task(asyncio.wait_for(asked, 20))
        await gate.until(lambda: len(worker.open) == 1)
        worker.silent = gone == "stopped"
        async with await answered as answer:
            assert answer.status == 504
            assert (await answer.json())["error"]["code"] == "upstream_timeout"
        await gate.until(lambda: not worker.open)
    await gate.idle()


async def test_explain_knows_who_holds_a_response(peers, front) -> None:
    keepers = [Keeper("a"), Keeper("b")]
    gate = await front(*[await peers(keeper) for keeper in keepers])
    response_id = await made(gate)
    owner = next(at for at, keeper in enumerate(keepers) if response_id in keeper.ids)
    async with gate.client.post(
        f"{gate.url}/admin/v1/explain?api=/v1/responses",
        json={**ASK, "previous_response_id": response_id},
        headers=ADMIN,
    ) as answer:
        view = await answer.json()
    assert view["target"] == gate.gateway.fleet.workers()[owner].name
    assert [c["excluded"] for c in view["candidates"]].count("elsewhere") == 1


async def test_b090_what_is_remembered_is_bounded_and_ends() -> None:
    now = 0.0
    fleet = Fleet()
    fleet.add("http://a")
    fleet.add("http://b")
    nothing: Any = None
    responses = StoredResponses(fleet, nothing, most=3, ttl_s=10.0, api_key="", clock=lambda: now)
    for number in range(5):
        responses.learn(f"resp_{number}", "a")
    assert len(responses) == 3
    assert await responses.find("resp_4") == "a"
    now = 9.0
    assert await responses.find("resp_2") == "a"
    now = 11.0
    responses.learn("resp_new", "b")
    # Used at 9.0, so it has until 19.0; those that nobody used are gone.
    assert len(responses) == 2
    assert await responses.find("resp_2") == "a"
    fleet.remove("a")
    assert await responses.find("resp_2") == "b"  # the only one left, and it will say


def test_only_the_first_id_within_the_first_bytes_counts() -> None:
    found: list[str] = []
    assert Learner(found.append).feed(b'{"output":[],"id" : "resp_1","x":{"id":"no"}}')
    assert Learner(found.append).feed(b"x" * 5000)
    assert not Learner(found.append).feed(b'{"id":"resp_')
    assert found == ["resp_1"]


async def test_b004_a_client_that_leaves_can_still_ask_for_its_response(peers, front) -> None:
    asked = asyncio.Event()

    async def begin(request: Received, connection: Connection) -> None:
        if request.method == "GET":
            await connection.answer(200, b'{"at":"here"}')
            return
        await connection.start_stream()
        await connection.chunk(b'event: response.created\ndata: {"response":{"id":"resp_x"}}\n\n')
        asked.set()
        await connection.gone.wait()

    async def other(_: Received, connection: Connection) -> None:
        await connection.answer(404, b"{}")

    gate = await front(await peers(begin))
    async with gate.client.post(f"{gate.url}/v1/responses", json={**ASK, "stream": True}) as answer:
        await answer.content.readany()
        await asked.wait()
        answer.close()
    await gate.idle()
    gate.gateway.fleet.add((await peers(other)).url)
    await gate.until(lambda: all(w.state == "up" for w in gate.gateway.fleet.workers()))
    async with gate.client.get(f"{gate.url}/v1/responses/resp_x") as answer:
        assert await answer.read() == b'{"at":"here"}'
