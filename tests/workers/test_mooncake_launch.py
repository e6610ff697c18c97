import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from tests.ports import ports
from workers.launch import mooncake
from workers.launch.mooncake import MooncakeMaster, MooncakeUnavailable, master_binary
from workers.launch.ports import PortTaken
from workers.launch.process import Process, ProcessNotReady

PYTHON = sys.executable
PORTS = ports(above=21_200)


async def until(condition: Callable[[], bool], budget_s: float = 30.0) -> None:
    """For facts of the operating system that announce themselves to nobody."""
    async with asyncio.timeout(budget_s):
        while not condition():
            await asyncio.sleep(0.01)


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[MooncakeMaster]:
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "master.log")
    await master.start()
    yield master
    await master.stop()


async def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    script = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(60)"
]).pid, flush=True)
time.sleep(60)
"""
    process = Process([PYTHON, "-c", script], log=tmp_path / "log")
    process.start()
    await until(lambda: "up" in process.last_lines(5))
    grandchild = int(process.last_lines(5).replace("up", "").strip())
    assert process.alive
    assert exists(grandchild)
    began = time.monotonic()
    await process.stop(grace_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5
    assert process.returncode == -signal.SIGKILL
    assert not process.alive
    await until(lambda: not exists(grandchild))


async def test_children_of_a_child_that_ended_by_itself_are_killed_too(tmp_path: Path) -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    process = Process([PYTHON, "-c", script], log=tmp_path / "log")
    process.start()
    assert await process.wait() == 0
    grandchild = int(process.last_lines(1))
    await until(lambda: not exists(grandchild))


async def test_nothing_survives_a_parent_killed_by_sigkill(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    script = f"""
import pathlib, time
from workers.launch.process import Process
process = Process(["sleep", "60"], log=pathlib.Path({str(log)!r}))
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([PYTHON, "-c", script], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert exists(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await until(lambda: not exists(child))


async def test_a_child_that_ends_before_it_is_ready_is_told_with_its_last_words(tmp_path: Path) -> None:
    process = Process([PYTHON, "-c", "print('no such flag'); raise SystemExit(7)"], log=tmp_path / "log")
    process.start()

    async def never() -> bool:
        raise ConnectionRefusedError

    with pytest.raises(ProcessNotReady, match=r"(?s)code 7.*no such flag") as raised:
        await process.wait_ready(never, budget_s=20)
    assert raised.value.returncode == 7


async def test_a_child_that_is_never_ready_costs_no_more_than_the_budget(tmp_path: Path) -> None:
    process = Process(["sleep", "60"], log=tmp_path / "log")
    process.start()

    async def hangs() -> bool:
        await asyncio.Event().wait()
        return True

    with pytest.raises(ProcessNotReady, match=r"not ready after 0\.2 s"):
        await process.wait_ready(hangs, budget_s=0.2)
    assert process.alive
    process.kill()
    assert process.returncode == -signal.SIGKILL


async def test_a_process_starts_again_after_it_ended(tmp_path: Path) -> None:
    process = Process(["true"], log=tmp_path / "log")
    process.start()
    first = process.pid
    assert await process.wait() == 0
    process.start()
    assert process.pid != first
    assert await process.wait() == 0


async def test_a_process_is_not_started_twice(tmp_path: Path) -> None:
    process = Process(["sleep", "60"], log=tmp_path / "log")
    process.start()
    with pytest.raises(RuntimeError, match="running already"):
        process.start()
    process.kill()


async def test_the_real_master_serves_on_loopback_only_and_ends(master: MooncakeMaster) -> None:
    async with httpx.AsyncClient(base_url=master.http_url) as http:
        assert (await http.get("/get_segments_detail")).json() == {"total_segments": 0, "segments": []}
    with socket.create_connection((master.host, master.rpc_port), timeout=1):
        pass
    inodes = Path("/proc/net/tcp").read_text()  # noqa: ASYNC240
    for port in (master.rpc_port, master.http_port):
        assert f"0100007F:{port:04X}" in inodes
        assert f"00000000:{port:04X}" not in inodes
    pid = master.process.pid
    assert pid is not None
    await master.stop()
    assert not exists(pid)


async def test_a_killed_master_can_be_started_again_on_its_ports(master: MooncakeMaster) -> None:
    os.kill(master.process.pid or 0, signal.SIGKILL)
    assert await master.wait() == -signal.SIGKILL
    await master.start()
    assert master.process.alive


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        master = MooncakeMaster(rpc_port=next(PORTS), http_port=port, log=tmp_path / "log")
        with pytest.raises(PortTaken, match=str(port)):
            await master.start()


async def test_missing_system_libraries_are_named_with_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = tmp_path / "mooncake_master"
    loader.write_text(
        "#!/bin/sh\n"
        'echo "$0: error while loading shared libraries: libibverbs.so.1: cannot open shared object file"\n'
        "exit 127\n"
    )
    loader.chmod(loader.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(mooncake, "master_binary", lambda: loader)
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "log")
    with pytest.raises(MooncakeUnavailable, match="libibverbs1 libnuma1 librdmacm1"):
        await master.start()


def test_the_binary_is_the_one_of_this_environment() -> None:
    assert str(master_binary()).startswith(sys.prefix)
    assert os.access(master_binary(), os.X_OK)
