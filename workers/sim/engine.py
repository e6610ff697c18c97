"""A vLLM engine as a pure model in time: who runs when, what is cached, evicted, announced and loaded.

The same class runs behind the live simulated server and in virtual time; time is passed in (seconds, any
origin, never backwards) and everything that happens comes back as a list of effects. Nothing is computed per
token: between two things worth noting, decode steps are all alike and are counted, not executed.

A step computes one token of every decoding turn and, with what is left of the token budget, the next chunk of
the oldest prompts. It lasts

    step_s + decoding turns * decode_seq_s + prompt tokens in it / prefill_tok_s
        + growth_s * the tokens of context before each of these, summed
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from workers.sim.blocks import BlockCache, Evicted
from workers.sim.turn import Effect, Finished, Load, Removed, Save, Started, Stored, Turn

# Times are sums of step durations; below this many seconds (and steps) they are equal.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the engine computes.

    prefill_tok_s: one instance's prompt tokens a second; 20,480 is Qwen3-32B on two H100 (llm-d, 2026-08-17).
    step_s, decode_seq_s: what a decode step takes and what each turn in it adds; 7 ms and 0.7 ms come from
    MiniMax-M2.5 on eight H200 (7.7, 9.2, 16.0, 29.4 ms a token at 1, 4, 16, 32 turns).
    growth_s: what each token of context before it adds to a prompt token. 0: the rate holds at any length.
    """

    prefill_tok_s: float = 20_480.0
    step_s: float = 0.007
    decode_seq_s: float = 0.0007
    growth_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's --max-num-seqs and --max-num-batched-tokens, and the number of blocks requests can get.

    stride: blocks a decoding turn gets and announces at once. 1 is exact; virtual time is cheaper with more,
    the answer's blocks are then taken up to so many blocks early and can be hit as late.
    """

    blocks: int
    block_size: int = 32
    max_seqs: int = 256
    step_tokens: int = 8192
    stride: int = 1


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start, in tokens unless named otherwise; vLLM's metrics of like names."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt: int = 0
    computed: int = 0
    generated: int = 0
    preemptions: int = 0
    finished: int = 0


class Engine:
    """One instance. `lookup` tells how many leading blocks of a turn the pool holds, asked at its admission.

    Call `advance(now)` before anything else that takes a time. Effects of a step come when it ends, as vLLM
    publishes its events.
    """

    def __init__(
        self, limits: Limits, rates: Rates | None = None, *, lookup: Callable[[Turn], int] | None = None
    ) -> None:
        self.limits: Final = limits
        self.rates = rates or Rates()
        self.counters: Final = Counters()
        self.cache: Final = BlockCache(limits.blocks)
        self._lookup = lookup
        self._waiting: deque[Turn] = deque()
        self._loading: set[Turn] = set()
        self._loaded: deque[Turn] = deque()  # they hold blocks, so they go before those that wait
        self._prefilling: list[Turn] = []
        self._decoding: dict[Turn, None] = {}
        # (step at whose beginning a decoding turn needs attention, whether it goes on, order of entry, turn,
        # its life then): those that end come first, for they must not give way to others in that step.
        self._due: list[tuple[int, bool, int, Turn, int]] = []
        self._entries = 0
        self._done = 0  # steps completed
        # The steps in progress: all alike, one after the other.
        self._begun = 0.0
        self._duration = 0.0
        self._steps = 0
        self._completing: list[Turn] = []
        self._context = 0.0  # of the prompt tokens in it, summed
        self._pending: list[Effect] = []
        self._out: list[Effect] = []

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Turns not yet running, those that load from the pool included."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    @property
    def loading(self) -> int:
        return len(self._loading)

    @property
    def usage(self) -> float:
        """Share of the blocks that is in use, 0 to 1; what is only cached counts as free."""
        return 1.0 - self.cache.free / self.cache.capacity

    def next_at(self) -> float:
        """When something happens that has effects or a step with a prompt in it ends; inf while idle."""
        if self._out:
            return self._begun
        return self._begun + self._steps * self._duration if self._steps else math.inf

    def next_step_at(self, now: float) -> float:
        """When the next step after `now` ends; inf while idle."""
        if self._out or not self._steps:
            return self.next_at()
        return self._begun + (self._passed(now) + 1) * self._duration

    def produced(self, turn: Turn, now: float) -> int:
        """Output tokens of a turn at `now`."""
        if turn.state != "decode":
            return turn.produced_before
        return turn.produced_before + self._done + self._passed(now) - turn.first_step

    def submit(self, turn: Turn, now: float) -> None:
        """A request arrives. Raises ValueError when it could never run: empty, or more blocks than exist."""
        if turn.prompt_tokens < 1:
            raise ValueError("The decoder prompt cannot be empty")
        if self._blocks(turn.prompt_tokens + turn.output_tokens - 1) > self.cache.capacity:
            raise ValueError("the request does not fit the cache")
        assert turn.state == "new"
        turn.state = "waiting"
        self._waiting.append(turn)
        self._interrupt(now)

    def cancel(self, turn: Turn, now: float) -> None:
        """Ends a turn wherever it is. Its blocks are free at once."""
        turn.produced_before = self.produced(turn, now)
        state, turn.state = turn.state, "done"
        turn.life += 1
        if state == "waiting":
            (self._loaded if turn.admitted else self._waiting).remove(turn)
        elif state == "loading":
            self._loading.remove(turn)
        elif state == "prefill":
            self._prefilling.remove(turn)
            if turn in self._completing:
                self._completing.remove(turn)
        elif state == "decode":
            del self._decoding[turn]
        self.cache.release(turn.held)
        self._interrupt(now)

    def loaded(self, turn: Turn, now: float, *, ok: bool = True) -> None:
        """The load asked for has ended; with `ok` False its blocks are computed instead."""
        if turn.state != "loading":
            return
        self._loading.remove(turn)
        turn.state = "waiting"
        start = turn.held.cached
        if ok:
            self._commit(turn, turn.pool_blocks, loaded=True)
            start = turn.pool_blocks
        turn.computed = start * self.limits.block_size
        self._loaded.append(turn)
        self._interrupt(now)

    def advance(self, now: float) -> list[Effect]:
        """What has happened up to `now` since the last call, in order."""
        while self._steps and (end := self._begun + self._steps * self._duration) <= now + _ROUNDING:
            self._end(end)
            self._begin(end)
        out, self._out = self._out, []
        return out

    def _passed(self, now: float) -> int:
        """How many of the steps in progress have ended."""
        if not self._steps:
            return 0
        return max(0, min(self._steps, int((now - self._begun) / self._duration + _ROUNDING)))

    def _interrupt(self, now: float) -> None:
        """Something has changed: the step in progress is the last one that goes on as planned."""
        if not self._steps:
            self._begin(now)
        elif self._steps > 1:
            self._steps = min(self._steps, self._passed(now) + 1)

    def _end(self, now: float) -> None:
        self._done += self._steps
        self.counters.generated += self._steps * len(self._decoding)
        self._steps = 0
        self._out += self._pending
        self._pending = []
        for turn in self._completing:
            self._prefilling.remove(turn)
            turn.state = "decode"
            turn.first_step = self._done - 1
            self._decoding[turn] = None
            self.counters.generated += 1
            self._attend(turn, 0)
            if turn.produced_before == 0:
                self._out.append(Started(turn, now))
        self._completing = []

    def _begin(self, now: float) -> None:
        """Schedules the next step, and all after it that will be like it."""
        self._decode(now)
        self._context = 0.0
        tokens = self._prefill(self.limits.step_tokens - len(self._decoding))
        decoding = len(self._decoding)
        if not tokens and not decoding:
            # The only running turn may have given way to those that were loaded.
            tokens = self._prefill(self.limits.step_tokens)
        rates = self.rates
        self._begun = now
        self._duration = rates.step_s + decoding * rates.decode_seq_s + tokens / rates.prefill_tok_s
        self._duration += rates.growth_s * self._context
        if tokens:
            self._steps = 1
        elif decoding:
            due = self._due
            while due[0][4] != due[0][3].life:
                heappop(due)
            self._steps = due[0][0] - self._done
        else:
            self._out += self._pending
            self._pending = []

    def _decode(self, now: float) -> None:
        """Blocks for the turns that fill or begin one in this step; the end of those that have all tokens."""
        due, size = self._due, self.limits.block_size
        while due and due[0][0] <= self._done:
            _, _, _, turn, life = heappop(due)
            if turn.life != life:
                continue
            step = self._done - turn.first_step
            if turn.produced_before + step == turn.output_tokens:
                self._finish(turn, now)
                continue
            tokens = turn.target + step
            # In blocks of one token, what a token fills is allocated only below.
            full = min(tokens // size, turn.held.blocks)
            if full > turn.held.cached:
                self._commit(turn, full)
            if tokens > turn.held.blocks * size:
                left = self._blocks(turn.prompt_tokens + turn.output_tokens - 1) - turn.held.blocks
                if not self._allocate(turn, min(self.limits.stride, left)):
                    continue
            self._attend(turn, step)

    def _attend(self, turn: Turn, step: int) -> None:
        """Enters when a turn needs attention after its decode step `step`: next block, or its end."""
        size, tokens = self.limits.block_size, turn.target + step
        within = tokens % size
        if within and self.limits.stride == 1:
            following = step + size - within  # fills its block
        else:
            following = turn.held.blocks * size + 1 - turn.target  # needs another one
        last = turn.output_tokens - turn.produced_before
        self._entries += 1
        at = turn.first_step + min(following, last)
        heappush(self._due, (at, following < last, self._entries, turn, turn.life))

    def _finish(self, turn: Turn, now: float) -> None:
        del self._decoding[turn]
        full = (turn.prompt_tokens + turn.output_tokens - 1) // self.limits.block_size
        if full > turn.held.cached:  # with a stride, the last ones are still to be announced
            self._out.append(Stored(turn, turn.held.cached, full, False))
            self.cache.commit(turn.held, turn.chain, full)
        turn.state = "done"
        turn.produced_before = turn.output_tokens
        self.cache.release(turn.held)
        self.counters.finished += 1
        self._out.append(Finished(turn, now))

    def _prefill(self, budget: int) -> int:
        """The chunks of this step: prompts begun before, oldest first, then new ones. In tokens."""
        left = budget
        preemptions = self.counters.preemptions
        for turn in list(self._prefilling):
            if left > 0 and turn.state == "prefill":
                left -= self._chunk(turn, left)
        # Who has just given way must not take the blocks back in the same step.
        while left > 0 and self.running < self.limits.max_seqs and self.counters.preemptions == preemptions:
            turn = self._next()
            if turn is None:
                break
            if turn.state == "loading":
                continue
            turn.state = "prefill"
            self._prefilling.append(turn)
            left -= self._chunk(turn, left)
        return budget - left

    def _next(self) -> Turn | None:
        """The next turn out of the queue, admitted; None when there is none or it has to wait for blocks."""
        if self._loaded:
            return self._loaded.popleft()
        if self._waiting and self._admit(self._waiting[0]):
            return self._waiting.popleft()
        return None

    def _chunk(self, turn: Turn, room: int) -> int:
        """Schedules up to `room` tokens of the turn's prompt; 0 when it had to give way to others."""
        tokens = min(room, turn.target - turn.computed)
        end = turn.computed + tokens
        if not self._allocate(turn, self._blocks(end) - turn.held.blocks):
            return 0
        self._context += tokens * (turn.computed + tokens / 2)
        turn.computed = end
        size = self.limits.block_size
        if end // size > turn.held.cached:
            self._commit(turn, end // size)
        if saved := min(end, turn.prompt_tokens) // size:
            self._pending.append(Save(turn, saved))
        if end == turn.target:
            self._completing.append(turn)
        return tokens

    def _admit(self, turn: Turn) -> bool:
        """Looks the turn's prompt up and takes its hit into use; False when there are not enough blocks."""
        size, cache = self.limits.block_size, self.cache
        most = (turn.target - 1) // size if turn.reads else 0
        local = cache.hit(turn.chain, most)
        pool = min(self._lookup(turn), most) if self._lookup is not None else 0
        if self._blocks(turn.target) - local + cache.idle(turn.chain, local) > cache.free:
            return False
        turn.admitted = True
        turn.held = cache.use(turn.chain, local)
        turn.computed = local * size
        self._count(turn, local * size, max(0, pool - local) * size)
        if pool > local:
            turn.pool_blocks = pool
            turn.state = "loading"
            self._loading.add(turn)
            self._pending += _removed(cache.allocate(turn.held, pool - local))
            self._out.append(Load(turn, local, pool))
        return True

    def _count(self, turn: Turn, local: int, pool: int) -> None:
        counters = self.counters
        if turn.reads:
            counters.prefix_queries += turn.target
            counters.prefix_hits += local
        if self._lookup is not None:
            counters.external_queries += turn.target - local
            counters.external_hits += pool
        if turn.local_tokens is None:
            turn.local_tokens, turn.pool_tokens = local, pool
            counters.prompt += turn.prompt_tokens
            counters.computed += turn.prompt_tokens - local - pool

    def _allocate(self, turn: Turn, blocks: int) -> bool:
        """Blocks for a running turn; the last admitted ones give way for it. False when it is one of them."""
        while blocks > self.cache.free:
            victim = self._prefilling[-1] if self._prefilling else next(reversed(self._decoding))
            self._preempt(victim)
            if victim is turn:
                return False
        if blocks > 0:
            self._pending += _removed(self.cache.allocate(turn.held, blocks))
        return True

    def _preempt(self, turn: Turn) -> None:
        """Takes a running turn's blocks; it waits, first in line, to compute prompt and output again."""
        if turn.state == "decode":
            turn.produced_before += self._done - turn.first_step
            del self._decoding[turn]
        else:
            self._prefilling.remove(turn)
            if turn in self._completing:
                self._completing.remove(turn)
        self.cache.release(turn.held)
        turn.state, turn.admitted, turn.computed, turn.pool_blocks = "waiting", False, 0, 0
        turn.target = turn.prompt_tokens + turn.produced_before
        turn.life += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(turn)

    def _commit(self, turn: Turn, end: int, *, loaded: bool = False) -> None:
        start = turn.held.cached
        self.cache.commit(turn.held, turn.chain, end)
        self._pending.append(Stored(turn, start, end, loaded))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)


def _removed(evicted: list[Evicted]) -> list[Removed]:
    return [Removed(*run) for run in evicted]
