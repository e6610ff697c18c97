# ruff: noqa: E501 (templates keep the lines of those they follow)
"""Model directories of several tokenizer and template families, small enough to make in a test.

The tokenizers are trained on the corpus' own text, so they are the same everywhere; the templates follow the
published ones of each family in structure. A real vLLM starts on any of them (dummy weights).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.store.prompt.corpus import bodies
from tests.store.prompt.pieces import FRAGMENTS
from workers.launch.byte_level import special, train_byte_level
from workers.launch.tiny_model import WORDS

VOCABULARY = 1500
LLAMA3_WORDS = WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# Reasoning of turns before the last user message is stripped, as Qwen3 does it.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# BOS comes from the template; a first user message swallows the tools; JSON with an indent.
LLAMA3 = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# [INST] is ordinary text here; roles must alternate; only BOS and EOS are special.
LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}{%- set system_message = messages[0]['content'] %}
{%- else %}
    {%- set loop_messages = messages %}{%- set system_message = false %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if loop.index0 == 0 and system_message != false %}
        {%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- else %}
        {%- set content = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Content stays a list of parts, every part is visible in the prompt; whole messages are printed as JSON.
PARTS = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{- '<start_of_turn>' + role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content | trim -}}
    {%- else -%}
        {%- for item in message.content -%}
            {%- if item.type == 'text' -%}{{- item.text | trim -}}{%- if not loop.last %}|{% endif -%}
            {%- else -%}{{- item | tojson -}}{%- endif -%}
            {%- if item.cache_control is defined %}[{{ item.cache_control | tojson }}]{% endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message.tool_calls %}{{- message.tool_calls | tojson -}}{% endif -%}
    {%- if message.reasoning is defined %}{{- '<r>' ~ message.reasoning ~ '</r>' -}}{% endif -%}
    {%- if message.role == 'tool' %}{{- message.tool_call_id ~ message.name -}}{% endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if documents %}{{- documents | tojson -}}{% endif -%}
{%- if tools %}{{- tools | tojson -}}{% endif -%}
{%- if reasoning_effort is defined %}{{- 'effort ' ~ reasoning_effort -}}{% endif -%}
{%- if enable_thinking is defined %}{{- 'thinking ' ~ enable_thinking -}}{% endif -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# Tokens that swallow the blanks after them, a token found in normalised text, the developer role, whole
# messages as JSON: what makes cutting at special tokens a matter of proof.
PHI = """\
{%- for message in messages -%}
    {%- if message.role in ['system', 'developer', 'user', 'assistant'] -%}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
    {%- else -%}
        {{- '<|other|>\\n' + (message | tojson) + '<|end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""


def _text() -> Iterator[str]:
    yield from FRAGMENTS * 3
    for _, body in bodies():
        yield json.dumps(body, ensure_ascii=False)
    yield QWEN3 + LLAMA3 + LLAMA2 + PARTS + PHI


def _chatml() -> tuple[Tokenizer, str, dict[str, Any]]:
    specials = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = train_byte_level(_text(), WORDS, VOCABULARY, specials)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer, QWEN3, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def _llama3() -> tuple[Tokenizer, str, dict[str, Any]]:
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = train_byte_level(_text(), LLAMA3_WORDS, VOCABULARY, special(*names), nfc=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", 0)],
    )
    return tokenizer, LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def _sentencepiece(specials: list[AddedToken], *, legacy: bool) -> Tokenizer:
    """A BPE over blanks as ▁ with byte fallback: with a ▁ in front of each piece (legacy) or of the text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))  # noqa: S106
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*specials, *(AddedToken(f"<0x{i:02X}>", normalized=False) for i in range(256))],
        show_progress=False,
        limit_alphabet=400,
        max_token_length=16,
    )
    # Without words the trainer takes whole texts as one word each; single lines keep it quick.
    lines = (line[:200] for text in _text() for line in text.splitlines())
    tokenizer.train_from_iterator(lines, trainer)
    # The trainer makes the byte tokens special, which no SentencePiece model has: text cannot name them.
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = [each for each in plain["added_tokens"] if not each["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    bos = next(each for each in specials if each.content in {"<s>", "<bos>"}).content
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _llama2() -> tuple[Tokenizer, str, dict[str, Any]]:
    tokenizer = _sentencepiece(special("<unk>", "<s>", "</s>"), legacy=True)
    return tokenizer, LLAMA2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _parts() -> tuple[Tokenizer, str, dict[str, Any]]:
    specials = special("<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
    tokenizer = _sentencepiece(specials, legacy=False)
    return tokenizer, PARTS, {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def _phi() -> tuple[Tokenizer, str, dict[str, Any]]:
    specials = [
        *special("<|endoftext|>"),
        *special("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", rstrip=True),
    ]
    tokenizer = train_byte_level(_text(), WORDS, VOCABULARY, specials)
    tokenizer.add_tokens(
        [AddedToken("café", normalized=True), AddedToken("<|other|>", normalized=False, lstrip=True)]
    )
    return tokenizer, PHI, {"eos_token": "<|endoftext|>"}


FAMILIES: dict[str, Callable[[], tuple[Tokenizer, str, dict[str, Any]]]] = {
    "chatml": _chatml,
    "llama3": _llama3,
    "llama2": _llama2,
    "parts": _parts,
    "phi": _phi,
}


def make_family(name: str, directory: Path) -> Path:
    """Write the model directory of a family, and return it."""
    tokenizer, template, settings = FAMILIES[name]()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 65536, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = {
        "architectures": ["LlamaForCausalLM"],
        # Of the types transformers takes any tokenizer.json for; qwen2 would put its own word split in it.
        "model_type": "llama",
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "max_position_embeddings": 65536,
        "vocab_size": 4096,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return directory
