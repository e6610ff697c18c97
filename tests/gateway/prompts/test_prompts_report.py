"""Prompts that workers make otherwise, or that only they can make: said openly, and the workers' are used."""

import json
from pathlib import Path
from typing import Any

import pytest

from peer import ADMIN, Connection, Peer, Received

CHAT = "/v1/chat/completions"
METRICS = b'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
ASK = {"model": "m", "messages": [{"role": "user", "content": "Which worker holds this prefix?"}]}


class Renders:
    """A worker whose every prompt is of 70 tokens, the first of them 3."""

    async def __call__(self, request: Received, connection: Connection) -> None:
        ids = {"token_ids": [3] * 70}
        answer = ids if request.target.endswith("/render") else {"id": "1", "choices": []}
        await connection.answer(200, json.dumps(answer).encode())


def introduce(peer: Peer, root: Path) -> None:
    card = {"id": "m", "root": str(root)}
    peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [card]}).encode()
    peer.pages["/metrics"] = METRICS


async def report(gate: Any) -> dict[str, Any]:
    async with gate.client.get(f"{gate.url}/admin/v1/prompts", headers=ADMIN) as answer:
        (model,) = (await answer.json())["models"]
        return model


async def prompt_tokens(gate: Any) -> int:
    """As the worker renders a turn."""
    async with gate.client.post(gate.url + CHAT, json=ASK, headers=ADMIN) as answer:
        assert answer.status == 200
        return int(answer.headers["x-moongate-prompt-tokens"])


async def test_the_first_token_that_differs_is_shown_with_its_text(peers, front, tiny_model: Path) -> None:
    peer = await peers(Renders())
    introduce(peer, tiny_model)
    gate = await front(peer, env={"MOONGATE_PROMPT__SOURCE": "auto"})
    parity = gate.gateway.prompts.parity
    await gate.until(lambda: {d.api for d in parity.differences()} >= {"chat", "messages", "responses"})
    model = await report(gate)
    assert (model["made"], model["agreed"]) == ("here", {})
    found = next(each for each in model["differences"] if each["api"] == "chat")
    assert (found["position"], found["theirs"]) == (0, 3)
    assert found["our_text"] == "<|im_start|>"
    assert found["their_text"]
    async with gate.client.get(f"{gate.url}/ready") as answer:
        reasons = (await answer.json())["reasons"]
    told = next(reason for reason in reasons if "(chat)" in reason)
    assert f"token 0 is {found['ours']} '<|im_start|>', there 3 {found['their_text']!r}" in told
    assert await prompt_tokens(gate) == 70


@pytest.mark.parametrize(("source", "made"), [("auto", "by workers"), ("local", "nowhere")])
async def test_b056_a_tokenizer_that_cannot_be_loaded_here(
    peers, front, tmp_path: Path, source: str, made: str
) -> None:
    """As tekken.json, which only mistral_common reads."""
    peer = await peers(Renders())
    (tmp_path / "tekken.json").write_text('{"config": {"pattern": "", "num_vocab_tokens": 3}, "vocab": []}')
    introduce(peer, tmp_path)
    gate = await front(peer, env={"MOONGATE_PROMPT__SOURCE": source})
    assert await prompt_tokens(gate) == (70 if source == "auto" else 0)
    model = await report(gate)
    assert model["made"] == made
    assert model["why"]
    async with gate.client.get(f"{gate.url}/ready") as answer:
        reasons = (await answer.json())["reasons"]
    assert any(f"prompts of m are made {made}: " in reason for reason in reasons)


@pytest.mark.parametrize(("source", "tokens", "why"), [("auto", 70, ""), ("local", 0, "invalid")])
async def test_odd_values_in_odd_places_are_left_to_the_worker_and_to_no_log(
    peers, front, tiny_model: Path, caplog: pytest.LogCaptureFixture, source: str, tokens: int, why: str
) -> None:
    peer = await peers(Renders())
    introduce(peer, tiny_model)
    gate = await front(peer, env={"MOONGATE_PROMPT__SOURCE": source})
    item = {"type": [], "role": "user", "content": "x"}
    async with gate.client.post(
        f"{gate.url}/admin/v1/explain?api=/v1/responses", json={"model": "m", "input": [item]}, headers=ADMIN
    ) as answer:
        view = await answer.json()
    assert (view["prompt_tokens"], view["unrenderable"]) == (tokens, why)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_prompt_far_beyond_the_models_length_is_not_tokenized(peers, front, tiny_model: Path) -> None:
    """Its worker will refuse it; tokenizing it first took seconds and gigabytes."""
    peer = await peers(Renders())
    card = {"id": "m", "root": str(tiny_model), "max_model_len": 1000}
    peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [card]}).encode()
    peer.pages["/metrics"] = METRICS
    gate = await front(peer)
    found: list[tuple[bool, str]] = []
    for words in (100, 40_000):
        content = "word " * words
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        async with gate.client.post(f"{gate.url}/admin/v1/explain", json=body, headers=ADMIN) as answer:
            view = await answer.json()
            found.append((view["prompt_tokens"] > 0, view["unrenderable"]))
        async with gate.client.post(gate.url + CHAT, json=body) as answer:
            assert answer.status == 200
    assert found == [(True, ""), (False, "too_long")]
