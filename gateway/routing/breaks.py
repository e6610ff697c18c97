"""Prefixes that break from one turn of a session to the next: found on the way, looked into beside it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.parse import ParsedTurn
from gateway.prompts.prompts import ModelPrompts
from gateway.routing.sight import Sight
from gateway.sessions.blame import has_system
from gateway.sessions.divergence import Divergence, PrefixReport, examine
from gateway.sessions.sessions import Departure, Seen, Sessions, hint, names
from store.hashing import HashScheme
from store.prompt.request import PromptRequest, TextPrompt, TokensPrompt

logger = logging.getLogger(__name__)

# Departures that wait to be looked into, one after another; each holds its prompts.
_WAITING = 8


@dataclass(frozen=True, slots=True)
class _Case:
    """A departure with what it takes to explain it. local: whether the prompt was made here."""

    departure: Departure
    model: str
    request: PromptRequest
    scheme: HashScheme
    local: bool


class PrefixBreaks:
    """Costs a turn microseconds. Never raises but for what it is given to call."""

    def __init__(
        self,
        prompts: ModelPrompts,
        counted: Callable[[str, str], None],
        dropped: Callable[[], None],
        sessions: Sessions | None = None,
    ) -> None:
        """`counted` gets model and kind of cause of every break; `dropped`: one was not looked into."""
        self._prompts = prompts
        self._counted = counted
        self._dropped = dropped
        self._sessions = sessions or Sessions()
        self._waiting: deque[tuple[_Case, PrefixReport]] = deque()
        self._task: asyncio.Task[None] | None = None

    def follow(self, request_id: str, parsed: ParsedTurn, sight: Sight) -> PrefixReport | None:
        """Remember the turn's prompt. If it departs from its session's last: a report, filled in later."""
        try:
            seen = _seen(request_id, parsed, sight, sight.named)
            departure = None if seen is None else self._sessions.follow(seen)
        except Exception:
            logger.exception("a turn's session was not followed")
            return None
        case = None if departure is None else _case(departure, parsed, sight)
        if case is None:
            return None
        if len(self._waiting) >= _WAITING:
            self._dropped()
            return None
        report = PrefixReport()
        self._waiting.append((case, report))
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="prefix breaks")
        return report

    async def explain(self, parsed: ParsedTurn, sight: Sight) -> PrefixReport | None:
        """The report of a turn that is not one: it is not remembered, and not counted."""
        seen = _seen("", parsed, sight, hint({}, parsed.session))
        departure = None if seen is None else self._sessions.find(seen)
        case = None if departure is None else _case(departure, parsed, sight)
        return None if case is None else PrefixReport(await self._examined(case))

    @property
    def busy(self) -> bool:
        """Whether departures are being looked into."""
        return self._task is not None

    async def close(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        """One case after another, until none waits."""
        try:
            while self._waiting:
                case, report = self._waiting.popleft()
                report.divergence = await self._examined(case)
                if report.divergence is not None:
                    self._counted(case.model, report.divergence.kind)
        finally:
            self._task = None

    async def _examined(self, case: _Case) -> Divergence | None:
        try:
            texts = await self._prompts.texts(case.model) if case.local else None
            return await asyncio.to_thread(examine, case.departure, case.request, case.scheme, texts)
        except Exception:
            # Not the exception's text: a template may have put a prompt in it.
            logger.warning("a prefix break of model %s could not be looked into", case.model)
            return None


def _seen(request_id: str, parsed: ParsedTurn, sight: Sight, session: str) -> Seen | None:
    """session: as its client calls it, "" if by nothing."""
    prompt, scheme = sight.understood.prompt, sight.understood.scheme
    if prompt is None or prompt.partial or scheme is None or parsed.prompt is None:
        return None
    request, keys = parsed.prompt, prompt.chain.keys
    tools = None if isinstance(request, TextPrompt | TokensPrompt) else request.tools
    found = names(parsed.model, scheme.block_size, session, request, keys)
    return Seen(
        request_id,
        found,
        bool(session),
        prompt.tokens,
        keys,
        scheme.block_size,
        len(tools) if tools else 0,
        has_system(request),
    )


def _case(departure: Departure, parsed: ParsedTurn, sight: Sight) -> _Case | None:
    prompt, scheme = sight.understood.prompt, sight.understood.scheme
    if prompt is None or scheme is None or parsed.prompt is None:
        return None
    return _Case(departure, parsed.model, parsed.prompt, scheme, prompt.source != "remote")
