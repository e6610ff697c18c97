"""The whole fleet as a process of its own, driven by signals; the Mooncake master is real."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.ports import ports
from workers.launch.model import TINY

# Serves 200 on every path; as a "vLLM python" it is called with --port=N, as a gateway with --port N.
STAND_IN = """#!{python}
import http.server, os, re, signal, sys, time
port = int(re.search(r"--port[= ](\\d+)", " ".join(sys.argv)).group(1))
print("serving on", port, flush=True)
if "--never-ready" in sys.argv: time.sleep(600)
def end_slowly(*_):
    print("ending", flush=True)
    time.sleep(float(sys.argv[sys.argv.index("--ends-in") + 1]))
    print("ended by itself", flush=True)
    os._exit(0)
if "--ends-in" in sys.argv: signal.signal(signal.SIGTERM, end_slowly)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/ui" else 200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

UP = """
import sys
from pathlib import Path
from workers.launch.fleet import LocalFleet, up
directory, stand_in, port, gateway_args, drain_s, *worker_args = sys.argv[1:]
fleet = LocalFleet(engine="vllm", port=int(port), directory=Path(directory), vllm_python=Path(stand_in),
                   gateway=(stand_in,), gateway_args=tuple(gateway_args.split()),
                   drain_s=float(drain_s), worker_args=tuple(worker_args))
sys.exit(up(fleet, say=lambda line: print(line, flush=True), progress=lambda line: print(line, flush=True)))
"""


@dataclass
class Running:
    process: asyncio.subprocess.Process
    directory: Path
    port: int
    lines: list[str] = field(default_factory=list[str])

    async def until(self, text: str) -> str:
        """The next line of output with `text` in it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line)
                if text in line:
                    return line
        pytest.fail(f"ended without {text!r}:\n{''.join(self.lines)}")

    async def ended(self) -> int:
        """Exit code. It takes 2 to 3 s; a busy machine gets ten times that."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            self.lines.append((await self.process.stdout.read()).decode())
            return await self.process.wait()

    def children(self) -> dict[str, int]:
        """Directory name of each process that works below the run directory -> its pid."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    cwd = os.readlink(entry / "cwd")
                except OSError:
                    continue
                if cwd.startswith(str(self.directory / "run")):
                    found[Path(cwd).name] = int(entry.name)
        return found

    def left_behind(self) -> list[str]:
        ports = [port for port in range(self.port, self.port + 16) if accepts(port)]
        return [*map(str, ports), *self.children(), *os.listdir(self.directory / "run")]


async def eventually(holds: Callable[[], bool]) -> None:
    """For what only /proc tells, where nothing can be awaited."""
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.02)
    pytest.fail("did not become true in 10 s")


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Launch:
    directory: Path
    stand_in: Path
    made: list[Running]

    async def __call__(
        self, *worker_args: str, port: int = 0, gateway_args: str = "", drain_s: float = 30
    ) -> Running:
        port = port or next(ports(above=21_440))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", UP, str(self.directory), str(self.stand_in), str(port)),
            *(gateway_args, str(drain_s), *worker_args),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self.made.append(Running(process, self.directory, port))
        return self.made[-1]


@pytest.fixture
async def launch(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Launch]:
    shutil.copytree(tiny_model, tmp_path / "fleet" / "models" / TINY)
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN.replace("{python}", sys.executable))
    stand_in.chmod(0o755)
    launch = Launch(tmp_path / "fleet", stand_in, [])
    yield launch
    for running in launch.made:
        if running.process.returncode is None:
            running.process.kill()
            await running.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_everything_and_leaves_only_the_logs(
    launch: Launch, number: signal.Signals
) -> None:
    running = await launch()
    await running.until("ready ")
    assert set(running.children()) == {"worker-1", "worker-2"}
    running.process.send_signal(number)
    assert await running.ended() == 0
    assert running.left_behind() == []
    logs = {path.name for path in (running.directory / "logs").glob("*/*")}
    assert logs == {"gateway.log", "mooncake-master.log", "worker-1.log", "worker-2.log"}


async def test_turns_under_way_get_the_drain_time_that_the_gateway_promises(launch: Launch) -> None:
    running = await launch(gateway_args="--ends-in 2.5", drain_s=1)  # and 2 s for the gateway to end
    await running.until("ready ")
    running.process.terminate()
    await running.until("turns under way have 1 s to end")
    assert await running.ended() == 0
    log = next((running.directory / "logs").glob("*/gateway.log")).read_text("utf-8")
    assert "ended by itself" in log
    assert running.left_behind() == []


async def test_a_second_signal_does_not_wait_for_turns(launch: Launch) -> None:
    running = await launch(gateway_args="--ends-in 60")
    await running.until("ready ")
    running.process.send_signal(signal.SIGINT)
    await running.until("another signal ends everything at once")
    running.process.send_signal(signal.SIGINT)
    assert await running.ended() == 0
    assert running.left_behind() == []


async def test_the_ready_line_says_where_and_ends_with_a_curl_that_works(launch: Launch) -> None:
    running = await launch()
    line = await running.until("ready ")
    words = shlex.split(line)
    base = f"http://127.0.0.1:{running.port}"
    assert f"base_url={base}/v1" in words
    assert f"admin={base}/admin/v1" in words
    assert any(word.startswith("token=") and len(word) > 20 for word in words)
    curl = words[words.index("curl") :]
    assert f"{base}/v1/chat/completions" in curl
    assert json.loads(curl[curl.index("-d") + 1])["model"] == "moongate-tiny"


async def test_the_ready_line_has_the_token_that_the_gateway_is_given(launch: Launch) -> None:
    running = await launch(gateway_args="--admin-token sesame")
    assert "token=sesame" in shlex.split(await running.until("ready "))


async def test_a_killed_worker_comes_back_on_its_port(launch: Launch) -> None:
    running = await launch()
    await running.until("ready ")
    before = running.children()
    os.kill(before["worker-1"], signal.SIGKILL)
    await running.until("worker-1 was killed by signal 9")
    await running.until("worker-1 is back")
    after = running.children()
    assert after["worker-1"] != before["worker-1"]
    assert after["worker-2"] == before["worker-2"]
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{running.port + 1}/health")).is_success


async def test_a_dead_gateway_ends_the_fleet_with_its_last_words(launch: Launch) -> None:
    running = await launch()
    await running.until("ready ")
    os.kill(listening_pid(running.port), signal.SIGKILL)
    assert await running.ended() == 1
    assert "gateway was killed by signal 9" in "".join(running.lines)
    assert f"serving on {running.port}" in "".join(running.lines)
    assert running.left_behind() == []


async def test_a_taken_port_is_said_before_anything_starts(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        running = await launch(port=port)
        assert await running.ended() == 1
    assert f"port {port} on 127.0.0.1" in "".join(running.lines)
    assert not (running.directory / "logs").exists()


async def test_a_port_of_a_fleet_that_is_still_starting_is_refused(launch: Launch) -> None:
    first = await launch("--never-ready")
    await first.until("workers for")
    second = await launch(port=first.port)
    assert await second.ended() == 1
    assert "another fleet is starting or running there" in "".join(second.lines)
    first.process.terminate()
    assert await first.ended() == 0


async def test_a_signal_while_starting_ends_it_at_once(launch: Launch) -> None:
    running = await launch("--never-ready")
    await running.until("workers for")
    await eventually(lambda: "worker-1" in running.children())
    running.process.terminate()
    assert await running.ended() == 0
    assert running.left_behind() == []


async def test_an_interrupted_make_ends_the_fleet_too(launch: Launch, tmp_path: Path) -> None:
    port = next(ports(above=21_440))
    (tmp_path / "up.py").write_text(UP)
    command = [
        sys.executable,
        str(tmp_path / "up.py"),
        str(launch.directory),
        str(launch.stand_in),
        str(port),
        *("", "30"),
    ]
    (tmp_path / "Makefile").write_text(f"up:\n\t@exec setpriv --pdeathsig TERM {shlex.join(command)}\n")
    make = await asyncio.create_subprocess_exec(
        # Whatever started the tests in the background made them ignore SIGINT, and make would, too.
        *("env", "--default-signal=INT", "make", "-f", str(tmp_path / "Makefile"), "up"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    running = Running(make, launch.directory, port)
    launch.made.append(running)
    await running.until("ready ")
    make.send_signal(signal.SIGINT)  # to make alone, not to its group as a terminal would
    await running.ended()
    assert running.left_behind() == []


async def test_a_fleet_that_was_killed_leaves_no_process_and_the_next_one_sweeps_up(launch: Launch) -> None:
    killed = await launch()
    await killed.until("ready ")
    killed.process.kill()
    await killed.process.wait()
    await eventually(lambda: not killed.children() and not accepts(killed.port))  # the kernel tells them
    assert os.listdir(killed.directory / "run") != []
    following = await launch()
    await following.until("ready ")
    assert os.listdir(following.directory / "run") == [str(following.process.pid)]


def listening_pid(port: int) -> int:
    """The process that listens on 127.0.0.1:port, from /proc."""
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    wanted = f"0100007F:{port:04X}"
    inodes = {f"socket:[{row.split()[9]}]" for row in table if row.split()[1:4:2] == [wanted, "0A"]}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                links = {os.readlink(descriptor) for descriptor in (entry / "fd").iterdir()}
            except OSError:
                continue
            if links & inodes:
                return int(entry.name)
    pytest.fail(f"nobody listens on {port}")
