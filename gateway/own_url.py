"""Whether a URL leads back to this gateway: as a worker of its own it would send turns round and round."""

import socket
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


def leads_here(url: str, host: str, ports: Collection[int]) -> bool:
    """Whether `url` names one of `ports` where `host` listens. May block: it resolves names."""
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
        if port not in ports or not parts.hostname:
            return False
        named, listening = _addresses(parts.hostname), _addresses(host)
    except (OSError, ValueError):
        return False
    if any(ip_address(own).is_unspecified for _, own in listening):
        return any(_is_local(family, address) for family, address in named)
    return bool(named & listening)


def _addresses(host: str) -> set[tuple[int, str]]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {(family, str(address[0]).split("%")[0]) for family, _, _, _, address in found}


def _is_local(family: int, host: str) -> bool:
    """Only an address of this machine can be bound."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            return False
    return True
