"""Ports for tests' own processes, that other processes of tests on this machine do not take meanwhile."""

import socket
from collections.abc import Iterator
from itertools import takewhile

from workers.launch.ports import free_ports

# A fleet takes ports that follow its gateway's.
_TOGETHER = 25
_BELOW = 32_500
# The kernel ends claims with this process: its sockets have names of Linux' abstract namespace.
_claims: list[socket.socket] = []


def ports(above: int) -> Iterator[int]:
    """Free ports above `above`, ascending, for as long as this process lives.

    Nobody else who asks here gets them, nor the next ones behind the first.
    """
    for first in range((above // _TOGETHER + 1) * _TOGETHER, _BELOW, _TOGETHER):
        if _claim(first):
            yield from takewhile(lambda port, end=first + _TOGETHER: port < end, free_ports(above=first - 1))
    raise RuntimeError(f"no ports are left from {above} to {_BELOW}")


def _claim(first: int) -> bool:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0moongate/tests/{first}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
