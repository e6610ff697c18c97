"""Checks of each worker: whether it serves, what an operator began with it, its clock, its tokens."""

import json
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from gateway.cli.finding import Finding
from gateway.cli.remote import RemoteError, RunningGateway
from gateway.knowledge.drains import BLOCKED
from workers.connecting import why_not

# The Date header has a resolution of 1 s, and an answer may take a while.
_CLOCK_TOLERANCE_S = 5.0


def check_worker(
    worker: dict[str, Any], gateway: RunningGateway, client: httpx.Client, now: Callable[[], float]
) -> Iterator[Finding]:
    """Whether it serves, and, asked from here, its clock and how it counts tokens."""
    name = worker["name"]
    check = f"worker {name}"
    if worker["state"] != "up":
        yield Finding(check, "fail", f"is {worker['state']}: {worker['reason']}", _worker_fix(worker))
        return
    yield Finding(check, "ok", f"is up, serves {', '.join(m['id'] for m in worker['models']) or 'no model'}")
    if worker["failing"]:
        fix = f"look at the worker's log, or send a turn to {worker['url']} itself"
        if worker["breaker"] == "closed":
            fix += "; it still gets turns (workers.breaker_failures, workers.breaker_share)"
        else:
            fix += (
                "; once one is answered well it is back. Only where nobody else is left does it get turns "
                "meanwhile"
            )
        yield Finding(f"turns of {name}", "warn", worker["failing"], fix)
    try:
        answer = client.get(worker["url"] + "/health")
    except httpx.HTTPError as error:
        why = why_not(error) or type(error).__name__
        detail = f"not reachable from here ({why}); its tokens and clock were not checked"
        yield Finding(check, "skip", detail)
        return
    yield _clock(name, answer.headers.get("date", ""), now())
    for model in served(worker):
        yield _tokens(worker, model["id"], gateway, client)


def check_leaving(worker: dict[str, Any]) -> Iterator[Finding]:
    """What an operator has begun, and may have forgotten."""
    name, drain = worker["name"], worker["drain"]
    back = f"PATCH /admin/v1/workers/{name} with"
    if worker["cordoned"]:
        fix = f'to put it back into service: {back} {{"cordoned": false}}'
        yield Finding(f"cordon of {name}", "warn", "is cordoned and gets no new turns", fix)
    if drain is None:
        return
    check = f"drain of {name}"
    counts = ", ".join(f"{drain[kind]} {kind}" for kind in ("moved", "active", "blocked", "failed"))
    detail = f"its share of the pool is on its way to the others': {drain['status']}, {counts}"
    if drain["status"] in ("FAILED", "CANCELED"):
        detail = f"its share of the pool was not all moved: {drain['status']}, {counts}"
        detail += f"; {drain['message']}" if drain["message"] else ""
        yield Finding(check, "warn", detail, f'to begin it again: {back} {{"drain": true}}')
    elif drain["status"] == "SUCCEEDED":
        detail = f"its share of the pool was moved ({counts}), and stays closed until its process starts anew"
        yield Finding(check, "warn", detail, "take the worker down, or start its process anew")
    else:
        fix = f'to stop it: {back} {{"drain": false}}'
        if drain["blocked"] and not drain["active"]:
            detail += f"; {BLOCKED}"
            fix = f"wait, or take the worker down: what it still holds is computed anew then; {fix}"
        yield Finding(check, "warn", detail, fix)


def _worker_fix(worker: dict[str, Any]) -> str:
    """What helps a worker that is not up, by the reason that its probe gives."""
    reason, url = worker["reason"], worker["url"]
    if "API key" in reason:
        return "set workers.api_key (MOONGATE_WORKERS__API_KEY) to the key that the worker was started with"
    if "certificate" in reason:
        if "expired" in reason:
            return "renew it, or set the clock of the gateway's machine"
        if "mismatch" in reason:
            return "register the worker by a name that its certificate is for, or give it one for this name"
        return "set workers.ca_file to the authority that signed it, or to itself if it signed itself"
    if "speaks no TLS" in reason or "may be https" in reason:
        other = "http" if url.startswith("https:") else "https"
        return f"register the worker as {other}:{url.partition(':')[2]}"
    if "TLS" in reason:
        return f"look at the worker's log, and at what TLS it speaks: openssl s_client -connect {url[8:]}"
    if reason == "connection refused":
        off = f"DELETE /admin/v1/workers/{worker['name']}, and workers.urls"
        return f"nothing listens at {url}: start the worker there, or take it off the list ({off})"
    if "has no address" in reason:
        return (
            "this name can't be looked up on the gateway's machine (getent hosts NAME): mend the name or its "
            "name server, or register the worker by its address"
        )
    if reason == "asleep":
        return f"wake it: POST {url}/wake_up"
    path = reason.split()[0].rstrip(":") if reason.startswith("/") else "/health"
    return f"look at {url}{path} and at the worker's log"


def served(worker: dict[str, Any]) -> list[dict[str, Any]]:
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
