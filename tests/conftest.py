"""For all tests: properties are about what is true, not how fast on a busy machine."""

import fcntl
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from workers.launch.tiny_model import make_tiny_model

settings.register_profile(
    "moongate", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("moongate")

# Needs the libraries of .venv-clients: `make clients`.
collect_ignore = [] if find_spec("langchain_openai") else ["clients"]


# Files of most seconds are begun first, so that no process is left alone with one of them at the end.
LONGEST = (
    "one_process fleet restart board cancel cli every_policy server placing_by_load experiment examination "
    "lifecycle pool_losses dead_segments sim_pool pool_in_decisions resync long_prompts fast"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, not to be changed: made once for all processes of a run, in 2 s of a core."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (shared / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return make_tiny_model(shared / "tiny")
