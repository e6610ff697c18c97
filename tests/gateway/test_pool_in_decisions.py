"""What the pool holds, and where, as candidates show it: real objects, a real master, a real gateway."""

from collections.abc import Iterator

import pytest

from peer import Connection, Received
from pool_rig import PoolRig, explained, pool_rig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolRig]:
    with pool_rig(tmp_path_factory.mktemp("pool")) as rig:
        yield rig


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


async def test_tokens_in_a_workers_own_segment_are_told_from_those_across_the_network(
    rig: PoolRig, peers, front
) -> None:
    workers = [await peers(say_ok) for _ in range(3)]
    for worker in workers:
        rig.serve(worker)
    gate = await front(*workers, env=rig.env(*workers))
    body = rig.body("own")
    chain = rig.prompt(body).chain
    rig.stores[0].put(chain.digests[:5])
    rig.stores[1].put(chain.digests[5:8])
    shown = list((await explained(gate, body)).values())
    assert [each["pool_tokens"] for each in shown] == [8 * 32] * 3
    assert [each["own_segment_tokens"] for each in shown] == [5 * 32, 3 * 32, 0]
