"""Free TCP ports for the processes of a fleet on this machine."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager

_OUTGOING = 32_768


class PortTaken(Exception):
    """`host:port` cannot be listened on, mostly because another process does."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"port {port} on {host} cannot be used: {reason}")
        self.host = host
        self.port = port


def require_free(host: str, port: int) -> None:
    """Raises PortTaken unless a server could listen there now. Leaves nothing bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections in TIME_WAIT of a run that just ended are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise PortTaken(host, port, error.strerror or str(error)) from error


@contextmanager
def claimed(port: int) -> Generator[None]:
    """Keeps other fleets of this machine from `port`, also before its server listens. Raises PortTaken.

    The kernel ends the claim with this process, however that ends.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0moongate/fleet/{port}")
        except OSError:
            raise PortTaken("this machine", port, "another fleet is starting or running there") from None
        yield


def free_ports(above: int) -> Iterator[int]:
    """Ports above `above`, ascending, that nothing listens on, on any address. Never the same one twice.

    Stays below 32768 (and starts at 8001 when `above` does not): from there on Linux hands out ports to
    outgoing connections, one of which could take a port between the look and the use.
    """
    first = above + 1 if above + 1 < _OUTGOING else 8001
    for port in range(first, _OUTGOING):
        try:
            require_free("0.0.0.0", port)  # noqa: S104 (bound for an instant, to see whether it is free)
        except PortTaken:
            continue
        yield port
    raise PortTaken("0.0.0.0", _OUTGOING - 1, "no free port is left below it")  # noqa: S104
