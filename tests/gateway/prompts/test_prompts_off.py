"""prompt.source = "off": turns are placed without a look at their prompts."""

import pytest

from gateway.api.parse import parse
from gateway.errors import ApiError
from peer import ADMIN, Connection, Received


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}')


async def test_a_turn_is_placed_and_what_the_worker_says_better_is_left_to_it(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer, env={"MOONGATE_PROMPT__SOURCE": "off"})
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        sent = b'{"messages":"anything","input":[[[1]]],"model":"m"}'
        async with gate.client.post(gate.url + path, data=sent, headers=ADMIN) as answer:
            assert answer.status == 200
            assert answer.headers["x-moongate-action"] == "none"
        assert peer.received[-1].body == sent
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=b'{"model":"no"}') as answer:
        assert answer.status == 404
    assert len(peer.received) == 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"model":7,"messages":[]}', 400),
        (b'{"model":"m","kv_transfer_params":{"remote_host":"x"}}', 400),
    ],
)
def test_b070_b085_what_is_refused_is_refused_without_a_look_too(body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        parse("POST", "/v1/chat/completions", body, prompts=False)
    assert refused.value.status == status


def test_sessions_and_stored_responses_are_known_without_a_look() -> None:
    body = b'{"model":"m","input":"x","previous_response_id":"resp_1","prompt_cache_key":"s"}'
    parsed = parse("POST", "/v1/responses", body, prompts=False)
    assert (parsed.session, parsed.response_id, parsed.prompt) == ("s", "resp_1", None)
