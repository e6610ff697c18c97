"""Whether prompts made here equal the workers', token by token: checked at start, then by sample."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from gateway.api.parse import ParsedTurn, parse
from gateway.prompts.rendering import Ids, NotRendered, WorkerRenderer
from workers.worker import Worker

logger = logging.getLogger(__name__)

Result = Literal["equal", "differs", "unavailable"]
LocalTokens = Callable[[Worker, ParsedTurn], Awaitable[Ids | None]]
"""The ids made here for a turn at a worker; None where they can't be made here."""
Text = Callable[[str, int], Awaitable[str]]
"""The text of a model's token."""

_CHECKS_AT_ONCE = 2
# Turns are sampled as seldom as this in the long run: a comparison costs some milliseconds here and there.
_SAMPLE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token on which both sides disagree; -1 stands for the end of a prompt.

    Texts are of the tokens as the tokenizer here has them.
    """

    worker: str
    model: str
    api: str
    position: int
    ours: int
    theirs: int
    our_text: str = ""
    their_text: str = ""

    def __str__(self) -> str:
        return (
            f"prompts of {self.model} ({self.api}) made here differ from those of {self.worker}: "
            f"token {self.position} is {shown(self.ours, self.our_text)}, "
            f"there {shown(self.theirs, self.their_text)}"
        )


def shown(token: int, text: str) -> str:
    """A token of a difference as people read it."""
    return "the end" if token < 0 else f"{token} {text!r}"


def first_difference(ours: Ids, theirs: Ids) -> tuple[int, int, int] | None:
    """Position, our token, their token; None if both are equal."""
    shared = min(len(ours), len(theirs))
    unequal = np.nonzero(ours[:shared] != theirs[:shared])[0]
    if not len(unequal) and len(ours) == len(theirs):
        return None
    at = int(unequal[0]) if len(unequal) else shared
    return at, int(ours[at]) if at < len(ours) else -1, int(theirs[at]) if at < len(theirs) else -1


class Parity:
    """What was proven of which worker, model and API.

    One difference is enough to distrust the model's API everywhere: the same code would make it again.
    """

    def __init__(
        self,
        renderer: WorkerRenderer,
        local: LocalTokens,
        text: Text,
        counted: Callable[[str, str, Result], None],
        *,
        sample: float,
    ) -> None:
        self._renderer = renderer
        self._local = local
        self._text = text
        self._counted = counted
        self._sample = sample
        self._proven: set[tuple[str, str, str]] = set()
        self._differences: dict[tuple[str, str], Difference] = {}
        self._checks: set[asyncio.Task[object]] = set()
        # Until when the samples taken so far are enough.
        self._sampled_until = 0.0

    def proven(self, worker: str, model: str, api: str) -> bool:
        return (worker, model, api) in self._proven and (model, api) not in self._differences

    def differs(self, model: str, api: str) -> bool:
        return (model, api) in self._differences

    def differences(self) -> list[Difference]:
        return list(self._differences.values())

    def proofs(self, model: str) -> dict[str, list[str]]:
        """The APIs of `model` that were checked, each with the workers that agreed."""
        found: dict[str, list[str]] = {}
        for worker, proven, api in sorted(self._proven):
            if proven == model:
                found.setdefault(api, []).append(worker)
        return found

    def examine(self, worker: Worker, model: str) -> None:
        """Check bodies that cover what templates do, in the background; all equal is the proof."""
        self._start(self._examine(worker, model), worker)

    def sampled(self, worker: Worker, path: str, api: str, body: bytes, ours: Ids, draw: float) -> None:
        """Check this turn, if `draw` in [0, 1) says so and there are not too many checks already."""
        if draw >= self._sample or len(self._checks) >= _CHECKS_AT_ONCE or api == "other":
            return
        now = time.monotonic()
        if self._sampled_until <= now + _SAMPLE_EVERY_S:
            self._sampled_until = max(self._sampled_until, now) + _SAMPLE_EVERY_S
            self._start(self._compare(worker, path, body, ours), worker)

    def forget(self, worker: str) -> None:
        self._proven = {key for key in self._proven if key[0] != worker}
        self._differences = {k: d for k, d in self._differences.items() if d.worker != worker}

    async def close(self) -> None:
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, object], worker: Worker) -> None:
        check = asyncio.create_task(work, name=f"parity {worker.name}")
        self._checks.add(check)
        check.add_done_callback(self._ended)

    def _ended(self, check: asyncio.Task[object]) -> None:
        self._checks.discard(check)
        if not check.cancelled() and check.exception() is not None:
            logger.error("%s failed", check.get_name(), exc_info=check.exception())

    async def _examine(self, worker: Worker, model: str) -> None:
        results: dict[str, set[Result]] = {}
        for path, body in sample_bodies(model):
            api = parse("POST", path, body).api
            results.setdefault(api, set()).add(await self._compare(worker, path, body, None))
        for api, seen in results.items():
            if "equal" in seen and "differs" not in seen:
                self._proven.add((worker.name, model, api))

    async def _compare(self, worker: Worker, path: str, body: bytes, ours: Ids | None) -> Result:
        parsed = parse("POST", path, body)
        try:
            ours = await self._local(worker, parsed) if ours is None else ours
            theirs = await self._renderer.tokens(worker.url, path, body)
        except NotRendered:
            ours = theirs = None
        result: Result = "unavailable"
        if ours is not None and theirs is not None:
            found = first_difference(ours, theirs)
            result = "equal" if found is None else "differs"
            if found is not None:
                texts = [await self._text(parsed.model, token) for token in found[1:]]
                self._note(Difference(worker.name, parsed.model, parsed.api, *found, *texts))
        self._counted(parsed.model, parsed.api, result)
        return result

    def _note(self, difference: Difference) -> None:
        key = (difference.model, difference.api)
        if key not in self._differences:
            logger.error("%s; workers render turns of this kind from now on", difference)
        self._differences[key] = difference


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'},
}
_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello,  wörld \n\n\t 你好 🌍 \r\n 123,456.78"}]},
    {
        "messages": [
            {"role": "system", "content": "You are  a careful agent.\n"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Read"}, {"type": "text", "text": "a.txt"}],
            },
            {"role": "assistant", "content": "  On it. "},
            {"role": "user", "content": "Go on"},
        ]
    },
    {
        "tools": [_TOOL],
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Read a.txt"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "line 1\nline 2\n"},
        ],
    },
)
_READ: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "a.txt"}}
_MESSAGES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello,  wörld \n\n 你好 🌍"}]},
    {
        "system": [{"type": "text", "text": "Use tools."}],
        "tools": [{"name": "read_file", "input_schema": {"type": "object", "properties": {"path": {}}}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Read a.txt"}]},
            {"role": "assistant", "content": [_READ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "line\n"}]},
        ],
    },
)
_RESPONSES: tuple[dict[str, Any], ...] = (
    {"input": "Hello,  wörld \n\n 你好 🌍"},
    {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": [{"type": "input_text", "text": "Three"}]},
        ],
    },
)
_TEXTS = ("Hello,  wörld", "def f(x):\n    return x + 1\n\n\n# 你好 🌍", " leading and trailing ")


def sample_bodies(model: str) -> list[tuple[str, bytes]]:
    """(path, body) pairs that show most ways in which two renderings can differ."""
    chats = [("/v1/chat/completions", {"model": model, **chat}) for chat in _CHATS]
    texts = [("/v1/completions", {"model": model, "prompt": text}) for text in _TEXTS]
    messages = [("/v1/messages", {"model": model, "max_tokens": 1, **each}) for each in _MESSAGES]
    responses = [("/v1/responses", {"model": model, **each}) for each in _RESPONSES]
    return [(path, msgspec.json.encode(body)) for path, body in (*chats, *texts, *messages, *responses)]
