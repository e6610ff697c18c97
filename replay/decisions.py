"""A recorded decision log decided again: with what decided then, and with other policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from policies.compare import Comparison
from policies.cost import costs, predicted_ttft
from policies.document import BadDocument, read
from policies.plan import Plan
from policies.recorded import Decided, Recorded

_DECODER: Final = msgspec.json.Decoder(Recorded)


class BadDecisions(ValueError):
    """The file cannot be used; the message names the line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise than it was recorded."""

    line: int
    id: str
    then: Decided
    now: Decided


@dataclass(slots=True)
class Found:
    """measured: streamed turns that were answered, with the sums of their times to first token, as measured
    and as expected. first: the first difference. cut: the number of a last line that is not whole.
    """

    others: Mapping[str, Comparison]
    measured: int = 0
    ttft_s: float = 0.0
    expected_s: float = 0.0
    decisions: int = 0
    equal: int = 0
    first: Difference | None = None
    cut: int | None = None


def decide_again(path: Path, plans: Mapping[str, Plan]) -> Found:
    """Every decision of the file, also as each of `plans` would have made it. Raises BadDecisions."""
    found = Found({name: Comparison() for name in plans})
    for number, line in _lines(path):
        try:
            recorded = _DECODER.decode(line)
            plan = _plan(bytes(recorded.document))
        except (msgspec.MsgspecError, BadDocument, UnicodeDecodeError) as wrong:
            if not line.endswith(b"\n"):
                found.cut = number
                break
            raise BadDecisions(f"{path}: line {number}: {wrong}") from None
        then = recorded.placed
        now = Decided.of(plan.decide(recorded.turn, recorded.candidates, recorded.facts))
        found.decisions += 1
        if now == recorded.decided:
            found.equal += 1
        elif found.first is None:
            found.first = Difference(number, recorded.id, recorded.decided, now)
        _measure(found, recorded)
        for name, other in plans.items():
            after = other.decide(recorded.turn, recorded.candidates, recorded.facts)
            found.others[name].add(recorded.turn, then.decision, after)
    if not found.decisions:
        raise BadDecisions(f"{path}: no decisions")
    return found


def _measure(found: Found, recorded: Recorded) -> None:
    ended, chosen = recorded.outcome, recorded.placed.decision.chosen
    if ended is None or ended.kind != "ok" or not ended.streams or ended.ttft_s is None or chosen is None:
        return
    found.measured += 1
    found.ttft_s += ended.ttft_s
    found.expected_s += predicted_ttft(costs(recorded.turn, chosen))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as lines:
            yield from enumerate(lines, 1)
    except OSError as wrong:
        raise BadDecisions(f"{path}: {wrong.strerror}") from None


@lru_cache(maxsize=64)
def _plan(document: bytes) -> Plan:
    return Plan(read(msgspec.json.decode(document)))


def as_text(found: Found) -> str:
    lines = [f"{found.equal} of {found.decisions} decisions are equal"]
    if first := found.first:
        lines.append(f"the first that is not is in line {first.line}, of request {first.id}:")
        lines += [f"  {when}: {_shown(each)}" for when, each in (("then", first.then), ("now", first.now))]
    if found.measured:
        ttft, expected = (s / found.measured * 1e3 for s in (found.ttft_s, found.expected_s))
        lines.append(
            f"{found.measured} streamed answers: time to first token {ttft:.1f} ms, {expected:.1f} expected"
        )
    if found.cut is not None:
        lines.append(f"line {found.cut}, the last one, is cut off and left out")
    return "\n".join([*lines, *(_compared(name, other) for name, other in found.others.items())])


def _shown(decided: Decided) -> str:
    words = [f"{decided.target} ({decided.action})", f"{decided.policy}: {decided.reason}"]
    words += [f"decode on {decided.decode}"] if decided.decode else []
    words += [f"rule {decided.rule}"] if decided.rule else []
    words += [f"guards {', '.join(decided.guards)}"] if decided.guards else []
    return "; ".join(words)


def _compared(name: str, found: Comparison) -> str:
    apart = f"; {found.unplaced} it would turn away" if found.unplaced else ""
    apart += f"; for {found.failed} it failed ({found.fault}), the fallback decided" if found.failed else ""
    if not found.turns:
        return f"{name}: places none of these turns{apart}"
    before, after = (s / found.turns * 1e3 for s in (found.ttft_before, found.ttft_after))
    return (
        f"{name}: {found.changed} of {found.turns} turns would go elsewhere: "
        f"expected time to first token {before:.1f} -> {after:.1f} ms, "
        f"tokens to compute {found.uncached_before} -> {found.uncached_after}{apart}"
    )
