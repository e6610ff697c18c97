"""Gateways that end, workers that come and go: nothing under way is lost."""

import asyncio
import json
import logging
import signal
import time
from pathlib import Path

import httpx
import pytest

from gateway.app import Gateway
from gateway.asgi import Message
from gateway.settings import load
from gateway_process import process_of
from peer import ADMIN, Connection, Received
from workers.connecting import trusting
from workers.fleet import Fleet
from workers.probe import Probe
from workers.worker import ModelCard

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
PATH = "/v1/chat/completions"


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b"{}", "content-type: application/json")


async def test_a_start_is_complete_when_workers_were_asked_so_that_turns_that_wait_find_them(peers) -> None:
    peer, gone = await peers(say_ok), await peers(say_ok)
    await gone.stop()
    settings = load(None, {"MOONGATE_INDEX__SNAPSHOT_PATH": ""}, {"workers.urls": [peer.url, gone.url]})
    gateway, said, end = Gateway(settings), asyncio.Queue[Message](), asyncio.Queue[Message]()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        tasks.create_task(gateway({"type": "lifespan"}, end.get, said.put))
        await end.put({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        up, down = gateway.fleet.workers()
        assert up.state == "up"
        assert down.reason
        await end.put({"type": "lifespan.shutdown"})


async def test_a_start_is_complete_when_tokenizers_are_there_so_that_no_turn_waits_for_them(
    peers, tiny_model: Path
) -> None:
    peer = await peers(say_ok)
    peer.pages["/v1/models"] = json.dumps({"data": [{"id": "m", "root": str(tiny_model)}]}).encode()
    settings = load(None, {"MOONGATE_INDEX__SNAPSHOT_PATH": ""}, {"workers.urls": [peer.url]})
    gateway, said, end = Gateway(settings), asyncio.Queue[Message](), asyncio.Queue[Message]()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        tasks.create_task(gateway({"type": "lifespan"}, end.get, said.put))
        await end.put({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        assert [(model, status.state) for model, status in gateway.prompts.sources()] == [("m", "ready")]
        await end.put({"type": "lifespan.shutdown"})


async def test_a_start_waits_for_a_tokenizer_no_longer_than_it_may(tiny_model: Path) -> None:
    gateway = Gateway(load(None, {}, {}))
    worker = gateway.fleet.add("http://127.0.0.1:9")
    source = gateway.prompts.source(worker, ModelCard("m", str(tiny_model)))
    source.prepare()
    await gateway.prompts.settled(0.0)
    assert source.status().state == "loading"
    await source.loaded()
    await gateway.prompts.close()


async def test_a_worker_with_a_broken_list_of_models_is_down_and_says_why_once(
    peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    peer, fleet = await peers(say_ok), Fleet()
    peer.pages["/v1/models"] = b"null"
    worker = fleet.add(peer.url)
    probe = Probe(fleet, timeout_s=20, tls=trusting())
    try:
        for _ in range(3):
            await probe.probe(worker)
    finally:
        await probe.close()
    assert worker.reason.startswith("/v1/models is no list of models: ")
    (said,) = (record for record in caplog.records if record.name.startswith("workers"))
    assert said.exc_info is None


async def test_b083_an_ending_gateway_is_not_ready_at_once_takes_turns_a_while_and_finishes_streams(
    peers,
) -> None:
    go_on = asyncio.Event()

    async def slow(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await connection.chunk(b'data: {"i":0}\n\n')
        await go_on.wait()
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    peer = await peers(slow)
    async with (
        process_of(peer, MOONGATE_TIMEOUTS__DRAIN_DELAY_S="3") as (process, url),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        asyncio.timeout(60),
    ):
        assert "connection" not in (await http.get("/health")).headers
        reading = [asyncio.create_task(http.post(PATH, content=CHAT)) for _ in range(5)]
        while len(peer.open) < 5:
            await asyncio.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        while (ready := await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0)
        assert ready.json()["reasons"][0] == "the gateway is shutting down"
        assert ready.headers["connection"] == "close"
        async with httpx.AsyncClient(base_url=url, timeout=30) as late:
            reading.append(asyncio.create_task(late.post(PATH, content=CHAT)))
            while len(peer.open) < 6:
                await asyncio.sleep(0.005)
            while True:  # until nobody listens any more
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
                except ConnectionRefusedError:
                    break
                writer.close()
                await asyncio.sleep(0.02)
            go_on.set()
            for answer in await asyncio.gather(*reading):
                assert answer.status_code == 200
                assert answer.content.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_b083_a_second_signal_ends_the_gateway_in_the_middle_of_its_drain_delay(peers) -> None:
    async with process_of(await peers(say_ok), MOONGATE_TIMEOUTS__DRAIN_DELAY_S="60") as (process, url):
        process.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient() as http:
            while (await http.get(f"{url}/ready")).status_code == 200:
                await asyncio.sleep(0)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_b082_late_workers_join_a_gateway_that_started_with_one_of_three(peers, front) -> None:
    up, late = await peers(say_ok), await peers(say_ok)
    port = late.port
    await late.stop()
    gate = await front(up)
    for worker in (f"http://127.0.0.1:{port}", "http://127.0.0.1:9"):
        async with gate.client.post(
            f"{gate.url}/admin/v1/workers", json={"url": worker}, headers=ADMIN
        ) as made:
            assert made.status == 201
    async with gate.client.get(f"{gate.url}/ready") as ready:
        assert ready.status == 200
        assert "worker 127.0.0.1:9 is starting: not probed yet" in (await ready.json())["reasons"]
    async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
        assert answer.status == 200
    await late.start(port)
    await gate.until(lambda: gate.gateway.fleet.get(f"127.0.0.1:{port}").state == "up")
    async with gate.client.patch(
        f"{gate.url}/admin/v1/workers/127.0.0.1:{up.port}", json={"cordoned": True}, headers=ADMIN
    ):
        pass
    async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
        assert answer.status == 200
    assert len(late.received) == 1
    await late.stop()


async def no_worker_message(gate) -> str:
    async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        error = (await answer.json())["error"]
        assert error["code"] == "no_worker"
        return error["message"]


async def test_a_503_says_why_no_worker_can_take_the_turn(peers, front) -> None:
    gate = await front()
    assert await no_worker_message(gate) == "no worker is registered"
    one, two, other = await peers(say_ok), await peers(say_ok), await peers(say_ok, "n")
    gate = await front(one, two, other)
    fleet = gate.gateway.fleet
    for peer in (one, two):
        fleet.cordon(f"127.0.0.1:{peer.port}", True)
    said = await no_worker_message(gate)
    assert said == "no worker can take this turn now: 2 cordoned, 1 without the model 'm'"
    fleet.cordon(f"127.0.0.1:{one.port}", False)
    await one.stop()
    await gate.until(lambda: fleet.get(f"127.0.0.1:{one.port}").state == "down")
    said = await no_worker_message(gate)
    assert said == "no worker can take this turn now: 1 cordoned, 1 down, 1 without the model 'm'"


async def test_a_sleeping_engine_is_not_chosen_until_it_wakes(peers, front) -> None:
    sleeper, other = await peers(say_ok), await peers(say_ok)
    sleeper.pages["/is_sleeping"] = b'{"is_sleeping":true}'
    gate = await front(other)
    worker = gate.gateway.fleet.add(sleeper.url)
    await gate.until(lambda: worker.reason == "asleep")
    for _ in range(10):
        async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
            assert answer.status == 200
    assert sleeper.received == []
    sleeper.pages["/is_sleeping"] = b'{"is_sleeping":false}'
    await gate.until(lambda: worker.state == "up")
    sleeper.pages["/is_sleeping"] = b"nonsense"
    await asyncio.sleep(0.15)  # three probes: what can't be read is not taken for sleep
    assert worker.state == "up"


async def test_b109_the_gateway_lives_without_any_worker_and_is_not_ready(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    await peer.stop()
    worker = gate.gateway.fleet.workers()[0]
    await gate.until(lambda: worker.state == "down")
    for path, status in (("/health", 200), ("/ready", 503)):
        async with gate.client.get(gate.url + path) as answer:
            assert answer.status == status
    async with gate.client.get(f"{gate.url}/ready") as answer:
        assert (await answer.json())["reasons"][0].startswith(f"worker {worker.name} is down: ")


async def test_b068_an_idle_worker_stays_and_fifty_come_and_go_among_turns(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    fleet = gate.gateway.fleet

    async def churn() -> None:
        for round_ in range(3):
            names = [fleet.add(f"http://127.0.0.1:9/{round_}/{n}", f"w{n}").name for n in range(50)]
            await asyncio.sleep(0.02)
            for name in names:
                fleet.remove(name)
                await asyncio.sleep(0)

    churning = asyncio.create_task(churn())
    while not churning.done():
        async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
            assert answer.status == 200
    await churning
    assert [worker.state for worker in fleet.workers()] == ["up"]
    await gate.idle()


@pytest.mark.parametrize("streamed", [True, False])
async def test_workers_cordoned_drained_removed_and_added_again_under_load_lose_no_turn(
    peers, front, streamed: bool
) -> None:
    async def work(_: Received, connection: Connection) -> None:
        if not streamed:
            await asyncio.sleep(0.01)
            await connection.answer(200, b'{"whole":true}', "content-type: application/json")
            return
        await connection.start_stream()
        for _ in range(3):
            await connection.chunk(b'data: {"i":0}\n\n')
            await asyncio.sleep(0.005)
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    one, two = await peers(work), await peers(work)
    gate = await front(one, two)
    fleet, ledger = gate.gateway.fleet, gate.gateway.ledger
    stop = False
    served = 0

    async def agent() -> None:
        nonlocal served
        while not stop:
            async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
                assert answer.status == 200
                assert (await answer.read()).endswith(b"data: [DONE]\n\n" if streamed else b"true}")
            served += 1

    agents = [asyncio.create_task(agent()) for _ in range(12)]
    for turn in range(6):
        peer = (one, two)[turn % 2]
        name = f"127.0.0.1:{peer.port}"
        admin = f"{gate.url}/admin/v1/workers"
        if turn % 3:
            async with gate.client.patch(f"{admin}/{name}", json={"cordoned": True}, headers=ADMIN):
                await gate.until(lambda name=name: ledger.load(name, time.monotonic()).inflight == 0)
        async with gate.client.delete(f"{admin}/{name}", headers=ADMIN) as gone:
            assert gone.status == 204
        before = served
        await gate.until(lambda before=before: served > before + 12)
        async with gate.client.post(admin, json={"url": peer.url}, headers=ADMIN) as made:
            assert made.status == 201
        await gate.until(lambda name=name: fleet.get(name).state == "up")
        seen = len(peer.received)
        await gate.until(lambda peer=peer, seen=seen: len(peer.received) > seen)
    stop = True
    await asyncio.gather(*agents)
    await gate.idle()
