"""What the doctor says of a worker that is down, fails, drains, or has another clock."""

import time
from dataclasses import dataclass
from typing import cast

import pytest
from msgspec.structs import replace

from gateway.knowledge.drains import Drains
from store.mooncake_http import DrainJob
from store.pool import PoolView
from tests.gateway.cli.site import Site, examined


async def test_a_worker_that_is_up_and_fails_every_turn_is_told(site: Site) -> None:
    for _ in range(7):
        site.fleet.failed(site.fleet.get("w1"), "500")
    (told,) = [f for f in await examined(site) if f.result != "ok"]
    assert (told.check, told.result) == ("turns of w1", "warn")
    assert told.detail.startswith("failed 7 turns in a row (the last: 500): gets none for ")
    assert "look at the worker's log" in told.fix


async def test_a_worker_that_fails_some_of_its_turns_is_told_as_one_that_still_gets_them(site: Site) -> None:
    worker = site.fleet.get("w1")
    for _ in range(3):
        site.fleet.failed(worker, "500")
        worker.breaker.succeeded()
    (told,) = [f for f in await examined(site) if f.result != "ok"]
    assert (told.check, told.result) == ("turns of w1", "warn")
    assert told.detail == "failed 3 of its last 6 turns (the last: 500)"
    assert "it still gets turns" in told.fix


async def test_turns_that_are_refused_are_told(site: Site) -> None:
    site.refusals.append("turns were refused, the last 3 s ago, with 429 for want of room: limits.requests")
    (told,) = [f for f in await examined(site) if f.result != "ok"]
    assert (told.check, told.result, told.detail) == ("turns", "warn", site.refusals[0])
    assert "raise that limit" in told.fix


async def test_a_worker_that_is_cordoned_is_told(site: Site) -> None:
    site.fleet.cordon("w1", True)
    told = [f for f in await examined(site) if f.result != "ok"]
    assert [(f.check, f.result, f.detail) for f in told] == [
        ("cordon of w1", "warn", "is cordoned and gets no new turns")
    ]
    assert 'PATCH /admin/v1/workers/w1 with {"cordoned": false}' in told[0].fix


@dataclass(frozen=True)
class DrainingPool:
    """As much of a pool as a drain takes."""

    job: DrainJob

    async def drain(self, segment: str) -> str:
        return self.job.job

    async def drained(self, job: str) -> DrainJob:
        return self.job


@pytest.mark.parametrize(
    ("status", "said", "fix"),
    [
        (
            "WAITING",
            "0 active, 4 blocked, 0 failed; blocked objects were read",
            "wait, or take the worker down",
        ),
        ("RUNNING", "on its way to the others': RUNNING, 3 moved, 1 active", '{"drain": false}'),
        ("SUCCEEDED", "was moved (3 moved", "start its process anew"),
        (
            "FAILED",
            "was not all moved: FAILED, 3 moved, 1 active, 0 blocked, 2 failed; f",
            '{"drain": true}',
        ),
    ],
)
async def test_a_workers_drain_is_told(site: Site, status: str, said: str, fix: str) -> None:
    drain = DrainJob("job", status, moved=3, failed=2, blocked=0, active=1, moved_bytes=9, message="f")
    if status == "WAITING":
        drain = replace(drain, status="RUNNING", failed=0, blocked=4, active=0)
    site.drains = Drains(cast(PoolView, DrainingPool(drain)))
    worker = site.fleet.get("w1")
    worker.segment = "127.0.0.1:5559"
    await site.drains.start(worker)
    (found,) = [f for f in await examined(site) if f.check == "drain of w1"]
    assert found.result == "warn"
    assert said in found.detail
    assert fix in found.fix


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("/v1/models answered 401: worker API key missing or wrong", "workers.api_key"),
        (
            "connection refused",
            "start the worker there, or take it off the list (DELETE /admin/v1/workers/w1",
        ),
        ("its certificate is not trusted: self-signed certificate", "set workers.ca_file"),
        ("its certificate is not trusted: certificate has expired", "renew it"),
        (
            "its certificate is not trusted: IP address mismatch, certificate is not valid for '127.0.0.1'",
            "register the worker by a name that its certificate is for",
        ),
        ("TLS failed: tlsv1 alert protocol version", "openssl s_client -connect"),
        ("/health: what answers there is not HTTP; it may be https", "register the worker as https://127.0"),
        ("its name has no address: Name or service not known", "name can't be looked up"),
        ("asleep", "/w1/wake_up"),
        ("/v1/models answered 500", "/w1/v1/models"),
        ("not probed yet", "/w1/health"),
    ],
)
async def test_what_helps_a_worker_follows_from_why_it_is_down(site: Site, reason: str, fix: str) -> None:
    worker = site.fleet.get("w1")
    worker.url += "/w1"
    site.fleet.mark_down(worker, reason)
    assert fix in {f.check: f for f in await examined(site)}["worker w1"].fix


async def test_a_worker_without_tls_is_to_be_registered_by_the_url_that_it_answers_at(site: Site) -> None:
    worker = site.fleet.get("w1")
    worker.url = "https://127.0.0.1:8001"
    site.fleet.mark_down(worker, "it speaks no TLS there, and its URL is https")
    fix = {f.check: f for f in await examined(site)}["worker w1"].fix
    assert fix == "register the worker as http://127.0.0.1:8001"


async def test_a_clock_that_is_off(site: Site) -> None:
    findings = await examined(site, now=lambda: time.time() - 60)
    (clock,) = [f for f in findings if f.check == "clock of w1"]
    assert clock.result == "fail"
    assert "+6" in clock.detail or "+5" in clock.detail
