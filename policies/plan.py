"""A policy document put to work: for each turn the first rule that matches, its policy, within the guards."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace as with_fields

from policies import registry
from policies.document import Document, Guards, Match, plain
from policies.installed import said
from policies.load import least_loaded, work
from policies.pair import placed
from policies.types import Candidate, Decision, Policy, Turn


class Facts(msgspec.Struct, frozen=True):
    """What rules go by, besides the turn. headers: those that any rule names, by lower-case name.

    tenant, key: of the client as it was authenticated; a key by its name, or by a part of its digest.
    """

    model: str = ""
    alias: str = ""
    api: str = ""
    headers: Mapping[str, str] = {}
    tenant: str = ""
    key: str = ""


NO_FACTS: Final = Facts()
_NO_GUARDS: Final = Guards()


class Plan:
    """Never raises while it decides: a policy that does is stood in for by the document's fallback."""

    __slots__ = ("_default", "_fallback", "_guards", "_rules", "document", "headers", "weighs")

    def __init__(self, document: Document) -> None:
        """Raises what the registry raises; a document that was read has been checked."""
        self.document = document
        self.headers: Final = frozenset(name for rule in document.rules for name in rule.match.header)
        named = {document.policy, *(rule.policy for rule in document.rules)}
        # Whether it matters what targets hold and were given to do, or only who may be chosen.
        self.weighs: Final = document.guards != _NO_GUARDS or any(map(registry.weighs, named))
        self._guards = document.guards
        self._default = registry.make(document.policy, document.options)
        self._fallback = registry.make(document.fallback)
        self._rules = [(rule, registry.make(rule.policy, rule.options)) for rule in document.rules]

    @property
    def as_plain(self) -> dict[str, Any]:
        """The document as JSON would have it."""
        return plain(self.document)

    def for_nobody(self, targets: Sequence[str]) -> list[str]:
        """In words, each pattern of a rule's workers that fits none of `targets`."""
        return [
            f"rules[{number}].workers[{place}]: no worker fits {glob!r}"
            for number, (rule, _) in enumerate(self._rules)
            for place, glob in enumerate(rule.workers)
            if not any(_is_of(target, glob) for target in targets)
        ]

    def decide(self, turn: Turn, candidates: Sequence[Candidate], facts: Facts = NO_FACTS) -> Decision:
        policy, name, shown = self._default, "", candidates
        for number, (rule, own) in enumerate(self._rules):
            if _matches(rule.match, turn, facts):
                policy, name = own, rule.name or f"rules[{number}]"
                shown = _selected(candidates, rule.workers, rule.spill)
                break
        fired: list[str] = []
        shown = _guarded(shown, self._guards, fired)
        short = self._guards.min_prefix_tokens
        weighed = [_without_short(c, short) for c in shown] if short else shown
        decision = stood_in(policy, self._fallback, turn, weighed)
        if not turn.prompt_tokens:
            # What its target will do with a prompt that nobody knows can't be said.
            decision = with_fields(decision, action="none")
        if shown is candidates and not short and not name:
            return decision
        weigh = decision.weigh
        if short and weigh is not None:
            weigh = partial(_as_weighed, weigh, short)
        return with_fields(decision, candidates=tuple(shown), weigh=weigh, rule=name, guards=tuple(fired))


def stood_in(policy: Policy, fallback: Policy, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """`policy`'s decision. An installed policy's fault must not be a turn's: then it is `fallback`'s, and
    where that is one that fails, too, the least loaded target. `fault` says how `policy` failed."""
    try:
        return placed(policy, turn, candidates)
    except Exception as error:
        try:
            decision = placed(fallback, turn, candidates)
        except Exception:
            decision = placed(least_loaded, turn, candidates)
        return with_fields(decision, reason="the policy failed, fallback", fault=said(error))


def _matches(match: Match, turn: Turn, facts: Facts) -> bool:
    if match.min_prompt_tokens is not None and turn.prompt_tokens < match.min_prompt_tokens:
        return False
    if match.max_prompt_tokens is not None and turn.prompt_tokens > match.max_prompt_tokens:
        return False
    return (
        _any(match.model, facts.model)
        and _any(match.alias, facts.alias)
        and _any(match.tenant, facts.tenant)
        and _any(match.key, facts.key)
        and (not match.api or facts.api in match.api)
        and all(fnmatchcase(facts.headers.get(name, ""), glob) for name, glob in match.header.items())
    )


def _any(globs: Sequence[str], name: str) -> bool:
    return not globs or any(fnmatchcase(name, glob) for glob in globs)


def _is_of(target: str, glob: str) -> bool:
    return fnmatchcase(target, glob) or fnmatchcase(target.split("@")[0], glob)


def _selected(candidates: Sequence[Candidate], workers: Sequence[str], spill: bool) -> Sequence[Candidate]:
    """Of data-parallel targets the worker's name counts too, before the @."""
    if not workers:
        return candidates
    inside = [any(_is_of(c.target, glob) for glob in workers) for c in candidates]
    if spill and not _can_answer(c for c, ok in zip(candidates, inside, strict=True) if ok):
        return candidates
    return [
        c if ok or c.excluded else with_fields(c, excluded="rule")
        for c, ok in zip(candidates, inside, strict=True)
    ]


def _can_answer(candidates: Iterable[Candidate]) -> bool:
    """Those that are for prefill alone need one that decodes."""
    return any(not c.excluded and c.role != "prefill" for c in candidates)


def _guarded(candidates: Sequence[Candidate], guards: Guards, fired: list[str]) -> Sequence[Candidate]:
    shown = candidates
    if guards.max_queue_tokens is not None:
        queue = guards.max_queue_tokens
        shown = _without(shown, "max_queue_tokens", lambda c: c.queued_tokens > queue, fired)
    if guards.max_inflight is not None:
        most = guards.max_inflight
        shown = _without(shown, "max_inflight", lambda c: c.inflight >= most, fired)
    if guards.max_imbalance is not None:
        able = [c for c in shown if not c.excluded]
        mean = sum(map(work, able)) / max(1, len(able))
        bound = guards.max_imbalance * mean + guards.imbalance_slack_tokens
        shown = _without(shown, "max_imbalance", lambda c: work(c) > bound, fired)
    return shown


def _without(
    candidates: Sequence[Candidate], name: str, hit: Callable[[Candidate], bool], fired: list[str]
) -> Sequence[Candidate]:
    able = [c for c in candidates if not c.excluded]
    out = {c.target for c in able if hit(c)}
    if not out or not _can_answer(c for c in able if c.target not in out):
        return candidates
    fired.append(name)
    return [with_fields(c, excluded=name) if c.target in out else c for c in candidates]


def _without_short(candidate: Candidate, tokens: int) -> Candidate:
    if 0 < candidate.local_tokens < tokens:
        return with_fields(candidate, local_tokens=0)
    return candidate


def _as_weighed(
    weigh: Callable[[Candidate], Mapping[str, float]], tokens: int, candidate: Candidate
) -> Mapping[str, float]:
    return weigh(_without_short(candidate, tokens))


_OURS: Final = frozenset(("rule", "role", "max_queue_tokens", "max_inflight", "max_imbalance"))


def as_given(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of a decision as its plan was given them, before rules and guards."""
    return [with_fields(c, excluded="") if c.excluded in _OURS else c for c in candidates]
