"""The server around the app: its sockets, its end, and what it does not say."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gateway.serve import CannotListen, base_url, listen

PROJECT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
from gateway.errors import ResponseCut
from gateway.serve import configure_logging, listening, run
from gateway.settings import load

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        if "refuse" in sys.argv:
            await send({"type": "lifespan.startup.failed"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        print("closed", flush=True)
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
    if scope["path"] == "/cut":
        raise ResponseCut
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    if scope["path"] == "/endless":
        await asyncio.sleep(60)
    await send({"type": "http.response.body", "body": str(scope["server"][1]).encode()})

drain_s = float("inf") if "patient" in sys.argv else 5
drain = {"timeouts.drain_s": drain_s, "timeouts.drain_delay_s": 0}
settings = load(None, {}, {"server.port": 0, "admin.port": int(sys.argv[1]), **drain})
configure_logging("debug")
with listening(settings) as sockets:
    run(app, settings, sockets)
"""


@asynccontextmanager
async def serving(*words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """The program above; yields it and the URLs of its first line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, *words),
        cwd=PROJECT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        yield process, [word.rstrip(",").removesuffix("/admin/v1") for word in line.split() if "://" in word]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


async def test_admin_gets_its_own_socket_and_the_server_does_not_name_itself() -> None:
    port = free_port()
    async with serving(str(port)) as (_, urls), httpx.AsyncClient() as http:
        assert urls[1] == f"http://127.0.0.1:{port}"
        for url in urls:
            answer = await http.get(url)
            assert answer.text == f"begun {url.rsplit(':', 1)[1]}"
            assert "server" not in answer.headers


@pytest.mark.parametrize("words", [(), ("patient",)])
async def test_b083_a_stream_under_way_ends_before_the_server_does(words: tuple[str, ...]) -> None:
    async with serving("0", *words) as (process, urls), httpx.AsyncClient() as http:
        async with http.stream("GET", urls[0] + "/slow") as answer:
            chunks = answer.aiter_text()
            assert await anext(chunks) == "begun "
            process.send_signal(signal.SIGTERM)
            assert "".join([chunk async for chunk in chunks]) == urls[0].rsplit(":", 1)[1]
        out, log = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
        assert out == b"closed\n"
        assert b"/slow" not in log


async def test_b083_a_second_signal_does_not_wait() -> None:
    async with (
        serving("0") as (process, urls),
        httpx.AsyncClient() as http,
        http.stream("GET", urls[0] + "/endless") as answer,
    ):
        chunks = answer.aiter_text()
        assert await anext(chunks) == "begun "
        process.send_signal(signal.SIGTERM)
        assert process.stderr
        while b"Waiting for connections" not in (line := await process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 3) == 0
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(chunks)


async def test_b085_what_is_no_http_gets_our_error_shape() -> None:
    async with serving("0") as (_, urls):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(urls[0].rsplit(":", 1)[1]))
        writer.write(b"nonsense\r\n\r\n")
        head, _, content = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(content)["error"]["type"] == "invalid_request_error"


async def test_a_response_cut_on_purpose_leaves_no_stack_in_the_log() -> None:
    async with serving("0") as (process, urls), httpx.AsyncClient() as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(urls[0] + "/cut")
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert b"Traceback" not in log


async def test_an_app_that_refuses_to_start_is_an_error() -> None:
    async with serving("0", "refuse") as (process, _):
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode != 0
        assert b"CannotStart" in log or b"startup failed" in log


def test_listening_twice_names_address_and_reason() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert base_url(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(CannotListen, match=f"127.0.0.1 port {port}: Address already in use$"):
            listen("127.0.0.1", port)
    with pytest.raises(CannotListen, match="no-such-host"):
        listen("no-such-host.invalid", 0)
