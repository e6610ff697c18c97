"""One life of a simulated worker, from start to restart: its engine, publisher, counts and answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from store.hashing import HashScheme
from store.prompt.request import Prompt
from workers.sim.bodies import Body, Refused
from workers.sim.calls import ToolCall
from workers.sim.engine import Limits, Rates
from workers.sim.exchange import Exchange, Gone
from workers.sim.forms import Choice, Counts, Form
from workers.sim.kv_publisher import BUFFER_STEPS, KvPublisher
from workers.sim.live import Asked, LiveEngine, Pool, PullRates, Stream
from workers.sim.pages import Page
from workers.sim.responses import Response, ResponseStore
from workers.sim.vocabulary import Answer, Vocabulary


@dataclass(frozen=True, slots=True)
class Spec:
    """What one simulated worker is. blocks: as vLLM counts them, one of them is never used.

    buffer_steps: batches of KV events kept for replay.
    """

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
    buffer_steps: int = BUFFER_STEPS


class Life:
    """Binds the event ports (zmq.ZMQError when one is taken). A restart is the end of one and another one."""

    def __init__(self, spec: Spec, vocabulary: Vocabulary, pool: Pool | None, pool_thread: Executor) -> None:
        self._spec: Final = spec
        self._vocabulary: Final = vocabulary
        self._opened: Final[dict[Stream, float]] = {}
        self.closed = False
        self.responses: Final = ResponseStore()
        self.publisher: Final = KvPublisher(
            spec.host, spec.events_port, spec.replay_port, buffer_steps=spec.buffer_steps
        )
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
        if self.closed:
            return
        self.closed = True
        self.responses.close()
        self.live.close()
        self.publisher.close()

    async def generate(
        self, exchange: Exchange, form: Form, request: Body, prompts: Sequence[Prompt]
    ) -> None:
        """Answers a request: one turn for each prompt and choice. Raises Refused, Gone."""
        session = request.session_id or exchange.header(b"x-session-id")
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                for choice in range(request.n or 1):
                    asked = self._asked(session, request, prompt, choice, form.call)
                    streams.append(await self._submit(asked, exchange.changed))
            changes = _changes(exchange.changed, lambda: exchange.left, streams)
            if request.stream:
                await self._stream(exchange, changes, request, form, streams)
            else:
                async for _ in changes:
                    pass
                await exchange.answer(200, self._whole(request, form, streams))
        finally:
            self._forget(streams)

    async def work_on(self, response: Response, request: Body, prompt: Prompt, session: str | None) -> None:
        """A response in the background, with nobody waiting for it."""
        changed = asyncio.Event()
        stream: Stream | None = None
        response.result = response.result | {"status": "in_progress"}
        try:
            stream = await self._submit(self._asked(session, request, prompt, 0, response.call), changed)
            async for _ in _changes(changed, lambda: False, [stream]):
                pass
            self._whole(request, response, [stream])
        except (Refused, Gone):
            response.result = response.result | {"status": "failed"}
        finally:
            self._forget([] if stream is None else [stream])

    def _forget(self, streams: Sequence[Stream]) -> None:
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
        self, session: str | None, request: Body, prompt: Prompt, choice: int, call: ToolCall | None
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
            session or xargs.get("session_id"),
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

    def _whole(self, request: Body, form: Form, streams: Sequence[Stream]) -> bytes:
        choices: list[Choice] = []
        for stream in streams:
            answer = stream.asked.answer
            text = "".join(answer.pieces)
            prompt: list[int] = stream.asked.tokens[: stream.turn.prompt_tokens].tolist()
            if request.echo:
                text = self._vocabulary.decode(prompt) + text
            logprobs = None if request.prompt_logprobs is None else self._vocabulary.certain(prompt)
            choices.append(Choice(answer, text, logprobs))
        return form.whole(choices, self._counts(request, streams))

    async def _stream(
        self,
        exchange: Exchange,
        changes: AsyncIterator[None],
        request: Body,
        form: Form,
        streams: Sequence[Stream],
    ) -> None:
        await exchange.open_stream()
        written = [0] * len(streams)
        for part in form.begin(self._counts(request, streams, produced=0)):
            await exchange.write(part)
        async for _ in changes:
            for index, stream in enumerate(streams):
                start, end = written[index], stream.produced
                if start == end:
                    continue
                written[index] = end
                counts = self._counts(request, [stream], produced=end)
                for part in form.piece(index, stream.asked.answer, start, end, counts):
                    await exchange.write(part)
        for part in form.close(self._counts(request, streams)):
            await exchange.write(part)
        await exchange.close_stream()

    def _counts(self, request: Body, streams: Sequence[Stream], *, produced: int | None = None) -> Counts:
        """Prompts once for all their choices, as vLLM counts."""
        choices = request.n or 1
        turns = [stream.turn for stream in streams]
        prompt = sum(turn.prompt_tokens for turn in turns[::choices])
        output = sum(len(stream.asked.answer.ids) for stream in streams) if produced is None else produced
        last = turns[-1]
        cached, size = last.cached_tokens, self._spec.scheme.block_size
        return Counts(prompt, output, cached, max(0, last.prompt_tokens // size * size - cached))

    def started(self, stream: Stream) -> None:
        if (opened := self._opened.get(stream)) is not None:
            self.page.first_token(time.monotonic() - opened)

    def finished(self, stream: Stream) -> None:
        opened = self._opened.pop(stream, None)
        if opened is not None:
            self.page.request_ended(stream.asked.answer.finish, time.monotonic() - opened)


async def _changes(
    changed: asyncio.Event, left: Callable[[], bool], streams: Sequence[Stream]
) -> AsyncIterator[None]:
    """Once for every change until all streams have ended. Raises Gone."""
    while True:
        changed.clear()
        # First: what was lost has ended, too, and must not look complete.
        if any(stream.lost for stream in streams):
            raise Gone("fault")
        done = all(stream.done for stream in streams)
        yield
        if done:
            return
        await changed.wait()
        if left():
            raise Gone("gone")
