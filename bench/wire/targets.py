"""The routers under test as processes: the gateway and its peers, each in front of the same workers."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_PEERS = ROOT / ".moongate" / "routers"
_REQUIREMENTS = ROOT / "bench" / "routers.txt"
_FRONT = ROOT / "bench" / "wire" / "dynamo_front.py"
_READY_S = 60.0
_GATEWAY = "from gateway.cli.main import main; main()"


@dataclass(slots=True)
class Target:
    """A running router; `process` is None for a worker that is talked to directly.

    behind: what chooses for `process`, which only passes turns on.
    """

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    behind: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


class Targets:
    """Starts processes and ends them. Use as a context manager."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: list[subprocess.Popen[bytes]] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Targets:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()

    def run(self, name: str, argv: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join((str(_PEERS), str(ROOT)))
        with (self._logs / f"{name.replace(' ', '-')}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *argv],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": paths} | env,
            )
        self._processes.append(process)
        return process

    def gateway(self, name: str, port: int, workers: Sequence[str], **settings: str) -> Target:
        flags = [word for url in workers for word in ("--worker", url)]
        env = {
            # Peers probe once a minute; a probe each second would count as the cost of turns here.
            "MOONGATE_WORKERS__HEALTH_INTERVAL_S": "30",
            "MOONGATE_SERVER__LOG_LEVEL": "warning",
            "MOONGATE_ADMIN__TOKEN": "bench",
        }
        argv = ["-c", _GATEWAY, "serve", "--port", str(port), *flags]
        return Target(name, port, self.run(name, argv, **(env | settings)))

    def vllm_router(self, policy: str, port: int, metrics: int, workers: Sequence[str]) -> Target:
        argv = ["-m", "vllm_router.launch_router", "--policy", policy, "--log-level", "warning"]
        return self._peer(f"vllm-router {policy}", argv, port, metrics, workers)

    def smg(self, policy: str, port: int, metrics: int, workers: Sequence[str]) -> Target:
        argv = ["-m", "smg", "launch", "--policy", policy, "--log-level", "warn"]
        return self._peer(f"smg {policy}", argv, port, metrics, workers)

    def dynamo(self, port: int, service_port: int, records: Sequence[str]) -> Target:
        """records: each worker, as Dynamo's selection service is told of it. `behind` is that service."""
        name = "dynamo select_service"
        service = self.run(name, ["-m", "dynamo.select_service", "--port", str(service_port)], DYN_LOG="warn")
        front = self.run(f"{name} front", [str(_FRONT), str(port), str(service_port), *records])
        return Target(name, port, front, service)

    def _peer(self, name: str, argv: list[str], port: int, metrics: int, workers: Sequence[str]) -> Target:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        return Target(name, port, self.run(name, [*argv, *where, "--worker-urls", *workers]))


def install_peers() -> str:
    """Fetch the peers once. "" when they are there, else why not."""
    if (_PEERS / ".installed").exists() and _newer(_PEERS / ".installed", _REQUIREMENTS):
        return ""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--upgrade", "--target", str(_PEERS), "-r", str(_REQUIREMENTS)], capture_output=True, text=True
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    (_PEERS / ".installed").touch()
    return ""


def _newer(one: Path, other: Path) -> bool:
    return one.stat().st_mtime >= other.stat().st_mtime


def await_ready(target: Target, body: bytes) -> None:
    """Until the target answers a turn. Raises RuntimeError."""
    deadline = time.monotonic() + _READY_S
    said = ""
    while time.monotonic() < deadline:
        if target.process is not None and target.process.poll() is not None:
            break
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=5)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = f"{answer.status} {answer.read()[:200]!r}"
            if answer.status == 200:
                return
        except OSError as error:
            said = str(error)
        finally:
            connection.close()
        time.sleep(0.1)
    if target.process is not None and (code := target.process.poll()) is not None:
        said = f"it ended with {code}"
    raise RuntimeError(f"{target.name} does not serve: {said}; its log is below .moongate/logs")
