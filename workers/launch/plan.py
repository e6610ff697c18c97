"""What a local fleet consists of: every process with its command, ports, directory and log."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from workers.connecting import in_url
from workers.launch import sim, vllm
from workers.launch.model import LocalModel
from workers.launch.mooncake import MooncakeMaster
from workers.launch.ports import free_ports
from workers.launch.server import Server
from workers.launch.supervisor import Supervised

GATEWAY_READY_S, SIM_READY_S = 60.0, 30.0
# About 17 s on two idle cores; a busy machine or a real model takes its time.
VLLM_READY_S = 600.0


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """What to start.

    `model`: a directory or hub name, empty = a tiny one made here. `mooncake`: HOST:PORT of a master that
    runs already, "off" = no pool, None = an own master. `directory` takes logs, models and, while the fleet
    runs, sockets. `gateway` is the command that serves; host, port, workers and pool are added to it.
    `drain_s`: what the gateway gives turns under way at the end.
    """

    engine: Literal["sim", "vllm"] = "sim"
    workers: int = 2
    model: str = ""
    mooncake: str | None = None
    mooncake_http_port: int = 9003
    host: str = "127.0.0.1"
    port: int = 8000
    directory: Path = Path(".moongate")
    gateway: tuple[str, ...] = (sys.executable, "-m", "gateway.cli", "serve")
    gateway_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    admin_token: str = ""
    drain_s: float = 30.0
    blocks: int = 0
    vllm_python: Path = field(default_factory=lambda: Path(sys.prefix).parent / ".venv-vllm/bin/python")

    @property
    def url(self) -> str:
        anywhere = self.host in {"0.0.0.0", "::", ""}  # noqa: S104 (a comparison, not a bind)
        return f"http://{'127.0.0.1' if anywhere else in_url(self.host)}:{self.port}"


def with_one_token(fleet: LocalFleet) -> LocalFleet:
    """`fleet` with the admin token that its gateway will have, made if nobody gives one.

    One among the gateway's own words wins, as it would there, and is no longer among them: the environment
    carries it, which other users of the machine can't read.
    """
    token, rest = "", list[str]()
    words = iter(fleet.gateway_args)
    for word in words:
        flag, given, value = word.partition("=")
        if flag != "--admin-token":
            rest.append(word)
        elif given or (value := next(words, None)) is not None:
            token = value
        else:
            rest.append(word)  # a flag without its value, for the gateway to refuse
    token = token or fleet.admin_token or secrets.token_urlsafe(24)
    return replace(fleet, admin_token=token, gateway_args=tuple(rest))


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    http: int
    events: int
    replay: int
    segment: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes of one run. `pool` is the master's RPC address, None = no pool."""

    fleet: LocalFleet
    model: LocalModel
    worker_ports: tuple[WorkerPorts, ...]
    pool: str | None
    pool_http_port: int
    directory: Path
    logs: Path
    cache: Path

    @classmethod
    def make(cls, fleet: LocalFleet, model: LocalModel, directory: Path, *, logs: Path, cache: Path) -> Plan:
        """Chooses the ports: workers serve on those that follow the gateway's (8001, 8002, ...)."""
        ports = free_ports(above=fleet.port)
        serving = [next(ports) for _ in range(fleet.workers)]
        worker_ports = tuple(WorkerPorts(http, next(ports), next(ports), next(ports)) for http in serving)
        pool, pool_http_port = fleet.mooncake, fleet.mooncake_http_port
        if pool is None:
            pool, pool_http_port = f"127.0.0.1:{next(ports)}", next(ports)
        elif pool == "off":
            pool = None
        return cls(fleet, model, worker_ports, pool, pool_http_port, directory, logs, cache)

    @property
    def policy_file(self) -> Path:
        """Where policies set through the admin API outlive the run; another fleet's is another port's."""
        return self.fleet.directory.resolve() / "state" / str(self.fleet.port) / "policy.json"

    def master(self) -> Supervised:
        """The fleet's own Mooncake master."""
        if self.pool is None:
            raise ValueError("this fleet has no pool")
        master = MooncakeMaster(
            rpc_port=int(self.pool.rpartition(":")[2]),
            http_port=self.pool_http_port,
            log=self._new_log("mooncake-master"),
        )
        return cast("Supervised", master)  # its constant name is a property to the protocol

    def workers(self) -> list[Server]:
        """Also writes the vLLM workers' Mooncake configuration into their directories."""
        make = self._vllm if self.fleet.engine == "vllm" else self._sim
        return [make(f"worker-{number}", ports) for number, ports in enumerate(self.worker_ports, start=1)]

    def gateway(self, token: str) -> Server:
        argv = [*self.fleet.gateway, "--host", self.fleet.host, "--port", str(self.fleet.port)]
        for ports in self.worker_ports:
            argv += ["--worker", _url(ports)]
        if self.pool is not None:
            argv += ["--mooncake-master", self.pool]
        env = {
            "MOONGATE_ADMIN__TOKEN": token,
            "MOONGATE_MOONCAKE__HTTP_PORT": str(self.pool_http_port),
            "MOONGATE_ROUTING__HEADERS": "debug",
            # Workers end with the gateway: there is nothing to remember of them.
            "MOONGATE_INDEX__SNAPSHOT_PATH": "",
            "MOONGATE_ROUTING__POLICY_PATH": str(self.policy_file),
            "MOONGATE_TIMEOUTS__DRAIN_DELAY_S": "0",  # nobody balances load to it
            "MOONGATE_TIMEOUTS__DRAIN_S": str(self.fleet.drain_s),
        }
        if self.pool is not None:
            segments = {_url(ports): f"127.0.0.1:{ports.segment}" for ports in self.worker_ports}
            env["MOONGATE_WORKERS__SEGMENTS"] = json.dumps(segments)
        argv += self.fleet.gateway_args
        return self._server("gateway", argv, env, f"{self.fleet.url}/ready", GATEWAY_READY_S)

    def _sim(self, name: str, ports: WorkerPorts) -> Server:
        spec = sim.SimWorkerSpec(
            python=Path(sys.executable),
            model=self.model.path,
            port=ports.http,
            events_port=ports.events,
            replay_port=ports.replay,
            segment_port=ports.segment,
            mooncake=self.pool,
            served_model_name=self.model.name,
            blocks=self.fleet.blocks,
            extra_args=self.fleet.worker_args,
        )
        argv, env = sim.command(spec)
        return self._server(name, argv, env, f"{_url(ports)}/health", SIM_READY_S)

    def _vllm(self, name: str, ports: WorkerPorts) -> Server:
        spec = vllm.VllmWorkerSpec(
            python=self.fleet.vllm_python,
            model=self.model.path,
            directory=self.directory / name,
            cache=self.cache / "vllm",
            port=ports.http,
            events_port=ports.events,
            replay_port=ports.replay,
            segment_port=ports.segment,
            mooncake=self.pool,
            served_model_name=self.model.name,
            blocks=self.fleet.blocks or vllm.BLOCKS,
            max_positions=self.model.max_positions or vllm.MAX_POSITIONS,
            load_format=self.model.load_format,
            offline=self.model.offline,
            extra_args=self.fleet.worker_args,
        )
        if not spec.python.exists():
            raise FileNotFoundError(
                f"vLLM's own environment is missing ({spec.python}): make it with `make setup-vllm`"
            )
        argv, env = vllm.command(spec)
        server = self._server(name, argv, env, f"{_url(ports)}/health", VLLM_READY_S)
        (spec.directory / vllm.MOONCAKE_CONFIG).write_text(
            json.dumps(vllm.mooncake_config(spec)), encoding="utf-8"
        )
        return server

    def _server(
        self, name: str, argv: list[str], env: dict[str, str], ready_url: str, ready_s: float
    ) -> Server:
        # Each process works in a directory of its own; the gateway, whose settings name files, in the user's.
        directory = Path.cwd() if name == "gateway" else self.directory / name
        directory.mkdir(exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if key not in vllm.UNSET}
        return Server(
            name=name,
            argv=argv,
            env=inherited | env,
            cwd=directory,
            log=self._new_log(name),
            ready_url=ready_url,
            ready_s=ready_s,
        )

    def _new_log(self, name: str) -> Path:
        log = self.logs / f"{name}.log"
        log.unlink(missing_ok=True)
        return log


def _url(ports: WorkerPorts) -> str:
    return f"http://127.0.0.1:{ports.http}"
