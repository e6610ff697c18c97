import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ports import ports
from workers.launch.process import ProcessNotReady
from workers.launch.server import Server

SERVE = """
import http.server, os, signal, sys, time
port, mode = int(sys.argv[1]), sys.argv[2]
print("hello from", os.getpid(), flush=True)
if mode == "exit": sys.exit(3)
if mode == "mute": time.sleep(600)
if mode == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Servers:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[Server] = []
        self.ports = ports(above=21_400)

    def make(self, mode: str = "plain", *, ready_s: float = 20.0) -> Server:
        port = next(self.ports)
        server = Server(
            name=f"server-{port}",
            argv=[sys.executable, "-c", SERVE, str(port), mode],
            env=os.environ,
            cwd=self.directory,
            log=self.directory / f"{port}.log",
            ready_url=f"http://127.0.0.1:{port}/",
            ready_s=ready_s,
        )
        self.made.append(server)
        return server


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    for server in servers.made:
        await server.stop(0.0)


def words(server: Server, first: str) -> list[int]:
    lines = server.log.read_text().splitlines()
    return [int(line.split()[-1]) for line in lines if line.startswith(first)]


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def listening(server: Server) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(server.name.removeprefix("server-")))) == 0


async def test_start_returns_when_it_serves_and_stop_ends_it(servers: Servers) -> None:
    server = servers.make()
    await server.start()
    assert listening(server)
    await server.stop(5.0)
    assert await server.wait() == -signal.SIGTERM
    assert not listening(server)


async def test_a_process_that_ends_while_starting_is_reported_with_its_words(servers: Servers) -> None:
    server = servers.make("exit")
    with pytest.raises(ProcessNotReady, match="code 3"):
        await server.start()
    assert "hello from" in server.last_lines(5)


async def test_a_process_that_never_serves_is_given_up_and_stopped(servers: Servers) -> None:
    server = servers.make("mute", ready_s=1.5)
    with pytest.raises(ProcessNotReady, match="not ready"):
        await server.start()
    assert not running(words(server, "hello")[0])


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(servers: Servers) -> None:
    server = servers.make("stubborn")
    await server.start()
    async with asyncio.timeout(30):
        await server.stop(0.3)
    assert await server.wait() == -signal.SIGKILL


async def test_a_killed_process_can_be_started_again_and_its_log_goes_on(servers: Servers) -> None:
    server = servers.make()
    await server.start()
    (pid,) = words(server, "hello")
    os.kill(pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    await server.start()
    assert words(server, "hello")[0] == pid
    assert len(words(server, "hello")) == 2


async def test_stop_before_start_and_twice_is_no_error(servers: Servers) -> None:
    server = servers.make()
    await server.stop(1.0)
    await server.start()
    await server.stop(1.0)
    await server.stop(1.0)
