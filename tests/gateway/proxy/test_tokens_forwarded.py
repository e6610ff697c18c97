"""Workers are sent token ids only where their own rendering was seen to agree, and no longer than that."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.api.parse import parse
from peer import ADMIN, Connection, Peer, Received
from store.hashing import HashScheme
from store.prompt.local import LocalPrompts

CHAT = "/v1/chat/completions"
METRICS = b'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
SCHEME = HashScheme("sha256_cbor", 32)
LONG = "Which worker holds this prefix? " * 120
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG},
}


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> LocalPrompts:
    return LocalPrompts.load(str(tiny_model))


class Worker:
    """Renders as the model's own tokenizer does, or with one token more in front; keeps the turns it gets."""

    def __init__(self, prompts: LocalPrompts, *, renders: bool = True) -> None:
        self.prompts = prompts
        self.renders = renders
        self.otherwise = False
        self.turns: list[bytes] = []

    async def __call__(self, request: Received, connection: Connection) -> None:
        path = request.target.removesuffix("/render")
        if path == request.target:
            self.turns.append(request.body)
            await connection.answer(200, b'{"id": "1", "choices": []}')
        elif not self.renders:
            await connection.answer(403, b"{}")
        else:
            ids = self.ids(path, request.body)
            await connection.answer(
                200, json.dumps({"token_ids": [3, *ids] if self.otherwise else ids}).encode()
            )

    def ids(self, path: str, body: bytes) -> list[int]:
        request = parse("POST", path, body).prompt
        assert request is not None
        return self.prompts.prompt(request, SCHEME).tokens.tolist()


@pytest.fixture
async def proven(
    peers: Callable[..., Any], front: Callable[..., Any], tiny_model: Path, prompts: LocalPrompts
) -> Any:
    """Start a gateway before one worker: `await proven(env, renders=...)`; its checks have ended."""

    async def start(env: dict[str, str], *, renders: bool = True) -> tuple[Any, Worker]:
        worker = Worker(prompts, renders=renders)
        peer: Peer = await peers(worker)
        card = {"id": "m", "root": str(tiny_model), "max_model_len": 100_000}
        peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [card]}).encode()
        peer.pages["/metrics"] = METRICS
        gate = await front(peer, env={"MOONGATE_PROMPT__SOURCE": "auto", **env})
        await gate.until(lambda: not gate.gateway.prompts.parity._checks)
        return gate, worker

    return start


async def turn(gate: Any, path: str, **more: Any) -> bytes:
    """Ask for it, and return the body as the client sent it."""
    body = json.dumps({"model": "m", **PATHS[path], **more}).encode()
    async with gate.client.post(gate.url + path, data=body) as answer:
        assert answer.status == 200, await answer.text()
    return body


async def page(gate: Any, path: str) -> str:
    async with gate.client.get(gate.url + path, headers=ADMIN) as answer:
        return await answer.text()


async def test_a_worker_that_agreed_is_sent_ids_and_nothing_else_changes(proven) -> None:
    gate, worker = await proven({})
    for path in PATHS:
        sent = json.loads(await turn(gate, path))
        got = json.loads(worker.turns[-1])
        ids = worker.ids(path, json.dumps(sent).encode())
        if path == "/v1/completions":
            assert got.pop("prompt") == ids
            del sent["prompt"]
        else:
            assert got.pop("kv_transfer_params") == {"prompt_token_ids": ids}
        assert got == sent
    counted = re.findall(r"moongate_tokens_forwarded_total\{[^}]*\} (\S+)", await page(gate, "/metrics"))
    assert counted == ["1.0"] * len(PATHS)

    # The engine does not truncate ids, and answers these with something else than without.
    await turn(gate, CHAT, truncate_prompt_tokens=600)
    assert len(json.loads(worker.turns[-1])["kv_transfer_params"]["prompt_token_ids"]) == 600
    for more in ({"echo": True}, {"return_prompt_text": True}):
        assert await turn(gate, CHAT, **more) == worker.turns[-1]


@pytest.mark.parametrize(
    ("env", "renders"),
    [
        ({"MOONGATE_PROMPT__FORWARD_TOKENS": "false"}, True),
        ({"MOONGATE_PROMPT__SOURCE": "local"}, True),
        ({"MOONGATE_PROMPT__SOURCE": "remote"}, True),
        ({}, False),
    ],
)
async def test_without_proof_or_where_it_is_switched_off_bodies_go_as_they_came(
    proven, env: dict[str, str], renders: bool
) -> None:
    gate, worker = await proven(env, renders=renders)
    assert await turn(gate, CHAT) == worker.turns[-1]


async def test_the_first_difference_among_the_turns_ends_it_for_that_api_alone(proven) -> None:
    gate, worker = await proven({"MOONGATE_PROMPT__AUDIT_FRACTION": "1"})
    parity = gate.gateway.prompts.parity
    await turn(gate, CHAT)
    assert b"prompt_token_ids" in worker.turns[-1]
    await gate.until(lambda: not parity._checks)
    assert not parity.differences()

    worker.otherwise = True
    await turn(gate, CHAT, user="another")
    await gate.until(parity.differences)
    body = await turn(gate, CHAT)
    assert worker.turns[-1] == body
    shown = await page(gate, "/metrics")
    assert 'moongate_parity_checks_total{api="chat",model="m",result="differs"} 1.0' in shown
    (reason,) = [why for why in json.loads(await page(gate, "/ready"))["reasons"] if "(chat)" in why]
    assert "token 0 is" in reason
    assert "there 3 " in reason
    # The other APIs were not seen to differ.
    worker.otherwise = False
    await turn(gate, "/v1/messages")
    assert b"prompt_token_ids" in worker.turns[-1]


async def test_however_many_turns_there_are_one_a_second_is_compared(proven) -> None:
    gate, _ = await proven({"MOONGATE_PROMPT__AUDIT_FRACTION": "1"})
    parity = gate.gateway.prompts.parity
    began = time.monotonic()

    async def compared() -> int:
        counts = re.findall(r"moongate_parity_checks_total\{[^}]*\} (\S+)", await page(gate, "/metrics"))
        return int(sum(map(float, counts)))

    before = await compared()
    for _ in range(20):
        await turn(gate, CHAT)
        await gate.until(lambda: not parity._checks)
    assert 2 <= await compared() - before <= 2 + time.monotonic() - began
