"""What routing needs of a request body, and nothing more: the body itself goes on as raw bytes."""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from gateway import errors
from gateway.api.bodies import Bodies, ListField
from gateway.api.forms import field_span
from gateway.api.usage import AnswerTail
from gateway.sessions.sessions import named_in_body
from store.prompt.request import (
    ChatPrompt,
    MessagesPrompt,
    PromptRequest,
    ResponsesPrompt,
    Side,
    TextPrompt,
    TokensPrompt,
)

Api = Literal["chat", "completions", "messages", "responses", "other"]
S = TypeVar("S", bound=msgspec.Struct)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_STORED = "/v1/responses/"
# Where a worker would answer other methods with an error of its framework, in no API's shape.
POST_ONLY = frozenset(
    "/v1/chat/completions /v1/completions /v1/messages /v1/messages/count_tokens /v1/responses "
    "/v1/embeddings /v1/rerank /v1/score /v1/audio/transcriptions /v1/audio/translations "
    "/tokenize /detokenize /classify /score /rerank /v2/rerank /v2/embed /pooling".split()
)
# What they do they do to one worker, and to everybody's turns on it.
WORKERS_OWN = frozenset("/v1/load_lora_adapter /v1/unload_lora_adapter /inference/v1/abort_requests".split())
_NO_JSON = "the body is not valid JSON"
_VAST = "a body of so many parts has to be plain JSON: without NaN, Infinity and lone surrogates"
# A text of that size is read in 50 ms, and no model takes it; nothing else runs meanwhile in any thread.
_LONGEST = 16 << 20
# See `is_vast`. A million token ids are read in 90 ms.
_UNCOUNTED_BYTES = 1 << 19
_UNREAD_BYTES = 8 << 20
_MOST_PARTS = 20_000
_MOST_VALUES = 1 << 20
# What vLLM takes for true, as text.
_TRUE = frozenset(("true", "1", "1.0", "yes", "on", "t", "y"))
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d{1,9})')
_RESPONSE_ENDS = (b"response.completed", b"response.incomplete", b"response.failed", b"error")


class ParsedTurn(msgspec.Struct, frozen=True):
    """A request as routing sees it.

    model: "" where none is named.
    prompt: what shapes the engine's prompt, None where it can't be known; `unknown` then says why.
    session: what the body calls the session it belongs to, "" if it doesn't.
    response_id: the stored response that it goes on from or asks about, "" if none.
    reads_cache: whether the engine looks for cached blocks (with prompt_logprobs, for one, it does not).
    reports: whether the engine was asked to announce again what it finds cached (`kv_cache_report_mode`).
    one_sequence: whether the answer's usage speaks of one prompt and one sequence only.
    stream: whether the answer is asked for as an event stream.
    """

    api: Api
    model: str
    prompt: PromptRequest | None = None
    unknown: str = ""
    session: str = ""
    response_id: str = ""
    reads_cache: bool = True
    reports: bool = False
    one_sequence: bool = True
    stream: bool = False

    def complete(self, tail: AnswerTail) -> bool:
        """Whether an event stream that ended did so in its API's own way."""
        if self.api == "messages":
            return tail.last_event() in (b"message_stop", b"error")
        if self.api == "responses":
            return tail.last_event() in _RESPONSE_ENDS
        return bool(tail) and (self.api == "other" or tail.ends_with_done())

    def error_event(self, tail: AnswerTail, error: errors.ApiError, response_id: str = "") -> bytes:
        """The last event of a stream that broke off: no client takes what came before for whole.

        response_id: of the response that was being made, where the stream had named it.
        """
        gap = b"" if not tail or tail.content().endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
        if self.api == "messages":
            return gap + b"event: error\ndata: " + errors.body(error, "anthropic") + b"\n\n"
        if self.api == "responses":
            return gap + b"event: response.failed\ndata: " + self._failed(tail, error, response_id) + b"\n\n"
        return gap + b"data: " + errors.body(error, "openai") + b"\n\n"

    def _failed(self, tail: AnswerTail, error: errors.ApiError, response_id: str) -> bytes:
        """Of the events that end a response the one that every client of the API knows."""
        numbers = _SEQUENCE_NUMBER.findall(tail.content())
        response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "failed",
            "error": {"code": error.code, "message": error.message},
            "incomplete_details": None,
            "model": self.model,
            "output": [],
        }
        number = int(numbers[-1]) + 1 if numbers else 0
        return msgspec.json.encode(
            {"type": "response.failed", "sequence_number": number, "response": response}
        )


class _Head(msgspec.Struct):
    """What places a turn of any API, whether or not anybody looks at its prompt."""

    model: str | None = None
    stream: Any = None
    kv_transfer_params: Any = None
    previous_response_id: Any = None
    metadata: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    vllm_xargs: Any = None
    litellm_session_id: Any = None


class _Chat(msgspec.Struct):
    """What a chat body asks for."""

    n: Any = None
    echo: Any = None
    prompt_logprobs: Any = None


class _Completion(msgspec.Struct):
    """The least that a completions body must be."""

    prompt: Any = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    echo: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None


class _CompletionShape(msgspec.Struct):
    """Fields of a completions body that shape the prompt, with vLLM's defaults."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    cache_salt: str | None = None


class _Messages(msgspec.Struct):
    """The least that a chat or messages body must be; what else is wrong with it the worker says better."""

    messages: list[dict[str, Any]]


class _Responses(msgspec.Struct):
    """The least that a responses body must be."""

    input: str | list[Any]


class _Other(msgspec.Struct):
    model: Any = None
    kv_transfer_params: Any = None
    sampling_params: Any = None


def parse(
    method: str,
    path: str,
    body: bytes,
    content_type: bytes = b"",
    bodies: Bodies | None = None,
    *,
    encoding: bytes = b"",
    prompts: bool = True,
) -> ParsedTurn:
    """Read `body` as what `path` takes; what it repeats of earlier `bodies` is not read again.

    encoding: its Content-Encoding. prompts: whether anybody will look at the prompt. Raises InvalidRequest,
    with the field to blame if there is one, and UnsupportedMedia.
    """
    reader = _READERS.get(path) if method == "POST" else None
    if reader is not None:
        if encoding not in (b"", b"identity"):
            raise errors.UnsupportedMedia(
                "send the body uncompressed", headers={"accept-encoding": "identity"}
            )
        try:
            bodies = bodies or Bodies(0)
            if not prompts:
                name = _LISTS.get(path)
                return _placed(API_OF[path], bodies.rest(body, name) if name else body, "off")
            unread = _why_unread(body)
            if unread:
                return _placed(API_OF[path], body, unread)
            return reader(body, bodies)
        except errors.InvalidRequest as error:
            if error.message == _NO_JSON and _is_another_kind(content_type, body):
                raise errors.UnsupportedMedia("send the body as application/json") from None
            raise
    response_id, _, below = path.removeprefix(_STORED).partition("/")
    # Nothing is posted to a response but what is below it: `/v1/responses/render` is no response's path.
    if path.startswith(_STORED) and (method != "POST" or below):
        return ParsedTurn("responses", "", unknown="other_api", response_id=response_id)
    return _other(body, content_type)


def _placed(api: Api, rest: bytes, unknown: str = "invalid") -> ParsedTurn:
    """A turn as its head has it: of its prompt nothing is known."""
    head = _decode(rest, _Head)
    if not head.model and api == "messages":
        raise errors.InvalidRequest("Object missing required field `model`", param="model")
    _refuse_transfer(head.kv_transfer_params)
    session = named_in_body(head.metadata, head.session_id, head.prompt_cache_key, head.litellm_session_id)
    earlier = head.previous_response_id if api == "responses" else None
    return ParsedTurn(
        api,
        head.model or "",
        unknown=unknown,
        session=session,
        response_id=earlier if isinstance(earlier, str) else "",
        reports=_asks_for_report(head.vllm_xargs),
        stream=str(head.stream).lower() in _TRUE,
    )


def _asks_for_report(vllm_xargs: object) -> bool:
    return _item(vllm_xargs, "kv_cache_report_mode") == "full"


def _why_unread(body: bytes) -> str:
    if len(body) > _LONGEST:
        return "too_long"
    return "too_many_parts" if is_vast(body) else ""


def _read(body: bytes, bodies: Bodies, kind: type[S], name: ListField) -> tuple[S | None, bytes]:
    """The prompt of a body, None where only a worker can say what is wrong with it; and the rest of it."""
    try:
        return bodies.read(body, kind, name)
    except _UNREADABLE:
        return None, body


def _with_prompt(turn: ParsedTurn, prompt: PromptRequest | None, **more: bool) -> ParsedTurn:
    return replace(turn, prompt=prompt, unknown="" if prompt is not None else turn.unknown, **more)


def _chat(body: bytes, bodies: Bodies) -> ParsedTurn:
    prompt, rest = _read(body, bodies, ChatPrompt, "messages")
    turn, asked = _placed("chat", rest), _decode(rest, _Chat)
    if prompt is None:
        _decode(rest, _Messages)
    return _with_prompt(
        turn,
        prompt,
        reads_cache=asked.prompt_logprobs is None and not asked.echo,
        one_sequence=asked.n in (None, 1),
    )


def _messages(body: bytes, bodies: Bodies) -> ParsedTurn:
    prompt, rest = _read(body, bodies, MessagesPrompt, "messages")
    turn = _placed("messages", rest)
    if prompt is None:
        _decode(rest, _Messages)
    return _with_prompt(turn, prompt)


def _responses(body: bytes, bodies: Bodies) -> ParsedTurn:
    prompt, rest = _read(body, bodies, ResponsesPrompt, "input")
    turn = _placed("responses", rest)
    if prompt is None:
        _decode(rest, _Responses)
    return _with_prompt(turn, prompt)


def _completion(body: bytes, _: Bodies) -> ParsedTurn:
    turn, asked = _placed("completions", body), _decode(body, _Completion)
    prompts = _prompts(asked.prompt)
    alone = asked.n in (None, 1) and asked.best_of in (None, 1) and not asked.use_beam_search
    return _with_prompt(
        turn,
        _shaped(body, prompts[0]) if prompts else None,
        reads_cache=asked.prompt_logprobs is None and not (asked.echo and asked.logprobs is not None),
        one_sequence=alone and len(prompts) == 1,
    )


def _prompts(given: object) -> list[str | list[int]]:
    """The prompts of a completions body; a batch goes where its first prompt is held.

    None where an id is no plain number: vLLM takes `true`, `1.0` and `"1"` for 1.
    """
    if not isinstance(given, list):
        return [given] if isinstance(given, str) and given else []
    items = cast(list[Any], given)
    if _are(items, int):
        return [items]
    whole = _are(items, str) or all(
        isinstance(item, list) and _are(cast(list[Any], item), int) for item in items
    )
    return [item for item in items if item] if whole else []


def _are(items: list[Any], kind: type) -> bool:
    """Whether all are of that very type: `bool` is no `int` here."""
    return set(map(type, items)) <= {kind}


def _shaped(body: bytes, prompt: str | list[int]) -> TextPrompt | TokensPrompt | None:
    try:
        shape = msgspec.json.decode(body, type=_CompletionShape, strict=False)
    except _UNREADABLE:
        return None
    if isinstance(prompt, str):
        return TextPrompt(
            text=prompt,
            add_special_tokens=shape.add_special_tokens,
            truncate_prompt_tokens=shape.truncate_prompt_tokens,
            truncation_side=shape.truncation_side,
            cache_salt=shape.cache_salt,
        )
    return TokensPrompt(
        ids=prompt,
        truncate_prompt_tokens=shape.truncate_prompt_tokens,
        truncation_side=shape.truncation_side,
        cache_salt=shape.cache_salt,
    )


def _other(body: bytes, content_type: bytes) -> ParsedTurn:
    """Any other API: the model is taken from the body if it is JSON, or a form, and names one."""
    named = field_span(body, content_type, b"model")
    if named is not None:
        return ParsedTurn("other", body[slice(*named)].decode("utf-8", "replace"), unknown="other_api")
    try:
        head = _decode(body, _Other)
    except errors.InvalidRequest as error:
        if error.message == _VAST:
            raise
        return ParsedTurn("other", "", unknown="other_api")
    _refuse_transfer(head.kv_transfer_params)
    _refuse_transfer(_item(_item(head.sampling_params, "extra_args"), "kv_transfer_params"))
    return ParsedTurn("other", head.model if isinstance(head.model, str) else "", unknown="other_api")


def _item(value: object, name: str) -> object:
    return cast(dict[str, object], value).get(name) if isinstance(value, dict) else None


def _decode(body: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except _UNREADABLE:
        pass
    # Lone surrogates, NaN and 1e999 are no JSON, but vLLM reads bodies with Python's parser, which takes
    # them.
    if body.lstrip()[:1] == b"{" and is_vast(body):
        raise errors.InvalidRequest(_VAST)
    try:
        return msgspec.convert(json.loads(body), kind, strict=False)
    except msgspec.ValidationError as error:
        message = str(error)
        raise errors.InvalidRequest(message, param=_field_in(message)) from None
    except (ValueError, RecursionError):
        raise errors.InvalidRequest(_NO_JSON) from None


def _is_another_kind(content_type: bytes, body: bytes) -> bool:
    """Whether `body` is something else than JSON, not only broken."""
    kind = content_type.lower()
    return bool(kind) and b"json" not in kind and b"octet-stream" not in kind and body.lstrip()[:1] != b"{"


def is_vast(body: bytes) -> bool:
    """Whether reading `body` whole would hold up the event loop: for its parts, not for long texts in it.

    Objects and lists cost 0.3 us each, Python's parser 1 us, numbers and texts a tenth. A million tokens in
    ordinary messages are a few thousand.
    """
    if len(body) <= _UNCOUNTED_BYTES:
        return False
    each = np.frombuffer(body, dtype=np.uint8)
    # Of 800 KB this takes 0.15 ms, `bytes.count` 2.
    if np.count_nonzero(each == ord(",")) > _MOST_VALUES:
        return True
    if np.count_nonzero((each == ord("{")) | (each == ord("["))) <= _MOST_PARTS:
        return False
    if len(body) > _UNREAD_BYTES:
        return True
    # Text is full of brackets, too. Escaped backslashes go first: a quote behind one ends its text.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 8 * _MOST_PARTS:
        return True
    return sum(bare.count(b"{") + bare.count(b"[") for bare in plain.split(b'"')[::2]) > _MOST_PARTS


def _field_in(message: str) -> str | None:
    """The field that a validation message of msgspec speaks of."""
    if "missing required field" in message:
        return message.split("`")[1]
    _, _, path = message.partition(" - at `$.")
    return path.rstrip("`") or None


def _refuse_transfer(params: object) -> None:
    # They tell a worker which host to connect to: never a client's to say.
    if params is not None:
        raise errors.InvalidRequest("kv_transfer_params is not for clients", param="kv_transfer_params")


API_OF: Mapping[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
_LISTS: Mapping[str, ListField] = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
_READERS: Mapping[str, Callable[[bytes, Bodies], ParsedTurn]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
}
