"""Ports for tests' own processes, from ranges that test runs side by side do not share."""

import os
from collections.abc import Iterator

from workers.launch.ports import free_ports

_RANGE = 4_000


def ports(above: int) -> Iterator[int]:
    """Free ports above `above`; in each of pytest's parallel processes from a range of its own."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return free_ports(above=above - _RANGE * int(number))
