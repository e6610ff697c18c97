# ruff: noqa: E501 (templates on one line each)
"""Rules with a reason of their own, each by an example; the corpus compares the rest with a real engine."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from store.hashing import HashScheme
from store.prompt.environment import Printed, make_environment
from store.prompt.local import LocalPrompts
from store.prompt.messages import MessagesFacts, chat_of_messages
from store.prompt.normalise import conversation, tools
from store.prompt.request import ChatPrompt, MessagesPrompt, ResponsesPrompt, Unrenderable
from store.prompt.responses import chat_of_responses
from store.prompt.template import ContentFormat, read_template
from tests.store.prompt.families import LLAMA2, LLAMA3, PARTS, PHI, QWEN3
from tests.store.prompt.pieces import ODD_TOOLS, WEATHER, assistant, call, system, user

SCHEME = HashScheme("sha256_cbor", 16)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, "string"),
        (LLAMA3, "string"),
        (LLAMA2, "string"),
        (PHI, "string"),
        (PARTS, "openai"),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}", "openai"),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}x{% endfor %}{% endfor %}", "openai"),
        ("{% macro show(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.content) }}{% endfor %}", "openai"),
        ("{% macro show(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(x=m['content'] | list) }}{% endfor %}", "openai"),
        ("{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.role) }}{% endfor %}", "string"),
        ("{% for a, b in messages %}{% for c in a.content %}{{ c }}{% endfor %}{% endfor %}", "string"),
        ("{% set ns.x = messages %}{% for m in messages %}{% for c in m.content %}x{% endfor %}{% endfor %}", "string"),
        ("no loops at all", "string"),
    ],
)  # fmt: skip
def test_content_format_by_reading_the_template(template: str, expected: ContentFormat) -> None:
    assert read_template(template, make_environment()).content_format == expected


def test_nothing_given_in_is_modified() -> None:
    facts = read_template(QWEN3, make_environment())
    messages = [
        system("x-anthropic-billing-header: a\nrest"),
        assistant([{"type": "text", "text": "a"}], tool_calls=[call('{"a": 1}')], reasoning_content="r"),
        {"role": "developer", "content": "late"},
    ]
    given = [WEATHER, *ODD_TOOLS]
    before = json.dumps([messages, given])
    conversation(messages, facts)
    tools(given)
    assert json.dumps([messages, given]) == before


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "data:x"}}])]}, "multimodal"),
        ({"messages": [user([{"type": "text", "text": "a", "uuid": "u"}])]}, "multimodal"),
        ({"messages": [user(5)]}, "invalid"),
        ({"messages": ["text"]}, "invalid"),
        ({"messages": [{"content": "no role"}]}, "invalid"),
        ({"messages": [user(["only a string"])]}, "invalid"),
        ({"messages": []}, "template_error"),
        ({"messages": [assistant(None, tool_calls=["x"])]}, "invalid"),
        ({"messages": [user("q")], "tools": [{"type": "function"}]}, "invalid"),
        ({"messages": [user("q")], "tools": ["x"]}, "invalid"),
        ({"messages": [user("q")], "chat_template": "{{ messages }}"}, "request_template"),
        ({"messages": [user("q")], "chat_template_kwargs": {"chat_template": "x"}}, "request_template"),
        ({"messages": [user("q")], "chat_template_kwargs": {"conversation": 1}}, "invalid"),
        ({"messages": [user("q")], "chat_template_kwargs": {"documents": False}}, "invalid"),
        ({"messages": [user("q")], "chat_template_kwargs": {"tools": ["x"]}}, "template_error"),
        ({"messages": [user("q")], "continue_final_message": True}, "template_error"),
        ({"messages": [user("q")], "chat_template_kwargs": {"messages": []}}, "template_error"),
        ({"messages": [user("q")], "truncate_prompt_tokens": -1}, "truncate_to_model_length"),
        ({"messages": [user("q")], "truncate_prompt_tokens": 0}, "invalid"),
    ],
)
def test_b020_what_cannot_be_known_here_is_said_not_guessed(
    fields: dict[str, Any], reason: str, load: Callable[[str], LocalPrompts]
) -> None:
    with pytest.raises(Unrenderable) as why:
        load("chatml").prompt(ChatPrompt(**fields), SCHEME)
    assert why.value.reason == reason


def test_a_template_that_refuses_the_conversation(load: Callable[[str], LocalPrompts]) -> None:
    with pytest.raises(Unrenderable, match="must alternate"):
        load("llama2").prompt(ChatPrompt(messages=[user("a"), user("b")]), SCHEME)


@pytest.mark.parametrize(
    ("architecture", "files"),
    [
        ("GptOssForCausalLM", []),
        ("DeepseekV32ForCausalLM", []),
        ("Any", ["consolidated.safetensors", "tekken.json"]),
    ],
)
def test_models_that_vllm_renders_in_its_own_way(architecture: str, files: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(Unrenderable, match="tokenizer_unsupported"):
        LocalPrompts.load(str(tmp_path))


def test_responses_that_depend_on_the_worker() -> None:
    for field in ({"previous_response_id": "resp_1"}, {"prompt": {"id": "p"}}):
        with pytest.raises(Unrenderable, match="previous_response"):
            chat_of_responses(ResponsesPrompt(input="x", **field))
    for truncation in ("auto", None):
        with pytest.raises(Unrenderable, match="truncate_to_model_length"):
            chat_of_responses(ResponsesPrompt(input="x", truncation=truncation))


def test_messages_that_cannot_be_known_here() -> None:
    facts = MessagesFacts(merge_system=False, disabled_effort="none")
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    for messages, reason in (
        ([system([removal]), user("q")], "tool_changes"),
        ([user([{"type": "tool_use", "name": "f", "input": {}}])], "invalid"),
    ):
        with pytest.raises(Unrenderable) as why:
            chat_of_messages(MessagesPrompt(messages=messages), facts)
        assert why.value.reason == reason


@pytest.mark.parametrize(
    "odd", [{"content": "x"}, {"summary": "x"}, {"summary": [{"text": "no type"}]}, {"content": ["x"]}]
)
def test_reasoning_that_vllm_refuses_is_left_to_it(odd: dict[str, Any]) -> None:
    """Sent ids, it would not look at it."""
    item = {"type": "reasoning", "summary": []} | odd
    with pytest.raises(Unrenderable):
        chat_of_responses(ResponsesPrompt(input=[item, {"role": "user", "content": "q"}]))


def test_b018_of_the_top_level_system_only_blocks_lose_the_billing_header_here() -> None:
    """vLLM 0.32 leaves a string to its chat, which takes out the first line and keeps the rest."""
    facts = MessagesFacts(merge_system=False, disabled_effort="none")
    text = "x-anthropic-billing-header: cch=1;\nAll the rules."
    as_text = chat_of_messages(MessagesPrompt(messages=[user("q")], system=text), facts)
    assert as_text.messages == [system(text), user("q")]
    as_block = chat_of_messages(
        MessagesPrompt(messages=[user("q")], system=[{"type": "text", "text": text}]), facts
    )
    assert as_block.messages == [user("q")]


def test_inline_system_messages_are_merged_where_the_template_wants_them_first() -> None:
    request = MessagesPrompt(messages=[user("q"), system("late"), user("r")], system="top ")
    merged = chat_of_messages(request, MessagesFacts(merge_system=True, disabled_effort="none"))
    assert merged.messages == [system("top late"), user("q"), user("r")]
    kept = chat_of_messages(request, MessagesFacts(merge_system=False, disabled_effort="none"))
    assert kept.messages == [system("top "), user("q"), system("late"), user("r")]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("chatml", MessagesFacts(merge_system=False, disabled_effort="none")),
        ("llama2", MessagesFacts(merge_system=True, disabled_effort="low")),
        ("parts", MessagesFacts(merge_system=False, disabled_effort="none")),
        ("phi", MessagesFacts(merge_system=False, disabled_effort="low")),
    ],
)
def test_what_is_tried_out_on_the_template(
    name: str, facts: MessagesFacts, load: Callable[[str], LocalPrompts]
) -> None:
    assert load(name)._renderer.messages_facts() == facts  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__ }}", "{{ messages[0].__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__ }}",
     "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}", "{% for m in messages %}{{ loop._iterator }}{% endfor %}"],
)  # fmt: skip
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    template = make_environment().from_string(source)
    with contextlib.suppress(jinja2.exceptions.SecurityError):
        assert not template.render(messages=[{"role": "user"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=3, a=4) }}{{ m() }}",
        "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) }}{{ m(1, 2, k=3) }}",
        "{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(1) %}inner{% endcall %}",
        "{% macro m(a) %}{{ a }}{% endmacro %}{% for i in [1, 2] %}{{ m(i) }}{{ m(loop.index) }}{% endfor %}",
        "{% autoescape true %}{% macro m(a) %}{{ a }}<{% endmacro %}{{ m('<b>') }}{% endautoescape %}",
        "{% for m in messages %}{{ m.role }}{{ m['role'] }}{{ m.none }}{{ m.items() | list }}{{ m.get('x', 1) }}{% endfor %}",
        "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}{{ loop.previtem is defined }}{% endfor %}",
        "{% generation %}{{ messages[0].role }}{% endgeneration %}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.x }}",
        "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}{{ messages[0].content | tojson(ensure_ascii=True) }}",
        "{{ messages[1].args | tojson }}{{ messages[1].args | tojson(sort_keys=True) }}{{ messages[1].args.z }}{{ messages[1].args }}",
        "{{ messages[1].args is mapping }}{{ messages[1].args.items() | list }}{{ messages[1].args | length }}{{ '{}'.format(1) }}",
    ],
)
def test_the_environment_renders_as_that_of_transformers(source: str) -> None:
    arguments = {"z": 1, "a": "<ü>"}
    plain = [{"role": "user", "content": "é<b>"}, {"role": "tool", "args": arguments}]
    ours = [plain[0], {**plain[1], "args": Printed(arguments)}]
    expected = _compile_jinja_template(source).render(messages=plain)
    assert make_environment().from_string(source).render(messages=ours) == expected
