"""The simulated worker over real sockets: what clients get, and what is published."""

import asyncio
import base64
import json
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from store.hashing import chain
from tests.simulated import SCHEME
from tests.workers.sim.running import CHAT, HELLO, MemoryPool, Running, running
from workers.sim.engine import Rates


async def test_the_openai_sdk_gets_text_streams_and_tool_calls(worker: Running) -> None:
    client = openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0)
    messages: Any = HELLO["messages"]
    whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=9)
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 9
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "read",
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
                    "required": ["path", "lines"],
                },
            },
        }
    ]
    called = await client.chat.completions.create(
        model="tiny", messages=messages, tools=tools, tool_choice="required"
    )
    assert called.choices[0].finish_reason == "tool_calls"
    call: Any = (called.choices[0].message.tool_calls or [])[0]
    assert json.loads(call.function.arguments) == {"path": "path", "lines": 1}
    stream = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=tools,
        stream=True,
        tool_choice={"type": "function", "function": {"name": "read"}},
    )
    deltas = [
        piece
        async for chunk in stream
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or []
        if piece.function is not None
    ]
    assert "".join(piece.function.arguments or "" for piece in deltas) == call.function.arguments
    assert [piece.function.name for piece in deltas if piece.function.name] == ["read"]
    await client.close()


async def test_the_same_prompt_and_seed_give_the_same_answer(worker: Running, tiny_model: Path) -> None:
    one, two = (await worker.chat()).json(), (await worker.chat()).json()
    assert one["choices"] == two["choices"]
    assert (await worker.chat(seed=7)).json()["choices"] != one["choices"]
    async with running(tiny_model, seed=5) as other:
        assert (await other.chat()).json()["choices"] != one["choices"]


async def test_an_answer_that_comes_back_in_a_prompt_has_its_tokens(worker: Running) -> None:
    answer = (await worker.chat(max_tokens=90, ignore_eos=True)).json()
    content = answer["choices"][0]["message"]["content"]
    messages = [*HELLO["messages"], {"role": "assistant", "content": content}, *HELLO["messages"]]
    following = (await worker.chat(messages=messages)).json()
    details = following["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == (answer["usage"]["total_tokens"] - 1) // 32 * 32 > 64


async def test_events_are_the_chain_of_prompt_and_answer(worker: Running) -> None:
    tokens = list(range(100, 170))
    answer = await worker.ids(tokens, 30, cache_salt="tenant", return_token_ids=True, session_id="s")
    everything = tokens + answer["choices"][0]["token_ids"]
    blocks = chain(everything, SCHEME, cache_salt="tenant")
    stored = await worker.events("BlockStored")
    assert [event["block_hashes"] for event in stored] == [list(blocks.keys[:2]), list(blocks.keys[2:3])]
    assert [event["parent_block_hash"] for event in stored] == [None, blocks.keys[1]]
    assert [token for event in stored for token in event["token_ids"]] == everything[:96]
    assert [event["extra_keys"] for event in stored] == [[["tenant"], None], [None]]
    assert {event["session_id"] for event in stored} == {"s"}


async def test_a_full_cache_forgets_the_oldest_tail_first(worker: Running) -> None:
    old, new = list(range(100, 1060)), list(range(2000, 3216))
    await worker.ids(old)
    await worker.ids(new)
    removed = await worker.events("BlockRemoved")
    keys = list(chain(old, SCHEME).keys)
    assert [event["block_hashes"] for event in removed] == [[key] for key in reversed(keys[-len(removed) :])]
    # 30 and 38 blocks, in 63.
    assert len(removed) == 5


async def test_pool_blocks_are_announced_once_and_loaded_by_another(tiny_model: Path) -> None:
    pool = MemoryPool()
    tokens = list(range(100, 200))
    keys = list(chain(tokens, SCHEME).keys)
    async with running(tiny_model, pool) as one, running(tiny_model, pool) as two:
        await one.ids(tokens)
        async with asyncio.timeout(30):
            while len(await one.events("BlockStored", "cpu")) < 3:
                await asyncio.sleep(0.01)
        announced = await one.events("BlockStored", "cpu")
        assert [event["block_hashes"] for event in announced] == [[key] for key in keys]
        assert [event["parent_block_hash"] for event in announced] == [None, *keys[:2]]
        assert all("extra_keys" not in event for event in announced)
        usage = (await two.ids(tokens))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 96
        assert await two.metric("vllm:external_prefix_cache_hits_total") == 96
        assert [event["block_hashes"] for event in await two.events("BlockStored")] == [keys]
        await two.idle()
        assert await two.events("BlockStored", "cpu") == []
        pool.broken = True
        usage = (await two.ids(tokens[:64] + tokens))["usage"]
        assert usage["prompt_tokens"] == 164


async def test_a_failed_load_is_computed(tiny_model: Path) -> None:
    pool = MemoryPool()
    async with running(tiny_model, pool) as one, running(tiny_model, pool) as two:
        await one.ids(list(range(100, 200)))
        await one.idle()
        pool.broken = True
        await two.ids(list(range(100, 200)))
        assert len(await two.events("BlockStored")) == 1


async def test_vllms_refusals(worker: Running) -> None:
    async def refused(path: str, content: Any) -> tuple[int, str, Any]:
        body = content if isinstance(content, str) else json.dumps(content)
        answer = await worker.http.post(path, content=body)
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        return answer.status_code, error["type"], error["param"]

    assert await refused(CHAT, {**HELLO, "model": "nope"}) == (404, "NotFoundError", "model")
    assert await refused(CHAT, {"model": "tiny"}) == (400, "Bad Request", "body.messages")
    assert await refused(CHAT, "{bad") == (400, "Bad Request", "body")
    assert await refused(CHAT, {**HELLO, "max_tokens": 0}) == (400, "BadRequestError", "max_tokens")
    assert await refused(CHAT, {**HELLO, "max_tokens": "x"}) == (400, "Bad Request", "body.max_tokens")
    assert await refused(CHAT, {**HELLO, "kv_transfer_params": {"prompt_token_ids": []}}) == (
        400,
        "BadRequestError",
        "kv_transfer_params.prompt_token_ids",
    )
    assert await refused("/v1/completions", {"model": "tiny", "prompt": [99999]}) == (
        400,
        "BadRequestError",
        None,
    )
    assert await refused("/v1/completions", {"model": "tiny", "prompt": list(range(1, 2001))}) == (
        400,
        "BadRequestError",
        "input_tokens",
    )
    assert (await worker.http.get("/nothing")).status_code == 404
    assert (await worker.http.get(CHAT)).status_code == 405
    await worker.idle()


@pytest.mark.parametrize("prompt", ["", [""], [[]], []])
async def test_an_empty_prompt_is_refused_and_the_next_one_served(worker: Running, prompt: Any) -> None:
    answer = await worker.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    assert (await worker.ids([1]))["usage"]["completion_tokens"] == 1
    await worker.idle()


async def test_forwarded_ids_take_the_place_of_the_prompt(worker: Running) -> None:
    ids = list(range(50, 130))
    answer = (await worker.chat(kv_transfer_params={"prompt_token_ids": ids})).json()
    assert answer["usage"]["prompt_tokens"] == 80
    (stored,) = await worker.events("BlockStored")
    assert stored["block_hashes"] == list(chain(ids, SCHEME).keys)


async def test_render_tokenize_and_detokenize_agree(worker: Running) -> None:
    rendered = (await worker.http.post(f"{CHAT}/render", json=HELLO)).json()["token_ids"]
    tokenized = (await worker.http.post("/tokenize", json=HELLO)).json()
    assert rendered == tokenized["tokens"]
    assert tokenized["count"] == len(rendered)
    text = (await worker.http.post("/detokenize", json={"model": "tiny", "tokens": rendered})).json()[
        "prompt"
    ]
    assert "hello" in text


async def test_every_prompt_and_choice_is_answered_and_stop_texts_end_one(worker: Running) -> None:
    body = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 5}
    answer = await worker.http.post("/v1/completions", json=body)
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert len(set(texts)) == 4
    streamed = await worker.http.post("/v1/completions", json={**body, "stream": True})
    pieces = [""] * 4
    for line in streamed.text.split("\n\n"):
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            pieces[choice["index"]] += choice["text"]
    assert pieces == texts
    stop = texts[0].split()[2]
    cut = (await worker.http.post("/v1/completions", json={**body, "stop": stop})).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == texts[0][: texts[0].index(stop)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything(worker: Running, stream: bool) -> None:
    body = {**HELLO, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    asking = [asyncio.create_task(worker.http.post(CHAT, json=body)) for _ in range(3)]
    async with asyncio.timeout(30):
        while await worker.metric("vllm:num_requests_running") < 3:
            await asyncio.sleep(0.01)
    assert (await worker.control("GET", "/load")).json() == {"server_load": 3}
    for task in asking:
        task.cancel()
    await worker.idle()
    assert await worker.metric("vllm:kv_cache_usage_perc") == 0
    assert (await worker.report())["ended"] == {"gone": 3, "done": (await worker.report())["ended"]["done"]}


async def test_requests_can_be_read_back_byte_for_byte(worker: Running) -> None:
    body = b'{ "model":"tiny" ,"prompt": "\xc3\xa9 \\u00e9",\n"max_tokens":1}'
    await worker.http.post("/v1/completions", content=body, headers={"X-Request-Id": "r-1", "X-Twice": "a"})
    seen = next(each for each in (await worker.report())["requests"] if each["path"] == "/v1/completions")
    assert base64.b64decode(seen["body_base64"]) == body
    assert ["x-request-id", "r-1"] in seen["headers"]
    assert (await worker.control("GET", f"/sim/requests/{seen['number']}/body")).content == body


async def test_answers_tell_the_time_as_real_ones_do(worker: Running) -> None:
    answer = await worker.chat()
    said = parsedate_to_datetime(answer.headers["date"]).timestamp()
    assert -2 < said - time.time() < 1
    assert answer.headers["server"] == "uvicorn"


async def test_hundreds_of_streams_at_once(tiny_model: Path) -> None:
    async with running(tiny_model, blocks=2000, rates=Rates(1e6, 0.05, 0.0001)) as worker:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=worker.url, limits=limits, timeout=30.0) as http:
            body = {**HELLO, "max_tokens": 8, "ignore_eos": True, "stream": True}
            answers = await asyncio.gather(*(http.post(CHAT, json={**body, "seed": n}) for n in range(200)))
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        assert len({answer.text.split('"content":')[2] for answer in answers}) > 100
        await worker.idle()
