"""What the cache saves changes nothing: tokens and chain equal those of tokenizing the whole prompt."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer

from store.hashing import HashScheme, chain
from store.index import BlockIndex
from store.prompt.kept import Kept
from store.prompt.local import LocalPrompts
from store.prompt.rendering import Renderer
from store.prompt.request import ChatPrompt, Prompt, PromptRequest, TextPrompt, TokensPrompt, Unrenderable
from tests.store.prompt.families import FAMILIES
from tests.store.prompt.pieces import FRAGMENTS, assistant, call, result, system, user

SCHEMES = (HashScheme("sha256_cbor", 16), HashScheme("xxhash", 32, "0"), HashScheme("sha256", 1))

pieces = st.sampled_from((*FRAGMENTS, "filler text, " * 100, "漢字" * 300)) | st.text(max_size=12)
texts = st.lists(pieces, max_size=5).map("".join)
turns = st.one_of(
    st.builds(user, texts),
    st.builds(system, texts),
    st.builds(assistant, texts),
    st.builds(lambda text, why: assistant(text, reasoning=why), texts, texts),
    st.builds(lambda text: assistant(None, tool_calls=[call('{"q": "' + "x" * 400 + '"}')]), texts),
    st.builds(result, texts),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Histories of one session: each the last one going on, cut short, or with a turn edited; and repeats."""
    history = draw(st.lists(turns, min_size=1, max_size=6))
    states = [history]
    for _ in range(draw(st.integers(1, 6))):
        change = draw(st.sampled_from(("go on", "go on", "go on", "repeat", "cut", "edit", "back")))
        if change == "go on":
            history = history + draw(st.lists(turns, min_size=1, max_size=3))
        elif change == "cut":
            history = history[: draw(st.integers(1, len(history)))]
        elif change == "edit":
            at = draw(st.integers(0, len(history) - 1))
            history = [*history[:at], draw(turns), *history[at + 1 :]]
        elif change == "back":
            history = draw(st.sampled_from(states))
        states.append(history)
    return states


@pytest.fixture(scope="module", params=FAMILIES)
def caches(request: pytest.FixtureRequest, load: Callable[..., LocalPrompts]) -> Sequence[LocalPrompts]:
    """One that keeps everything, one that forgets all the time."""
    return load(request.param), load(request.param, cache_bytes=12_000)


def full(prompts: LocalPrompts, request: PromptRequest) -> list[int] | None:
    """The whole prompt through the tokenizer at once, without any of our own parts."""
    renderer: Renderer = prompts._renderer  # pyright: ignore[reportPrivateUsage]
    backend: Tokenizer = prompts._encoder._backend  # pyright: ignore[reportPrivateUsage]
    if isinstance(request, TokensPrompt):
        return request.ids
    try:
        text = renderer.render(request).utf8.decode() if isinstance(request, ChatPrompt) else request.text
    except Unrenderable:
        return None
    return backend.encode(text, add_special_tokens=request.add_special_tokens).ids


def check(
    prompts: LocalPrompts,
    request: PromptRequest,
    scheme: HashScheme,
    lora: tuple[str, str] | None,
    like: PromptRequest | None = None,
) -> None:
    expected = full(prompts, like or request)
    if expected is None:
        with pytest.raises(Unrenderable):
            prompts.prompt(request, scheme, lora=lora)
        return
    prompt = prompts.prompt(request, scheme, lora=lora)
    assert prompt.tokens.tolist() == expected
    assert prompt.chain == chain(expected, scheme, cache_salt=request.cache_salt, lora=lora)


@settings(max_examples=60, deadline=None)
@given(
    states=conversations(),
    scheme=st.sampled_from(SCHEMES),
    salt=st.sampled_from((None, "tenant")),
    lora=st.sampled_from((None, ("adapter", "/path"))),
    prompt=st.booleans(),
    special=st.booleans(),
)
def test_cached_equals_full(
    caches: Sequence[LocalPrompts],
    states: list[list[dict[str, Any]]],
    scheme: HashScheme,
    salt: str | None,
    lora: tuple[str, str] | None,
    prompt: bool,
    special: bool,
) -> None:
    kept: dict[int, Kept] = {}
    for messages in states:
        plain = ChatPrompt(
            messages=messages, cache_salt=salt, add_generation_prompt=prompt, add_special_tokens=special
        )
        again = [kept.setdefault(id(message), Kept(message, 0)) for message in messages]
        request = replace(plain, messages=again)
        for prompts in caches:
            check(prompts, plain, scheme, lora)
            check(prompts, request, scheme, lora, like=plain)


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(texts, min_size=1, max_size=5), scheme=st.sampled_from(SCHEMES), special=st.booleans())
def test_growing_text_prompts(
    caches: Sequence[LocalPrompts], parts: list[str], scheme: HashScheme, special: bool
) -> None:
    text = ""
    for part in parts:
        text += f"<|im_start|><s><start_of_turn><|start_header_id|>{part}"
        for prompts in caches:
            check(prompts, TextPrompt(text=text, add_special_tokens=special), scheme, None)


def test_a_text_that_goes_on_otherwise_where_the_last_one_was_cut_is_not_cut_there(
    caches: Sequence[LocalPrompts],
) -> None:
    """Of a blank before a word the tokenizer makes one token, of one before the token that is cut at two."""
    begin = "<|im_start|><s><start_of_turn><|start_header_id|>"
    for goes_on in (begin, "Hello, world!", begin, ""):
        for prompts in caches:
            text = begin + "filler text, " * 100 + goes_on
            check(prompts, TextPrompt(text=text, add_special_tokens=False), SCHEMES[0], None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_growing_id_prompts(caches: Sequence[LocalPrompts], scheme: HashScheme) -> None:
    ids = [number * 7919 % 1500 for number in range(30_000)]
    for end in (10, 4096, 4097, 9000, 9000, 30_000, 5000):
        for prompts in caches:
            check(prompts, TokensPrompt(ids=ids[:end]), scheme, None)


def long_chat(turns: int) -> list[dict[str, Any]]:
    history = [system("You help. " * 200)]
    for turn in range(turns):
        history += [user(f"question {turn} " * 150), assistant(f"answer {turn} " * 150)]
    return [*history, user("last?")]


def test_a_known_conversation_is_planned_with_only_its_new_text_missing(
    load: Callable[..., LocalPrompts],
) -> None:
    prompts = load("chatml")
    first = ChatPrompt(messages=long_chat(10))
    assert prompts.plan(first, SCHEMES[0]).missing > 30_000
    prompts.finish(prompts.plan(first, SCHEMES[0]))
    assert prompts.plan(first, SCHEMES[0]).missing < 100
    grown = ChatPrompt(messages=[*first.messages, assistant("new " * 100), user("more")])
    assert prompts.plan(grown, SCHEMES[0]).missing < 3000


def test_sessions_with_a_common_head_share_it(load: Callable[..., LocalPrompts]) -> None:
    prompts = load("chatml")
    head = long_chat(10)
    prompts.prompt(ChatPrompt(messages=head), SCHEMES[0])
    before = prompts.cached_tokens
    prompts.prompt(ChatPrompt(messages=[*head[:-1], user("another " * 300)]), SCHEMES[0])
    assert prompts.cached_tokens - before < 1500


def test_b058_salts_and_adapters_are_namespaces_of_their_own(load: Callable[..., LocalPrompts]) -> None:
    """The same tokens in each: an adapter that is called like a salt, or lies elsewhere, is still another."""
    prompts, scheme, index = load("chatml"), SCHEMES[0], BlockIndex()
    ways: dict[str, tuple[str | None, tuple[str, str] | None]] = {
        "base": (None, None),
        "salt a": ("a", None),
        "salt b": ("b", None),
        "adapter a": (None, ("a", "/adapters/a")),
        "adapter a elsewhere": (None, ("a", "/adapters/../adapters/a")),
        "adapter a, salt a": ("a", ("a", "/adapters/a")),
    }

    def prompt(way: str) -> Prompt:
        salt, lora = ways[way]
        return prompts.prompt(ChatPrompt(messages=long_chat(3), cache_salt=salt), scheme, lora=lora)

    for way in ways:
        index.stored(way, prompt(way).chain.keys, None)
    assert len({prompt(way).tokens.tobytes() for way in ways}) == 1
    for way in ways:
        again = prompt(way).chain
        assert index.match(again.keys) == {way: len(again)}


def test_requests_that_differ_only_in_the_type_of_a_number_are_not_mixed_up(
    load: Callable[..., LocalPrompts],
) -> None:
    prompts = load("chatml")
    for value in (1, 1.0, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"default": value}}}
        check(prompts, ChatPrompt(messages=[user("q")], tools=[tool]), SCHEMES[0], None)
    for parameters in ({"a": 1, "b": 2}, {"b": 2, "a": 1}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        check(prompts, ChatPrompt(messages=[user("q")], tools=[tool]), SCHEMES[0], None)


def test_the_cache_keeps_to_its_bytes(load: Callable[..., LocalPrompts]) -> None:
    prompts = load("chatml", cache_bytes=100_000)
    for session in range(20):
        messages = [system(f"session {session}"), *long_chat(4)[1:]]
        prompts.prompt(ChatPrompt(messages=messages), SCHEMES[0])
        assert 0 < prompts.cached_bytes <= 100_000
    assert prompts.plan(ChatPrompt(messages=messages), SCHEMES[0]).missing < 100


def test_memory_per_cached_token(load: Callable[..., LocalPrompts]) -> None:
    prompts = load("chatml")
    for turns in range(20, 40):
        prompts.prompt(ChatPrompt(messages=long_chat(turns)), HashScheme("sha256_cbor", 16))
    assert prompts.cached_bytes / prompts.cached_tokens <= 12


def test_a_tokenizer_whose_tokens_swallow_blanks_is_not_cut(load: Callable[..., LocalPrompts]) -> None:
    assert load("phi").cut_token is None
    assert load("llama3").cut_token == "<|start_header_id|>"  # noqa: S105


def test_text_with_a_lone_surrogate_is_refused(load: Callable[..., LocalPrompts]) -> None:
    prompts = load("chatml")
    for messages in ([user("\ud800")], [user("q"), assistant(None, tool_calls=[call('{"a": "\\ud800"}')])]):
        with pytest.raises(Unrenderable, match="invalid"):
            prompts.prompt(ChatPrompt(messages=messages), SCHEMES[0])


def test_a_seed_nobody_knows_is_unrenderable(load: Callable[..., LocalPrompts]) -> None:
    with pytest.raises(Unrenderable, match="hash_seed_unknown"):
        load("chatml").prompt(TextPrompt(text="x"), HashScheme("xxhash_cbor", 16))
