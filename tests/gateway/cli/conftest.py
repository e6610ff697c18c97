from collections.abc import AsyncIterator

import pytest

from tests.gateway.cli.site import Site, serving, worker_app


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving(worker_app()) as url:
        site = Site()
        site.add("w1", url)
        site.add("w2", url)
        yield site
