"""A model directory made on the spot: real enough for vLLM and transformers, without a download.

The weights do not exist (`--load-format dummy` fills them with random numbers); what matters to a gateway
is real: a byte-level BPE tokenizer, a ChatML template with tools, and a config that vLLM accepts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from workers.launch.byte_level import special, train_byte_level

VOCABULARY = 8192
MAX_POSITIONS = 131_072
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# About 3 MB of text is where more text stops changing 8K merges noticeably; training takes about 1 s.
CORPUS_BYTES = 3_000_000
CORPUS_FILE_BYTES = 60_000
STAMP = "recipe.json"
# transformers picks its Qwen2 tokenizer by the config's model type and then sets this normalizer and word
# split, whatever tokenizer.json says. The file says the same, so a plain `tokenizers` load agrees with it.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part.text is defined %}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set lead = namespace(end=0, system='') -%}
{%- if messages and messages[0].role == 'system' -%}
    {%- set lead.end = 1 -%}
    {%- set lead.system = text(messages[0].content) -%}
{%- endif -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if lead.system %}{{- lead.system + '\\n\\n' -}}{%- endif -%}
    {{- '# Tools\\n\\nCall one or more of these functions when that helps the user.\\n\\n<tools>' -}}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\n\\nFor each call answer with a JSON object in tool_call tags:\\n<tool_call>\\n' -}}
    {{- '{"name": <function name>, "arguments": <JSON object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif lead.end -%}
    {{- '<|im_start|>system\\n' + lead.system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[lead.end:] -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {%- if not loop.first or text(message.content) %}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
            {%- if function.arguments is string %}{{- function.arguments -}}
            {%- else %}{{- function.arguments | tojson -}}{%- endif -%}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""


def make_tiny_model(directory: Path) -> Path:
    """Make the model in `directory` unless it is already there, and return `directory`.

    Takes 1 to 2 s the first time. Concurrent calls are safe: each builds apart and the last rename wins.
    Raises OSError when the directory cannot be written.
    """
    stamp = _stamp()
    if _stamped(directory) == stamp:
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        files = {
            "config.json": _json(_config()),
            "generation_config.json": _json(_generation_config()),
            "tokenizer_config.json": _json(_tokenizer_config()),
            "tokenizer.json": _train_tokenizer().to_str(pretty=False),
            "chat_template.jinja": CHAT_TEMPLATE,
            STAMP: _json(stamp),
        }
        for name, content in files.items():
            (scratch / name).write_text(content, encoding="utf-8")
        scratch.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory, ignore_errors=True)
        try:
            os.replace(scratch, directory)
        except OSError:
            if _stamped(directory) != stamp:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        # vLLM's CPU attention takes head sizes from 32 up, so 4 heads need a hidden size of 128: with two
        # KV heads and two layers a block of 32 tokens is 16 KiB in bfloat16.
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "initializer_range": 0.02,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "eos_token_id": [SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>")],
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "do_sample": False,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": MAX_POSITIONS,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }


def _train_tokenizer() -> Tokenizer:
    return train_byte_level(_corpus(), WORDS, VOCABULARY, special(*SPECIAL_TOKENS))


def _corpus() -> Iterator[str]:
    """Sources of the running Python's own standard library, by name, so that every run sees the same text."""
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:CORPUS_FILE_BYTES]
        yield text
        left -= len(text)
        if left <= 0:
            return


def _stamp() -> dict[str, Any]:
    recipe = _json([_config(), _generation_config(), _tokenizer_config(), CHAT_TEMPLATE])
    sizes = [VOCABULARY, CORPUS_BYTES, CORPUS_FILE_BYTES, list(SPECIAL_TOKENS), WORDS]
    return {"recipe": hashlib.sha256(f"{recipe}{sizes}".encode()).hexdigest()}


def _stamped(directory: Path) -> dict[str, Any] | None:
    try:
        return json.loads((directory / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
