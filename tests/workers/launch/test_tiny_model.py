import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from workers.launch.tiny_model import VOCABULARY, make_tiny_model

CALL = {"type": "function", "id": "1", "function": {"name": "read", "arguments": {"path": "a.py"}}}
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "Read", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(tiny_model))


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_the_second_call_changes_nothing(tiny_model: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()}
    assert make_tiny_model(tiny_model) == tiny_model
    assert {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()} == before


def test_every_run_makes_the_same_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


def test_a_model_of_another_recipe_is_made_anew(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "recipe.json").write_text('{"recipe": "another"}')
    (old / "stray.txt").write_text("left by the other recipe")
    make_tiny_model(old)
    assert not (old / "stray.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert json.loads((old / "config.json").read_text())["vocab_size"] == VOCABULARY


def test_no_token_lies_outside_the_embedding(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCABULARY


@pytest.mark.parametrize(
    "text",
    [
        "x = {'a': 1}\n\n\treturn  x",
        "naïve café, ÅngströM",
        "日本語 🙂\r\n",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_a_plain_tokenizers_load_agrees_with_transformers(
    tiny_model: Path, tokenizer: Any, text: str
) -> None:
    plain = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert plain == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(plain) == text


def test_chat_markers_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]


def test_a_growing_conversation_keeps_its_prefix(tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    messages.append({"role": "user", "content": "Read a.py"})
    grown: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
    ]
    first = render(tokenizer, messages, tools=[TOOL], add_generation_prompt=True)
    second = render(tokenizer, messages + grown, tools=[TOOL], add_generation_prompt=True)
    assert second.startswith(first)
    assert second.removeprefix(first) == (
        '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_and_the_system_message_share_one_block(tokenizer: Any) -> None:
    text = render(tokenizer, [{"role": "system", "content": "Be brief."}], tools=[TOOL])
    assert text.count("<|im_start|>system") == 1
    assert "Be brief." in text
    assert json.dumps(TOOL) in text


def test_thinking_can_be_switched_off_and_is_otherwise_untouched(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = render(tokenizer, messages, add_generation_prompt=True)
    assert render(tokenizer, messages, add_generation_prompt=True, enable_thinking=True) == plain
    off = render(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
    assert off == plain + "<think>\n\n</think>\n\n"
