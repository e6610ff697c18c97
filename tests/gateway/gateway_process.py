"""The gateway as a process of its own, where the process is what a test is about."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from peer import Peer

PROJECT = Path(__file__).parents[2]


@asynccontextmanager
async def process_of(*peers: Peer, **settings: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`moongate serve` itself in front of `peers`, ready; yields it and its URL."""
    words = [word for peer in peers for word in ("--worker", peer.url)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONGATE_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--admin-token", "t", *words),
        env=environment | {"PYTHONPATH": str(PROJECT), "MOONGATE_PROMPT__SOURCE": "local"} | settings,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        url = line.split()[3].rstrip(",")
        async with httpx.AsyncClient(timeout=60) as http, asyncio.timeout(60):
            while (await http.get(f"{url}/ready")).status_code != 200:
                await asyncio.sleep(0.01)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
