"""One fleet of real processes for most tests: starting two vLLM workers takes about 35 s.

What needs engines of another kind starts them beside it, in pytest's other process.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from xdist.scheduler import LoadScopeScheduling

import real_fleet
from real_fleet import RealFleet

# The first test's time includes the start of the fleet: minutes on a machine that does other things as well.
TEST_TIMEOUT_S = 420
OWN_ENGINES = frozenset(("test_hybrid_models", "test_pictures_on_real_workers", "test_sim_conformance"))


class ByEngines(LoadScopeScheduling):
    """All tests on the shared fleet in one process, those with engines of their own in the other."""

    def _split_scope(self, nodeid: str) -> str:
        return "own" if Path(nodeid.partition("::")[0]).stem in OWN_ENGINES else "shared"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEngines:
    return ByEngines(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the real engine. These tests are never skipped: without it they fail."""
    python = Path(".venv-vllm/bin/python").absolute()
    assert python.exists(), "vLLM's own environment is missing: make it with `make setup-vllm`"
    return python


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_fleet(vllm_python: Path) -> AsyncIterator[RealFleet]:
    """Master, two workers and gateway, all up."""
    started = real_fleet.make(vllm_python.parents[2] / ".moongate/e2e", workers=2)
    try:
        await started.start()
        yield started
    finally:
        await started.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(session_fleet: RealFleet) -> RealFleet:
    """The session's fleet, whole again where another test broke it and failed."""
    await session_fleet.whole()
    return session_fleet
