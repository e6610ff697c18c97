"""Checks of every hop of a running gateway, each with what is wrong and what to change."""

import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from gateway.cli.finding import Finding
from gateway.cli.knowledge_checks import (
    check_block_sizes,
    check_index,
    check_pool,
    check_prompts,
    check_windows,
)
from gateway.cli.remote import RemoteError, RunningGateway
from gateway.cli.worker_checks import check_leaving, check_worker

_REFUSED = (
    "429: add workers, or raise that limit; 503: bring the workers back, or change the policy's rule that "
    "keeps them out. GET /admin/v1/decisions names the turns without a target"
)


def examine(
    gateway: RunningGateway, worker_key: str, tls: ssl.SSLContext, now: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """All findings, as they are made. Asks the gateway's admin API and the workers it names.

    tls: what https:// workers are verified by.
    """
    try:
        listed = gateway.get("/admin/v1/workers")
    except RemoteError as error:
        yield Finding("gateway", "fail", error.why, error.fix)
        return
    yield Finding("gateway", "ok", f"answers at {gateway.url}")
    workers: list[dict[str, Any]] = listed["workers"]
    # One of an earlier version does not say.
    for why in listed.get("refusals", ()):
        yield Finding("turns", "warn", why, _REFUSED)
    if not workers:
        yield Finding("workers", "fail", "none is registered", "moongate serve --worker URL, or POST one")
    headers = {"authorization": f"Bearer {worker_key}"} if worker_key else {}
    with httpx.Client(timeout=10.0, headers=headers, verify=tls, trust_env=False) as client:
        for worker in workers:
            yield from check_worker(worker, gateway, client, now)
            yield from check_leaving(worker)
    yield from check_prompts(gateway.get("/admin/v1/prompts")["models"])
    yield from check_block_sizes(workers)
    targets: list[dict[str, Any]] = gateway.get("/admin/v1/index")["targets"]
    yield from check_index(targets, workers)
    yield from check_windows(targets, workers)
    yield from check_pool(gateway.get("/admin/v1/pool"), targets, workers)
