"""One fleet of real processes for the whole session: starting two vLLM workers takes about 35 s."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import real_fleet
from real_fleet import RealFleet


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the real engine. These tests are never skipped: without it they fail."""
    python = Path(".venv-vllm/bin/python").absolute()
    assert python.exists(), "vLLM's own environment is missing: make it with `make setup-vllm`"
    return python


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(vllm_python: Path) -> AsyncIterator[RealFleet]:
    """Master, two workers and gateway, all up. Whoever breaks something puts it back."""
    started = real_fleet.make(vllm_python.parents[2] / ".moongate/e2e", workers=2)
    try:
        await started.start()
        yield started
    finally:
        await started.stop()
