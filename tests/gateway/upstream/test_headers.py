"""Which header lines cross the gateway."""

import pytest

from gateway.upstream.headers import for_client, for_worker


def names(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    return [name for name, _ in headers]


def test_hop_by_hop_and_connection_named_lines_stay_on_their_hop() -> None:
    request = [
        (b"connection", b"keep-alive, X-Mine"),
        (b"x-mine", b"1"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"3"),
        (b"expect", b"100-continue"),
        (b"host", b"gateway"),
        (b"accept", b"*/*"),
        (b"anthropic-beta", b"a"),
        (b"anthropic-beta", b"b"),
    ]
    sent = for_worker(request, api_key="", request_id="r1", rank=None)
    assert sent == [
        (b"accept", b"*/*"),
        (b"anthropic-beta", b"a"),
        (b"anthropic-beta", b"b"),
        (b"x-request-id", b"r1"),
    ]
    back = for_client(
        [(b"connection", b"close, x-hop"), (b"x-hop", b"1"), (b"set-cookie", b"a"), (b"set-cookie", b"b")],
        [],
        "http://w:1",
    )
    assert back == [(b"set-cookie", b"a"), (b"set-cookie", b"b")]


def test_b079_workers_see_the_configured_credential_or_none() -> None:
    for name in (b"authorization", b"x-api-key", b"api-key", b"cookie", b"proxy-authorization"):
        request = [(name, b"Bearer client-secret"), (name, b"again")]
        assert names(for_worker(request, api_key="", request_id="r", rank=None)) == [b"x-request-id"]
        keyed = for_worker(request, api_key="wkey", request_id="r", rank=None)
        assert [line for line in keyed if line[0] != b"x-request-id"] == [(b"authorization", b"Bearer wkey")]


def test_b070_clients_can_not_choose_the_worker_or_the_rank() -> None:
    request = [(b"x-data-parallel-rank", b"3"), (b"x-worker-id", b"7"), (b"x-prefiller-host-port", b"evil:1")]
    assert names(for_worker(request, api_key="", request_id="r", rank=None)) == [b"x-request-id"]
    ranked = for_worker(request, api_key="", request_id="r", rank=1)
    assert (b"x-data-parallel-rank", b"1") in ranked
    assert names(ranked).count(b"x-data-parallel-rank") == 1


def test_the_gateways_own_lines_replace_the_workers() -> None:
    given = [(b"x-request-id", b"theirs"), (b"server", b"uvicorn")]
    back = for_client(given, [(b"x-request-id", b"ours")], "http://w:1")
    assert back == [(b"x-request-id", b"ours")]


@pytest.mark.parametrize(
    ("location", "told"),
    [
        (b"http://w:1/v1/models?a=1", b"/v1/models?a=1"),
        (b"/v1/models", b"/v1/models"),
        (b"http://w:11/v1", b"http://w:11/v1"),
    ],
)
def test_a_redirect_to_the_worker_leads_back_to_the_gateway(location: bytes, told: bytes) -> None:
    assert for_client([(b"location", location)], [], "http://w:1") == [(b"location", told)]
