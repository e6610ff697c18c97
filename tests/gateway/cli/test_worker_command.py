"""`moongate worker`: in the gateway's list as long as its vLLM runs, whoever ends it."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
Run = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """Start the command with a shell script in place of an interpreter that has vLLM."""
    started: list[asyncio.subprocess.Process] = []

    async def worker(url: str, script: str) -> asyncio.subprocess.Process:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        python.chmod(0o755)
        words = ("worker", "--port", "21610", "--python", str(python), "--url", url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.cli", *words, "--admin-token", "admin-token"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(PROJECT)},
        )
        started.append(process)
        return process

    yield worker
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_is_told_to_end_leaves_the_list_first(
    front, run: Run, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    caplog.set_level(logging.INFO)
    gate = await front()
    process = await run(gate.url, "trap 'echo ended; exit 0' TERM; echo begun; while :; do sleep 0.05; done")
    assert process.stdout
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"begun\n"
    assert [worker.name for worker in gate.gateway.fleet.workers()] == ["127.0.0.1:21610"]
    process.send_signal(number)
    assert await asyncio.wait_for(process.stdout.readline(), 20) == b"ended\n"
    assert gate.gateway.fleet.workers() == []
    assert "worker 127.0.0.1:21610 removed: 'moongate worker: it ends'" in caplog.messages
    assert await process.wait() == 0


@pytest.mark.parametrize(
    ("end", "code", "how"), [("exit 3", 3, "exit code 3"), ("kill -KILL $$", 137, "signal SIGKILL")]
)
async def test_a_worker_that_fails_leaves_the_list_and_how_it_ended_is_told(
    front, run: Run, caplog: pytest.LogCaptureFixture, end: str, code: int, how: str
) -> None:
    caplog.set_level(logging.INFO)
    gate = await front()
    process = await run(gate.url, f"echo no such device >&2; {end}")
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code
    assert said.decode() == f"no such device\nmoongate: the engine ended with {how}\n"
    assert gate.gateway.fleet.workers() == []
    removed = f"worker 127.0.0.1:21610 removed: 'moongate worker: its engine ended with {how}'"
    assert removed in caplog.messages


async def test_a_worker_that_others_registered_stays_in_the_list(front, run: Run) -> None:
    gate = await front()
    gate.gateway.fleet.add("http://127.0.0.1:21610")
    process = await run(gate.url, "exit 0")
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert len(gate.gateway.fleet.workers()) == 1


async def test_without_a_gateway_nothing_is_started(run: Run) -> None:
    process = await run("http://127.0.0.1:9", "echo begun")
    said, error = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, said) == (1, b"")
    assert b"cannot register the worker" in error
