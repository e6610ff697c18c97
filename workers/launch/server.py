"""A local HTTP server as a child process: started, awaited, ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from workers.launch.process import Process, ProcessNotReady


@dataclass(slots=True)
class Server:
    """A Supervised process that serves HTTP.

    `env` is the whole environment; output is appended to `log`; `ready_url` answers with success once the
    server serves, within `ready_s` seconds of its start.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    ready_url: str
    ready_s: float
    _process: Process = field(init=False)

    def __post_init__(self) -> None:
        self._process = Process(self.argv, log=self.log, env=self.env, cwd=self.cwd)

    async def start(self) -> None:
        """Returns when the server is ready; can be called again after it ended.

        Raises ProcessNotReady (it is stopped then) or OSError when there is no such program.
        """
        self._process.start()
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=2.0) as http:
                await self._process.wait_ready(lambda: self._serves(http), budget_s=self.ready_s)
        except ProcessNotReady:
            self._process.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        await self._process.stop(grace_s)

    def kill(self) -> None:
        """SIGKILL, as a crash would have it."""
        self._process.kill()

    def last_lines(self, lines: int) -> str:
        return self._process.last_lines(lines)

    async def _serves(self, http: httpx.AsyncClient) -> bool:
        try:
            return (await http.get(self.ready_url)).is_success
        except httpx.HTTPError:
            return False
