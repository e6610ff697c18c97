"""Checks of every hop of a running gateway, each with what is wrong and what to change."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

from gateway.cli.remote import RemoteError, RunningGateway
from gateway.prompts.parity import shown

Result = Literal["ok", "warn", "fail", "skip"]

# The Date header has a resolution of 1 s, and an answer may take a while.
_CLOCK_TOLERANCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. fix: what to change, if anything. warn: it works, but costs cache hits.

    A skip could not be decided. Only a fail fails the whole.
    """

    check: str
    result: Result
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.result:<4}  {self.check}: {self.detail}"
        return f"{text}\n      fix: {self.fix}" if self.fix else text


def examine(
    gateway: RunningGateway, worker_key: str, now: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """All findings, as they are made. Asks the gateway's admin API and the workers it names."""
    try:
        workers: list[dict[str, Any]] = gateway.get("/admin/v1/workers")["workers"]
    except RemoteError as error:
        yield Finding("gateway", "fail", error.why, error.fix)
        return
    yield Finding("gateway", "ok", f"answers at {gateway.url}")
    if not workers:
        yield Finding("workers", "fail", "none is registered", "moongate serve --worker URL, or POST one")
    headers = {"authorization": f"Bearer {worker_key}"} if worker_key else {}
    with httpx.Client(timeout=10.0, headers=headers, trust_env=False) as client:
        for worker in workers:
            yield from _worker(worker, gateway, client, now)
    yield from _prompts(gateway.get("/admin/v1/prompts")["models"])
    yield from _block_sizes(workers)
    targets: list[dict[str, Any]] = gateway.get("/admin/v1/index")["targets"]
    yield from _index(targets, workers)
    yield from _windows(targets, workers)
    yield from _pool(gateway.get("/admin/v1/pool"), _silent(targets, workers))


def _worker(
    worker: dict[str, Any], gateway: RunningGateway, client: httpx.Client, now: Callable[[], float]
) -> Iterator[Finding]:
    name = worker["name"]
    check = f"worker {name}"
    if worker["state"] != "up":
        yield Finding(check, "fail", f"is {worker['state']}: {worker['reason']}", _worker_fix(worker))
        return
    yield Finding(check, "ok", f"is up, serves {', '.join(m['id'] for m in worker['models']) or 'no model'}")
    try:
        answer = client.get(worker["url"] + "/health")
    except httpx.HTTPError as error:
        detail = f"not reachable from here ({type(error).__name__}); its tokens and clock were not checked"
        yield Finding(check, "skip", detail)
        return
    yield _clock(name, answer.headers.get("date", ""), now())
    for model in _served(worker):
        yield _tokens(worker, model["id"], gateway, client)


def _worker_fix(worker: dict[str, Any]) -> str:
    """What helps a worker that is not up, by the reason that its probe gives."""
    reason, url = worker["reason"], worker["url"]
    if "API key" in reason:
        return "set workers.api_key (MOONGATE_WORKERS__API_KEY) to the key that the worker was started with"
    if reason.endswith("ConnectError") or reason == "connection refused":
        off = f"DELETE /admin/v1/workers/{worker['name']}, and workers.urls"
        return f"nothing listens at {url}: start the worker there, or take it off the list ({off})"
    if reason == "asleep":
        return f"wake it: POST {url}/wake_up"
    path = reason.split()[0].rstrip(":") if reason.startswith("/") else "/health"
    return f"look at {url}{path} and at the worker's log"


def _served(worker: dict[str, Any]) -> list[dict[str, Any]]:
    """The models of a worker that is up; adapters share their base's tokenizer and blocks."""
    models: list[dict[str, Any]] = worker["models"] if worker["state"] == "up" else []
    return [model for model in models if not model["parent"]]


def _clock(name: str, date: str, now: float) -> Finding:
    check = f"clock of {name}"
    try:
        ahead = parsedate_to_datetime(date).timestamp() - now
    except (TypeError, ValueError):
        return Finding(check, "skip", "the worker sends no Date")
    if abs(ahead) <= _CLOCK_TOLERANCE_S:
        return Finding(check, "ok", f"within {_CLOCK_TOLERANCE_S:.0f} s of this machine's")
    return Finding(check, "fail", f"{ahead:+.0f} s off this machine's", "synchronise the clocks (NTP)")


_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_TURNS = [
    {"role": "system", "content": "You are careful.\n\n  Über alles: 你好 🌙"},
    {"role": "user", "content": [{"type": "text", "text": "Read"}, {"type": "text", "text": "a.txt"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "moon\n"},
    {"role": "user", "content": "And now?"},
]
# Bodies that a template or tokenizer set up wrongly renders to another length.
_PROBES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("text", "/v1/completions", {"prompt": "The moon, 你好 🌙.\n  Two spaces."}),
    ("chat", "/v1/chat/completions", {"messages": [_TURNS[0], _TURNS[4]]}),
    ("chat with tools", "/v1/chat/completions", {"messages": _TURNS, "tools": [_TOOL]}),
)


def _tokens(worker: dict[str, Any], model: str, gateway: RunningGateway, client: httpx.Client) -> Finding:
    """The gateway's count of prompt tokens against the worker's own, for each probe."""
    check = f"tokens of {model} on {worker['name']}"
    counts: list[str] = []
    for name, api, body in _PROBES:
        body = {"model": model, **body}
        try:
            answer = client.post(worker["url"] + "/tokenize", json=body)
            theirs = int(answer.raise_for_status().json()["count"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return Finding(check, "skip", f"the worker's /tokenize does not answer ({type(error).__name__})")
        try:
            view = gateway.explain(json.dumps(body).encode(), api)
        except RemoteError as error:
            return Finding(check, "fail", f"{name}: {error}")
        if view["unrenderable"]:
            fix = f'set tokenizer in [models."{model}"] to a directory or name this machine can load'
            return Finding(check, "fail", f"{name}: the gateway cannot tell ({view['unrenderable']})", fix)
        if view["prompt_tokens"] != theirs:
            detail = f"{name}: the gateway counts {view['prompt_tokens']}, the worker {theirs}"
            return Finding(check, "fail", detail, f'[models."{model}"] tokenizer must be the worker\'s own')
        counts.append(f"{name} {theirs}")
    return Finding(check, "ok", f"same count: {', '.join(counts)}")


def _prompts(models: list[dict[str, Any]]) -> Iterator[Finding]:
    """Token by token, as the gateway itself compared them with what workers render."""
    for view in models:
        model = view["model"]
        check = f"prompts of {model}"
        for found in view["differences"]:
            ours = shown(found["ours"], found["our_text"])
            theirs = shown(found["theirs"], found["their_text"])
            detail = f"{found['api']}: token {found['position']} is {ours}, on {found['worker']} {theirs}"
            fix = f'[models."{model}"] tokenizer must be the worker\'s own; until then workers render them'
            yield Finding(check, "fail", detail, fix)
        if view["made"] == "nowhere":
            fix = (
                f'set tokenizer in [models."{model}"] to one this machine can load, or prompt.source to auto'
            )
            yield Finding(check, "fail", f"not known: {view['why']}", fix)
        elif view["made"] != "here":
            yield Finding(check, "skip", f"made {view['made']}: {view['why']}".rstrip(": "))
        elif not view["differences"]:
            agreed = ", ".join(sorted(view["agreed"]))
            yield Finding(
                check, "ok", f"made here; workers render the same tokens: {agreed or 'none asked yet'}"
            )


def _block_sizes(workers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Workers of one model must cut blocks alike, or they can't share the pool."""
    sizes: dict[str, dict[str, int]] = {}
    for worker in workers:
        for model in _served(worker):
            sizes.setdefault(model["id"], {})[worker["name"]] = worker["block_size"]
    for model, by_worker in sizes.items():
        check = f"block size of {model}"
        if not all(by_worker.values()):
            silent = ", ".join(name for name, size in by_worker.items() if not size)
            yield Finding(check, "fail", f"not reported by {silent}", f'set block_size in [models."{model}"]')
        elif len(set(by_worker.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in by_worker.items())
            yield Finding(check, "fail", f"differs: {listed}", "start all workers with the same --block-size")
        else:
            yield Finding(check, "ok", f"{next(iter(by_worker.values()))} tokens")


_INDEX_FIX = (
    "compare with series and mismatches of /admin/v1/audit; it counts in full once answers agree again"
)


def _index(targets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Iterator[Finding]:
    up = _targets_up(workers)
    for target in targets:
        name = target["target"]
        if name not in up:
            continue
        events, hashes = f"KV events of {name}", f"hashes of {name}"
        if target["stream"] == "exact":
            yield Finding(events, "ok", f"{target['batches']} batches, {target['gaps']} gaps")
        elif target["stream"] == "none":
            fix = "start the worker with --kv-events-config; `moongate worker --dry-run` prints it"
            yield Finding(events, "fail", "none are published", fix)
        else:
            detail = f"{target['stream']}, {target['gaps']} gaps, {target['garbage']} undecodable"
            detail += f"; {target['why']}" if target["why"] else ""
            yield Finding(events, "fail", detail, "is the publisher's port reachable from the gateway?")
        if target["stream"] == "exact" and target["why"]:
            yield Finding(f"index of {name}", "fail", target["why"], _INDEX_FIX)
        if target["hash_mismatch"]:
            fix = "set hash_algo and hash_seed of the model to what the worker uses"
            yield Finding(hashes, "fail", target["hash_mismatch"], fix)
        elif any(target["blocks"].values()):
            yield Finding(hashes, "ok", "the worker's block hashes are those the gateway computes")
        else:
            yield Finding(
                hashes, "skip", "no block has been announced yet; send a turn of a few blocks first"
            )


def _targets_up(workers: list[dict[str, Any]]) -> set[str]:
    return {target["name"] for worker in workers if worker["state"] == "up" for target in worker["targets"]}


def _silent(targets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> list[str]:
    """Targets of workers that are up and publish no KV events."""
    up = _targets_up(workers)
    return [each["target"] for each in targets if each["stream"] == "none" and each["target"] in up]


def _windows(targets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Models of which some layers see a sliding window only, or remember in another way."""
    entries = {target["target"]: target for target in targets}
    for worker in workers:
        for entry in [entries[t["name"]] for t in worker["targets"] if t["name"] in entries][:1]:
            check, needs = f"sliding windows of {worker['name']}", entry["windows"].values()
            if entry["unproven_groups"]:
                detail = f"KV groups {entry['unproven_groups']} hit in a way that is not known: no credit"
                yield Finding(f"KV groups of {worker['name']}", "warn", detail)
            if not needs:
                continue
            step = max(needs) * worker["block_size"]
            if worker["retention"] == 0:
                detail = (
                    "kept only where a prompt ends: prompts that share a beginning, and answers that a "
                    "conversation goes on from, are computed anew"
                )
                fix = f"start the worker with --prefix-cache-retention-interval {step}"
                yield Finding(check, "warn", detail, fix)
            elif worker["retention"] is None or worker["retention"] <= step:
                yield Finding(check, "ok", "all of them are kept")
            else:
                detail = f"kept every {worker['retention']} tokens: what prompts share hits up to there"
                yield Finding(check, "ok", detail)


def _pool(pool: dict[str, Any], silent: list[str]) -> Iterator[Finding]:
    if not pool["configured"]:
        yield Finding("pool", "skip", "not configured (mooncake.master)")
        return
    if pool["degraded"]:
        details = pool["details"]
        detail = f"the master at {pool['master']} can't be asked ({details['reason']})"
        detail += f"; its admin HTTP was tried at {', '.join(details['places'])}"
        fix = "is the master up, and mooncake.http_port the port of its admin HTTP (its --metrics_port)?"
        yield Finding("pool", "fail", detail, fix)
        return
    yield Finding("pool", "ok", f"the master at {pool['master']} answers")
    details = pool["details"]
    if details["turns"] and not details["announced"]:
        yield _pool_events(silent)
    yield from _master_events(details)
    for layout in details["layouts"]:
        check = f"pool keys of {layout['name']}"
        if layout["found"]:
            ranks = [f"{layout[f'{kind}_ranks']} {kind}" for kind in ("tp", "pp", "pcp", "dcp")]
            groups = ", ".join(map(str, layout["groups"]))
            yield Finding(check, "ok", f"found; ranks: {', '.join(ranks)}; KV groups: {groups}")
        elif layout["missed"]:
            fix = "cache_prefix of the model must be that of the workers' kv_connector_extra_config"
            yield Finding(check, "fail", "workers announced blocks, but none is there by this name", fix)
        else:
            yield Finding(check, "skip", "no turn has found a block yet")


def _pool_events(silent: list[str]) -> Finding:
    """Why no worker has said that it stored a block; silent: those that publish nothing."""
    check, detail = "pool events", "no worker has said since this gateway started that it stored a block"
    if silent:
        fix = f"start {', '.join(silent)} with --kv-events-config"
        return Finding(check, "warn", f"{detail}: what is new there is found by asking alone", fix)
    detail += ": nothing to do where nothing new was stored; through MultiConnector vLLM never says"
    return Finding(check, "skip", detail)


def _master_events(details: dict[str, Any]) -> Iterator[Finding]:
    check, events = "the master's events", details["events"]
    if events is None and details["master_events"]:
        fix = "set mooncake.events to its kv_events_bind_endpoint, and turns need not ask"
        yield Finding(check, "warn", "published and not followed", fix)
    elif events is not None and events["state"] == "following":
        yield Finding(check, "ok", f"followed at {events['endpoint']}")
    elif events is not None:
        why = events["why"] or "not connected"
        fix = "is mooncake.events the master's kv_events_bind_endpoint, and kv_events_emit_object_key on?"
        yield Finding(check, "warn", f"not relied on: {why}", fix)
