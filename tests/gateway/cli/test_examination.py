"""The doctor against answers of the real admin app and a small live worker: each fault, and none."""

from collections.abc import Callable
from dataclasses import asdict

import pytest

from gateway.admin.prompts import DifferenceView
from store.pool_status import LayoutStatus
from tests.gateway.cli.site import Site, examined


async def test_a_healthy_site_has_no_failure(site: Site) -> None:
    findings = await examined(site)
    assert {f.result for f in findings} == {"ok"}, [str(f) for f in findings]
    checks = {f.check for f in findings}
    assert {
        "prompts of m",
        "gateway",
        "worker w1",
        "clock of w2",
        "tokens of m on w1",
        "block size of m",
        "KV events of w2",
        "hashes of w1",
        "pool",
    } <= checks


def break_worker(site: Site) -> None:
    site.fleet.mark_down(site.fleet.get("w1"), "/health timed out")


def break_tokens(site: Site) -> None:
    site.explained.off = 1


def break_template(site: Site) -> None:
    site.explained.unrenderable = "no_template"


def break_block_size(site: Site) -> None:
    site.add("w3", site.fleet.get("w1").url, block_size=16)


def hide_block_size(site: Site) -> None:
    site.add("w3", site.fleet.get("w1").url, block_size=0)


def break_stream(site: Site) -> None:
    site.index[0] = site.entry("w1").model_copy(update={"stream": "degraded"})


def demote(site: Site) -> None:
    site.index[1] = site.entry("w2").model_copy(update={"trust": "degraded", "why": "of 2048 tokens"})


def stop_events(site: Site) -> None:
    site.index[0] = site.entry("w1").model_copy(update={"stream": "none"})


def break_hashes(site: Site) -> None:
    site.index[1] = site.entry("w2").model_copy(update={"hash_mismatch": "sha256 fits"})


def break_prompts(site: Site) -> None:
    found = DifferenceView(
        worker="w2", api="chat", position=7, ours=5, our_text="cat", theirs=-1, their_text=""
    )
    site.prompts = site.prompts.model_copy(update={"differences": [found]})


def lose_the_tokenizer(site: Site) -> None:
    site.prompts = site.prompts.model_copy(update={"made": "nowhere", "why": "no tokenizer.json"})


def break_pool(site: Site) -> None:
    details = {"reason": "refused", "places": ["m:9003", "m:1"]}
    site.pool = site.pool.model_copy(update={"degraded": True, "details": details})


def misname_the_pool(site: Site) -> None:
    site.pool.details["layouts"] = [
        asdict(LayoutStatus("m", (0,), 1, 1, 1, 1, found=False, missed=True)),
    ]


def remove_workers(site: Site) -> None:
    site.fleet.remove("w1")
    site.fleet.remove("w2")


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        (break_worker, "worker w1", "/health timed out"),
        (break_tokens, "tokens of m on w1", "the gateway counts 11, the worker 10"),
        (break_template, "tokens of m on w1", "no_template"),
        (break_block_size, "block size of m", "w3 16"),
        (hide_block_size, "block size of m", "not reported by w3"),
        (break_stream, "KV events of w1", "degraded"),
        (demote, "index of w2", "of 2048 tokens"),
        (stop_events, "KV events of w1", "none are published"),
        (break_hashes, "hashes of w2", "sha256 fits"),
        (break_prompts, "prompts of m", "chat: token 7 is 5 'cat', on w2 the end"),
        (lose_the_tokenizer, "prompts of m", "no tokenizer.json"),
        (break_pool, "pool", "can't be asked (refused); its admin HTTP was tried at m:9003, m:1"),
        (misname_the_pool, "pool keys of m", "none is there by this name"),
        (remove_workers, "workers", "none is registered"),
    ],
)
async def test_each_fault_is_found_and_says_what_to_change(
    site: Site, fault: Callable[[Site], None], check: str, said: str
) -> None:
    fault(site)
    failed = {f.check: f for f in await examined(site) if f.result == "fail"}
    assert said in failed[check].detail
    assert failed[check].fix


async def test_a_wrong_token_is_told_with_how_to_give_the_right_one(site: Site) -> None:
    (finding,) = await examined(site, token="wrong")  # noqa: S106
    assert finding.result == "fail"
    assert "401" in finding.detail
    assert "--admin-token" in finding.fix
    assert "serve" not in finding.fix
