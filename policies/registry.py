"""Policies by name."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from policies.load import least_loaded, random_choice
from policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from policies.types import Policy


class UnknownPolicy(ValueError):
    """No policy has that name; the message lists those that exist."""


class BadPolicyOptions(ValueError):
    """The options do not fit the policy; the message names the path and what is allowed."""


def _without_options(policy: Policy) -> Callable[[Mapping[str, Any]], Policy]:
    def make(options: Mapping[str, Any]) -> Policy:
        if options:
            raise BadPolicyOptions(f"this policy takes no options, got {', '.join(sorted(options))}")
        return policy

    return make


def _longest_prefix(options: Mapping[str, Any]) -> Policy:
    unknown = set(options) - {"pull_cost", "margin_tokens"}
    if unknown:
        raise BadPolicyOptions(
            f"longest_prefix has no option {', '.join(sorted(unknown))}; it takes margin_tokens, pull_cost"
        )
    try:
        return LongestPrefix(msgspec.convert(dict(options), LongestPrefixOptions, strict=False))
    except msgspec.ValidationError as error:
        raise BadPolicyOptions(f"longest_prefix: {error}") from None


_FACTORIES: Mapping[str, Callable[[Mapping[str, Any]], Policy]] = {
    "longest_prefix": _longest_prefix,
    "least_loaded": _without_options(least_loaded),
    "random": _without_options(random_choice),
}


def names() -> list[str]:
    return sorted(_FACTORIES)


def make(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """The policy `name` with `options`. Raises UnknownPolicy or BadPolicyOptions."""
    factory = _FACTORIES.get(name)
    if factory is None:
        raise UnknownPolicy(f"no policy is called {name!r}; there are {', '.join(names())}")
    return factory(options or {})
