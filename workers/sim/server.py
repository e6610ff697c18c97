"""The simulated worker as an ASGI application: vLLM's endpoints around the engine model, and fault switches.

A request: body → prompt (the model's own tokenizer and template) → one turn per prompt and choice in the
engine → tokens as the engine produces them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

import msgspec

from store.prompt.local import LocalPrompts
from store.prompt.request import ChatPrompt, Prompt, PromptRequest, TextPrompt, TokensPrompt, Unrenderable
from workers.sim import bodies
from workers.sim.bodies import Body, Refused
from workers.sim.exchange import Exchange, Gone, Message, Receive, Send
from workers.sim.faults import Faults, Ledger, Refuse, Restart
from workers.sim.kv_publisher import BUFFER_STEPS, HIGH_WATER
from workers.sim.life import Life, Spec
from workers.sim.listener import Listener
from workers.sim.live import Pool
from workers.sim.vocabulary import Vocabulary

logger = logging.getLogger(__name__)
_encode: Final = msgspec.json.encode
# Prompts of fewer characters are made on the loop: a thread's two switches cost more than 2 ms of CPU.
_SMALL: Final = 20_000


class Worker:
    """The application and what it consists of. `start` and `close` own ports, threads and tasks."""

    def __init__(self, spec: Spec, pool: Pool | None) -> None:
        self._spec: Final = spec
        self._pool: Final = pool
        self._pool_thread: Final = ThreadPoolExecutor(1, "pool")
        self._prompt_thread: Final = ThreadPoolExecutor(1, "prompt")
        self._prompts: Final = LocalPrompts.load(str(spec.model), cache_bytes=64 << 20)
        self._vocabulary: Final = Vocabulary(spec.model)
        self._ledger: Final = Ledger()
        self._faults = Faults()
        self._listener: Final = Listener(self, spec.host, spec.port)
        self._control: Final = Listener(self, spec.host, spec.control_port) if spec.control_port else None
        self._switching: asyncio.Task[None] | None = None
        self._life: Life
        self._routes: Final[dict[str, tuple[str, Callable[[Exchange, bytes], Awaitable[None]]]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions/render": ("POST", self._render_chat),
            "/v1/completions/render": ("POST", self._render_completions),
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

    async def start(self) -> None:
        """Raises OSError or zmq.ZMQError when a port is taken."""
        self._life = Life(self._spec, self._vocabulary, self._pool, self._pool_thread)
        if self._control is not None:
            await self._control.open()
        await self._listener.open()

    async def close(self) -> None:
        if self._switching is not None:
            self._switching.cancel()
        for listener in (self._listener, self._control):
            if listener is not None:
                listener.close()
                listener.reset_all()
        self._life.close()
        self._pool_thread.shutdown(wait=False, cancel_futures=True)
        self._prompt_thread.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        transport = self._listener.transport(tuple(scope["client"][:2]))
        exchange = Exchange(scope, receive, send, self._faults, transport)
        try:
            body = await exchange.body()
            if path.startswith("/sim/"):
                await self._switch(exchange, body)
                return
            await self._serve(exchange, body)
        except Gone:
            return
        finally:
            exchange.close()

    async def _serve(self, exchange: Exchange, body: bytes) -> None:
        method, handler = self._routes.get(exchange.path, ("", self._nothing))
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers]
        seen = exchange.seen = self._ledger.begin(time.time(), exchange.method, exchange.path, headers, body)
        how = "fault"
        try:
            if await exchange.meet_faults():
                return
            if not method:
                await exchange.answer(404, b'{"detail":"Not Found"}')
            elif method != exchange.method:
                await exchange.answer(
                    405, b'{"detail":"Method Not Allowed"}', more=[(b"allow", method.encode())]
                )
            else:
                await handler(exchange, body)
            how = "done"
        except Refused as refused:
            await exchange.answer(refused.status, refused.body())
            how = "done"
        except Unrenderable as wrong:
            await exchange.answer(400, Refused(str(wrong)).body())
            how = "done"
        except Gone as gone:
            how = gone.how
            raise
        except asyncio.CancelledError:
            how = "gone"
            raise
        except Exception:
            logger.exception("request failed")
            error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
            await exchange.answer(500, _encode({"error": error}))
        finally:
            self._ledger.end(seen, how)

    # Generation

    async def _chat(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        chat = bodies.decoded(body, ChatPrompt)
        bodies.check(request, self._spec.names, self._spec.max_model_len)
        ids = bodies.forwarded_ids(request, self._vocabulary.size)
        asked: PromptRequest = chat if ids is None else TokensPrompt(ids=ids, cache_salt=request.cache_salt)
        await self._life.generate(exchange, "chat", request, [await self._prompt(asked)])

    async def _completions(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        prompts = await self._text_prompts(request, body)
        await self._life.generate(exchange, "completions", request, prompts)

    async def _text_prompts(self, request: Body, body: bytes) -> list[Prompt]:
        given = bodies.prompts_of(body)
        bodies.check(request, self._spec.names, self._spec.max_model_len)
        shape = bodies.decoded(body, _TextShape)
        prompts: list[Prompt] = []
        for each in given:
            asked: TextPrompt | TokensPrompt
            if isinstance(each, str):
                asked = TextPrompt(text=each, add_special_tokens=shape.add_special_tokens)
            elif max(each, default=0) >= self._vocabulary.size or min(each, default=0) < 0:
                raise Refused(f"Token id {max(each)} is out of vocabulary")
            else:
                asked = TokensPrompt(ids=each)
            asked.truncate_prompt_tokens = shape.truncate_prompt_tokens
            asked.truncation_side = shape.truncation_side
            asked.cache_salt = request.cache_salt
            prompts.append(await self._prompt(asked))
        return prompts

    async def _prompt(self, request: PromptRequest) -> Prompt:
        """Raises Unrenderable."""
        plan = self._prompts.plan(request, self._spec.scheme)
        if plan.missing < _SMALL:
            return self._prompts.finish(plan)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prompt_thread, self._prompts.finish, plan)

    # Everything else vLLM serves

    async def _render_chat(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        chat = bodies.decoded(body, ChatPrompt)
        bodies.check(request, self._spec.names, self._spec.max_model_len)
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
        identity = exchange.header(b"x-request-id") or request.request_id or uuid.uuid4().hex
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
        bodies.check(Body(model=request.model), self._spec.names, self._spec.max_model_len)
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
            "buffer_steps": BUFFER_STEPS,
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

    # Fault switches

    async def _switch(self, exchange: Exchange, body: bytes) -> None:
        match exchange.method, exchange.path.removeprefix("/sim/").split("/"):
            case "GET", ["requests"]:
                await exchange.answer(200, _encode(self._ledger.report()))
            case "GET", ["requests", number, "body"] if number.isdigit():
                seen = self._ledger.find(int(number))
                await exchange.answer(
                    200 if seen else 404, seen.body if seen else b"", "application/octet-stream"
                )
            case "GET", ["faults"]:
                await exchange.answer(200, _encode(self._faults))
            case "POST", ["faults"]:
                try:
                    self._faults = msgspec.json.decode(body, type=Faults)
                except msgspec.DecodeError as wrong:
                    await exchange.answer(400, _encode({"error": str(wrong)}))
                    return
                await exchange.answer(200, _encode(self._faults))
                await self._apply(self._faults)
            case _:
                await exchange.answer(404, b'{"detail":"Not Found"}')

    async def _apply(self, faults: Faults) -> None:
        self._life.live.slow(faults.slow)
        self._life.publisher.drop = faults.drop_events
        if self._switching is not None:
            self._switching.cancel()
            self._switching = None
        self._listener.resetting = False
        await self._listener.open()
        if faults.refuse is not None:
            self._switching = asyncio.create_task(self._refuse(faults.refuse))
        elif faults.restart is not None:
            self._switching = asyncio.create_task(self._restart(faults.restart))

    async def _refuse(self, fault: Refuse) -> None:
        if fault.how == "close":
            self._listener.close()
        else:
            self._listener.resetting = True
        await asyncio.sleep(0.02)  # for the answer that said so
        self._listener.reset_all()
        if fault.seconds is not None:
            await asyncio.sleep(fault.seconds)
            self._faults.refuse = None
            self._listener.resetting = False
            await self._listener.open()

    async def _restart(self, fault: Restart) -> None:
        self._listener.close()
        await asyncio.sleep(0.02)  # for the answer that said so
        self._life.close()
        self._listener.reset_all()
        await asyncio.sleep(fault.down_s)
        self._faults.restart = None
        self._life = Life(self._spec, self._vocabulary, self._pool, self._pool_thread)
        await self._listener.open()


class _TextShape(msgspec.Struct):
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
