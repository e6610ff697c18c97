"""The policy document: which policy decides for which turns, and within which bounds."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from policies import registry

# Deeper than any option needs to be.
_DEPTH = 32
_LARGEST_INT = 2**63 - 1
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
Glob = Annotated[str, Meta(min_length=1, description="A name; * stands for anything, ? for one character.")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of the document."""


class Match(Section, frozen=True):
    """All that is given must fit; a list fits if any of its names does."""

    model: Annotated[list[Glob], Meta(description="The model, aliases resolved.")] = []
    alias: Annotated[list[Glob], Meta(description="The name the client asked for.")] = []
    api: list[Literal["chat", "completions", "messages", "responses", "other"]] = []
    tenant: Annotated[list[Glob], Meta(description="Whose the client's key is, as the keys file says.")] = []
    key: Annotated[
        list[Glob],
        Meta(description="The client's key by its name in the keys file, or as sha256:12 hex digits."),
    ] = []
    header: Annotated[dict[str, Glob], Meta(description="Request headers by lower-case name.")] = {}
    min_prompt_tokens: Annotated[int, Meta(ge=0)] | None = None
    max_prompt_tokens: Annotated[int, Meta(ge=0)] | None = None


class Rule(Section, frozen=True):
    """What holds for turns that `match`; the first rule that matches decides alone."""

    name: str = ""
    match: Match = Match()
    policy: str = registry.DEFAULT
    options: dict[str, Any] = {}
    workers: Annotated[list[Glob], Meta(description="Workers to choose from; none: all.")] = []
    spill: Annotated[
        bool,
        Meta(description="Whether others may be chosen when none of these can be; else such turns fail."),
    ] = True


class Guards(Section, frozen=True):
    """Bounds that hold before any policy chooses. One that would leave nobody lets go."""

    max_queue_tokens: (
        Annotated[int, Meta(ge=1, description="A target with more uncached tokens ahead gets no turns.")]
        | None
    ) = None
    max_inflight: (
        Annotated[int, Meta(ge=1, description="A target with so many turns under way gets no more.")] | None
    ) = None
    max_imbalance: (
        Annotated[
            float,
            Meta(ge=1, description="A target with more than so many times the mean load gets no turns."),
        ]
        | None
    ) = None
    imbalance_slack_tokens: Annotated[
        int, Meta(ge=0, description="Tokens of load that are never too many, whatever the mean.")
    ] = 16384
    min_prefix_tokens: Annotated[
        int, Meta(ge=0, description="A shorter local prefix does not count in the choice.")
    ] = 0


class Document(Section, frozen=True):
    """The whole document. Without rules, `policy` decides for every turn."""

    policy: str = registry.DEFAULT
    options: dict[str, Any] = {}
    rules: list[Rule] = []
    guards: Guards = Guards()
    fallback: Annotated[str, Meta(description="The policy that decides where the chosen one fails.")] = (
        "least_loaded"
    )


class BadDocument(ValueError):
    """A document that can't be used. path: of what is wrong, such as `rules[0].match.api[1]`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path or 'document'}: {message}")
        self.path = path


def read(given: object) -> Document:
    """`given` as parsed from JSON or TOML. Raises BadDocument, which names the path and what is allowed."""
    _refuse_unkeepable(given)
    _refuse_unknown(given, Document, "")
    try:
        document = msgspec.convert(given, Document)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).replace("`", "").partition(" - at $")
        path = path.removeprefix(".").replace("[...]", ".*")
        allowed = _allowed(path)
        raise BadDocument(path, reason + (f"; allowed: {allowed}" if allowed else "")) from None
    _check_policy(document.policy, document.options, "")
    for number, rule in enumerate(document.rules):
        _check_policy(rule.policy, rule.options, f"rules[{number}].")
        _check_match(rule.match, f"rules[{number}].match.")
    _check_policy(document.fallback, {}, "", field="fallback")
    return document


def plain(document: Document) -> dict[str, Any]:
    """As JSON would have it; what is as by default is left out, but not policies: that may change."""
    found: dict[str, Any] = {"policy": document.policy, **msgspec.to_builtins(document)}
    for given, rule in zip(found.get("rules", ()), document.rules, strict=True):
        given["policy"] = rule.policy
    return found


def schema() -> dict[str, Any]:
    """The JSON Schema of documents, with the policies there are and their options."""
    found: dict[str, Any] = msgspec.json.schema(Document)
    names = registry.names()
    options = {name: kind for name in names if (kind := _options(name)) is not None}
    _, components = msgspec.json.schema_components(list(options.values()))
    found["$defs"] |= components
    tied = [
        {
            "if": {"properties": {"policy": {"const": name}}, "required": ["policy"]},
            "then": {"properties": {"options": {"$ref": f"#/$defs/{kind.__name__}"}}},
        }
        for name, kind in options.items()
    ]
    for name in ("Document", "Rule"):
        found["$defs"][name]["properties"]["policy"]["enum"] = names
        found["$defs"][name]["allOf"] = tied
    found["$defs"]["Document"]["properties"]["fallback"]["enum"] = names
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Policy document", **found}


def _options(name: str) -> type[msgspec.Struct] | None:
    try:
        return registry.options_of(name)
    except registry.BrokenPolicy:
        return None


def _check_policy(name: str, options: Mapping[str, Any], path: str, field: str = "policy") -> None:
    try:
        registry.make(name, options)
    except registry.BadPolicyOptions as error:
        option = f".{error.path}" if error.path else ""
        raise BadDocument(f"{path}options{option}", str(error)) from None
    except registry.UnknownPolicy:
        raise BadDocument(
            f"{path}{field}", f"no policy is called {name!r}; allowed: {', '.join(registry.names())}"
        ) from None
    except registry.BrokenPolicy as error:
        raise BadDocument(f"{path}{field}", str(error)) from None


def _check_match(match: Match, path: str) -> None:
    for name in match.header:
        if not _HEADER.fullmatch(name):
            raise BadDocument(
                f"{path}header.{name}",
                "no header is called so; allowed: lower-case letters, digits, - and _",
            )
    least, most = match.min_prompt_tokens, match.max_prompt_tokens
    if least is not None and most is not None and least > most:
        raise BadDocument(f"{path}min_prompt_tokens", f"nothing can match; allowed: up to {most}")


def _refuse_unkeepable(given: object) -> None:
    """What JSON can't say would not be the same once it was kept and read again."""
    left: list[tuple[str, object, int]] = [("", given, 0)]
    while left:
        path, value, depth = left.pop()
        if depth > _DEPTH:
            raise BadDocument(path, f"nested too deep; allowed: {_DEPTH} levels")
        if isinstance(value, float) and not math.isfinite(value):
            raise BadDocument(path, "a number has to be finite")
        if isinstance(value, int) and abs(value) > _LARGEST_INT:
            raise BadDocument(path, f"the number is too large; allowed: up to {_LARGEST_INT}")
        if isinstance(value, str) and not _is_text(value):
            raise BadDocument(path, "not valid Unicode: it has half of a surrogate pair")
        if isinstance(value, Mapping):
            for name, each in cast(Mapping[object, object], value).items():
                word = str(name)
                if not _is_text(word):
                    raise BadDocument(path, "a name in it is not valid Unicode: half of a surrogate pair")
                left.append((f"{path}.{word}" if path else word, each, depth + 1))
        elif isinstance(value, list | tuple):
            items = enumerate(cast(Sequence[object], value))
            left.extend((f"{path}[{number}]", each, depth + 1) for number, each in items)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unknown(given: object, kind: type[Section], path: str) -> None:
    if not isinstance(given, Mapping):
        return
    known = get_type_hints(kind, include_extras=False)
    for name, value in cast(Mapping[str, object], given).items():
        at = f"{path}.{name}" if path else str(name)
        if name not in known:
            raise BadDocument(at, f"there is no such field; allowed: {', '.join(known)}")
        form = known[name]
        if isinstance(form, type) and issubclass(form, Section):
            _refuse_unknown(value, form, at)
        elif form == list[Rule] and isinstance(value, Sequence) and not isinstance(value, str):
            for number, each in enumerate(cast(Sequence[object], value)):
                _refuse_unknown(each, Rule, f"{at}[{number}]")


def _allowed(path: str) -> str:
    """What a field may be, in words; "" where the error says it all."""
    form: Any = Document
    for step in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(form, type) and issubclass(form, Section):
            form = get_type_hints(form).get(step)
        elif get_origin(form) in (list, dict):
            form = get_args(form)[-1]
        if form is None:
            return ""
    return ", ".join(_choices(form))


def _choices(form: Any) -> Iterator[str]:
    if get_origin(form) is Literal:
        yield from get_args(form)
    elif form is bool:
        yield from ("true", "false")
