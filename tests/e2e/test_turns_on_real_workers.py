"""What the gateway predicts is what real vLLM workers and a real pool do."""

import asyncio
import statistics
from itertools import pairwise

import pytest

from conversation import Answered, Conversation, answered, mispredicted
from real_fleet import BLOCK, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_growing_conversation_stays_on_its_holder_and_every_prediction_is_exact(
    fleet: RealFleet, stream: bool
) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=100 + stream)
    turns: list[Answered] = []
    for _ in range(8):
        turns.append(await talk.turn(stream=stream))
        # As an agent does whose tools take longer than a worker's events.
        await fleet.heard_of(turns[-1].worker, talk.tokens)
    assert len({turn.worker for turn in turns}) == 1, await fleet.why(turns)
    assert [turn.predicted for turn in turns] == [turn.cached for turn in turns], await fleet.why(turns)
    assert [turn.action for turn in turns] == ["recompute"] + ["local"] * 7
    grown = [b.prompt_tokens - a.prompt_tokens for a, b in pairwise(turns)]
    assert min(grown) >= 6 * BLOCK
    for before, turn in pairwise(turns):
        assert turn.cached >= (before.prompt_tokens - 1) // BLOCK * BLOCK


async def test_a_turn_that_overtakes_the_events_of_the_last_one_is_predicted_too(fleet: RealFleet) -> None:
    """With one token to answer, a worker's events often come after its answer."""
    talks: list[list[Answered]] = []

    async def hasty(number: int) -> None:
        for again in range(10):
            seed = 600 + number * 10 + again
            talk = Conversation(fleet.client, fleet.model, seed=seed, words=60, max_tokens=1)
            talks.append(await talk.turns(3))

    await asyncio.gather(*(hasty(number) for number in range(4)))
    assert len(talks) == 40
    assert sum(turn.worker == before.worker for turns in talks for before, turn in pairwise(turns)) >= 40
    wrong = [turns for turns in talks if mispredicted(turns)]
    assert not wrong, "\n\n".join([await fleet.why(turns) for turns in wrong])


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_completions_are_predicted_exactly_too(fleet: RealFleet, form: str) -> None:
    text = Conversation(fleet.client, fleet.model, seed=200).text(700)
    tokens = (await fleet.client.post("/tokenize", json={"model": fleet.model, "prompt": text})).json()[
        "tokens"
    ]
    tokens = tokens[: len(tokens) // BLOCK * BLOCK]
    if form == "ids":
        tokens = [5, *tokens[:-1]]
    turns: list[Answered] = []
    for length in (20 * BLOCK, 20 * BLOCK, 20 * BLOCK + 1, len(tokens)):
        prompt = tokens[:length] if form == "ids" else text[: length * 3]
        body = {"model": fleet.model, "prompt": prompt, "max_tokens": 4}
        answer = await fleet.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        turns.append(answered(answer.headers, answer.json()["usage"]))
    assert [turn.predicted for turn in turns] == [turn.cached for turn in turns]
    assert turns[0].cached == 0
    assert all(turn.cached >= (turns[0].prompt_tokens - 1) // BLOCK * BLOCK for turn in turns[1:])


async def test_a_cordoned_holder_is_replaced_by_one_that_pulls(fleet: RealFleet) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=300)
    holder = (await talk.turns(3))[-1].worker
    other = fleet.other(holder)
    before = await other.metric("vllm:external_prefix_cache_hits_total")
    async with fleet.cordoned(holder):
        turn = await talk.turn()
    assert (turn.worker, turn.action) == (other.name, "pull")
    assert turn.pool_tokens > turn.local_tokens
    assert turn.cached == turn.predicted
    after = await other.metric("vllm:external_prefix_cache_hits_total")
    assert after - before == turn.pool_tokens - turn.local_tokens


async def test_salted_prompts_are_told_apart(fleet: RealFleet) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=400)
    talk.grow()

    async def ask(salt: str | None) -> Answered:
        body = talk.body() if salt is None else talk.body(cache_salt=salt)
        answer = await fleet.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answered(answer.headers, answer.json()["usage"])

    for salt in (None, "tenant-a", "tenant-b"):
        cold, warm = await ask(salt), await ask(salt)
        assert (cold.predicted, cold.cached) == (0, 0)
        assert warm.predicted == warm.cached > 0


async def test_forty_interleaved_sessions_are_predicted_exactly(fleet: RealFleet) -> None:
    shared = Conversation(fleet.client, fleet.model, seed=500).text(150)
    talks = [
        Conversation(
            fleet.client,
            fleet.model,
            seed=1000 + n,
            words=60,
            tools=n % 2 == 0,
            system=shared if n % 4 == 0 else "",
        )
        for n in range(40)
    ]
    gate = asyncio.Semaphore(6)

    async def session(talk: Conversation) -> list[Answered]:
        turns: list[Answered] = []
        for step in range(4):
            async with gate:
                turns.append(await talk.turn(stream=step % 2 == 1))
        return turns

    sessions = await asyncio.gather(*map(session, talks))
    turns = [turn for session in sessions for turn in session]
    assert len(turns) == 160
    wrong = [turn for session in sessions for turn in mispredicted(session)]
    assert len(wrong) <= len(turns) * 0.02, await fleet.why(wrong)
    later = [turn for session in sessions for turn in session[1:]]
    assert statistics.mean(turn.cached / turn.prompt_tokens for turn in later) > 0.5
    assert len({turn.worker for turn in turns}) == 2
    audit = await fleet.admin("audit")
    assert audit["turns"] >= 160
    assert audit["exact_ratio"] >= 0.98, audit
    assert await fleet.inflight() == 0
