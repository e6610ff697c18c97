"""The endpoints of a worker: body → prompt (the model's own tokenizer and template) → turns in the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final, Literal

import msgspec

from store.prompt.local import LocalPrompts
from store.prompt.request import (
    ChatPrompt,
    MessagesPrompt,
    Prompt,
    PromptRequest,
    ResponsesPrompt,
    TextPrompt,
    TokensPrompt,
)
from workers.sim import bodies, messages, pooling
from workers.sim.answers import Answers, Api
from workers.sim.bodies import Body, Refused
from workers.sim.exchange import Exchange
from workers.sim.kv_publisher import HIGH_WATER
from workers.sim.life import Life, Spec
from workers.sim.messages import CountBody, Message, MessagesBody
from workers.sim.responses import Response, ResponsesBody
from workers.sim.vocabulary import Vocabulary

Handler = Callable[[Exchange, bytes], Awaitable[None]]
_encode: Final = msgspec.json.encode
_RESPONSE: Final = "/v1/responses/"
# Prompts of fewer characters are made on the loop: a thread's two switches cost more than 2 ms of CPU.
_SMALL: Final = 20_000


class Endpoints:
    """Of one life. Prompts may be made in `prompt_thread`."""

    def __init__(
        self, spec: Spec, prompts: LocalPrompts, vocabulary: Vocabulary, life: Life, prompt_thread: Executor
    ) -> None:
        self._spec: Final = spec
        self._prompts: Final = prompts
        self._vocabulary: Final = vocabulary
        self._life: Final = life
        self._prompt_thread: Final = prompt_thread
        self._fixed: Final[dict[str, tuple[str, Handler]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/responses": ("POST", self._responses),
            "/v1/messages": ("POST", self._messages),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/chat/completions/render": ("POST", self._render_chat),
            "/v1/completions/render": ("POST", self._render_completions),
            "/v1/embeddings": ("POST", self._embeddings),
            "/v1/score": ("POST", self._score),
            "/score": ("POST", self._score),
            "/v1/rerank": ("POST", self._rerank),
            "/v2/rerank": ("POST", self._rerank),
            "/rerank": ("POST", self._rerank),
            "/classify": ("POST", self._classify),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/kv_event_sources": ("GET", self._event_sources),
            "/metrics": ("GET", self._metrics),
            "/load": ("GET", self._load),
            "/health": ("GET", self._nothing),
            "/ping": ("GET", self._nothing),
            "/version": ("GET", self._version),
            "/is_sleeping": ("GET", self._is_sleeping),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
        }

    def at(self, path: str) -> dict[str, Handler]:
        """What is served at `path`, by method; empty where nothing is."""
        if path in self._fixed:
            return dict([self._fixed[path]])
        if not path.startswith(_RESPONSE):
            return {}
        match path.removeprefix(_RESPONSE).split("/"):
            case [_]:
                return {"GET": self._response, "DELETE": self._delete_response}
            case [_, "cancel"]:
                return {"POST": self._cancel_response}
            case [_, "input_items"]:
                return {"GET": self._input_items}
            case _:
                return {}

    # Generation

    async def _chat(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        chat = bodies.decoded(body, ChatPrompt)
        self._check(request)
        ids = bodies.forwarded_ids(request, self._vocabulary.size)
        asked: PromptRequest = chat if ids is None else TokensPrompt(ids=ids, cache_salt=request.cache_salt)
        await self._answer(exchange, "chat", request, [await self._prompt(asked)])

    async def _completions(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        await self._answer(exchange, "completions", request, await self._text_prompts(request, body))

    async def _answer(self, exchange: Exchange, api: Api, request: Body, prompts: list[Prompt]) -> None:
        identity = _identity(exchange, request)
        answers = Answers(api, request, self._spec.names[0], identity, int(time.time()))
        await self._life.generate(exchange, answers, request, prompts)

    async def _messages(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, MessagesBody).plain()
        asked: PromptRequest = bodies.decoded(body, MessagesPrompt)
        self._check(request)
        ids = bodies.forwarded_ids(request, self._vocabulary.size)
        if ids is not None:
            asked = TokensPrompt(ids=ids, cache_salt=request.cache_salt)
        message = Message(request, self._spec.names[0], _identity(exchange, request))
        await self._life.generate(exchange, message, request, [await self._prompt(asked)])

    async def _count_tokens(self, exchange: Exchange, body: bytes) -> None:
        self._check(Body(model=bodies.decoded(body, CountBody).model))
        prompt = await self._prompt(bodies.decoded(body, MessagesPrompt))
        await exchange.answer(200, messages.counted(len(prompt.tokens)))

    async def _responses(self, exchange: Exchange, body: bytes) -> None:
        asked = bodies.decoded(body, ResponsesBody)
        given = bodies.decoded(body, ResponsesPrompt)
        request = asked.plain()
        self._check(request)
        responses = self._life.responses
        items = responses.history(given)
        if given.previous_response_id is not None:
            given = msgspec.structs.replace(given, input=items, previous_response_id=None)
        prompt = await self._prompt(given)
        response = Response(asked, self._spec.names[0], self._spec.max_model_len - len(prompt.tokens))
        if not asked.background or asked.stream:
            await self._life.generate(exchange, response, request, [prompt])
            if asked.store is not False:
                responses.put(response, items)
            return
        if asked.store is False:
            raise Refused("background mode needs store=true", param="background")
        stored = responses.put(response, items)
        # As it was when it was asked for: nothing of it is there yet.
        queued = _encode(response.result)
        session = request.session_id or exchange.header(b"x-session-id")
        stored.task = asyncio.create_task(self._life.work_on(response, request, prompt, session))
        await exchange.answer(200, queued)

    async def _response(self, exchange: Exchange, _body: bytes) -> None:
        stored = self._life.responses.get(_response_id(exchange))
        await exchange.answer(200, _encode(stored.response.result))

    async def _cancel_response(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, _encode(self._life.responses.cancel(_response_id(exchange))))

    async def _delete_response(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, _encode(self._life.responses.delete(_response_id(exchange))))

    async def _input_items(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, _encode(self._life.responses.input_items(_response_id(exchange))))

    def _check(self, request: Body) -> None:
        bodies.check(request, self._spec.names, self._spec.max_model_len)

    async def _text_prompts(self, request: Body, body: bytes) -> list[Prompt]:
        given = bodies.prompts_of(body)
        self._check(request)
        shape = bodies.decoded(body, _TextShape)
        prompts: list[Prompt] = []
        for each in given:
            asked: TextPrompt | TokensPrompt
            if isinstance(each, str):
                asked = TextPrompt(text=each, add_special_tokens=shape.add_special_tokens)
            else:
                asked = self._given_ids(each)
            asked.truncate_prompt_tokens = shape.truncate_prompt_tokens
            asked.truncation_side = shape.truncation_side
            asked.cache_salt = request.cache_salt
            prompts.append(await self._prompt(asked))
        return prompts

    def _given_ids(self, ids: list[int]) -> TokensPrompt:
        if max(ids, default=0) >= self._vocabulary.size or min(ids, default=0) < 0:
            raise Refused(f"Token id {max(ids)} is out of vocabulary")
        return TokensPrompt(ids=ids)

    async def _prompt(self, request: PromptRequest) -> Prompt:
        """Raises Unrenderable."""
        plan = self._prompts.plan(request, self._spec.scheme)
        if plan.missing < _SMALL:
            return self._prompts.finish(plan)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prompt_thread, self._prompts.finish, plan)

    # Pooling

    async def _embeddings(self, exchange: Exchange, body: bytes) -> None:
        asked = bodies.decoded(body, pooling.Embedding)
        self._check(Body(model=asked.model))
        inputs = pooling.texts_or_ids(asked.input)
        tokens = await self._tokens(inputs)
        await exchange.answer(200, pooling.embeddings(asked, inputs, tokens, self._spec.names[0]))

    async def _score(self, exchange: Exchange, body: bytes) -> None:
        asked = bodies.decoded(body, pooling.Score)
        self._check(Body(model=asked.model))
        both = (asked.text_1, asked.text_2)
        tokens = await self._tokens([text for side in both for text in _several(side)])
        await exchange.answer(200, pooling.scores(asked, tokens, self._spec.names[0]))

    async def _rerank(self, exchange: Exchange, body: bytes) -> None:
        asked = bodies.decoded(body, pooling.Rerank)
        self._check(Body(model=asked.model))
        tokens = await self._tokens([asked.query, *pooling.texts_of(asked.documents)])
        await exchange.answer(200, pooling.ranking(asked, tokens, self._spec.names[0]))

    async def _classify(self, exchange: Exchange, body: bytes) -> None:
        asked = bodies.decoded(body, pooling.Classify)
        self._check(Body(model=asked.model))
        inputs = _several(asked.input)
        tokens = await self._tokens(inputs)
        await exchange.answer(200, pooling.classes(inputs, tokens, self._spec.names[0]))

    async def _tokens(self, inputs: Iterable[str | list[int]]) -> int:
        count = 0
        for each in inputs:
            asked = TextPrompt(text=each) if isinstance(each, str) else self._given_ids(each)
            count += len((await self._prompt(asked)).tokens)
        return count

    # Everything else vLLM serves

    async def _render_chat(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        chat = bodies.decoded(body, ChatPrompt)
        self._check(request)
        self._require_render()
        ids = bodies.forwarded_ids(request, self._vocabulary.size)
        prompt = await self._prompt(chat if ids is None else TokensPrompt(ids=ids))
        await exchange.answer(200, _encode(self._rendered(exchange, "chatcmpl", request, prompt)))

    async def _render_completions(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        self._require_render()
        prompts = await self._text_prompts(request, body)
        rendered = [self._rendered(exchange, "cmpl", request, prompt) for prompt in prompts]
        await exchange.answer(200, _encode(rendered))

    def _require_render(self) -> None:
        if not self._spec.renders:
            raise Refused("This endpoint needs --enable-scale-out.", kind="ForbiddenError")

    def _rendered(self, exchange: Exchange, prefix: str, request: Body, prompt: Prompt) -> dict[str, Any]:
        identity = _identity(exchange, request)
        most = request.max_completion_tokens or request.max_tokens
        room = self._spec.max_model_len - len(prompt.tokens)
        return {
            "request_id": f"{prefix}-{identity}",
            "token_ids": prompt.tokens.tolist(),
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": {"temperature": request.temperature or 1.0, "max_tokens": most or room},
            "model": self._spec.names[0],
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": bool(request.stream),
            "stream_options": None,
            "cache_salt": request.cache_salt,
            "priority": 0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    async def _tokenize(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, bodies.TokenizeBody)
        asked: PromptRequest
        if request.messages is not None:
            asked = bodies.decoded(body, ChatPrompt)
        elif request.prompt is not None:
            special = request.add_special_tokens is not False
            asked = TextPrompt(text=request.prompt, add_special_tokens=special)
        else:
            raise Refused("prompt or messages is required", param="prompt")
        self._check(Body(model=request.model))
        ids = (await self._prompt(asked)).tokens.tolist()
        answer = {
            "count": len(ids),
            "max_model_len": self._spec.max_model_len,
            "tokens": ids,
            "token_strs": self._vocabulary.strings(ids) if request.return_token_strs else None,
        }
        await exchange.answer(200, _encode(answer))

    async def _detokenize(self, exchange: Exchange, body: bytes) -> None:
        ids = bodies.decoded(body, bodies.DetokenizeBody).tokens
        await exchange.answer(200, _encode({"prompt": self._vocabulary.decode(ids)}))

    async def _models(self, exchange: Exchange, _body: bytes) -> None:
        created = int(time.time())
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": str(self._spec.model),
                "parent": None,
                "max_model_len": self._spec.max_model_len,
                "permission": [permission],
            }
            for name in self._spec.names
        ]
        await exchange.answer(200, _encode({"object": "list", "data": cards}))

    async def _event_sources(self, exchange: Exchange, _body: bytes) -> None:
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._life.publisher.endpoint,
            "replay_endpoint": self._life.publisher.replay_endpoint,
            "buffer_steps": self._spec.buffer_steps,
            "hwm": HIGH_WATER,
            "max_queue_size": HIGH_WATER,
            "topic": self._life.publisher.topic,
        }
        await exchange.answer(200, _encode({"0": source}))

    async def _metrics(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, self._life.page.text(), "text/plain; version=1.0.0; charset=utf-8")

    async def _load(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, _encode({"server_load": self._life.live.open}))

    async def _version(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, b'{"version":"0.32.0"}')

    async def _is_sleeping(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, b'{"is_sleeping":false}')

    async def _nothing(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, b"")

    async def _reset_prefix_cache(self, exchange: Exchange, _body: bytes) -> None:
        done = self._life.live.clear()
        await exchange.answer(200 if done else 500, b"")


def _identity(exchange: Exchange, request: Body) -> str:
    return exchange.header(b"x-request-id") or request.request_id or uuid.uuid4().hex


def _response_id(exchange: Exchange) -> str:
    return exchange.path.removeprefix(_RESPONSE).split("/")[0]


def _several(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


class _TextShape(msgspec.Struct):
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
