"""Real processes die and come back: no turn may fail, and nothing that is gone may be believed."""

import asyncio
import time

import pytest

from conversation import Answered, Conversation
from real_fleet import STOP_GRACE_S, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def long_answer(fleet: RealFleet, seed: int) -> str:
    """Who answered a turn of some seconds, which no early end of the text makes shorter."""
    talk = Conversation(fleet.client, fleet.model, seed=seed, words=60, max_tokens=400)
    talk.grow()
    answer = await fleet.client.post("/v1/chat/completions", json=talk.body(ignore_eos=True))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 400
    return answer.headers["x-moongate-worker"]


async def test_a_killed_holder_costs_no_turn_and_its_restart_is_not_believed(fleet: RealFleet) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=2000, words=60)
    before = await talk.turns(3)
    holder, usual_s = before[-1].worker, max(turn.seconds for turn in before)
    dead = fleet.worker(holder)
    assert await fleet.blocks(holder) > 0

    async with fleet.cordoned(fleet.other(holder).name):
        running = [asyncio.create_task(long_answer(fleet, seed)) for seed in range(2010, 2014)]

        async def busy() -> bool:
            return await fleet.inflight(holder) == len(running)

        await fleet.until(busy)
    dead.server.kill()
    turns: list[Answered] = []
    for n in range(20):
        turns.append(await talk.turn(stream=n % 2 == 1))
        await fleet.heard_of(turns[-1].worker, talk.tokens)
    # None of those that were running there had been answered yet: all are answered elsewhere.
    assert await asyncio.gather(*running) == [fleet.other(holder).name] * 4
    assert {turn.worker for turn in turns} == {fleet.other(holder).name}
    # A master lets a dead client go after 10 s, and this one after 2 s: one turn may wait for that.
    *most, longest = sorted(turn.seconds for turn in turns)
    assert most[-1] < 3.0 + 3 * usual_s
    assert longest < 5.0 + 3 * usual_s
    assert [turn.cached for turn in turns[2:]] == [turn.predicted for turn in turns[2:]]
    assert await fleet.blocks(holder) == 0
    assert await fleet.metric("moongate_worker_up", worker=holder) == 0

    await fleet.whole()
    assert await fleet.blocks(holder) == 0
    async with fleet.cordoned(fleet.other(holder).name):
        back = await talk.turn()
    assert back.worker == holder
    assert back.local_tokens == 0
    assert back.cached == back.predicted


async def test_a_holder_restarted_between_two_turns_keeps_no_credit(fleet: RealFleet) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=2100)
    holder = (await talk.turns(2))[-1].worker
    server = fleet.worker(holder).server
    await server.stop(STOP_GRACE_S)
    await fleet.whole()
    async with fleet.cordoned(fleet.other(holder).name):
        turn = await talk.turn()
    assert (turn.worker, turn.local_tokens) == (holder, 0)
    assert turn.cached == turn.predicted


async def test_b065_a_dead_master_costs_hits_but_no_turn_and_its_return_is_noticed(fleet: RealFleet) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=2200)
    holder = (await talk.turn()).worker
    await fleet.heard_of(holder, talk.tokens)
    assert await fleet.metric("moongate_pool_degraded") == 0
    fleet.master.kill()

    async def degraded() -> bool:
        return await fleet.metric("moongate_pool_degraded") == 1

    await fleet.until(degraded)
    for _ in range(2):
        started = time.monotonic()
        turn = await talk.turn()
        assert (turn.worker, turn.action, turn.pool_tokens) == (holder, "local", 0)
        assert turn.cached == turn.predicted
        await fleet.heard_of(holder, talk.tokens)
        # The worker itself waits for its master, about 4.5 s a look-up; the gateway must not add to that.
        assert time.monotonic() - started < 60
    decisions = (await fleet.admin("decisions"))["decisions"]
    assert min(decision["timings_ms"]["look"] for decision in decisions[:2]) < 50

    await fleet.master.start()

    async def healed() -> bool:
        return await fleet.metric("moongate_pool_degraded") == 0

    await fleet.until(healed)

    async def mounted() -> bool:
        return len((await fleet.admin("pool"))["details"]["segments"]) == len(fleet.workers)

    await fleet.until(mounted)
    # Everything the old master knew is gone; what is computed from now on is in the pool again.
    fresh = Conversation(fleet.client, fleet.model, seed=2300)
    holder = (await fresh.turn()).worker

    async def stored() -> bool:
        view = await fleet.explain(fresh.body())
        return all(candidate["pool_tokens"] > 0 for candidate in view["candidates"])

    await fleet.until(stored)
    async with fleet.cordoned(holder):
        turn = await fresh.turn()
    assert (turn.action, turn.worker) == ("pull", fleet.other(holder).name)
    assert turn.cached == turn.predicted
