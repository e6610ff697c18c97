"""What tests of the simulated worker share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.sim.running import Running, running


@pytest.fixture
async def worker(tiny_model: Path) -> AsyncIterator[Running]:
    async with running(tiny_model) as it:
        yield it
