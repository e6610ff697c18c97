"""Policies by name: our own, and those that installed packages bring under `moongate.policies`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from math import isfinite
from typing import Any, Literal, cast

import msgspec

from policies.expected_ttft import ExpectedTtft, ExpectedTtftOptions
from policies.installed import Installed, said
from policies.load import BLIND, PLAIN
from policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from policies.sticky import Sticky, StickyOptions
from policies.types import Policy

GROUP = "moongate.policies"

DEFAULT = "expected_ttft"


class UnknownPolicy(ValueError):
    """No policy has that name; the message lists those that exist."""


class BadPolicyOptions(ValueError):
    """The options do not fit the policy; the message names the path and what is allowed.

    path: the option, "" for the policy as a whole.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BrokenPolicy(ValueError):
    """An installed package brings a policy that can't be made; the message says which and why."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of policies that take none."""


Reads = Literal["nothing", "tokens", "all"]


@dataclass(frozen=True, slots=True)
class Kind:
    """options: the type that says which options there are; make: the policy with such options.

    reads: what it goes by, so that a replay need not find out the rest. Nothing but who may be chosen; tokens
    and turns, too; or all, with rates and how full caches are.
    """

    options: type[msgspec.Struct]
    make: Callable[[Any], Policy]
    reads: Reads = "all"


def _session(options: StickyOptions) -> Policy:
    return Sticky("session", options)


def _prefix_hash(options: StickyOptions) -> Policy:
    return Sticky("prefix_hash", options)


def _plain(name: str, policy: Policy) -> Kind:
    return Kind(NoOptions, lambda _: policy, "nothing" if name in BLIND else "tokens")


_OWN: Mapping[str, Kind] = {
    "longest_prefix": Kind(LongestPrefixOptions, LongestPrefix, "tokens"),
    "expected_ttft": Kind(ExpectedTtftOptions, ExpectedTtft),
    "session": Kind(StickyOptions, _session, "tokens"),
    "prefix_hash": Kind(StickyOptions, _prefix_hash, "tokens"),
    **{name: _plain(name, policy) for name, policy in PLAIN.items()},
}


def names() -> list[str]:
    return sorted({*_OWN, *(entry.name for entry in _installed())})


def options_of(name: str) -> type[msgspec.Struct] | None:
    """The type of the policy's options; None where an installed one does not say. Raises UnknownPolicy."""
    if name in _OWN:
        return _OWN[name].options
    declared = getattr(_load(name), "Options", None)
    return declared if isinstance(declared, type) and issubclass(declared, msgspec.Struct) else None


def reads(name: str) -> Reads:
    """What the policy goes by; of an installed one, all that there is."""
    return _OWN[name].reads if name in _OWN else "all"


def weighs(name: str) -> bool:
    """Whether the policy goes by more than who may be chosen."""
    return reads(name) != "nothing"


def make(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """The policy `name` with `options`. Raises UnknownPolicy, BadPolicyOptions or BrokenPolicy."""
    given = dict(options or {})
    if name in _OWN:
        kind = _OWN[name]
        return kind.make(_checked(name, given, kind.options))
    factory = _load(name)
    declared = options_of(name)
    try:
        policy = factory(given if declared is None else _checked(name, given, declared))
    except (BadPolicyOptions, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BrokenPolicy(f"{name}: could not be made: {said(error)}") from error
    if not callable(policy):
        raise BrokenPolicy(f"{name}: what was made can't be called")
    return Installed(name, policy)


def _checked(name: str, given: Mapping[str, Any], options: type[msgspec.Struct]) -> msgspec.Struct:
    known = {field.encode_name for field in msgspec.structs.fields(options)}
    unknown = sorted(set(given) - known)
    if unknown:
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise BadPolicyOptions(f"{name} has no option {', '.join(unknown)}; {takes}", unknown[0])
    try:
        found = msgspec.convert(given, options, strict=False)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).replace("`", "").partition(" - at $.")
        raise BadPolicyOptions(f"{name}: {at or 'options'}: {reason}", at) from None
    for option, value in msgspec.structs.asdict(found).items():
        if isinstance(value, float) and not isfinite(value):
            raise BadPolicyOptions(f"{name}: {option}: a number has to be finite", option)
    return found


def _installed() -> list[EntryPoint]:
    """Own names can't be taken."""
    return [entry for entry in entry_points(group=GROUP) if entry.name not in _OWN]


def _load(name: str) -> Callable[[Any], Policy]:
    entry = next((entry for entry in _installed() if entry.name == name), None)
    if entry is None:
        raise UnknownPolicy(f"no policy is called {name!r}; there are {', '.join(names())}")
    try:
        factory = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BrokenPolicy(f"{name}: {entry.value} could not be loaded: {said(error)}") from error
    if not callable(factory):
        raise BrokenPolicy(f"{name}: {entry.value} can't be called")
    return cast(Callable[[Any], Policy], factory)
