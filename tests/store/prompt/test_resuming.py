"""Taking what a template has shown already from the text of an earlier turn changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template
from msgspec.structs import replace

from store.prompt.environment import make_environment
from store.prompt.kept import Kept, once
from store.prompt.local import LocalPrompts
from store.prompt.rendering import Renderer, Text
from store.prompt.request import ChatPrompt, Unrenderable
from store.prompt.resuming import PROGRESS, LoopFacts, Past, Progress, keys_of, mark_loop
from store.prompt.template import lists_of_messages
from tests.store.prompt.families import FAMILIES
from tests.store.prompt.pieces import WEATHER, assistant, user
from tests.store.prompt.test_cache import conversations, long_chat


@pytest.fixture(scope="module", params=FAMILIES)
def renderer(request: pytest.FixtureRequest, load: Callable[..., LocalPrompts]) -> Renderer:
    return load(request.param)._renderer  # pyright: ignore[reportPrivateUsage]


def text_of(renderer: Renderer, request: ChatPrompt, past: Past | None = None) -> Text | None:
    try:
        return renderer.render(request, past)
    except Unrenderable:
        return None


@settings(max_examples=100, deadline=None)
@given(states=conversations(), draw=st.data())
def test_a_text_resumed_is_the_text(
    renderer: Renderer, states: list[list[dict[str, Any]]], draw: st.DataObject
) -> None:
    kept: dict[int, Kept] = {}
    past: Past | None = None
    for messages in states:
        plain = ChatPrompt(
            messages=messages,
            add_generation_prompt=draw.draw(st.booleans()),
            tools=draw.draw(st.sampled_from((None, None, [WEATHER]))),
            chat_template_kwargs=draw.draw(
                st.sampled_from(({}, {}, {"enable_thinking": False}, {"content": "x"}, {"bos_token": "b"}))
            ),
        )
        again = [kept.setdefault(id(message), Kept(message, 0)) for message in messages]
        expected = text_of(renderer, plain)
        found = text_of(renderer, replace(plain, messages=again), past)
        assert (found and found.utf8) == (expected and expected.utf8)
        if found is not None and found.shown is not None:
            # Of an earlier text only the beginning may be known.
            known = draw.draw(st.sampled_from((1.0, 1.0, 0.5, 0.0)))
            past = Past(found.shown, found.utf8[: int(known * len(found.utf8))])


# All that a body may read, of every message; and one that writes something else in the same places.
READS = """{{ x }}{% for message in messages %}
({{ loop.index }}{{ message.content }}{{ mark }}
{% if loop.first %}first{% else %}{{ loop.previtem.content }}{% endif %}
{% if loop.last %}last{% else %}{{ loop.nextitem.content }}{% endif %}
{{ (messages[loop.index0 - 2] | default(message)).content }}
{{ (messages[loop.index0 + 2] | default(message)).content }})
{% endfor %}{{ messages | length }}"""
SOURCES = {"one": READS, "other": READS.replace("{{ loop.index }}", "{{ -loop.index }}")}


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[LoopFacts, Template, Template]]:
    """Each template's loop, the template that may resume it, and the template as it is."""
    environment, found = make_environment(), {}
    for name, source in SOURCES.items():
        tree = environment.parse(source)
        loop = mark_loop(tree, lists_of_messages(tree))
        assert loop is not None
        found[name] = (loop, environment.from_string(tree), environment.from_string(source))
    return found


@pytest.fixture(scope="module")
def pool() -> list[Kept]:
    messages = [Kept(user(text), 0) for text in ("a", "é", "漢字", "")]
    for message in messages:
        once(message, "string", dict)
    return messages


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.integers(0, 9) | st.none(),
            st.sampled_from(("begins", "begins", "otherwise")),
            st.sampled_from((1, 1, 1, True)),
            st.sampled_from(("one", "one", "one", "other")),
            st.sampled_from((1.0, 1.0, 0.5)),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_whatever_a_body_reads_is_read_anew_where_it_changed(
    compiled: dict[str, tuple[LoopFacts, Template, Template]], pool: list[Kept], steps: list[Any]
) -> None:
    past: Past | None = None
    for length, edited, before, mark, source, known in steps:
        messages = [pool[(at + (at == edited)) % len(pool)] for at in range(length)]
        names = {"messages": [message.made for message in messages], "x": before, "mark": mark}
        loop, template, whole = compiled[source]
        progress = Progress(source, loop, past, keys_of(messages, names["messages"]))
        found = progress.text(template.root_render_func(template.new_context({**names, PROGRESS: progress})))
        assert found.decode() == whole.render(names)
        assert progress.shown is not None
        past = Past(progress.shown, found[: int(known * len(found))])


def test_all_but_the_last_messages_are_taken_from_the_earlier_text(renderer: Renderer) -> None:
    history = [Kept(message, 0) for message in long_chat(5)]
    first = renderer.render(ChatPrompt(messages=history))
    assert first.shown is not None
    # Only what is taken from there shows what was put into it.
    changed = first.utf8.replace(b"question 3", b"QUESTION 3").replace(b"answer 4", b"ANSWER 4")
    past = Past(first.shown, changed)
    grown = [*history, Kept(assistant("more"), 0)]
    text = renderer.render(ChatPrompt(messages=grown), past).utf8
    assert text.count(b"QUESTION 3") == text.count(b"ANSWER 4") == 150
    assert text.count(b"question 3") == text.count(b"answer 4") == 0
    edited = [*history[:-3], Kept(user("edited"), 0), *history[-2:]]
    text = renderer.render(ChatPrompt(messages=edited), past).utf8
    assert b"edited" in text
    assert b"ANSWER 4" not in text


def facts(body: str, over: str = "messages", before: str = "") -> LoopFacts | None:
    template = f"{before}{{% for message in {over} %}}{body}{{% endfor %}}"
    tree = make_environment().parse(template)
    return mark_loop(tree, lists_of_messages(tree))


@pytest.mark.parametrize(
    "body",
    [
        "{{ loop.length }}",
        "{{ loop.revindex }}",
        "{{ loop.changed(message.role) }}",
        "{{ loop.cycle('a', 'b') }}",
        "{{ loop }}",
        "{{ loop['length'] }}",
        "{{ messages | length }}",
        "{{ messages[-1].role }}",
        "{{ messages[0].role }}",
        "{{ messages[loop.index0 + n].role }}",
        "{{ messages[loop.index].role }}",
        "{{ message.content | random }}",
        "{{ strftime_now('%H') }}",
        "{% set ns.seen = true %}{{ ns.seen }}",
        "{{ counter.next() }}",
        "{{ unknown(message) }}",
        "{{ writes(message) }}",
        "{{ counts() }}",
        "{{ twice() }}",
        "{% set shows = counts %}{{ shows() }}",
        "{% call shows(message) %}{{ loop.length }}{% endcall %}",
        "{% if loop.index > 3 %}{% break %}{% endif %}",
        "{% filter upper %}{{ message.role }}{% endfilter %}",
        "{% for each in messages %}{{ each.role }}{% endfor %}",
        "{% set all = messages %}{{ all[0] }}",
    ],
)
def test_loops_that_may_depend_on_more_are_shown_all_messages(body: str) -> None:
    before = (
        "{% set ns = namespace(seen=false) %}{% macro writes(m) %}{% set ns.seen = true %}{% endmacro %}"
        "{% macro counts() %}{{ messages | length }}{% endmacro %}"
        "{% macro shows(m) %}{{ caller() }}{% endmacro %}"
        "{% if ns %}{% macro twice() %}{{ counts() }}{% endmacro %}{% endif %}"
        "{% macro twice() %}{% endmacro %}"
    )
    assert facts(body, before=before) is None


@pytest.mark.parametrize("over", ["messages | reverse", "(messages if x else y)", "tools", "all()"])
def test_loops_over_something_else_are_left_alone(over: str) -> None:
    assert facts("{{ message.role }}", over) is None


def test_what_a_body_reads_is_found_also_through_macros() -> None:
    before = (
        "{% macro inner(m) %}{{ m.role ~ mark }}{% endmacro %}"
        "{% macro outer(m) %}{{ inner(m) }}{% endmacro %}"
    )
    body = "{{ outer(message) }}{{ messages[loop.index0 - 2].role }}{{ messages[loop.index0 + 3].role }}"
    found = facts(body, before=before)
    assert found is not None
    assert {"mark", "inner", "outer"} <= set(found.names)
    assert (found.back, found.ahead) == (2, 3)


@pytest.mark.parametrize("value", ["[1]", "cycler('a', 'b')", "namespace(inner=[1])"])
def test_names_whose_values_can_not_be_compared_end_it(value: str) -> None:
    source = f"{{% set x = {value} %}}{{% for message in messages %}}{{{{ message.role ~ x }}}}{{% endfor %}}"
    environment = make_environment()
    tree = environment.parse(source)
    loop = mark_loop(tree, lists_of_messages(tree))
    assert loop is not None
    messages = [user("a"), user("b")]
    progress = Progress(source, loop, None, [1, 2])
    context = environment.from_string(tree).new_context({"messages": messages, PROGRESS: progress})
    assert progress.text(environment.from_string(tree).root_render_func(context)).startswith(b"user")
    assert progress.shown is None
