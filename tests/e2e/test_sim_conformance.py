"""The simulated worker does what a real vLLM worker does with the same requests, as far as can be seen."""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from observation import Endpoints, Observation, observe

from store.hashing import HashScheme, chain
from tests.ports import ports
from workers.launch import sim, vllm
from workers.launch.mooncake import MooncakeMaster
from workers.launch.server import Server
from workers.launch.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK, BLOCKS, MODEL_LEN, STEP = 32, 256, 8000, 2048
SCHEME = HashScheme("sha256_cbor", BLOCK)
PORTS = ports(above=21_340)
CACHE = Path(".moongate/e2e/cache/vllm").absolute()


def tokens(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 8000) for _ in range(length)]


PROMPTS = {
    "short": tokens(100, 1),
    "longer": tokens(100, 1) + tokens(60, 2),
    "generates": tokens(60, 3),
    "exact": tokens(128, 4),
    "salted": tokens(70, 5),
    "many chunks": tokens(7000, 6),
    "evicting": tokens(1500, 7),
    "beyond": tokens(100, 1) + tokens(60, 2) + tokens(64, 8),
    "one of two": tokens(100, 9),
    "two of two": tokens(70, 10),
    "session": tokens(70, 11),
}


def completion(prompt: Any, output: int = 1, **more: Any) -> tuple[str, Any]:
    body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0, **more}
    return "/v1/completions", {"model": "tiny", **body}


def chat(text: str, **more: Any) -> tuple[str, Any]:
    messages = [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    return "/v1/chat/completions", {**body, **more}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def response(text: str, **more: Any) -> tuple[str, Any]:
    items = [{"role": "user", "content": text}]
    body = {"model": "tiny", "instructions": "Be brief. " * 30, "input": items, "max_output_tokens": 6}
    return "/v1/responses", {**body, "temperature": 0, **more}


def message(text: str, **more: Any) -> tuple[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "system": "Be brief. " * 30, "messages": messages, "max_tokens": 6}
    return "/v1/messages", {**body, "temperature": 0, **more}


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, str, Any]] = [
    ("cold", *completion(PROMPTS["short"])),
    ("warm", *completion(PROMPTS["short"])),
    ("longer", *completion(PROMPTS["longer"])),
    ("generates", *completion(PROMPTS["generates"], 40)),
    ("multiple of the block", *completion(PROMPTS["exact"], 2)),
    ("multiple of the block again", *completion(PROMPTS["exact"], 2)),
    ("salted", *completion(PROMPTS["salted"], cache_salt="tenant")),
    ("salted again", *completion(PROMPTS["salted"], cache_salt="tenant")),
    ("not salted", *completion(PROMPTS["salted"])),
    ("many chunks", *completion(PROMPTS["many chunks"])),
    ("evicts", *completion(PROMPTS["evicting"])),
    ("pulled", *completion(PROMPTS["longer"])),
    ("beyond the pulled", *completion(PROMPTS["beyond"])),
    ("batch", *completion([PROMPTS["one of two"], PROMPTS["two of two"]], 3)),
    ("session", *completion(PROMPTS["session"], session_id="s-1")),
    ("reported", *completion(PROMPTS["session"], vllm_xargs={"kv_cache_report_mode": "full"})),
    ("not read", *completion(PROMPTS["session"], prompt_logprobs=0)),
    ("completion stream", *completion(PROMPTS["short"], 5, **USAGE)),
    ("chat", *chat("What is a block?")),
    ("chat again", *chat("What is a block?")),
    ("chat stream", *chat("What is a chain?", **USAGE)),
    ("chat stream without usage", *chat("What is a chain?", stream=True)),
    ("chat with tools", *chat("Look!", tools=TOOLS, tool_choice="none")),
    ("forwarded ids", *chat("-", kv_transfer_params={"prompt_token_ids": PROMPTS["short"]})),
    ("response", *response("What is a pool?")),
    ("response again", *response("What is a pool?")),
    ("response stream", *response("What is a lease?", stream=True)),
    ("message", *message("What is a turn?")),
    ("message again", *message("What is a turn?")),
    ("message stream", *message("What is a worker?", stream=True)),
    (
        "count tokens",
        "/v1/messages/count_tokens",
        {"model": "tiny", "messages": [{"role": "user", "content": "Hm."}]},
    ),
    ("tokenize", "/tokenize", {"model": "tiny", "prompt": "some words"}),
    ("tokenize chat", "/tokenize", {**chat("Hm.")[1], "return_token_strs": True}),
    ("detokenize", "/detokenize", {"model": "tiny", "tokens": [300, 301]}),
    ("models", "/v1/models", None),
    ("version", "/version", None),
    ("load", "/load", None),
    ("health", "/health", None),
    ("unknown model", *completion([1], model="no")),
    ("no tokens", *completion([1], 0)),
    ("too many tokens", *completion([1], MODEL_LEN + 1)),
    ("too long", *completion(tokens(MODEL_LEN, 1))),
    ("out of vocabulary", *completion([99_999])),
    ("bad salt", *completion([1], cache_salt="a@b")),
    ("no prompt", "/v1/completions", {"model": "tiny"}),
    ("no messages", "/v1/chat/completions", {"model": "tiny"}),
    ("no input", "/v1/responses", {"model": "tiny"}),
    ("unknown response", "/v1/responses/resp_0", None),
    ("goes on from no response", *response("And?", previous_response_id="resp_0")),
    ("no limit", "/v1/messages", {"model": "tiny", "messages": []}),
    ("message for an unknown model", *message("Hm.", model="no")),
    ("message that asks for too much", *message("Hm.", max_tokens=MODEL_LEN + 1)),
    ("bad ids", *chat("-", kv_transfer_params={"prompt_token_ids": []})),
    ("unknown path", "/nothing", None),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observations(
    vllm_python: Path, tmp_path_factory: Any
) -> AsyncIterator[tuple[Observation, Observation]]:
    """The same requests at a real and at a simulated worker, one after the other on one empty pool."""
    home = tmp_path_factory.mktemp("conformance")
    model = make_tiny_model(home / "tiny")
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=home / "master.log")
    await master.start()
    real_spec = vllm.VllmWorkerSpec(
        python=vllm_python,
        model=str(model),
        directory=home,
        cache=CACHE,
        port=next(PORTS),
        events_port=next(PORTS),
        replay_port=next(PORTS),
        segment_port=next(PORTS),
        mooncake=master.address,
        blocks=BLOCKS,
        max_model_len=MODEL_LEN,
        extra_args=(f"--max-num-batched-tokens={STEP}",),
    )
    (home / vllm.MOONCAKE_CONFIG).write_text(json.dumps(vllm.mooncake_config(real_spec)))
    sim_spec = sim.SimWorkerSpec(
        python=Path(sys.executable),
        model=str(model),
        port=next(PORTS),
        events_port=next(PORTS),
        replay_port=next(PORTS),
        segment_port=next(PORTS),
        mooncake=master.address,
        blocks=BLOCKS,
        extra_args=(f"--max-model-len={MODEL_LEN}", f"--max-num-batched-tokens={STEP}"),
    )
    found: list[Observation] = []
    try:
        for spec, (argv, env), host in (
            (real_spec, vllm.command(real_spec), "[::ffff:127.0.0.1]"),
            (sim_spec, sim.command(sim_spec), "127.0.0.1"),
        ):
            found.append(await observed(spec, argv, env, host, home, master))
        yield found[0], found[1]
    finally:
        await master.stop()


async def observed(
    spec: vllm.VllmWorkerSpec | sim.SimWorkerSpec,
    argv: list[str],
    env: dict[str, str],
    host: str,
    home: Path,
    master: MooncakeMaster,
) -> Observation:
    async with httpx.AsyncClient(base_url=master.http_url) as http:
        (await http.post("/api/v1/remove_all?force=true")).raise_for_status()
    inherited = {key: value for key, value in os.environ.items() if key not in vllm.UNSET}
    inherited["PYTHONPATH"] = "" if isinstance(spec, vllm.VllmWorkerSpec) else str(Path.cwd())
    server = Server(
        name="worker",
        argv=argv,
        env=inherited | env,
        cwd=home,
        log=home / f"{spec.port}.log",
        ready_url=f"{spec.url}/health",
        ready_s=180.0,
    )
    await server.start()
    try:
        endpoints = (f"tcp://{host}:{spec.events_port}", f"tcp://{host}:{spec.replay_port}")
        pids = server._process.pid, master.process.pid
        assert None not in pids
        watched = Endpoints(pids, spec.url, *endpoints, master.http_url)
        return await asyncio.to_thread(observe, watched, REQUESTS)
    finally:
        await server.stop(5.0)


def named_keys() -> dict[int, str]:
    """What each block of the prompts is, by its key; blocks of answers, which engines draw, have no name."""
    names: dict[int, str] = {}
    for prompt, ids in PROMPTS.items():
        for salt in (None, "tenant"):
            for place, key in enumerate(chain(ids, SCHEME, cache_salt=salt).keys):
                names.setdefault(key, f"{prompt} {place} {salt or ''}")
    return names


KEYS = named_keys()


def comparable(event: dict[str, Any]) -> dict[str, Any]:
    """An event with names in place of hashes, and without tokens an engine has drawn."""
    found = dict(event)
    found["block_hashes"] = [KEYS.get(key, "answer") for key in event.get("block_hashes", [])]
    parent = event.get("parent_block_hash")
    found["parent_block_hash"] = None if parent is None else KEYS.get(parent, "answer")
    ids = event.get("token_ids", [])
    found["token_ids"] = len(ids) if "answer" in found["block_hashes"] else ids
    return found


def of_medium(observation: Observation, medium: str) -> dict[str, list[dict[str, Any]]]:
    """Events by request. GPU and pool events are told apart: when a put is done depends on the machine."""
    return {
        step.name: [comparable(event) for event in step.events if event.get("medium") == medium]
        for step in observation.steps
    }


async def test_the_same_blocks_are_stored_and_removed_in_the_same_order(
    observations: tuple[Observation, Observation],
) -> None:
    real, simulated = (of_medium(each, "GPU") for each in observations)
    assert real["evicts"][0]["type"] == "BlockRemoved"
    for name in real:
        assert simulated[name] == real[name], name


async def test_the_same_blocks_are_announced_in_the_pool(
    observations: tuple[Observation, Observation],
) -> None:
    real, simulated = (of_medium(each, "cpu") for each in observations)
    assert len(real["many chunks"]) == 7000 // BLOCK
    for name in real:
        assert simulated[name] == real[name], name


async def test_usage_and_counters_agree(observations: tuple[Observation, Observation]) -> None:
    for real, simulated in zip(*(each.steps for each in observations), strict=True):
        assert (simulated.name, simulated.usage) == (real.name, real.usage)
        assert (simulated.name, simulated.metrics) == (real.name, real.metrics)
    pulled = next(step for step in observations[0].steps if step.name == "pulled")
    assert pulled.metrics["vllm:external_prefix_cache_hits_total"] == 128


async def test_answers_have_the_same_status_and_fields(observations: tuple[Observation, Observation]) -> None:
    for real, simulated in zip(*(each.steps for each in observations), strict=True):
        assert (simulated.name, simulated.status) == (real.name, real.status)
        assert (simulated.name, simulated.shape) == (real.name, real.shape)


async def test_pool_objects_have_the_same_names(observations: tuple[Observation, Observation]) -> None:
    real, simulated = observations
    assert len(real.keys) > 250
    assert simulated.keys == real.keys


async def test_replay_gives_every_event_again(observations: tuple[Observation, Observation]) -> None:
    for observation in observations:
        live = [event for step in observation.steps for event in step.events]
        assert observation.replayed == live
