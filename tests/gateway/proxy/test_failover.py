"""Workers that fail: another one takes the turn while nothing was answered; who fails often rests."""

import asyncio
import itertools
import json
import time
from collections import Counter

import pytest

from peer import ADMIN, Connection, Received

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
STREAMED = json.dumps({**CHAT, "stream": True}).encode()
WHOLE = json.dumps(CHAT).encode()
GOOD = b'data: {"i":0}\n\ndata: [DONE]\n\n'


async def good(request: Received, connection: Connection) -> None:
    if b'"stream"' not in request.body:
        await connection.answer(200, b'{"ok":true}', "content-type: application/json")
        return
    await connection.start_stream()
    await connection.chunk(GOOD)
    await connection.end_stream()


async def frozen(_: Received, connection: Connection) -> None:
    await connection.gone.wait()


async def frozen_after_headers(_: Received, connection: Connection) -> None:
    await connection.start_stream()
    await connection.gone.wait()


async def empty(_: Received, connection: Connection) -> None:
    await connection.start_stream()
    await connection.end_stream()


async def cut_after_headers(_: Received, connection: Connection) -> None:
    await connection.start_stream()
    connection.reset()


async def half_a_head(_: Received, connection: Connection) -> None:
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n")
    connection.reset()


def answers(status: int, *headers: str):
    async def answer(_: Received, connection: Connection) -> None:
        await connection.answer(status, b'{"busy":1}', "content-type: application/json", *headers)

    return answer


async def post(gate, content: bytes = STREAMED) -> tuple[int, bytes]:
    async with gate.client.post(gate.url + PATH, data=content) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("fault", [empty, cut_after_headers, half_a_head])
async def test_b038_a_worker_that_breaks_off_before_the_first_byte_of_a_body_is_replaced(
    peers, front, fault
) -> None:
    bad, well = await peers(fault), await peers(good)
    gate = await front(bad, well)
    for _ in range(8):
        content = WHOLE if fault is half_a_head else STREAMED
        assert await post(gate, content) == (200, b'{"ok":true}' if fault is half_a_head else GOOD)
    assert bad.received
    assert len(well.received) == 8
    await gate.idle()


async def test_an_empty_stream_is_an_error_where_nobody_else_can_take_the_turn(peers, front) -> None:
    gate = await front(await peers(empty))
    status, content = await post(gate)
    assert status == 200
    assert json.loads(content.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"
    async with gate.client.get(f"{gate.url}/metrics") as page:
        assert 'outcome="error"} 1.0' in await page.text()


async def test_what_can_not_go_on_from_a_begun_stream_ends_it_with_an_error(peers, front) -> None:
    gate = await front(await peers(empty), await peers(answers(400)))
    seen: set[bytes] = set()
    for _ in range(12):
        status, content = await post(gate)
        seen.add(content)
        assert status in (200, 400)
        assert b"busy" in content if status == 400 else b"upstream_failed" in content
    assert len(seen) == 2
    await gate.idle()


@pytest.mark.parametrize(("fault", "content"), [(frozen, STREAMED), (frozen, WHOLE)])
async def test_b034_a_worker_that_accepts_and_never_answers_costs_a_bounded_time(
    peers, front, fault, content: bytes
) -> None:
    stuck, well = await peers(fault), await peers(good)
    gate = await front(stuck, well, env={"MOONGATE_WORKERS__HEALTH_TIMEOUT_S": "0.5"})
    gate.gateway.fleet.cordon(f"127.0.0.1:{well.port}", True)
    turn = asyncio.create_task(post(gate, content))
    await gate.until(lambda: len(stuck.open) == 1)
    gate.gateway.fleet.cordon(f"127.0.0.1:{well.port}", False)
    assert not turn.done()
    stuck.silent = True  # as of a process that was stopped: probes are not answered either
    assert (await asyncio.wait_for(turn, 30))[0] == 200
    assert len(well.received) == 1
    await gate.until(lambda: not stuck.open)
    await gate.idle()


async def test_a_silent_worker_keeps_the_turn_while_nobody_else_can_take_it(peers, front) -> None:
    go_on = asyncio.Event()

    async def slow(request: Received, connection: Connection) -> None:
        await go_on.wait()
        await good(request, connection)

    only = await peers(slow)
    gate = await front(only, env={"MOONGATE_WORKERS__HEALTH_TIMEOUT_S": "0.05"})
    turn = asyncio.create_task(post(gate))
    await gate.until(lambda: len(only.open) == 1)
    only.silent = True
    await gate.until(lambda: gate.gateway.fleet.workers()[0].misses > 3)
    go_on.set()
    assert await turn == (200, GOOD)


async def test_one_missed_probe_costs_no_turn_where_nobody_else_is_left(peers, front) -> None:
    busy, other = await peers(good), await peers(good)
    gate = await front(
        busy,
        other,
        env={"MOONGATE_WORKERS__HEALTH_TIMEOUT_S": "1", "MOONGATE_WORKERS__HEALTH_INTERVAL_S": "60"},
    )
    worker = gate.gateway.fleet.get(f"127.0.0.1:{busy.port}")
    busy.silent = True
    gate.gateway.probe.wake(worker)
    await gate.until(lambda: worker.state == "down")
    for _ in range(4):
        assert await post(gate) == (200, GOOD)
    assert (len(busy.received), len(other.received)) == (0, 4)
    gate.gateway.fleet.cordon(f"127.0.0.1:{other.port}", True)
    assert await post(gate) == (200, GOOD)
    assert len(busy.received) == 1
    gate.gateway.probe.wake(worker)
    await gate.until(lambda: worker.misses == 2)
    assert (await post(gate))[0] == 503
    assert len(busy.received) == 1


async def test_b034_a_stream_frozen_after_its_headers_goes_to_another_worker(peers, front) -> None:
    stuck, well = await peers(frozen_after_headers), await peers(good)
    gate = await front(stuck, well, env={"MOONGATE_WORKERS__HEALTH_TIMEOUT_S": "0.5"})
    gate.gateway.fleet.cordon(f"127.0.0.1:{well.port}", True)
    async with gate.client.post(gate.url + PATH, data=STREAMED) as answer:
        assert answer.status == 200
        gate.gateway.fleet.cordon(f"127.0.0.1:{well.port}", False)
        stuck.silent = True
        assert await asyncio.wait_for(answer.read(), 30) == GOOD
    await gate.idle()


async def test_b034_streams_whose_headers_do_not_come_go_elsewhere_while_probes_are_answered(
    peers, front
) -> None:
    stuck, well = await peers(frozen), await peers(good)
    env = {
        "MOONGATE_TIMEOUTS__FAILOVER_S": "0.5",
        "MOONGATE_TIMEOUTS__FIRST_BYTE_S": "2",
        "MOONGATE_LIMITS__TRIES": "2",
    }
    gate = await front(stuck, well, env=env)
    while not stuck.received:
        assert await post(gate) == (200, GOOD)
    await well.stop()
    name = f"127.0.0.1:{well.port}"
    await gate.until(lambda: gate.gateway.fleet.get(name).state == "down")
    started = asyncio.get_running_loop().time()
    status, content = await post(gate)
    assert (status, json.loads(content)["error"]["code"]) == (504, "upstream_timeout")
    assert asyncio.get_running_loop().time() - started >= 1.9  # alone, it gets all of the client's patience


@pytest.mark.parametrize("status", [429, 503])
async def test_b095_backpressure_spills_to_a_peer_and_opens_no_breaker(peers, front, status: int) -> None:
    full, well = await peers(answers(status, "retry-after: 7")), await peers(good)
    gate = await front(full, well, env={"MOONGATE_WORKERS__BREAKER_FAILURES": "2"})
    for _ in range(20):
        assert await post(gate) == (200, GOOD)
    assert len(full.received) > 3
    worker = gate.gateway.fleet.get(f"127.0.0.1:{full.port}")
    assert gate.gateway.fleet.breaker_state(worker) == "closed"
    await well.stop()
    await gate.until(lambda: gate.gateway.fleet.get(f"127.0.0.1:{well.port}").state == "down")
    async with gate.client.post(gate.url + PATH, data=STREAMED) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (status, "7")
        assert await answer.read() == b'{"busy":1}'


@pytest.mark.parametrize("fault", [answers(500), cut_after_headers, empty])
async def test_a_worker_that_fails_turns_in_a_row_rests_is_tried_and_comes_back(peers, front, fault) -> None:
    bad, well = await peers(fault), await peers(good)
    gate = await front(
        bad,
        well,
        env={
            "MOONGATE_WORKERS__BREAKER_FAILURES": "3",
            "MOONGATE_WORKERS__BREAKER_OPEN_S": "300",
            "MOONGATE_WORKERS__RAMP_S": "0",
        },
    )
    fleet = gate.gateway.fleet
    worker = fleet.get(f"127.0.0.1:{bad.port}")
    while fleet.breaker_state(worker) == "closed":
        assert await post(gate) == (200, GOOD)
    assert len(bad.received) == 3
    async with gate.client.get(f"{gate.url}/admin/v1/workers/{worker.name}", headers=ADMIN) as view:
        shown = await view.json()
    assert shown["breaker"] == "open"
    assert shown["failing"].startswith("failed 3 turns in a row (the last: ")
    async with gate.client.get(f"{gate.url}/ready") as ready:
        assert ready.status == 200
        (doubt,) = [why for why in (await ready.json())["reasons"] if "turns in a row" in why]
    assert doubt.startswith(f"worker {worker.name} failed 3 turns in a row (the last: ")
    async with gate.client.get(f"{gate.url}/metrics") as page:
        assert f'moongate_worker_breaker{{worker="{worker.name}"}} 1.0' in await page.text()
    bad.handler = good
    fleet._clock = lambda: time.monotonic() + 300
    assert fleet.breaker_state(worker) == "half-open"
    while fleet.breaker_state(worker) != "closed":
        assert await post(gate) == (200, GOOD)
    before = len(bad.received)
    for _ in range(30):
        assert await post(gate) == (200, GOOD)
    assert len(bad.received) > before


def by_turns():
    """Answers 500 and well in turn."""
    counts = itertools.count()

    async def answer(request: Received, connection: Connection) -> None:
        await (good if next(counts) % 2 else answers(500))(request, connection)

    return answer


async def test_a_worker_that_fails_every_other_turn_rests_as_well_and_it_is_told_before(peers, front) -> None:
    bad, well = await peers(by_turns()), await peers(good)
    gate = await front(bad, well, env={"MOONGATE_WORKERS__BREAKER_OPEN_S": "300"})
    fleet = gate.gateway.fleet
    worker = fleet.get(f"127.0.0.1:{bad.port}")
    reasons: list[str] = []
    for _ in range(100):
        assert await post(gate) == (200, GOOD)
        async with gate.client.get(f"{gate.url}/ready") as ready:
            assert ready.status == 200
            reasons += (await ready.json())["reasons"]
        if fleet.breaker_state(worker) == "open":
            break
    assert f"worker {worker.name} failed 3 of its last 5 turns (the last: 500)" in reasons
    rests = f"worker {worker.name} failed 6 of its last 11 turns (the last: 500): gets none for "
    assert any(why.startswith(rests) for why in reasons)
    rested = len(bad.received)
    for _ in range(20):
        assert await post(gate) == (200, GOOD)
    assert len(bad.received) == rested


async def test_where_all_fail_every_other_turn_all_are_still_used(peers, front) -> None:
    both = [await peers(by_turns()), await peers(by_turns())]
    gate = await front(*both, env={"MOONGATE_WORKERS__BREAKER_OPEN_S": "300", "MOONGATE_LIMITS__TRIES": "1"})
    fleet = gate.gateway.fleet
    for _ in range(100):
        assert (await post(gate))[0] in (200, 500)
    assert [fleet.breaker_state(worker) for worker in fleet.workers()] == ["open", "open"]
    seen = [len(each.received) for each in both]
    for _ in range(20):
        assert (await post(gate))[0] in (200, 500)
    assert all(len(each.received) > before for each, before in zip(both, seen, strict=True))


async def test_a_request_that_no_worker_bears_counts_against_none(peers, front) -> None:
    async def bears_all_but_one(request: Received, connection: Connection) -> None:
        await (answers(500) if b"unbearable" in request.body else good)(request, connection)

    fleet = [await peers(bears_all_but_one), await peers(bears_all_but_one)]
    gate = await front(*fleet, env={"MOONGATE_WORKERS__BREAKER_FAILURES": "3"})
    for _ in range(10):
        assert (await post(gate, STREAMED.replace(b"hi", b"unbearable")))[0] == 500
    assert [len(each.received) for each in fleet] == [10, 10]
    assert [worker.breaker.failures for worker in gate.gateway.fleet.workers()] == [0, 0]
    async with gate.client.get(f"{gate.url}/ready") as ready:
        assert not [why for why in (await ready.json())["reasons"] if "failed" in why]


async def test_a_failing_worker_is_still_used_when_it_is_the_only_one(peers, front) -> None:
    bad = await peers(answers(500))
    gate = await front(bad, env={"MOONGATE_WORKERS__BREAKER_FAILURES": "2"})
    for _ in range(5):
        assert (await post(gate))[0] == 500
    bad.handler = good
    assert await post(gate) == (200, GOOD)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_client_errors_never_count_against_a_worker(peers, front, status: int) -> None:
    peer = await peers(answers(status))
    gate = await front(peer, await peers(good), env={"MOONGATE_WORKERS__BREAKER_FAILURES": "1"})
    seen = Counter([(await post(gate))[0] for _ in range(30)])
    assert seen[status] > 5
    worker = gate.gateway.fleet.get(f"127.0.0.1:{peer.port}")
    assert gate.gateway.fleet.breaker_state(worker) == "closed"


async def test_clients_that_leave_never_count_against_a_worker(peers, front) -> None:
    peer = await peers(frozen)
    gate = await front(peer, env={"MOONGATE_WORKERS__BREAKER_FAILURES": "1"})
    for _ in range(3):
        turn = asyncio.create_task(post(gate))
        await gate.until(lambda: len(peer.open) == 1)
        turn.cancel()
        await gate.until(lambda: not peer.open)
    assert gate.gateway.fleet.breaker_state(gate.gateway.fleet.workers()[0]) == "closed"
