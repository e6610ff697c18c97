"""The simulated worker's faults, as its clients and readers of its events see them."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio

from tests.simulated import QUICK
from tests.workers.sim.running import CHAT, HELLO, Running, running


async def broken_stream(worker: Running, **fault: Any) -> tuple[bytes, Exception | None]:
    """What a client gets of a stream before it breaks, and how it breaks."""
    await worker.faults(**fault)
    got = b""
    try:
        body = {**HELLO, "max_tokens": 50, "ignore_eos": True, "stream": True}
        async with worker.http.stream("POST", CHAT, json=body) as answer:
            async for piece in answer.aiter_bytes():
                got += piece
    except httpx.TransportError as broken:
        return got, broken
    return got, None


async def test_die_cuts_a_stream_after_so_many_chunks(worker: Running) -> None:
    got, broken = await broken_stream(worker, die={"after_chunks": 3, "how": "reset"})
    assert got.count(b"data: ") == 3
    assert isinstance(broken, httpx.ReadError)
    got, broken = await broken_stream(worker, die={"after_chunks": 2, "how": "eof"})
    assert got.count(b"data: ") == 2
    assert isinstance(broken, httpx.RemoteProtocolError)
    _, broken = await broken_stream(worker, die={"after_chunks": None})
    assert isinstance(broken, httpx.ReadError)
    await worker.faults()
    got, broken = await broken_stream(worker)
    assert broken is None
    assert got.endswith(b"data: [DONE]\n\n")
    await worker.idle()
    assert (await worker.report())["ended"]["fault"] == 3


async def test_die_cuts_a_whole_answer_in_its_middle(worker: Running) -> None:
    await worker.faults(die={"after_chunks": 0, "how": "eof", "times": 1})
    with pytest.raises(httpx.RemoteProtocolError):
        await worker.chat()
    assert (await worker.chat()).status_code == 200


async def test_hang_stops_before_the_headers_or_in_a_stream_and_goes_on_or_not(worker: Running) -> None:
    await worker.faults(hang={"after_chunks": None, "times": 1})
    with pytest.raises(httpx.ReadTimeout):
        await worker.http.post(CHAT, json=HELLO, timeout=0.2)
    got, broken = await broken_stream(worker, hang={"after_chunks": 2, "seconds": 0.2})
    assert broken is None
    assert got.endswith(b"data: [DONE]\n\n")
    await worker.idle()


async def test_status_answers_for_the_engine(worker: Running) -> None:
    await worker.faults(
        status={"status": 429, "body": '{"full":1}', "headers": {"Retry-After": "3"}, "times": 1}
    )
    answer = await worker.chat()
    assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (429, '{"full":1}', "3")
    assert (await worker.chat()).status_code == 200
    await worker.faults(status={"status": 503, "path": "/health"})
    assert (await worker.http.get("/health")).status_code == 503
    assert (await worker.control("GET", "/sim/faults")).json()["status"]["status"] == 503


async def test_a_fault_of_a_path_leaves_those_below_it_alone(worker: Running) -> None:
    await worker.faults(status={"status": 503, "path": CHAT, "times": 1})
    assert (await worker.http.post(f"{CHAT}/render", json=HELLO)).status_code == 200
    assert (await worker.chat()).status_code == 503
    await worker.faults(status={"status": 503, "path": f"{CHAT}/"})
    assert (await worker.http.post(f"{CHAT}/render", json=HELLO)).status_code == 503
    assert (await worker.chat()).status_code == 200


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_refuse_lets_nobody_in_until_it_is_over(worker: Running, how: str) -> None:
    await worker.chat()
    await worker.faults(refuse={"how": how})
    await asyncio.sleep(0.1)
    with pytest.raises(httpx.ConnectError if how == "close" else httpx.ReadError):
        await worker.chat()
    await worker.faults(refuse={"how": how, "seconds": 0.1})
    async with asyncio.timeout(30):
        while not await served(worker):
            await asyncio.sleep(0.02)
    assert (await worker.chat()).status_code == 200


async def test_slow_takes_so_many_times_as_long(worker: Running) -> None:
    async def seconds() -> float:
        begun = asyncio.get_running_loop().time()
        await worker.chat(max_tokens=40, ignore_eos=True)
        return asyncio.get_running_loop().time() - begun

    normal = min([await seconds() for _ in range(3)])
    await worker.faults(slow=6.0)
    assert await seconds() > 3 * normal


async def test_a_restart_is_another_life(worker: Running) -> None:
    await worker.ids(list(range(100, 200)))
    before = await worker.metric("process_start_time_seconds")
    asking = asyncio.create_task(worker.chat(max_tokens=1900, ignore_eos=True))
    async with asyncio.timeout(30):
        while not await worker.metric("vllm:num_requests_running"):
            await asyncio.sleep(0.01)
    await worker.faults(restart={"down_s": 0.1})
    with pytest.raises(httpx.TransportError):
        await asking
    async with asyncio.timeout(30):
        while await worker.metric("process_start_time_seconds") == before:
            await asyncio.sleep(0.02)
    assert await worker.batches() == []
    usage = (await worker.ids(list(range(100, 200))))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(await worker.batches()) == 1


async def test_other_faults_end_a_restart_or_a_refusal_that_is_under_way(worker: Running) -> None:
    for fault in ({"restart": {"down_s": 60}}, {"refuse": {"seconds": 60}}, {"restart": {"down_s": 60}}):
        await worker.faults(**fault)
        async with asyncio.timeout(30):
            while await served(worker):
                await asyncio.sleep(0.005)
        for _ in range(3):
            await asyncio.gather(*(worker.faults(slow=1 + number) for number in range(3)))
        assert (await worker.chat()).status_code == 200
    await worker.faults()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_restart_makes_no_stream_look_complete(
    tiny_model: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tiny_model, rates=replace(QUICK, step_s=0.05)) as worker:
        got = b""
        body = {**HELLO, "max_tokens": 400, "stream": True}
        with contextlib.suppress(httpx.TransportError):
            async with worker.http.stream("POST", path, json=body) as answer:
                async for chunk in answer.aiter_bytes():
                    if not got:
                        await worker.faults(restart={"down_s": 0.05})
                    got += chunk
        assert got
        assert b"DONE" not in got
        assert b"message_stop" not in got
        # Nor did the worker try to end an answer that it had not.
        assert "request failed" not in caplog.text
        async with asyncio.timeout(30):
            while (await worker.report())["open"] or not await served(worker):
                await asyncio.sleep(0.01)


async def served(worker: Running) -> bool:
    try:
        return (await worker.http.get("/health")).is_success
    except httpx.TransportError:
        return False


async def test_dropped_batches_are_missed_live_but_remembered(worker: Running) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{worker.spec.events_port}")
        socket.subscribe("")
        number = 0
        while not await socket.poll(50):
            number += 1
            await worker.ids([number] * 40)
        seen = [int.from_bytes((await socket.recv_multipart())[1], "big") for _ in range(1)]
        while await socket.poll(100):
            seen.append(int.from_bytes((await socket.recv_multipart())[1], "big"))
        await worker.faults(drop_events=2)
        for number in range(1001, 1004):
            await worker.ids([number] * 40)
        last = int.from_bytes((await socket.recv_multipart())[1], "big")
        assert last == seen[-1] + 3
        assert len(await worker.batches()) == last + 1
