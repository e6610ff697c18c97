"""Starts the Mooncake master that comes with the wheel."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Final

import httpx

from workers.launch.ports import require_free
from workers.launch.process import Process, ProcessNotReady

# Until this has passed, the master still offers the blocks of a worker that died, and a vLLM worker that is
# to load one tries again and again (170 times a second, with the policy "recompute") instead of computing.
# Measured on 2 cores: such a turn takes 4.9 s with 5, 1.7 to 2.5 s with 2. Clients ping once a second; eight
# busy loops beside the fleet for 20 s made no living one expire.
CLIENT_TTL_S: Final = 2
# Starts in 0.03 s; the rest is for a busy machine.
READY_S: Final = 15.0
_PACKAGES: Final = "libcurl4 libibverbs1 libnuma1 librdmacm1"


class MooncakeUnavailable(Exception):
    """The master is not installed or cannot run here; the message says what to do."""


class MooncakeMaster:
    """A `mooncake_master` of this Python environment, listening on `host` only. Nothing outlives the parent.

    A started master knows no segments and no objects: those that an earlier one knew are lost, workers mount
    their segments again within a second.
    """

    name: Final = "mooncake master"

    def __init__(
        self,
        *,
        rpc_port: int,
        http_port: int,
        log: Path,
        host: str = "127.0.0.1",
        client_ttl_s: int = CLIENT_TTL_S,
        extra_args: tuple[str, ...] = (),
    ) -> None:
        self.host: Final = host
        self.rpc_port: Final = rpc_port
        self.http_port: Final = http_port
        self._log = log
        self._args = (
            f"-rpc_address={host}",
            f"-rpc_port={rpc_port}",
            # The admin HTTP has no authentication and can empty the pool: its default is all addresses.
            f"-metrics_host={host}",
            f"-metrics_port={http_port}",
            f"-client_ttl={client_ttl_s}",
            "-enable_metric_reporting=false",  # 2 KB of log every 10 s; /metrics has it all
            *extra_args,
        )
        self._process: Process | None = None

    @property
    def address(self) -> str:
        """What workers call `master_server_address`."""
        return f"{self.host}:{self.rpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def process(self) -> Process:
        """Raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("the Mooncake master was never started")
        return self._process

    async def start(self) -> None:
        """Returns when it serves. Can be called again after it ended.

        Raises MooncakeUnavailable when it is not installed or lacks system libraries, PortTaken, and
        ProcessNotReady for any other reason.
        """
        require_free(self.host, self.rpc_port)
        require_free(self.host, self.http_port)
        if self._process is None:
            self._process = Process([str(master_binary()), *self._args], log=self._log)
        try:
            self._process.start()
        except OSError as error:
            raise MooncakeUnavailable(f"the Mooncake master cannot be run: {error}") from error
        try:
            async with httpx.AsyncClient(base_url=self.http_url, timeout=1.0, trust_env=False) as http:
                await self._process.wait_ready(lambda: _serves(http), budget_s=READY_S)
        except ProcessNotReady as failure:
            self._process.kill()
            if "error while loading shared libraries" in str(failure):
                raise MooncakeUnavailable(
                    f"the Mooncake master lacks system libraries; on Debian: apt-get install {_PACKAGES}"
                    f"\n{failure}"
                ) from failure
            raise
        except asyncio.CancelledError:
            self._process.kill()
            raise

    async def wait(self) -> int:
        """Returns the exit code when it ends."""
        return await self.process.wait()

    async def stop(self, grace_s: float = 2.0) -> None:
        if self._process is not None:
            await self._process.stop(grace_s)

    def kill(self) -> None:
        """SIGKILL, as a crash would have it."""
        self.process.kill()

    def last_lines(self, lines: int) -> str:
        return self._process.last_lines(lines) if self._process is not None else ""


def master_binary() -> Path:
    """The executable in the installed wheel. Raises MooncakeUnavailable when the wheel is not installed."""
    package = importlib.util.find_spec("mooncake")
    for folder in package.submodule_search_locations or () if package is not None else ():
        binary = Path(folder) / "mooncake_master"
        if binary.is_file():
            # Not the console script of the same name: that takes a Python start more, and sets this same bit.
            if not binary.stat().st_mode & 0o100:
                binary.chmod(binary.stat().st_mode | 0o755)
            return binary
    raise MooncakeUnavailable(
        "the Mooncake master is not installed: pip install 'moongate[mooncake]' (on Debian it needs also: "
        f"apt-get install {_PACKAGES})"
    )


async def _serves(http: httpx.AsyncClient) -> bool:
    try:
        answer = await http.get("/health")
        return answer.status_code == 200 and answer.json().get("service_ready") is True
    except (httpx.TransportError, ValueError):
        return False
