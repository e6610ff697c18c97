"""Which header lines cross the gateway, in both directions."""

from gateway.exchange import Headers

# RFC 9110 section 7.6.1, plus the framing that each side writes for itself.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# Credentials are the gateway's own on either side; placement is the gateway's decision alone.
_NOT_FOR_WORKERS = _HOP_BY_HOP | frozenset(
    b"host content-length expect authorization x-api-key x-request-id x-data-parallel-rank x-worker-id "
    b"x-prefiller-host-port".split()
)
_NOT_FOR_CLIENTS = _HOP_BY_HOP | frozenset((b"x-request-id", b"server", b"date"))


def _connection_named(headers: Headers) -> frozenset[bytes]:
    """Header names that a Connection line declares to be for this hop only."""
    return frozenset(
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    )


def for_worker(headers: Headers, *, api_key: str, request_id: str, rank: int | None) -> Headers:
    """The client's header lines as a worker may see them, with the gateway's own added."""
    dropped = _NOT_FOR_WORKERS | _connection_named(headers)
    lines = [(name, value) for name, value in headers if name not in dropped]
    lines.append((b"x-request-id", request_id.encode()))
    if api_key:
        lines.append((b"authorization", b"Bearer " + api_key.encode()))
    if rank is not None:
        lines.append((b"x-data-parallel-rank", str(rank).encode()))
    return lines


def for_client(headers: Headers, own: Headers) -> Headers:
    """The worker's header lines as the client may see them, with the gateway's own added."""
    dropped = _NOT_FOR_CLIENTS | _connection_named(headers)
    return [(name, value) for name, value in headers if name not in dropped] + own
