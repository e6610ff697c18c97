"""A whole fleet on this machine, as `moongate up` runs it: Mooncake master, workers, gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

from workers.launch.interrupts import interrupted
from workers.launch.model import local_model
from workers.launch.plan import LocalFleet, Plan, with_one_token
from workers.launch.ports import PortTaken, claimed, free_ports, require_free
from workers.launch.supervisor import ProcessFailed, Supervisor

__all__ = ["LocalFleet", "up"]

# Once the gateway, which ends first, has let running turns finish; without any, all ends in under 10 s.
WORKER_GRACE_S, MASTER_GRACE_S = 3.0, 2.0
# What the gateway takes besides waiting for turns.
GATEWAY_END_S = 2.0
# Fills blocks of its own with the local model: asked a second time, the first of them are cached.
_QUESTION = (
    "Which worker holds the KV cache of this prompt, and would another one answer sooner by pulling it from "
    "the pool or by computing all of it again?"
)


def up(fleet: LocalFleet, *, say: Callable[[str], None], progress: Callable[[str], None]) -> int:
    """Runs the fleet until SIGINT, SIGTERM or SIGHUP, or until a part of it fails for good; blocks.

    `say` gets one line when everything serves, `progress` what happens before and after. Returns the exit
    code: 0 after a signal, 1 after a failure. On return no process, port or temporary file is left.
    """
    return asyncio.run(_up(fleet, say, progress))


async def _up(fleet: LocalFleet, say: Callable[[str], None], progress: Callable[[str], None]) -> int:
    supervisor = Supervisor(progress)
    signalled = asyncio.create_task(interrupted())
    with contextlib.ExitStack() as held, _run_directory(fleet.directory.resolve() / "run") as run_directory:
        starting = asyncio.create_task(_start(fleet, supervisor, run_directory, held, progress))
        try:
            await asyncio.wait({starting, signalled, supervisor.failure}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                say(starting.result())
                await asyncio.wait({signalled, supervisor.failure}, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.failure.done():
                supervisor.failure.result()
        except (ProcessFailed, PortTaken, OSError) as error:
            progress(f"moongate up: {error}")
            return 1
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await _stop(supervisor, fleet, progress)
    return 0


async def _stop(supervisor: Supervisor, fleet: LocalFleet, progress: Callable[[str], None]) -> None:
    """Ends all in order; at once when a second signal comes while turns under way are waited for."""
    ended = asyncio.create_task(supervisor.stop())
    again = asyncio.create_task(interrupted())
    await asyncio.wait({ended, again}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done() and not again.done():
        progress(f"turns under way have {fleet.drain_s:g} s to end; another signal ends everything at once")
        await asyncio.wait({ended, again}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
        await supervisor.stop(at_once=True)
    again.cancel()


async def _start(
    fleet: LocalFleet,
    supervisor: Supervisor,
    run_directory: Path,
    held: contextlib.ExitStack,
    progress: Callable[[str], None],
) -> str:
    """Starts everything in order and returns the ready line. `held` keeps the gateway's port for it."""
    if fleet.port == 0:
        fleet = replace(fleet, port=next(free_ports(above=7999)))
    fleet = with_one_token(fleet)
    held.enter_context(claimed(fleet.port))
    require_free(fleet.host, fleet.port)
    home = fleet.directory.resolve()
    model = local_model(fleet.model, home / "models")
    plan = Plan.make(fleet, model, run_directory, logs=home / "logs" / str(fleet.port), cache=home / "cache")
    plan.logs.mkdir(parents=True, exist_ok=True)
    if fleet.mooncake is None:
        admin = f"its admin HTTP on port {plan.pool_http_port}"
        progress(f"starting the Mooncake master on {plan.pool}, {admin}")
        await supervisor.start([plan.master()], grace_s=MASTER_GRACE_S)
    progress(f"starting {fleet.workers} {fleet.engine} workers for {model.name}; logs are in {plan.logs}")
    # Two vLLM servers that import and profile at once on two cores take longer than one after the other.
    await supervisor.start(plan.workers(), grace_s=WORKER_GRACE_S, together=fleet.engine == "sim")
    progress(f"starting the gateway on {fleet.url}")
    await supervisor.start(
        [plan.gateway(fleet.admin_token)], grace_s=fleet.drain_s + GATEWAY_END_S, restart=False
    )
    return _ready_line(fleet.url, model.name, fleet.admin_token)


def _ready_line(url: str, model: str, token: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": 16,
    }
    header = "content-type: application/json"
    curl = f"curl -i {url}/v1/chat/completions -H {shlex.quote(header)} -d {shlex.quote(json.dumps(body))}"
    return f"ready base_url={url}/v1 admin={url}/admin/v1 token={token} try: {curl}"


@contextlib.contextmanager
def _run_directory(parent: Path) -> Generator[Path]:
    """A directory of this run's own, gone afterwards. Sweeps those of runs that were killed."""
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.iterdir():
        if not (old.name.isdigit() and Path("/proc", old.name).exists()):
            shutil.rmtree(old, ignore_errors=True)
    own = parent / str(os.getpid())
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
