"""Which header lines cross the gateway, in both directions."""

from gateway.asgi import Headers

# RFC 9110 section 7.6.1, plus the framing that each side writes for itself.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# By which routers, proxies and engines are told a worker, a rank or a peer to take the KV cache from.
_PLACEMENT = frozenset(
    b"x-data-parallel-rank x-data-parallel-host-port x-data-parallel-host x-dp-rank x-worker-id "
    b"x-worker-instance-id x-prefill-instance-id x-decode-instance-id x-prefiller-host-port "
    b"x-decoder-host-port x-gateway-destination-endpoint x-smg-target-worker x-smg-routing-key "
    b"target-pod".split()
)
# What clients show to be let in, here or by what stands in front, as rules of the policy name headers.
CREDENTIALS = frozenset("authorization proxy-authorization x-api-key api-key cookie".split())
# Credentials are the gateway's own on either side; placement is the gateway's decision alone.
_NOT_FOR_WORKERS = (
    _HOP_BY_HOP
    | _PLACEMENT
    | frozenset(name.encode() for name in CREDENTIALS)
    | frozenset(b"host content-length expect x-request-id".split())
)
_OWN_PREFIX = b"x-moongate-"
_NOT_FOR_CLIENTS = _HOP_BY_HOP | frozenset((b"x-request-id", b"server", b"date"))


def _crossing(headers: Headers, never: frozenset[bytes]) -> Headers:
    """Without those in `never`, the gateway's own, and what a Connection line declares to be for this hop."""
    names = dict(headers)
    if b"connection" in names:
        named = [value for name, value in headers if name == b"connection"]
        never = never.union(token.strip().lower() for value in named for token in value.split(b","))
    if b" ".join(names).find(_OWN_PREFIX) >= 0:
        never = never.union(name for name in names if name.startswith(_OWN_PREFIX))
    return [line for line in headers if line[0] not in never]


def for_worker(headers: Headers, *, api_key: str, request_id: str, rank: int | None) -> Headers:
    """The client's header lines as a worker may see them, with the gateway's own added."""
    lines = _crossing(headers, _NOT_FOR_WORKERS)
    lines.append((b"x-request-id", request_id.encode()))
    if api_key:
        lines.append((b"authorization", b"Bearer " + api_key.encode()))
    if rank is not None:
        lines.append((b"x-data-parallel-rank", str(rank).encode()))
    return lines


def for_client(headers: Headers, own: Headers, worker_url: str) -> Headers:
    """The worker's header lines as the client may see them, with the gateway's own added.

    A redirect to the worker itself leads to the same path here: past the gateway it would charge nobody, and
    take the client's key along.
    """
    lines = _crossing(headers, _NOT_FOR_CLIENTS)
    there = worker_url.encode()
    for i, (name, value) in enumerate(lines):
        if name == b"location" and value.startswith(there + b"/"):
            lines[i] = name, value.removeprefix(there)
    return lines + own


def unbuffered(headers: Headers) -> Headers:
    """What a stream lacks so that nothing on the way to the client holds it back: nginx, for one, would."""
    names = {name for name, _ in headers}
    lines = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
    return [line for line in lines if line[0] not in names]
