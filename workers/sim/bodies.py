"""Request bodies as far as the simulated worker acts on them, and vLLM's objections to bad ones."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

import msgspec

T = TypeVar("T")
# Where msgspec says the mistake is: "... missing required field `x`" or "... - at `$.x`".
_PLACE: Final = re.compile(r"(?:field |at `\$\.|at )`?(\w[^`]*)`$")


_EXPECTED: Final = re.compile(r"^Expected `([^`]*)`, got")
# Pydantic's names and words for msgspec's kinds.
_KINDS: Final = {
    "str": ("string", "Input should be a valid string"),
    "int": ("int", "Input should be a valid integer"),
    "float": ("float", "Input should be a valid number"),
    "bool": ("bool", "Input should be a valid boolean"),
    "array": ("list", "Input should be a valid list"),
    "object": ("dict", "Input should be a valid dictionary"),
}
# VLLM_MAX_N_SEQUENCES
_MOST_SEQUENCES: Final = 16_384


class Refused(Exception):
    """An answer in vLLM's error shape."""

    def __init__(
        self, message: str, *, param: str | None = None, kind: str = "BadRequestError", status: int = 0
    ) -> None:
        super().__init__(message)
        self.param: Final = param
        self.kind: Final = kind
        self.status: Final = status or {"NotFoundError": 404, "ForbiddenError": 403}.get(kind, 400)

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct):
    """Fields of /v1/chat/completions and /v1/completions besides those that make the prompt."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    echo: bool | None = False
    prompt_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else [stop for stop in self.stop or () if stop]


class TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def decoded(body: bytes, kind: type[T]) -> T:
    """`body` as `kind`, as freely as vLLM reads it: "2" and 2.0 are integers. Raises Refused."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as wrong:
        place = _PLACE.search(str(wrong))
        param = f"body.{place[1]}" if place else "body"
        raise Refused(_objection(str(wrong), param, body), param=param, kind="Bad Request") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Refused(_json_error(body), param="body", kind="Bad Request") from None


def _objection(wrong: str, param: str, body: bytes) -> str:
    """Pydantic's words for what msgspec found wrong, an entry for each kind that the field could have had."""
    given: Any = json.loads(body)
    expected = _EXPECTED.search(wrong)
    if expected is None:
        entries = [("missing", "Field required")]
    else:
        for step in re.findall(r"\w+", param)[1:]:
            given = given[int(step) if isinstance(given, list) else step]
        entries = [_kind(kind, given) for kind in expected[1].split(" | ") if kind != "null"]
    shown: object = given
    if isinstance(given, list | dict):
        whole = cast("list[Any] | dict[str, Any]", given)
        shown = f"<{type(whole).__name__} of {len(whole)} items>"
    lines = [str({"type": kind, "loc": param, "msg": said, "input": shown}) for kind, said in entries]
    return "\n  ".join([f"{len(lines)} validation error{'s' * (len(lines) > 1)}:", *lines])


def _kind(kind: str, given: object) -> tuple[str, str]:
    name, said = _KINDS.get(kind, (kind, f"Input should be a valid {kind}"))
    if name == "int" and isinstance(given, float):
        return "int_from_float", f"{said}, got a number with a fractional part"
    if name in ("int", "float") and isinstance(given, str):
        return (
            f"{name}_parsing",
            f"{said}, unable to parse string as a{'n' * (name == 'int')} {said.split()[-1]}",
        )
    if name == "bool" and isinstance(given, str | int):
        return "bool_parsing", f"{said}, unable to interpret input"
    return f"{name}_type", said


def prompts_of(body: bytes) -> list[str | list[int]]:
    """The prompts of a /v1/completions body. Raises Refused."""

    class Prompts(msgspec.Struct):
        prompt: str | list[int | str | list[int]] | None = None

    prompt = decoded(body, Prompts).prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refused("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if all(isinstance(part, int) for part in prompt):
        return [cast("list[int]", prompt)]
    if any(isinstance(part, int) for part in prompt):
        raise Refused("prompt must be a string, token ids, or a list of either", param="prompt")
    return cast("list[str | list[int]]", prompt)


def check(body: Body, served: Sequence[str], max_model_len: int) -> None:
    """Raises Refused where vLLM does, in its words as far as clients look at them."""
    if body.model is not None and body.model not in served:
        aliases = ", ".join(served)
        raise Refused(
            f"The model `{body.model}` does not exist. Valid aliases: {aliases}.",
            param="model",
            kind="NotFoundError",
        )
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if most is not None and most < 1:
        raise _value("max_tokens", most, f"max_tokens must be at least 1, got {most}.")
    if most is not None and most > max_model_len:
        raise _value(
            "max_tokens",
            most,
            f"max_tokens={most} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
        )
    if body.temperature is not None and body.temperature < 0:
        given = body.temperature
        raise _value("temperature", given, f"temperature must be non-negative, got {given}.")
    if body.n is not None and body.n < 1:
        raise Refused(f"n must be at least 1, got {body.n}.")
    if body.n is not None and body.n > _MOST_SEQUENCES:
        raise Refused(
            f"n must be at most {_MOST_SEQUENCES}, got {body.n}. "
            "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        )
    if body.n is not None and body.n > 1 and body.temperature == 0:
        raise Refused("n must be 1 when using greedy sampling, got " + f"{body.n}.", param="n")
    if body.cache_salt is not None and (
        not body.cache_salt or len(body.cache_salt) > 128 or set(body.cache_salt) & set("@/\\\0")
    ):
        raise Refused(
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
            param="cache_salt",
        )
    if body.stream_options is not None and not body.stream:
        raise Refused("Stream options can only be defined when `stream=True`.", param="stream_options")


def forwarded_ids(body: Body, vocabulary: int) -> list[int] | None:
    """Token ids that take the place of the rendered prompt (`kv_transfer_params`). Raises Refused."""
    ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
    if ids is None or body.echo:
        return None
    param = "kv_transfer_params.prompt_token_ids"
    if not (
        isinstance(ids, list)
        and ids
        and all(type(each) is int and each >= 0 for each in cast("list[object]", ids))
    ):
        raise Refused(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers. "
            f"(parameter={param})",
            param=param,
        )
    found = cast("list[int]", ids)
    if max(found) >= vocabulary:
        raise Refused(f"Token id {max(found)} is out of vocabulary (parameter={param})", param=param)
    return found


def _value(param: str, value: object, message: str) -> Refused:
    return Refused(f"{message} (parameter={param}, value={value})", param=param)


def _json_error(body: bytes) -> str:
    """The standard library's words for what is wrong, as clients of vLLM get them."""
    try:
        json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as wrong:
        reason = wrong.msg if isinstance(wrong, json.JSONDecodeError) else "invalid UTF-8"
        return f"1 validation error:\n  {{'type': 'json_invalid', 'msg': 'JSON decode error: {reason}'}}"
    return "1 validation error:\n  {'type': 'json_invalid', 'msg': 'JSON decode error'}"
