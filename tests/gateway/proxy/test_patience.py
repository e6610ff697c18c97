"""What waits for first bytes leave behind."""

import asyncio

from gateway.proxy.patience import Patience
from workers.fleet import Fleet


async def test_nothing_is_kept_of_workers_that_were_removed_while_turns_waited_there() -> None:
    fleet, patience = Fleet(), Patience()
    fleet.listen(patience.follow)
    task = asyncio.current_task()
    assert task is not None
    for number in range(9):
        worker = fleet.add(f"http://h:{number + 1}")
        with patience.waiting(worker.name, None, lambda: True, task):
            fleet.remove(worker.name)
    fleet.add("http://h:99")
    fleet.remove("h:99")
    assert not patience._waits
