"""Bodies of very many parts go on unread: they hold up nothing, and cost cache hits at most."""

import json

import pytest

from gateway.api.aliases import Aliases
from gateway.api.bodies import Bodies
from gateway.api.forms import field_span
from gateway.api.parse import is_vast, parse
from gateway.errors import InvalidRequest
from gateway.settings import ModelSettings
from tests.clock import cpu_share

PART = b'{"type":"text","text":"a"}'
MESSAGE = b'{"role":"user","content":"a"}'
MANY = 300_000


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def chat(content: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"m","stream":true,"messages":[{"role":"user","content":' + content + b"}]" + more + b"}"


VAST = {
    "parts": ("/v1/chat/completions", chat(listed(PART, MANY))),
    "messages": ("/v1/messages", b'{"model":"m","stream":true,"messages":' + listed(MESSAGE, MANY) + b"}"),
    "items": ("/v1/responses", b'{"model":"m","stream":true,"input":' + listed(MESSAGE, MANY) + b"}"),
    "tools": ("/v1/chat/completions", chat(b'"a"', b',"tools":' + listed(b'{"type":"function"}', MANY))),
    "empty": ("/v1/chat/completions", chat(listed(b"{}", 4 * MANY))),
    "ids": ("/v1/completions", b'{"model":"m","stream":true,"prompt":' + listed(b"1", 10 * MANY) + b"}"),
}


@pytest.mark.parametrize("kind", VAST)
def test_b016_a_body_of_300_000_parts_is_placed_unread_and_cheap(kind: str) -> None:
    path, body = VAST[kind]
    parsed = parse("POST", path, body, b"application/json", Bodies(64 << 20))
    assert (parsed.model, parsed.stream, parsed.prompt, parsed.unknown) == ("m", True, None, "too_many_parts")
    # 7 to 18 % of what reading them takes.
    assert cpu_share(lambda: parse("POST", path, body), of=lambda: json.loads(body)) < 0.4


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_b016_a_text_of_64_mib_is_placed_unread_and_cheap(path: str) -> None:
    fields = b'{"messages":[{"role":"user","content":%b}],"input":%b,"prompt":%b,"model":"m","stream":true}'
    text = b'"' + b"word \\n" * ((64 << 20) // 21) + b'"'
    body = fields % (text, text, text)
    parsed = parse("POST", path, body, b"application/json", Bodies(64 << 20))
    assert (parsed.model, parsed.stream, parsed.prompt, parsed.unknown) == ("m", True, None, "too_long")
    assert cpu_share(lambda: parse("POST", path, body), of=lambda: json.loads(body)) < 0.4


def test_b070_transfer_parameters_are_found_behind_any_number_of_parts() -> None:
    body = chat(listed(PART, MANY), b',"kv_transfer_params":{"remote_host":"x"}')
    with pytest.raises(InvalidRequest):
        parse("POST", "/v1/chat/completions", body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_what_only_python_reads_is_refused_where_its_parser_would_take_seconds(path: str) -> None:
    body = chat(listed(PART, MANY), b',"x":NaN')
    with pytest.raises(InvalidRequest, match="plain JSON"):
        parse("POST", path, body)

    def refused() -> None:
        with pytest.raises(InvalidRequest):
            parse("POST", path, body)

    # Python's parser would be asked after another, which gives up at the end: more than twice as much.
    assert cpu_share(refused, of=lambda: json.loads(body)) < 0.8


@pytest.mark.parametrize("text", [b'{\\"a\\": [1, {}]}, ' * 60_000, b"{[(" * 500_000, b"word " * 900_000])
def test_long_texts_are_read_whatever_is_in_them(text: bytes) -> None:
    body = chat(b'"' + text + b'"')
    assert not is_vast(body)
    assert parse("POST", "/v1/chat/completions", body).prompt is not None


@pytest.mark.parametrize("text", ["{[", '"{', "\\{", '\\"[{', "{\\"])
@pytest.mark.parametrize(("parts", "vast"), [(19_999, False), (20_000, True)])
def test_brackets_in_text_are_no_parts_whatever_escapes_are_around_them(
    text: str, parts: int, vast: bool
) -> None:
    body = json.dumps({"x": [text * 400] * 1000, "y": [[]] * (parts - 2)}).encode()
    assert is_vast(body) is vast


def test_text_of_many_escapes_is_looked_through_about_as_fast_as_it_is_read() -> None:
    body = json.dumps('"{' * 1_000_000).encode()
    # 1.1; by an expression that steps from escape to escape, 6.
    assert cpu_share(lambda: is_vast(body), of=lambda: json.loads(body)) < 3


def test_thousands_of_messages_are_read_and_taken_from_the_last_body() -> None:
    bodies = Bodies(64 << 20)
    shared = [b'{"role":"user","content":"%b"}' % (b"x" * 300) for _ in range(3000)]

    def turn(count: int) -> bytes:
        return b'{"model":"m","messages":[' + b",".join(shared[:count]) + b"]}"

    parse("POST", "/v1/chat/completions", turn(2998), b"", bodies)
    parsed = parse("POST", "/v1/chat/completions", turn(3000), b"", bodies)
    assert parsed.prompt is not None
    assert len(parsed.prompt.messages) == 3000  # type: ignore[union-attr]


def test_a_form_of_300_000_parts_is_given_up() -> None:
    part = b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\ny\r\n'
    form = part * MANY + b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    assert field_span(form, b"multipart/form-data; boundary=b", b"model") is None
    few = part * 500 + form[len(part) * MANY :]
    found = field_span(few, b"multipart/form-data; boundary=b", b"model")
    assert found is not None
    assert few[slice(*found)] == b"m"

    def sought() -> object:
        return field_span(form, b"multipart/form-data; boundary=b", b"model")

    assert cpu_share(sought, of=lambda: form.split(b"--b")) < 0.3


def test_an_alias_is_found_without_looking_at_all_its_like() -> None:
    aliases = Aliases({"m": ModelSettings(aliases=["other"])}, set)
    body = b'{"model":"other","messages":[],"x":' + listed(b'{"model":"other"}', 20_000) + b"}"
    parsed = parse("POST", "/v1/chat/completions", body)
    assert cpu_share(lambda: aliases.resolved(parsed, body, b""), of=lambda: json.loads(body)) < 1


def test_in_what_only_python_reads_an_alias_is_not_looked_for_in_thousands_of_places() -> None:
    aliases = Aliases({"m": ModelSettings(aliases=["other"])}, set)
    body = b'{"model":"other","messages":[],"y":NaN,"x":' + listed(b'{"model":"other"}', 20_000 - 10) + b"}"
    parsed = parse("POST", "/v1/chat/completions", body)

    def refused() -> None:
        with pytest.raises(InvalidRequest):
            aliases.resolved(parsed, body, b"")

    # To look in one place is to read the body.
    assert cpu_share(refused, of=lambda: json.loads(body)) < 100
