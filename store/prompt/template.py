"""What vLLM finds out about a chat template by reading it: content format, variables, developer role.

vLLM gives message content either as one string or as a list of parts ("openai"), whichever the template's
source suggests; the prompt depends on that choice, so the reading is repeated here rule by rule, with its
limits: it is about names, not about scopes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import jinja2
import jinja2.meta
from jinja2 import nodes

ContentFormat: TypeAlias = Literal["string", "openai"]


# Keywords of transformers' apply_chat_template, which reach it whether the template reads them or not.
_TEMPLATE_CALL: Final = frozenset(
    (
        *("self", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
_NEVER_SEEN: Final = frozenset(("chat_template", "tokenize"))


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """keywords: names of those that reach the template, or transformers' call of it."""

    content_format: ContentFormat
    keywords: frozenset[str]
    knows_developer: bool


class _Unclear(Exception):
    """A construct vLLM's reading does not expect: it then takes the content to be strings."""


def read_template(source: str, environment: jinja2.Environment) -> TemplateFacts:
    """Raises jinja2.TemplateError when `source` is not a template."""
    tree = environment.parse(source)
    return TemplateFacts(
        content_format=_content_format(tree),
        # Besides those, names that the template reads and does not define.
        keywords=_TEMPLATE_CALL | (jinja2.meta.find_undeclared_variables(tree) - _NEVER_SEEN),
        knows_developer='"developer"' in source or "'developer'" in source,
    )


def _content_format(tree: nodes.Template) -> ContentFormat:
    try:
        return "openai" if any(_loops_over_content(tree)) else "string"
    except _Unclear:
        return "string"


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is variable `name` (its attribute `key`), possibly filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    if isinstance(node, nodes.Getattr):
        return _reads_name(node.node, name) and node.attr == key
    return False


def _reads_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _names_of_messages(tree: nodes.Template) -> list[str]:
    """`messages` and every variable assigned from it, directly or through another such variable."""
    names = ["messages"]
    todo: deque[str] = deque(names)
    while todo:
        name = todo.popleft()
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, name):
                target = _plain(assign.target)
                names.append(target)
                if target != name:
                    todo.append(target)
        if len(names) > _ENDLESS:
            raise _Unclear
    return names


# Two variables assigned from each other make the walk endless; vLLM itself would hang on such a template.
_ENDLESS: Final = 10_000


def lists_of_messages(tree: nodes.Template) -> list[str]:
    """Names of lists of messages, none where that is unclear."""
    try:
        return _names_of_messages(tree)
    except _Unclear:
        return []


def _plain(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name


def _names_of_message(tree: nodes.Template) -> list[str]:
    """Loop variables of `for message in messages`."""
    lists = _names_of_messages(tree)
    return [
        _plain(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_reads(loop.iter, name) for name in lists)
    ]


def _loops_over_content(tree: nodes.Template) -> Iterator[bool]:
    """True for each loop over a message's content, also over a macro's parameter that receives content."""
    message_names = _names_of_message(tree)
    in_macro: set[int] = set()
    parameters_of: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _content_parameters(tree, macro, message_names)
        for loop in macro.find_all(nodes.For):
            in_macro.add(id(loop))
            if parameters:
                parameters_of[id(loop)] = parameters
    for loop in tree.find_all(nodes.For):
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if (
            any(_reads(loop.iter, message, "content") for message in message_names)
            or name in parameters_of.get(id(loop), ())
            or (id(loop) not in in_macro and name == "content")
        ):
            _plain(loop.target)
            yield True


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters of `macro` that some call gives a message's content."""
    names = [parameter.name for parameter in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        for name, argument in zip(names, call.args, strict=False):
            if any(_reads(argument, message, "content") for message in messages):
                found.add(name)
        for keyword in call.kwargs:
            if keyword.key in names and any(_reads(keyword.value, name, "content") for name in messages):
                found.add(keyword.key)
    return found
