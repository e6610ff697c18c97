"""One life of a simulated worker, from start to restart: its engine, publisher, counts and answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from store.hashing import HashScheme
from store.prompt.request import Prompt
from workers.sim.answers import DONE, Answers, Api, ToolCall, forced_call
from workers.sim.bodies import Body, Refused
from workers.sim.engine import Limits, Rates
from workers.sim.exchange import Exchange, Gone
from workers.sim.kv_publisher import KvPublisher
from workers.sim.live import Asked, LiveEngine, Pool, PullRates, Stream
from workers.sim.pages import Page
from workers.sim.vocabulary import Answer, Vocabulary


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


class Life:
    """Binds the event ports (zmq.ZMQError when one is taken). A restart is the end of one and another one."""

    def __init__(self, spec: Spec, vocabulary: Vocabulary, pool: Pool | None, pool_thread: Executor) -> None:
        self._spec: Final = spec
        self._vocabulary: Final = vocabulary
        self._opened: Final[dict[Stream, float]] = {}
        self.publisher: Final = KvPublisher(spec.host, spec.events_port, spec.replay_port)
        self.live: Final = LiveEngine(
            Limits(spec.blocks - 1, spec.scheme.block_size, spec.max_seqs, spec.step_tokens),
            spec.rates,
            spec.pull,
            spec.scheme,
            self.publisher,
            pool,
            pool_thread,
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
        self.page: Final = Page(self.live.engine, spec.names[0], time.time(), config)

    def close(self) -> None:
        """All turns are lost, the event ports are free."""
        self.live.close()
        self.publisher.close()

    async def generate(self, exchange: Exchange, api: Api, request: Body, prompts: Sequence[Prompt]) -> None:
        """Answers a request: one turn for each prompt and choice. Raises Refused, Gone."""
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
                    self.page.request_ended("abort", 0.0)
                self.live.cancel(stream)

    async def _submit(self, asked: Asked, changed: asyncio.Event) -> Stream:
        try:
            stream = await self.live.submit(asked, changed)
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
            prompt: list[int] = stream.asked.tokens[: stream.turn.prompt_tokens].tolist()
            if request.echo:
                text = self._vocabulary.decode(prompt) + text
            logprobs = None if request.prompt_logprobs is None else self._vocabulary.certain(prompt)
            choices.append(answers.text_choice(index, text, answer.finish, answer.ids, logprobs))
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
            self.page.first_token(time.monotonic() - opened)

    def finished(self, stream: Stream) -> None:
        opened = self._opened.pop(stream, None)
        if opened is not None:
            self.page.request_ended(stream.asked.answer.finish, time.monotonic() - opened)


def _delta(answer: Answer, start: int, end: int, call: ToolCall | None) -> str | dict[str, Any] | None:
    """What tokens `start` to `end - 1` add; None when that is nothing a client sees."""
    text = "".join(answer.pieces[start:end])
    if call is None:
        return text
    before = sum(map(len, answer.pieces[:start]))
    return call.delta(before, before + len(text))
