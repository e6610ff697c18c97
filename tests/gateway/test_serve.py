"""The server around the app: its sockets, its end, and what it does not say."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from gateway.serve import CannotListen, base_url, listen, warn_if_open

PROJECT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, resource, sys
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

drain_s = float("inf") if "patient" in sys.argv else 0.1 if "hasty" in sys.argv else 5
drain = {"timeouts.drain_s": drain_s, "timeouts.drain_delay_s": 0}
host = "0.0.0.0" if "open" in sys.argv else "127.0.0.1"
flags = {"server.host": host, "server.port": 0, "admin.port": int(sys.argv[1]), **drain}
settings = load(None, {}, flags)
configure_logging("debug")
if "few" in sys.argv:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
with listening(settings) as sockets:
    run(app, settings, sockets, on_full=lambda: print("full", flush=True))
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
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
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
        drain_s = b"inf" if words else b"5"
        said = [
            line.partition(b"gateway.serve: ")[2] for line in log.splitlines() if b"turns under way" in line
        ]
        assert said[-2:] == [
            b"told to end by SIGTERM (turns under way: 1): takes more for 0 s, then waits up to "
            + drain_s
            + b" s for their end",
            b"the end (turns under way: 1 ended, 0 cut)",
        ]
        assert b"uvicorn" not in log


async def test_a_full_disk_that_takes_no_word_of_it_keeps_no_gateway_from_serving() -> None:
    port = free_port()
    with await asyncio.to_thread(Path("/dev/full").open, "w") as full:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.cli", "serve", "--port", str(port)),
            cwd=PROJECT,
            env=os.environ | {"MOONGATE_INDEX__SNAPSHOT_PATH": "", "MOONGATE_ROUTING__POLICY_PATH": ""},
            stdout=full,
            stderr=full,
        )
    try:
        async with httpx.AsyncClient(timeout=60) as http, asyncio.timeout(60):
            while True:
                with suppress(httpx.ConnectError):
                    assert (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200
                    break
                assert process.returncode is None
                await asyncio.sleep(0.05)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_b083_a_second_signal_does_not_wait() -> None:
    async with (
        serving("0", "patient") as (process, urls),
        httpx.AsyncClient() as http,
        http.stream("GET", urls[0] + "/endless") as answer,
    ):
        chunks = answer.aiter_text()
        assert await anext(chunks) == "begun "
        process.send_signal(signal.SIGTERM)
        assert process.stderr
        while b"told to end by SIGTERM" not in (line := await process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert b"the end (turns under way: 0 ended, 1 cut)" in await process.stderr.read()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(chunks)


async def test_turns_that_outlast_the_drain_are_counted_as_cut() -> None:
    async with serving("0", "hasty") as (process, urls), httpx.AsyncClient() as http:
        async with http.stream("GET", urls[0] + "/endless") as answer:
            chunks = answer.aiter_text()
            assert await anext(chunks) == "begun "
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(chunks)
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert b"WARNING gateway.serve: the end (turns under way: 0 ended, 1 cut)" in log


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


@pytest.mark.parametrize("words", [(), ("open",)])
async def test_that_anybody_may_send_turns_is_said_at_the_start(words: tuple[str, ...]) -> None:
    async with serving("0", "refuse", *words) as (process, _):
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert log.count(b"listens on 0.0.0.0 without client keys") == len(words)


def test_with_client_keys_nothing_is_said_of_who_may_send_turns(caplog: pytest.LogCaptureFixture) -> None:
    with listen("::", 0) as everywhere:
        warn_if_open(everywhere, "keys")
        assert caplog.messages == []
        warn_if_open(everywhere, "")
    assert len(caplog.messages) == 1


def test_where_all_addresses_are_listened_on_those_of_both_kinds_are() -> None:
    with listen("::", 0) as everywhere:
        port = everywhere.getsockname()[1]
        for address in ("::1", "127.0.0.1"):
            socket.create_connection((address, port), timeout=20).close()


def test_listening_twice_names_address_and_reason() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert base_url(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(CannotListen, match=f"127.0.0.1 port {port}: Address already in use$"):
            listen("127.0.0.1", port)
    with pytest.raises(CannotListen, match="no-such-host"):
        listen("no-such-host.invalid", 0)


async def test_clients_leave_descriptors_for_connections_to_workers() -> None:
    """Of 40 open files ten are clients': others are refused, unless a connection is idle or it is a probe."""

    async def asked(path: str) -> tuple[asyncio.StreamWriter, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        return writer, await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)

    async with serving("0", "few") as (process, urls):
        port = int(urls[0].rsplit(":", 1)[1])
        busy = [await asked("/endless") for _ in range(9)]
        idle = [await asked("/")]
        assert {head.split()[1] for _, head in (*busy, *idle)} == {b"200"}
        _, head = await asked("/")
        assert head.split()[1] == b"429"
        assert b"retry-after: 1" in head.lower()
        assert (await asked("/health"))[1].split()[1] == b"200"
        assert process.stdout
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"full\n"
        async with asyncio.timeout(30):
            while (await asked("/endless"))[1].split()[1] != b"200":
                await asyncio.sleep(0.05)
        for writer, _ in (*busy, *idle):
            writer.close()
        async with asyncio.timeout(30):
            while (await asked("/"))[1].split()[1] != b"200":
                pass
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert log.count(b"leave room for 10 clients' connections, which are all busy") == 1


async def test_that_clients_are_turned_away_for_want_of_descriptors_is_said_and_counted() -> None:
    async with serving("0", "few") as (process, urls), httpx.AsyncClient() as http:
        assert (await http.get(urls[0])).is_success
        port = int(urls[0].rsplit(":", 1)[1])
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        assert process.stdout
        assert process.stderr
        for _ in range(2):
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"full\n"
        for _, writer in clients:
            writer.close()
        async with asyncio.timeout(30), httpx.AsyncClient() as another:
            while True:
                with suppress(httpx.TransportError):
                    assert (await another.get(urls[0])).is_success
                    break
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert log.count(b"all of the 40 open files allowed are in use") == 1
