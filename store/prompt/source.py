"""The async face of a model's prompts: loads the tokenizer once, keeps heavy work off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from store.hashing import HashScheme
from store.prompt.kept import Kept
from store.prompt.request import (
    ChatPrompt,
    MessagesPrompt,
    Prompt,
    PromptRequest,
    ResponsesPrompt,
    TextPrompt,
    TokensPrompt,
    Unrenderable,
)

if TYPE_CHECKING:
    from store.prompt.local import LocalPrompts, Plan

logger = logging.getLogger(__name__)

# The loop is never held for more than 5 ms: that is the rendering of this many characters,
_LONG: Final = 600_000
# and the tokenizing of this many (1.2 us a token of 3.6 characters).
_SHORT: Final = 12_000


@dataclass(frozen=True, slots=True)
class PromptStatus:
    """`detail` says what failed. The counts are of the prompt cache."""

    state: Literal["loading", "ready", "failed"]
    detail: str = ""
    cached_tokens: int = 0
    cached_bytes: int = 0


class PromptSource:
    """Prompts of one tokenizer. Use from one event loop."""

    def __init__(
        self,
        tokenizer: str,
        *,
        threads: int = 1,
        retry_delay_s: float = 30.0,
        cache_bytes: int = 256 << 20,
    ) -> None:
        """Nothing is loaded yet: `prepare` or the first `prompt` does that, in a thread."""
        self._tokenizer: Final = tokenizer
        self._retry_delay_s: Final = retry_delay_s
        self._cache_bytes: Final = cache_bytes
        self._threads: Final = ThreadPoolExecutor(threads, thread_name_prefix="prompt")
        self._loading: asyncio.Task[LocalPrompts] | None = None
        self._local: LocalPrompts | None = None
        self._failed: Unrenderable | None = None
        self._retry_at = 0.0

    def prepare(self) -> None:
        """Begin to load, unless that was done or failed a moment ago."""
        if self._local is None and asyncio.get_running_loop().time() >= self._retry_at:
            self._load_started()

    async def prompt(
        self,
        request: PromptRequest,
        scheme: HashScheme,
        *,
        lora: tuple[str, str] | None = None,
        most: int | None = None,
        limit: int = 0,
    ) -> Prompt:
        """Tokens and chain of `request`; waits for the tokenizer if it is loading.

        most: more characters than it has for sure, where that is known (bytes of its JSON).
        limit: characters that are worth tokenizing, 0 for any number; Unrenderable "too_long" beyond.
        Raises Unrenderable: also, without another attempt, for `retry_delay_s` after a load that failed.
        """
        local = self._local or await self._load()
        loop = asyncio.get_running_loop()
        if (most is None or most > _LONG) and _characters(request) > _LONG:
            return await loop.run_in_executor(
                self._threads, lambda: local.finish(_bounded(local.plan(request, scheme, lora=lora), limit))
            )
        plan = _bounded(local.plan(request, scheme, lora=lora), limit)
        if plan.missing <= _SHORT:
            return local.finish(plan)
        return await loop.run_in_executor(self._threads, local.finish, plan)

    async def prefix(
        self, request: PromptRequest, scheme: HashScheme, *, lora: tuple[str, str] | None = None
    ) -> Prompt:
        """The beginning of a prompt with media. Raises Unrenderable: also where nothing of it is known."""
        local = self._local or await self._load()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: local.prefix(request, scheme, lora=lora))

    async def loaded(self) -> LocalPrompts:
        """The prompts themselves, for work beside the loop. Raises Unrenderable."""
        return self._local or await self._load()

    async def settled(self) -> None:
        """Wait for a load under way, whatever comes of it."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    def status(self) -> PromptStatus:
        if self._local is not None:
            return PromptStatus("ready", "", self._local.cached_tokens, self._local.cached_bytes)
        if self._failed is not None:
            return PromptStatus("failed", str(self._failed))
        return PromptStatus("loading")

    async def close(self) -> None:
        """Stop taking work. A load or an encoding under way ends by itself, unobserved."""
        if self._loading is not None:
            self._loading.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self) -> LocalPrompts:
        """One load for all who wait; a caller that gives up does not end it for the others."""
        if self._failed is not None and asyncio.get_running_loop().time() < self._retry_at:
            raise self._failed
        return await asyncio.shield(self._load_started())

    def _load_started(self) -> asyncio.Task[LocalPrompts]:
        if self._loading is None:
            self._loading = asyncio.create_task(self._load_once(), name="load tokenizer")
            # Retrieve the result even when every waiter has gone, or asyncio complains about it.
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._loading

    async def _load_once(self) -> LocalPrompts:
        loop = asyncio.get_running_loop()
        try:
            local = await loop.run_in_executor(self._threads, _load_local, self._tokenizer, self._cache_bytes)
        except Unrenderable as why:
            self._failed = why
            self._retry_at = loop.time() + self._retry_delay_s
            logger.warning("tokenizer %s: %s", self._tokenizer, why)
            raise
        finally:
            self._loading = None
        self._local, self._failed = local, None
        return local


def _bounded(plan: Plan, limit: int) -> Plan:
    """Raises Unrenderable for one with more than `limit` characters to tokenize, all of which count."""
    if limit and plan.missing > limit and plan.request.truncate_prompt_tokens is None:
        raise Unrenderable("too_long")
    return plan


def _load_local(tokenizer: str, cache_bytes: int) -> LocalPrompts:
    # Importing transformers takes most of a second: done here, in the thread, it delays nobody's start.
    # Without torch, which tokenizers do not need, it would print a warning.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # The tokenizer's own threads take what comes last last: a short text of the event loop would wait for all
    # the texts of a long prompt. Here each thread encodes for itself.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from store.prompt.local import LocalPrompts

    local = LocalPrompts.load(tokenizer, cache_bytes=cache_bytes)
    # glibc keeps what was freed below anything that lives: 100 of 290 MB after the tables of an encoder were
    # made. 14 ms, without Python's lock. Other C libraries have no such call.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return local


def _characters(value: Any) -> int:
    """Characters of text in a request or anything in it, about."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Kept):
        return value.size
    if isinstance(value, dict):
        return sum(map(_characters, cast(dict[str, Any], value).values()))
    if isinstance(value, list):
        return sum(map(_characters, cast(list[Any], value)))
    if isinstance(value, ChatPrompt | MessagesPrompt):
        return _characters(value.messages) + _characters(value.tools)
    if isinstance(value, ResponsesPrompt):
        return _characters(value.input) + _characters(value.tools)
    if isinstance(value, TextPrompt):
        return len(value.text)
    return len(value.ids) if isinstance(value, TokensPrompt) else 0
