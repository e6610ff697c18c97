"""The fleet runs in processes of its own: clients here have another environment than it."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.clients.sim_fleet import ADMIN, PYTHON, ROOT, Fleet, ask
from tests.ports import ports

# litellm would look for newer prices on the network when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@pytest.fixture(scope="session")
def fleet_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    port = next(ports(above=25_300))
    words = f"up --engine sim --workers 2 --mooncake off --port {port} --admin-token t".split()
    process = subprocess.Popen(
        [PYTHON, "-m", "gateway.cli", *words],
        cwd=tmp_path_factory.mktemp("fleet"),
        env=os.environ | {"PYTHONPATH": str(ROOT), "MOONGATE_WORKERS__HEALTH_TIMEOUT_S": "20"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        while "base_url" not in (line := process.stdout.readline()):
            assert line, "the fleet did not come up"
        url = f"http://127.0.0.1:{port}"
        workers = ask(f"{url}/admin/v1/workers", headers=ADMIN)
        yield Fleet(url, [worker["url"] for worker in workers["workers"]])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.fixture
def fleet(fleet_of_all: Fleet) -> Iterator[Fleet]:
    """Without faults, before and after."""
    yield fleet_of_all
    fleet_of_all.fault()
