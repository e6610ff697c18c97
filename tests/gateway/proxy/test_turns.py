"""The way of a turn through a real gateway: what is read, who gets it, what is refused."""

import asyncio
import json
from typing import Any

import pytest

from peer import ADMIN, Connection, Received

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def body(**more: Any) -> bytes:
    return json.dumps({**CHAT, **more}).encode()


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


async def test_b017_the_worker_gets_the_bytes_that_the_client_sent(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    odd = (
        b'{ "model":"m",\n\t"messages":[{"role":"user","content":"\\u00e9 \xc3\xa9","x":1e3}],'
        b'"unknown":{"b":1,"a":2},"tools":[{"type":"function","function":{"name":"f"}}],"temperature":1.0 }'
    )
    async with gate.client.post(f"{gate.url}/v1/chat/completions?a=%20b", data=odd) as answer:
        assert answer.status == 200
        assert await answer.read() == b'{"ok":true}'
        assert answer.headers["content-length"] == "11"
    assert peer.received[0].body == odd
    assert peer.received[0].target == "/v1/chat/completions?a=%20b"
    assert peer.received[0].header("host") == [f"127.0.0.1:{peer.port}"]


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 503])
async def test_b006_b086_the_workers_own_errors_pass_unchanged(peers, front, status: int) -> None:
    async def refuse(_: Received, connection: Connection) -> None:
        await connection.answer(
            status,
            b'{"object":"error","x":1}',
            "content-type: application/json",
            "retry-after: 7",
            "x-ratelimit-a: b",
        )

    gate = await front(await peers(refuse))
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(stream=True)) as answer:
        assert answer.status == status
        assert await answer.read() == b'{"object":"error","x":1}'
        assert answer.headers["content-type"] == "application/json"
        assert (answer.headers["retry-after"], answer.headers["x-ratelimit-a"]) == ("7", "b")
    await gate.idle()


@pytest.mark.parametrize("content", [rb'"\ud800 half a pair"', b"NaN", b"[1e999]", b"null"])
async def test_b017_what_only_python_takes_for_json_is_forwarded(peers, front, content: bytes) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    sent = b'{"model":"m","messages":[{"role":"user","content":' + content + b"}]}"
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=sent) as answer:
        assert answer.status == 200
    assert peer.received[0].body == sent


ODD = [
    ("/v1/completions", b'\xef\xbb\xbf{"model":"m","prompt":"hi"}'),
    ("/v1/completions", b'{"model":"m","prompt":"hi","x":Infinity}'),
    ("/v1/completions", '{"model":"m","prompt":"hi"}'.encode("utf-16")),
    ("/v1/chat/completions", b'{"model":"m","messages":[],"x":NaN}'),
    ("/v1/embeddings", b"not json at all"),
]


@pytest.mark.parametrize(("path", "sent"), ODD)
async def test_bodies_that_only_some_parsers_take_are_never_a_fault_of_ours(
    peers, front, path: str, sent: bytes
) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(gate.url + path, data=sent) as answer:
        assert answer.status == 200
    assert peer.received[0].body == sent


async def test_a_body_nested_without_end_is_a_400(peers, front) -> None:
    gate = await front(await peers(say_ok))
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        sent = (
            b'{"model":"m","messages":[],"prompt":"x","input":"x","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
        )
        async with gate.client.post(gate.url + path, data=sent) as answer:
            assert answer.status == 400


@pytest.mark.parametrize(
    "sent",
    [
        b'{"model":5,"kv_transfer_params":{"remote_host":"x"}}',
        b'{"kv_transfer_params":{"remote_host":"x"},"x":NaN}',
        b'{"sampling_params":{"extra_args":{"kv_transfer_params":{"remote_host":"x"}}}}',
    ],
)
async def test_b070_no_path_lets_transfer_parameters_through(peers, front, sent: bytes) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(f"{gate.url}/inference/v1/generate", data=sent) as answer:
        assert answer.status == 400
    assert peer.received == []


async def test_header_values_keep_their_bytes(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(
        f"{gate.url}/v1/chat/completions", data=body(), headers={"x-custom": "gr\u00fc\u00df"}
    ) as answer:
        assert answer.status == 200
    assert peer.received[0].header("x-custom")[0].encode("latin-1").decode() == "gr\u00fc\u00df"


BAD = [
    (b"{", 400, None),
    (b"[]", 400, None),
    (b"\xff\xfe", 400, None),
    (b"", 400, None),
    (b'{"model":7,"messages":[]}', 400, "model"),
    (b'{"model":"m"}', 400, "messages"),
    (b'{"model":"m","messages":"hi"}', 400, "messages"),
    (b'{"model":"m","messages":[1]}', 400, "messages[0]"),
    (b'{"model":"other","messages":[]}', 404, "model"),
    (
        b'{"model":"m","messages":[],"kv_transfer_params":{"remote_host":"169.254.169.254"}}',
        400,
        "kv_transfer_params",
    ),
]


@pytest.mark.parametrize(("content", "status", "param"), BAD)
async def test_b085_b070_bad_input_is_refused_in_openai_shape_and_nothing_is_forwarded(
    peers, front, content: bytes, status: int, param: str | None
) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=content) as answer:
        assert answer.status == status
        error = (await answer.json())["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert error["param"] == param
    assert peer.received == []
    assert gate.gateway.ledger.total.inflight == 0


LENIENT = {
    "/v1/chat/completions": [b'{"messages":[]}', b'{"model":"m","messages":[],"stream":"yes"}'],
    "/v1/responses": [
        b'{"input":"x"}',
        b'{"model":"","input":[]}',
        b'{"input":"x","previous_response_id":"r1"}',
    ],
    "/v1/completions": [b'{"model":null,"prompt":"x"}', b'{"model":"m","prompt":5}']
    + [b'{"model":"m","prompt":%b}' % p for p in (b"[true, 2]", b"[1.0]", b'["1",2]', b"[[1],[2.0]]", b"{}")],
}


async def test_b017_what_vllm_takes_or_refuses_itself_is_forwarded(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    for path, contents in LENIENT.items():
        for content in contents:
            async with gate.client.post(f"{gate.url}{path}", data=content) as answer:
                assert answer.status == 200, content
            assert peer.received[-1].body == content


async def test_b085_a_turn_without_a_model_is_a_400_where_workers_would_answer_with_different_ones(
    peers, front
) -> None:
    gate = await front(await peers(say_ok, model="m"), other := await peers(say_ok, model="n"))
    for path, content in [
        ("/v1/chat/completions", b'{"messages":[]}'),
        ("/v1/messages", b'{"model":"","messages":[],"max_tokens":1}'),
    ]:
        async with gate.client.post(f"{gate.url}{path}", data=content) as answer:
            assert answer.status == 400
            assert "model" in (await answer.json())["error"]["message"]
    assert other.received == []


async def test_no_worker_is_503_with_retry_after_and_the_gateway_stays_alive(front) -> None:
    gate = await front()
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert (await answer.json())["error"]["code"] == "no_worker"
    async with gate.client.get(f"{gate.url}/health") as answer:
        assert answer.status == 200
    async with gate.client.get(f"{gate.url}/ready") as answer:
        assert answer.status == 503
        assert (await answer.json())["reasons"] == ["no worker is registered"]


async def test_b039_a_refused_connection_goes_to_another_worker_at_once(peers, front) -> None:
    dead, alive = await peers(say_ok), await peers(say_ok)
    gate = await front(dead, alive, env={"MOONGATE_WORKERS__HEALTH_INTERVAL_S": "600"})
    await dead.stop()
    for _ in range(20):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
            assert answer.status == 200
    assert len(alive.received) == 20
    assert {w.name: w.state for w in gate.gateway.fleet.workers()}[f"127.0.0.1:{dead.port}"] == "down"
    await gate.idle()


async def test_b039_the_last_worker_dead_is_an_error_of_ours_in_json(peers, front) -> None:
    dead = await peers(say_ok)
    gate = await front(dead, env={"MOONGATE_WORKERS__HEALTH_INTERVAL_S": "600"})
    await dead.stop()
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
        assert answer.status == 502
        assert (await answer.json())["error"]["code"] == "upstream_failed"
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
        assert answer.status == 503
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_worker_that_fails_before_its_first_byte_is_replaced(peers, front, status: int) -> None:
    async def broken(_: Received, connection: Connection) -> None:
        await connection.answer(status, b"{}")

    bad, good = await peers(broken), await peers(say_ok)
    gate = await front(bad, good)
    for _ in range(8):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
            assert answer.status == 200
    assert len(good.received) == 8
    await gate.idle()


async def phase_before_headers(_: Received, connection: Connection) -> None:
    await connection.gone.wait()


async def test_b034_a_silent_worker_costs_its_budget_and_answers_504(peers, front) -> None:
    gate = await front(
        await peers(phase_before_headers),
        env={"MOONGATE_TIMEOUTS__FIRST_BYTE_S": "0.1", "MOONGATE_LIMITS__TRIES": "1"},
    )
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["code"] == "upstream_timeout"
    await gate.idle()


async def test_b036_bodies_up_to_the_limit_pass_whole_and_larger_ones_are_413(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer, env={"MOONGATE_LIMITS__MAX_BODY_BYTES": str(33 << 20)})
    large = body(pad="x" * (32 << 20))
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=large) as answer:
        assert answer.status == 200
    assert peer.received[0].body == large
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(pad="x" * (34 << 20))) as answer:
        assert answer.status == 413
        assert (await answer.json())["error"]["code"] == "request_too_large"


async def test_b042_other_paths_pass_with_the_same_accounting(peers, front) -> None:
    hold = asyncio.Event()

    async def slow(_: Received, connection: Connection) -> None:
        await hold.wait()
        await connection.answer(200, b"{}")

    one, two = await peers(slow), await peers(slow)
    gate = await front(one, two, env={"MOONGATE_ROUTING__POLICY": "least_loaded"})
    paths = ["/v1/embeddings", "/tokenize", "/inference/v1/generate", "/v1/anything?x=1"]

    async def call(path: str) -> int:
        async with gate.client.post(gate.url + path, data=b'{"model":"m","input":"x"}') as answer:
            return answer.status

    calls = [asyncio.create_task(call(path)) for path in paths * 10]
    await gate.until(lambda: len(one.open) + len(two.open) == 40)
    assert min(len(one.open), len(two.open)) >= 18
    assert gate.gateway.ledger.total.inflight == 40
    hold.set()
    assert await asyncio.gather(*calls) == [200] * 40
    await gate.idle()


async def test_b021_short_cold_prompts_spread_over_an_idle_fleet(peers, front) -> None:
    fleet = [await peers(say_ok) for _ in range(4)]
    gate = await front(*fleet)
    for i in range(120):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(i=i)) as answer:
            assert answer.status == 200
    assert all(10 <= len(peer.received) <= 55 for peer in fleet)


async def test_b029_compressed_answers_pass_as_they_are(peers, front) -> None:
    async def packed(request: Received, connection: Connection) -> None:
        assert request.header("accept-encoding") == ["gzip, br"]
        await connection.answer(
            200, b"\x1f\x8b raw", "content-encoding: gzip", "content-type: application/json"
        )

    gate = await front(await peers(packed))
    headers = {"accept-encoding": "gzip, br"}
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(), headers=headers) as answer:
        assert await answer.read() == b"\x1f\x8b raw"
        assert answer.headers["content-encoding"] == "gzip"


async def test_b080_models_are_the_union_of_what_is_up_with_all_fields(peers, front) -> None:
    one, two = await peers(say_ok, "m"), await peers(say_ok, "n")
    gate = await front(one, two)
    async with gate.client.get(f"{gate.url}/v1/models") as answer:
        page = await answer.json()
    assert [(card["id"], card["extra"]) for card in page["data"]] == [("m", 1), ("n", 1)]
    async with gate.client.get(f"{gate.url}/v1/models/n") as answer:
        assert (await answer.json())["id"] == "n"
    async with gate.client.get(f"{gate.url}/v1/models/z") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/n"):
        async with gate.client.head(gate.url + path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
            assert int(answer.headers["content-length"]) > 0
    for model, peer in (("m", one), ("n", two)):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(model=model)) as answer:
            assert answer.status == 200
        assert len(peer.received) == 1


async def test_debug_headers_are_for_the_admin_token_only_unless_switched_on(peers, front) -> None:
    gate = await front(await peers(say_ok))
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
        assert not [name for name in answer.headers if name.lower().startswith("x-moongate")]
        assert answer.headers["x-request-id"]
    headers = {**ADMIN, "x-request-id": "mine-1"}
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(), headers=headers) as answer:
        assert answer.headers["x-moongate-action"] == "none"
        assert answer.headers["x-moongate-policy"] == "expected_ttft"
        assert answer.headers["x-request-id"] == "mine-1"
    async with gate.client.get(f"{gate.url}/admin/v1/decisions/mine-1", headers=ADMIN) as answer:
        record = await answer.json()
    assert record["unrenderable"] != ""
    assert record["outcome"]["status"] == 200


async def test_workers_are_cordoned_and_removed_at_run_time_without_losing_a_turn(peers, front) -> None:
    one, two = await peers(say_ok), await peers(say_ok)
    gate = await front(one, two)
    admin = f"{gate.url}/admin/v1/workers/127.0.0.1:{one.port}"
    async with gate.client.patch(admin, json={"cordoned": True}, headers=ADMIN) as answer:
        assert answer.status == 200
    for _ in range(10):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
            assert answer.status == 200
    assert (len(one.received), len(two.received)) == (0, 10)
    async with gate.client.delete(admin, headers=ADMIN) as answer:
        assert answer.status == 204
    async with gate.client.post(
        f"{gate.url}/admin/v1/workers", json={"url": one.url}, headers=ADMIN
    ) as answer:
        assert answer.status == 201
    await gate.until(lambda: all(w.state == "up" for w in gate.gateway.fleet.workers()))


@pytest.mark.parametrize(
    ("path", "odd"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": True}),
        ("/v1/completions", {"prompt": "x", "n": True, "best_of": "y"}),
        ("/v1/chat/completions", {"n": True, "prompt_logprobs": False}),
    ],
)
async def test_b017_what_only_counts_for_learning_is_the_workers_to_refuse(
    peers, front, path: str, odd: dict[str, Any]
) -> None:
    gate = await front(await peers(say_ok))
    async with gate.client.post(gate.url + path, data=body(**odd)) as answer:
        assert answer.status == 200


async def test_what_the_gateway_refuses_is_counted_apart_from_errors_and_for_its_api(peers, front) -> None:
    async def by_turn(request: Received, connection: Connection) -> None:
        await connection.answer(int(json.loads(request.body)["user"]), b"{}")

    gate = await front(await peers(by_turn), env={"MOONGATE_LIMITS__MAX_BODY_BYTES": "1000"})
    for path, content, status in (
        ("/v1/chat/completions", b"{not json", 400),
        ("/v1/chat/completions", body(model="nobody"), 404),
        ("/v1/chat/completions", body(kv_transfer_params={"remote_host": "h"}), 400),
        ("/v1/messages", body(user="x" * 1000), 413),
        ("/v1/chat/completions", body(user="422"), 422),
        ("/v1/chat/completions", body(user="500"), 500),
    ):
        async with gate.client.post(gate.url + path, data=content) as answer:
            assert answer.status == status
    await gate.idle()
    async with gate.client.get(f"{gate.url}/metrics") as page:
        lines = [line for line in (await page.text()).splitlines() if "moongate_requests_total{" in line]
    assert sorted(line.removeprefix("moongate_requests_total") for line in lines) == [
        '{api="chat",model="m",outcome="error"} 1.0',
        '{api="chat",model="m",outcome="ok"} 1.0',
        '{api="chat",model="other",outcome="refused"} 3.0',
        '{api="messages",model="other",outcome="refused"} 1.0',
    ]
