"""The simulated worker as an ASGI application: vLLM's endpoints around the engine model, and fault switches.

A request: body → prompt (the model's own tokenizer and template) → one turn per prompt and choice in the
engine → tokens as the engine produces them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from store.hashing import HashScheme
from store.prompt.local import LocalPrompts
from store.prompt.request import ChatPrompt, Prompt, PromptRequest, TextPrompt, TokensPrompt, Unrenderable
from workers.sim import bodies
from workers.sim.answers import DONE, Answers, Api, ToolCall, forced_call
from workers.sim.bodies import Body, Refused
from workers.sim.engine import Limits, Rates
from workers.sim.exchange import Exchange, Gone, Message, Receive, Send
from workers.sim.faults import Faults, Ledger, Refuse, Restart
from workers.sim.kv_publisher import BUFFER_STEPS, HIGH_WATER, KvPublisher
from workers.sim.listener import Listener
from workers.sim.live import Asked, LiveEngine, Pool, PullRates, Stream
from workers.sim.pages import Page
from workers.sim.vocabulary import Answer, Vocabulary

logger = logging.getLogger(__name__)
_encode: Final = msgspec.json.encode
# Prompts of fewer characters are made on the loop: a thread's two switches cost more than 2 ms of CPU.
_SMALL: Final = 20_000


@dataclass(frozen=True, slots=True)
class Spec:
    """What one simulated worker is. blocks: as vLLM counts them, one of them is never used."""

    model: Path
    names: tuple[str, ...]
    host: str
    port: int
    events_port: int
    replay_port: int
    scheme: HashScheme
    blocks: int
    max_model_len: int
    rates: Rates
    pull: PullRates
    max_seqs: int = 256
    step_tokens: int = 8192
    seed: int = 0
    answer_tokens: int = 256
    renders: bool = True
    control_port: int = 0


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
        self._opened: dict[Stream, float] = {}
        self._publisher: KvPublisher
        self._live: LiveEngine
        self._page: Page
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
        self._begin_life()
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
        self._live.close()
        self._publisher.close()
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
        await self._generate(exchange, "chat", request, [await self._prompt(asked)])

    async def _completions(self, exchange: Exchange, body: bytes) -> None:
        request = bodies.decoded(body, Body)
        prompts = await self._text_prompts(request, body)
        await self._generate(exchange, "completions", request, prompts)

    async def _text_prompts(self, request: Body, body: bytes) -> list[Prompt]:
        given = bodies.prompts_of(body)
        bodies.check(request, self._spec.names, self._spec.max_model_len)
        shape = bodies.decoded(body, _TextShape)
        prompts: list[Prompt] = []
        for each in given:
            asked: TextPrompt | TokensPrompt
            if isinstance(each, str):
                asked = TextPrompt(text=each, add_special_tokens=shape.add_special_tokens)
            elif max(each) >= self._vocabulary.size or min(each) < 0:
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

    async def _generate(self, exchange: Exchange, api: Api, request: Body, prompts: Sequence[Prompt]) -> None:
        identity = exchange.header(b"x-request-id") or request.request_id or uuid.uuid4().hex
        answers = Answers(api, request, self._spec.names[0], identity, int(time.time()))
        call = forced_call(request, identity) if api == "chat" else None
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                for choice in range(request.n or 1):
                    asked = self._asked(exchange, request, prompt, choice, call)
                    streams.append(await self._submit(asked, exchange.changed))
            if request.stream:
                await self._stream(exchange, request, answers, streams, call)
            else:
                await self._whole(exchange, request, answers, streams, call)
        finally:
            for stream in streams:
                if self._opened.pop(stream, None) is not None:
                    self._page.request_ended("abort", 0.0)
                self._live.cancel(stream)

    async def _submit(self, asked: Asked, changed: asyncio.Event) -> Stream:
        try:
            stream = await self._live.submit(asked, changed)
        except ValueError as wrong:
            raise Refused(str(wrong)) from None
        self._opened[stream] = time.monotonic()
        return stream

    def _asked(
        self, exchange: Exchange, request: Body, prompt: Prompt, choice: int, call: ToolCall | None
    ) -> Asked:
        spec = self._spec
        most = request.max_completion_tokens or request.max_tokens
        room = spec.max_model_len - len(prompt.tokens)
        if room < 1 or (most is not None and most > room):
            # vLLM's words for it name the prompt's length, too.
            raise Refused(
                f"This model's maximum context length is {spec.max_model_len} tokens. However, you requested "
                f"{most or 1} output tokens and your prompt contains {len(prompt.tokens)} input tokens.",
                param="input_tokens",
            )
        xargs = request.vllm_xargs or {}
        return Asked(
            prompt.tokens,
            prompt.chain,
            self._answer(request, prompt, choice, call, most or room, limited=most is not None),
            request.cache_salt,
            request.session_id or exchange.header(b"x-session-id") or xargs.get("session_id"),
            report_all=xargs.get("kv_cache_report_mode") == "full",
            reads=request.prompt_logprobs is None,
        )

    def _answer(
        self, request: Body, prompt: Prompt, choice: int, call: ToolCall | None, most: int, *, limited: bool
    ) -> Answer:
        """The same for the same prompt, seeds and choice. Ends by itself unless it must not."""
        if call is not None:
            return self._vocabulary.spell(call.text, most, "tool_calls")
        seed = (
            b"%d %d %d " % (self._spec.seed, request.seed or 0, choice) + np.asarray(prompt.tokens).tobytes()
        )
        natural = self._vocabulary.length(seed, self._spec.answer_tokens)
        if (request.ignore_eos and limited) or natural >= most:
            tokens, finish = most, "length"
        else:
            tokens, finish = max(natural, min(request.min_tokens, most)), "stop"
        return self._vocabulary.answer(seed, tokens, finish).until(request.stops)

    async def _whole(
        self,
        exchange: Exchange,
        request: Body,
        answers: Answers,
        streams: Sequence[Stream],
        call: ToolCall | None,
    ) -> None:
        async for _ in self._changes(exchange, streams):
            pass
        choices: list[dict[str, Any]] = []
        for index, stream in enumerate(streams):
            answer = stream.asked.answer
            if call is not None and answer.finish == "tool_calls":
                choices.append(answers.tool_choice(index, call, answer.ids))
                continue
            text = "".join(answer.pieces)
            if request.echo:
                prompt = stream.asked.tokens[: stream.turn.prompt_tokens].tolist()
                text = self._vocabulary.decode(prompt) + text
            choices.append(answers.text_choice(index, text, answer.finish, answer.ids))
        await exchange.answer(200, answers.whole(choices, self._usage(request, answers, streams)))

    async def _stream(
        self,
        exchange: Exchange,
        request: Body,
        answers: Answers,
        streams: Sequence[Stream],
        call: ToolCall | None,
    ) -> None:
        options = request.stream_options
        await exchange.open_stream()
        written = [0] * len(streams)
        opened: set[int] = set()
        async for _ in self._changes(exchange, streams):
            for index, stream in enumerate(streams):
                start, end = written[index], stream.produced
                if start == end:
                    continue
                written[index] = end
                if exchange.path.startswith("/v1/chat") and index not in opened:
                    opened.add(index)
                    await exchange.write(answers.opening(index))
                answer = stream.asked.answer
                finish = answer.finish if end == len(answer.ids) else None
                delta = _delta(answer, start, end, call)
                if delta is None and finish is None:
                    continue
                usage = None
                if options is not None and options.continuous_usage_stats:
                    usage = self._usage(request, answers, [stream], produced=end)
                ids = answer.ids[start:end]
                await exchange.write(answers.chunk(index, delta or "", finish, ids, usage))
        if options is not None and options.include_usage:
            await exchange.write(answers.usage_chunk(self._usage(request, answers, streams)))
        await exchange.write(DONE)
        await exchange.close_stream()

    async def _changes(self, exchange: Exchange, streams: Sequence[Stream]) -> AsyncIterator[None]:
        """Once for every change until all streams have ended. Raises Gone."""
        while True:
            exchange.changed.clear()
            done = all(stream.done for stream in streams)
            yield
            if done:
                return
            if any(stream.lost for stream in streams):
                raise Gone("fault")
            await exchange.changed.wait()
            if exchange.left:
                raise Gone("gone")

    def _usage(
        self, request: Body, answers: Answers, streams: Sequence[Stream], *, produced: int | None = None
    ) -> dict[str, Any]:
        """Prompts once for all their choices, as vLLM counts; cached tokens of the last prompt only."""
        choices = request.n or 1
        turns = [stream.turn for stream in streams]
        prompt = sum(turn.prompt_tokens for turn in turns[::choices])
        output = sum(len(stream.asked.answer.ids) for stream in streams) if produced is None else produced
        last = turns[-1]
        size = self._spec.scheme.block_size
        created = last.prompt_tokens // size * size - last.cached_tokens
        return answers.usage(prompt, output, last.cached_tokens, max(0, created))

    def started(self, stream: Stream) -> None:
        if (opened := self._opened.get(stream)) is not None:
            self._page.first_token(time.monotonic() - opened)

    def finished(self, stream: Stream) -> None:
        opened = self._opened.pop(stream, None)
        if opened is not None:
            self._page.request_ended(stream.asked.answer.finish, time.monotonic() - opened)

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
            "endpoint": self._publisher.endpoint,
            "replay_endpoint": self._publisher.replay_endpoint,
            "buffer_steps": BUFFER_STEPS,
            "hwm": HIGH_WATER,
            "max_queue_size": HIGH_WATER,
            "topic": self._publisher.topic,
        }
        await exchange.answer(200, _encode({"0": source}))

    async def _metrics(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, self._page.text(), "text/plain; version=1.0.0; charset=utf-8")

    async def _load(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, _encode({"server_load": self._live.open}))

    async def _version(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, b'{"version":"0.32.0"}')

    async def _is_sleeping(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, b'{"is_sleeping":false}')

    async def _nothing(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(200, b"")

    async def _reset_prefix_cache(self, exchange: Exchange, _body: bytes) -> None:
        done = self._live.clear()
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
        self._live.slow(faults.slow)
        self._publisher.drop = faults.drop_events
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
        self._live.close()
        self._listener.reset_all()
        self._publisher.close()
        await asyncio.sleep(fault.down_s)
        self._faults.restart = None
        self._begin_life()
        await self._listener.open()

    def _begin_life(self) -> None:
        spec = self._spec
        self._publisher = KvPublisher(spec.host, spec.events_port, spec.replay_port)
        self._live = LiveEngine(
            Limits(spec.blocks - 1, spec.scheme.block_size, spec.max_seqs, spec.step_tokens),
            spec.rates,
            spec.pull,
            spec.scheme,
            self._publisher,
            self._pool,
            self._pool_thread,
            self,
        )
        config = {
            "block_size": str(spec.scheme.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": "0",
            "num_gpu_blocks": str(spec.blocks),
            "num_gpu_blocks_override": str(spec.blocks),
            "prefix_caching_hash_algo": spec.scheme.algo,
            "sliding_window": "None",
        }
        self._page = Page(self._live.engine, spec.names[0], time.time(), config)


class _TextShape(msgspec.Struct):
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


def _delta(answer: Answer, start: int, end: int, call: ToolCall | None) -> str | dict[str, Any] | None:
    """What tokens `start` to `end - 1` add; None when that is nothing a client sees."""
    text = "".join(answer.pieces[start:end])
    if call is None:
        return text
    before = sum(map(len, answer.pieces[:start]))
    return call.delta(before, before + len(text))
