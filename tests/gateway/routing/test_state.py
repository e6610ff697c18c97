"""What routing remembers: from one turn to the next, and of one gateway alone."""

import asyncio
import time
from pathlib import Path

from announcing import announce_from
from peer import Connection, Peer, Received
from tests.store.kv_publisher import Publisher, publishing, stored

DEBUG = {"MOONGATE_ROUTING__HEADERS": "debug"}
ASK = {"model": "m", "messages": [{"role": "user", "content": "Which worker holds this prefix? " * 40}]}


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


async def chosen(gate) -> tuple[str, int]:
    """Where a turn went, and how much of its prompt was known to be there."""
    async with gate.client.post(f"{gate.url}/v1/chat/completions", json=ASK) as answer:
        await answer.read()
        assert answer.status == 200
        return answer.headers["x-moongate-worker"], int(answer.headers["x-moongate-local-tokens"])


async def test_b077_turns_in_sequence_share_what_the_policy_remembers(peers, front) -> None:
    gate = await front(
        *[await peers(say_ok) for _ in range(3)], env=DEBUG | {"MOONGATE_ROUTING__POLICY": "round_robin"}
    )
    went = [(await chosen(gate))[0] for _ in range(6)]
    assert len(set(went[:3])) == 3
    assert went[3:] == went[:3]


async def test_b077_a_worker_of_two_gateways_has_load_and_blocks_in_each_by_itself(
    peers, front, tiny_model: Path
) -> None:
    async def hold(_: Received, connection: Connection) -> None:
        await connection.gone.wait()

    peer: Peer = await peers(say_ok)
    live, replay = announce_from(peer, tiny_model)
    with publishing(lambda: Publisher(live, replay)) as publisher:
        one, other = await front(peer, env=DEBUG), await front(peer, env=DEBUG)
        target = f"127.0.0.1:{peer.port}"
        publisher.publish(stored([1], token_ids=list(range(32))))
        for gate in (one, other):
            await gate.until(lambda gate=gate: target in gate.gateway.knowledge.block_sizes)
        # A gateway has its own turns' blocks on trust for half a second; the other knows of none.
        async with asyncio.timeout(60):
            while not (await chosen(one))[1]:
                pass
        assert (await chosen(other))[1] == 0
        peer.handler = hold
        turns = [asyncio.create_task(chosen(one)) for _ in range(3)]
        await one.until(lambda: len(peer.open) == 3)
        assert one.gateway.ledger.total.inflight == 3
        assert other.gateway.ledger.total.inflight == 0
        for turn in turns:
            turn.cancel()
        await one.idle()


async def test_a_worker_that_may_get_turns_again_is_taken_to_have_been_about_as_busy(peers, front) -> None:
    """It would get all turns until it had caught up with what others did meanwhile."""
    gate = await front(*[await peers(say_ok) for _ in range(3)], env=DEBUG)
    fleet, ledger = gate.gateway.fleet, gate.gateway.ledger
    away, removed, busy = (worker.name for worker in fleet.workers())
    for name in (away, removed):
        fleet.cordon(name, True)
    for _ in range(40):
        await chosen(gate)

    def recent(name: str) -> float:
        return ledger.load(name, time.monotonic()).recent_tokens

    assert recent(away) == recent(removed) == 0.0
    fleet.cordon(away, False)
    assert 0.6 * recent(busy) < recent(away) < recent(busy)
    url = fleet.get(removed).url
    fleet.remove(removed)
    fleet.add(url)
    await gate.until(lambda: fleet.get(removed).state == "up")
    assert 0.5 * recent(busy) < recent(removed) < recent(busy)
