"""An agent's growing conversation, and what each turn was predicted and found to hit."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = """
router block cache prefix holder turn session token worker pool master segment lease chain
digest event replay gap index probe queue batch stream render template tool agent answer
context window page commit
""".split()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the workspace.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer", "minimum": 1}},
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "list_files"}},
]


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn. predicted, cached: tokens; cached is what the engine reported."""

    worker: str
    action: str
    prompt_tokens: int
    local_tokens: int
    pool_tokens: int
    cached: int
    seconds: float
    request_id: str

    @property
    def predicted(self) -> int:
        return max(self.local_tokens, self.pool_tokens)


def mispredicted(turns: Sequence[Answered]) -> list[Answered]:
    """Turns of one conversation that found something else than what was predicted.

    One that goes to another worker than the turn before pulls what the pool has by then: more than was
    predicted is no fault there, as the worker before may still have been storing it.
    """
    before = [None, *(turn.worker for turn in turns)]
    return [
        turn
        for turn, worker in zip(turns, before, strict=False)
        if turn.cached < turn.predicted or (turn.cached > turn.predicted and turn.worker == worker)
    ]


@dataclass
class Conversation:
    """`words` new words a turn; about 2.2 tokens a word with the tiny model's tokenizer.

    `tokens`: those of the last turn as the engine saw them, its prompt and its answer.
    """

    client: httpx.AsyncClient
    model: str
    seed: int
    system: str = ""
    tools: bool = True
    words: int = 120
    max_tokens: int = 24
    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.messages.append({"role": "system", "content": self.system or self.text(self.words)})

    def text(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words))

    def grow(self) -> None:
        """What comes before the next answer: a question, or the result of a tool that was called."""
        if self.tools and len(self.messages) > 2 and len(self.messages) % 2 == 0:
            call = {"name": "read_file", "arguments": '{"path": "src/main.py", "lines": 3}'}
            calls = [{"id": f"call_{len(self.messages)}", "type": "function", "function": call}]
            self.messages[-1] = {**self.messages[-1], "tool_calls": calls}
            self.messages.append(
                {"role": "tool", "tool_call_id": calls[0]["id"], "content": self.text(self.words)}
            )
        else:
            self.messages.append({"role": "user", "content": self.text(self.words)})

    def body(self, **more: Any) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        if self.tools:
            body["tools"] = TOOLS
        return {**body, **more}

    async def turn(self, *, stream: bool = False) -> Answered:
        """Grow, ask, and keep the answer for the next turn."""
        self.grow()
        if stream:
            headers, answer, usage, seconds = await self._streamed()
        else:
            response = await self.client.post("/v1/chat/completions", json=self.body())
            assert response.status_code == 200, response.text
            headers, seconds = response.headers, response.elapsed.total_seconds()
            found = response.json()
            choice, usage = found["choices"][0], found["usage"]
            answer = choice["message"]["content"]
            self.tokens = found["prompt_token_ids"] + choice["token_ids"]
        self.messages.append({"role": "assistant", "content": answer or ""})
        return answered(headers, usage, seconds)

    async def turns(self, count: int) -> list[Answered]:
        """One turn after the other, each asked the moment the last one is answered."""
        return [await self.turn() for _ in range(count)]

    async def _streamed(self) -> tuple[httpx.Headers, str, dict[str, Any], float]:
        body = self.body(stream=True, stream_options={"include_usage": True})
        text, self.tokens = "", []
        usage: dict[str, Any] = {}
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    usage = event.get("usage") or usage
                    self.tokens = event.get("prompt_token_ids") or self.tokens
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        self.tokens += choice.get("token_ids") or []
        return response.headers, text, usage, response.elapsed.total_seconds()


def answered(headers: httpx.Headers, usage: dict[str, Any], seconds: float = 0.0) -> Answered:
    """Prediction and truth of one answer. The engine's own count of prompt tokens must be ours."""
    found = Answered(
        headers["x-moongate-worker"],
        headers["x-moongate-action"],
        int(headers["x-moongate-prompt-tokens"]),
        int(headers["x-moongate-local-tokens"]),
        int(headers["x-moongate-pool-tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"],
        seconds,
        headers["x-request-id"],
    )
    assert found.prompt_tokens == usage["prompt_tokens"]
    return found
