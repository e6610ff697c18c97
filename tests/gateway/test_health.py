"""What /ready says of parts that the gateway does without."""

from gateway.health import readiness
from store.pool import PoolView
from tests.ports import ports
from workers.fleet import Fleet


async def test_a_pool_that_is_not_there_is_told_with_the_places_tried_and_their_settings() -> None:
    free = ports(above=30_000)
    rpc, http = next(free), next(free)
    pool = PoolView(f"127.0.0.1:{rpc}", http_port=http)
    try:
        await pool.start()
        (reason,) = [why for why in readiness(Fleet(), pool, []).reasons if "pool" in why]
    finally:
        await pool.close()
    assert reason == (
        "the pool can't be asked (refused): the master's admin HTTP was tried at "
        f"127.0.0.1:{http}, 127.0.0.1:{rpc} (mooncake.master, mooncake.http_port)"
    )
