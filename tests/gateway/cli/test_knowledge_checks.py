"""What the doctor says of sliding windows, of the pool's segments and of events."""

import pytest

from tests.gateway.cli.site import Site, examined


@pytest.mark.parametrize(
    ("retention", "result", "said"),
    [
        (0, "warn", "kept only where a prompt ends"),
        (64, "ok", "all of them"),
        (None, "ok", "all of them"),
        (1024, "ok", "every 1024 tokens"),
    ],
)
async def test_a_retention_interval_that_makes_shared_prefixes_useless_is_told(
    site: Site, retention: int | None, result: str, said: str
) -> None:
    site.slide(retention)
    (found,) = [f for f in await examined(site) if f.check == "sliding windows of w1"]
    assert found.result == result
    assert said in found.detail
    assert ("--prefix-cache-retention-interval 64" in found.fix) == (result == "warn")


@pytest.mark.parametrize("own", ["127.0.0.1:5559", "127.0.0.1"])
async def test_a_worker_in_service_whose_pool_segment_is_closed_is_told(site: Site, own: str) -> None:
    site.fleet.get("w1").segment = own
    site.pool.details["segments"][0]["status"] = "DRAINED"
    (told,) = [f for f in await examined(site) if f.result != "ok"]
    assert (told.check, told.result) == ("pool segment of w1", "warn")
    assert "stays closed (DRAINED) until its process starts anew" in told.detail
    assert "start its process anew" in told.fix


async def test_groups_that_hit_in_an_unknown_way_are_told(site: Site) -> None:
    site.index[0] = site.entry("w1").model_copy(update={"unproven_groups": [1]})
    found = {f.check: f.result for f in await examined(site)}
    assert found["KV groups of w1"] == "warn"


async def test_b066_a_pool_in_use_of_which_nobody_says_anything_is_not_called_ok(site: Site) -> None:
    site.pool.details["announced"] = 0
    site.index[0] = site.entry("w1").model_copy(update={"stream": "none"})
    found = {f.check: f for f in await examined(site)}
    assert found["pool events"].result == "warn"
    assert found["pool events"].fix == "start w1 with --kv-events-config"


async def test_workers_that_publish_are_not_told_to_after_a_restart_of_the_gateway(site: Site) -> None:
    site.pool.details["announced"] = 0
    found = {f.check: f for f in await examined(site)}["pool events"]
    assert (found.result, found.fix) == ("skip", "")
    assert "since this gateway started" in found.detail


async def test_b066_a_masters_own_events_are_to_be_followed(site: Site) -> None:
    assert "the master's events" not in {f.check for f in await examined(site)}
    site.pool.details["master_events"] = True
    found = {f.check: f for f in await examined(site)}["the master's events"]
    assert (found.result, "mooncake.events" in found.fix) == ("warn", True)
    events = {"state": "following", "why": "", "endpoint": "tcp://m:5557"}
    site.pool.details["events"] = events
    assert {f.check: f.result for f in await examined(site)}["the master's events"] == "ok"
    site.pool.details["events"] = events | {"state": "lost", "why": "batch 9 came after 7"}
    found = {f.check: f for f in await examined(site)}["the master's events"]
    assert (found.result, "batch 9 came after 7" in found.detail) == ("warn", True)
