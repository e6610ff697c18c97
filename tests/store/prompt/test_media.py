"""Of a prompt with media the beginning is known, and nothing that depends on an item."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from store.hashing import HashScheme, chain
from store.prompt.local import LocalPrompts
from store.prompt.media import MARK, MediaPart
from store.prompt.rendering import Renderer
from store.prompt.request import ChatPrompt, MessagesPrompt, Prompt, TextPrompt, Unrenderable
from tests.store.prompt.families import make_family
from tests.store.prompt.pieces import FRAGMENTS, assistant, result, system, user

SCHEME = HashScheme("sha256_cbor", 16)
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FILLER = "Some text that fills a block or two. " * 8

texts = st.lists(st.sampled_from((*FRAGMENTS, FILLER, MARK)), max_size=4).map("".join)
plain = st.one_of(st.builds(user, texts), st.builds(assistant, texts), st.builds(result, texts))


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def with_an_image(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    return user([*before, IMAGE, *after])


parts = st.lists(st.builds(text_part, texts), max_size=3)
with_image = st.builds(with_an_image, parts, parts)


def engine_text(prompts: LocalPrompts, request: ChatPrompt, placeholder: str) -> str:
    """What vLLM renders: its placeholder in front of a message's text, or an item for the template."""
    renderer: Renderer = prompts._renderer  # pyright: ignore[reportPrivateUsage]
    _, facts, _ = renderer._template(renderer._source(None))  # pyright: ignore[reportPrivateUsage]
    messages: list[Any] = []
    for message in request.messages:
        content: Any = message.get("content")
        if isinstance(content, list):
            parts = cast(list[dict[str, Any]], content)
            if facts.content_format == "openai":
                content = [MediaPart("image") if part is IMAGE else part for part in parts]
            else:
                texts = [part["text"] for part in parts if part is not IMAGE and part["text"]]
                content = "\n".join([*([placeholder] * parts.count(IMAGE)), *texts])
        messages.append(message | {"content": content})
    chat = ChatPrompt(messages=messages, add_special_tokens=request.add_special_tokens)
    return renderer.render(chat).utf8.decode()


def ids(prompts: LocalPrompts, text: str, *, special: bool = False) -> list[int]:
    backend: Tokenizer = prompts._encoder._backend  # pyright: ignore[reportPrivateUsage]
    return backend.encode(text, add_special_tokens=special).ids


@pytest.fixture(scope="module", params=["chatml", "llama3", "llama2", "parts"])
def prompts(request: pytest.FixtureRequest, load: Callable[..., LocalPrompts]) -> LocalPrompts:
    return load(request.param)


@settings(max_examples=60, deadline=None)
@given(
    head=st.lists(plain, max_size=4),
    image=with_image,
    rest=st.lists(plain | with_image, max_size=3),
    placeholder=st.sampled_from(("<image>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>")),
    special=st.booleans(),
)
def test_the_known_beginning_is_that_of_the_engines_prompt(
    prompts: LocalPrompts,
    head: list[dict[str, Any]],
    image: dict[str, Any],
    rest: list[dict[str, Any]],
    placeholder: str,
    special: bool,
) -> None:
    request = ChatPrompt(messages=[*head, image, *rest], add_special_tokens=special)
    with pytest.raises(Unrenderable):
        prompts.prompt(request, SCHEME)
    try:
        prompt = prompts.prefix(request, SCHEME)
    except Unrenderable:
        return
    found = prompt.tokens.tolist()
    whole = ids(prompts, engine_text(prompts, request, placeholder), special=special)
    assert prompt.partial
    assert found == whole[: len(found)]
    assert len(found) < len(whole)
    assert prompt.chain == chain(found, SCHEME)


def seen(prompts: LocalPrompts, *messages: dict[str, Any]) -> Prompt:
    return prompts.prefix(ChatPrompt(messages=list(messages)), SCHEME)


def test_b018_the_text_before_the_first_image_is_known_and_nothing_beyond(prompts: LocalPrompts) -> None:
    head = [user(FILLER * 3), assistant(FILLER)]
    one = seen(prompts, *head, user([IMAGE, {"type": "text", "text": "What is it?"}]))
    other = seen(prompts, *head, user([{**IMAGE, "image_url": {"url": "other"}}]), assistant("A cat."))
    assert one.tokens.tolist() == other.tokens.tolist()
    # All of the head but for what stands between its last message and the image.
    assert len(one.tokens) > len(ids(prompts, FILLER * 4)) - 10
    assert one.size == len(one.tokens) + 1


def test_a_known_beginning_is_that_of_the_turn_before_the_image_came(
    load: Callable[..., LocalPrompts],
) -> None:
    prompts = load("llama3")
    head = [system(FILLER), user(FILLER * 3), assistant(FILLER)]
    before = prompts.prompt(ChatPrompt(messages=head, add_generation_prompt=False), SCHEME)
    after = seen(prompts, *head, user([IMAGE]))
    assert list(after.chain.keys) == list(before.chain.keys)[: len(after.chain)]
    assert len(after.chain) >= len(before.chain) - 1


def from_template(directory: Path, template: str) -> LocalPrompts:
    make_family("llama3", directory)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return LocalPrompts.load(str(directory))


TURN = "<|start_header_id|>{{ m.role }}<|end_header_id|>\\n\\n"
IMAGES_FIRST = (
    "{% for m in messages %}" + TURN + "{% for c in m.content %}{% if c.type == 'image' %}"
    "<|start_header_id|>image{% endif %}{% endfor %}{% for c in m.content %}{% if c.type == 'text' %}"
    "<|start_header_id|>{{ c.text }}{% endif %}{% endfor %}<|eot_id|>{% endfor %}"
)
NO_SYSTEM_WITH_IMAGES = (
    "{% set ns = namespace(image=false) %}{% for m in messages %}{% for c in m.content %}"
    "{% if c.type == 'image' %}{% set ns.image = true %}{% endif %}{% endfor %}{% endfor %}"
    "{% if not ns.image %}<|start_header_id|>system<|end_header_id|>\\n\\nBe kind.<|eot_id|>{% endif %}"
    "{% for m in messages %}"
    + TURN
    + "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}"
    "[image]{% endif %}{% endfor %}<|eot_id|>{% endfor %}"
)


def test_an_image_that_a_template_writes_in_front_ends_what_is_known(tmp_path: Path) -> None:
    prompts = from_template(tmp_path, IMAGES_FIRST)
    prompt = seen(prompts, user(FILLER), user([{"type": "text", "text": FILLER}, IMAGE]))
    text = prompts.decode(prompt.tokens)
    assert "image" not in text
    assert text.count(FILLER) == 1


def test_a_template_that_begins_otherwise_with_images_leaves_nothing_known(tmp_path: Path) -> None:
    prompts = from_template(tmp_path, NO_SYSTEM_WITH_IMAGES)
    with pytest.raises(Unrenderable, match="multimodal"):
        seen(prompts, user(FILLER), user([IMAGE]))


def test_text_before_an_image_in_its_message_is_known_where_the_template_places_it(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.content %}{{ c.text or '[image]' }}{% endfor %}{% endfor %}"
    )
    prompts = from_template(tmp_path, "<|start_header_id|>" + template)
    text = {"type": "text", "text": FILLER + "<|start_header_id|>look:"}
    assert prompts.decode(seen(prompts, user([text, IMAGE])).tokens) == "<|start_header_id|>" + FILLER


def test_images_of_messages_bodies_are_found_where_vllm_puts_them(load: Callable[..., LocalPrompts]) -> None:
    prompts = load("chatml")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    output = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": FILLER}, image]}
    for content, texts_before in (([image], 1), ([output], 2)):
        request = MessagesPrompt(messages=[user(FILLER), user(content)])
        with pytest.raises(Unrenderable, match="multimodal"):
            prompts.prompt(request, SCHEME)
        assert prompts.decode(prompts.prefix(request, SCHEME).tokens).count(FILLER.strip()) == texts_before


@pytest.mark.parametrize(
    "wrong",
    [
        ChatPrompt(messages=[user("no image")]),
        ChatPrompt(messages=[user(FILLER), user([IMAGE])], truncate_prompt_tokens=5),
        ChatPrompt(messages=[user(FILLER), user([{"type": "unheard_of"}])]),
        TextPrompt(text="x"),
    ],
)
def test_where_nothing_is_known(load: Callable[..., LocalPrompts], wrong: ChatPrompt | TextPrompt) -> None:
    with pytest.raises(Unrenderable, match="multimodal"):
        load("chatml").prefix(wrong, SCHEME)


def test_models_that_put_images_first_and_tokenizers_that_cannot_be_cut(
    family: Callable[[str], Path], load: Callable[..., LocalPrompts], tmp_path: Path
) -> None:
    make_family("chatml", tmp_path)
    config = (tmp_path / "config.json").read_text().replace("LlamaForCausalLM", "MolmoForCausalLM")
    (tmp_path / "config.json").write_text(config)
    for prompts in (LocalPrompts.load(str(tmp_path)), load("phi")):
        with pytest.raises(Unrenderable, match="multimodal"):
            seen(prompts, user(FILLER), user([IMAGE]))
